"""Each seeded bug of core/ is caught by the property machine; the unchanged core passes the same runs."""

from __future__ import annotations

import pytest
from tests.core.machine import Machine
from tests.core.pool_machine import PoolMachine

from .core import MUTANTS, mutant

RUNS = 400  # at most; nearly every mutant is caught within ten


def caught(name: str) -> str | None:
    """How the first failing run failed."""
    bug = mutant(name)
    for seed in range(RUNS):
        try:
            Machine(seed, build=bug.build).run()
            PoolMachine(seed, bug.BlockPool).run()
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_catches(name: str) -> None:
    assert caught(name) is not None, f"{RUNS} random runs did not notice: {name}"
