"""Checkpoints of GPTQ and AWQ: integers of 4 or 8 bits in words of 32, with scales and zero-points by groups.

Owns their tensors and the keys of their quantization_config. Sources: GPTQModel and AutoGPTQ (`pack` of their
linear layers), AutoAWQ (`from_linear` of its GEMM layer). Must not know kernels.

GPTQ   X.qweight int32 [K * bits / 32, N], X.qzeros int32 [groups, N * bits / 32], X.scales [groups, N],
       X.g_idx int32 [K]: the group of each input. Version 1 stores each zero-point less 1, version 2 as it is
AWQ    X.qweight int32 [K, N / 8], X.qzeros int32 [groups, N / 8], X.scales [groups, N]; 8 neighbours lie in a
       word in the order 0 2 4 6 1 3 5 7

Their quantization_config is full of notes on how the integers were found, which no list can keep up with:
only what decides is read, and all that the tensors themselves tell is held against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pageturner.formats.ggml import U8
from pageturner.kernels.base import F32
from pageturner.models.checkpoint_tensors import CheckpointTensors
from pageturner.models.column_order import Placement, order_of, placement
from pageturner.models.hf_values import HFConfig
from pageturner.models.quantised_matrix import Codes, QuantisedMatrix, invalid, of_codes, unpack
from pageturner.models.spec import unsupported

Readers = dict[
    str, Callable[[], QuantisedMatrix]
]  # by the name of the tensor that there would be unquantised

_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where the neighbours 0 .. 7 lie


def gptq(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault 'quantization_invalid', 'model_unsupported' and those of tensors."""
    bits, size = config.get("bits", int), config.get("group_size", int, 128)
    layout = config.get("checkpoint_format", str, config.get("format", str, "gptq"))
    if config.get("is_marlin_format", bool, False):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        message = f"GPTQ in the layout {layout!r} is not supported: it is made for kernels of GPUs"
        raise unsupported(f"{message}; use a folder in the layout 'gptq' or 'gptq_v2'")
    if bits not in (2, 4, 8):
        raise unsupported(f"GPTQ with {bits} bits is not supported; 2, 4 and 8 bits are")
    if size < 1 and size != -1:
        raise invalid(f"group_size is {size}: it should be positive, or -1 for one group in all")
    config.expect("planar", False)
    config.expect("rotation", False)
    for pattern, changed in (config.raw("dynamic") or {}).items():
        if not str(pattern).startswith("-:") and changed:
            raise unsupported(
                f"GPTQ with other settings for {pattern!r} (dynamic) is not supported"
            )
    symmetric = config.get("sym", bool, False)

    placed = _placement(tensors, bits)

    def read(prefix: str) -> QuantisedMatrix:
        words = tensors.raw(prefix + ".qweight", "I32", (None, None))
        columns, rows = words.shape[0] * 32 // bits, words.shape[1]
        scale = _scales(tensors, prefix, rows, columns, size)
        zeros = tensors.raw(prefix + ".qzeros", "I32", (scale.shape[1], rows * bits // 32))
        zero = unpack(zeros, bits).T.astype(np.int32)
        if layout == "gptq":
            zero = (zero + 1) & ((1 << bits) - 1)
        if symmetric and (zero != 1 << (bits - 1)).any():
            message = f"it says that weights are symmetric, and {prefix}.qzeros says otherwise"
            raise invalid(f"{message}: is checkpoint_format {layout!r} true?")
        groups = _groups(tensors, prefix, columns, scale.shape[1], size)
        order, outputs = placed.columns(prefix), placed.rows.get(prefix)
        if outputs is not None:
            scale, zero = scale[outputs], zero[outputs]

        def raw(start: int, stop: int) -> U8:
            part = words[:, start:stop] if outputs is None else words[:, outputs[start:stop]]
            return np.ascontiguousarray(part.T).view(np.uint8)

        def codes(start: int, stop: int) -> U8:
            found = unpack(raw(start, stop), bits)
            return found if order is None else found[:, order]

        pairs = raw if bits == 4 and order is None else None
        groups = groups if order is None else None
        made = of_codes(
            Codes(prefix, (rows, columns), bits, codes, scale, zero, groups, pairs), "GPTQ"
        )
        return replace(made, columns=placed.gathered.get(prefix), rows=outputs)

    return _readers(tensors, read)


def awq(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `gptq`."""
    bits, size = (
        config.get("bits", int, config.get("w_bit", int, 4)),
        config.get("group_size", int, 0),
    )
    size = size or config.get("q_group_size", int, 128)
    version = config.get("version", str, config.get("format", str, "gemm")).lower()
    if version != "gemm":
        message = (
            f"AWQ in the layout {version!r} is not supported; use a folder in the layout 'gemm'"
        )
        raise unsupported(message)
    if bits != 4:
        raise unsupported(f"AWQ with {bits} bits is not supported; 4 bits are")
    if size < 1 and size != -1:
        raise invalid(f"group_size is {size}: it should be positive, or -1 for one group in all")
    if not config.get("zero_point", bool, True):
        raise unsupported("AWQ without zero-points is not supported")

    def read(prefix: str) -> QuantisedMatrix:
        words = tensors.raw(prefix + ".qweight", "I32", (None, None))
        columns, rows = words.shape[0], words.shape[1] * 8
        scale = _scales(tensors, prefix, rows, columns, size)
        zeros = tensors.raw(prefix + ".qzeros", "I32", (scale.shape[1], rows // 8))

        def codes(start: int, stop: int) -> U8:
            first, last = start // 8, -(-stop // 8)
            found = _awq_unpack(words[:, first:last])[:, start - 8 * first : stop - 8 * first]
            return np.ascontiguousarray(found.T)

        zero = _awq_unpack(zeros).T.astype(np.int32)
        return of_codes(Codes(prefix, (rows, columns), 4, codes, scale, zero), "AWQ")

    return _readers(tensors, read)


def _awq_unpack(words: NDArray[np.generic]) -> U8:
    """[n, words] as [n, words * 8]."""
    places = unpack(words, 4).reshape(len(words), -1, 8)
    return places[..., _AWQ_PLACES].reshape(len(words), -1)


def _readers(tensors: CheckpointTensors, read: Callable[[str], QuantisedMatrix]) -> Readers:
    prefixes = [
        name.removesuffix(".qweight") for name in tensors.infos if name.endswith(".qweight")
    ]

    def reader(prefix: str) -> Callable[[], QuantisedMatrix]:
        return lambda: read(prefix)

    return {prefix + ".weight": reader(prefix) for prefix in prefixes}


def _scales(tensors: CheckpointTensors, prefix: str, rows: int, columns: int, size: int) -> F32:
    """[rows, groups]"""
    groups = 1 if size == -1 else -(-columns // size)
    if size != -1 and columns % size:
        raise invalid(f"group_size is {size}, and {prefix} has {columns} columns")
    return tensors.floats(prefix + ".scales", (groups, rows)).T


def _placement(tensors: CheckpointTensors, bits: int) -> Placement:
    """Of the matrices whose tensors fit each other; what is wrong with the others is told when they are
    read."""
    names = [name.removesuffix(".qweight") for name in tensors.infos if name.endswith(".qweight")]
    orders = {}
    for name in names:
        words, scales, groups = (
            tensors.infos.get(name + end) for end in (".qweight", ".scales", ".g_idx")
        )
        if words is None or scales is None or groups is None or groups.kind != "I32":
            continue
        if (
            len(words.shape) != 2
            or not scales.shape
            or groups.shape != (words.shape[0] * 32 // bits,)
        ):
            continue
        found = tensors.raw(name + ".g_idx", "I32", groups.shape).astype(np.int32, copy=False)
        order = order_of(found, scales.shape[0])
        if order is not None and not np.array_equal(order, np.arange(len(order))):
            orders[name] = order
    return placement(names, orders, tensors.has)


def _groups(
    tensors: CheckpointTensors, prefix: str, columns: int, groups: int, size: int
) -> NDArray[np.int32] | None:
    """The group of each column; None where they lie one behind the other."""
    if not tensors.has(prefix + ".g_idx"):
        return None
    order = tensors.raw(prefix + ".g_idx", "I32", (columns,)).astype(np.int32, copy=False)
    if order.min() < 0 or order.max() >= groups:
        message = (
            f"{prefix}.g_idx names groups {order.min()} to {order.max()}, and there are {groups}"
        )
        raise invalid(message)
    plain = np.arange(columns) // (columns if size == -1 else size)
    return None if np.array_equal(order, plain) else order
