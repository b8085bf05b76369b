"""Folders quantised by the libraries that people use: their logits, and quantization configs that lie.

The folders are recorded by tests/tools/record_checkpoints.py, with the logits of their dequantised weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.formats.safetensors import open_safetensors
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model, open_model, what_becomes
from support.decoding import logits
from support.refusals import engine_fault
from support.safetensors_writer import tensors_of, write_safetensors

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
TOKENS = [7 * i % 64 for i in range(24)]
REFERENCE = ReferenceOps()
# What their matrices are read as. A star: with a rounding, which is said.
KINDS = {
    "gptq_32": "Q4_0",
    "gptq_64": "Q4_W",
    "gptq_v2": "Q4_W",
    "gptq_column": "Q4_0",
    "gptq_act": "Q4_0",
    "gptq_8": "Q8_0",
    "gptq_8_asym": "Q8_0*",
    "awq_32": "Q4_W",
    "awq_128": "Q4_W",
    "ct_w4_32": "Q4_0",
    "ct_w4_64_asym": "Q4_W",
    "ct_w4_channel": "Q4_0",
    "ct_w8_128": "Q8_0",
    "ct_w8a8": "Q8_W",
    "ct_fp8": "F8_W",
    "ct_fp8_tensor": "F8_W",
    "ct_fp8_block": "F8_W",
    "ct_mxfp4": "MXFP4",
    "fp8_block": "F8_W",
    "fp8_block_96": "F8_W",
    "fp8_tensor": "F8_W",
    "bnb_nf4": "T4_W*",
    "bnb_nf4_double": "T4_W*",
    "bnb_int8": "Q8_W",
}


def error(path: Path, ops: Any = REFERENCE, **options: str) -> float:
    """Of logits, relative, as root mean square."""
    expected = np.load(path / "logits.npy")
    got = logits(path, TOKENS, ops, **options)
    return float(np.sqrt(np.mean((got - expected) ** 2)) / expected.std())


def test_every_recorded_folder_is_tested() -> None:
    assert {path.name for path in CHECKPOINTS.iterdir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_the_library(name: str) -> None:
    rounded = KINDS[name].endswith("*")
    assert error(CHECKPOINTS / name, dtype="float32") < (0.02 if rounded else 2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_each_matrix_has_the_smallest_kind_that_holds_it_and_says_what_it_loses(name: str) -> None:
    file, _, _ = open_model(CHECKPOINTS / name)
    assert file.tensors["model.layers.0.self_attn.k_proj.weight"].kind == KINDS[name].strip("*")
    lines = what_becomes(file)
    assert len(lines) == KINDS[name].endswith("*")
    assert all("becomes" in line and line.endswith("in 7 matrices") for line in lines)


@pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
@pytest.mark.parametrize("name", KINDS)
def test_kernels_are_as_near_as_those_of_other_kinds(name: str) -> None:
    """Floats by fp32; integers with activations of 8 bits, which cost most of it."""
    bound = 2e-6 if KINDS[name] == "F8_W" else 0.025 if KINDS[name].endswith("*") else 0.012
    assert error(CHECKPOINTS / name, NativeOps(1)) < bound


def test_a_checkpoint_of_floats_can_be_rounded_at_load() -> None:
    assert 1e-4 < error(CHECKPOINTS / "fp8_block", quantization="int8") < 0.03


# -- quantization configs that lie ---------------------------------------------------------------------------
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Q = "model.layers.0.self_attn.q_proj"


def damaged(
    name: str, folder: Path, change: Callable[[dict[str, Any], Tensors], object]
) -> EngineFault:
    """What is said of a copy that was changed."""
    shutil.copytree(CHECKPOINTS / name, folder)
    tensors = tensors_of(folder)
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    with engine_fault() as caught:
        load_model(folder, REFERENCE)
    return caught.value


def said(**values: Any) -> Callable[[dict[str, Any], Tensors], object]:
    """The config with other values."""
    return lambda config, tensors: config.update(values)


def without(name: str) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, tensors: tensors.pop(name)


def data(name: str, array: np.ndarray, at: int) -> Callable[[dict[str, Any], Tensors], object]:
    """A tensor with other elements from `at` on."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        kind, shape, raw = tensors[name]
        new, start = array.tobytes(), at * array.itemsize
        tensors[name] = (kind, shape, raw[:start] + new + raw[start + len(new) :])

    return change


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda config, tensors: tensors.update(
        {name: (tensors[name][0], shape, tensors[name][2])}
    )


def scheme(**values: Any) -> Callable[[dict[str, Any], Tensors], object]:
    """Of compressed-tensors: what it says of weights."""
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(values)


