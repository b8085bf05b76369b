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

    Q2_K   4 bits each of s[16] and m[16], 64 bytes of pairs of bits, fp16 d, e value = d * s * q - e * m
    Q3_K   32 bytes of third bits, 64 of pairs, 12 of 6-bit s, fp16 d           value = d * (s - 32) * (q - 4)

Here 32 bytes hold two groups of 32, the first in the low nibbles (Q6_K: 64 bytes hold four; Q2_K, Q3_K: 32
bytes hold four, and groups are of 16). Nibbles that stand for one of 16 integers t, and digits to the base 3:

    IQ4_NL fp16 d, 16 bytes of nibbles, 32 values                               value = d * t[q]
    IQ4_XS fp16 d, 16 and 32 bits of 6-bit s[8], 128 bytes of nibbles           value = d * (s - 32) * t[q]
    MXFP4  8 bits of exponent e, 16 bytes of nibbles, 32 values                 value = 2^(e - 128) * t[q]
    TQ1_0  48 bytes of 5 digits, 4 of 4, fp16 d                                 value = d * (q - 1)
    TQ2_0  64 bytes of pairs of bits, fp16 d                                    value = d * (q - 1)

Kinds of ours hold what other checkpoints have (models/checkpoint.py), 32 values with scales in fp32:

    Q4_W   fp32 d, fp32 m, 16 bytes of nibbles            value = d * q + m
    Q8_W   fp32 d[2], int8 q[32]                          value = d[0] * q, of the last 16 d[1] * q
    T4_W   fp32 d, int8 t[16], 16 bytes of nibbles        value = d * t[q], t the same in all of a matrix
    F8_W   fp32 d, e4m3 q[32]                             value = d * q
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats import float8
from pageturner.formats.ggml_types import BY_NAME

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
    q = nibbles | _groups(high.reshape(rows, blocks, 2, 32), 2).reshape(
        rows, blocks, 8, 32
    ) << np.uint8(4)
    scale = _halves(d)[..., None] * s.view(np.int8).astype(np.float32)
    return Blocks(
        (q.view(np.int8) - np.int8(32)).reshape(rows, -1, 16), scale.reshape(rows, -1), None
    )


# What the nibbles stand for: 4-bit floats e2m1 times 2; IQ4_NL and IQ4_XS.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _floats(raw: U8) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32)


def _sixteens(
    q: NDArray[np.int8], scale: NDArray[np.float32], low: NDArray[np.float32] | None
) -> Blocks:
    rows = len(q)
    return Blocks(
        q.reshape(rows, -1, 16),
        scale.reshape(rows, -1),
        None if low is None else low.reshape(rows, -1),
    )


def _q2_k(raw: U8) -> Blocks:
    s, qs, d, e = _fields(raw, 16, 64, 2, 2)
    q = _groups(qs.reshape(*qs.shape[:2], 2, 32), 2).view(np.int8)
    scale = _halves(d)[..., None] * (s & 0x0F).astype(np.float32)
    return _sixteens(q, scale, -(_halves(e)[..., None] * (s >> 4).astype(np.float32)))


def _q3_k(raw: U8) -> Blocks:
    third, qs, packed, d = _fields(raw, 32, 64, 12, 2)
    rows, blocks = qs.shape[:2]
    pairs = _groups(qs.reshape(rows, blocks, 2, 32), 2).reshape(rows, blocks, 8, 32)
    q = (pairs | _groups(third, 1) << np.uint8(2)).view(np.int8) - np.int8(4)
    nibbles, high = _groups(packed[..., :8], 4), _groups(packed[..., 8:], 2)
    s = nibbles.reshape(rows, blocks, 16) | high.reshape(rows, blocks, 16) << np.uint8(4)
    return _sixteens(q, _halves(d)[..., None] * (s.astype(np.float32) - np.float32(32)), None)


def _iq4_nl(raw: U8) -> Blocks:
    d, q = _fields(raw, 2, 16)
    return Blocks(_IQ4[_nibbles(q)], _halves(d), None)


def _iq4_xs(raw: U8) -> Blocks:
    d, high, low, q = _fields(raw, 2, 2, 4, 128)
    rows, blocks = q.shape[:2]
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    above = np.ascontiguousarray(high).view("<u2") >> shifts & np.uint16(3)
    below = np.stack([low & 0x0F, low >> 4], axis=-1).reshape(rows, blocks, 8)
    s = (below | above.astype(np.uint8) << np.uint8(4)).astype(np.float32) - np.float32(32)
    scale = (_halves(d)[..., None] * s).reshape(rows, -1)
    return Blocks(_IQ4[_nibbles(q.reshape(rows, -1, 16))], scale, None)


