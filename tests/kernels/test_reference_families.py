"""The reference's operations beyond Llama's, against plain formulas in fp64, and that rows stay alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pageturner.kernels.base import ACTIVATIONS, AttentionShape, Batch, KVSpec
from pageturner.kernels.reference import ReferenceOps

OPS = ReferenceOps()
DRAW = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


def test_layer_norm() -> None:
    x, weight, bias = normal(3, 40) + 5, normal(40), normal(40)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(
        OPS.layer_norm(x, weight, bias, 1e-5), expected, rtol=1e-5, atol=1e-6
    )


def test_activations() -> None:
    x = np.array([[-90, -3, -0.5, 0, 0.1, 2, 90]], np.float32)
    sigmoid = 1 / (1 + np.exp(-x.astype(np.float64)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
    expected = {
        "silu": x * sigmoid,
        "gelu": [[v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in x[0].tolist()]],
        "gelu_tanh": x / 2 * (1 + np.tanh(inner)),
        "relu": np.maximum(x, 0),
    }
    assert set(expected) == set(ACTIVATIONS)
    for act in ACTIVATIONS:
        np.testing.assert_allclose(OPS.activate(x, act), expected[act], rtol=1e-6, atol=1e-30)


def test_mul_scale_and_soft_cap() -> None:
    x, y = normal(3, 5), normal(3, 5)
    np.testing.assert_array_equal(OPS.mul(x, y), x * y)
    np.testing.assert_array_equal(OPS.scale(x, 0.1), x * np.float32(0.1))
    np.testing.assert_allclose(OPS.soft_cap(100 * x, 30.0), 30 * np.tanh(100 / 30 * x), rtol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
def test_route(normalise: bool) -> None:
    logits = np.array([[0, 2, 1, 2], [5, 5, 5, 5]], np.float32)
    ids, weights = OPS.route(logits, 2, normalise)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    share = math.exp(2) / (1 + 2 * math.exp(2) + math.e)
    expected = [[0.5, 0.5]] * 2 if normalise else [[share, share], [0.25, 0.25]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_add_rows() -> None:
    x, y = normal(4, 3), normal(2, 3)
    out = OPS.add_rows(x.copy(), y, np.array([3, 1], np.int32), np.array([2, 0.5], np.float32))
    np.testing.assert_array_equal(
        out, x + np.array([0 * y[0], 0.5 * y[1], 0 * y[0], 2 * y[0]], np.float32)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 7},
        {"window": 300},
        {"soft_cap": 2.0},
        {"slopes": (0.5, 0.25, 0.0, 1.0)},
        {"window": 40, "soft_cap": 1.5, "slopes": (0.1, 0.2, 0.3, 0.4)},
    ],
)
def test_attention_options(options: dict[str, object]) -> None:
    """One sequence of 600 tokens, beyond two segments, against the definition in fp64."""
    n, dim = 600, 8
    shape = AttentionShape(4, 2, dim, 0.7, **options)  # type: ignore[arg-type]
    q, k, v = normal(n, 4 * dim), normal(n, 2 * dim), normal(n, 2 * dim)
    kv = OPS.alloc_kv(KVSpec(1, 38, 16, 2, dim, "float32"))
    rows = np.arange(n, dtype=np.int32)
    table = np.arange(38, dtype=np.int32)[None]
    whole = Batch(
        rows, rows, np.array([0, n], np.int32), np.array([n], np.int32), table, rows, rows
    )
    OPS.kv_write(kv, 0, k, v, rows)
    got = OPS.attention(q, kv, 0, whole, shape).reshape(n, 4, dim)
    key, value = (np.repeat(a.reshape(n, 2, dim), 2, axis=1).astype(np.float64) for a in (k, v))
    scores = np.einsum("ihd,jhd->hij", q.reshape(n, 4, dim).astype(np.float64), key) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
    distance = rows[None, :] - rows[:, None]
    if shape.slopes:
        scores += np.array(shape.slopes)[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(shape.window or n))
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("hij,jhd->ihd", weights, value), rtol=1e-4, atol=1e-5)
    part = Batch(
        rows[500:],
        rows[500:],
        np.array([0, 100], np.int32),
        whole.context_len,
        table,
        rows[500:],
        rows[:0],
    )
    alone = OPS.attention(q[500:], kv, 0, part, shape)
    np.testing.assert_array_equal(alone, got[500:].reshape(100, -1))


def test_rows_do_not_meet() -> None:
    x, weight, bias = normal(33, 37), normal(37), normal(37)
    for part in (slice(5, 6), slice(3, 29)):
        same = np.testing.assert_array_equal
        same(
            OPS.layer_norm(x[part], weight, bias, 1e-5), OPS.layer_norm(x, weight, bias, 1e-5)[part]
        )
        same(OPS.soft_cap(x[part], 3.0), OPS.soft_cap(x, 3.0)[part])
        for act in ACTIVATIONS:
            same(OPS.activate(x[part], act), OPS.activate(x, act)[part])
        for a, b in zip(OPS.route(x[part], 5, False), OPS.route(x, 5, False), strict=True):
            same(a, b[part])
