"""Activations of 12 and 15 bits: nearly exact products, by every backend alike, row by row the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pageturner.formats.ggml import dequantise
from pageturner.kernels.base import Tensor
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps
from pageturner.kernels.reference_arrays import quantise_rows

KINDS = {"Q8_0": 34, "Q4_1": 20, "Q4_0": 18, "Q5_0": 22}
ROWS, K, N = 61, 96, 50  # AMX has tiles of its own for many rows


def tensor(kind: str) -> Tensor:
    """Random blocks with small finite scales."""
    dice = np.random.default_rng(3)
    blocks = dice.integers(0, 256, (N * K // 32, KINDS[kind]), np.uint8)
    halves = 4 if kind == "Q4_1" else 2
    scales = dice.uniform(0.01, 0.1, (len(blocks), halves // 2)).astype(np.float16)
    blocks[:, :halves] = scales.view(np.uint8)
    return Tensor("w", kind, (N, K), blocks.reshape(-1))


def rows() -> np.ndarray:
    x = np.random.default_rng(4).normal(size=(ROWS, K)).astype(np.float32)
    x[3] = 0
    x[5, 7] = 300
    return x


def error(kind: str, bits: int) -> float:
    x, weight = rows(), tensor(kind)
    exact = x.astype(np.float64) @ dequantise(kind, weight.shape, weight.data).astype(np.float64).T
    ops = ReferenceOps()
    return float(np.abs(ops.linear(x, ops.pack_weight(replace(weight, bits=bits))) - exact).max())


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_are_more_exact(kind: str) -> None:
    assert error(kind, 15) < error(kind, 8) / 100
    assert error(kind, 12) < error(kind, 8) / 10


def test_twelve_bits_are_within_a_32nd_of_a_step() -> None:
    x = np.random.default_rng(5).normal(size=(40, K)).astype(np.float32)
    q, scale = quantise_rows(x, 12)
    steps = np.abs(x.reshape(40, -1, 32)).max(-1) / 119
    off = np.abs(q * scale[..., None] - x.reshape(40, -1, 32)) / steps[..., None]
    assert 0.02 < off.max() < 1.001 / 32
    assert np.abs(q).max() <= 119 * 256 + 8


@pytest.mark.parametrize("bits", [12, 15])
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kind", KINDS)
def test_native_is_the_reference_and_rows_do_not_see_each_other(
    kind: str, isa: str, bits: int
) -> None:
    x, weight = rows(), replace(tensor(kind), bits=bits)
    reference = ReferenceOps()
    native = NativeOps(threads=2, isa=isa)
    meant = 15 if native.default_activation_bits("Q4_0") == 8 else bits
    expected = reference.linear(x, reference.pack_weight(replace(weight, bits=meant)))
    packed = native.pack_weight(weight)
    together = native.linear(x, packed)
    np.testing.assert_allclose(together, expected, rtol=2e-5, atol=1e-4)
    for n in (1, 2, 5):
        parts = [native.linear(x[i : i + n], packed) for i in range(0, ROWS, n)]
        assert np.array_equal(np.concatenate(parts), together)


@pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
@pytest.mark.parametrize("bits", [12, 15])
def test_a_number_that_is_none_is_not_lost(bits: int) -> None:
    x = rows()
    x[2, 5] = np.nan
    native = NativeOps(threads=1)
    out = native.linear(x, native.pack_weight(replace(tensor("Q8_0"), bits=bits)))
    assert np.isnan(out[2]).all()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()
