"""`make accept NAME=gpu`: what the GPU backend shows without a GPU; on a device bench/gpu/run.py measures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import harness
from harness import Line, pytest_line

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.manifest import Manifest

ON_A_DEVICE = (
    "right: models against Transformers and our CPU, then bits: 0 rows differ",
    "decode of Llama-3.1-8B's shape: at least 75 % of the copy's floor",
    "prefill of 8k tokens: at least 60 % of the bf16 rate",
    "the cost of invariance: at most 5 %",
    "nano-vllm's load on Qwen3-0.6B's shape: at least 25,000 tok/s",
    "start to first token: at most 2 s",
)


def kernels() -> Iterator[Line]:
    """Interpreted kernels against the reference, tiny models, loading."""
    what = "kernels, loading, tiny models on an interpreted device"
    yield pytest_line(what, "-m", "slow or not slow", "tests/gpu")


def manifest() -> Iterator[Line]:
    """Reading the compiled kernels of one architecture."""
    what = "manifest and its checks: under 100 ms"
    begin = time.perf_counter()
    try:
        found = Manifest()
        found.kernels(found.architectures[0])
    except EngineFault as fault:
        yield Line(what, fault.message, None, run=False)
        return
    took = time.perf_counter() - begin
    yield Line(what, f"{1e3 * took:.0f} ms", took < 0.1)


def device() -> Iterator[Line]:
    """What a device must show."""
    for what in ON_A_DEVICE:
        yield Line(what, "needs an NVIDIA GPU: bench/gpu/run.py", None, run=False)


if __name__ == "__main__":
    sys.exit(harness.run("gpu", {"kernels": kernels, "manifest": manifest, "device": device}))
