"""What an engine process is doing, noted in memory that it shares with the API process.

Ground floor: both import it. It is there so that the supervisor can tell a crash's suspects and a hang from
the outside. Must not know either process.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array


class Ledger:
    """What the engine is doing, in memory that outlives it: step number, times, ids of the step.

    Layout, in words of 64 bits: steps begun, steps finished, begun at, finished at (floats: time.monotonic,
    the same clock in both processes), number of ids, ids. Written by one thread of the engine only, and read
    at any moment: so each word is written in one store, and the number of a step behind its time.
    """

    CAPACITY = 8000
    _IDS = 5  # words in front of the ids

    def __init__(self, fd: int) -> None:
        whole = memoryview(mmap.mmap(fd, 8 * (self._IDS + self.CAPACITY)))
        self._words, self._times = whole.cast("Q"), whole.cast("d")

    @classmethod
    def create(cls) -> tuple[Ledger, int]:
        """A new ledger and the file descriptor to hand to the engine process."""
        fd = os.memfd_create("pageturner-ledger")
        os.ftruncate(fd, 8 * (cls._IDS + cls.CAPACITY))
        return cls(fd), fd

    def begin(self, now: float, ids: list[int]) -> None:
        words, count = self._words, min(len(ids), self.CAPACITY)
        words[self._IDS : self._IDS + count] = memoryview(array("Q", ids[:count]))
        words[4] = count
        self._times[2] = now
        words[0] += 1

    def finish(self, now: float) -> None:
        self._times[3] = now
        self._words[1] = self._words[0]

    def read(self) -> tuple[int, int, float, float, list[int]]:
        """(steps begun, steps finished, begun at, finished at, ids of the step last begun).

        A time that is none, or has not come yet, is 0: an engine whose memory was overwritten wrote it.
        """
        words = self._words
        begun, finished = words[0], words[1]
        begun_at, finished_at = self._times[2], self._times[3]
        now = time.monotonic()
        begun_at, finished_at = (at if 0 <= at <= now else 0.0 for at in (begun_at, finished_at))
        ids = words[self._IDS : self._IDS + min(words[4], self.CAPACITY)].tolist()
        return begun, finished, begun_at, finished_at, ids
