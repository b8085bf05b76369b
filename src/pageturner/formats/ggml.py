"""The GGML block formats taken apart: the values of a tensor in fp32.

Owns the layout of quantised blocks as they lie in files. Must not know where the bytes come from or
who computes with them. Layouts as in `ggml-common.h` of llama.cpp. A block of 32 values of one row:

    Q8_0   fp16 d, int8 q[32]                             value = d * q
    Q4_0   fp16 d, 16 bytes of nibbles                    value = d * (q - 8)
    Q4_1   fp16 d, fp16 m, 16 bytes of nibbles            value = d * q + m
    Q5_0   fp16 d, 32 fifth bits, 16 bytes of nibbles     value = d * (q - 16)
    Q5_1   fp16 d, fp16 m, fifth bits, nibbles            value = d * q + m

The low nibbles of the 16 bytes are values 0..15 of the block, the high nibbles values 16..31. A
block of 256 values, whose groups of 32 (Q6_K: 16) have a scale s and a minimum m of 6 bits (Q6_K:
int8 s):

    Q4_K   fp16 d, fp16 e, 12 bytes of s and m, 128 bytes of nibbles            value = d * s * q - e * m
    Q5_K   fp16 d, fp16 e, 12 bytes of s and m, 32 of fifth bits, 128 nibbles   value = d * s * q - e * m
    Q6_K   128 bytes of nibbles, 64 of bits 5 and 6, int8 s[16], fp16 d         value = d * s * (q - 32)

    Q2_K   4 bits each of s[16] and m[16], 64 bytes of pairs of bits, fp16 d, e value = d * s * q -
           e * m
    Q3_K   32 bytes of third bits, 64 of pairs, 12 of 6-bit s, fp16 d           value = d * (s - 32) * (q - 4)

Here 32 bytes hold two groups of 32, the first in the low nibbles (Q6_K: 64 bytes hold four; Q2_K,
Q3_K: 32 bytes hold four, and groups are of 16). Nibbles that stand for one of 16 integers t, and
digits to the base 3:

    IQ4_NL fp16 d, 16 bytes of nibbles, 32 values                               value = d * t[q]
    IQ4_XS fp16 d, 16 and 32 bits of 6-bit s[8], 128 bytes of nibbles           value = d * (s - 32)
                                                                                * t[q]
    MXFP4  8 bits of exponent e, 16 bytes of nibbles, 32 values                 value = 2^(e - 128) * t[q]
    NVFP4  e4m3 d[4], 32 bytes of nibbles, 8 for each 16 of 64 values           value = d / 2 * t[q]
    Q1_0   fp16 d, 16 bytes of bits, 128 values                                 value = d * (2 q - 1)
    Q2_0   fp16 d, 16 bytes of pairs of bits, 64 values in order                value = d * (q - 1)
    TQ1_0  48 bytes of 5 digits, 4 of 4, fp16 d                                 value = d * (q - 1)
    TQ2_0  64 bytes of pairs of bits, fp16 d                                    value = d * (q - 1)

IQ1, IQ2 and IQ3 are in ggml_grids.py.

Kinds of ours hold what other checkpoints have (models/checkpoint.py), 32 values with scales in
fp32:

    Q4_W   fp32 d, fp32 m, 16 bytes of nibbles            value = d * q + m
    Q8_W   fp32 d[2], int8 q[32]                          value = d[0] * q, of the last 16 d[1] * q
    T4_W   fp32 d, int8 t[16], 16 bytes of nibbles        value = d * t[q], t the same in all of a matrix
    F8_W   fp32 d, e4m3 q[32]                             value = d * q
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats import float8, ggml_grids
from pageturner.formats.ggml_types import BY_NAME

GROUP = 32  # values that share a scale in activations, and in most formats

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
F32 = NDArray[np.float32]


class Blocks(NamedTuple):
    """A quantised matrix taken apart. value[n, g, i] = scale[n, g] * q[n, g, i] + low[n, g].

    q      int8 [rows, groups, 32], or 16 for the kinds with a scale for each 16 values
    scale  fp32 [rows, groups]
    low    fp32 [rows, groups], or None where the format has no minimum
    """

    q: I8
    scale: F32
    low: F32 | None


Fields = tuple[I8, F32, F32 | None]


def _nibbles(packed: U8) -> I8:
    """The low nibbles of bytes [..., n], then the high ones: [..., 2 n]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1).view(np.int8)


def _bits(packed: U8, width: int, chunk: int = 0) -> U8:
    """Numbers of `width` bits of bytes [..., n], in chunks of so many bytes (0: all); of each chunk
    the lowest bits of all bytes come first: [..., n * 8 / width / chunk, chunk]."""
    chunk = chunk or packed.shape[-1]
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = packed.reshape(*packed.shape[:-1], -1, 1, chunk) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(*packed.shape[:-1], -1, chunk)


