"""The scheduler's audit of itself: what must be so between any two calls. For tests: exact and slow."""

from __future__ import annotations

from collections.abc import Iterable

from pageturner.core.book import Book
from pageturner.core.group import Search
from pageturner.core.types import Sequence, State


def audit(
    book: Book,
    running: list[Sequence],
    waiting: Iterable[Sequence],
) -> None:
    """AssertionError unless these, by the names that they have in the scheduler, agree with each other."""
    groups = book.groups
    known = [seq for group in groups.values() for seq in group.sequences]
    idle = [seq for seq in known if seq.state is State.WAITING]
    first = {group.sequences[0] for group in groups.values()}
    ranks = [seq.rank or () for seq in running]
    assert ranks == sorted(ranks), "running sequences are not in rank order"
    assert set(running) == {seq for seq in known if seq.state is State.RUNNING}, "others run"
    assert set(waiting) == first & set(idle), "others wait"
    for seq in idle:
        assert (seq.blocks, seq.computed, seq.draft) == ([], 0, []), "a waiting sequence holds something"
    for group in groups.values():
        assert len({seq.state for seq in group.sequences}) == 1, "a search is torn apart"
        assert group.sequences[0].tokens, "the sequence that waits for all has nothing to do"
    for id in book.joined:
        assert id in book, "a choice belongs to no search"
    for seq in running:
        end = len(seq.tokens) + isinstance(groups[seq.request.id], Search)
        assert seq.computed < end, "more is computed than there is"
        assert len(seq.tokens) < seq.limit, "a sequence ran past its end"
