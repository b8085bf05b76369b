"""The sampler in segments of the vocabulary: the tokens of the numpy reference, and a row's own bits in every
crowd. Adversarial rows: ties by the thousand, infinities, NaN, masses that one segment has alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pageturner.kernels.choosing import Draw
from pageturner.kernels.gpu.catalogue import VOCABULARY_TILE
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.reference import ReferenceOps

gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)  # skips without Triton

from pageturner.kernels.gpu import sampling  # noqa: E402

pytestmark = pytest.mark.timeout(900)
REFERENCE = ReferenceOps()
Logits = NDArray[np.float32]
VOCABULARY = 4 * VOCABULARY_TILE + 700
LAST = 1 - 2.0**-24  # the largest noise


@pytest.fixture(scope="module")
def ops() -> Any:
    return GpuOps(gpu_device.make_driver(), 64 << 20, graphs=False)


@pytest.fixture
def few(monkeypatch: Any) -> Any:
    """The interpreted kernels look through 256 tokens, so that these rows have too many."""
    driver = gpu_device.make_driver()
    for name, kernel in getattr(driver, "kernels", {}).items():
        if "MOST" in kernel.constants:
            least = {"MOST": 256, "FEW": 64} if "FEW" in kernel.constants else {"MOST": 256}
            driver.kernels[name] = replace(kernel, constants=kernel.constants | least)
            monkeypatch.setattr(sampling, "SAMPLE_MOST", 256)
    return GpuOps(driver, 64 << 20, graphs=False)


def drawn(ops: Any, logits: Logits, draw: Draw) -> tuple[list[int], bytes]:
    """Tokens, and the bytes of their logits."""
    ops.begin()
    ids, values = sampling.sample_on_device(ops, ops.on_device(logits), draw)
    return ids.tolist(), values.tobytes()


def draw_of(*rows: tuple[float, int, float, float, float]) -> Draw:
    """From temperature, top_k, top_p, min_p and noise of each row."""
    temperature, top_k, top_p, min_p, uniform = zip(*rows, strict=True)
    floats = [np.array(one, np.float32) for one in (temperature, top_p, min_p, uniform)]
    return floats[0], np.array(top_k, np.int32), floats[1], floats[2], floats[3]


def expected(logits: Logits, draw: Draw) -> list[int]:
    with np.errstate(all="ignore"):
        found: list[int] = REFERENCE.sample(logits, *draw).tolist()
    return found


def random_rows(seed: int, rows: int) -> tuple[Logits, Draw]:
    """Logits of every sort, and draws of every sort."""
    dice = np.random.default_rng(seed)
    vocabulary = int(dice.choice([70, VOCABULARY_TILE + 1, VOCABULARY]))
    logits = (dice.choice([0.1, 1, 5, 30]) * dice.standard_normal((rows, vocabulary))).astype(
        np.float32
    )
    if seed % 2:
        logits = np.round(logits * 4) / 4  # ties
    if seed % 3 == 0:
        logits[dice.integers(rows), dice.integers(vocabulary)] = dice.choice([np.nan, np.inf])
    if seed % 3 == 1:
        logits[dice.integers(rows), dice.random(vocabulary) < 0.9] = -np.inf
    return logits, draw_of(
        *(
            (
                dice.choice([0, 1e-4, 0.7, 1, 3]),
                dice.choice([0, 0, 1, 45, 3000, 20000]),
                dice.choice([1, 1, 0.999999, 0.95, 0.5, 0.01]),
                dice.choice([0, 0, 0.02, 0.5]),
                dice.choice([0, LAST, *dice.random(6, np.float32)]),
            )
            for _ in range(rows)
        )
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 24))]
)
def test_tokens_are_those_of_the_reference(ops: Any, seed: int) -> None:
    logits, draw = random_rows(seed, 3)
    ids, values = drawn(ops, logits, draw)
    assert ids == expected(logits, draw)
    own = np.frombuffer(values, np.float32)
    assert np.array_equal(own, logits[np.arange(len(ids)), ids], equal_nan=True)


def ties() -> Logits:
    """More equal logits than are looked through, on both sides of a segment's bound, below a few larger ones."""
    row = np.full(VOCABULARY, -3.0, np.float32)
    row[500 : 500 + 3200] = 2.0
    row[[3000, 7, VOCABULARY - 1]] = 2.5
    return row


