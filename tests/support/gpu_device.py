"""What the tests of GPU kernels run on: the interpreter, or with PAGETURNER_TEST_GPU=cuda a real device."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("PAGETURNER_TEST_GPU") == "cuda":
    from pageturner.kernels.gpu.cuda_driver import CudaDriver

    def make_driver(architecture: int = 90) -> Any:
        """Of this machine, whatever architecture was asked for."""
        return CudaDriver()

else:
    from support.fake_gpu import FakeDriver

    def make_driver(architecture: int = 90) -> Any:
        """An interpreted one."""
        return FakeDriver(architecture=architecture)
