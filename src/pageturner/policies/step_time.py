"""Step times: seconds of a step over its tokens, from the steps that were made.

Owns the fits. Must not know the clock: it is told what a step took.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from pageturner.scheduler.listener import Listener, StepReport

FORGET = 0.98  # what a step weighs less than the one after it: about fifty count
REMEMBERED_STEPS = 20  # of one size
HICCUP = 4.0  # a step counts as no longer than so many times what its like take


class StepTimeCurve:
    """Seconds of a step of so many tokens, by (tokens, seconds) of sizes that were measured: along
    the lines between them, below the smallest as that one, beyond the largest along the last line.
    Of one size only nothing is known beyond it but that it takes no less. 0 where nothing was
    measured."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self._tokens = [tokens for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # more tokens take no less time
            self._seconds.append(max([seconds, *self._seconds[-1:]]))

    def __call__(self, tokens: float) -> float:
        x, y = self._tokens, self._seconds
        if len(x) < 2 or tokens <= x[0]:
            return y[0] if y else 0.0
        i = min(bisect_left(x, tokens), len(x) - 1)
        return y[i - 1] + (y[i] - y[i - 1]) * (tokens - x[i - 1]) / (x[i] - x[i - 1])


class StepTimeModel:
    """seconds = fixed + each * tokens, by least squares that forget."""

    def __init__(self) -> None:
        self.steps = 0  # measured so far
        self.last = 0.0  # seconds of the last of them
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._sizes: dict[
            int, tuple[int, float, float]
        ] = {}  # octave -> steps, mean tokens, mean seconds

    @property
    def listener(self) -> Listener:
        return Listener(committed=self._committed)

    def _committed(self, report: StepReport) -> None:
        if report.alike:
            self.took_each(report.tokens, report.alike)
        else:
            self.took(report.tokens, report.seconds)

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens was made. A clock that stood still says nothing."""
        self.took_each(tokens, (seconds,))

    def took_each(self, tokens: int, seconds: Iterable[float]) -> None:
        """Steps of so many tokens were made, one after another. A simulator tells millions of
        them."""
        x, octave = float(tokens), tokens.bit_length()
        keep, most, xx = FORGET, REMEMBERED_STEPS, x * x
        weight, sum_x, sum_y, sum_xx, sum_xy = self._weight, self._x, self._y, self._xx, self._xy
        count, mean_x, mean_y = self._sizes.get(octave, (0, x, 0.0))
        for y in seconds:
            if y <= 0:
                continue
            self.steps, self.last = self.steps + 1, y
            weight = keep * weight + 1
            sum_x, sum_y = keep * sum_x + x, keep * sum_y + y
            sum_xx, sum_xy = keep * sum_xx + xx, keep * sum_xy + x * y
            mean_y = mean_y if count else y
            count = count + 1 if count < most else most
            longest = HICCUP * mean_y
            y = y if y < longest else longest
            mean_x, mean_y = mean_x + (x - mean_x) / count, mean_y + (y - mean_y) / count
        self._weight, self._x, self._y, self._xx, self._xy = weight, sum_x, sum_y, sum_xx, sum_xy
        if count:
            self._sizes[octave] = count, mean_x, mean_y

    @property
    def curve(self) -> StepTimeCurve:
        """The seconds of a step by its size. Unlike the line of `each` it remembers prompts through
        any number of steps that only decode."""
        return StepTimeCurve([(x, y) for _, (_, x, y) in sorted(self._sizes.items())])

    @property
    def step(self) -> float:
        """Seconds of a usual step; 0 before the first."""
        return self._y / self._weight if self._weight else 0.0

    @property
    def each(self) -> float:
        """Seconds that one more token adds to a step. Where all steps were alike: its share of the
        step."""
        if not self._x:
            return 0.0
        spread = self._xx * self._weight - self._x * self._x
        if spread <= 1e-6 * self._xx * self._weight:
            return self._y / self._x
        slope = (self._xy * self._weight - self._x * self._y) / spread
        return min(max(slope, 0.0), self._y / self._x)
