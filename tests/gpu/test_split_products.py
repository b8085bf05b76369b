"""Products whose parts of K are computed beside each other: who ends last adds them up, in one order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from pageturner.kernels.gpu.catalogue import (
    ARCHITECTURES,
    GROUPED,
    MANY,
    MAX_SPLIT_TILES,
    WHOLE_TILES,
    block_k,
    group_parts_of,
    groups_tile,
    height_of,
    parts_of,
    tiles_of,
)
from pageturner.kernels.gpu.ops import GpuOps

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from pageturner.kernels.gpu import launches  # noqa: E402
from support import triton_interpreter  # noqa: E402


def shuffled(seed: int) -> Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]]:
    return lambda places: random.Random(seed).sample(places, len(places))


@pytest.mark.parametrize(
    ("kind", "half", "many"),
    [
        ("BF16", "dense.bf16.m256", "dense.bf16.many"),
        ("Q4_0", "groups.4.32.fp16.many", "groups.4.32.fp16.many"),
        ("F8_W", "groups.fp8.many", "groups.fp8.many"),
    ],
)
def test_any_program_may_end_last(
    kind: str, half: str, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of one program that adds the parts, and every counter is 0 for the next product."""
    ops = GpuOps(fake_gpu.FakeDriver(architecture=80), 64 << 20, graphs=False)
    tensor = grid.weight(kind, 48, 3328, seed=5)
    if kind == "F8_W":
        blocks = tensor.data.reshape(48, -1, 36)
        blocks[:, :, :4] = blocks[:, :1, :4]  # a scale for each row, as the kernels want it
    weight = ops.pack_weight(tensor)
    bias = ops.pack_weight(grid.vector(48, seed=4))
    assert parts_of(48, 3328, block_k("bf16"))[1] == 3
    assert group_parts_of(48, 3328)[1] > 3
    host = 1e3 * grid.normal(70, 3328, seed=6)  # large enough for another order to have other bits
    residual = ops.on_device(grid.normal(70, 48, seed=7))
    found = []
    for seed in range(4):
        monkeypatch.setattr(triton_interpreter, "in_order", shuffled(seed))
        before = len(ops.driver.launched)
        x = ops.launches.cast(ops.on_device(host), "bf16")
        found.append(ops.to_numpy(ops.launches.gemm(x, weight, bias, residual)))
        assert ops.driver.launched[before:] == ["elementwise.cast.bf16", half]
    for choice in ("height_of", "group_height_of"):
        monkeypatch.setattr(launches, choice, lambda *_: MANY)
    monkeypatch.setattr(launches, "SOME_ROWS", 0)
    whole = ops.to_numpy(
        ops.launches.gemm(ops.launches.cast(ops.on_device(host), "bf16"), weight, bias, residual)
    )
    assert ops.driver.launched[-1] == many
    for one in found:
        assert (one.view(np.int32) == whole.view(np.int32)).all()
    assert (found[0][:3] != ops.to_numpy(residual)[:3]).all()
    counters = np.full(MAX_SPLIT_TILES, -1, np.int32)
    ops.driver.download(counters, ops.arena.counters)
    assert not counters.any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tile_of_a_split_product_has_a_counter(architecture: int) -> None:
    most = 0
    for kind, outputs in itertools.product(("bf16", "fp32"), range(16, 2048, 16)):
        if parts_of(outputs, 1 << 16, block_k(kind))[1] == 1:
            continue
        for rows in (*range(16, 1024, 16), *range(1024, 32768, 128)):
            if (height := height_of(rows, outputs)) != MANY:
                tile = tiles_of(architecture, kind)[height]
                most = max(most, -(-rows // tile.m) * -(-outputs // tile.n))
    for form, outputs in itertools.product(GROUPED, range(64, 32768, 64)):
        if group_parts_of(outputs, 1 << 16, form)[1] > 1:
            for rows in (1, 16):
                tile = groups_tile(architecture, launches.group_height_of(rows, 1 << 16), form)
                most = max(most, -(-rows // tile.m) * -(-outputs // tile.n))
    assert 64 < max(most, WHOLE_TILES) <= MAX_SPLIT_TILES
