"""Persistent products, interpreted: bits as those of the row alone, at every edge, in every order of warps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pageturner.kernels.gpu import catalogue
from pageturner.kernels.gpu.catalogue import Tile
from pageturner.kernels.gpu.driver import Plane
from pageturner.kernels.gpu.ops import GpuOps

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from support import gluon_interpreter  # noqa: E402

slow = pytest.mark.slow


@pytest.fixture
def ops() -> GpuOps:
    return GpuOps(fake_gpu.FakeDriver(), 64 << 20, graphs=False)


@pytest.mark.parametrize(("rows", "outputs", "columns"), [(66, 48, 80), (130, 304, 64), (70, 16, 2304)])
def test_a_row_has_its_bits_alone_and_among_many(ops: GpuOps, rows: int, outputs: int, columns: int) -> None:
    weight = ops.pack_weight(grid.weight("BF16", outputs, columns, seed=5))
    bias = ops.pack_weight(grid.vector(outputs, seed=4))
    x, before = grid.normal(rows, columns, seed=6), grid.normal(rows, outputs, seed=7)
    got = ops.to_numpy(ops.launches.product(ops.on_device(x), weight, bias, ops.on_device(before)))
    assert ops.driver.launched[-1].startswith("persistent.bf16.")
    for row in (0, rows // 2, rows - 1):
        mine = ops.on_device(before[row : row + 1])
        alone = ops.to_numpy(ops.launches.product(ops.on_device(x[row : row + 1]), weight, bias, mine))
        assert (got[row] == alone[0]).all()


def small(gated: bool, over_m: int, over_n: int) -> catalogue.Kernel:
    """A tile that is quick to interpret: 16 rows, 16 columns, 32 of K, three stages."""
    return catalogue.persistent("small", "bf16", Tile(16, 16, 32, 8, 3), gated, over_m, over_n)


def computed(
    ops: GpuOps, kernel: catalogue.Kernel, programs: int, sizes: tuple[int, int, int], seed: int = 0
) -> tuple[Any, Any]:
    """What a kernel gives for (rows, outputs, columns), and what numpy does of the same values."""
    m, n, k = sizes
    gated = "gated" in kernel.function
    weight = ops.pack_weight(grid.weight("BF16", 2 * n if gated else n, k, seed=5))
    x = ops.launches.rounded(ops.on_device(grid.normal(m, k, seed=6)), "bf16")
    planes = (Plane(x.address, m, k), Plane(weight.address, weight.rows, k))
    values = [np.zeros((one.rows, k), np.uint16) for one in planes]
    for array, one in zip(values, planes, strict=True):
        ops.driver.download(array, one.address)
    a, b = ((one.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for one in values)
    if gated:
        out, rest = ops.arena.take((m, n), "bf16"), (m, n, k)
        expected = a @ b[:n].T
        expected = expected / (1 + np.exp(-expected)) * (a @ b[n:].T)
        arguments: tuple[Any, ...] = (*planes, Plane(out.address, m, n), *rest)
    else:
        out = ops.arena.take((m, n))
        expected = a @ b.T
        arguments = (*planes, 0, 0, out.address, 0, 0, m, n, k, k, 1)
    gluon_interpreter.run(kernel, (programs,), arguments, seed)
    if not gated:
        return ops.to_numpy(out), expected
    bits = np.zeros((m, n), np.uint16)
    ops.driver.download(bits, out.address)
    return (bits.astype(np.uint32) << 16).view(np.float32), expected


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("over_m", "over_n", "programs"),
    [(1, 1, 1), (1, 1, 5), (2, 1, 2), (2, 1, 4), (1, 2, 4), (1, 4, 4), (2, 2, 4), (2, 4, 8)],
)
def test_every_order_of_the_warps_gives_the_product(
    ops: GpuOps, gated: bool, over_m: int, over_n: int, programs: int
) -> None:
    """More tiles than programs, of which some lie behind the last row or column; K ends within a box."""
    kernel = small(gated, over_m, over_n)
    for seed in range(4):
        ops.begin()
        got, expected = computed(ops, kernel, programs, (70, 48, 176), seed)
        assert np.abs(got - expected).max() <= (1e-2 if gated else 1e-5) * np.abs(expected).max()