NAN16, NAN32 = np.array([np.nan], np.float16), np.array([np.nan], np.float32)
LIES: dict[str, tuple[str, Callable[[dict[str, Any], Tensors], object], str, str]] = {
    "GPTQ bits": ("gptq_32", said(bits=8), "tensor_shape", Q),
    "GPTQ group": ("gptq_32", said(group_size=64), "tensor_shape", "scales"),
    "GPTQ group of no size": (
        "gptq_32",
        said(group_size=0),
        "quantization_invalid",
        "group_size is 0",
    ),
    "GPTQ group that does not fit": ("gptq_32", said(group_size=96), "quantization_invalid", "96"),
    "GPTQ scales": ("gptq_32", without(Q + ".scales"), "tensor_missing", Q + ".scales"),
    "GPTQ zero-points": ("gptq_32", without(Q + ".qzeros"), "tensor_missing", Q + ".qzeros"),
    "GPTQ symmetry": (
        "gptq_32",
        data(Q + ".qzeros", np.array([5], np.int32), 0),
        "quantization_invalid",
        "symmetric",
    ),
    "GPTQ order": (
        "gptq_act",
        data(Q + ".g_idx", np.array([4], np.int32), 5),
        "quantization_invalid",
        "g_idx",
    ),
    "GPTQ order below": (
        "gptq_act",
        data(Q + ".g_idx", np.array([-1], np.int32), 5),
        "quantization_invalid",
        "g_idx",
    ),
    "GPTQ scale": ("gptq_32", data(Q + ".scales", NAN16, 3), "quantization_invalid", Q),
    "GPTQ shape": ("gptq_32", reshaped(Q + ".qweight", (32, 64)), "tensor_shape", Q),
    "Marlin": ("gptq_32", said(checkpoint_format="marlin"), "model_unsupported", "'marlin'"),
    "old Marlin": ("gptq_32", said(is_marlin_format=True), "model_unsupported", "'marlin'"),
    "9 bits": ("gptq_32", said(bits=9), "model_unsupported", "9 bits"),
    "3 bits": ("gptq_32", said(bits=3), "quantization_invalid", "group_size"),
    "bits of another type": ("gptq_32", said(bits="4"), "config_invalid", "bits"),
    "AWQ layout": ("awq_32", said(version="ipex"), "model_unsupported", "'ipex'"),
    "AWQ as fast GEMV": ("awq_32", said(version="gemv_fast"), "weight_kind", "I16"),
    "AWQ as GEMV": ("awq_32", said(version="gemv"), "tensor_shape", "qzeros"),
    "AWQ group": ("awq_32", said(group_size=64), "tensor_shape", "scales"),
    "AWQ as GPTQ": ("awq_32", said(quant_method="gptq"), "tensor_shape", "scales"),
    "AWQ scale": ("awq_32", data(Q + ".scales", NAN16, 0), "quantization_invalid", Q),
    "compressed bits": ("ct_w4_32", scheme(num_bits=8), "tensor_shape", "weight_packed"),
    "compressed group": ("ct_w4_32", scheme(group_size=64), "tensor_shape", "weight_scale"),
    "compressed symmetry": (
        "ct_w4_32",
        scheme(symmetric=False),
        "tensor_missing",
        "weight_zero_point",
    ),
    "compressed shape": (
        "ct_w4_32",
        data(Q + ".weight_shape", np.array([256], np.int64), 0),
        "tensor_shape",
        Q,
    ),
    "compressed format": ("ct_w4_32", said(format="marlin-24"), "model_unsupported", "'marlin-24'"),
    "compressed targets": (
        "ct_w4_32",
        lambda config, _: config["config_groups"]["group_0"].update(targets=["re:.*mlp.*"]),
        "quantization_invalid",
        "none of its groups",
    ),
    "compressed scheme": (
        "ct_w4_32",
        said(config_groups=None),
        "quantization_invalid",
        "config_groups",
    ),
    "float blocks": (
        "fp8_block",
        said(weight_block_size=[64, 64]),
        "tensor_shape",
        "weight_scale_inv",
    ),
    "float blocks of nonsense": (
        "fp8_block",
        said(weight_block_size=[0]),
        "quantization_invalid",
        "[0]",
    ),
    "float format": ("fp8_block", said(fmt="e5m2"), "model_unsupported", "e5m2"),
    "float scale": (
        "fp8_block",
        data(Q + ".weight_scale_inv", NAN32, 0),
        "quantization_invalid",
        Q,
    ),
    "float value": (
        "fp8_block",
        data(Q + ".weight", np.array([0x7F], np.uint8), 9),
        "quantization_invalid",
        Q,
    ),
    "float scales": ("fp8_block", without(Q + ".weight_scale_inv"), "tensor_missing", Q),
    "4-bit scale": (
        "ct_mxfp4",
        data(Q + ".weight_scale", np.array([255], np.uint8), 7),
        "quantization_invalid",
        Q,
    ),
    "nf4 state": (
        "bnb_nf4",
        without(Q + ".weight.quant_state.bitsandbytes__nf4"),
        "quantization_invalid",
        Q,
    ),
    "nf4 blocks": (
        "bnb_nf4",
        lambda _, tensors: state(tensors, blocksize=128),
        "tensor_shape",
        "absmax",
    ),
    "nf4 shape": ("bnb_nf4", lambda _, tensors: state(tensors, shape=[64, 128]), "tensor_shape", Q),
    "nf4 type": (
        "bnb_nf4",
        lambda _, tensors: state(tensors, quant_type="nf3"),
        "model_unsupported",
        "nf3",
    ),
    "nf4 scale": ("bnb_nf4", data(Q + ".weight.absmax", NAN32, 2), "quantization_invalid", Q),
    "nested scale": (
        "bnb_nf4_double",
        data(Q + ".weight.nested_absmax", NAN32, 0),
        "quantization_invalid",
        Q,
    ),
    "int8 scales": ("bnb_int8", without(Q + ".SCB"), "tensor_missing", Q + ".SCB"),
    "another method": ("gptq_32", said(quant_method="quip"), "model_unsupported", "quip"),
    "nothing quantised": (
        "fp8_block",
        said(quant_method="gptq", bits=4),
        "quantization_invalid",
        "no weights",
    ),
}


