"""Each seeded bug of core/ is caught by the property machine; the unchanged core passes the same runs.

A bug named after a policy, an order or an admission is looked for under that one, and by its promises.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.machine import Machine
from tests.core.pool_machine import PoolMachine
from tests.core.promises import PROMISES

from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.reserves import RESERVES

from .core import MUTANTS, mutant

SOON = 12  # runs of the machine before the promises are looked at
pytestmark = pytest.mark.slow  # two minutes of processor time: they guard the tests, not the product
RUNS = 400  # at most; nearly every mutant is caught within ten
NEEDS_LONG = ("smallest rank preempts itself", "victim was granted already")  # rare under other loads
SEARCHES = {"search", "beam", "branch", "candidates", "penalty"}  # what bugs of these are called


def caught(name: str) -> str | None:
    """How the first failing run failed."""
    bug = mutant(name)
    words = name.split()
    config: dict[str, Any] = {}
    for setting, names in (("policy", POLICIES), ("order", ORDERS), ("admission", RESERVES)):
        for word in words:
            if word in names:
                config[setting] = word
    load = "long" if name in NEEDS_LONG else None
    try:
        for seed in range(RUNS):
            if seed == SOON:
                for promise in (promise for word in words for promise in PROMISES.get(word, ())):
                    promise(bug.build)
            machine = Machine(seed, bug.build, config, load, bug.Targets)
            machine.punctual |= MUTANTS[name][0] == "targets"
            if SEARCHES & {*words}:
                machine.searching = 0.5
            machine.run()
            PoolMachine(seed, bug.BlockPool).run()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_catches(name: str) -> None:
    assert caught(name) is not None, f"{RUNS} random runs did not notice: {name}"