def _mxfp4(raw: U8) -> Blocks:
    e, q = _fields(raw, 1, 16)
    return Blocks(E2M1[_nibbles(q)], half_powers(e[..., 0]), None)


def half_powers(e: U8) -> NDArray[np.float32]:
    """2^(e - 128) of 8-bit exponents."""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def _digits(packed: U8, count: int) -> U8:
    """Digits to the base 3 of bytes [..., n], the first of all of them first: [..., count, n]."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[..., None, :] * powers  # what is beyond a byte is gone
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def _tq1_0(raw: U8) -> Blocks:
    first, second, last, d = _fields(raw, 32, 16, 4, 2)
    rows, blocks = first.shape[:2]
    parts = (_digits(first, 5), _digits(second, 5), _digits(last, 4))
    digits = np.concatenate([part.reshape(rows, blocks, -1) for part in parts], axis=-1)
    return _ternary(digits, d)


def _tq2_0(raw: U8) -> Blocks:
    qs, d = _fields(raw, 64, 2)
    return _ternary(_groups(qs.reshape(*qs.shape[:2], 2, 32), 2), d)


def _ternary(digits: U8, d: U8) -> Blocks:
    q = digits.view(np.int8) - np.int8(1)
    return Blocks(q.reshape(len(q), -1, 32), np.repeat(_halves(d), 8, axis=1), None)


def _q4_w(raw: U8) -> Blocks:
    d, q = _fields(raw, 8, 16)
    scales = _floats(d)
    return Blocks(_nibbles(q).view(np.int8), scales[..., 0], scales[..., 1])


def _q8_w(raw: U8) -> Blocks:
    d, q = _fields(raw, 8, 32)
    return _sixteens(np.ascontiguousarray(q).view(np.int8), _floats(d), None)


def _t4_w(raw: U8) -> Blocks:
    d, t, q = _fields(raw, 4, 16, 16)
    table = np.ascontiguousarray(t).view(np.int8)
    return Blocks(
        np.take_along_axis(table, _nibbles(q).astype(np.intp), axis=-1), _floats(d)[..., 0], None
    )


_UNPACK = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q4_W": _q4_w,
    "Q8_W": _q8_w,
    "T4_W": _t4_w,
}
ROUNDED = ("Q2_K",)  # become another kind when they are loaded: see models/quantise.py
QUANTISED = tuple(kind for kind in _UNPACK if kind not in ROUNDED)  # that can be computed with
FLOATS = ("F32", "F16", "BF16", "F8_W")
SUPPORTED = (*FLOATS, *_UNPACK)
IN_FILES = tuple(kind for kind in SUPPORTED if not kind.endswith("_W"))  # for messages


def unpack(kind: str, shape: tuple[int, ...], data: U8) -> Blocks:
    """A quantised matrix taken apart. EngineFault('weight_kind') for a kind that is unknown."""
    if kind not in _UNPACK:
        known = ", ".join(IN_FILES)
        raise EngineFault(
            "weight_kind", f"weights of kind {kind} are not supported; there are {known}"
        )
    rows, columns = shape
    values, nbytes = BY_NAME[kind].values, BY_NAME[kind].nbytes
    if columns % values:
        raise EngineFault(
            "weight_kind", f"{kind} weights need a multiple of {values} columns, not {columns}"
        )
    return _UNPACK[kind](data.reshape(rows, columns // values, nbytes))


def dequantise(kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of a tensor in fp32, as the `gguf` package has them. EngineFault('weight_kind') else."""
    if kind == "F32":
        return data.view("<f4").reshape(shape).astype(np.float32, copy=False)
    if kind == "F16":
        return data.view("<f2").reshape(shape).astype(np.float32)
    if kind == "BF16":
        return (data.view("<u2").reshape(shape).astype(np.uint32) << 16).view(np.float32)
    if kind == "F8_W":
        raw = data.reshape(-1, BY_NAME[kind].nbytes)
        return (_floats(raw[:, :4]) * float8.VALUES[raw[:, 4:]]).reshape(shape)
    columns = shape[-1]
    blocks = unpack(kind, (int(np.prod(shape[:-1])), columns), data)
    out = blocks.scale[..., None] * blocks.q.astype(np.float32)
    if blocks.low is not None:
        out += blocks.low[..., None]
    return out.reshape(shape)
