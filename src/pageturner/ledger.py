"""What an engine process is doing, noted in memory that it shares with the API process.

Ground floor: both import it. It is there so that the supervisor can tell a crash's suspects and a hang from
the outside. Must not know either process.
"""

from __future__ import annotations

import mmap
import os
import struct
import time


class Ledger:
    """What the engine is doing, in memory that outlives it: step number, times, ids of the step.

    Layout, little-endian: u64 steps begun, u64 steps finished, f64 begun at, f64 finished at (time.monotonic,
    the same clock in both processes), u32 number of ids, u64 ids. Written by one thread of the engine only.
    """

    CAPACITY = 8000
    _HEAD = struct.Struct("<QQddI4x")

    def __init__(self, fd: int) -> None:
        self._size = self._HEAD.size + 8 * self.CAPACITY
        self._map = mmap.mmap(fd, self._size)

    @classmethod
    def create(cls) -> tuple[Ledger, int]:
        """A new ledger and the file descriptor to hand to the engine process."""
        fd = os.memfd_create("pageturner-ledger")
        os.ftruncate(fd, cls._HEAD.size + 8 * cls.CAPACITY)
        return cls(fd), fd

    def begin(self, now: float, ids: list[int]) -> None:
        begun, finished, _, finished_at, _ = self._HEAD.unpack_from(self._map)
        ids = ids[: self.CAPACITY]
        struct.pack_into(f"<{len(ids)}Q", self._map, self._HEAD.size, *ids)
        self._HEAD.pack_into(self._map, 0, begun + 1, finished, now, finished_at, len(ids))

    def finish(self, now: float) -> None:
        begun, _, begun_at, _, count = self._HEAD.unpack_from(self._map)
        self._HEAD.pack_into(self._map, 0, begun, begun, begun_at, now, count)

    def read(self) -> tuple[int, int, float, float, list[int]]:
        """(steps begun, steps finished, begun at, finished at, ids of the step last begun).

        A time that is none, or has not come yet, is 0: an engine whose memory was overwritten wrote it.
        """
        begun, finished, *times, count = self._HEAD.unpack_from(self._map)
        now = time.monotonic()
        begun_at, finished_at = (at if 0 <= at <= now else 0.0 for at in times)
        ids = struct.unpack_from(f"<{min(count, self.CAPACITY)}Q", self._map, self._HEAD.size)
        return begun, finished, begun_at, finished_at, list(ids)

    def reset(self) -> None:
        """For a new engine process."""
        self._map[: self._HEAD.size] = bytes(self._HEAD.size)
