"""Persistent products, interpreted: the bits of a row alone, at every edge and in every order of warps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pageturner.kernels.gpu import catalogue
from pageturner.kernels.gpu.catalogue import Ring
from pageturner.kernels.gpu.driver import Plane
from pageturner.kernels.gpu.ops import GpuOps

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from pageturner.kernels.gpu.source import persistent as source  # noqa: E402
from support import gluon_interpreter  # noqa: E402

slow = pytest.mark.slow


@pytest.fixture
def ops() -> GpuOps:
    return GpuOps(fake_gpu.FakeDriver(), 64 << 20, graphs=False)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(66, 48, 80), (130, 304, 64), (70, 16, 2304)]
)
def test_a_row_has_its_bits_alone_and_among_many(
    ops: GpuOps, rows: int, outputs: int, columns: int
) -> None:
    weight = ops.pack_weight(grid.weight("BF16", outputs, columns, seed=5))
    bias = ops.pack_weight(grid.vector(outputs, seed=4))
    x, before = grid.normal(rows, columns, seed=6), grid.normal(rows, outputs, seed=7)
    got = ops.to_numpy(ops.launches.gemm(ops.on_device(x), weight, bias, ops.on_device(before)))
    assert ops.driver.launched[-1].startswith("persistent.bf16.")
    for row in (0, rows // 2, rows - 1):
        mine = ops.on_device(before[row : row + 1])
        alone = ops.to_numpy(ops.launches.gemm(ops.on_device(x[row : row + 1]), weight, bias, mine))
        assert (got[row] == alone[0]).all()


def small(gated: bool = False) -> catalogue.Kernel:
    """Return a tile that is quick to interpret: 16 rows, 16 columns, 32 of K, three stages."""
    return catalogue.persistent("small", "bf16", Ring(16, 16, 32, 3), gated)


def computed(
    ops: GpuOps, kernel: catalogue.Kernel, programs: int, sizes: tuple[int, int, int], seed: int = 0
) -> tuple[Any, Any]:
    """What a kernel gives for (rows, outputs, columns), and what numpy does of the same values."""
    m, n, k = sizes
    gated = "gated" in kernel.function
    weight = ops.pack_weight(grid.weight("BF16", 2 * n if gated else n, k, seed=5))
    x = ops.launches.cast(ops.on_device(grid.normal(m, k, seed=6)), "bf16")
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
@pytest.mark.parametrize("programs", [1, 5])
def test_every_order_of_the_warps_gives_the_product(
    ops: GpuOps, gated: bool, programs: int
) -> None:
    """More tiles than programs, of which some lie behind the last row or column; K ends within a box."""
    for seed in range(6):
        ops.begin()
        got, expected = computed(ops, small(gated), programs, (70, 48, 176), seed)
        assert np.abs(got - expected).max() <= (1e-2 if gated else 1e-5) * np.abs(expected).max()


# -- what the interpreter sees: each of these faults would hang a device or give wrong sums at times --------
def faulty(ops: GpuOps, kernel: catalogue.Kernel) -> bool:
    """Whether one of some orders of the warps gives something else than the product, or no end."""
    for seed in range(6):
        ops.begin()
        try:
            got, expected = computed(ops, kernel, 4, (70, 48, 176), seed)
        except AssertionError:
            return True
        if not np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max():
            return True
    return False


def test_a_stage_that_is_never_given_back_is_a_deadlock(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "release", lambda *_: None)
    with pytest.raises(gluon_interpreter.Deadlock):
        computed(ops, small(), 4, (70, 48, 176))


def test_a_stage_that_is_given_back_too_early_is_seen(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the step that was just issued."""

    def early(empty: Any, i: int, steps: int, stages: int) -> None:
        if steps >= 0:
            empty.index(i % stages).change(1, 0)

    assert not faulty(ops, small())
    monkeypatch.setattr(source, "release", early)
    assert faulty(ops, small())


@pytest.mark.parametrize(
    ("architecture", "kind", "rows", "outputs", "found"),
    [
        (90, "bf16", 64, 4096, False),
        (90, "bf16", 65, 4096, True),
        (90, "fp16", 8192, 28672, True),
        (90, "bf16", 200, 4104, False),
        (90, "fp32", 200, 4096, False),
        (100, "bf16", 200, 4096, False),
    ],
)
def test_dense_computes_what_tma_cannot(
    architecture: int, kind: str, rows: int, outputs: int, found: bool
) -> None:
    assert (catalogue.persistent_ring(architecture, kind, rows, outputs) is not None) == found
