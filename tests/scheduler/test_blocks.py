"""BlockPool, rule by rule."""

from __future__ import annotations

import pytest

from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import GONE
from pageturner.scheduler.types import Sequence
from pageturner.telemetry.kv_usage import pool_stats
from support.schedulers import check_pool, unowned


def sequence(
    tokens: list[int], *, salt: str = "", adapter: str = "", logits_from: int | None = None
) -> Sequence:
    request = Request(0, tuple(tokens), salt=salt, adapter=adapter, logits_from=logits_from)
    return Sequence(request, tokens=list(tokens))


def figure(pool: BlockPool, name: str) -> float:
    return pool_stats(pool)[name]


def used(pool: BlockPool) -> float:
    return figure(pool, "blocks_used")


def compute(pool: BlockPool, seq: Sequence, n: int | None = None) -> Sequence:
    """Plan and commit `n` tokens of a sequence (all by default)."""
    n = seq.pending if n is None else n
    assert pool.extend(seq, n)
    pool.release_held()
    seq.computed += n
    pool.cache_full_blocks(seq)
    return seq


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (-1, 16), (4, 0), (4, 257)])
def test_sizes_out_of_range(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"block"):
        BlockPool(blocks, size)


@pytest.mark.parametrize("size", [1, 256])
def test_extreme_block_sizes(size: int) -> None:
    pool = BlockPool(3 * 256 // size, size)
    seq = compute(pool, sequence(list(range(600))))
    assert len(seq.blocks) == pool.blocks_for(600) == -(-600 // size)
    check_pool(pool, [seq])


def test_a_block_is_taken_only_when_a_token_needs_it() -> None:
    pool = BlockPool(8, 4)
    seq = compute(pool, sequence([1, 2, 3, 4, 5]), 4)
    assert used(pool) == 1
    compute(pool, seq, 1)
    assert used(pool) == 2


def test_extend_is_all_or_nothing() -> None:
    pool = BlockPool(3, 2)
    other = compute(pool, sequence([9, 9, 9]))
    seq = sequence([1, 2, 3, 4])
    assert not pool.extend(seq, 4)
    assert (seq.blocks, pool.full.available) == ([], 1)
    assert pool.room(seq) == 2
    assert pool.extend(seq, 2)
    check_pool(pool, [seq, other])


def test_first_write_into_a_shared_block_copies_just_that_block() -> None:
    pool = BlockPool(8, 4)
    src = compute(pool, sequence([1, 2, 3, 4, 5, 6]))
    dst = sequence([1, 2, 3, 4, 5, 6])
    pool.fork(src, dst)
    assert (used(pool), figure(pool, "blocks_shared"), dst.computed) == (2, 2, 6)
    old = src.blocks[1]
    assert pool.extend(src, 1)
    assert pool.full.copies == [(old, src.blocks[1])]
    assert src.blocks[0] == dst.blocks[0]
    assert pool.extend(dst, 1), "the last owner writes in place"
    assert len(pool.full.copies) == 1
    check_pool(pool, [src, dst])


def test_the_source_of_a_copy_is_not_given_out_before_the_copy_was_made() -> None:
    pool = BlockPool(3, 4)
    src = compute(pool, sequence([1, 2]))
    dst = sequence([1, 2])
    pool.fork(src, dst)
    source = src.blocks[0]
    assert pool.extend(src, 1)
    pool.release(dst)
    assert pool.full.available == 1
    third = sequence([7, 7, 7, 7])
    assert pool.extend(third, 4)
    assert source not in third.blocks
    pool.release_held()
    assert pool.full.available == 1
    check_pool(pool, [src, third])


def test_prefix_is_found_by_content_after_its_owner_left() -> None:
    pool = BlockPool(8, 2)
    blocks = compute(pool, first := sequence([1, 2, 3, 4, 5])).blocks[:2]
    pool.release(first)
    assert (used(pool), figure(pool, "blocks_cached")) == (0, 2)
    second = sequence([1, 2, 3, 4, 6])
    assert pool.attach(second) == 4
    assert second.blocks == blocks
    assert used(pool) == 2
    check_pool(pool, [second])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_attach_leaves_the_last_token(length: int) -> None:
    pool = BlockPool(8, 2)
    pool.release(compute(pool, sequence([1, 2, 3, 4, 5, 6])))
    assert pool.attach(sequence([1, 2, 3, 4, 5, 6][:length])) == (length - 1) // 2 * 2


def test_attach_stops_at_logits_from() -> None:
    pool = BlockPool(8, 2)
    pool.release(compute(pool, sequence([1, 2, 3, 4, 5, 6])))
    assert pool.attach(sequence([1, 2, 3, 4, 5, 6], logits_from=3)) == 2
    assert pool.attach(sequence([1, 2, 3, 4, 5, 6], logits_from=0)) == 0


@pytest.mark.parametrize("other", [{"salt": "b"}, {"adapter": "a"}])
def test_salt_and_adapter_keep_prefixes_apart(other: dict[str, str]) -> None:
    pool = BlockPool(8, 2)
    pool.release(compute(pool, sequence([1, 2, 3])))
    assert pool.attach(sequence([1, 2, 3], **other)) == 0
    assert pool.attach(sequence([1, 2, 3])) == 2


def test_equal_blocks_behind_other_parents_do_not_match() -> None:
    pool = BlockPool(8, 2)
    pool.release(compute(pool, sequence([1, 2, 7, 7, 0])))
    assert pool.attach(sequence([7, 7, 0])) == 0
    assert pool.attach(sequence([3, 4, 7, 7, 0])) == 0


def test_nothing_is_found_before_it_is_computed() -> None:
    pool = BlockPool(8, 2)
    seq = sequence([1, 2, 3])
    assert pool.extend(seq, 3)
    assert pool.attach(sequence([1, 2, 3])) == 0


def test_a_sequence_that_fills_an_equal_block_is_switched_to_it() -> None:
    pool = BlockPool(8, 2)
    one, two = sequence([1, 2, 3]), sequence([1, 2, 4])
    assert pool.extend(one, 3)
    assert pool.extend(two, 3)
    assert used(pool) == 4
    for seq in (one, two):
        seq.computed += 3
        pool.cache_full_blocks(seq)
    assert one.blocks[0] == two.blocks[0]
    assert used(pool) == 3
    check_pool(pool, [one, two])


def test_eviction_is_least_recently_used_and_children_before_parents() -> None:
    pool = BlockPool(4, 2)
    for first in (1, 5):
        pool.release(compute(pool, sequence([first, 2, 3, 4])))
    assert (figure(pool, "blocks_cached"), len(unowned(pool.full))) == (4, 0)
    pool.release(compute(pool, sequence([9, 9]), 2))
    assert figure(pool, "evictions") == 1
    assert len(pool.match(sequence([1, 2, 3, 4, 0]))) == 1, "the child of the oldest went first"
    assert len(pool.match(sequence([5, 2, 3, 4, 0]))) == 2


def test_a_used_prefix_moves_to_the_end_of_the_queue() -> None:
    pool = BlockPool(3, 2)
    for first in (1, 2, 3):
        pool.release(compute(pool, sequence([first, 0])))
    again = sequence([1, 0, 5])
    assert pool.attach(again) == 2
    pool.release(again)
    compute(pool, sequence([8, 8]))
    assert pool.match(sequence([1, 0, 5]))
    assert not pool.match(sequence([2, 0, 5]))


def test_a_key_names_what_comes_before_it() -> None:
    """A child that outlived its parent must not be found behind a new parent in the same block."""
    pool = BlockPool(2, 1)
    seq = compute(pool, sequence([1, 2]))
    parent, child = seq.blocks
    pool.release(seq)
    pool.full.cached.move_to_end(child)  # against the rules: the child is now the younger one
    compute(pool, new := sequence([5]))
    assert new.blocks == [parent]
    assert len(pool.match(sequence([5, 2, 0]))) == 1


def test_trim_gives_back_what_rejected_drafts_took() -> None:
    pool = BlockPool(8, 2)
    seq = sequence([1, 2, 3])
    seq.draft = [4, 5, 6]
    assert pool.extend(seq, 6)
    seq.computed = 3
    pool.trim(seq)
    assert len(seq.blocks) == 2
    check_pool(pool, [seq])


# -- windows -------------------------------------------------------------------------------------------------
def windowed(window: int, *, blocks: int = 40, sliding: int = 20, **options: bool) -> BlockPool:
    """Blocks of two tokens."""
    return BlockPool(blocks, 2, window=window, sliding=sliding, **options)


def trimmed(pool: BlockPool, seq: Sequence) -> Sequence:
    pool.trim(compute(pool, seq))
    check_pool(pool, [seq])
    return seq


@pytest.mark.parametrize(
    ("window", "released"), [(1, 4), (2, 3), (3, 3), (4, 2), (8, 0), (9, 0), (99, 0)]
)
def test_trim_gives_back_what_the_next_token_does_not_see(window: int, released: int) -> None:
    """Of 8 tokens, the next one at position 8 sees `window` - 1 and itself."""
    pool = windowed(window, sliding=60)
    seq = trimmed(pool, sequence([1, 2, 3, 4, 5, 6, 7, 8]))
    assert (len(seq.blocks), len(seq.sliding)) == (4, 4), "tables keep their places"
    assert (seq.sliding.released, seq.sliding[:released]) == (released, [GONE] * released)
    assert GONE not in seq.sliding[released:]
    assert figure(pool, "recent_blocks_used") == 4 - released


def test_a_long_sequence_holds_no_more_than_its_window() -> None:
    pool = windowed(5, blocks=500, sliding=4)
    seq = sequence([7])
    for token in range(900):
        assert pool.extend(seq, 1)
        seq.computed += 1
        seq.tokens.append(token)
        pool.cache_full_blocks(seq)
        pool.trim(seq)
    assert figure(pool, "recent_blocks_used") <= 3
    check_pool(pool, [seq])


def test_what_was_given_back_is_found_again() -> None:
    pool = windowed(4)
    first = trimmed(pool, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert first.sliding.released == 3
    second = sequence([1, 2, 3, 4, 0])
    assert pool.attach(second) == 4, "the window behind its fourth token retired to the cache"
    assert second.sliding.released == 0
    check_pool(pool, [first, second])


def test_a_match_needs_no_more_than_the_last_window() -> None:
    pool = windowed(4, sliding=5)
    pool.release(trimmed(pool, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])))
    # takes the one empty block, and the oldest: the first place's
    other = trimmed(pool, sequence([0] * 4))
    assert figure(pool, "recent_evictions") == 1
    again = sequence([1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert pool.attach(again) == 8
    assert (again.sliding.released, again.sliding[:2]) == (2, [GONE] * 2)
    check_pool(pool, [again, other])


def test_no_match_behind_a_hole_in_the_window() -> None:
    pool = windowed(6)
    pool.release(trimmed(pool, first := sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])))
    tokens = [*first.tokens[:8], 0]
    assert len(pool.match(sequence(tokens))) == 4
    hole = pool.sliding.index[first.block_keys[2]]
    pool.sliding.cached.move_to_end(hole, last=False)
    pool.sliding._empty.clear()
    pool.sliding._take()
    assert len(pool.match(sequence(tokens))) == 2, (
        "the third place is missing: nothing behind it is of use"
    )


def test_room_is_that_of_the_scarcer_store() -> None:
    pool = windowed(4, blocks=40, sliding=3)
    seq = sequence([*range(30)])
    assert pool.room(seq) == 6
    assert not pool.extend(seq, 7)
    assert (seq.blocks, seq.sliding) == ([], [])
    assert pool.extend(seq, 6)
    assert pool.longest_step(0) == 6


def test_a_window_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 3 blocks"):
        windowed(4, sliding=2)


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(8, 2, prefix_caching=False)
    pool.release(compute(pool, sequence([1, 2, 3, 4])))
    assert (len(unowned(pool.full)), figure(pool, "blocks_cached")) == (8, 0)
    assert pool.attach(sequence([1, 2, 3, 4])) == 0


def test_check_sees_a_leak() -> None:
    pool = BlockPool(8, 2)
    compute(pool, sequence([1, 2, 3]))
    with pytest.raises(AssertionError, match="reference counts"):
        check_pool(pool, [])


# -- keys and hooks ------------------------------------------------------------------------------------------
def test_a_key_means_the_same_in_another_pool() -> None:
    """And nothing else does: not another model, adapter, salt, or the same tokens behind others."""
    prompt = [1, 2, 3, 4, 5]
    one, other = BlockPool(40, 2, model="m"), BlockPool(20, 2, model="m")
    keys = list(compute(one, sequence(prompt)).block_keys)
    assert len({*keys}) == len(keys) == 2
    assert all(len(key) == 16 for key in keys)
    assert list(compute(other, sequence(prompt)).block_keys) == keys
    assert compute(BlockPool(8, 2, model="n"), sequence(prompt)).block_keys[0] not in keys
    for difference in ({"adapter": "a"}, {"salt": "s"}):
        assert not {*compute(one, sequence(prompt, **difference)).block_keys} & {*keys}
    assert compute(one, sequence([3, 4, 5])).block_keys[0] not in keys


def test_slower_memory_is_told_of_evictions_and_asked_for_misses() -> None:
    pool = BlockPool(2, 2)
    told: list[bytes] = []
    pool.full.on_evict = lambda key, block: told.append(key)
    first = compute(pool, sequence([1, 2, 3]))
    keys = list(first.block_keys)
    pool.release(first)
    pool.release(compute(pool, sequence([7, 8, 9])))
    pool.release(compute(pool, sequence([5, 6, 5])))
    assert told[0] == keys[0], "the least recently used goes first"

    asked: list[bytes] = []

    def nothing_there(key: bytes) -> int | None:
        asked.append(key)
        return None

    pool.full.on_miss = nothing_there
    assert pool.attach(sequence([1, 2, 3])) == 0
    assert asked == [keys[0]]


def test_what_slower_memory_brings_back_never_takes_what_was_found() -> None:
    """A pool of two blocks, a prompt of three: each that comes back would drive out an earlier one."""
    pool = BlockPool(2, 2)
    known = BlockPool(8, 2)
    keys = list(compute(known, sequence([1, 2, 3, 4, 5, 6, 7])).block_keys)
    brought: dict[int, bytes] = {}

    def bring_back(key: bytes) -> int | None:
        if key not in keys or not pool.full.available:
            return None
        table: list[int] = []
        pool.full.write(table, 0, 1)
        pool.full.publish(table, 0, key)
        (block,) = table
        pool.full.truncate(table, 0)
        brought[block] = key
        return block

    pool.full.on_miss = bring_back
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    assert pool.attach(seq) == 4
    assert [brought[block] for block in seq.blocks] == keys[:2]
    check_pool(pool, [seq])
    assert pool.match(sequence([1, 2, 3, 4, 5, 6, 7])) == seq.blocks, "matching alone asks nobody"
