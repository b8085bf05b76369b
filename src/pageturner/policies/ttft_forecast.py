"""A forecast of when a waiting request has its first token, from the work in front of it.

Owns the formula: a rough run of the steps to come. Must not know sequences, the clock or who asks:
it is given sizes, and times count from now.

A step of T tokens takes seconds(T). It gives every sequence that decodes its token, and fills the
rest of the budget with prompts, those of who runs first, then of the queue in its order, as places
and memory allow. A sequence ends after as many tokens as its answer is foretold to have, and gives
back its place and its memory. Steps that are alike are taken at once, so a forecast costs about as
many turns as requests begin and end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count


@dataclass(slots=True, eq=False)
class RemainingWork:
    """The remaining work of one request, in tokens.

    prompt    to be computed until its next token is there; 0: it decodes
    answer    tokens still to come, at least 1
    ways      sequences that it is
    reserved  positions of KV that are kept for it once it runs; grows: it takes more with every
              token
    """

    prompt: int
    answer: int
    ways: int = 1
    reserved: int = 0
    grows: bool = True


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of the steps to come. room: positions of KV that nobody holds; apart: prompts are
    computed in steps of their own, which nobody decodes in; seconds: what a step of so many tokens
    takes."""

    slots: int
    budget: int
    room: int
    seconds: Callable[[float], float]
    apart: bool = False


class TtftForecast:
    """A run of the steps to come, until `asked`, one of the waiting, has its first token and all
    others have ended."""

    def __init__(
        self,
        running: Iterable[RemainingWork],
        waiting: Iterable[RemainingWork],
        asked: RemainingWork,
        limits: StepLimits,
    ) -> None:
        self._limits, self._asked = limits, asked
        self._queue, self._prompts = deque(waiting), deque[RemainingWork]()
        self._now, self._steps, self._room = 0.0, 0, limits.room
        self._ends: list[
            tuple[int, int, int, RemainingWork]
        ] = []  # of who decodes: its last step, its tokens
        self._ids = count()
        self._ways = self._places = self._growing = (
            0  # sequences that decode; that run; that take memory
        )
        for work in running:
            self._places += work.ways
            if work.prompt:
                self._prompts.append(work)
            else:
                self._decode(work, work.answer)

    def times(self) -> Iterator[float]:
        """Seconds until `asked` has its first token; then until all others have ended."""
        while self._queue or self._prompts or self._ends:
            joined, tokens, repeats = self._fill()
            decodes = bool(self._ends) and not (self._limits.apart and tokens)
            beside = self._ways if decodes else 0
            self._now += repeats * self._limits.seconds(tokens + beside)
            if decodes:
                self._steps += repeats
                self._room -= repeats * self._growing
            while self._ends and self._ends[0][0] <= self._steps:
                self._leave(*heappop(self._ends)[2:])
            for work in joined:
                if work is self._asked:
                    yield self._now  # and it is not waited for
                elif work.answer > 1:
                    self._decode(work, work.answer - 1)
                    continue
                self._places -= work.ways
                self._room += work.reserved
        yield self._now

    def _fill(self) -> tuple[list[RemainingWork], int, int]:
        """Return whose prompts the next step completes, its tokens of prompts, and for how many
        steps it is so."""
        space = left = max(self._limits.budget - (0 if self._limits.apart else self._ways), 1)
        joined: list[RemainingWork] = []
        while left and (self._prompts or self._admit()):
            first = self._prompts[0]
            taken = min(left, first.prompt)
            first.prompt, left = first.prompt - taken, left - taken
            if first.prompt:
                break
            joined.append(self._prompts.popleft())
        tokens = space - left
        repeats = 1
        if not joined:
            until = self._ends[0][0] - self._steps if self._ends else 0  # somebody ends
            if not tokens:
                return joined, 0, max(until, 1)
            alike = (self._prompts[0].prompt - 1) // space
            if self._ends and not self._limits.apart:
                alike = min(alike, until - 1)
            repeats += max(alike, 0)
            self._prompts[0].prompt -= (repeats - 1) * space
        return joined, tokens, repeats

    def _admit(self) -> bool:
        """Let the first of the queue run, if there is a place and memory; alone, whatever there
        is."""
        if not self._queue:
            return False
        work = self._queue[0]
        fits = self._places + work.ways <= self._limits.slots and work.reserved <= self._room
        if not fits and self._places:
            return False
        self._prompts.append(self._queue.popleft())
        self._places += work.ways
        self._room -= work.reserved
        return True

    def _decode(self, work: RemainingWork, tokens: int) -> None:
        heappush(self._ends, (self._steps + tokens, next(self._ids), tokens, work))
        self._ways += work.ways
        self._growing += work.ways * work.grows

    def _leave(self, tokens: int, work: RemainingWork) -> None:
        self._ways -= work.ways
        self._places -= work.ways
        self._growing -= work.ways * work.grows
        self._room += work.reserved + tokens * work.ways * work.grows
