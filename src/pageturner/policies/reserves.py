"""Reserves: how many tokens of KV an admitted sequence is promised: none, all it may need, or a
forecast.

Owns the reservation rules. Must not know the pool or the queue: they are given numbers. Each says
how many positions it promises, and up to which length of the sequence that many blocks stay the
promise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from sys import maxsize

from pageturner.policies.length_predictor import LengthPredictor
from pageturner.scheduler.admission import Reserve
from pageturner.scheduler.types import Sequence, State

LIKELY = 0.75  # the quantile of the answer's length that `predicted` keeps room for


def reserve_none(seq: Sequence, peak: int, block_size: int) -> tuple[int, int]:
    """Its tokens and one more block: hysteresis, so that an admission preempts nobody in the next
    steps."""
    length = len(seq.tokens)
    return min(length + block_size, peak), -(-length // block_size) * block_size


def reserve_full(seq: Sequence, peak: int, block_size: int) -> tuple[int, int]:
    """Prompt and max_tokens, as Orca does: nobody is ever preempted, much memory lies idle."""
    return peak, maxsize


class ReservePredicted:
    """Prompt and the length of answer that three of four like it do not exceed. Who has exceeded it
    gets a new prediction from there on."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor
        self._ends: dict[Sequence, int] = {}
        self._tidy = 1024  # how many there are when those that have ended are forgotten

    def __call__(self, seq: Sequence, peak: int, block_size: int) -> tuple[int, int]:
        least, until = reserve_none(seq, peak, block_size)
        end = self._ends.get(seq, 0)
        if end < min(len(seq.tokens) + 1, peak):
            # none for the last one
            end = seq.prompt_len + ceil(self._predictor.length(seq, LIKELY)) - 1
            self._ends[seq] = end
            if len(self._ends) > self._tidy:
                self._ends = {
                    one: end for one, end in self._ends.items() if one.state is not State.FINISHED
                }
                self._tidy = 2 * len(self._ends) + 1024
        return max(least, min(end, peak)), until if end >= peak else min(until, end - 1)


# name -> the rule, given the predictor
RESERVES: dict[str, Callable[[LengthPredictor], Reserve]] = {
    "none": lambda _: reserve_none,
    "full": lambda _: reserve_full,
    "predicted": ReservePredicted,
}
