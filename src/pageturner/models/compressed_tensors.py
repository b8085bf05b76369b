"""Checkpoints of compressed-tensors (llm-compressor): integers or 8-bit floats with scales by
groups.

Owns their tensors and the keys of their quantization_config. Source: the library's compressors.
Must not know kernels.

pack-quantized         X.weight_packed int32 [N, K * bits / 32], X.weight_shape (N, K),
                       X.weight_scale, and where not symmetric X.weight_zero_point int32 [N * bits /
                       32, groups]; integers are stored 2^(bits - 1) too large. X.weight_g_idx int32
                       [K]: the group of each input
int-quantized          X.weight int8 [N, K], X.weight_scale
float-quantized        X.weight e4m3 [N, K], X.weight_scale, also for blocks
naive-quantized        one of these two
mxfp4-pack-quantized   X.weight_packed [N, K / 2], X.weight_scale exponents [N, K / 32]
nvfp4-pack-quantized   X.weight_packed [N, K / 2], X.weight_scale e4m3 [N, K / 16], which
                       X.weight_global_scale [1] divides

Activations are rounded as they always are here, whatever it says of them: finer than it asks for.
"""

from __future__ import annotations

import re

import numpy as np

from pageturner.kernels.base import F32
from pageturner.models.checkpoint_tensors import CheckpointTensors
from pageturner.models.hf_values import HFConfig
from pageturner.models.quantised_matrix import (
    Codes,
    QuantisedMatrix,
    Readers,
    as_pairs,
    block_sizes,
    group_count,
    group_of_columns,
    invalid,
    of_bytes,
    of_codes,
    of_float4,
    of_float8,
    of_nvfp4,
    unpack,
    unpacked,
)
from pageturner.models.spec import unsupported

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)
_HARMLESS = """
    global_compression_ratio ignore kv_cache_scheme quantization_status transform_config version
"""