def _fifth(high: U8, packed: U8) -> I8:
    """Nibbles with fifth bits, 4 bytes of them, lowest first."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return _nibbles(packed) | fifth.view(np.int8)


def _super_block(d: F32, e: F32, packed: U8, q: U8) -> Fields:
    """Q4_K and Q5_K: q uint8 [rows, blocks, 8, 32]. The 12 bytes hold the low 6 bits of s and m
    0..3, then for 4..7 their low 4 bits, with bits 5 and 6 above those of 0..3."""
    s, m, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([s & 0x3F, (rest & 0x0F) | ((s >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([m & 0x3F, (rest >> 4) | ((m >> 2) & 0x30)], axis=-1)
    scale = d[..., None] * scales.astype(np.float32)
    return q.view(np.int8), scale, -(e[..., None] * minima.astype(np.float32))


def _q5_k(d: F32, e: F32, packed: U8, high: U8, q: U8) -> Fields:
    return _super_block(d, e, packed, _bits(q, 4, 32) | _bits(high, 1) << np.uint8(4))


def _q6_k(low: U8, high: U8, s: I8, d: F32) -> Fields:
    nibbles = _bits(low, 4, 64).reshape(*low.shape[:2], 8, 32)
    q = (nibbles | _bits(high, 2, 32) << np.uint8(4)).view(np.int8) - np.int8(32)
    return q, d[..., None] * s.astype(np.float32), None


def _q2_k(s: U8, qs: U8, d: F32, e: F32) -> Fields:
    scale = d[..., None] * (s & 0x0F).astype(np.float32)
    low = -(e[..., None] * (s >> 4).astype(np.float32))
    return _bits(qs, 2, 32).view(np.int8), scale, low


def _q3_k(third: U8, qs: U8, packed: U8, d: F32) -> Fields:
    q = (_bits(qs, 2, 32) | _bits(third, 1) << np.uint8(2)).view(np.int8) - np.int8(4)
    nibbles, high = _bits(packed[..., :8], 4), _bits(packed[..., 8:], 2)
    shape = (*qs.shape[:2], 16)
    s = nibbles.reshape(shape) | high.reshape(shape) << np.uint8(4)
    return q, d[..., None] * (s.astype(np.float32) - np.float32(32)), None


# What the nibbles stand for: 4-bit floats e2m1 times 2; IQ4_NL and IQ4_XS.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_xs(d: F32, high: NDArray[np.uint16], low: U8, q: U8) -> Fields:
    above = ggml_grids.numbers(high[..., None], 2, 8) << np.uint16(4)
    s = (ggml_grids.numbers(low, 4, 2) | above).astype(np.float32) - np.float32(32)
    return _IQ4[_nibbles(q.reshape(*q.shape[:2], 8, 16))], d[..., None] * s, None


def half_powers(e: U8) -> F32:
    """2^(e - 128) of 8-bit exponents."""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def _digits(packed: U8, count: int) -> U8:
    """Digits to the base 3 of bytes [..., n], the first of all of them first: [..., count * n]."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[..., None, :] * powers  # what is beyond a byte is gone
    digits = (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return digits.reshape(*packed.shape[:-1], -1)


def _tq1_0(first: U8, second: U8, last: U8, d: F32) -> Fields:
    parts = (_digits(first, 5), _digits(second, 5), _digits(last, 4))
    return _ternary(np.concatenate(parts, axis=-1), d)


def _ternary(digits: U8, d: F32) -> Fields:
    return digits.view(np.int8) - np.int8(1), np.repeat(d, 8, axis=1), None


def _nvfp4(d: U8, q: U8) -> Fields:
    scale = np.nan_to_num(float8.VALUES[d & 0x7F]) * np.float32(0.5)
    return E2M1[_nibbles(q.reshape(*d.shape, 8))], scale, None


def _q1_0(d: F32, q: U8) -> Fields:
    bits = np.unpackbits(q, axis=-1, bitorder="little").view(np.int8)
    return bits * np.int8(2) - np.int8(1), np.repeat(d, 4, axis=1), None


def _q2_0(d: F32, q: U8) -> Fields:
    pairs = (q[..., None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)).view(np.int8)
    return pairs - np.int8(1), np.repeat(d, 2, axis=1), None


def _t4_w(d: F32, table: I8, q: U8) -> Fields:
    return np.take_along_axis(table, _nibbles(q).astype(np.intp), axis=-1), d, None


# Kind -> the fields of a block, as numpy writes a record of them, and what makes (q, scale, low) of
# these; floats come in fp32.
_UNPACK: dict[str, tuple[str, Callable[..., Fields]]] = {
    "Q8_0": ("<f2,32i1", lambda d, q: (q, d, None)),
    "Q4_0": ("<f2,16u1", lambda d, q: (_nibbles(q) - np.int8(8), d, None)),
    "Q4_1": ("<f2,<f2,16u1", lambda d, m, q: (_nibbles(q), d, m)),
    "Q5_0": ("<f2,4u1,16u1", lambda d, h, q: (_fifth(h, q) - np.int8(16), d, None)),
    "Q5_1": ("<f2,<f2,4u1,16u1", lambda d, m, h, q: (_fifth(h, q), d, m)),
    "Q4_K": ("<f2,<f2,12u1,128u1", lambda d, e, s, q: _super_block(d, e, s, _bits(q, 4, 32))),
    "Q5_K": ("<f2,<f2,12u1,32u1,128u1", _q5_k),
    "Q6_K": ("128u1,64u1,16i1,<f2", _q6_k),
    "Q2_K": ("16u1,64u1,<f2,<f2", _q2_k),
    "Q3_K": ("32u1,64u1,12u1,<f2", _q3_k),
    "IQ4_NL": ("<f2,16u1", lambda d, q: (_IQ4[_nibbles(q)], d, None)),
    "IQ4_XS": ("<f2,<u2,4u1,128u1", _iq4_xs),
    "MXFP4": ("u1,16u1", lambda e, q: (E2M1[_nibbles(q)], half_powers(e), None)),
    "NVFP4": ("4u1,32u1", _nvfp4),
    "Q1_0": ("<f2,16u1", _q1_0),
    "Q2_0": ("<f2,16u1", _q2_0),
    "TQ1_0": ("32u1,16u1,4u1,<f2", _tq1_0),
    "TQ2_0": ("64u1,<f2", lambda qs, d: _ternary(_bits(qs, 2, 32), d)),
    "IQ2_XXS": ("<f2,16<u4", ggml_grids.iq2_xxs),
    "IQ2_XS": ("<f2,32<u2,8u1", ggml_grids.iq2_xs),
    "IQ2_S": ("<f2,32u1,32u1,8u1,8u1", ggml_grids.iq2_s),
    "IQ3_XXS": ("<f2,64u1,8<u4", ggml_grids.iq3_xxs),
    "IQ3_S": ("<f2,64u1,8u1,32u1,4u1", ggml_grids.iq3_s),
    "IQ1_S": ("<f2,32u1,8<u2", ggml_grids.iq1_s),
    "IQ1_M": ("32u1,16u1,4<u2", ggml_grids.iq1_m),
    "Q4_W": ("<f4,<f4,16u1", lambda d, m, q: (_nibbles(q), d, m)),
    "Q8_W": ("2<f4,32i1", lambda d, q: (q, d, None)),
    "T4_W": ("<f4,16i1,16u1", _t4_w),
}
# Kinds with a scale for each 16 values.
_SIXTEENS = ("Q6_K", "Q2_K", "Q3_K", "Q8_W", "IQ2_XS", "IQ2_S", "IQ1_M", "NVFP4")
# Kinds that become another one when they are loaded, as models/quantise.py says: with a rounding, or
# with the very values.
ROUNDED = ("Q2_K",)
WIDENED = dict.fromkeys(("IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ1_S"), "T4_W")
WIDENED |= dict.fromkeys(("IQ2_XS", "IQ2_S", "IQ1_M", "NVFP4"), "Q8_W")
_TABLES = {"Q1_0": (-1, 1), "Q2_0": (-1, 0, 1, 2)}
WIDENED |= dict.fromkeys(_TABLES, "T4_W")
# Kinds that can be computed with.
QUANTISED = tuple(kind for kind in _UNPACK if kind not in (*ROUNDED, *WIDENED))
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
    values = BY_NAME[kind].values
    if columns % values:
        raise EngineFault(
            "weight_kind", f"{kind} weights need a multiple of {values} columns, not {columns}"
        )
    record, parts = _UNPACK[kind]
    blocks = data.reshape(-1).view(record).reshape(rows, columns // values)
    fields = [blocks[name] for name in blocks.dtype.names or ()]
    q, scale, low = parts(*(f.astype(np.float32) if f.dtype.kind == "f" else f for f in fields))
    q = q.reshape(rows, -1, 16 if kind in _SIXTEENS else GROUP)
    return Blocks(q, scale.reshape(rows, -1), None if low is None else low.reshape(rows, -1))


def table_of(kind: str) -> I8:
    """The 16 integers, with repetitions, that values of a kind are multiples of."""
    if kind in _TABLES:
        return np.resize(np.array(_TABLES[kind], np.int8), 16)
    name, signs = kind.lower(), np.array([[1], [-1]], np.int8)
    grid = np.unique(ggml_grids.grid(name))
    values = grid * np.int8(8) + signs if kind == "IQ1_S" else grid * signs
    return np.resize(np.unique(values), 16)


def dequantise(kind: str, shape: tuple[int, ...], data: U8) -> F32:
    """The values of a tensor in fp32, as the `gguf` package has them. EngineFault('weight_kind')
    else."""
    if kind == "F32":
        return data.view("<f4").reshape(shape).astype(np.float32, copy=False)
    if kind == "F16":
        return data.view("<f2").reshape(shape).astype(np.float32)
    if kind == "BF16":
        return (data.view("<u2").reshape(shape).astype(np.uint32) << 16).view(np.float32)
    if kind == "F8_W":
        raw = data.reshape(-1, BY_NAME[kind].nbytes)
        return (np.ascontiguousarray(raw[:, :4]).view("<f4") * float8.VALUES[raw[:, 4:]]).reshape(
            shape
        )
    columns = shape[-1]
    blocks = unpack(kind, (int(np.prod(shape[:-1])), columns), data)
    out = blocks.scale[..., None] * blocks.q.astype(np.float32)
    if blocks.low is not None:
        out += blocks.low[..., None]
    return out.reshape(shape)
