"""What the output of a step means for one sequence. Must not know blocks, groups or the queue."""

from __future__ import annotations

from pageturner.core.types import Event, Failure, Output, Sequence


def hit(seq: Sequence, attached: int) -> int:
    """The cache gave so many tokens: those of them that were never computed for this sequence before."""
    fresh = max(0, attached - seq.reached)
    seq.reached += fresh
    seq.cached += fresh
    return fresh


def move(seq: Sequence, end: int) -> int:
    """The KV up to `end` is there. How much of it had been there before, and was computed once more."""
    again = max(0, min(end, seq.reached) - seq.computed)
    seq.recomputed += again
    seq.computed = end
    return again


def cut(seq: Sequence, tokens: list[int]) -> tuple[list[int], str | None]:
    """The tokens up to the end of the sequence, and why it ends there, if it does."""
    params, limit = seq.request.params, seq.limit
    for length, token in enumerate(tokens, len(seq.tokens) + 1):
        if token in params.stop_ids and length - seq.prompt_len >= params.min_tokens:
            return tokens[: length - len(seq.tokens)], "stop"
        if length >= limit:
            return tokens[: length - len(seq.tokens)], "length"
    return tokens, None


def news(
    seq: Sequence,
    position: int,
    tokens: list[int],
    output: Output,
    finish: str | None,
    scored: range,
    failure: Failure | None = None,
) -> Event:
    """That the sequence has these tokens, the first at `position`, and logprobs of `scored` positions."""
    request, logprobs = seq.request, tuple(output.logprobs[: len(tokens)])
    told = (tuple(output.prompt_logprobs), scored.start + 1) if scored else ()
    counts = (seq.cached, seq.recomputed)
    return Event(request.id, seq.index, position, tuple(tokens), logprobs, finish, failure, *counts, *told)
