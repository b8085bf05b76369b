"""Three minutes of chaos: answers of every method are what they were, whatever fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.smollm2 import model_path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
import trust_chaos

MINUTES, CLIENTS, FAULTS = 2.5, 8, 16


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_nothing_is_lost_repeated_or_changed() -> None:
    model_path()  # skips where the model is not
    seen = trust_chaos.run(MINUTES, CLIENTS, FAULTS)
    assert seen.differ == []
    assert seen.failed_faults == []
    assert seen.answers >= 4 * CLIENTS
    assert set(seen.faults.values()) == {1}
    assert not [what for what in seen.pressed if what.startswith("500")]
    assert seen.records
    assert seen.behind < seen.before + 64
