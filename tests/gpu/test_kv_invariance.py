"""Of each KV type: a row of attention has its bits in chunks, in a crowd, and behind a shared prefix."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kernels import grid

from pageturner.kernels.base import KV_TYPES, AttentionShape, Batch
from pageturner.kernels.gpu.ops import GpuOps

gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)  # skips without Triton

SHAPE = AttentionShape(2, 1, 48, 0.2)
BLOCK, LENGTH = 16, 40
Q, K, V = (grid.normal(LENGTH, n * 48, seed=s) * 3 for n, s in ((2, 1), (1, 2), (1, 3)))
OTHER = [grid.normal(60, n * 48, seed=s) for n, s in ((2, 4), (1, 5), (1, 6))]
Part = tuple[
    list[int], int, int, list[np.ndarray]
]  # blocks, computed, rows, Q, K and V of the sequence


class Kept:
    """A KV and the steps on it."""

    def __init__(self, dtype: str) -> None:
        self.ops = GpuOps(gpu_device.make_driver(), 16 << 20, graphs=False)
        self.kv = self.ops.alloc_kv(grid.kv_spec(BLOCK, 12, 1, 48, dtype))

    def step(self, *parts: Part) -> list[np.ndarray]:
        """What attention gives for the rows of each part, whose K and V are written first."""
        ops = self.ops
        ops.begin()
        positions = [np.arange(computed, computed + n) for _, computed, n, _ in parts]
        slots = [
            np.array(b)[at // BLOCK] * BLOCK + at % BLOCK
            for (b, *_), at in zip(parts, positions, strict=True)
        ]
        starts = np.cumsum([0, *(n for _, _, n, _ in parts)])
        table = np.zeros((len(parts), 5), np.int32)
        for s, (blocks, *_) in enumerate(parts):
            table[s, : len(blocks)] = blocks
        whole = grid.i32(np.concatenate(positions))
        batch = Batch(
            whole,
            whole,
            grid.i32(starts),
            grid.i32([c + n for _, c, n, _ in parts]),
            table,
            grid.i32(np.concatenate(slots)),
            grid.i32([]),
        )
        q, k, v = (
            ops.on_device(
                np.concatenate([of[i][at] for (*_, of), at in zip(parts, positions, strict=True)])
            )
            for i in range(3)
        )
        ops.kv_write(self.kv, 0, k, v, batch.slots)
        out = ops.to_numpy(ops.attention(q, self.kv, 0, batch, SHAPE))
        return np.split(out, starts[1:-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", KV_TYPES)
def test_a_row_has_its_bits_however_it_comes(dtype: str) -> None:
    mine, theirs = [Q, K, V], OTHER
    (truth,) = Kept(dtype).step(([7, 2, 9], 0, LENGTH, mine))
    chunks = Kept(dtype)
    got = [chunks.step(([1, 4, 3], at, n, mine))[0] for at, n in ((0, 7), (7, 1), (8, 31), (39, 1))]
    assert (np.concatenate(got) == truth).all()

    crowd = Kept(dtype)
    crowd.step(([5, 6, 8, 10], 0, 50, theirs), ([3, 1, 2], 0, 20, mine))
    both = crowd.step(([3, 1, 2], 20, 19, mine), ([5, 6, 8, 10], 50, 5, theirs))
    last = crowd.step(([5, 6, 8, 10], 55, 1, theirs), ([3, 1, 2], 39, 1, mine))
    assert (both[0] == truth[20:39]).all()
    assert (last[1] == truth[39:]).all()

    hit = Kept(dtype)  # two blocks that another sequence filled, one shared and one copied
    hit.step(([7, 2, 9], 0, LENGTH, mine))
    hit.ops.copy_blocks(hit.kv, [(2, 11)])
    assert (hit.step(([7, 11, 4], 32, 8, mine))[0] == truth[32:]).all()
