"""Sharing: which sequences wait for KV that another one is just computing, to share it instead.

Owns three rules: choices of one prompt take over the blocks of the first one, of two prompts that
begin alike the second waits for the first, and branches of a search have the blocks of what they go
on from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.group import Branch, Group
from pageturner.scheduler.types import Sequence, State


def source_of(request: Request, groups: Mapping[int, Group]) -> Sequence | None:
    """The first choice of the same prompt, if it is still here."""
    if request.parent is None or request.parent not in groups:
        return None
    first = groups[request.parent].sequences[0]
    theirs = first.request
    same = (theirs.prompt, theirs.adapter, theirs.salt) == (
        request.prompt,
        request.adapter,
        request.salt,
    )
    return first if same else None


def source_comes_later(seq: Sequence) -> bool:
    """Return whether its source has yet to be admitted for the first time."""
    source = seq.source
    return source is not None and source.state is State.WAITING and source.rank is None


def order_after_prefix_owner(queue: list[Sequence]) -> list[Sequence]:
    """Return the queue with each sequence behind the one that it waits for: else both would wait
    for ever."""
    if not any(map(source_comes_later, queue)):
        return queue
    place = {seq: i for i, seq in enumerate(queue)}

    def where(seq: Sequence) -> tuple[int, bool]:
        later = seq.source is not None and source_comes_later(seq)
        return (
            (max(place[seq], place[seq.source]), True)
            if later and seq.source
            else (place[seq], False)
        )

    return sorted(queue, key=where)


def awaited_prefix(seq: Sequence, running: Iterable[Sequence], pool: BlockPool) -> Sequence | None:
    """The running sequence that is about to have KV which a waiting one would share, if there is
    one. The one that computes it runs, so this wait ends; one that lost its blocks or left is
    waited for no longer."""
    source = seq.source
    if source is not None and seq.logits_from is None:
        on_its_way = source_comes_later(seq) or source.state is State.RUNNING
        if on_its_way and source.computed < seq.prompt_len:
            return source
    for one in running:
        if len(one.tokens) - one.computed > 1:
            same = pool.common_prefix(seq, one)
            if same > one.computed and same > pool.attachable(seq):
                return one
    return None


def apply_branches(branches: list[Branch], sequences: Iterable[Sequence], pool: BlockPool) -> None:
    """Sequences of a search become its branches; a sequence without one gives its blocks back."""
    parents = {branch.parent for branch in branches}
    for seq in sequences:
        if seq not in parents:
            pool.release(seq)
            seq.tokens, seq.max_computed_tokens, seq.block_keys = [], 0, []
    for parent, child, _ in branches:
        if child is not parent:
            pool.fork(parent, child)
            child.tokens, child.max_computed_tokens = (
                list(parent.tokens),
                parent.max_computed_tokens,
            )
    for _, child, token in branches:
        child.tokens.append(token)
