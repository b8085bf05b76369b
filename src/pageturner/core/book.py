"""The requests that are here, and whose sequences they are. Must not know the queue, blocks or the budget."""

from __future__ import annotations

from pageturner.core.group import Group, Search
from pageturner.core.types import Request, Sequence


class Book:
    """By id of request.

    groups  every request that has sequences
    joined  other choices of a search, and the request that has its sequences
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.joined: dict[int, int] = {}

    def __contains__(self, id: int) -> bool:
        group = self.groups.get(self.joined.get(id, id))
        return group is not None and (not isinstance(group, Search) or id in group.ids)

    def mates(self, seq: Sequence) -> list[Sequence]:
        """All sequences of its group, itself too."""
        return self.groups[seq.request.id].sequences

    def joins(self, request: Request) -> bool:
        """Whether it is one more choice of a search that is here, and needs no sequences of its own."""
        home = None if request.parent is None else self.groups.get(request.parent)
        if not isinstance(home, Search) or request.params != home.sequences[0].request.params:
            return False
        home.join(request)
        self.joined[request.id] = home.sequences[0].request.id
        return True

    def leave(self, id: int) -> list[Sequence]:
        """Forget the request. The sequences that nobody wants any more."""
        home = self.joined.pop(id, id)
        group = self.groups[home]
        if isinstance(group, Search):
            group.leave(id)
            if group.ids:
                return []
        del self.groups[home]
        return group.sequences

    def strike(self, id: int) -> None:
        """The request whose sequences these were has ended, for all its choices."""
        group = self.groups.pop(id, None)
        for choice in group.ids if isinstance(group, Search) else ():
            self.joined.pop(choice, None)
