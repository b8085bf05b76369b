"""The memory that this process may still take: the machine's, less where a control group allows
less. Linux.

Owns the reading of /proc/meminfo and of cgroups, version 1 and 2, and what malloc keeps. Must not
know what the memory is for. Standard library only. Bytes throughout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys")
_UNLIMITED = 1 << 60  # version 1 writes the largest multiple of a page for "no limit"


def available(proc: Path = PROC, sys: Path = SYS) -> int | None:
    """Return the bytes that can still be taken; None where the machine does not say. `proc` and
    `sys` are elsewhere in tests.

    Of the machine MemAvailable; of each control group around this process its limit less what it
    uses. Pages of files that nobody used lately do not count as used: the kernel drops them when
    memory is asked for.
    """
    free = [max(limit - used, 0) for limit, used in _groups(proc, sys)]
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free.append(int(value.split()[0]) * 1024)
    return min(free, default=None)


def limit(proc: Path = PROC, sys: Path = SYS) -> int | None:
    """The smallest limit of a control group around this process; None without one."""
    return min((limit for limit, _ in _groups(proc, sys)), default=None)


def keep_freed() -> None:
    """Have malloc keep up to 256 MiB that were freed. Arrays that each step makes anew then cost no
    pages, which the system clears before it hands them out. Nothing, with another C library."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at most this


def _groups(proc: Path, sys: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every control group around this process that has a limit."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        root = sys / "fs/cgroup"
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # in a container the path may be the host's, which is not there: what is mounted is our own
        # group
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if (found := _group(folder, *names)) is not None:
                yield found
            if folder == root:
                break


def _group(folder: Path, limit: str, usage: str, reclaimable: str) -> tuple[int, int] | None:
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not (most.isdigit() and used.isdigit()) or int(most) >= _UNLIMITED:
        return None
    stat = dict(
        line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line
    )
    return int(most), max(int(used) - int(stat.get(reclaimable, "0")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
