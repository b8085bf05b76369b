"""A histogram as Prometheus wants it: observations by bucket, and their sum.

Owns the counting. Must not know what is counted, nor how it is written (prometheus.py).
"""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts by bucket; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper end, observations up to it), as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows
