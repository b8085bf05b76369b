"""What the acceptance of the soak makes of its figures."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))

import trust_soak


def test_memory_that_goes_up_and_down_has_not_grown() -> None:
    dice = random.Random(1)
    samples = [(1000.0 * i, 60.0 + dice.uniform(-3, 3)) for i in range(300)]
    grown, slope = trust_soak.growth(samples)
    assert abs(grown) < 1.0
    assert abs(slope) < 5.0


def test_memory_that_grows_is_told_in_mb_for_a_million_requests() -> None:
    grown, slope = trust_soak.growth([(1000.0 * i, 60.0 + 0.02 * i) for i in range(300)])
    assert grown == pytest.approx(4.0)
    assert slope == pytest.approx(20.0)
