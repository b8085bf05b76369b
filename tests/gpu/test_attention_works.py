"""Works of attention on the interpreted device: bits that know neither the order of programs, nor rounds, nor
the size of blocks; heads that many query heads share; and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from pageturner.kernels.base import AttentionShape, KVSpec
from pageturner.kernels.gpu import steps
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.reference import ReferenceOps

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from support import triton_interpreter  # noqa: E402

SHAPE = AttentionShape(4, 2, 16, 0.25)
RUNS = [(600, 1), (20, 1), (257, 2)]


def attended(
    shape: AttentionShape, runs: list[tuple[int, int]], block_size: int = 16
) -> tuple[np.ndarray, np.ndarray, GpuOps, steps.Placed]:
    """What attention gives, what the reference gives, and what lies on the device behind it."""
    ops, reference = GpuOps(fake_gpu.FakeDriver(), 16 << 20, graphs=False), ReferenceOps()
    blocks = 2 + sum(-(-(done + n) // block_size) for done, n in runs)
    spec = KVSpec(1, blocks, block_size, shape.kv_heads, shape.head_dim, "float16")
    kv, theirs = ops.alloc_kv(spec), reference.alloc_kv(spec)
    batch, whole = (grid.batch(one, block_size, blocks) for one in (runs, grid.history(runs)))
    k, v = grid.kv_rows(whole, shape.kv_heads * shape.head_dim, 0)
    reference.kv_write(theirs, 0, k, v, whole.slots)
    ops.driver.upload(kv.keys, theirs.k[0])
    ops.driver.upload(kv.values, theirs.v[0])
    q = grid.normal(len(batch.positions), shape.heads * shape.head_dim, seed=9)
    expected = reference.attention(q, theirs, 0, batch, shape)
    step = ops.step(batch, {steps.view_of(shape)}, kv)
    got = ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, step, shape))
    return got, expected, ops, step.works[steps.view_of(shape)]


def near(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= 3e-3 * np.abs(expected).max()


def reverse(places: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return places[::-1]


def shuffle(places: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return random.Random(len(places)).sample(places, len(places))


@pytest.mark.parametrize("order", [reverse, shuffle])
def test_whoever_is_last_merges_in_the_same_order(
    order: Callable[..., list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, expected, ops, placed = attended(SHAPE, RUNS)
    near(truth, expected)
    monkeypatch.setattr(triton_interpreter, "in_order", order)
    got, _, ops, placed = attended(SHAPE, RUNS)
    assert (got == truth).all()
    arrived = np.ones(placed.arrived.shape, np.int32)
    ops.driver.download(arrived, placed.arrived.address)
    assert arrived.tolist() == [0] * (2 * SHAPE.kv_heads)  # of two tiles, ready for the next layer
    assert len(ops.driver.launched) == 1


def test_rounds_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, _, ops, _ = attended(SHAPE, RUNS)
    monkeypatch.setattr(steps, "PARTIAL_BYTES", 1)
    got, _, apart, placed = attended(SHAPE, RUNS)
    assert (got == truth).all()
    assert (len(ops.driver.launched), len(apart.driver.launched)) == (1, 3)
    assert placed.partials == 2 * 2 * 2  # of the last sequence, which has two rows


@pytest.mark.parametrize("heads", [pytest.param(17, marks=pytest.mark.slow), 40, 71])
def test_more_heads_than_a_tile_has_rows_share_a_kv_head(heads: int) -> None:
    """Tiles of 16 and of 64 rows, each with a part of the heads."""
    got, expected, _, placed = attended(AttentionShape(heads, 1, 16, 0.25), [(300, 1), (0, 2)])
    near(got, expected)
    assert sum(placed.rounds) == -(-heads // 16) * 2  # two segments
    assert len(placed.many) == -(-heads // 64) * (2 if heads > 32 else 1)


@pytest.mark.parametrize(
    "block_size", [24, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 100, 256))]
)
def test_no_size_of_blocks_changes_a_bit(block_size: int) -> None:
    runs = [(300, 1), (30, 17)]
    assert (attended(SHAPE, runs, block_size)[0] == attended(SHAPE, runs)[0]).all()


def test_segments_before_a_window_are_no_works() -> None:
    got, expected, _, placed = attended(
        AttentionShape(4, 2, 16, 0.25, window=40), [(600, 1), (510, 4)]
    )
    near(got, expected)
    assert sum(placed.rounds) == 1 + 2
