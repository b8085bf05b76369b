"""fp8 KV with a scale for each token and head: never worse than without, and what is large is not cut off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.kernels import grid

from pageturner.formats import float8
from pageturner.kernels.base import AttentionShape, KVSpec
from pageturner.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()
SHAPE = AttentionShape(4, 2, 16, 0.05)
RUNS = [(40, 3), (0, 20), (60, 1)]


def heads(seed: int, size: float, outlier: float = 0.0) -> np.ndarray:
    """400 heads of 16; of each one element is `outlier` times as large."""
    values = size * grid.normal(400, 16, seed=seed)
    values[np.arange(400), grid.rng(seed).integers(0, 16, 400)] *= outlier or 1.0
    return values


def through(x: np.ndarray) -> np.ndarray:
    scale = float8.scale(x)[:, None]
    return float8.nearest(x / scale) * scale


@pytest.mark.parametrize("size", [1e-6, 1e-4, 3e-3, 0.05, 1.0, 40.0])
def test_an_element_is_never_held_worse_where_nothing_was_cut_off(size: float) -> None:
    x = heads(1, size)
    x = x[np.abs(x).max(axis=1) <= 448]
    assert len(x) > 300
    assert (np.abs(through(x) - x) <= np.abs(float8.nearest(x) - x)).all()


@pytest.mark.parametrize("size", [100.0, 500.0, 4000.0])
def test_what_is_large_is_held_and_not_cut_off(size: float) -> None:
    x = heads(2, size, 3.0)
    scaled, plain = np.abs(through(x) - x), np.abs(float8.nearest(x) - x)
    assert (scaled.max(axis=1) <= plain.max(axis=1)).all()
    assert np.sqrt((scaled**2).mean()) <= np.sqrt((plain**2).mean()) * (0.5 if size > 100 else 1)
    assert np.abs(scaled / np.abs(x)).max() <= 2**-4  # half a step of three bits of mantissa


def test_scales_are_powers_of_two_within_fp16() -> None:
    peaks = np.array([0, 1e-30, 448, 449, 896, 897, 57344, 57345, 1e30, np.inf], np.float32)[
        :, None
    ]
    assert np.log2(float8.scale(peaks)).tolist() == [-14, -14, 0, 1, 1, 2, 7, 7, 7, 7]


def test_memory_of_scales_is_counted() -> None:
    spec = KVSpec(3, 10, 16, 2, 64, "fp8_e4m3")
    assert spec.bytes_per_token == 3 * 2 * 2 * 64
    assert replace(spec, scaled=True).bytes_per_token == replace(spec, dtype="int8").bytes_per_token


@pytest.mark.parametrize("outlier", [1.0, pytest.param(900.0, marks=pytest.mark.slow)])
def test_attention_over_scaled_fp8_is_at_most_as_wrong_as_over_plain_fp8(outlier: float) -> None:
    """On the interpreted device; outliers of 900 are twice what e4m3 has."""
    # skips without Triton
    gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)
    from pageturner.kernels.gpu.ops import GpuOps

    ops = GpuOps(gpu_device.make_driver(), 64 << 20, graphs=False)
    batch, whole = grid.batch(RUNS, 16, 14), grid.batch(grid.history(RUNS), 16, 14)
    k, v = grid.kv_rows(whole, 32, 0)
    if outlier > 1:
        k[:, 3], v[::5, 20] = outlier, -outlier
    q = grid.normal(len(batch.positions), 64, seed=9)
    q[:, 3::16] *= 1 / outlier
    found = {}
    for name, dtype in (("truth", "float32"), ("plain", "fp8_e4m3")):
        kv = REFERENCE.alloc_kv(grid.kv_spec(16, 14, 2, 16, dtype))
        REFERENCE.kv_write(kv, 0, k, v, whole.slots)
        found[name] = REFERENCE.attention(q, kv, 0, batch, SHAPE)
    mine = ops.alloc_kv(grid.kv_spec(16, 14, 2, 16, "fp8_e4m3"))
    ops.kv_write(mine, 0, ops.on_device(k), ops.on_device(v), whole.slots)
    got = ops.to_numpy(ops.attention(ops.on_device(q), mine, 0, batch, SHAPE))
    wrong = {
        name: np.linalg.norm(one - found["truth"])
        for name, one in (("gpu", got), ("cpu", found["plain"]))
    }
    assert wrong["gpu"] <= wrong["cpu"] * (0.3 if outlier > 1 else 1.02), (
        wrong
    )  # 1.02: q is rounded to fp16