def compressed_tensors(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault 'quantization_invalid', 'model_unsupported' and those of tensors."""
    _check_format(config.get("format", str, "dense"))
    sparsity = config.raw("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise unsupported(
            f"compressed-tensors with sparsity {sparsity.get('format')!r} is not supported"
        )
    transforms = config.raw("transform_config")
    if transforms and transforms.get("config_groups"):
        raise unsupported("compressed-tensors with transforms is not supported")
    groups = config.section("config_groups")
    if groups is None:
        raise invalid("it has no config_groups")
    schemes = _schemes(groups, list(config.raw("config_groups")))
    config.ignore(_HARMLESS)
    config.done()

    def read(prefix: str) -> QuantisedMatrix:
        scheme = _scheme_of(schemes, prefix)
        if tensors.kind(prefix + ".weight_packed") == "U8":
            return _float4(tensors, prefix, scheme)
        if tensors.has(prefix + ".weight_packed"):
            return _packed(tensors, prefix, scheme)
        if tensors.kind(prefix + ".weight") == "I8":
            return _integers(tensors, prefix, scheme)
        return _floats(tensors, prefix, scheme)

    packed = tensors.readers(".weight_packed", read)
    return packed | tensors.readers(".weight", read, ("I8", "F8_E4M3"))


def _check_format(name: str) -> None:
    if name not in (*_FORMATS, "mixed-precision", "dense"):
        raise unsupported(
            f"compressed-tensors in the format {name!r} is not supported"
            f"; there are {', '.join(_FORMATS)}"
        )


def _schemes(groups: HFConfig, names: list[str]) -> list[tuple[list[str], HFConfig]]:
    """The targets of each group, and what it says of weights."""
    found = []
    for name in names:
        group = groups.section(name)
        weights = group and group.section("weights")
        if group is None or weights is None:
            raise invalid(f"its group {name!r} says nothing of weights")
        targets = group.raw("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise invalid(f"the targets of its group {name!r} are no list of names")
        if (form := group.raw("format")) is not None:
            _check_format(str(form))
        found.append((targets, weights))
    return found


def _scheme_of(schemes: list[tuple[list[str], HFConfig]], prefix: str) -> HFConfig:
    """The scheme of this module, found by its name, else by its class."""

    def named(target: str) -> bool:
        pattern = target.removeprefix("re:")
        try:
            return prefix == target or (target != pattern and re.match(pattern, prefix) is not None)
        except re.error as error:
            raise invalid(f"its target {target!r} is no pattern: {error}") from error

    for targets, weights in schemes:
        if any(named(target) for target in targets):
            return weights
    for targets, weights in schemes:
        if "Linear" in targets:
            return weights
    raise invalid(f"none of its groups is about {prefix}, which is quantised")


def _groups(scheme: HFConfig, prefix: str, columns: int) -> int:
    strategy = scheme.get("strategy", str, "group" if scheme.raw("group_size") else "tensor")
    size = scheme.get("group_size", int, -1) if strategy == "group" else -1
    return group_count(prefix, columns, size)


def _scale(tensors: CheckpointTensors, prefix: str, rows: int, groups: int) -> F32:
    """[rows, groups], whether it is one for the tensor or for each row or group."""
    name = prefix + ".weight_scale"
    if tensors.has(name) and tensors.shape(name) in ((), (1,)):
        return np.broadcast_to(
            tensors.floats(name, tensors.shape(name)).reshape(1, 1), (rows, groups)
        )
    return tensors.floats(name, (rows, groups))


def _packed(tensors: CheckpointTensors, prefix: str, scheme: HFConfig) -> QuantisedMatrix:
    bits = scheme.get("num_bits", int)
    if bits not in (2, 4, 8):
        raise unsupported(
            f"compressed-tensors with {bits} bits is not supported; 2, 4 and 8 bits are"
        )
    rows, columns = (int(n) for n in tensors.raw(prefix + ".weight_shape", "I64", (2,)))
    if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
        raise invalid(f"{prefix}.weight_shape is ({rows}, {columns})")
    words = tensors.raw(prefix + ".weight_packed", "I32", (rows, -(-columns * bits // 32)))
    groups = _groups(scheme, prefix, columns)
    zero = np.array([[1 << (bits - 1)]], np.int32)
    if not scheme.get("symmetric", bool, True):
        name = prefix + ".weight_zero_point"
        if tensors.kind(name) == "I8":
            zero = zero + tensors.raw(name, "I8", (rows, groups)).astype(np.int32)
        else:
            packed = tensors.raw(name, "I32", (-(-rows * bits // 32), groups))
            zero = unpack(np.ascontiguousarray(packed.T), bits)[:, :rows].T.astype(np.int32)
    order = group_of_columns(tensors, prefix + ".weight_g_idx", columns, groups)
    scale = _scale(tensors, prefix, rows, groups)
    pairs = as_pairs(words) if bits == 4 else None
    codes = Codes(prefix, (rows, columns), bits, unpacked(words, bits), scale, zero, order, pairs)
    return of_codes(codes, "compressed-tensors")


def _integers(tensors: CheckpointTensors, prefix: str, scheme: HFConfig) -> QuantisedMatrix:
    q = tensors.bytes(prefix + ".weight", "I8", (None, None))
    rows, columns = q.shape
    groups = _groups(scheme, prefix, columns)
    scale = _scale(tensors, prefix, rows, groups)
    name, zero = prefix + ".weight_zero_point", None
    if tensors.has(name) and not scheme.get("symmetric", bool, True):
        shape = tensors.shape(name)
        zero = tensors.raw(name, "I8", shape).astype(np.int32)
        if zero.size not in (1, rows * groups):
            raise invalid(f"{name} has shape {shape}")
        zero = zero.reshape((1, 1) if zero.size == 1 else (rows, groups))
    return of_bytes(prefix, q, scale, zero)


def _floats(tensors: CheckpointTensors, prefix: str, scheme: HFConfig) -> QuantisedMatrix:
    bits = tensors.bytes(prefix + ".weight", "F8_E4M3", (None, None))
    rows, columns = bits.shape
    if said := scheme.raw("block_structure"):
        block = block_sizes("block_structure", said)
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        return of_float8(prefix, bits, tensors.floats(prefix + ".weight_scale", shape), block)
    scale = _scale(tensors, prefix, rows, _groups(scheme, prefix, columns))
    return of_float8(prefix, bits, scale, (1, columns // scale.shape[1]))


def _float4(tensors: CheckpointTensors, prefix: str, scheme: HFConfig) -> QuantisedMatrix:
    packed = tensors.bytes(prefix + ".weight_packed", "U8", (None, None))
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if scheme.get("num_bits", int) != 4 or scheme.get("type", str, "int") != "float":
        raise invalid(f"{prefix} has weights of 4-bit floats, and its scheme says otherwise")
    name = prefix + ".weight_scale"
    if tensors.has(prefix + ".weight_global_scale"):
        whole = tensors.floats(prefix + ".weight_global_scale", (1,))
        return of_nvfp4(prefix, packed, tensors.floats(name, (rows, columns // 16)) / whole)
    exponents = tensors.bytes(name, tensors.kind(name) or "U8", (rows, columns // 32))
    return of_float4(prefix, packed, exponents)
