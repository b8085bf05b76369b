"""A part of bench/gpu/run.py with tiny shapes on CudaDriver over the stub: `python -m support.cuda_bench PART
MANIFEST`. Its figures mean nothing; it shows that the script asks a real device for nothing wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from pageturner.kernels.gpu import sampling
from pageturner.kernels.gpu.cuda_driver import CudaDriver
from pageturner.kernels.gpu.manifest import Manifest
from support import fake_gpu
from support.stub_cuda import Stub

BENCH = Path(__file__).parents[2] / "bench" / "gpu"


def main() -> None:
    sys.path.insert(0, str(BENCH))
    import run
    import run_ranks

    run_ranks.processes = lambda room: None  # cuda_cases.py has two processes on the stub
    chosen = sampling.sample_on_device

    def of_the_vocabulary(ops: Any, logits: Any, draw: Any) -> tuple[Any, Any]:
        """Nothing is computed, so what is read as tokens is whatever lay there before."""
        ids, values = chosen(ops, logits, draw)
        return ids % logits.shape[1], values

    sampling.sample_on_device = of_the_vocabulary
    manifest = Manifest(Path(sys.argv[2]))

    def open_stub(**_: object) -> CudaDriver:
        driver = CudaDriver(manifest)
        driver.version = ""  # it computes nothing, so nothing is to be proven
        return driver

    fake_gpu.FakeDriver = open_stub  # type: ignore[assignment, misc]
    stub = Stub()
    with tempfile.TemporaryDirectory() as folder:
        run.run_here(sys.argv[1], True, Path(folder))
    assert stub.refused == []
    assert len(stub.launches()) > 10


if __name__ == "__main__":
    main()