def flat() -> Logits:
    """More tokens before the last one that stays than are looked through."""
    return (0.2 * np.random.default_rng(3).standard_normal(VOCABULARY)).astype(np.float32)


def steep() -> Logits:
    """Weights of one place differ by much: its bounds say little of its mass."""
    return (4 * np.random.default_rng(4).standard_normal(VOCABULARY)).astype(np.float32)


def biased() -> Logits:
    """Forbidden tokens far below all others: the mean is that of the others."""
    row = flat()
    row[::3], row[1::7] = -1e9, -np.inf
    return row


def outliers() -> Logits:
    """Few tokens have most of the mass, and the last one that stays is among thousands of others."""
    row = (2 * np.random.default_rng(5).standard_normal(VOCABULARY)).astype(np.float32)
    row[[70, 600, 4000]] = 12.0, 11.4, 10.2
    return row


@pytest.mark.slow
@pytest.mark.parametrize("row", [ties, flat, steep, biased, outliers], ids=lambda one: one.__name__)
def test_thousands_of_tokens_may_be_the_last_one(few: Any, row: Any) -> None:
    cases = [
        (0.9, 0, 0.6, 0),
        (1.0, 2300, 1.0, 0),
        (2.0, 2500, 0.7, 0.1),
        (1.0, 0, 0.95, 0.01),
        (0.5, 5, 0.4, 0),
        (1, 2, 0.9, 0),
    ]
    draw = draw_of(*((*case, noise) for case in cases for noise in (0.0, 0.37, LAST)))
    logits = np.tile(row(), (len(draw[0]), 1))
    assert drawn(few, logits, draw)[0] == expected(logits, draw)


def test_half_of_equal_logits_are_the_first_half(ops: Any) -> None:
    """The masses are whole numbers, so that the edges are exact: top_p 0.5 of eight keeps four."""
    logits = np.full((3, VOCABULARY_TILE + 8), -np.inf, np.float32)
    logits[:, VOCABULARY_TILE - 4 : VOCABULARY_TILE + 4] = 1.0
    draw = draw_of((1, 0, 0.5, 0, LAST), (1, 6, 0.5, 0, LAST), (1, 3, 1, 0, LAST))
    ids = drawn(ops, logits, draw)[0]
    assert ids == [VOCABULARY_TILE - 4 + last for last in (3, 2, 2)] == expected(logits, draw)


def test_a_row_that_is_no_number_tells_so(ops: Any) -> None:
    logits = np.zeros((4, VOCABULARY), np.float32)
    logits[0, [900, 4000]], logits[1, 4100], logits[2] = np.nan, np.inf, -np.inf
    draw = draw_of(*[(0.8, 5, 0.9, 0, 0.7)] * 3, (0, 0, 1, 0, 0))
    ids, values = drawn(ops, logits, draw)
    assert ids == expected(logits, draw) == [900, 4100, 0, 0]
    found = np.frombuffer(values, np.float32)
    assert [np.isnan(found[0]), *found[1:]] == [True, np.inf, -np.inf, 0.0]


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (7, 10, 21))]
)
def test_a_row_has_its_token_and_bits_alone_and_in_every_crowd(ops: Any, seed: int) -> None:
    logits, draw = random_rows(seed, 5)
    ids, values = drawn(ops, logits, draw)
    order = np.random.default_rng(seed).permutation(5)
    mixed = drawn(ops, logits[order], tuple(one[order] for one in draw))  # type: ignore[arg-type]
    assert mixed[0] == [ids[row] for row in order]
    for row in (0, 3):
        part = slice(row, row + 1)
        alone = drawn(ops, logits[part], tuple(one[part] for one in draw))  # type: ignore[arg-type]
        assert alone == (ids[part], values[4 * row : 4 * row + 4])


def test_what_no_row_needs_is_not_launched(ops: Any) -> None:
    logits = np.random.default_rng(1).standard_normal((2, 70), np.float32)
    greedy, plain, cut = (0, 5, 0.5, 0, 0), (0.7, 0, 1, 0.1, 0.3), (0.7, 5, 1, 0, 0.3)

    def launched(*rows: tuple[float, int, float, float, float]) -> list[str]:
        before = len(ops.driver.launched)
        drawn(ops, logits, draw_of(*rows))
        return list(ops.driver.launched[before:])

    assert launched(greedy, greedy) == launched(greedy, plain) == ["sample.best", "sample.draw"]
    assert {"sample.best.cuts", "sample.collect", "sample.cut"} <= set(launched(greedy, cut))
