"""The primitives that other families than Llama need, natively and against the reference. Attention and whole
layers: test_native_newer.py."""

from __future__ import annotations

import numpy as np
import pytest
from grid import (
    close,
    i32,
    normal,
)

from pageturner.kernels.base import (
    ACTIVATIONS,
    COMPOSED,
    FEATURES,
)
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
REFERENCE = ReferenceOps()


# -- elementwise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8, 31, 64, 576])
def test_layer_norm(ops: NativeOps, n: int) -> None:
    x, w, bias = normal(7, n) * 10 + 3, normal(n, seed=1), normal(n, seed=2)
    close(ops.layer_norm(x, w, bias, 1e-5), REFERENCE.layer_norm(x, w, bias, 1e-5), 3e-6)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(ops: NativeOps, act: str) -> None:
    x = np.linspace(-12, 12, 4001, dtype=np.float32).reshape(1, -1)
    x[0, :8] = [-200, -90, -1e-4, 0, 1e-20, 90, 200, -0.0]
    expected = REFERENCE.activate(x, act)
    got = ops.activate(x.copy(), act)
    assert np.abs(got - expected).max() <= 1e-5
    small = np.abs(x) < 12
    assert np.abs(got - expected)[small].max() <= 1.5e-6
    for width in (1, 5, 8, 13):  # the last few of a row
        close(ops.activate(x[:, -width:].copy(), act), expected[:, -width:], 1e-6)


def test_soft_cap_mul_and_scale(ops: NativeOps) -> None:
    x, y = normal(5, 37) * 30, normal(5, 37, seed=1)
    x[0, :4] = [1e-6, -500, 500, 0]
    capped = ops.soft_cap(x.copy(), 30.0)
    np.testing.assert_allclose(capped, REFERENCE.soft_cap(x, 30.0), rtol=1e-6)
    assert np.array_equal(ops.mul(x.copy(), y), x * y)
    assert np.array_equal(ops.scale(x.copy(), 0.1), x * np.float32(0.1))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (60, 4), (5, 5)])
def test_route(ops: NativeOps, experts: int, top_k: int, normalise: bool) -> None:
    logits = normal(40, experts) * 3
    logits[:5] = np.round(logits[:5])  # ties
    ids, weights = ops.route(logits, top_k, normalise)
    expected_ids, expected = REFERENCE.route(logits, top_k, normalise)
    assert np.array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    alone = [ops.route(row[None], top_k, normalise) for row in logits]
    assert np.array_equal(np.concatenate([a[1] for a in alone]), weights)


def test_route_survives_nan(ops: NativeOps) -> None:
    logits = np.full((1, 6), np.nan, np.float32)
    assert ops.route(logits, 3, True)[0].tolist() == [[0, 1, 2]]


def test_add_rows(ops: NativeOps) -> None:
    x, y, rows = normal(6, 33), normal(3, 33, seed=1), i32([4, 0, 5])
    weights = np.array([0.3, 0.5, 2], np.float32)
    assert np.array_equal(
        ops.add_rows(x.copy(), y, rows, weights), REFERENCE.add_rows(x, y, rows, weights)
    )
    with pytest.raises(ValueError, match="row"):
        ops.add_rows(x, y, i32([0, 1, 6]), weights)


# -- layers --------------------------------------------------------------------------------------------------


def test_all_features_are_there(ops: NativeOps) -> None:
    assert ops.features == FEATURES | COMPOSED


def test_an_unknown_activation_is_refused(ops: NativeOps) -> None:
    with pytest.raises(ValueError, match="activation"):
        ops._engine.activate(normal(1, 8), 4, normal(1, 8))
