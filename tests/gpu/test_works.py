"""The works of attention: every row, head and segment once, memory by their sum, room for recordings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pageturner.kernels.base import Batch
from pageturner.kernels.gpu import catalogue, steps
from pageturner.kernels.gpu.arrays import Arena
from pageturner.kernels.gpu.catalogue import ARCHITECTURES, SEGMENT
from pageturner.kernels.gpu.steps import AttentionView, Works

LLAMA_8B = AttentionView(32, 8, 128, 0, False)


def batch_of(runs: list[tuple[int, int]], block_size: int = 16) -> Batch:
    """Sequences of (computed tokens, rows), each in blocks of its own from 0."""
    counts = [n for _, n in runs]
    contexts = np.array([done + n for done, n in runs], np.int32)
    positions = np.concatenate([np.arange(done, done + n, dtype=np.int32) for done, n in runs])
    table = np.zeros((len(runs), -(-int(contexts.max()) // block_size)), np.int32)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    return Batch(positions, positions, starts, contexts, table, positions, starts[1:] - 1)


def works_of(
    runs: list[tuple[int, int]], view: AttentionView, most: int = 1 << 40, architecture: int = 90
) -> Works:
    batch = batch_of(runs)
    starts = np.arange(len(runs), dtype=np.int32)  # names the sequence
    return steps.works_of(batch, starts, view, architecture, most)


def heads_of(view: AttentionView, work: np.ndarray, height: int) -> int:
    return min(steps.heads_of_tile(view.group, height), view.group - int(work[3]))


@pytest.mark.parametrize("group", [1, 3, 4, 16, 17, 48, 71])
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (300, False), (512, True)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_of_every_head_has_every_segment_once(
    group: int, window: int, chunked: bool, architecture: int
) -> None:
    runs, view = (
        [(299, 1), (0, 5), (0, 1), (860, 40), (100, 4), (2000, 3), (511, 2)],
        AttentionView(group, 1, 64, window, chunked),
    )
    works = works_of(runs, view, architecture=architecture)
    batch = batch_of(runs)
    seen: dict[tuple[int, int], list[int]] = {}
    for height, part in ((16, works.few), (64, works.many)):
        for work in part:
            rows, heads = int(work[2]), heads_of(view, work, height)
            assert 0 < rows * heads <= height
            first = batch.positions[work[1]]
            lowest = (
                0
                if not window
                else max(first - first % window if chunked else first - window + 1, 0)
            )
            segments = [lowest // SEGMENT + int(work[4])] if height == 16 else [-1]
            for row in range(work[1], work[1] + rows):
                assert batch.query_start[work[0]] <= row < batch.query_start[work[0] + 1]
                for head in range(work[3], work[3] + heads):
                    seen.setdefault((row, head), []).extend(segments)
    assert set(seen) == {
        (row, head) for row in range(batch.query_start[-1]) for head in range(group)
    }
    for (row, _), segments in seen.items():
        position = int(batch.positions[row])
        first = (
            0
            if not window
            else max(position - position % window if chunked else position - window + 1, 0)
        )
        mine = range(first // SEGMENT, position // SEGMENT + 1)
        assert segments == [-1] or (
            segments == sorted(set(segments)) and set(mine) <= set(segments)
        )
        if window and segments != [-1]:
            assert len(segments) <= (window + 14) // SEGMENT + 2


def test_partials_are_the_sum_of_the_segments_of_each_sequence() -> None:
    runs = [(33_000, 1), *[(199, 1)] * 255]
    works = works_of(runs, AttentionView(32, 8, 128, 0, False))
    assert (works.partials, works.counters, len(works.few)) == (129 * 4, 1, 129 + 255)
    bytes_of_half_a_million = (
        works_of([(3906, 1)] * 128, LLAMA_8B).partials * LLAMA_8B.partial_bytes
    )
    assert 33e6 < bytes_of_half_a_million < 35e6


def test_partials_of_tiles_lie_beside_each_other() -> None:
    works = works_of([(600, 1), (100, 1), (700, 3), (255, 1), (256, 1)], LLAMA_8B)
    tiles = works.few[works.few[:, 4] == 0]
    assert tiles[:, 5].tolist() == [3, 1, 3, 1, 2]
    several = tiles[tiles[:, 5] > 1]
    assert several[:, 6].tolist() == [0, 12, 12 + 36]
    assert several[:, 7].tolist() == [0, 1, 2]
    assert works.partials == 12 + 36 + 8


def test_too_many_partials_are_computed_in_rounds() -> None:
    runs = [(600, 1), (100, 1), (5000, 1), (700, 1), (700, 1), (10, 1)]
    works = works_of(runs, LLAMA_8B, most=30)
    assert works.rounds == (3 + 1, 20, 3 + 3 + 1)
    assert works.partials == 20 * 4  # a tile is never cut
    assert works.few[works.few[:, 4] == 0][:, 6].tolist()[:5] == [0, 12, 0, 0, 12]
    assert len(works_of(runs, LLAMA_8B).rounds) == 1
    assert works_of([(0, 100)], LLAMA_8B).rounds == ()


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 24, 100, 255, 256])
def test_positions_are_divided_by_every_block_size(block_size: int) -> None:
    inverse, shift = steps.inverse_of(block_size)
    assert inverse < 1 << 31
    near = np.arange(0, 1 << 24, block_size, dtype=np.int64)[-70000:]
    positions = np.concatenate([near, near - 1, near[:1] * 0, np.arange(70000)])
    positions = positions[(positions >= 0) & (positions < 1 << 24)]
    assert (positions * inverse >> shift == positions // block_size).all()
    assert inverse << 7 < 1 << 32  # the other way of `block_of`, in 32 bits
    high = (2 * positions.astype(np.uint64) * np.uint64(inverse << 7)) >> np.uint64(32)
    assert (high >> np.uint64(shift - 24) == positions // block_size).all()


def test_rooms_of_recordings_are_few_and_waste_little() -> None:
    rooms = {steps.segments_bucket(count) for count in range(1, 8193)}
    assert len(rooms) <= 36
    assert all(
        count <= steps.segments_bucket(count) <= max(1.25 * count, count + 7)
        for count in range(1, 8193)
    )


def test_sizes_of_mixed_steps_are_few_and_stay_at_their_height() -> None:
    sizes = {steps.mixed_bucket(count) for count in range(1, 513)}
    assert len(sizes) <= 18
    for count in range(1, 513):
        size = steps.mixed_bucket(count)
        assert count <= size <= max(1.5 * count, count + 7)
        assert catalogue.height_of(count, 4096) == catalogue.height_of(size, 4096)


MIXED = [(600, 1), (40, 3), (0, 90), (255, 2), (100, 17)]


@pytest.mark.parametrize(
    "view", [LLAMA_8B, AttentionView(32, 1, 64, 0, False), AttentionView(8, 4, 64, 600, False)]
)
def test_a_mixed_step_and_others_of_its_room_have_their_addresses(view: AttentionView) -> None:
    found, rooms = set(), set()
    for runs in (MIXED, [(500, 1), (60, 2), (20, 86), (250, 3), (90, 21)]):
        driver = SimpleNamespace(
            alloc=lambda _: 4096, upload=lambda *_: None, clear=lambda *_: None
        )
        arena = Arena(driver, 1 << 26)  # type: ignore[arg-type]
        batch = batch_of(runs, 16)
        room = steps.room_of(batch, {view}, 90, 128)
        step = steps.upload(90, arena, [(steps.pad(batch, 128, 8), 16)], [{view}], room)[0]
        placed = step.works[view]
        arrays = (
            step.tokens,
            step.blocks,
            step.logit_rows,
            placed.few,
            placed.many,
            placed.arrived,
        )
        found.add(
            (
                *((one.address, one.shape) for one in arrays),
                placed.partials,
                placed.rounds,
                arena.mark,
            )
        )
        rooms.add(room)
    assert len(found) == len(rooms) == 1


WIDE, WINDOW, CHUNKS = ((32, 1, 64, 0, False), (8, 4, 64, 600, False), (8, 4, 64, 512, True))


@pytest.mark.parametrize(
    "view", [LLAMA_8B, *(AttentionView(*one) for one in (WIDE, WINDOW, CHUNKS))]
)
def test_a_recording_has_its_addresses_for_all_contexts_of_its_room(view: AttentionView) -> None:
    found = set()
    for contexts in ([100, 20, 3], [1800, 2, 9], [700, 700, 500]):
        driver = SimpleNamespace(
            alloc=lambda _: 4096, upload=lambda *_: None, clear=lambda *_: None
        )
        arena = Arena(driver, 1 << 26)  # type: ignore[arg-type]
        batch = steps.pad(batch_of([(n - 1, 1) for n in contexts], 24), 4, 4)
        step = steps.upload(90, arena, [(batch, 24)], [{view}], steps.Room(12))[0]
        placed = step.works[view]
        arrays = (step.tokens, step.blocks, placed.few, placed.many, placed.arrived)
        found.add(
            (
                *((one.address, one.shape) for one in arrays),
                placed.partials,
                placed.rounds,
                arena.mark,
            )
        )
    assert len(found) == 1
