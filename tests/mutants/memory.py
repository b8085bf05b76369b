"""Seeded bugs of blocks: copies, counts, the prefix index, windows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

from pageturner.scheduler.blocks import BlockPool, block_key
from pageturner.scheduler.store import Pages, Store, Table
from pageturner.scheduler.types import Sequence

from .bugs import Swap, bug, nothing

COW = "a shared block is copied before it is written"
COUNTED = "a block is returned when nobody refers to it, and not before"
CONTENT = "a cached block is found by exactly its content and what is before it"
APART = "what carries a salt is kept apart"
LOGITS = "what has to be computed is computed, however much is cached"
AGE = "children are evicted before their parents"
WINDOW = "a window keeps what is still seen, and gives back what is not"
STATE = "a state is that of all tokens before it, and is there when it is needed"
ROOM = "who is let in finds the room that was promised"


# -- copy-on-write
@bug(COW)
def shared_blocks_written_in_place(swap: Swap) -> None:
    swap.wrap(Store.shared_places, lambda old, *args: [])


@bug(COW)
def copies_forgotten(swap: Swap) -> None:
    def write(old: Any, store: Store, *args: Any) -> None:
        copies = list(store.copies)
        old(store, *args)
        store.copies = copies

    swap.wrap(Store.write, write)


@bug(COW)
def source_of_a_copy_given_out_in_the_same_plan(swap: Swap) -> None:
    def settled(store: Store, *args: Any) -> None:
        copies = store.copies
        store.release_held(store.under_way)
        store.copies = copies

    swap.after(Store.write, settled)


@bug(COW)
def copies_made_again_by_the_next_plan(swap: Swap) -> None:
    def release_held(old: Any, store: Store, under_way: bool) -> None:
        copies = store.copies
        old(store, under_way)
        store.copies = copies

    swap.wrap(Store.release_held, release_held)


# -- counts
@bug(COUNTED)
def forks_counted_by_nobody(swap: Swap) -> None:
    swap.during(BlockPool.fork, Store.share, nothing)


@bug(COUNTED)
def attached_counted_by_nobody(swap: Swap) -> None:
    swap.during(BlockPool.attach, Store.share, nothing)


@bug(COUNTED)
def count_off_by_one(swap: Swap) -> None:
    def share(old: Any, store: Store, table: list[int]) -> None:
        old(store, table)
        old(store, table[-1:])

    swap.wrap(Store.share, share)


@bug(COUNTED)
def drafts_that_were_rejected_keep_their_blocks(swap: Swap) -> None:
    swap.wrap(BlockPool.trim, nothing)


@bug(COUNTED)
def refused_extend_keeps_what_it_took(swap: Swap) -> None:
    def extend(old: Any, pool: BlockPool, seq: Sequence, n: int) -> bool:
        done: bool = old(pool, seq, n)
        if not done and (room := pool.room(seq)):
            old(pool, seq, room)
        return done

    swap.wrap(BlockPool.extend, extend)


@bug(COUNTED)
def computed_stays_when_the_blocks_go(swap: Swap) -> None:
    def release(old: Any, pool: BlockPool, seq: Sequence) -> None:
        computed = seq.computed
        old(pool, seq)
        seq.computed = computed

    swap.wrap(BlockPool.release, release)


# -- the prefix index
def as_if(swap: Swap, method: Any, **fields: Any) -> None:
    """A method of the pool sees a request with other fields."""

    def call(old: Any, pool: BlockPool, seq: Sequence) -> Any:
        request, seq.request = seq.request, replace(seq.request, **fields)
        try:
            return old(pool, seq)
        finally:
            seq.request = request

    swap.wrap(method, call)


@bug(APART)
def salt_ignored(swap: Swap) -> None:
    as_if(swap, BlockPool.match, salt="")
    as_if(swap, BlockPool.cache_full_blocks, salt="")


@bug(APART)
def adapter_ignored(swap: Swap) -> None:
    as_if(swap, BlockPool.match, adapter="")
    as_if(swap, BlockPool.cache_full_blocks, adapter="")


@bug(APART)
def what_is_not_pinned_is_everybodys(swap: Swap) -> None:
    def match(old: Any, pool: BlockPool, seq: Sequence) -> Any:
        public, pool.public = pool.public, frozenset(range(pool.full.num_blocks))
        try:
            return old(pool, seq)
        finally:
            pool.public = public

    swap.wrap(BlockPool.match, match)


@bug(LOGITS)
def cached_prefix_past_the_first_wanted_logits(swap: Swap) -> None:
    as_if(swap, BlockPool.match, logits_from=None)


@bug(LOGITS)
def cached_prefix_of_all_tokens(swap: Swap) -> None:
    def match(old: Any, pool: BlockPool, seq: Sequence) -> Any:
        seq.tokens.append(-1)
        try:
            return old(pool, seq)
        finally:
            seq.tokens.pop()

    swap.wrap(BlockPool.match, match)


@bug(CONTENT)
def keys_without_what_is_before(swap: Swap) -> None:
    swap.wrap(block_key, lambda old, parent, tokens: old(b"", tokens))


@bug(CONTENT)
def sealed_before_computed(swap: Swap) -> None:
    def cache_full_blocks(old: Any, pool: BlockPool, seq: Sequence) -> None:
        more = min(len(seq.tokens), len(seq.blocks) * pool.block_size) - seq.computed
        seq.computed += more
        old(pool, seq)
        seq.computed -= more

    swap.wrap(BlockPool.cache_full_blocks, cache_full_blocks)


@bug(AGE)
def released_head_first(swap: Swap) -> None:
    def truncate(old: Any, store: Store, table: list[int], keep: int) -> None:
        table[keep:] = reversed(table[keep:])
        old(store, table, keep)

    swap.wrap(Store.truncate, truncate)


@bug(AGE)
def the_most_recently_used_goes_first(swap: Swap) -> None:
    def write(old: Any, store: Store, *args: Any) -> None:
        if store.cached and isinstance(store.cached, OrderedDict):  # snapshots have a policy
            store.cached.move_to_end(next(reversed(store.cached)), last=False)
        old(store, *args)

    swap.wrap(Store.write, write)


# -- windows
@bug(WINDOW)
def given_back_while_still_seen(swap: Swap) -> None:
    def give_back(old: Any, store: Store, table: Table, first: int) -> None:
        old(store, table, min(first + 1, len(table)))

    swap.wrap(Store.give_back, give_back)


@bug(WINDOW)
def never_given_back(swap: Swap) -> None:
    swap.wrap(Store.give_back, lambda old, *args: None)


@bug(WINDOW)
def steps_longer_than_the_sliding_blocks(swap: Swap) -> None:
    swap.wrap(BlockPool.longest_step, lambda old, pool, computed: 10**9)


@bug(ROOM, config={"window": 3})
def sliding_blocks_not_promised(swap: Swap) -> None:
    swap.wrap(BlockPool.blocks_needed, lambda old, *args: (old(*args)[0], 0))


@bug(ROOM, config={"window": 0, "states": 8, "tails": 8, "chunk": 2})
def states_not_promised(swap: Swap) -> None:
    swap.wrap(BlockPool.has_states_for, lambda old, *args: True)


# -- recurrent states
RECURRENT = {"window": 0, "states": 20, "tails": 20, "chunk": 3, "prefix_caching": True}


@bug(STATE, config=RECURRENT)
def any_state_goes_with_a_prefix(swap: Swap) -> None:
    def beside(old: Any, pool: BlockPool, kind: Pages, *args: Any) -> int:
        found: int = old(pool, kind, *args)
        return next(iter(pool.states.index.values())) if kind.before and found >= 0 else found

    swap.wrap(BlockPool._beside, beside)


@bug(STATE, config=RECURRENT)
def the_grid_begins_where_a_step_begins(swap: Swap) -> None:
    def written(old: Any, kind: Pages, seq: Sequence, start: int, n: int) -> Any:
        first, end, since = old(kind, seq, start, n)
        return (first, end, end) if kind.before and start % kind.size else (first, end, since)

    swap.wrap(Pages.written, written)


@bug(ROOM, config={"policy": "orca"})
def no_blocks_promised(swap: Swap) -> None:
    swap.wrap(BlockPool.blocks_needed, lambda old, *args: (0, old(*args)[1]))
