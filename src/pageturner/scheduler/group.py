"""Groups: the sequences of one request, and the table of all requests that are here.

Owns what the scheduler asks of a group, and whose sequences are whose. Must not know blocks,
budgets or queues. The groups that exist are in policies/ (single_sequence.py, beam_search.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pageturner.request import Event, Failure, Request
from pageturner.scheduler.types import Item, Output, Sequence


class Branch(NamedTuple):
    """`child` continues `parent` with one more token. A parent's first child is itself, others are
    forks."""

    parent: Sequence
    child: Sequence
    token: int


class Change(NamedTuple):
    """The change of a group behind one item of a step.

    tokens    what the item's sequence gains at once, accepted drafts among them
    events    sent to the requests that wait for the group
    branches  which sequence continues which (beam search); one that is not continued gives its
              blocks back
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
        """Return whether a request is one more choice of this group; then it is among `ids` from
        here on."""

    def leave(self, id: int) -> None:
        """Nobody waits for this request any more."""

    def take(self, item: Item, output: Output) -> Change:
        """Take in what one item gave. It leaves the sequences as they are: the scheduler changes
        them. ValueError for an output that cannot be one of this item."""

    def fail(self, failure: Failure) -> list[Event]:
        """The events of its end without an answer."""


NOTHING = Change([], [], [], None)


class Requests:
    """Every request that is here. groups: of each that has sequences, by its id."""

    def __init__(self, make_group: Callable[[Request], Group]) -> None:
        self.groups: dict[int, Group] = {}
        self.make = make_group  # the group of a request; Refused for what no group can do
        self._joined: dict[int, int] = {}  # a further choice -> the request that has its sequences

    def __contains__(self, id: int) -> bool:
        group = self.groups.get(self._joined.get(id, id))
        return group is not None and id in group.ids

    def group_of(self, id: int) -> Group:
        return self.groups[self._joined.get(id, id)]

    def mates(self, seq: Sequence) -> list[Sequence]:
        """All sequences of its group, itself too."""
        return self.groups[seq.request.id].sequences

    def join(self, request: Request) -> bool:
        """Return whether it became one more choice of a group that is here."""
        home = None if request.parent is None else self.groups.get(request.parent)
        if home is None or not home.join(request):
            return False
        self._joined[request.id] = home.sequences[0].request.id
        return True

    def leave(self, id: int) -> list[Sequence]:
        """Forget one request. Returns the sequences that no request wants any more."""
        home = self._joined.pop(id, id)
        group = self.groups[home]
        group.leave(id)
        return [] if group.ids else self.groups.pop(home).sequences

    def remove(self, group: Group) -> None:
        """The group has ended, for all its choices."""
        for id in group.ids:
            self._joined.pop(id, None)
        self.groups.pop(group.sequences[0].request.id, None)
