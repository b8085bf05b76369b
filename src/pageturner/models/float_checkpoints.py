"""Checkpoints of 8-bit floats (DeepSeek, Qwen3, FBGEMM) and of 4-bit floats (gpt-oss), of ModelOpt,
and of bitsandbytes.

Owns their tensors and the keys of their quantization_config. Sources: the integrations of
Transformers (finegrained_fp8, fbgemm_fp8, mxfp4, bitsandbytes), the OCP specification of
microscaling formats, and `QuantState` of bitsandbytes. Must not know kernels.

fp8           X.weight e4m3 [N, K], X.weight_scale_inv of blocks [N / 128, K / 128] (which
              multiplies), or X.weight_scale: one, or one for each output
modelopt      FP8: X.weight e4m3 [N, K] as above. NVFP4: X.weight uint8 [N, K / 2], two e2m1 floats
              in a byte, X.weight_scale e4m3 [N, K / 16], X.weight_scale_2 of the whole
mxfp4         X_blocks uint8 [experts, N, K / 32, 16], X_scales uint8 [experts, N, K / 32]
bitsandbytes  4 bits: X.weight uint8 [N * K / 2, 1], X.weight.absmax of blocks, X.weight.quant_map
              [16], or absmax as indices of X.weight.nested_quant_map with X.weight.nested_absmax
              and an offset; and JSON in X.weight.quant_state.bitsandbytes__nf4. 8 bits: X.weight
              int8 [N, K], X.SCB [N], the largest of each row
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pageturner.kernels.base import F32
from pageturner.models.checkpoint_tensors import CheckpointTensors
from pageturner.models.hf_values import HFConfig
from pageturner.models.quantised_matrix import (
    QuantisedMatrix,
    Readers,
    block_sizes,
    check_scales,
    invalid,
    of_bytes,
    of_float4,
    of_float8,
    of_nvfp4,
    of_table,
)
from pageturner.models.spec import unsupported

_HARMLESS = """
    activation_scale_ub activation_scheme dequantize ignored_layers kv_cache_scheme
    modules_to_not_convert scale_fmt
