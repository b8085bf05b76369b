"""The places of a full server: who may have one, and when somebody who was refused should come again.

Owns what was promised to those who were refused. Must not know requests or HTTP: it counts places, and is
told the time.

A `Retry-After` that many are told at once is worth nothing when all of them come back at the same moment, or
when others have taken the place until then. So each who is refused is promised a place of its own, behind
those that were promised before; and who comes without a promise gets none that is kept for others. A client
that comes again is known by its request, which is the same. Kept places are places in the waiting queue, half
of all at most: nothing stands still for them as long as somebody waits.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

REMEMBERED = 64  # ends of requests from which their pace is known
UNKNOWN_PACE = 1.0  # seconds between two ends, as long as none were seen
SAFETY = 1.7  # standard deviations of a wait that is left over, when ends come at random
EARLY = 0.05  # seconds by which a client may be early
GRACE = 3.0  # seconds behind its time, and a tenth of the wait, after which a promise is forgotten
MOST_PROMISED = 1024  # places; and to one request half of all, which is as many as are ever kept
LONGEST = 3600  # seconds that anybody is told to wait


@dataclass(frozen=True, slots=True)
class Promise:
    """A place from `due` on, until it is forgotten."""

    due: float
    until: float
    request: Hashable
    places: int


class Places:
    """limit: how many there are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._promises: list[Promise] = []  # the earliest first
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def ask(self, request: Hashable, taken: int, wanted: int, now: float) -> int:
        """0: so many places may be taken now. Else the whole seconds after which to ask again.

        request  what it is known by
        taken    places that others have
        """
        self._promises = [one for one in self._promises if one.until > now]
        if not taken:
            self._ends.clear()  # how long nobody asked says nothing about the pace
            self._ends.append(now)
        due = (one for one in self._promises if one.due <= now + EARLY and one.request == request)
        mine = next(due, None)
        if mine is not None:
            self._promises.remove(mine)
        kept = 0 if mine is not None else min(self._promised(), self.limit // 2)
        if wanted <= self.limit - taken - kept:
            return 0
        wait = self._wait_for(self._promised() + wanted, now) if mine is None else self._sooner(wanted, now)
        if wanted <= max(1, self.limit // 2) and self._promised() < MOST_PROMISED:
            promise = Promise(now + wait, now + 1.1 * wait + GRACE, request, wanted)
            insort(self._promises, promise, key=lambda one: one.due)
        return wait

    def ended(self, now: float) -> None:
        """A place became free."""
        self._ends.append(now)

    def pace(self, now: float) -> float:
        """Seconds between two places that become free, of late."""
        if len(self._ends) < 2:
            return UNKNOWN_PACE
        return (now - self._ends[0]) / (len(self._ends) - 1)

    def _wait_for(self, places: int, now: float) -> int:
        """Whole seconds in which so many become free, nine times of ten."""
        seconds = self.pace(now) * (places + SAFETY * math.sqrt(places) + 1)
        return max(1, min(LONGEST, math.ceil(seconds)))

    def _sooner(self, wanted: int, now: float) -> int:
        """The wait of somebody to whom a promise was broken: the first at which all can be kept."""
        places, before = 0, self._promised(now) + wanted
        while before > places:
            places = before
            wait = self._wait_for(places, now)
            before = self._promised(now + wait) + wanted
        return wait

    def _promised(self, until: float = math.inf) -> int:
        """Places promised to those who should come by then."""
        return sum(one.places for one in self._promises if one.due <= until)
