"""Choosing tokens natively, against the reference and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from grid import normal, rng

from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.reference import ReferenceOps

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
REFERENCE = ReferenceOps()


def parameters(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[np.ndarray, ...]:
    uniform = rng(11).random(rows, dtype=np.float32)
    full = [np.full(rows, v, np.float32) for v in (temperature, top_p, min_p)]
    return full[0], np.full(rows, top_k, np.int32), full[1], full[2], uniform


@pytest.mark.parametrize("vocabulary", [1, 5, 64, 1000, 49152])
def test_greedy_takes_the_first_of_the_largest(ops: NativeOps, vocabulary: int) -> None:
    logits = np.round(normal(20, vocabulary) * 2)
    assert np.array_equal(ops.sample(logits, *parameters(20, 0.0)), np.argmax(logits, axis=1))


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 900},
        {"top_k": 5000},
        {"top_p": 0.1},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
        {"top_p": 0.9, "min_p": 0.1, "temperature": 2.0},
    ],
    ids=str,
)
def test_sampling_agrees_with_the_reference(
    ops: NativeOps, scale: float, options: dict[str, float]
) -> None:
    rows = 200
    logits = normal(rows, 2000) * np.float32(scale)
    p = parameters(rows, **options)  # type: ignore[arg-type]
    mine, theirs = ops.sample(logits, *p), REFERENCE.sample(logits, *p)
    # Where uniform * total falls within rounding of a boundary the neighbour is as right: rare.
    assert np.mean(mine != theirs) <= 0.01


def test_ties_are_kept_by_ascending_id(ops: NativeOps) -> None:
    """All logits equal: top-k 7 keeps ids 0..6, top-p 0.0999 of 1000 keeps 0..99."""
    logits, uniform = (
        np.zeros((400, 1000), np.float32),
        np.linspace(0, 0.9999, 400, dtype=np.float32),
    )
    one = np.ones(400, np.float32)
    k = ops.sample(logits, one, np.full(400, 7, np.int32), one, 0 * one, uniform)
    assert sorted(set(k.tolist())) == list(range(7))
    p = ops.sample(logits, one, np.zeros(400, np.int32), 0.0999 * one, 0 * one, uniform)
    assert set(p.tolist()) == set(range(100))


def test_signed_zeros_are_equal(ops: NativeOps) -> None:
    logits = np.full((1, 100), -5.0, np.float32)
    logits[0, [20, 30]] = [-0.0, 0.0]
    zero = np.zeros(1, np.float32)
    assert ops.sample(logits, zero + 1, np.ones(1, np.int32), zero + 1, zero, zero + 0.99)[0] == 20


def test_masked_tokens_are_never_chosen(ops: NativeOps) -> None:
    logits = np.full((64, 5000), -np.inf, np.float32)
    logits[:, [17, 4000]] = 1.0
    for options in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}):
        assert set(ops.sample(logits, *parameters(64, **options)).tolist()) == {17, 4000}  # type: ignore[arg-type]


def test_frequencies_follow_the_distribution(ops: NativeOps) -> None:
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = np.tile(np.log(p).astype(np.float32), (20000, 1))
    count = np.bincount(ops.sample(logits, *parameters(20000)), minlength=5) / 20000
    assert np.abs(count - p).max() < 0.015


@pytest.mark.parametrize("vocabulary", [3, 100, 49152])
@pytest.mark.parametrize("k", [0, 1, 3, 100, 2000])
def test_top_logprobs(ops: NativeOps, vocabulary: int, k: int) -> None:
    logits = np.round(normal(5, vocabulary) * 20) / 4  # with ties
    lse, ids, logprobs = ops.top_logprobs(logits, k)
    expected = REFERENCE.top_logprobs(logits, k)
    np.testing.assert_allclose(lse, expected[0], atol=2e-6, rtol=1e-6)
    assert np.array_equal(ids, expected[1])
    np.testing.assert_allclose(logprobs, expected[2], atol=1e-5, rtol=1e-6)


def spoilt(vocabulary: int) -> np.ndarray:
    """Rows, each spoilt in another way: some NaN of either sign, nothing else, infinities, both."""
    logits = normal(8, vocabulary)
    logits[1, vocabulary // 2 :: 3], logits[2, -1], logits[3] = np.nan, -np.nan, np.nan
    logits[4, vocabulary // 3], logits[5], logits[6, ::2] = np.inf, -np.inf, np.inf
    logits[6, 1::2] = np.nan
    return logits


@pytest.mark.parametrize("vocabulary", [3, 64, 65, 5001])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str
)
def test_a_spoilt_row_gives_itself_away_by_its_token(
    ops: NativeOps, vocabulary: int, options: dict[str, float]
) -> None:
    """NaN is larger than every number: it is never covered by a token that looks sound."""
    logits, p = spoilt(vocabulary), parameters(8, **options)  # type: ignore[arg-type]
    chosen = ops.sample(logits, *p)
    assert chosen[1:7].tolist() == np.argmax(logits, axis=1)[1:7].tolist()
    assert chosen[1:7].tolist() == REFERENCE.sample(logits, *p)[1:7].tolist()
    assert np.isfinite(logits[[0, 7], chosen[[0, 7]]]).all()


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("vocabulary", [3, 64, 5001])
def test_of_a_spoilt_row_there_is_nothing_to_tell(ops: NativeOps, vocabulary: int, k: int) -> None:
    logits = spoilt(vocabulary)
    for lse, ids, values in (ops.top_logprobs(logits, k), REFERENCE.top_logprobs(logits, k)):
        assert np.isfinite(lse).tolist() == [True, *[False] * 6, True]
        assert not ids[1:7].any()
        assert np.isnan(values[1:7]).all()


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 9}, {"top_p": 0.0}, {"top_p": 0.5}, {"min_p": 2.0}], ids=str
)
def test_odd_logits_and_parameters_give_some_token(
    ops: NativeOps, options: dict[str, float]
) -> None:
    logits = normal(6, 300)
    logits[1, 7], logits[2, [5, 9]], logits[4] = np.nan, np.inf, np.nan
    logits[3], logits[5] = -np.inf, 0.0
    chosen = ops.sample(logits, *parameters(6, **options))  # type: ignore[arg-type]
    assert ((chosen >= 0) & (chosen < 300)).all()
    assert chosen[2] == 5
    assert chosen[1] == 7
    assert chosen[4] == chosen[3] == 0
    if "top_p" in options and options["top_p"] == 0:
        assert chosen[0] == np.argmax(logits[0])
