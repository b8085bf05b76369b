"""Matrices of 8-bit and 4-bit floats, and of tables of 16 floats, as blocks that kernels compute with.

Owns how they become the kinds F8_W, MXFP4 and T4_W of formats/ggml.py. Must not know in which tensors of a
file
they lie.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pageturner.formats.ggml import GROUP, U8
from pageturner.formats.ggml_types import BY_NAME
from pageturner.kernels.base import F32
from pageturner.models.quantised_matrix import (
    QuantisedMatrix,
    check_columns,
    check_scales,
    halves_of_pairs,
    invalid,
)
from pageturner.models.spec import unsupported


def of_float8(name: str, bits: U8, scale: F32, block: tuple[int, int]) -> QuantisedMatrix:
    """e4m3 [rows, columns] with a scale for each block of so many rows and columns (at the edges they may be
    smaller). EngineFault('quantization_invalid') for a NaN: of scales at once, of values when read."""
    rows, columns = bits.shape
    check_columns(name, columns)
    check_scales(name, scale)
    if block[1] % GROUP:
        raise unsupported(
            f"{name}: blocks of {block[1]} columns are not supported, only multiples of {GROUP}"
        )
    places = np.arange(columns // GROUP) * GROUP // block[1]

    def blocks(start: int, stop: int) -> U8:
        part = bits[start:stop]
        if ((part & np.uint8(0x7F)) == 0x7F).any():
            raise invalid(f"{name} holds values that are not finite")
        out = np.empty((stop - start, columns // GROUP, BY_NAME["F8_W"].nbytes), np.uint8)
        numbers = scale[np.arange(start, stop) // block[0]][:, places]
        out[..., :4] = np.ascontiguousarray(numbers)[..., None].view(np.uint8)
        out[..., 4:] = part.reshape(stop - start, -1, GROUP)
        return out.reshape(stop - start, -1)

    return QuantisedMatrix("F8_W", (rows, columns), blocks)


def of_float4(name: str, packed: U8, exponents: U8, experts: int = 0) -> QuantisedMatrix:
    """e2m1 floats, two neighbours in each byte of packed [rows, columns / 2], the first in the low nibble,
    with an exponent of 8 bits for each 32: [rows, columns / 32].

    experts  so many matrices lie one behind the other in these rows
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    check_columns(name, columns)
    if (exponents == 255).any():
        raise invalid(f"the scales of {name} hold values that are not finite")

    def blocks(start: int, stop: int) -> U8:
        out = np.empty((stop - start, columns // GROUP, BY_NAME["MXFP4"].nbytes), np.uint8)
        out[..., 0] = exponents[start:stop]
        out[..., 1:] = halves_of_pairs(packed[start:stop].reshape(stop - start, -1, GROUP // 2))
        return out.reshape(stop - start, -1)

    shape = (experts, rows // experts, columns) if experts else (rows, columns)
    return QuantisedMatrix("MXFP4", shape, blocks)


def of_table(
    name: str, packed: U8, table: F32, scale: F32, shape: tuple[int, int], block: int
) -> QuantisedMatrix:
    """Nibbles that stand for 16 floats, two neighbours in each byte, the first in the high nibble.

    packed  [rows * columns / 2]
    table   [16], within -1 .. 1
    scale   of each `block` neighbours, rows one behind the other: [rows * columns / block]
    """
    columns = shape[1]
    check_columns(name, columns)
    check_scales(name, scale)
    if block % GROUP:
        raise unsupported(
            f"{name}: blocks of {block} values are not supported, only multiples of {GROUP}"
        )
    steps, integers, error = nearest_integers(table)

    def blocks(start: int, stop: int) -> U8:
        part = packed[start * columns // 2 : stop * columns // 2]
        pairs = (part << np.uint8(4) | part >> np.uint8(4)).reshape(stop - start, -1, GROUP // 2)
        places = np.arange(start * columns, stop * columns, GROUP) // block
        out = np.empty((*pairs.shape[:2], BY_NAME["T4_W"].nbytes), np.uint8)
        numbers = (scale[places] / np.float32(steps)).astype(np.float32)
        out[..., :4] = numbers.reshape(stop - start, -1, 1).view(np.uint8)
        out[..., 4:20] = integers.view(np.uint8)
        out[..., 20:] = halves_of_pairs(pairs)
        return out.reshape(stop - start, -1)

    becomes = ""
    if error:
        share = f"{error:.1%}"
        becomes = f"a table of 16 floats (nf4, fp4) becomes one of 16 integers (root mean square error {share})"
    return QuantisedMatrix("T4_W", shape, blocks, becomes)


def nearest_integers(table: F32) -> tuple[float, NDArray[np.int8], float]:
    """(steps, integers, error): integers / steps is nearest to the table, of all steps up to 127 over its
    largest value; the error is relative, as root mean square, where all 16 are as frequent."""
    most = float(np.abs(table).max())
    if not (np.isfinite(table).all() and most > 0):
        raise invalid("its table of 16 values holds no finite numbers")
    tried = np.arange(60, 127.01, 0.05) / most
    exact = np.multiply.outer(tried, table.astype(np.float64))
    left = np.square((np.rint(exact) - exact) / tried[:, None]).mean(axis=1)
    best = int(np.argmin(left))
    error = float(np.sqrt(left[best] / np.square(table, dtype=np.float64).mean()))
    return float(tried[best]), np.rint(exact[best]).astype(np.int8), error if error > 1e-6 else 0.0
