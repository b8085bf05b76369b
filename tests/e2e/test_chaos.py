"""Three minutes of chaos: answers of every method are what they were, whatever happens to engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.smollm2 import model_path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
import trust_chaos

MINUTES, CLIENTS, FAULTS = 3.0, 8, 12


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_nothing_is_lost_repeated_or_changed() -> None:
    model_path()  # skips where the model is not
    seen, before, behind = trust_chaos.run(MINUTES, CLIENTS, FAULTS)
    assert seen.differ == []
    assert seen.answers >= 4 * CLIENTS
    assert sum(seen.faults.values()) >= FAULTS // 2
    assert behind < before + 64
