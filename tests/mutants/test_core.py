"""Each seeded bug of core/ is caught by the property machine; the unchanged core passes the same runs.

A bug named after a policy is looked for under that policy.
"""

from __future__ import annotations

import pytest
from tests.core.machine import Machine
from tests.core.pool_machine import PoolMachine

from pageturner.core.batching import POLICIES

from .core import MUTANTS, mutant

RUNS = 400  # at most; nearly every mutant is caught within ten
NEEDS_LONG = ("smallest rank preempts itself", "victim was granted already")  # rare under other loads


def caught(name: str) -> str | None:
    """How the first failing run failed."""
    bug = mutant(name)
    policy = next((policy for policy in POLICIES if policy in name), None)
    config = {"policy": policy} if policy else None
    load = "long" if name in NEEDS_LONG else None
    for seed in range(RUNS):
        try:
            Machine(seed, bug.build, config, load).run()
            PoolMachine(seed, bug.BlockPool).run()
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_catches(name: str) -> None:
    assert caught(name) is not None, f"{RUNS} random runs did not notice: {name}"
