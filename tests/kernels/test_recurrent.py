"""Recurrent layers: a row has the same bits however its sequence is cut, and they are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grid import rng
from recurrent_grid import Driver, Mixer, Sequence, alone, recurrence

from pageturner.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()
MIXERS = [
    Mixer("delta"),
    Mixer("delta", "bfloat16", tiled=True),
    Mixer("mamba", "float16"),
    Mixer("conv", "float16"),
]
SIZES = (1, 2, 64, 64)
NAMES = [f"{m.kind}-{m.dtype}" for m in MIXERS]


@pytest.fixture(params=["reference"])
def ops(request: pytest.FixtureRequest) -> Any:
    return REFERENCE


@pytest.mark.parametrize("mixer", MIXERS, ids=NAMES)
def test_bits_do_not_depend_on_cuts_and_crowds(ops: Any, mixer: Mixer) -> None:
    """Crowds, odd cuts, wrong drafts over boundaries, steps computed twice, and preemption."""
    lengths = (130, 75, 33)
    sequences = [Sequence(mixer.inputs(n, seed=10 * n)) for n in lengths]
    driver, random = Driver(ops, mixer), rng(7)
    while any(seq.computed < n for seq, n in zip(sequences, lengths, strict=True)):
        rows, accepted = [], {}
        for i in random.permutation(len(sequences)):
            left = lengths[i] - sequences[i].computed
            if not left or random.random() < 0.2:
                continue
            if random.random() < 0.1:
                driver.drop(sequences[i])
                left = lengths[i] - sequences[i].computed
            count = min(left, int(random.choice([1, 1, 2, 5, 9, 31, 32, 33, 64, 70])))
            if count < 10 and random.random() < 0.5:
                accepted[len(rows)] = int(random.integers(1, count + 1))
            rows.append((sequences[i], count))
        if rows:
            driver.step(rows, accepted, runs=int(random.integers(1, 3)))
    for seq in sequences:
        assert np.array_equal(seq.result, alone(ops, mixer, seq.inputs))


@pytest.mark.parametrize("mixer", MIXERS, ids=NAMES)
def test_token_by_token_is_one_step(ops: Any, mixer: Mixer) -> None:
    seq, driver = Sequence(mixer.inputs(70)), Driver(ops, mixer)
    for _ in range(70):
        driver.step([(seq, 1)])
    assert np.array_equal(seq.result, alone(ops, mixer, seq.inputs))


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_error_to_the_recurrence(ops: Any, kind: str, strong: bool) -> None:
    mixer = Mixer(kind, strong=strong, sizes=SIZES)
    inputs = mixer.inputs(130)
    out, exact = alone(ops, mixer, inputs), recurrence(mixer, inputs)
    assert np.abs(out - exact).max() <= 2e-6 * np.abs(exact).max()
    assert np.abs(out - recurrence(mixer, inputs, np.float32)).max() <= 1e-5 * np.abs(exact).max()
    for dtype in ("float16", "bfloat16"):
        half = alone(ops, Mixer(kind, dtype, strong=strong, sizes=SIZES), inputs)
        bound = 1e-3 if dtype == "float16" else 8e-3
        assert np.abs(half - exact).max() <= bound * np.abs(exact).max()
