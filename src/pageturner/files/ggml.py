"""The GGML block formats taken apart: the values of a tensor in fp32.

Owns the layout of quantised blocks as they lie in files. Must not know where the bytes come from or who
computes with them. Layouts as in `ggml-common.h` of llama.cpp. A block of 32 values of one row:

    Q8_0   fp16 d, int8 q[32]                             value = d * q
    Q4_0   fp16 d, 16 bytes of nibbles                    value = d * (q - 8)
    Q4_1   fp16 d, fp16 m, 16 bytes of nibbles            value = d * q + m
    Q5_0   fp16 d, 32 fifth bits, 16 bytes of nibbles     value = d * (q - 16)
    Q5_1   fp16 d, fp16 m, fifth bits, nibbles            value = d * q + m

The low nibbles of the 16 bytes are values 0..15 of the block, the high nibbles values 16..31. A block of 256
values, whose groups of 32 (Q6_K: 16) have a scale s and a minimum m of 6 bits (Q6_K: int8 s):

    Q4_K   fp16 d, fp16 e, 12 bytes of s and m, 128 bytes of nibbles            value = d * s * q - e * m
    Q5_K   fp16 d, fp16 e, 12 bytes of s and m, 32 of fifth bits, 128 nibbles   value = d * s * q - e * m
    Q6_K   128 bytes of nibbles, 64 of bits 5 and 6, int8 s[16], fp16 d         value = d * s * (q - 32)

Here 32 bytes hold two groups of 32, the first in the low nibbles (Q6_K: 64 bytes hold four).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.files.ggml_types import BY_NAME

GROUP = 32  # values that share a scale in activations, and in most formats

U8 = NDArray[np.uint8]


class Blocks(NamedTuple):
    """A quantised matrix taken apart. value[n, g, i] = scale[n, g] * q[n, g, i] + low[n, g].

    q      int8 [rows, groups, 32], or 16 for Q6_K
    scale  fp32 [rows, groups]
    low    fp32 [rows, groups], or None where the format has no minimum
    """

    q: NDArray[np.int8]
    scale: NDArray[np.float32]
    low: NDArray[np.float32] | None


def _fields(raw: U8, *sizes: int) -> list[U8]:
    """The blocks [..., bytes] cut into fields of these sizes."""
    return np.split(raw, np.cumsum(sizes)[:-1], axis=-1)


def _nibbles(packed: U8) -> U8:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _halves(raw: U8) -> NDArray[np.float32]:
    """fp16 numbers [..., 2 bytes] as fp32 [...]."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float32)


def _fifth_bits(raw: U8) -> U8:
    """Bits [..., 4 bytes], lowest first, as 16 or 0 [..., 32]."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _groups(packed: U8, bits: int) -> U8:
    """`bits` wide numbers of bytes [..., chunk], those of the lowest bits of the whole chunk first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _q8_0(raw: U8) -> Blocks:
    d, q = _fields(raw, 2, 32)
    return Blocks(q.view(np.int8), _halves(d), None)


def _q4_0(raw: U8) -> Blocks:
    d, q = _fields(raw, 2, 16)
    return Blocks(_nibbles(q).view(np.int8) - np.int8(8), _halves(d), None)


def _q4_1(raw: U8) -> Blocks:
    d, m, q = _fields(raw, 2, 2, 16)
    return Blocks(_nibbles(q).view(np.int8), _halves(d), _halves(m))


def _q5_0(raw: U8) -> Blocks:
    d, high, q = _fields(raw, 2, 4, 16)
    return Blocks((_nibbles(q) | _fifth_bits(high)).view(np.int8) - np.int8(16), _halves(d), None)


def _q5_1(raw: U8) -> Blocks:
    d, m, high, q = _fields(raw, 2, 2, 4, 16)
    return Blocks((_nibbles(q) | _fifth_bits(high)).view(np.int8), _halves(d), _halves(m))


def _super_block(d: U8, e: U8, packed: U8, q: U8) -> Blocks:
    """Q4_K and Q5_K: q uint8 [rows, blocks, 8, 32]. The 12 bytes hold the low 6 bits of s and m 0..3, then
    for 4..7 their low 4 bits, with bits 5 and 6 above those of 0..3."""
    s, m, rest = _fields(packed, 4, 4, 4)
    scales = np.concatenate([s & 0x3F, (rest & 0x0F) | ((s >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([m & 0x3F, (rest >> 4) | ((m >> 2) & 0x30)], axis=-1)
    rows = len(q)
    scale = (_halves(d)[..., None] * scales.astype(np.float32)).reshape(rows, -1)
    low = -(_halves(e)[..., None] * minima.astype(np.float32)).reshape(rows, -1)
    return Blocks(q.reshape(rows, -1, 32).view(np.int8), scale, low)


def _q4_k(raw: U8) -> Blocks:
    d, e, packed, q = _fields(raw, 2, 2, 12, 128)
    return _super_block(d, e, packed, _groups(q.reshape(*q.shape[:2], 4, 32), 4))


def _q5_k(raw: U8) -> Blocks:
    d, e, packed, high, q = _fields(raw, 2, 2, 12, 32, 128)
    nibbles = _groups(q.reshape(*q.shape[:2], 4, 32), 4).reshape(*q.shape[:2], 8, 32)
    return _super_block(d, e, packed, nibbles | _groups(high, 1) << np.uint8(4))


def _q6_k(raw: U8) -> Blocks:
    low, high, s, d = _fields(raw, 128, 64, 16, 2)
    rows, blocks = low.shape[:2]
    nibbles = _groups(low.reshape(rows, blocks, 2, 64), 4).reshape(rows, blocks, 8, 32)
    q = nibbles | _groups(high.reshape(rows, blocks, 2, 32), 2).reshape(rows, blocks, 8, 32) << np.uint8(4)
    scale = _halves(d)[..., None] * s.view(np.int8).astype(np.float32)
    return Blocks((q.view(np.int8) - np.int8(32)).reshape(rows, -1, 16), scale.reshape(rows, -1), None)


_UNPACK = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
QUANTISED = tuple(_UNPACK)  # the quantised kinds that can be computed with
SUPPORTED = ("F32", "F16", "BF16", *QUANTISED)


def unpack(kind: str, shape: tuple[int, ...], data: U8) -> Blocks:
    """A quantised matrix taken apart. EngineFault('weight_kind') for a kind that is not in QUANTISED."""
    if kind not in _UNPACK:
        known = ", ".join(SUPPORTED)
        raise EngineFault("weight_kind", f"weights of kind {kind} are not supported; there are {known}")
    rows, columns = shape
    values, nbytes = BY_NAME[kind].values, BY_NAME[kind].nbytes
    if columns % values:
        raise EngineFault("weight_kind", f"{kind} weights need a multiple of {values} columns, not {columns}")
    return _UNPACK[kind](data.reshape(rows, columns // values, nbytes))


def dequantise(kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of a tensor in fp32, as the `gguf` package has them. EngineFault('weight_kind') else."""
    if kind == "F32":
        return data.view("<f4").reshape(shape).astype(np.float32, copy=False)
    if kind == "F16":
        return data.view("<f2").reshape(shape).astype(np.float32)
    if kind == "BF16":
        return (data.view("<u2").reshape(shape).astype(np.uint32) << 16).view(np.float32)
    columns = shape[-1]
    blocks = unpack(kind, (int(np.prod(shape[:-1])), columns), data)
    out = blocks.scale[..., None] * blocks.q.astype(np.float32)
    if blocks.low is not None:
        out += blocks.low[..., None]
    return out.reshape(shape)
