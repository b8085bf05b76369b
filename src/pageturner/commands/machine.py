"""What this machine is and what it reaches: processors, memory, limits, measured speed. Linux.

Owns reading /proc and /sys, and three small loops. Must not know models or settings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pageturner import memory
from pageturner.kernels.base import Tensor

BUDGET = 0.3  # seconds for each measurement
READ_BYTES = 128 << 20  # far beyond any cache of a small machine
ROWS, WIDTH = 512, 1024  # of the measured products: as in a prefill
Q4_1_BLOCK = 20  # bytes for 32 weights: fp16 scale, fp16 minimum, 16 bytes of nibbles


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts. Memory in bytes; `quota` in processors, None where there is no limit."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    usable: tuple[int, ...]
    quota: float | None
    load: float
    memory: int
    memory_limit: int | None
    huge_pages: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured limits, all threads together. None: not measured, for the reason that `how` gives."""

    read_gb_s: float | None
    integer_gop_s: float | None
    fp32_gop_s: float | None
    how: str


INTERESTING = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
)


def inspect(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Machine:
    """This machine. `proc` and `sys` are elsewhere in tests."""
    cpuinfo = _read(proc / "cpuinfo")
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    meminfo = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    thp = _read(sys / "kernel/mm/transparent_hugepage/enabled")
    return Machine(
        cpu=fields.get("model name", "unknown"),
        flags=tuple(name for name in INTERESTING if name in flags),
        cores=os.cpu_count() or 1,
        usable=tuple(sorted(os.sched_getaffinity(0))),
        quota=_quota(_read(sys / "fs/cgroup/cpu.max")),
        load=os.getloadavg()[0],
        memory=int(meminfo["MemTotal"].split()[0]) * 1024 if "MemTotal" in meminfo else 0,
        memory_limit=memory.limit(proc, sys),
        huge_pages=thp[thp.find("[") + 1 : thp.find("]")] if "[" in thp else "unknown",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota(text: str) -> float | None:
    """Processors that cgroup v2 allows: `cpu.max` holds a quota and a period in microseconds."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def measure_native(threads: int) -> Speed:
    """Through the engine's own kernels: what they reach, not what the processor could."""
    from pageturner.kernels.native import NativeOps

    ops = NativeOps(threads=threads)
    dice = np.random.default_rng(0)

    def product(kind: str, outputs: int, data: np.ndarray, rows: int) -> float:
        """Seconds of x [rows, WIDTH] times a weight [outputs, WIDTH] transposed."""
        weight = ops.pack_weight(Tensor("probe", kind, (outputs, WIDTH), data))
        x = dice.standard_normal((rows, WIDTH), np.float32)
        return _best(lambda: ops.linear(x, weight))

    wide = READ_BYTES // (4 * WIDTH)
    floats = np.zeros(wide * WIDTH, np.float32).view(np.uint8)
    blocks = np.full(WIDTH * WIDTH // 32 * Q4_1_BLOCK, 0x1C, np.uint8)  # scales of about 0.004
    operations = 2e-9 * ROWS * WIDTH * WIDTH
    return Speed(
        read_gb_s=1e-9 * READ_BYTES / product("F32", wide, floats, 1),
        integer_gop_s=operations / product("Q4_1", WIDTH, blocks, ROWS),
        fp32_gop_s=operations / product("F32", WIDTH, floats[: 4 * WIDTH * WIDTH], ROWS),
        how=f"native kernels ({ops.isa}), {ops.threads} threads: one row times {READ_BYTES >> 20} MiB of fp32"
        f" weights; {ROWS} rows times {WIDTH} x {WIDTH} weights in Q4_1 and in fp32; best of many",
    )


def measure_numpy() -> Speed:
    """Without native kernels: a sum over memory, and a matrix product of numpy's BLAS."""
    numbers = np.zeros(READ_BYTES // 8, np.int64)
    numbers += 1  # untouched zeros would all be one page
    a = np.ones((ROWS, WIDTH), np.float32)
    b = np.ones((WIDTH, WIDTH), np.float32)
    return Speed(
        read_gb_s=1e-9 * READ_BYTES / _best(numbers.sum),
        integer_gop_s=None,
        fp32_gop_s=2e-9 * ROWS * WIDTH * WIDTH / _best(lambda: a @ b),
        how=f"numpy: the sum of {READ_BYTES >> 20} MiB on one thread; a {ROWS} x {WIDTH} x {WIDTH} product by"
        " its BLAS; integer products are not measured without native kernels",
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest call within the budget: the one that nobody disturbed."""
    work()
    least, end = float("inf"), time.perf_counter() + BUDGET
    while time.perf_counter() < end or least == float("inf"):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least
