"""The ledger: what an engine process is doing, noted in memory that it shares with the API process.

Ground floor: both import it. It is there so that the supervisor can tell a crash's suspects and a
hang from the outside, and so that a live view of the batch costs the engine nothing while nobody
looks. Must not know either process.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array
from dataclasses import dataclass

OUT_OF_MEMORY_EXIT = 71  # exit code of an engine process that finds no memory


@dataclass(frozen=True, slots=True)
class NotedStep:
    """A step that somebody watched. Times as time.monotonic; ended: 0 while it runs.

    rows  (request, tokens, whether they are of its prompt or computed again) of each sequence
    """

    number: int
    begun: float
    ended: float
    rows: list[tuple[int, int, bool]]


class Ledger:
    """A note of what the engine is doing, in memory that outlives it: step number, times, ids of
    the step.

    Layout, in words of 64 bits: steps begun, steps finished, begun at, finished at (floats:
    time.monotonic, the same clock in both processes), number of ids, ids. Written by one thread of
    the engine only, and read at any moment: so each word is written in one store, and the number of
    a step behind its time.

    Behind them: until when somebody watches (a float that the API process writes), and while
    somebody does the last steps: number, begun at, ended at, number of rows, rows. Number 0: it is
    being written.

    Then, written by the API process: requests of which somebody wants to know where their time went
    so far, each with until when. At the end the phase of the engine's start, in ASCII.
    """

    CAPACITY = 8000
    STEPS, ROWS = 128, 256  # that are noted for who watches; of a step
    _IDS = 5  # words in front of the ids
    _WATCHED = _IDS + CAPACITY
    _NOTES = _WATCHED + 1
    _NOTE = 4 + ROWS  # words
    ASKED = 8  # requests that are asked for at once
    _ASKED = _NOTES + STEPS * _NOTE
    _PHASE = _ASKED + 2 * ASKED
    WORDS = _PHASE + 1

    def __init__(self, fd: int) -> None:
        whole = memoryview(mmap.mmap(fd, 8 * self.WORDS))
        self._words, self._times = whole.cast("Q"), whole.cast("d")
        self._noted = 0  # where the step is that was noted last

    @classmethod
    def create(cls) -> tuple[Ledger, int]:
        """A new ledger and the file descriptor to hand to the engine process."""
        fd = os.memfd_create("pageturner-ledger")
        os.ftruncate(fd, 8 * cls.WORDS)
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
        if self._noted:
            self._times[self._noted + 2], self._noted = now, 0

    def begin_phase(self, name: str) -> None:
        """The engine starts, and is in this phase: of its name 8 letters."""
        self._words[self._PHASE] = int.from_bytes(name.encode()[:8], "little")

    @property
    def phase(self) -> str:
        return (
            self._words[self._PHASE].to_bytes(8, "little").strip(b"\0").decode("ascii", "replace")
        )

    @property
    def watched(self) -> bool:
        """True while anybody looks at each step."""
        return self._times[self._WATCHED] > time.monotonic()

    def watch(self, until: float) -> None:
        """Somebody looks at each step until then."""
        self._times[self._WATCHED] = until

    def note(self, rows: list[tuple[int, int, bool]]) -> None:
        """The rows of the step that has begun."""
        words, number = self._words, self._words[0]
        at = self._NOTES + number % self.STEPS * self._NOTE
        words[at] = 0
        packed = [
            id & _ID | min(n, _MOST) << 40 | prompt << 63 for id, n, prompt in rows[: self.ROWS]
        ]
        words[at + 4 : at + 4 + len(packed)] = memoryview(array("Q", packed))
        words[at + 3] = len(packed)
        self._times[at + 1], self._times[at + 2] = self._times[2], 0.0
        words[at], self._noted = number, at

    def noted(self, since: int) -> list[NotedStep]:
        """The steps that were noted behind that number, the oldest first. What an engine wrote that
        was overwritten itself may be anything but more than this."""
        words, times, found = self._words, self._times, []
        for at in range(self._NOTES, self._ASKED, self._NOTE):
            number = words[at]
            if number <= since:
                continue
            rows = words[at + 4 : at + 4 + min(words[at + 3], self.ROWS)].tolist()
            step = NotedStep(number, times[at + 1], times[at + 2], [_row(word) for word in rows])
            if words[at] == number:  # not written anew meanwhile
                found.append(step)
        return sorted(found, key=lambda step: step.number)

    def ask(self, id: int, until: float) -> None:
        """Somebody wants to know where the time of this request went, until then; of more than
        ASKED the one whose time is over first gives way."""
        places = range(self._ASKED, self._PHASE, 2)
        at = next((at for at in places if self._words[at] == id), None)
        at = at or min(places, key=lambda at: self._times[at + 1])
        self._words[at], self._times[at + 1] = id, until

    @property
    def asked(self) -> list[int]:
        """Requests that somebody asks for."""
        now = time.monotonic()
        return [
            self._words[at]
            for at in range(self._ASKED, self._PHASE, 2)
            if self._times[at + 1] > now
        ]

    def read(self) -> tuple[int, int, float, float, list[int]]:
        """(steps begun, steps finished, begun at, finished at, ids of the step last begun).

        A time that is none, or has not come yet, is 0: an engine whose memory was overwritten wrote
        it.
        """
        words = self._words
        begun, finished = words[:2]
        times = self._times[2:4].tolist()
        now = time.monotonic()
        begun_at, finished_at = (at if 0 <= at <= now else 0.0 for at in times)
        ids = words[self._IDS : self._IDS + min(words[4], self.CAPACITY)].tolist()
        return begun, finished, begun_at, finished_at, ids


_ID = (
    1 << 40
) - 1  # of a word that is a row: the request, tokens above, whether of its prompt at the top
_MOST = (1 << 23) - 1


def _row(word: int) -> tuple[int, int, bool]:
    return word & _ID, word >> 40 & _MOST, bool(word >> 63)
