"""How fast steps are: seconds of a step over its tokens, from the steps that were made.

Owns the fit. Must not know the clock: it is told what a step took.
"""

from __future__ import annotations

FORGET = 0.98  # what a step weighs less than the one after it: about fifty count


class Pace:
    """seconds = fixed + each * tokens, by least squares that forget."""

    def __init__(self) -> None:
        self.steps = 0  # measured so far
        self.last = 0.0  # seconds of the last of them
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens was made. A clock that stood still says nothing."""
        if seconds <= 0:
            return
        self.steps, self.last = self.steps + 1, seconds
        keep, x, y = FORGET, float(tokens), seconds
        self._weight = keep * self._weight + 1
        self._x, self._y = keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    @property
    def step(self) -> float:
        """Seconds of a usual step; 0 before the first."""
        return self._y / self._weight if self._weight else 0.0

    @property
    def each(self) -> float:
        """Seconds that one more token adds to a step. Where all steps were alike: its share of the step."""
        if not self._x:
            return 0.0
        spread = self._xx * self._weight - self._x * self._x
        if spread <= 1e-6 * self._xx * self._weight:
            return self._y / self._x
        slope = (self._xy * self._weight - self._x * self._y) / spread
        return min(max(slope, 0.0), self._y / self._x)
