"""Facts of this machine: processors, memory, limits; and how fast numpy is on it. Linux.

Owns reading /proc and /sys. Must not know models or settings. What native kernels can reach is
measured in kernels/peak.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pageturner import memory


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
    fields = named_lines(proc / "cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    meminfo = named_lines(proc / "meminfo")
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


class LoadMeter:
    """A meter of what the processors of this program did since it was made."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cores = os.sched_getaffinity(0)
        self._begin = self._now()

    def read(self) -> tuple[float, float]:
        """Shares of their time: what other programs took, and other machines on the same
        hardware."""
        busy, stolen, own, at = (
            now - before for now, before in zip(self._now(), self._begin, strict=True)
        )
        whole = max(at * len(self._cores), 1e-9)
        others = (busy - stolen) / os.sysconf("SC_CLK_TCK") - own
        return min(max(others / whole, 0.0), 1.0), min(
            stolen / os.sysconf("SC_CLK_TCK") / whole, 1.0
        )

    def _now(self) -> tuple[float, float, float, float]:
        lines = (
            line.split()
            for line in _read(self._proc / "stat").splitlines()
            if line.startswith("cpu")
        )
        each = {words[0]: _worked(words[1:]) for words in lines}
        mine = [each[name] for name in (f"cpu{number}" for number in self._cores) if name in each]
        own = os.times()
        busy, stolen = (
            (float(sum(values)) for values in zip(*mine, strict=True)) if mine else (0.0, 0.0)
        )
        return busy, stolen, sum(own[:4]), time.monotonic()


def _worked(fields: list[str]) -> tuple[int, int]:
    """Clock ticks with work, and of these the stolen ones, of a line of proc_stat(5)."""
    user, nice, system, _, _, irq, softirq, stolen = (int(field) for field in fields[:8])
    return user + nice + system + irq + softirq + stolen, stolen


def named_lines(path: Path) -> dict[str, str]:
    """The lines of a file of /proc by what stands before their first colon; of several the last. {}
    where it cannot be read."""
    pairs = (line.partition(":") for line in _read(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota(text: str) -> float | None:
    """Processors that cgroup v2 allows: `cpu.max` holds a quota and a period in microseconds."""
    quota, _, period = text.strip().partition(" ")
    return (
        int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
    )


def measure_numpy(nbytes: int = 128 << 20, seconds: float = 0.3) -> tuple[float, float]:
    """Measure without native kernels: GB/s of a sum over `nbytes`, far beyond any cache of a small
    machine, on one thread, and GFLOP/s of a matrix product by numpy's BLAS."""
    numbers = np.zeros(nbytes // 8, np.int64)
    numbers += 1  # untouched zeros would all be one page
    a, b = np.ones((512, 1024), np.float32), np.ones((1024, 1024), np.float32)
    read, product = _best(numbers.sum, seconds), _best(lambda: a @ b, seconds)
    return 1e-9 * numbers.nbytes / read, 2e-9 * a.size * len(b) / product


def _best(work: Callable[[], object], budget: float) -> float:
    """Seconds of the fastest call within the budget: the one that nobody disturbed."""
    work()
    least, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end or least == float("inf"):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least
