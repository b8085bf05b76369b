"""The plain group: one request, one sequence. When it ends, and what its owner is told of each
step.

Owns stop ids, length limits and the events of such requests. Must not know blocks, budgets or
queues.
"""

from __future__ import annotations

from pageturner.request import Event, Failure, Request
from pageturner.scheduler.group import NOTHING, Change
from pageturner.scheduler.types import Item, Output, Sequence


class SingleSequence:
    """One request, one sequence. If the request carries `resume` tokens, they count as generated
    already."""

    def __init__(self, request: Request) -> None:
        resume = request.resume[0] if request.resume else None
        tokens = [*request.prompt, *(resume.tokens if resume else ())]
        self.sequences = [Sequence(request, index=request.index, tokens=tokens)]
        self.ids = [request.id]

    def join(self, request: Request) -> bool:
        return False

    def leave(self, id: int) -> None:
        self.ids = []

    def take(self, item: Item, output: Output) -> Change:
        seq, tokens = item.sequence, output.tokens
        # drafted tokens in the step; below 0: mid-prompt
        beyond = seq.computed + item.n - len(seq.tokens)
        scored = seq.request.logits_from is not None and item.scored
        told = scored and not seq.request.params.pooling
        if len(output.prompt_logprobs) != (len(scored) if scored and told else 0):
            raise ValueError(
                f"{len(output.prompt_logprobs)} prompt logprobs for the positions {scored}"
            )
        if beyond < 0:
            if tokens:
                raise ValueError("tokens for a sequence that is not computed to its end")
            return Change([], [event_of(seq, [], output)], [], None) if scored else NOTHING
        if not 0 < len(tokens) <= beyond + 1:
            raise ValueError(f"{len(tokens)} tokens from {item.n} computed")
        tokens, finish = until_end(seq, tokens)
        return Change(tokens, [event_of(seq, tokens, output, finish)], [], finish)

    def fail(self, failure: Failure) -> list[Event]:
        event = event_of(self.sequences[0], [], Output(), "error")
        event.failure = failure
        return [event]


def until_end(seq: Sequence, tokens: list[int]) -> tuple[list[int], str | None]:
    """The tokens up to the end of the sequence, and why it ends there, if it does."""
    stop_ids, known = seq.request.params.stop_ids, len(seq.tokens)
    # the length from which on a stop id ends it
    first = seq.prompt_len + seq.request.params.min_tokens
    for length, token in enumerate(tokens, known + 1):
        if token in stop_ids and length >= first:
            return tokens[: length - known], "stop"
        if length >= seq.limit:
            return tokens[: length - known], "length"
    return tokens, None


def event_of(seq: Sequence, tokens: list[int], output: Output, finish: str | None = None) -> Event:
    """Return the event that the sequence gains these tokens, and prompt logprobs from the first
    position not yet scored."""
    event = Event(
        seq.request.id,
        seq.index,
        len(seq.tokens),
        tuple(tokens),
        tuple(output.logprobs[: len(tokens)]) if output.logprobs else (),
        finish,
        None,
        seq.cached,
        seq.recomputed,
    )
    if output.prompt_logprobs or output.pooled:
        event.prompt_logprobs, event.pooled = tuple(output.prompt_logprobs), output.pooled
        event.prompt_position = max(seq.request.logits_from or 0, seq.scored) + 1
    return event
