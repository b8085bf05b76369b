"""Seconds of a step: a linear model of its work, fitted to measured steps.

Owns the features of a step and the fit. Must not know who measured, nor what is done with the
answer.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from pageturner.errors import EngineFault
from pageturner.private_files import write_json
from pageturner.telemetry.step_log import StepRecord
from pageturner.telemetry.work import StepWork, spans_of_ballast, work_of_spans

Floats = np.ndarray[Any, np.dtype[np.float64]]
# Rows up to which one more costs what its arithmetic costs, not yet its share of a tile.
SMALL = 8
# Rows from which on kernels take other forms, so that a step may take longer by more than its rows.
LEVELS = (2, 3, 5, 9, 17, 33, 65)
ROUNDS = 5  # of a fit: the weights hardly move from the third on
DESCENTS = 2000  # of one of them; it has converged long before


class StepCost(Protocol):
    """Predicts how many seconds steps take."""

    def seconds(self, work: StepWork) -> float: ...

    def ends(self, now: float, rows: int, context: int, steps: int) -> list[float]:
        """The end of each of so many steps in a row, of which each gives `rows` sequences a token:
        bit for bit what adding `seconds` one by one gives. context: that they have computed
        before."""


def one_by_one(now: float, seconds: Floats) -> list[float]:
    """The end of each step; the sums are those of adding one step after another."""
    found: list[float] = np.add.accumulate(np.concatenate(([now], seconds)))[1:].tolist()
    return found


def work_of_step(step: StepRecord, window: int = 0) -> StepWork:
    """The work of a recorded step. Logs of older versions do not hold it: then it is counted from
    the items, as layers with a window of so many positions see it, and rows behind a draft count as
    without logits."""
    if step.work is not None:
        return step.work
    spans = [(item.computed, item.n) for item in step.items] + spans_of_ballast(step.ballast)
    return work_of_spans(
        spans, sum(bool(item.tokens or item.candidates) for item in step.items), window
    )


FEATURES = ("step", "small", "tokens", "sequences", "logits", "context", "pairs")


def features(work: StepWork) -> tuple[float, ...]:
    """The features, as FEATURES names them; `small`: rows, but no more than SMALL."""
    return (1.0, min(work.tokens, SMALL), *work[:5])


class CalibratedCost(msgspec.Struct, frozen=True):
    """Seconds as a sum over FEATURES, each weight 0 or more.

    weights    seconds for each
    levels     seconds more of a step, by how many of LEVELS its rows reach
    error      median and 90th percentile of |predicted - measured| / measured over the steps of the
               fit
    steps      how many these were
    gap        seconds between two steps, in which the engine does other things
    engine     the Header of the log, without its clocks: what the figures are true of
    """

    weights: list[float]
    error: tuple[float, float]
    steps: int
    gap: float
    engine: dict[str, Any]
    levels: list[float] = msgspec.field(default_factory=lambda: [0.0] * (len(LEVELS) + 1))

    def times(self, share: float) -> CalibratedCost:
        """The cost where every step takes so many times as long."""
        weights, levels = ([share * one for one in each] for each in (self.weights, self.levels))
        return msgspec.structs.replace(self, weights=weights, levels=levels)

    def seconds(self, work: StepWork) -> float:
        context, pairs = self.weights[5:]
        return self._rows(*work[:3]) + (context * work.context + pairs * work.pairs)

    def _rows(self, tokens: int, sequences: int, logits: int) -> float:
        """Seconds that do not depend on the context."""
        once, small, token, sequence, logit, _, _ = self.weights
        few = tokens if tokens < SMALL else SMALL
        once += self.gap + self.levels[bisect(LEVELS, tokens)]
        return once + small * few + token * tokens + sequence * sequences + logit * logits

    def ends(self, now: float, rows: int, context: int, steps: int) -> list[float]:
        of_context, of_pairs = self.weights[5:]
        seen = np.arange(context + rows, context + rows * steps + 1, rows, dtype=np.float64)
        return one_by_one(now, self._rows(rows, rows, rows) + (of_context * seen + of_pairs * seen))

    @property
    def understood(self) -> bool:
        """Return whether the weights belong to the features of this program."""
        sizes = len(self.weights), len(self.levels)
        return sizes == (len(FEATURES), len(LEVELS) + 1) and min(self.weights + self.levels) >= 0

    def save(self, path: Path) -> None:
        try:
            write_json(path, self)
        except OSError as error:
            raise EngineFault("calibration", f"cannot write {path}: {error.strerror}") from error


def load_calibration(path: Path) -> CalibratedCost:
    """Read what `save` wrote. EngineFault('calibration') for anything else."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=CalibratedCost)
    except OSError as error:
        raise EngineFault("calibration", f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise EngineFault("calibration", f"{path} is not a calibration: {error}") from error
    if not found.understood:
        raise EngineFault(
            "calibration", f"{path} is of another version: run pageturner calibrate again"
        )
    return found


def fit(steps: Iterable[StepRecord], engine: dict[str, Any]) -> CalibratedCost:
    """The weights, none below 0, with the least squared relative error. EngineFault for too few
    steps.

    Relative to what the fit before it says, not to what was measured: of steps alike, of which some
    took longer by chance, the latter would let the quick ones count most, and the sum over many
    steps come out short. A step that something else on the machine held up says nothing of its
    cost, and is left out.
    """
    steps = [step for step in steps if step.items]
    if len(steps) < 4 * len(FEATURES):
        raise EngineFault(
            "calibration", f"{len(steps)} steps are too few for a fit: {4 * len(FEATURES)} at least"
        )
    works = [work_of_step(step) for step in steps]
    x = np.array([features(work) for work in works])
    x = np.column_stack([x, x[:, [FEATURES.index("tokens")]] >= np.array(LEVELS)])
    y = np.array([step.end - step.start for step in steps])
    y = np.maximum(y, 1e-9)
    keep, scale = np.ones(len(y), dtype=bool), y
    for _ in range(ROUNDS):
        weights = nonnegative_least_squares((x / scale[:, None])[keep], (y / scale)[keep])
        scale = np.maximum(x @ weights, 1e-12)
        ratio = np.abs(np.log(y / scale))
        keep = ratio <= max(3 * float(np.median(ratio)), 0.05)
    error = np.abs(x @ weights - y) / y
    gaps = [b.start - a.end for a, b in itertools.pairwise(steps) if a.running]
    quantiles = (float(np.quantile(error, 0.5)), float(np.quantile(error, 0.9)))
    gap = float(np.median(gaps)) if gaps else 0.0
    own, more = weights[: len(FEATURES)].tolist(), weights[len(FEATURES) :]
    levels = [0.0, *np.cumsum(more).tolist()]
    return CalibratedCost(own, quantiles, len(steps), gap, engine, levels)


def nonnegative_least_squares(a: Floats, b: Floats) -> Floats:
    """The x >= 0 with the least |a x - b|, by Lawson and Hanson, Solving Least Squares Problems,
    1974."""
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    gram, target = (a / scale).T @ (a / scale), (a / scale).T @ b
    x, active = np.zeros(len(target)), np.zeros(len(target), dtype=bool)
    for _ in range(DESCENTS):
        slope = np.where(active, -np.inf, target - gram @ x)
        best = int(np.argmax(slope))
        if slope[best] <= 1e-10 * float(np.abs(target).max()):
            break
        active[best] = True
        while True:
            solved = np.zeros_like(x)
            solved[active] = np.linalg.lstsq(
                gram[np.ix_(active, active)], target[active], rcond=None
            )[0]
            if (solved[active] > 0).all():
                break
            low = active & (solved <= 0)
            share = float(np.min(x[low] / np.maximum(x[low] - solved[low], 1e-300)))
            x = x + share * (solved - x)
            active &= x > 1e-15
            x[~active] = 0.0
        x = solved
    found: Floats = x / scale
    return found
