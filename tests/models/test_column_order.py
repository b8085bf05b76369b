"""GPTQ with `desc_act`: columns in the order of their groups, and inputs that are gathered in that order.

The folder and its logits are recorded (tests/tools/record_checkpoints.py); what its weights stand for is held
against these in test_checkpoints.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.kernels import grid

from pageturner.formats.ggml import dequantise
from pageturner.kernels.base import Tensor
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps
from pageturner.models import gptq_awq
from pageturner.models.gptq_awq import Placement, order_of, placement
from pageturner.models.load import load_model, open_model, what_becomes
from pageturner.models.quantise import in_place
from pageturner.models.shard import Shard
from pageturner.models.weights import read_part
from support.adapters import ALL, random_weights
from support.decoding import Decoding, backend
from support.refusals import engine_fault

FOLDER = Path(__file__).parents[1] / "goldens" / "checkpoints" / "gptq_act"
TOKENS = [7 * i % 64 for i in range(24)]
LAYER = "model.layers.0."
ORDER = np.random.default_rng(0).permutation(128).astype(np.int32)
ATTENTION = [f"self_attn.{p}_proj" for p in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def nothing_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices with groups of any columns are rounded to int8, as they are where no step could gather."""
    monkeypatch.setattr(gptq_awq, "placement", lambda *_: Placement({}, {}, {}))


# -- which matrices ------------------------------------------------------------------------------------------
def test_columns_lie_by_group_and_those_of_a_group_as_they_come() -> None:
    groups = np.arange(64, dtype=np.int32) % 2
    order = order_of(groups, 2)
    assert order is not None
    assert order.tolist() == [*range(0, 64, 2), *range(1, 64, 2)]


@pytest.mark.parametrize(
    "groups", [[0] * 40 + [1] * 24, [0, 1] * 24, [0] * 32 + [-1] * 32, [0] * 64], ids=str
)
def test_groups_that_are_no_whole_blocks_have_no_order(groups: list[int]) -> None:
    assert order_of(np.array(groups, np.int32), 2) is None


def placed(orders: dict[str, np.ndarray], *others: str) -> Placement:
    return placement([*orders, *others], orders, lambda name: name in others)


def test_products_that_share_their_input_are_gathered_once_and_down_not_at_all() -> None:
    every = {LAYER + name: ORDER for name in (*ATTENTION, *MLP)}
    found = placed(every)
    assert set(found.gathered) == {LAYER + name for name in (*ATTENTION, *MLP[:2])}
    assert set(found.made) == {LAYER + MLP[2]}
    assert set(found.rows) == {LAYER + name for name in MLP[:2]}


def test_one_of_them_with_another_order_leaves_all_of_them_where_they_are() -> None:
    orders = {LAYER + name: ORDER for name in (*ATTENTION, *MLP)}
    found = placed(orders | {LAYER + ATTENTION[1]: ORDER[::-1], LAYER + MLP[0]: ORDER[::-1]})
    assert set(found.gathered) == {LAYER + ATTENTION[3]}
    assert set(found.made) == {LAYER + MLP[2]}, "rows of gate and up need no order of their columns"


@pytest.mark.parametrize(
    "names",
    [
        ["lm_head"],
        [LAYER + "mlp.experts.0.up_proj"],
        [LAYER + "self_attn.o_proj"],
        [LAYER + MLP[2]],
    ],
)
def test_what_no_step_gathers_stays_where_it_is(names: list[str]) -> None:
    found = placed(dict.fromkeys(names, ORDER))
    assert (found.gathered, found.made, found.rows) == ({}, {}, {})


def test_biases_of_gate_and_up_keep_down_where_it_is() -> None:
    orders = {LAYER + name: ORDER for name in MLP}
    assert not placed(orders, LAYER + MLP[0] + ".bias").made


def test_the_recorded_folder_has_no_rounding_and_says_which_columns() -> None:
    file, _, layout = open_model(FOLDER)
    assert what_becomes(file) == []
    info = file.tensors[LAYER + "self_attn.o_proj.weight"]
    assert (info.kind, sorted(info.columns.tolist())) == ("Q4_0", list(range(info.shape[1])))
    assert file.tensors[LAYER + "mlp.down_proj.weight"].columns is None
    up, gate = (file.tensors[f"{LAYER}mlp.{name}_proj.weight"].rows for name in ("up", "gate"))
    np.testing.assert_array_equal(up, gate)
    assert not np.array_equal(up, np.arange(len(up)))
    assert read_part(file, layout.layers[0]["o"]).order is info.columns


# -- products ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("isa", ["reference", *available_isas()])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q8_W"])
def test_a_product_is_that_of_gathered_inputs_bit_for_bit(isa: str, kind: str) -> None:
    ops = ReferenceOps() if isa == "reference" else NativeOps(2, isa)
    order = np.random.default_rng(3).permutation(1056).astype(np.int32)
    tensor = grid.weight(kind, 40, 1056)
    for bits in (8, 12, 15):
        for rows in (1, 7, 60):
            x = grid.normal(rows, 1056)
            there = Tensor("w", kind, tensor.shape, tensor.data, bits, order)
            plain = Tensor("w", kind, tensor.shape, tensor.data, bits)
            got = ops.linear(x, ops.pack_weight(there))
            np.testing.assert_array_equal(
                got, ops.linear(np.ascontiguousarray(x[:, order]), ops.pack_weight(plain))
            )
            assert not np.array_equal(got, ops.linear(x, ops.pack_weight(plain)))


@pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
@pytest.mark.parametrize("order", [[0] * 64, [-1, *range(63)], list(range(1, 65)), list(range(32))])
def test_what_is_no_order_is_refused(order: list[int]) -> None:
    tensor = grid.weight("Q4_0", 16, 64)
    with engine_fault(code="bad_weight"):
        NativeOps(1).pack_weight(
            Tensor("w", "Q4_0", tensor.shape, tensor.data, 8, np.array(order, np.int32))
        )


def test_columns_go_back_where_a_backend_or_a_rank_needs_them() -> None:
    tensor = grid.weight("Q4_0", 16, 128)
    there = Tensor("w", "Q4_0", tensor.shape, tensor.data, 8, ORDER)
    back = in_place(there)
    assert (back.kind, back.order) == ("Q8_0", None)
    expected = np.empty((16, 128), np.float32)
    expected[:, ORDER] = dequantise("Q4_0", tensor.shape, tensor.data)
    got = dequantise(back.kind, back.shape, back.data)
    assert np.abs(got - expected).max() < 0.01 * np.abs(expected).max()


# -- whole models --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("isa", available_isas())
def test_rows_have_the_same_bits_alone_in_a_batch_and_on_any_threads(isa: str) -> None:
    found = []
    for threads in (1, 3):
        ops = NativeOps(threads, isa)
        decoder = load_model(FOLDER, ops)
        both = Decoding(decoder, ops).step([("p", TOKENS), ("q", TOKENS[3:9])])
        np.testing.assert_array_equal(both[0], Decoding(decoder, ops).step([("p", TOKENS)])[0])
        single = Decoding(decoder, ops)
        one = np.concatenate([single.step([("p", [token])])[0] for token in TOKENS])
        np.testing.assert_array_equal(both[0], one)
        found.append(both[0])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("ops", ["reference", "native"])
def test_adapters_are_added_to_the_neurons_that_they_are_of(
    ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same folder with everything where it was, in int8."""
    found, kept = [], []
    for _ in range(2):
        kernels = backend(ops)
        decoder = load_model(FOLDER, kernels, dtype="float32")
        decoder.adapters["a"] = decoder.pack_adapter(random_weights(decoder.spec, ALL, 5, 0, "F32"))
        found.append(Decoding(decoder, kernels, adapters={"p": "a"}).step([("p", TOKENS)])[0])
        kept.append(Decoding(decoder, kernels).step([("p", TOKENS)])[0])
        nothing_placed(monkeypatch)
    spread = np.std(found[0])
    assert np.sqrt(np.mean((found[0] - found[1]) ** 2)) < 0.04 * spread
    assert np.sqrt(np.mean((found[0] - kept[0]) ** 2)) > 0.2 * spread


def test_what_cannot_be_gathered_is_rounded_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_placed(monkeypatch)
    (line,) = what_becomes(open_model(FOLDER)[0])
    assert "desc_act" in line
    assert line.endswith("in 7 matrices")


@pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
def test_packed_weights_keep_their_order_on_disk(tmp_path: Path) -> None:
    ops = NativeOps(2)

    def logits() -> np.ndarray:
        decoder = load_model(FOLDER, ops, packed_cache=str(tmp_path))
        return np.asarray(Decoding(decoder, ops).step([("p", TOKENS)])[0])

    first = logits()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a file is damaged
        np.testing.assert_array_equal(logits(), first)
    assert len(list(tmp_path.glob("*.packed"))) == 1


@pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
def test_an_order_of_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Whoever wrote the file made its checksum too."""
    ops, tensor = NativeOps(1), grid.weight("Q4_0", 32, 128)
    weight = ops.pack_weight(Tensor("w", "Q4_0", tensor.shape, tensor.data, 8, ORDER))
    with open(tmp_path / "w", "wb+") as file:
        about, _ = ops.store_weight(weight, file.fileno(), 0)
        ops.fetch_weight(about, file.fileno(), 0)
        file.seek(weight.nbytes - 4)
        file.write(np.array([1 << 30], np.int32).tobytes())
        file.flush()
        with pytest.raises(ValueError, match="no order"):
            ops.fetch_weight(about, file.fileno(), 0)


def test_ranks_have_the_inputs_of_o_where_they_were() -> None:
    """Their heads are not those of a group of columns."""
    ops, (file, _, layout) = ReferenceOps(), open_model(FOLDER)
    whole = read_part(file, layout.layers[0]["o"])
    columns = whole.shape[1]
    shard = Shard(0, 2, {"heads": ((0, 1), (1, 2))}, columns // 2)
    assert shard.cuts_columns("o")
    half = dequantise("Q8_0", (whole.shape[0], columns // 2), shard.of("o", in_place(whole)).data)
    expected = dequantise(whole.kind, whole.shape, whole.data)[:, np.argsort(whole.order)]
    assert np.abs(half - expected[:, : columns // 2]).max() < 0.01 * np.abs(expected).max()
    assert "ordered" in ops.features
