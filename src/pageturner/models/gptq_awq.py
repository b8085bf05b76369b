"""Checkpoints of GPTQ, AWQ, AutoRound and MLX: integers of 2 to 8 bits in words of 32, with scales and
zero-points by groups.

Owns their tensors and the keys of their quantization_config, and which matrices with `desc_act` can
lie with their columns in the order of the groups, so that each group is 32 neighbours: those whose
inputs a step can gather in that order (q, k and v together, o, gate and up together), and down,
whose inputs gate and up make in that order at once, by the order of their rows. Sources: GPTQModel
and AutoGPTQ (`pack` of their linear layers), AutoAWQ (`from_linear` of its GEMM layer). Must not
know kernels.

GPTQ   X.qweight int32 [K * bits / 32, N], X.qzeros int32 [groups, N * bits / 32], X.scales [groups,
       N], X.g_idx int32 [K]: the group of each input. Version 1 stores each zero-point less 1,
       version 2 as it is; of symmetric weights it is known whatever a file says of its version.
       Integers of 3 bits run on over the ends of words. Those of 5, 6 and 7 bits, and of 3 in the
       layout gptq_p (whose zero-points are as in version 2), lie in planes: of each 32 first the
       low bits of all
AWQ    GEMM: X.qweight int32 [K, N / 8], X.qzeros int32 [groups, N / 8], X.scales [groups, N]; 8
       neighbours lie in a word in the order 0 2 4 6 1 3 5 7. GEMV: X.qweight int32 [N, K / 8],
       X.qzeros int32 [N, W], X.scales [N, 8 W], in order, of which the first groups count.
       GEMV_FAST: X.qweight int16 [N / 4, K], X.scales and X.qzeros (what is added) [G, N]; 64
       inputs of 4 outputs lie together, and 32 of them as 4 x 2 x 4 in place of 4 x 4 x 2
AutoRound  packs as GPTQ or as AWQ GEMM
MLX    X.weight uint32 [N, K * bits / 32], in order and over the ends of words, X.scales and X.biases
       [N, groups]: a value is scale * integer + bias. Its configuration may name single matrices

Their quantization_config is full of notes on how the integers were found, which no list can keep up
with: only what decides is read, and all that the tensors themselves tell is held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pageturner.formats.ggml import GROUP, U8
from pageturner.kernels.base import F32
from pageturner.models.checkpoint_tensors import CheckpointTensors
from pageturner.models.hf_values import HFConfig
from pageturner.models.quantised_matrix import (
    Codes,
    QuantisedMatrix,
    Readers,
    as_pairs,
    group_count,
    group_of_columns,
    invalid,
    of_codes,
    unpack,
    unpacked,
)
from pageturner.models.spec import unsupported

_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where the neighbours 0 .. 7 lie


def auto_round(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `gptq`."""
    packing = config.get("packing_format", str, config.get("backend", str, "auto_round:auto_gptq"))
    config.expect("data_type", "int")
    for name, own in (config.raw("extra_config") or {}).items():
        if own.get("bits", 16) < 16 and own.get("bits") != config.raw("bits"):
            raise unsupported(
                f"AutoRound with {own.get('bits')} bits for {name!r} is not supported"
            )
    if "awq" in packing:
        return awq(config, tensors)
    form = packing.removeprefix("auto_round").lstrip(":")
    if form not in ("", "gptq", "auto_gptq", "gptqmodel", "exllamav2", "tritonv2"):
        raise unsupported(f"AutoRound packed as {packing!r} is not supported")
    return gptq(config, tensors, {"gptq": "gptq", "auto_gptq": "gptq"}.get(form, "gptq_v2"))


