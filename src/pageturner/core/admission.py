"""Admission: what is refused at the door, and how many tokens of KV an admitted sequence is promised.

Owns the refusals and the reservation rules. Must not know the pool or the queue: it is given numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from pageturner.core.predict import Predictor
from pageturner.core.types import Refused, Sequence, State

# (sequence, most positions it can ever need, block size) -> positions it must find room for to be admitted
Reserve = Callable[[Sequence, int, int], int]

LIKELY = 0.75  # the quantile of the answer's length that `predicted` keeps room for


def reserve_none(seq: Sequence, peak: int, block_size: int) -> int:
    """Its tokens and one more block: hysteresis, so that an admission preempts nobody in the next steps."""
    return min(len(seq.tokens) + block_size, peak)


def reserve_full(seq: Sequence, peak: int, block_size: int) -> int:
    """Prompt and max_tokens, as Orca does: nobody is ever preempted, much memory lies idle."""
    return peak


class ReservePredicted:
    """Prompt and the length of answer that three of four like it do not exceed. Who has exceeded it gets a
    new prediction from there on."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._ends: dict[Sequence, int] = {}
        self._tidy = 1024  # how many there are when those that have ended are forgotten

    def __call__(self, seq: Sequence, peak: int, block_size: int) -> int:
        least = reserve_none(seq, peak, block_size)
        end = self._ends.get(seq, 0)
        if end < min(len(seq.tokens) + 1, peak):
            end = seq.prompt_len + ceil(self._predictor.length(seq, LIKELY)) - 1  # none for the last one
            self._ends[seq] = end
            if len(self._ends) > self._tidy:
                self._ends = {one: end for one, end in self._ends.items() if one.state is not State.FINISHED}
                self._tidy = 2 * len(self._ends) + 1024
        return max(least, min(end, peak))


# name -> the rule, given the predictor
RESERVES: dict[str, Callable[[Predictor], Reserve]] = {
    "none": lambda _: reserve_none,
    "full": lambda _: reserve_full,
    "predicted": ReservePredicted,
}


def refuse_queue_full(waiting: int, max_queue: int) -> None:
    """Refused('queue_full') when one more request may not wait."""
    if waiting >= max_queue:
        raise Refused("queue_full", f"{waiting} requests are waiting already: try again later")


def refuse_impossible(seq: Sequence, limit: int, max_model_len: int, capacity: int) -> None:
    """Refused for what can never run: limit is the most tokens the sequence may hold, capacity the positions
    of the whole pool. The last token of a sequence never needs KV."""
    length = seq.prompt_len
    if length == 0:
        raise Refused("empty_prompt", "the prompt has no tokens: send at least one")
    if length >= max_model_len:
        raise Refused(
            "prompt_too_long",
            f"the prompt has {length} tokens and leaves no room for an answer in {max_model_len}: shorten it",
        )
    if limit - 1 > capacity:
        raise Refused(
            "kv_too_small",
            f"the request needs KV for {limit - 1} tokens and there is memory for {capacity}: "
            "ask for fewer tokens or give the engine more KV memory",
        )
    if len(seq.tokens) >= limit:
        raise Refused("nothing_to_generate", f"the request already has all {limit} tokens it may have")


def refuse_too_many(sequences: int, slots: int) -> None:
    """Refused('too_many_beams') when a search needs more sequences at once than ever run."""
    if sequences > slots:
        message = f"the search needs {sequences} sequences at once and {slots} run here: ask for fewer beams"
        raise Refused("too_many_beams", f"{message}, or start with a larger --max-num-seqs")