"""
_BNB_HARMLESS = """
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit
"""
_STATE = ".quant_state.bitsandbytes__"


def fp8(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault 'quantization_invalid', 'model_unsupported' and those of tensors."""
    if config.raw("fmt") != "float8_e4m3fn":  # as MiniMax calls it
        config.expect("fmt", "e4m3")
    config.expect("weight_per_tensor", False)
    said = config.raw("weight_block_size")
    block = None if said is None else block_sizes("weight_block_size", said)
    config.ignore(_HARMLESS)
    config.done()

    def read(prefix: str) -> QuantisedMatrix:
        bits = tensors.bytes(prefix + ".weight", "F8_E4M3", (None, None))
        rows, columns = bits.shape
        name = prefix + ".weight_scale"
        if tensors.has(name + "_inv"):
            name += "_inv"
        shape = tensors.shape(name)
        if len(shape) == 4:  # ModelOpt: of blocks, with the sizes within blocks as 1
            shape = (shape[0], shape[2])
        if len(shape) == 2 and block is not None:
            blocks = (-(-rows // block[0]), -(-columns // block[1]))
            return of_float8(prefix, bits, tensors.floats(name, blocks), block)
        whole = shape in ((), (1,), (1, 1))
        if not whole and shape not in ((rows,), (rows, 1)):
            raise invalid(f"{name} has shape {shape}, and there is no weight_block_size")
        size = (rows if whole else 1, columns)
        return of_float8(prefix, bits, tensors.floats(name, shape).reshape(-1, 1), size)

    return tensors.readers(".weight", read, ("F8_E4M3",))


def modelopt(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `fp8`."""
    inner = config.section("quantization") or config
    algorithm = inner.get("quant_algo", str, "FP8").upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"):
        raise unsupported(f"ModelOpt with {algorithm} is not supported; FP8 and NVFP4 are")

    def four(prefix: str) -> QuantisedMatrix:
        packed = tensors.bytes(prefix + ".weight", "U8", (None, None))
        shape = (packed.shape[0], packed.shape[1] // 8)
        scale = tensors.floats(prefix + ".weight_scale", shape)
        name = prefix + ".weight_scale_2"
        return of_nvfp4(
            prefix, packed, scale * tensors.floats(name, tensors.shape(name)).reshape(1, 1)
        )

    blocks = {"FP8_PB_WO": {"weight_block_size": [128, 128]}}
    eight = fp8(HFConfig(blocks.get(algorithm, {}), "quantization_config"), tensors)
    return eight | tensors.readers(".weight", four, ("U8",))


def mxfp4(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `fp8`. What comes out has experts first, then outputs."""
    config.ignore(_HARMLESS)
    config.done()

    def read(name: str) -> QuantisedMatrix:
        packed = tensors.bytes(name + "_blocks", "U8", (None, None, None, 16))
        experts, rows, groups, _ = packed.shape
        exponents = tensors.bytes(name + "_scales", "U8", (experts, rows, groups))
        flat = packed.reshape(experts * rows, groups * 16)
        return of_float4(name, flat, exponents.reshape(experts * rows, groups), experts)

    readers = tensors.readers("_blocks", read)
    return {name.removesuffix(".weight"): reader for name, reader in readers.items()}


def bitsandbytes(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `fp8`."""
    config.ignore(_BNB_HARMLESS)
    config.done()

    def four(prefix: str) -> QuantisedMatrix:
        return _four_bits(prefix + ".weight", tensors)

    def eight(prefix: str) -> QuantisedMatrix:
        q = tensors.bytes(prefix + ".weight", "I8", (None, None))
        largest = tensors.floats(prefix + ".SCB", (q.shape[0],))
        return of_bytes(prefix, q, (largest / np.float32(127)).reshape(-1, 1))

    whole = tensors.readers(".weight", eight, ("I8",))
    return whole | tensors.readers(".weight", four, ("U8",))


def _four_bits(name: str, tensors: CheckpointTensors) -> QuantisedMatrix:
    states = [other for other in tensors.infos if other.startswith(name + _STATE)]
    if len(states) != 1:
        raise invalid(
            f"{name} has {len(states)} tensors {_STATE[1:]}*; one says how it is quantised"
        )
    try:
        state = json.loads(bytes(tensors.bytes(states[0], "U8", (None,))))
        kind, block = state["quant_type"], int(state["blocksize"])
        rows, columns = (int(n) for n in state["shape"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise invalid(f"{states[0]} is not understood: {error!r}") from error
    if kind not in ("nf4", "fp4"):
        raise unsupported(f"bitsandbytes of type {kind!r} is not supported; nf4, fp4 and int8 are")
    if not (rows > 0 and columns > 0 and block > 0 and rows * columns % block == 0):
        raise invalid(f"{states[0]} says a shape of ({rows}, {columns}) in blocks of {block}")
    packed = tensors.bytes(name, "U8", (rows * columns // 2, 1)).reshape(-1)
    table = tensors.floats(name + ".quant_map", (16,))
    scale = _absmax(name, tensors, state, rows * columns // block)
    return of_table(name, packed, table, scale, (rows, columns), block)


def _absmax(name: str, tensors: CheckpointTensors, state: dict[str, Any], count: int) -> F32:
    """The scale of each block; it may be quantised itself."""
    if tensors.kind(name + ".absmax") != "U8":
        return tensors.floats(name + ".absmax", (count,))
    indices = tensors.bytes(name + ".absmax", "U8", (count,))
    try:
        block, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise invalid(
            f"{name} has nested scales, of which its state says too little: {error!r}"
        ) from error
    if block < 1 or not np.isfinite(offset):
        raise invalid(f"{name} has nested scales in blocks of {block} with an offset of {offset}")
    outer = tensors.floats(name + ".nested_absmax", (-(-count // block),))
    table = tensors.floats(name + ".nested_quant_map", (256,))
    scale = table[indices] * outer[np.arange(count) // block] + np.float32(offset)
    check_scales(name, scale)
    return scale
