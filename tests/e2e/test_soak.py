"""Three minutes of soak: whatever clients ask, the memory of both processes stays where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.smollm2 import model_path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
import trust_soak


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_each_request_ends_as_it_should_and_memory_is_flat() -> None:
    model_path()  # skips where the model is not
    seen = list(trust_soak.lines(100_000))
    assert len(seen) == 3
    assert [line for line in seen if not line.passed] == []
