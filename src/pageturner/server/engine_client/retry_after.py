"""The places of a full server: who may have one, and when somebody who was refused should come
again.

Owns what was promised to those who were refused. Must not know requests or HTTP: it counts places,
and is told the time.

A `Retry-After` that many are told at once is worth nothing when all of them come back at the same
moment, or when others have taken the place until then. So each who is refused is promised a place
of its own, behind those that were promised before; and who comes without a promise gets none that
is kept for others. A client that comes again is known by its request, which is the same. Kept
places are places in the waiting queue, half of all at most: nothing stands still for them as long
as somebody waits.

Under a lasting overload the line grows, and a promise is made to each of many thousands: who came
back without one would find all places kept. Whoever asks often for what he does not come for
lengthens the wait of others at first; but how many promises are taken up is remembered, and of
those before somebody only so many count.

The pace of ends says little where a few answers are far longer than the others. So how much longer
than the pace says somebody is told to wait is learnt from the promises that were broken.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

LATELY = (
    64  # ends of requests from which their pace is known; for a longer wait as many as it is for
)
REMEMBERED = 1024  # of them
UNKNOWN_PACE = 1.0  # seconds between two ends, as long as none were seen
SAFETY = 1.7  # standard deviations of a wait that is left over, when ends come at random
LARGEST_SAFETY = 10.0  # the same where a few answers are far longer than the others
KEPT = 0.95  # share of the promises that should hold: SAFETY grows until so many do
LEARNT = 0.5  # deviations: a broken promise adds KEPT of it, one that holds takes away the rest
EARLY = 0.05  # seconds by which a client may be early
GRACE = 3.0  # seconds behind its time, and a tenth of the wait, after which a promise is forgotten
MAX_PROMISED = 16384  # places; and to one request half of all, which is as many as are ever kept
OUTCOMES = 64  # promises from which it is known how many are taken up
FEWEST = 0.1  # of them are taken to be
SWEPT = 0.5  # seconds between two looks for promises that are to be forgotten
LONGEST = 3600  # seconds that anybody is told to wait


@dataclass(frozen=True, slots=True)
class Promise:
    """A place from `due` on, until it is forgotten."""

    due: float
    until: float
    request: Hashable
    places: int


class RetryAfter:
    """limit: how many there are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._promises: list[Promise] = []  # the earliest first
        self._promised = 0  # places
        self._taken_up = 1.0  # share of the promises of late for which somebody came
        self._swept_at = 0.0
        self._safety = SAFETY
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def ask(self, request: Hashable, taken: int, wanted: int, now: float) -> int:
        """0: so many places may be taken now. Else the whole seconds after which to ask again.

        request  what it is known by
        taken    places that others have
        """
        self._forget(now)
        if not taken:
            self._ends.clear()  # how long nobody asked says nothing about the pace
            self._ends.append(now)
        returned = self._takes_up(request, now)
        kept = 0 if returned else min(self._promised, self.limit // 2)
        fits = wanted <= self.limit - taken - kept
        if wanted <= returned:  # more than was promised may well not fit
            safety = self._safety + LEARNT * (KEPT - fits)
            self._safety = max(SAFETY, min(LARGEST_SAFETY, safety))
        if fits:
            return 0
        before = math.ceil(max(FEWEST, self._taken_up) * self._promised)
        wait = self._sooner(wanted, now) if returned else self._wait_for(before + wanted, now)
        if wanted <= max(1, self.limit // 2) and self._promised < MAX_PROMISED:
            promise = Promise(now + wait, now + 1.1 * wait + GRACE, request, wanted)
            insort(self._promises, promise, key=_due)
            self._promised += wanted
        return wait

    def ended(self, now: float) -> None:
        """A place became free."""
        self._ends.append(now)

    def pace(self, now: float, places: int = 0) -> float:
        """Seconds between two places that become free, of late: over as many as are waited for."""
        count = min(len(self._ends), max(LATELY, places))
        if count < 2:
            return UNKNOWN_PACE
        return (now - self._ends[-count]) / (count - 1)

    def _forget(self, now: float) -> None:
        """Drop the promises whose clients did not come back in time."""
        if now < self._swept_at + SWEPT:
            return
        self._swept_at = now
        before = len(self._promises)
        self._promises = [one for one in self._promises if one.until > now]
        self._taken_up *= (1 - 1 / OUTCOMES) ** (before - len(self._promises))
        self._promised = sum(one.places for one in self._promises)

    def _takes_up(self, request: Hashable, now: float) -> int:
        """Return the places that were promised to this request, if it comes back when it was told
        to. Its promise is removed then."""
        due = bisect_right(self._promises, now + EARLY, key=_due)
        for i, one in enumerate(islice(self._promises, due)):
            if one.request == request:
                del self._promises[i]
                self._promised -= one.places
                self._taken_up += (1 - self._taken_up) / OUTCOMES
                return one.places
        return 0

    def _wait_for(self, places: int, now: float) -> int:
        """Whole seconds in which so many become free, nine times of ten."""
        seconds = self.pace(now, places) * (places + self._safety * math.sqrt(places) + 1)
        return max(1, min(LONGEST, math.ceil(seconds)))

    def _sooner(self, wanted: int, now: float) -> int:
        """The wait of somebody to whom a promise was broken: the first at which all can be kept."""
        places, before = 0, self._promised_by(now) + wanted
        while before > places:
            places = before
            wait = self._wait_for(places, now)
            before = self._promised_by(now + wait) + wanted
        return wait

    def _promised_by(self, when: float) -> int:
        """RetryAfter promised to those who should come by then."""
        due = bisect_right(self._promises, when, key=_due)
        return sum(one.places for one in islice(self._promises, due))


def _due(one: Promise) -> float:
    return one.due
