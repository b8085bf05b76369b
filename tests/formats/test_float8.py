"""8-bit floats: their values, and the nearest of them."""

from __future__ import annotations

import numpy as np

from pageturner.formats import float8


def test_values_are_those_of_the_format() -> None:
    assert float8.VALUES[[0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xB8]].tolist() == [
        0,
        2**-9,
        7 * 2**-9,
        2**-6,
        1,
        448,
        -1,
    ]
    assert np.isnan(float8.VALUES[[0x7F, 0xFF]]).all()


def test_every_value_is_its_own_nearest_and_has_its_bits() -> None:
    numbers = np.delete(np.arange(256), [127, 128, 255])  # NaN, and the zero that is negative
    values = float8.VALUES[numbers]
    np.testing.assert_array_equal(float8.nearest(values), values)
    np.testing.assert_array_equal(float8.bits(values), numbers)


def test_ties_go_to_even_and_what_is_too_large_to_the_largest() -> None:
    x = np.array(
        [1.0625, 1.1875, -1.0625, 2**-10, 3 * 2**-10, 460, 1e9, -np.inf, np.nan], np.float32
    )
    expected = [1, 1.25, -1, 0, 2**-8, 448, 448, -448, np.nan]
    np.testing.assert_array_equal(float8.nearest(x), np.array(expected, np.float32))


def test_nothing_is_nearer() -> None:
    x = np.random.default_rng(1).standard_normal(2000).astype(np.float32) * 3
    values = np.delete(float8.VALUES, [127, 255])
    best = np.abs(values[None] - x[:, None]).min(axis=1)
    np.testing.assert_array_equal(np.abs(float8.nearest(x) - x), best)
