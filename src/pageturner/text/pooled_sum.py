"""One row for a whole prompt: the sums that an engine sends, put together.

Owns what the sum is divided by, and what becomes of it: its length, its first numbers. Must not
know engines, nor the shape of an answer.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from operator import add

from pageturner.request import POOLED_UNIT


@dataclass(slots=True)
class PooledSum:
    """positions  of the prompt that are in it; total: d sums, empty before the first. Whole
    numbers of 64 bits hold them: the engine sees to that."""

    positions: int = 0
    total: array[int] = field(default_factory=lambda: array("q"))

    def add(self, positions: int, rows: bytes) -> None:
        """The next positions, and the sum of their rows."""
        sums = array("q", rows)
        if self.total and sums:
            self.total = array("q", map(add, self.total, sums))
        else:
            self.total = self.total or sums
        self.positions += positions

    def vector(
        self, pooling: str, *, normalize: bool = True, dimensions: int | None = None
    ) -> list[float]:
        """The pooled row, or as many of its first numbers; of length 1 where it is normalised,
        unless it is zero."""
        count = self.positions if pooling == "mean" else 1
        row = [value * POOLED_UNIT / count for value in self.total[:dimensions]]
        if normalize and (length := math.sqrt(math.fsum(value * value for value in row))):
            row = [value / length for value in row]
        return row
