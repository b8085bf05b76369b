"""The GGML blocks whose values are looked up in grids: IQ1, IQ2 and IQ3.

A grid lists, for each index of 8 to 11 bits, 8 values of a row (IQ3: 4), without signs in IQ2 and
IQ3. The grids lie in ggml_grids.npz, as they are in `ggml-common.h` of llama.cpp; they are loaded
when the first such block is read. Must not know where the bytes come from.

    IQ2_XXS  fp16 d, for each 32 values 4 bytes of indices, 4 of signs and s   d * (s + 1/2) / 4 * g
    IQ2_XS   fp16 d, 9 bits of an index and 7 of signs, 16 of 4-bit s          d * (s + 1/2) / 4 * g
    IQ2_S    fp16 d, indices, signs, bits 8 and 9 of indices, 16 of 4-bit s    d * (s + 1/2) / 4 * g
    IQ3_XXS  fp16 d, indices, for each 32 values 4 bytes of signs and s        d * (s + 1/2) / 2 * g
    IQ3_S    fp16 d, indices, their bit 8, signs, 8 of 4-bit s                 d * (2 s + 1) * g
    IQ1_S    fp16 d, indices, for each 32 values 12 more bits of them, s, b    d * (2 s + 1) * (g + b)
    IQ1_M    indices, 3 more bits of each with a b, 16 of 3-bit s with d       d * (2 s + 1) * (g + b)

Where 7 bits hold 8 signs, their number is even. b is 1/8 or -1/8.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
Fields = tuple[I8, F32, None]
_HALF = np.float32(0.5)


@cache
def grid(name: str) -> I8:
    """The values of each index."""
    with np.load(Path(__file__).with_suffix(".npz")) as grids:
        return np.asarray(grids[name], np.int8)


def numbers(packed: NDArray[np.unsignedinteger], width: int, count: int) -> U16:
    """The lowest `count` numbers of so many bits of each element: [..., elements * count]."""
    shifts = (np.arange(count) * width).astype(packed.dtype)
    found = packed[..., None] >> shifts & packed.dtype.type((1 << width) - 1)
    return found.astype(np.uint16).reshape(*packed.shape[:-1], -1)


def _signed(values: I8, signs: NDArray[np.unsignedinteger]) -> I8:
    """Grid values [..., n, 8] with the sign of each, a bit of signs [..., n]."""
    flags = numbers(signs, 1, 8).reshape(values.shape).astype(np.int8)
    return values * (np.int8(1) - np.int8(2) * flags)


def _seven(words: U32) -> U16:
    """The signs of 4 times 8 values of each word."""
    return _even(numbers(words, 7, 4))


def _even(signs: U16) -> U16:
    """7 bits with an eighth that makes the number of ones even."""
    odd = numbers(signs, 1, 7).reshape(*signs.shape, 7).sum(axis=-1) & 1
    return np.asarray(signs | odd.astype(np.uint16) << np.uint16(7))


def iq2_xxs(d: F32, words: U32) -> Fields:
    """16 words: of each 32 values the indices, then signs and a scale."""
    pairs = words.reshape(*words.shape[:2], 8, 2)
    values = grid("iq2_xxs")[numbers(pairs[..., 0], 8, 4)]
    scale = d[..., None] * (_HALF + (pairs[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _signed(values, _seven(pairs[..., 1])), scale, None


def iq2_xs(d: F32, qs: U16, s: U8) -> Fields:
    """32 words, each an index and signs."""
    values = grid("iq2_xs")[qs & np.uint16(511)]
    return _signed(values, _even(qs >> np.uint16(9))), _quarter(d, s), None


def iq2_s(d: F32, low: U8, signs: U8, high: U8, s: U8) -> Fields:
    """Indices of 10 bits."""
    index = low | numbers(high, 2, 4) << np.uint16(8)
    return _signed(grid("iq2_s")[index], signs), _quarter(d, s), None


def _quarter(d: F32, s: U8) -> F32:
    return d[..., None] * (_HALF + numbers(s, 4, 2).astype(np.float32)) * np.float32(0.25)


def iq3_xxs(d: F32, qs: U8, words: U32) -> Fields:
    """8 words, each signs and a scale of 32 values."""
    values = grid("iq3_xxs")[qs].reshape(*qs.shape[:2], 32, 8)
    scale = d[..., None] * (_HALF + (words >> 28).astype(np.float32)) * _HALF
    return _signed(values, _seven(words)), scale, None


def iq3_s(d: F32, low: U8, high: U8, signs: U8, s: U8) -> Fields:
    """Indices of 9 bits."""
    index = low | numbers(high, 1, 8) << np.uint16(8)
    values = grid("iq3_s")[index].reshape(*low.shape[:2], 32, 8)
    return (
        _signed(values, signs),
        d[..., None] * (1 + 2 * numbers(s, 4, 2).astype(np.float32)),
        None,
    )


def iq1_s(d: F32, low: U8, high: U16) -> Fields:
    """8 words, each 4 times 3 bits of indices, a scale and a sign of 32 values."""
    index = low | numbers(high, 3, 4) << np.uint16(8)
    below = np.repeat(high >> np.uint16(15), 4, axis=-1)
    scale = d[..., None] * (2 * (high >> np.uint16(12) & np.uint16(7)) + 1).astype(np.float32)
    return _eighths(index, below), scale / np.float32(8), None


def iq1_m(low: U8, high: U8, words: U16) -> Fields:
    """4 words of scales, in whose highest bits lies the scale of all."""
    nibbles = words >> np.uint16(12)
    whole = (nibbles << np.array([0, 4, 8, 12], np.uint16)).sum(axis=-1, dtype=np.uint16)
    d = whole.view(np.float16).astype(np.float32)
    index = low | (numbers(high, 4, 2) & np.uint16(7)) << np.uint16(8)
    scale = d[..., None] * (2 * numbers(words, 3, 4) + 1).astype(np.float32)
    return _eighths(index, numbers(high, 4, 2) >> np.uint16(3)), scale / np.float32(8), None


def _eighths(index: U16, below: U16) -> I8:
    """Eight times grid values and an eighth, which is taken away where `below` is 1."""
    return grid("iq1_s")[index] * np.int8(8) + (1 - 2 * below.astype(np.int8))[..., None]
