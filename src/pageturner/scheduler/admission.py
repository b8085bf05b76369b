"""Admission: what is refused at the door, and the form of a promise of KV to an admitted sequence.

Owns the refusals. Must not know the pool or the queue: it is given numbers. The rules of promising
are in policies/reserves.py.
"""

from __future__ import annotations

from collections.abc import Callable

from pageturner.request import Refused
from pageturner.scheduler.types import Sequence

# (sequence, most positions it can ever need, block size) -> (positions it must find room for to be
# admitted, tokens up to which that many blocks stay its promise: behind them the rule is asked
# again)
Reserve = Callable[[Sequence, int, int], tuple[int, int]]


def refuse_queue_full(waiting: int, max_queue: int) -> None:
    """Refused('queue_full') when one more request may not wait."""
    if waiting >= max_queue:
        raise Refused("queue_full", f"{waiting} requests are waiting already: try again later")


def refuse_impossible(seq: Sequence, limit: int, max_model_len: int, capacity: int) -> None:
    """Refused for what can never run: limit is the most tokens the sequence may hold, capacity the
    positions of the whole pool. The last token of a sequence never needs KV."""
    if (length := seq.prompt_len) == 0:
        raise Refused("empty_prompt", "the prompt has no tokens: send at least one")
    if length >= max_model_len:
        message = (
            f"the prompt has {length} tokens and leaves no room for an answer in {max_model_len}"
        )
        raise Refused("prompt_too_long", f"{message}: shorten it")
    if limit - 1 > capacity:
        message = f"the request needs KV for {limit - 1} tokens and there is memory for {capacity}"
        raise Refused(
            "kv_too_small", f"{message}: ask for fewer tokens or give the engine more KV memory"
        )
    if len(seq.tokens) >= limit:
        raise Refused(
            "nothing_to_generate", f"the request already has all {limit} tokens it may have"
        )


def refuse_too_many(sequences: int, slots: int) -> None:
    """Refused('too_many_beams') when a search needs more sequences at once than ever run."""
    if sequences > slots:
        message = f"the search needs {sequences} sequences at once and {slots} run here: ask for fewer beams"
        raise Refused("too_many_beams", f"{message}, or start with a larger --max-num-seqs")
