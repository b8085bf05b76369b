"""Weights whose columns lie in the order of their groups (GPTQ with `desc_act`): what they are multiplied
with is gathered once for all that share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.base import Tensor
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.proof import _product as prove
from pageturner.kernels.gpu.weights import join
from pageturner.models.load import load_model

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from pageturner.kernels.gpu import launches  # noqa: E402
from support import decoding as by_hand  # noqa: E402

FOLDER = Path(__file__).parents[1] / "goldens" / "checkpoints" / "gptq_act"
TOKENS = [7 * i % 64 for i in range(12)]
COLUMNS = 256


def ordered(kind: str, seed: int, order: np.ndarray[Any, Any] | None, rows: int = 32) -> Tensor:
    plain = grid.weight(kind, rows, COLUMNS, seed=seed)
    return Tensor("w", kind, plain.shape, plain.data, order=order)


def order_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permutation(COLUMNS).astype(np.int32)


@pytest.fixture
def ops() -> GpuOps:
    return GpuOps(fake_gpu.FakeDriver(), 64 << 20, graphs=False)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", pytest.param("Q8_0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [2, 20])
def test_a_product_is_that_of_gathered_inputs_bit_for_bit(
    ops: GpuOps, kind: str, rows: int
) -> None:
    order, x = order_of(3), grid.normal(rows, COLUMNS)
    mine, plain = (ops.pack_weight(ordered(kind, 5, one)) for one in (order, None))
    got = ops.to_numpy(ops.linear(ops.on_device(x), mine))
    expected = ops.to_numpy(ops.linear(ops.on_device(np.ascontiguousarray(x[:, order])), plain))
    assert (got == expected).all()
    assert not np.array_equal(got, ops.to_numpy(ops.linear(ops.on_device(x), plain)))


def test_products_that_share_an_input_gather_it_once_and_joined_ones_keep_their_order(
    ops: GpuOps,
) -> None:
    order = order_of(3)
    weights = [ops.pack_weight(ordered("Q4_0", seed, order)) for seed in range(3)]
    x = ops.on_device(grid.normal(2, COLUMNS))
    apart = [ops.to_numpy(ops.linear(x, one)) for one in weights]
    assert ops.driver.launched.count("take_columns") == 1
    before = len(ops.driver.sizes)
    found = join(ops.driver, weights)
    assert found is not None
    whole, parts = found
    assert (
        before - len(ops.driver.sizes) == 3 * 3 - 2 - 1
    )  # q, scales and orders of three, of one now
    assert (ops.to_numpy(ops.linear(x, whole)) == np.concatenate(apart, axis=1)).all()
    assert all(
        (ops.to_numpy(ops.linear(x, one)) == y).all() for one, y in zip(parts, apart, strict=True)
    )
    other = ops.pack_weight(ordered("Q4_0", 4, order_of(4)))
    assert join(ops.driver, [parts[0], other]) is None


def test_gate_and_up_in_one_launch_see_gathered_inputs(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "group_height_of", lambda *_: launches.MANY)
    monkeypatch.setattr(launches, "SOME_ROWS", 0)
    order, x = order_of(5), grid.normal(3, COLUMNS)
    both = ops.pack_weight(ordered("Q4_1", 6, order, rows=64))
    plain = ops.pack_weight(ordered("Q4_1", 6, None, rows=64))
    found = []
    for weight, given in ((both, x), (plain, np.ascontiguousarray(x[:, order]))):
        out = ops.launches.gated_gemm(ops.on_device(given), weight, "bf16")
        bits = np.empty(out.shape, np.uint16)
        ops.driver.download(bits, out.address)
        found.append(bits)
    assert (found[0] == found[1]).all()
    assert ops.driver.launched.count("gated_groups.4.32.fp16.many") == 2


@pytest.mark.parametrize(
    "order",
    [[0] * COLUMNS, [-1, *range(COLUMNS - 1)], list(range(1, COLUMNS + 1)), list(range(32))],
)
def test_what_is_no_order_is_refused(ops: GpuOps, order: list[int]) -> None:
    with pytest.raises(EngineFault) as caught:
        ops.pack_weight(ordered("Q4_0", 5, np.array(order, np.int32)))
    assert caught.value.code == "bad_weight"


@pytest.mark.slow
def test_the_proof_of_a_start_knows_orders(ops: GpuOps) -> None:
    """EngineFault where it multiplies with inputs in another order."""
    prove(ops, "q", ops.pack_weight(ordered("Q4_0", 5, order_of(3), rows=16)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_gives_what_the_host_gives_and_a_row_has_its_bits_in_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_hand, "poison_blocks", lambda kv, blocks: None)
    ops = GpuOps(fake_gpu.FakeDriver(), 64 << 20)
    decoder = load_model(FOLDER, ops)
    crowd = by_hand.Decoding(decoder, ops, dtype="float32")
    both = crowd.step([("p", TOKENS), ("q", TOKENS[3:9])])
    host = by_hand.backend("reference")
    expected = by_hand.Decoding(load_model(FOLDER, host), host).step([("p", TOKENS)])[0]
    assert np.abs(both[0] - expected).max() < 0.03 * np.abs(expected).max()
    assert ops.driver.launched.count("take_columns") == 3  # for q, k and v, for o, for gate and up
    single = by_hand.Decoding(decoder, ops, dtype="float32")
    one = np.concatenate([single.step([("p", [token])])[0] for token in TOKENS])
    assert (one == both[0]).all()
    assert ops.driver.replayed > 0
