"""The outcomes of the requests that a replica was given, and whether it is put aside for that.

Owns outcomes, patience and trials: pure data, and a clock that it is given. Must not know HTTP or
connections, nor who the other replicas are.

A replica that fails `STRIKES` times in a row, or for half of its latest requests, is put aside: for
a second, and for twice as long each time that it fails again. Then it is tried with one request at
a time, and comes back with the first answer that begins well. Who fails less often than that only
seems busier (`penalty`).

An error may be the fault of the request: a client must not be able to put replicas aside with it.
So an error is only a doubt (`Attempts.suspect`) until another replica has answered the same
request. Who is in as many doubts as strikes gets nothing new until they are settled: a replica that
fails at once always seems idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

STRIKES = 3  # failures in a row
RECENT = 20  # outcomes that are remembered, for RECENT_SECONDS
RECENT_SECONDS = 20.0
FEWEST = 5  # failures among them that say something, and half of all
FIRST_PATIENCE, MAX_PATIENCE = 1.0, 60.0  # seconds
PENALTY = 8  # requests by which a replica seems busier that fails always

_UNDER_WAY, _DOUBTED, _ANSWERED, _SETTLED = range(4)


class Attempt:
    """One request at one replica. Once it is settled, later results change nothing."""

    __slots__ = ("_breaker", "_state", "round", "trial")

    def __init__(self, breaker: Breaker, round: int, trial: bool) -> None:
        self.round, self.trial = round, trial
        self._breaker, self._state = breaker, _UNDER_WAY

    def answered(self) -> None:
        """Its answer has begun, and is no error."""
        if self._state == _UNDER_WAY:
            self._state = _ANSWERED
            self._breaker.answered(self)

    def ended(self) -> None:
        """The answer came whole."""
        if self._state == _ANSWERED:
            self._settle(failed=False, known=True)

    def doubt(self) -> None:
        """Record an error whose cause, the replica or the request, will be known later."""
        if self._state == _UNDER_WAY:
            self._state = _DOUBTED
            self._breaker.doubts(self, 1)

    def failed(self) -> None:
        """The replica is to blame."""
        self._settle(failed=True, known=True)

    def dropped(self) -> None:
        """Settle the attempt without judging the replica."""
        self._settle(failed=False, known=False)

    def _settle(self, *, failed: bool, known: bool) -> None:
        before, self._state = self._state, _SETTLED
        if before == _DOUBTED:
            self._breaker.doubts(self, -1)
        if before != _SETTLED:
            self._breaker.settled(self, failed=failed, known=known)


class Breaker:
    """The outcomes of one replica.

    clock         seconds, never going back
    times_aside   how often it was put aside
    patience      seconds for which it was put aside last
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.times_aside = 0
        self._clock = clock
        # when, and whether it failed
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=RECENT)
        self._strikes = self._doubts = self._trials = 0
        self._aside_until: float | None = None
        self.patience = 0.0
        self._back_at = float("-inf")

    @property
    def aside(self) -> bool:
        """Return whether the replica is put aside."""
        return self._aside_until is not None

    @property
    def share(self) -> float:
        """The share of its latest requests that failed, 0 to 1. A few say little, and count as if
        others had gone well."""
        since = self._clock() - RECENT_SECONDS
        known = [failed for at, failed in self._outcomes if at >= since]
        return sum(known) / max(len(known), FEWEST)

    @property
    def penalty(self) -> int:
        """Requests by which it should seem busier than it is."""
        return round(PENALTY * self.share)

    def admits(self) -> bool:
        """Return whether the replica gets requests: any number, or a single trial."""
        if self._aside_until is not None:
            return self._clock() >= self._aside_until and not self._trials
        return self._strikes + self._doubts < STRIKES

    def badness(self) -> tuple[float, float]:
        """Return how bad the replica is. If no replica admits requests, the one with the least
        badness is asked anyway."""
        return self._aside_until or 0.0, self._strikes + self._doubts

    def begin(self) -> Attempt:
        """It is given a request."""
        self._trials += self.aside
        return Attempt(self, self.times_aside, self.aside)

    def eject(self) -> None:
        """Put it aside for what is not known here."""
        if not self.aside:
            self._put_aside()

    # -- what attempts tell; those from before it was put aside last are of no interest ------------
    def answered(self, attempt: Attempt) -> None:
        if attempt.round != self.times_aside:
            return
        if self.aside:
            self._aside_until, self._back_at = None, self._clock()
            self._trials = 0
            self._outcomes.clear()

    def doubts(self, attempt: Attempt, more: int) -> None:
        if attempt.round == self.times_aside:
            self._doubts += more

    def settled(self, attempt: Attempt, *, failed: bool, known: bool) -> None:
        if attempt.round != self.times_aside:
            return
        if self.aside:
            self._trials -= attempt.trial
            if failed:
                self._put_aside()
        elif known:
            self._outcomes.append((self._clock(), failed))
            self._strikes = self._strikes + 1 if failed else 0
            failures = sum(failed for _, failed in self._outcomes)
            often = failures >= FEWEST and self.share >= 0.5
            if failed and (self._strikes >= STRIKES or often):
                self._put_aside()

    def _put_aside(self) -> None:
        now = self._clock()
        calm = not self.aside and now - self._back_at > MAX_PATIENCE
        self.patience = FIRST_PATIENCE if calm else min(2 * self.patience, MAX_PATIENCE)
        self._aside_until = now + self.patience
        self._strikes = self._doubts = self._trials = 0
        self.times_aside += 1


class Attempts:
    """The attempts at one request, at one replica after another; at the end of the `with` all are
    settled.

    alone  nobody else will be asked: then an error is held against the replica at once
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._all: list[Attempt] = []
        self._suspects: list[Attempt] = []

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        for attempt in self._all:
            attempt.dropped()

    def begin(self, breaker: Breaker) -> Attempt:
        """Begin an attempt at another replica."""
        self._all.append(breaker.begin())
        return self._all[-1]

    def answered(self, attempt: Attempt) -> None:
        """Record that a replica answered, so that the replicas that failed before are to blame."""
        attempt.answered()
        while self._suspects:
            self._suspects.pop().failed()

    def suspect(self, attempt: Attempt) -> None:
        """Record an error that may be the fault of the request."""
        if self._alone:
            attempt.failed()
        else:
            attempt.doubt()
            self._suspects.append(attempt)
