"""Latencies of requests, simulated or real, and the figures made of them.

Owns the definitions of TTFT, TPOT, end-to-end time and goodput. Must not know where the times come from.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from pageturner.lab import report


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Seconds that a request may take; None: no target. share: of all requests that must meet both."""

    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.99

    def met(self, ttft: float, tpot: float) -> bool:
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or tpot <= self.tpot)


@dataclass(slots=True)
class RequestClock:
    """Times of one open request: of its first and its newest token, and the longest gap between two."""

    arrival: float
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    gap: float = 0.0

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
        more = clock.tokens - 1
        self.tpot.append((clock.last - clock.first) / more if more else float("nan"))
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
            "ttft_ms": report.spread([1e3 * t for t in self.ttft]),
            "tpot_ms": report.spread([1e3 * t for t in self.tpot if t == t]),
            "longest_gap_ms": report.spread([1e3 * t for t in self.gap]),
            "e2e_s": report.spread(list(self.e2e)),
        }
