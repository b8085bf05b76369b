"""Latencies of requests, simulated or real, and the figures made of them.

Owns the definitions of TTFT, TPOT, end-to-end time and goodput. Must not know where the times come
from.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

from pageturner.lab.reporting import summary


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Seconds that a request may take; None: no target. share: of all requests that must meet
    both."""

    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.99

    def met(self, ttft: float, tpot: float) -> bool:
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or tpot <= self.tpot)

    def met_by(self, clock: RequestClock) -> bool:
        """Return whether an answered request met both; an answer of one token has no TPOT to
        miss."""
        tpot = clock.tpot
        return self.met(clock.first - clock.arrival, 0.0 if tpot != tpot else tpot)


@dataclass(slots=True)
class RequestClock:
    """Times of one open request: of its first and its newest token, and the longest gap between
    two."""

    arrival: float
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    gap: float = 0.0
    missed: bool = False
    moves: int = 0  # how often its replica ended under it

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; nan for an answer of one token."""
        more = self.tokens - 1
        return (self.last - self.first) / more if more else float("nan")

    def gained(self, tokens: int, at: float) -> None:
        if self.first < 0:
            self.first = at
        elif at - self.last > self.gap:
            self.gap = at - self.last
        self.last = at
        self.tokens += tokens

    def gained_each(self, ends: list[float], longest: float) -> None:
        """A token at each of these times, between which lie `longest` seconds at most."""
        self.gained(1, ends[0])
        self.gap = max(self.gap, longest)
        self.last = ends[-1]
        self.tokens += len(ends) - 1

    def begin_again(self) -> None:
        """Nothing of the answer so far counts: its first token is the next one."""
        self.first = self.last = -1.0
        self.tokens, self.gap = 0, 0.0


class CertainMisses:
    """Counts, while a simulation runs, the requests that are certain to miss a target: what they
    have spent already is more than it, or they were refused."""

    def __init__(self, targets: LatencyTargets, total: int) -> None:
        self._targets = targets
        self._total = total
        self._unanswered = deque[RequestClock]()  # by arrival
        self.count = 0

    @property
    def share(self) -> float:
        """The share of all requests that may still meet the targets."""
        return (self._total - self.count) / max(self._total, 1)

    @property
    def hopeless(self) -> bool:
        """Return whether too few requests can still meet the targets, whatever comes."""
        return self.share < self._targets.share

    def arrived(self, clock: RequestClock) -> None:
        self._unanswered.append(clock)

    def passes(self, now: float) -> None:
        """No first token comes before `now` any more that was not noted."""
        most = float("inf") if self._targets.ttft is None else self._targets.ttft
        waiting = self._unanswered
        while waiting and (waiting[0].first >= 0 or now - waiting[0].arrival > most):
            if (clock := waiting.popleft()).first < 0:
                self._miss(clock)

    def ended(self, clock: RequestClock) -> None:
        if not self._targets.met_by(clock):
            self._miss(clock)

    def refused(self, clock: RequestClock) -> None:
        self._miss(clock)

    def _miss(self, clock: RequestClock) -> None:
        self.count += not clock.missed
        clock.missed = True


class RequestMetrics:
    """Times of all requests that ended, 40 bytes each."""

    def __init__(self) -> None:
        self.ttft = array("d")
        self.tpot = array("d")  # nan for answers of one token
        self.e2e = array("d")
        self.gap = array("d")
        self.tokens = array("l")
        self.refused = 0
        self.begin = float("inf")
        self.end = 0.0

    def arrived(self, at: float) -> None:
        self.begin = min(self.begin, at)

    def add(self, clock: RequestClock) -> None:
        """Note a request that was answered."""
        self.ttft.append(clock.first - clock.arrival)
        self.tpot.append(clock.tpot)
        self.e2e.append(clock.last - clock.arrival)
        self.gap.append(clock.gap)
        self.tokens.append(clock.tokens)
        self.end = max(self.end, clock.last)

    def refuse(self) -> None:
        self.refused += 1

    def met(self, targets: LatencyTargets) -> int:
        """Requests within both targets; one without a second token has no TPOT to miss."""
        pairs = zip(self.ttft, self.tpot, strict=True)
        return sum(targets.met(ttft, 0.0 if tpot != tpot else tpot) for ttft, tpot in pairs)

    def figures(self, targets: LatencyTargets) -> dict[str, Any]:
        """Counts, rates per second, and spreads in milliseconds (e2e in seconds)."""
        seconds = max(self.end - self.begin, 1e-9) if self.ttft else 0.0
        count, met = len(self.ttft), self.met(targets)
        everybody = count + self.refused
        return {
            "requests": everybody,
            "refused": self.refused,
            "seconds": seconds,
            "output_tokens": sum(self.tokens),
            "output_tokens_per_s": sum(self.tokens) / seconds if seconds else 0.0,
            "requests_per_s": count / seconds if seconds else 0.0,
            "goodput_per_s": met / seconds if seconds else 0.0,
            "goodput_share": met / everybody if everybody else 0.0,
            "goodput_range": summary.share_range(met, everybody),
            "ttft_ms": summary.spread([1e3 * t for t in self.ttft]),
            "tpot_ms": summary.spread([1e3 * t for t in self.tpot if t == t]),
            "longest_gap_ms": summary.spread([1e3 * t for t in self.gap]),
            "e2e_s": summary.spread(list(self.e2e)),
        }