def gptq(config: HFConfig, tensors: CheckpointTensors, usual: str = "gptq") -> Readers:
    """EngineFault 'quantization_invalid', 'model_unsupported' and those of tensors. usual: the
    layout where the configuration names none."""
    bits, size = config.get("bits", int), config.get("group_size", int, 128)
    layout = config.get("checkpoint_format", str, config.get("format", str, usual))
    if config.get("is_marlin_format", bool, False):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2", "gptq_p"):
        raise unsupported(
            f"GPTQ in the layout {layout!r} is not supported: it is made for kernels of GPUs"
            "; use a folder in the layout 'gptq' or 'gptq_v2'"
        )
    if not 2 <= bits <= 8:
        raise unsupported(f"GPTQ with {bits} bits is not supported; 2 to 8 bits are")
    config.expect("planar", False)
    config.expect("rotation", False)
    for pattern, changed in (config.raw("dynamic") or {}).items():
        if not str(pattern).startswith("-:") and changed:
            raise unsupported(
                f"GPTQ with other settings for {pattern!r} (dynamic) is not supported"
            )
    symmetric = config.get("sym", bool, False)
    integers = unpack
    if bits in (5, 6, 7) or (layout == "gptq_p" and bits == 3):
        integers = _of_planes

    placed = _placement(tensors, bits)

    def read(prefix: str) -> QuantisedMatrix:
        words = tensors.raw(prefix + ".qweight", "I32", (None, None))
        columns, rows = words.shape[0] * 32 // bits, words.shape[1]
        scale = _scales(tensors, prefix, rows, columns, size)
        zeros = tensors.raw(prefix + ".qzeros", "I32", (scale.shape[1], rows * bits // 32))
        zero = integers(zeros, bits).T.astype(np.int32)
        middle = 1 << (bits - 1)
        if symmetric and len(set(zero.flat)) == 1 and zero.flat[0] in (middle - 1, middle):
            zero = np.full_like(zero, middle)
        elif symmetric:
            raise invalid(f"it says that weights are symmetric, and {prefix}.qzeros says otherwise")
        elif layout == "gptq":
            zero = (zero + 1) & ((1 << bits) - 1)
        groups = group_of_columns(tensors, prefix + ".g_idx", columns, scale.shape[1])
        order, outputs = placed.columns(prefix), placed.rows.get(prefix)
        if outputs is not None:
            scale, zero = scale[outputs], zero[outputs]

        def raw(start: int, stop: int) -> U8:
            part = words[:, start:stop] if outputs is None else words[:, outputs[start:stop]]
            return np.ascontiguousarray(part.T).view(np.uint8)

        def codes(start: int, stop: int) -> U8:
            found = integers(raw(start, stop), bits)
            return found if order is None else found[:, order]

        pairs = raw if bits == 4 and order is None else None
        groups = groups if order is None else None
        made = of_codes(
            Codes(prefix, (rows, columns), bits, codes, scale, zero, groups, pairs), "GPTQ"
        )
        return replace(made, columns=placed.gathered.get(prefix), rows=outputs)

    return tensors.readers(".qweight", read)


def awq(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `gptq`."""
    bits = config.get("bits", int, config.get("w_bit", int, 4))
    size = config.get("group_size", int, 0) or config.get("q_group_size", int, 128)
    version = config.get("version", str, config.get("format", str, "gemm")).lower()
    if version not in ("gemm", "gemv", "gemv_fast", "llm-awq"):
        raise unsupported(
            f"AWQ in the layout {version!r} is not supported"
            "; use a folder in the layout 'gemm', 'gemv' or 'gemv_fast'"
        )
    if bits != 4:
        raise unsupported(f"AWQ with {bits} bits is not supported; 4 bits are")
    if not config.get("zero_point", bool, True):
        raise unsupported("AWQ without zero-points is not supported")

    def gemv(prefix: str) -> QuantisedMatrix:
        words = tensors.raw(prefix + ".qweight", "I32", (None, None))
        shape = (words.shape[0], words.shape[1] * 8)
        groups = group_count(prefix, shape[1], size)
        zeros = tensors.raw(prefix + ".qzeros", "I32", (shape[0], None))
        if zeros.shape[1] * 8 < groups:
            raise invalid(f"{prefix}.qzeros has shape {zeros.shape}, and there are {groups} groups")
        scale = tensors.floats(prefix + ".scales", (shape[0], zeros.shape[1] * 8))[:, :groups]
        zero = unpack(zeros, 4)[:, :groups].astype(np.int32)
        codes = unpacked(words, 4)
        made = Codes(prefix, shape, 4, codes, scale, zero, pairs=as_pairs(words))
        return of_codes(made, "AWQ")

    def gemv_fast(prefix: str) -> QuantisedMatrix:
        words = tensors.raw(prefix + ".qweight", "I16", (None, None))
        shape = (words.shape[0] * 4, words.shape[1])
        groups = group_count(prefix, shape[1], size)
        zeros = ".scaled_zeros"
        if not tensors.has(prefix + zeros):
            zeros = ".qzeros"
        scale, low = (
            tensors.floats(prefix + ending, (None, shape[0]))[:groups].T
            for ending in (".scales", zeros)
        )
        if shape[1] % 64 or len(scale.T) < groups or len(low.T) < groups:
            raise invalid(f"the shapes of {prefix} are not those of the layout {version!r}")

        def codes(start: int, stop: int) -> U8:
            part = words[start // 4 : -(-stop // 4)]
            found = unpack(part, 4).reshape(len(part), -1, 4, 2, 4, 2, 4)
            found = found.transpose(0, 2, 1, 3, 6, 4, 5).reshape(len(part) * 4, -1)
            return found[start % 4 :][: stop - start]

        zero = np.zeros((1, 1), np.int32)
        return of_codes(Codes(prefix, shape, 4, codes, scale, zero, low=low), "AWQ")

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

    layouts = {"gemm": read, "gemv": gemv}
    return tensors.readers(".qweight", layouts.get(version, gemv_fast))


def mlx(config: HFConfig, tensors: CheckpointTensors) -> Readers:
    """EngineFault as `gptq`."""
    config.expect("mode", "affine")
    usual = {"bits": config.get("bits", int), "group_size": config.get("group_size", int)}

    def read(prefix: str) -> QuantisedMatrix:
        own = config.raw(prefix)
        said = usual | (own if isinstance(own, dict) else {})
        bits = said["bits"]
        if bits not in (2, 3, 4, 5, 6, 8) or said.get("mode", "affine") != "affine":
            raise unsupported(f"MLX with {said} is not supported")
        words = tensors.raw(prefix + ".weight", "U32", (None, None))
        shape = (words.shape[0], words.shape[1] * 32 // bits)
        groups = (shape[0], group_count(prefix, shape[1], said["group_size"]))
        scale, low = (tensors.floats(prefix + one, groups) for one in (".scales", ".biases"))
        codes = unpacked(words, bits)
        zero = np.zeros((1, 1), np.int32)
        return of_codes(Codes(prefix, shape, bits, codes, scale, zero, low=low), "MLX")

    return tensors.readers(".scales", read)


def _of_planes(words: NDArray[np.generic], bits: int) -> U8:
    """The integers of words [rows, n], of which each `bits` words hold the low 4 bits (of 3: 2) of
    32 integers, then their next 2 bits, then their last."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4 * bits)
    found, low = np.zeros((len(raw), GROUP), np.uint8), 0
    while low < bits:
        width = next(w for w in (4, 2, 1) if low + w <= bits)
        found |= unpack(raw[:, 4 * low : 4 * (low + width)], width) << np.uint8(low)
        low += width
    return found.reshape(len(words), -1)


def _awq_unpack(words: NDArray[np.generic]) -> U8:
    """[n, words] as [n, words * 8]."""
    places = unpack(words, 4).reshape(len(words), -1, 8)
    return places[..., _AWQ_PLACES].reshape(len(words), -1)


def _scales(tensors: CheckpointTensors, prefix: str, rows: int, columns: int, size: int) -> F32:
    """[rows, groups]"""
    return tensors.floats(prefix + ".scales", (group_count(prefix, columns, size), rows)).T


def _placement(tensors: CheckpointTensors, bits: int) -> Placement:
    """The placement of the matrices whose tensors fit each other; the others are refused when they
    are read."""
    names = [name.removesuffix(".qweight") for name in tensors.infos if name.endswith(".qweight")]
    orders = {}
    for name in names:
        words = tensors.infos[f"{name}.qweight"].shape
        scales = tensors.infos.get(f"{name}.scales")
        groups = tensors.infos.get(f"{name}.g_idx")
        if scales is None or groups is None or groups.kind != "I32" or not scales.shape:
            continue
        if len(words) != 2 or groups.shape != (words[0] * 32 // bits,):
            continue
        found = tensors.raw(name + ".g_idx", "I32", groups.shape).astype(np.int32, copy=False)
        order = order_of(found, scales.shape[0])
        if order is not None and not np.array_equal(order, np.arange(len(order))):
            orders[name] = order
    return placement(names, orders, tensors.has_value)


# -- columns in the order of their groups ----------------------------------------------------------

Order = NDArray[np.int32]  # which column (or row) of the file lies at each place


@dataclass(frozen=True, slots=True)
class Placement:
    """Orders by the names of matrices.

    gathered  of columns whose inputs a step gathers
    made      of columns whose inputs come in that order
    rows      of outputs
    """

    gathered: Mapping[str, Order]
    made: Mapping[str, Order]
    rows: Mapping[str, Order]

    def columns(self, name: str) -> Order | None:
        """The order in which the columns of a matrix lie; None: as in the file."""
        return self.gathered.get(name, self.made.get(name))


def order_of(groups: NDArray[np.int32], count: int) -> Order | None:
    """The columns by their group, those of a group as they come. None where groups are not all as
    large, or not whole blocks of 32."""
    size = len(groups) // max(count, 1)
    if size % GROUP or not size or groups.min() < 0:
        return None
    if not np.array_equal(np.bincount(groups, minlength=count), np.full(count, size)):
        return None
    return np.argsort(groups, kind="stable").astype(np.int32)


def placement(
    names: Iterable[str], orders: Mapping[str, Order], has: Callable[[str], bool]
) -> Placement:
    """Find the matrices of a folder that can lie in the order of their groups.

    names   of all quantised matrices, without the ending of their tensors
    orders  of those that want one
    has     whether there is a tensor of this name
    """
    names = set(names)
    gathered, made, rows = dict[str, Order](), dict[str, Order](), dict[str, Order]()
    for name, order in orders.items():
        stem, _, last = name.rpartition(".")
        where = stem.rpartition(".")[2]
        if where == "self_attn" and last in ("q_proj", "k_proj", "v_proj"):
            fits = _alike([f"{stem}.{one}" for one in ("q_proj", "k_proj", "v_proj")], orders)
        elif where == "self_attn" and last == "o_proj":
            fits = any(
                {f"{stem}.{one}", f"{stem}.qkv_proj"} & names for one in ("k_proj", "v_proj")
            )
        elif where == "mlp" and last in ("gate_proj", "up_proj"):
            fits = _alike([f"{stem}.{one}" for one in ("gate_proj", "up_proj")], orders)
        elif where == "mlp" and last == "down_proj":
            before = [f"{stem}.{one}" for one in ("gate_proj", "up_proj")]
            if names.issuperset(before) and not any(has(f"{one}.bias") for one in before):
                made[name] = order
                rows |= dict.fromkeys(before, order)
            continue
        else:
            fits = last in ("qkv_proj", "gate_up_proj") and where in ("self_attn", "mlp")
        if fits:
            gathered[name] = order
    return Placement(gathered, made, rows)


def _alike(names: list[str], orders: Mapping[str, Order]) -> bool:
    """Return whether all of these have one order: they share their input, which is gathered
    once."""
    return all(name in orders and np.array_equal(orders[name], orders[names[0]]) for name in names)
