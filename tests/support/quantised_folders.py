"""Folders quantised in layouts that people bring, beside a folder of the same values in floats.

The packers follow the libraries' own words (AutoGPTQ, AutoAWQ, AutoRound, ModelOpt, compressed-tensors), one value
after the other, so that they share nothing with the readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.formats import float8
from pageturner.formats.safetensors import open_safetensors
from support.hf_folder import GOLDENS
from support.safetensors_writer import Tensor, write_safetensors

SOURCE = GOLDENS / "families" / "llama3"
GROUP = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]
Packed = tuple[Tensors, np.ndarray]  # of one matrix: endings of its tensors, its values


def stream(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers along the last axis as words of 32 bits, each behind the one before it, lowest bit first."""
    flags = values[..., None].astype(np.int64) >> np.arange(bits) & 1
    raw = np.packbits(
        flags.reshape(*values.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little"
    )
    return np.ascontiguousarray(raw).view("<i4")


def planes(values: np.ndarray, bits: int) -> np.ndarray:
    """The same in planes, as GPTQModel packs integers of 5 to 7 bits: of each 32 neighbours first a word for each
    bit of the lowest plane, in which all bits of that plane of an integer stand together."""
    words = []
    for block in range(0, values.shape[-1], 32):
        low = 0
        for width in {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]:
            for first in range(block, block + 32, 32 // width):
                word = np.zeros(values.shape[:-1], np.int64)
                for i in range(32 // width):
                    word |= (values[..., first + i] >> low & (1 << width) - 1) << width * i
                words.append(word)
            low += width
    return np.stack(words, axis=-1).astype(np.uint32).view("<i4")


def tensor(kind: str, values: np.ndarray) -> Tensor:
    return kind, values.shape, np.ascontiguousarray(values).tobytes()


def integers(draw: np.random.Generator, shape: tuple[int, int], bits: int, symmetric: bool) -> Any:
    """(codes [N, K], scales [N, groups] in fp16, zero-points, values)."""
    rows, columns = shape
    codes = draw.integers(0, 1 << bits, shape)
    scale = draw.uniform(0.01, 0.03, (rows, columns // GROUP)).astype(np.float16)
    zero = draw.integers(1, 1 << bits, scale.shape)
    if symmetric:
        zero[:] = 1 << (bits - 1)
    wide = [np.repeat(x, GROUP, axis=1) for x in (scale.astype(np.float32), zero)]
    return codes, scale, zero, (wide[0] * (codes - wide[1])).astype(np.float32)


def gptq(
    bits: int, symmetric: bool, minus: int, bias: bool = False, words: Any = stream
) -> Callable[..., Packed]:
    """`minus`: what is taken from each zero-point that is stored."""

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, scale, zero, values = integers(draw, shape, bits, symmetric)
        found = {
            ".qweight": tensor("I32", words(codes, bits).T),
            ".qzeros": tensor("I32", words(zero.T - minus, bits)),
            ".scales": tensor("F16", scale.T),
        }
        if bias:
            found[".bias"] = tensor("F16", np.zeros(shape[0], np.float16))
        return found, values

    return pack


def awq_gemm(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scale, zero, values = integers(draw, shape, 4, False)

    def ordered(x: np.ndarray) -> np.ndarray:
        return stream(x.reshape(len(x), -1, 8)[..., AWQ_ORDER].reshape(x.shape), 4)

    return {
        ".qweight": tensor("I32", ordered(codes.T)),
        ".qzeros": tensor("I32", ordered(zero.T)),
        ".scales": tensor("F16", scale.T),
    }, values


def awq_gemv(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scale, zero, values = integers(draw, shape, 4, False)
    width = 16  # words: those of the groups in whole fours, four times
    zeros, scales = (np.zeros((shape[0], width * 8), x.dtype) for x in (zero, scale))
    zeros[:, : zero.shape[1]], scales[:, : scale.shape[1]] = zero, scale
    return {
        ".qweight": tensor("I32", stream(codes, 4)),
        ".qzeros": tensor("I32", stream(zeros, 4)),
        ".scales": tensor("F16", scales),
    }, values


def awq_gemv_fast(zeros: str) -> Callable[..., Packed]:
    """AutoAWQ's `pack_intweight`, one integer after the other."""

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, scale, zero, _ = integers(draw, shape, 4, False)
        rows, columns = shape
        nibbles = []
        for row in range(0, rows, 4):
            for column in range(0, columns, 64):
                for each in range(row, row + 4):
                    for half in (column, column + 32):
                        nibbles += [
                            codes[each, half + 8 * b + 2 * g + c]
                            for g in range(4)
                            for c in range(2)
                            for b in range(4)
                        ]
        low = (-scale.astype(np.float32) * zero).astype(np.float16)
        padded = [np.zeros((8, rows), np.float16) for _ in range(2)]
        for target, values in zip(padded, (scale, low), strict=True):
            target[: values.shape[1]] = values.T
        wide = [np.repeat(x.astype(np.float32), GROUP, axis=1) for x in (scale, low)]
        packed = stream(np.array(nibbles), 4).view("<i2").reshape(rows // 4, columns)
        return {
            ".qweight": tensor("I16", packed),
            ".scales": tensor("F16", padded[0]),
            zeros: tensor("F16", padded[1]),
        }, wide[0] * codes + wide[1]

    return pack


def mlx(bits: int) -> Callable[..., Packed]:
    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, scale, zero, _ = integers(draw, shape, bits, False)
        low = (-scale * zero * 0.9).astype(np.float16)
        wide = [np.repeat(x.astype(np.float32), GROUP, axis=1) for x in (scale, low)]
        return {
            ".weight": tensor("U32", stream(codes, bits)),
            ".scales": tensor("F16", scale),
            ".biases": tensor("F16", low),
        }, wide[0] * codes + wide[1]

    return pack


def nvfp4(divides: bool) -> Callable[..., Packed]:
    """As compressed-tensors has it, where the scale of the whole divides, or as ModelOpt."""

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes = draw.integers(0, 16, shape).astype(np.uint8)
        scale = draw.integers(0x30, 0x60, (shape[0], shape[1] // 16)).astype(np.uint8)
        whole = np.float32(731.0 if divides else 0.0013)
        wide = float8.VALUES[scale] / whole if divides else float8.VALUES[scale] * whole
        sign = np.where(codes >= 8, np.float32(-1), np.float32(1))
        values = np.repeat(wide.astype(np.float32), 16, axis=1) * (E2M1[codes & 7] * sign)
        names = (
            (".weight_packed", ".weight_global_scale")
            if divides
            else (".weight", ".weight_scale_2")
        )
        return {
            names[0]: tensor("U8", codes[:, 0::2] | codes[:, 1::2] << 4),
            ".weight_scale": tensor("F8_E4M3", scale),
            names[1]: tensor("F32", np.array([whole])),
            ".input_global_scale" if divides else ".input_scale": tensor("F32", np.array([whole])),
        }, values.astype(np.float32)

    return pack


def fp8_whole(draw: np.random.Generator, shape: tuple[int, int]) -> Packed:
    bits = (draw.integers(0, 0x70, shape) | draw.integers(0, 2, shape) << 7).astype(np.uint8)
    return {
        ".weight": tensor("F8_E4M3", bits),
        ".weight_scale": ("F32", (), np.float32(0.0011).tobytes()),
        ".input_scale": ("F32", (), np.float32(1).tobytes()),
    }, float8.VALUES[bits] * np.float32(0.0011)


MLX = {"group_size": GROUP}  # without a name: it stands under `quantization`
G4 = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AR = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int"}
AR |= {"autoround_version": "0.5.1", "iters": 200}
NV = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
            },
        }
    },
}
MO = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
# Name -> how matrices are packed, what says so, in which file ("config.json": its quantization_config).
FORMATS: dict[str, tuple[Callable[..., Packed], dict[str, Any], str]] = {
    "gptq 3 bits": (gptq(3, True, 1), G4 | {"bits": 3, "sym": True}, "config.json"),
    "gptq 3 bits, asymmetric": (gptq(3, False, 1), G4 | {"bits": 3, "sym": False}, "config.json"),
    "gptq 3 bits, version 2": (
        gptq(3, False, 0),
        G4 | {"bits": 3, "sym": False, "checkpoint_format": "gptq_v2"},
        "config.json",
    ),
    "gptq sym with v2 zeros": (gptq(4, True, 0), G4 | {"sym": True}, "config.json"),
    "gptq v2 with v1 zeros": (
        gptq(4, True, 1),
        G4 | {"sym": True, "checkpoint_format": "gptq_v2"},
        "config.json",
    ),
    "gptq 8 bits sym with v2 zeros": (
        gptq(8, True, 0),
        G4 | {"bits": 8, "sym": True},
        "config.json",
    ),
    "gptq with biases of zeros": (gptq(4, True, 1, True), G4 | {"sym": True}, "config.json"),
    "gptq by quantize_config.json": (
        gptq(4, False, 1),
        {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "damp_percent": 0.01},
        "quantize_config.json",
    ),
    **{
        f"gptq {bits} bits in planes": (
            gptq(bits, False, 0, words=planes),
            G4 | {"bits": bits, "sym": False, "checkpoint_format": "gptq_p"},
            "config.json",
        )
        for bits in (3, 5, 6, 7)
    },
    "gptq 6 bits, version 1": (
        gptq(6, False, 1, words=planes),
        G4 | {"bits": 6, "sym": False},
        "config.json",
    ),
    "gptq 5 bits, symmetric": (
        gptq(5, True, 0, words=planes),
        G4 | {"bits": 5, "sym": True, "checkpoint_format": "gptq_p"},
        "config.json",
    ),
    "awq gemv_fast": (
        awq_gemv_fast(".qzeros"),
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv_fast"},
        "config.json",
    ),
    "awq gemv_fast by quant_config.json": (
        awq_gemv_fast(".qzeros"),
        {"w_bit": 4, "q_group_size": GROUP, "version": "GEMV_FAST", "zero_point": True},
        "quant_config.json",
    ),
    "llm-awq": (
        awq_gemv_fast(".scaled_zeros"),
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "format": "llm-awq"},
        "config.json",
    ),
    "awq gemv": (
        awq_gemv,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv"},
        "config.json",
    ),
    "awq gemv by quant_config.json": (
        awq_gemv,
        {"w_bit": 4, "q_group_size": GROUP, "version": "GEMV", "zero_point": True},
        "quant_config.json",
    ),
    "mlx": (mlx(4), MLX | {"bits": 4}, "config.json"),
    "mlx 3 bits": (mlx(3), MLX | {"bits": 3, "mode": "affine"}, "config.json"),
    "mlx with another setting for a matrix": (
        mlx(4),
        MLX
        | {"bits": 8}
        | {
            f"model.layers.{i}.{part}_proj": {"bits": 4, "group_size": GROUP}
            for i in range(2)
            for part in (
                *(f"self_attn.{one}" for one in "qkvo"),
                *(f"mlp.{one}" for one in ("gate", "up", "down")),
            )
        },
        "config.json",
    ),
    "auto-round": (gptq(4, False, 0), AR | {"packing_format": "auto_round"}, "config.json"),
    "auto-round as gptq": (
        gptq(4, False, 1),
        AR | {"packing_format": "auto_round:auto_gptq", "sym": False},
        "config.json",
    ),
    "auto-round as gptqmodel, 3 bits": (
        gptq(3, True, 0),
        AR | {"packing_format": "auto_round:gptqmodel", "sym": True, "bits": 3},
        "config.json",
    ),
    "auto-round as awq": (awq_gemm, AR | {"packing_format": "auto_round:auto_awq"}, "config.json"),
    "modelopt fp8": (fp8_whole, MO | {"quant_algo": "FP8"}, "config.json"),
    "modelopt fp8 by hf_quant_config.json": (
        fp8_whole,
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        "hf_quant_config.json",
    ),
    "modelopt nvfp4": (
        nvfp4(False),
        MO | {"quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}},
        "config.json",
    ),
    "compressed-tensors nvfp4": (nvfp4(True), NV, "config.json"),
}


# of which no kind here holds the very values
ROUNDED = {"mlx 6 bits": (mlx(6), MLX | {"bits": 6}, "config.json")}


def make_folders(folder: Path, name: str, seed: int = 1) -> tuple[Path, Path]:
    """(the quantised folder, one of the same values in floats): a model twice as wide as its source."""
    pack, said, where = (FORMATS | ROUNDED)[name]
    draw, file = np.random.default_rng(seed), open_safetensors(SOURCE)
    quantised: Tensors = {}
    floats: Tensors = {}
    for key in file.tensors:
        kind, shape, raw = file.tensor(key)
        if not key.endswith("_proj.weight"):
            values = np.frombuffer(raw, np.float32).reshape(shape)
            quantised[key] = floats[key] = tensor(kind, np.concatenate([values, values], axis=-1))
            continue
        packed, values = pack(draw, (max(2 * shape[0], 64), 2 * shape[1]))
        floats[key] = tensor("F32", values.astype(np.float32))
        stem = key.removesuffix(".weight")
        quantised |= {stem + ending: t for ending, t in packed.items()}
    config = json.loads((SOURCE / "config.json").read_text()) | {"num_key_value_heads": 4}
    config |= {size: 2 * config[size] for size in ("hidden_size", "intermediate_size", "head_dim")}
    paths = folder / "quantised", folder / "floats"
    for path in paths:
        path.mkdir(parents=True)
    write_safetensors(paths[1] / "model.safetensors", floats)
    (paths[1] / "config.json").write_text(json.dumps(config))
    old = where == "quantize_config.json"
    write_safetensors(
        paths[0] / f"{'gptq_model-4bit-32g' if old else 'model'}.safetensors", quantised
    )
    if where == "config.json" and "mlx" in name:
        config["quantization"] = said
    elif where == "config.json":
        config["quantization_config"] = said
    else:
        (paths[0] / where).write_text(json.dumps(said))
    (paths[0] / "config.json").write_text(json.dumps(config))
    return paths
