"""8-bit floats as models and KV caches have them, e4m3: a sign, 4 bits of exponent, 3 of mantissa.

Owns their values and how a number becomes one. As in the OCP specification of 8-bit floating point: there is
no infinity, all ones are NaN, the largest is 448.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_BITS = np.arange(128)
_SIZES = np.where(
    _BITS < 8, np.ldexp(_BITS, -9), np.ldexp(8 + _BITS % 8, _BITS // 8 - 10)
)  # below 8 they are subnormal
_SIZES[127] = np.nan
VALUES: NDArray[np.float32] = np.concatenate([_SIZES, -_SIZES]).astype(np.float32)  # of each byte


def nearest(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest values that are e4m3, ties to even; beyond the largest, that one. NaN stays NaN."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3)
    rounded = np.rint(x / step) * step
    return np.asarray(np.clip(rounded, -LARGEST, LARGEST), np.float32)


def bits(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The same as bytes."""
    size = np.abs(nearest(x))
    found = np.searchsorted(VALUES[:127], size).astype(np.uint8)
    found[np.isnan(size)] = 127
    return found | (np.signbit(x).astype(np.uint8) << np.uint8(7))
