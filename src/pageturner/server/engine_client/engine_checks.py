"""Checks of whether what an engine says can be true at all.

Owns what is checked of its messages before anybody uses them: an engine whose memory was
overwritten may say anything that its frames can hold. ValueError names what cannot be; the engine
is then ended. Must not know requests or what becomes of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from pageturner.ipc.channel import Ready
from pageturner.request import Event

FINISHES = frozenset({None, "stop", "length", "abort", "error"})


def check_ready(ready: Ready) -> None:
    """Raise ValueError unless the sizes that an engine reports are plausible."""
    sizes = (ready.max_model_len, ready.num_blocks, ready.block_size, ready.vocab_size)
    if min(sizes) < 1 or max(sizes) > 1 << 40 or min(ready.kv_bytes, ready.token_budget) < 0:
        raise ValueError("an engine of impossible sizes")


def check_events(events: Iterable[Event], vocabulary: int) -> None:
    """All tokens that they name are among so many, and what ends one is a reason."""
    for event in events:
        tokens = event.tokens
        if event.finish not in FINISHES or (
            tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary
        ):
            raise ValueError(f"request {event.id}: a token or an end that there is not")
        if event.logprobs or event.prompt_logprobs:
            _check_likely(event, vocabulary)


def _check_likely(event: Event, vocabulary: int) -> None:
    tops = [top for _, top in event.logprobs] + [top for _, _, top in event.prompt_logprobs]
    if not all(0 <= token < vocabulary for top in tops for token, _ in top):
        raise ValueError(f"request {event.id}: a logprob of a token that there is not")