def state(tensors: Tensors, **values: Any) -> None:
    name = Q + ".weight.quant_state.bitsandbytes__nf4"
    raw = json.dumps(json.loads(tensors[name][2]) | values).encode()
    tensors[name] = ("U8", (len(raw),), raw)


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_true_is_told(tmp_path: Path, lie: str) -> None:
    name, change, code, part = LIES[lie]
    fault = damaged(name, tmp_path / "model", change)
    assert fault.code == code
    assert part in fault.message
    assert str(tmp_path / "model") in fault.message
    assert "\n" not in fault.message


def test_experts_of_four_bits_come_out_with_outputs_first(tmp_path: Path) -> None:
    """The layout of gpt-oss: blocks of 16 bytes, neighbours in a byte, the first in its low nibble."""
    from pageturner.formats.ggml import dequantise
    from pageturner.models.checkpoint import open_checkpoint

    draw = np.random.default_rng(5)
    blocks = draw.integers(0, 256, (3, 4, 2, 16), dtype=np.uint8)
    scales = draw.integers(120, 130, (3, 4, 2), dtype=np.uint8)
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "x.gate_up_proj_blocks": ("U8", blocks.shape, blocks.tobytes()),
            "x.gate_up_proj_scales": ("U8", scales.shape, scales.tobytes()),
        },
    )
    config = {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    file = open_checkpoint(config, open_safetensors(tmp_path), "config.json")
    kind, shape, raw = file.tensor("x.gate_up_proj")
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.empty((3, 4, 64))
    for place in np.ndindex(3, 4, 64):
        byte = blocks[(*place[:2], place[2] // 32, place[2] % 32 // 2)]
        code = byte >> 4 if place[2] % 2 else byte & 15
        size = table[code & 7] * 2.0 ** (int(scales[(*place[:2], place[2] // 32)]) - 127)
        expected[place] = -size if code & 8 else size
    assert (kind, shape, set(file.tensors)) == ("MXFP4", (3, 4, 64), {"x.gate_up_proj"})
    np.testing.assert_array_equal(dequantise(kind, shape, np.frombuffer(raw, np.uint8)), expected)


NONSENSE = (None, -1, "x", [0], {"x": 1}, True)


@pytest.mark.parametrize(
    "name", ["gptq_32", "awq_32", "ct_w4_64_asym", "ct_fp8_block", "fp8_block", "bnb_nf4_double"]
)
def test_nonsense_in_any_place_is_an_error_with_a_code_or_harmless(
    tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(CHECKPOINTS / name, tmp_path / "model"))
    whole = json.loads((folder / "config.json").read_text())

    def places(inside: Any) -> list[tuple[Any, Any]]:
        """Every (object, key) within."""
        found = [(inside, key) for key in inside]
        return found + [
            place for value in inside.values() if isinstance(value, dict) for place in places(value)
        ]

    tried = 0
    whole["quantization_config"].pop("meta", None)  # notes, which nobody reads
    for inside, key in places(whole["quantization_config"]):
        kept = inside[key]
        for value in NONSENSE:
            inside[key] = value
            (folder / "config.json").write_text(json.dumps(whole))
            with contextlib.suppress(EngineFault):
                open_model(folder)
            tried += 1
        inside[key] = kept
    assert tried > 20
