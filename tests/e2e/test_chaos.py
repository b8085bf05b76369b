"""Three minutes of chaos against one server, and as much in the other setups: answers are what they were."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from support.smollm2 import model_path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
import trust2_chaos
import trust_chaos

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1800)]
SETUPS = [*(one.name for one in trust2_chaos.SETUPS), trust2_chaos.FLEET]


def test_nothing_is_lost_repeated_or_changed() -> None:
    model_path()  # skips where the model is not
    seen = trust_chaos.run(2.5, 8, 16)
    assert seen.differ + seen.failed_faults == []
    assert set(seen.faults.values()) == {1}
    assert not [what for what in seen.pressed if what.startswith("500")]
    assert seen.records
    assert seen.answers >= 32
    assert seen.behind < seen.before + 64


@pytest.mark.parametrize("setup", SETUPS)
def test_nor_with_ranks_stages_tiers_and_replicas(setup: str) -> None:
    model_path()
    options = argparse.Namespace(chaos_minutes=0.75, chaos_clients=8, chaos_setups=[setup])
    assert [line for line in trust2_chaos.lines(options) if line.passed is False] == []
