"""Devices whose kernels fault once: in the first process that takes them, at their 12th result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pageturner.errors import EngineFault
from support.fake_gpu import FakeDriver

MARK = "PAGETURNER_TEST_FAULT_MARK"  # a file that is there once it has faulted
AT = 12


class FaultyDriver(FakeDriver):
    """What was launched tells of its fault when the host waits for it, as CUDA does."""

    def __init__(self) -> None:
        super().__init__()
        self._results = 0

    def download(self, array: NDArray[Any], address: int) -> None:
        self._results += 1
        mark = Path(os.environ[MARK])
        if self._results >= AT and not mark.exists():
            mark.touch()
            raise EngineFault("gpu_fault", "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS")
        super().download(array, address)


class VanishingDriver(FaultyDriver):
    """One that two more processes do not find, once it has faulted."""

    def __init__(self) -> None:
        mark = Path(os.environ[MARK])
        if mark.exists() and len(mark.read_bytes()) < 2:
            with open(mark, "ab") as file:
                file.write(b"x")
            raise EngineFault("gpu_absent", "the GPU has fallen off the bus")
        super().__init__()
