"""8-bit floats as models and KV caches have them, e4m3: a sign, 4 bits of exponent, 3 of mantissa.

Owns their values and how a number becomes one. As in the OCP specification of 8-bit floating point:
there is no infinity, all ones are NaN, the largest is 448.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_BITS = np.arange(128)
# below 8 they are subnormal
_SIZES = np.where(_BITS < 8, np.ldexp(_BITS, -9), np.ldexp(8 + _BITS % 8, _BITS // 8 - 10))
_SIZES[127] = np.nan
VALUES: NDArray[np.float32] = np.concatenate([_SIZES, -_SIZES]).astype(np.float32)  # of each byte


def nearest(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest values that are e4m3, ties to even; beyond the largest, that one. NaN stays
    NaN."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3)
    rounded = np.rint(x / step) * step
    return np.asarray(np.clip(rounded, -LARGEST, LARGEST), np.float32)


def scale(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scale of each vector of the last axis: the smallest power of two s, from 2^-14 to 2^7,
    with
    |x| <= 448 s, so that e4m3 holds x / s. A power of two changes no mantissa: nothing is held
    worse than
    without a scale but what is below 2^-5 s, where s is above 1. Both ends are those of fp16, in
    which it is
    read."""
    mantissa, exponent = np.frexp(np.maximum(np.abs(x).max(axis=-1), np.float32(2**-14)))
    exponent = np.where(np.isfinite(mantissa), exponent - 9 + (mantissa > 0.875), 7)
    return np.asarray(np.ldexp(np.float32(1), np.clip(exponent, -14, 7)), np.float32)


def bits(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The same as bytes."""
    size = np.abs(nearest(x))
    found = np.searchsorted(VALUES[:127], size).astype(np.uint8)
    found[np.isnan(size)] = 127
    return found | (np.signbit(x).astype(np.uint8) << np.uint8(7))
