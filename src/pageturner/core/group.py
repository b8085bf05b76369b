"""Groups: the sequences of one request, and the table of all requests that are here.

Owns what the scheduler asks of a group, the plain group of one sequence, and whose sequences are whose. Must
not know blocks, budgets or queues. Groups of several sequences (beam search) are in policies/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pageturner.core.types import Event, Failure, Item, Output, Request, Sequence


class Branch(NamedTuple):
    """`child` goes on as `parent` did, with one more token. The first child of a parent is that parent."""

    parent: Sequence
    child: Sequence
    token: int


class Change(NamedTuple):
    """What becomes of a group behind one item of a step.

    tokens    what the item's sequence gains at once, accepted drafts among them
    events    what whoever waits for the group is told
    branches  how its sequences go on as each other; those without a branch give their blocks back
    finish    why the group has ended, as in Event; None: it goes on
    """

    tokens: list[int]
    events: list[Event]
    branches: list[Branch]
    finish: str | None


class Group(Protocol):
    """The sequences of one request. They wait, are admitted, preempted and end together."""

    sequences: list[Sequence]

    @property
    def ids(self) -> list[int]:
        """The requests that wait for its events."""

    def join(self, request: Request) -> bool:
        """Whether a request is one more choice of this group, which needs no sequences of its own. Then it
        is among `ids` from here on."""

    def leave(self, id: int) -> None:
        """Nobody waits for this request any more."""

    def take(self, item: Item, output: Output) -> Change:
        """Take in what one item gave. It leaves the sequences as they are: the scheduler changes them.
        ValueError for an output that cannot be one of this item."""

    def fail(self, failure: Failure) -> list[Event]:
        """The events of its end without an answer."""


NOTHING = Change([], [], [], None)


class SingleSequence:
    """One request, one sequence; it goes on behind its `resume` tokens if it has some."""

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
        beyond = seq.computed + item.n - len(seq.tokens)  # drafted tokens in the step; below 0: mid-prompt
        scored = seq.request.logits_from is not None and item.scored
        if len(output.prompt_logprobs) != (len(scored) if scored else 0):
            raise ValueError(f"{len(output.prompt_logprobs)} prompt logprobs for the positions {scored}")
        if beyond < 0:
            if tokens:
                raise ValueError("tokens for a sequence that is not computed to its end")
            return Change([], [event_of(seq, [], output)], [], None) if scored else NOTHING
        if not 0 < len(tokens) <= beyond + 1:
            raise ValueError(f"{len(tokens)} tokens from {item.n} computed")
        tokens, finish = until_end(seq, tokens)
        return Change(tokens, [event_of(seq, tokens, output, finish)], [], finish)

    def fail(self, failure: Failure) -> list[Event]:
        seq = self.sequences[0]
        return [
            Event(
                id=seq.request.id,
                index=seq.index,
                position=len(seq.tokens),
                finish="error",
                failure=failure,
                cached=seq.cached,
                recomputed=seq.recomputed,
            )
        ]


def until_end(seq: Sequence, tokens: list[int]) -> tuple[list[int], str | None]:
    """The tokens up to the end of the sequence, and why it ends there, if it does."""
    stop_ids, known = seq.request.params.stop_ids, len(seq.tokens)
    first = seq.prompt_len + seq.request.params.min_tokens  # the length from which on a stop id ends it
    for length, token in enumerate(tokens, known + 1):
        if token in stop_ids and length >= first:
            return tokens[: length - known], "stop"
        if length >= seq.limit:
            return tokens[: length - known], "length"
    return tokens, None


def event_of(seq: Sequence, tokens: list[int], output: Output, finish: str | None = None) -> Event:
    """That the sequence gains these tokens, and prompt logprobs from the first position not yet scored."""
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
    if output.prompt_logprobs:
        event.prompt_logprobs = tuple(output.prompt_logprobs)
        event.prompt_position = (seq.logits_from or 0) + 1
    return event


class Requests:
    """Every request that is here, by its id.

    groups  of each request that has sequences
    """

    def __init__(self, make_group: Callable[[Request], Group]) -> None:
        self.groups: dict[int, Group] = {}
        self._make_group = make_group
        self._joined: dict[int, int] = {}  # a further choice -> the request that has its sequences

    def __contains__(self, id: int) -> bool:
        group = self.groups.get(self._joined.get(id, id))
        return group is not None and id in group.ids

    def group_of(self, id: int) -> Group:
        """KeyError if there is no such request."""
        return self.groups[self._joined.get(id, id)]

    def mates(self, seq: Sequence) -> list[Sequence]:
        """All sequences of its group, itself too."""
        return self.groups[seq.request.id].sequences

    def make(self, request: Request) -> Group:
        """Its group, not yet in the table. Refused for what no group can do."""
        return self._make_group(request)

    def join(self, request: Request) -> bool:
        """Whether it became one more choice of a group that is here."""
        home = None if request.parent is None else self.groups.get(request.parent)
        if home is None or not home.join(request):
            return False
        self._joined[request.id] = home.sequences[0].request.id
        return True

    def leave(self, id: int) -> list[Sequence]:
        """Forget one request. Returns the sequences that nobody wants any more."""
        home = self._joined.pop(id, id)
        group = self.groups[home]
        group.leave(id)
        if group.ids:
            return []
        del self.groups[home]
        return group.sequences

    def remove(self, group: Group) -> None:
        """The group has ended, for all its choices."""
        for id in group.ids:
            self._joined.pop(id, None)
        self.groups.pop(group.sequences[0].request.id, None)
