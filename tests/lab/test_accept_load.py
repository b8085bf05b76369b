"""What the acceptance of load and soak makes of its figures."""

from __future__ import annotations

import random
import sys
from array import array
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))

import stamped_server
import trust_load
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


def test_each_token_is_told_from_those_that_came_with_it() -> None:
    """The second and the third token of a stream came at once; the others one by one."""
    stamps = stamped_server.Stamps()
    stamps.begins = {7: trust_load.FIRST, 9: trust_load.FIRST + 1}
    for at, ids in ((1.0, [7]), (2.0, [7, 9]), (3.0, [9, 7])):
        stamps.times.append(at)
        stamps.ids.append(array("q", ids))
    seen = trust_load.Seen(
        0.0, array("d", [1.25, 2.5, 4.0, 4.5]), array("l", [0, 1, 0, 1]), array("l", [1, 1, 2, 1])
    )
    left = {trust_load.FIRST + i: [] for i in range(trust_load.STREAMS)} | stamps.by_prompt()
    assert trust_load.delays(seen, left, 0.0) == [0.25, 0.5, 1.0, 1.5, 2.0]
    assert trust_load.delays(seen, left, 1.5) == [0.5, 1.0, 1.5, 2.0]
