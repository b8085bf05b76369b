"""Schedulers for tests, made from options by name, and what must be so between any two calls.

The audits read what nobody else may: they are exact and slow, and for tests only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pageturner.block_keys import block_key, root_key, salted_key
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import SchedulerStack, make_scheduler
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.store import GONE, Store
from pageturner.scheduler.types import Sequence, State
from pageturner.telemetry.kv_usage import kv_usage

SIZES = ("num_blocks", "max_model_len", "window", "sliding", "states", "tails", "chunk")
SHORT = {"token_budget": "max_num_batched_tokens", "prefix_caching": "enable_prefix_caching"}


def config_of(**options: Any) -> SchedulerConfig:
    """The settings among these options; two of them have short names here."""
    return SchedulerConfig(
        **{SHORT.get(name, name): value for name, value in options.items() if name not in SIZES}
    )


def make_stack(**options: Any) -> SchedulerStack:
    """A scheduler and what plugs into it: settings of SchedulerConfig and sizes, by name."""
    sizes = {name: options[name] for name in SIZES if name in options}
    return make_scheduler(config_of(**options), **sizes)


def check(stack: SchedulerStack) -> None:
    """AssertionError unless everything that a scheduler and its pool hold is consistent."""
    scheduler = stack.scheduler
    audit_requests(scheduler)
    for seq in scheduler.running:
        for kind in stack.pool.kinds if seq.blocks else ():
            end = seq.computed + seq.inflight
            assert len(kind.table(seq)) == kind.places(end), "spare blocks"
        mine = [item.n for plan in scheduler._plans for item in plan.items if item.sequence is seq]
        assert seq.inflight == sum(mine), "more or less is under way than was planned"
    assert scheduler.pool.full.under_way == bool(scheduler._plans), (
        "blocks are held for nobody, or not held"
    )
    check_pool(stack.pool, [*scheduler.running, *scheduler._leaving, *stack.pins.sequences])


def audit_requests(scheduler: Scheduler) -> None:
    """Queue, running sequences and requests agree with each other."""
    requests, running = scheduler._requests, scheduler.running
    groups = requests.groups
    known = [seq for group in groups.values() for seq in group.sequences]
    idle = [seq for seq in known if seq.state is State.WAITING]
    first = {group.sequences[0] for group in groups.values()}
    ranks = [seq.rank or () for seq in running]
    assert ranks == sorted(ranks), "running sequences are not in rank order"
    assert set(running) == {seq for seq in known if seq.state is State.RUNNING}, "others run"
    assert set(scheduler.waiting) == first & set(idle), "others wait"
    for seq in idle:
        assert (seq.blocks, seq.computed, seq.draft) == ([], 0, []), (
            "a waiting sequence holds something"
        )
    for group in groups.values():
        assert len({seq.state for seq in group.sequences}) == 1, "a search is torn apart"
        assert group.sequences[0].tokens, "the sequence that waits for all has nothing to do"
    for id in requests._joined:
        assert id in requests, "a choice belongs to no search"
    for seq in running:
        end = len(seq.tokens) + (seq.request.params.beam_width > 0)
        assert seq.computed < end, "more is computed than there is"
        assert len(seq.tokens) < seq.limit, "a sequence ran past its end"


def check_pool(pool: BlockPool, sequences: Iterable[Sequence]) -> None:
    """AssertionError unless both stores and all tables are what these owners of all blocks imply."""
    owners = list(sequences)
    for seq in owners:
        check_table(pool, seq)
    for kind in pool.kinds:
        check_store(kind.store, [kind.table(seq) for seq in owners])
    assert kv_usage(owners, pool.full, pool.block_size) == usage_by_blocks(owners, pool.block_size)


def usage_by_blocks(owners: list[Sequence], size: int) -> dict[str, float]:
    """`kv_usage` by a look at each position of each block."""
    needed = sum(seq.computed for seq in owners)
    blocks = {block for seq in owners for block in seq.blocks}
    used = len({(seq.blocks[p // size], p % size) for seq in owners for p in range(seq.computed)})
    reserved = len(blocks) * size
    return {
        "kv_reserved": reserved,
        "kv_used": used,
        "kv_wasted": reserved - used,
        "kv_saved": needed - used,
    }


def check_table(pool: BlockPool, seq: Sequence) -> None:
    size = pool.block_size
    assert len(seq.blocks) * size >= seq.computed, "computed tokens without a block"
    assert seq.num_cached_blocks * size <= seq.computed, "sealed before computed"
    assert len(set(seq.blocks)) == len(seq.blocks), "a block is twice in one table"
    assert seq.public <= seq.num_cached_blocks, "public before sealed"
    key = root_key(pool._model, seq.request.adapter)
    for i, block in enumerate(seq.blocks[: seq.num_cached_blocks]):
        before = key
        if i == seq.public:
            salt = seq.request.salt
            before = (
                salted_key(key, salt) if i else root_key(pool._model, seq.request.adapter, salt)
            )
        key = block_key(before, seq.tokens[i * size : (i + 1) * size])
        assert pool.full.keys[block] == key, "a sealed block is findable under another content"
    for block in seq.blocks[seq.num_cached_blocks :]:
        assert pool.full.keys[block] is None, "a block that is still written can be found"
    check_recurrent(pool, seq)
    assert len(seq.sliding) == (len(seq.blocks) if pool.window else 0), (
        "the tables differ in length"
    )
    released = seq.sliding.released
    if pool.window:
        assert released == pool.kinds[1].first_seen(seq.computed), (
            "a block is kept or given back at the wrong time"
        )
    kept = seq.sliding[released:]
    assert seq.sliding[:released] == [GONE] * released, "a block was not given back"
    assert len(set(kept)) == len(kept), "a sliding block is twice in one table"
    for i, block in enumerate(kept, released):
        beside = pool.full.keys[seq.blocks[i]] if i < seq.num_cached_blocks else None
        assert pool.sliding.keys[block] == beside, (
            "a sliding block is findable beside another content"
        )


def check_recurrent(pool: BlockPool, seq: Sequence) -> None:
    """Of the chunks that are over a sequence has nothing, of the one under way its state and its rows."""
    if pool.states.num_blocks == 0 or not seq.blocks:
        assert {*seq.states, *seq.tail} <= {GONE}
        return
    size, chunk, start = pool.block_size, pool.chunk, seq.computed // pool.chunk
    for table in (seq.states, seq.tail):
        assert table.released == start, "a state or a tail is kept or given back at the wrong time"
        assert table[:start] == [GONE] * start, "a state or a tail was not given back"
        kept = [block for block in table if block != GONE]
        assert len(set(kept)) == len(kept), "a state or a tail is twice in one table"
    assert start == 0 or seq.states[start] != GONE, "the state before the next token is gone"
    assert seq.computed % chunk == 0 or seq.tail[start] != GONE, "rows of the chunk are gone"
    for place in range(start, len(seq.states)):
        slot, position = seq.states[place], place * chunk
        block = position // size - 1
        sealed = place > 0 and position % size == 0 and block < seq.num_cached_blocks
        key = pool.full.keys[seq.blocks[block]] if sealed else None
        if slot != GONE:
            assert pool.states.keys[slot] == key, "a state is findable under another prefix"
    assert not pool.tails.index, "a tail can be found"


def check_store(store: Store, tables: Iterable[list[int]]) -> None:
    """AssertionError unless counts, lists and index are what these tables, all there are, imply."""
    owners = Counter(block for table in tables for block in table if block != GONE)
    refs = [owners[block] for block in range(store.num_blocks)]
    assert refs == store.refs, "reference counts differ from the block tables"
    assert store.shared == sum(count > 1 for count in refs), "the count of shared blocks differs"
    assert store.extra_refs == sum(count - 1 for count in refs if count), (
        "the count of references differs"
    )
    unused = sorted(block for block, n in enumerate(store.refs) if n == 0)
    listed = sorted([*store._empty, *store.cached, *store.held])
    assert unused == listed, "unused blocks differ from the free lists"
    assert all(store.keys[block] is not None for block in store.cached), (
        "a cached block cannot be found"
    )
    assert all(store.keys[block] is None for block in store._empty), "an empty block can be found"
    keyed = {key: block for block, key in enumerate(store.keys) if key is not None}
    assert keyed == store.index, "index and keys differ"


def unowned(store: Store) -> list[int]:
    """Blocks whose content nobody will ask for again: tests poison them."""
    return list(store._empty)
