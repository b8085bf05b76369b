"""Random workloads: every answer equals the truth, nothing leaks, everything drains (see machine.py)."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .machine import Machine
from .pool_machine import PoolMachine


def run(seeds: range) -> Counter[str]:
    totals: Counter[str] = Counter()
    for seed in seeds:
        try:
            totals.update(Machine(seed).run().totals)
        except Exception as error:
            raise AssertionError(f"Machine({seed}): {error}") from error
    return totals


def run_pool(seeds: range) -> Counter[str]:
    totals: Counter[str] = Counter()
    for seed in seeds:
        try:
            machine = PoolMachine(seed).run()
        except Exception as error:
            raise AssertionError(f"PoolMachine({seed}): {error}") from error
        totals["copies"] += machine.pool.copied
        totals["evictions"] += machine.pool.evictions
        totals["refused"] += machine.refused
    return totals


def test_random_workloads() -> None:
    totals = run(range(400))
    assert totals["preemptions"] > 100, "the machine must force preemptions"
    assert totals["cached_tokens"] > 500, "and prefix hits"
    assert totals["evictions"] > 1000, "and evictions"
    assert totals["recomputed_tokens"] > 500, "and recomputation"


def test_random_lives_of_blocks() -> None:
    totals = run_pool(range(400))
    assert totals["copies"] > 200
    assert totals["evictions"] > 200
    assert totals["refused"] > 200


RUNS = int(os.environ.get("PAGETURNER_PROPERTY_RUNS", "4000"))  # of the slow tests; `make soak` asks for more
PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_workloads(part: int) -> None:
    runs = RUNS // PARTS
    assert run(range(1000 + part * runs, 1000 + (part + 1) * runs))["preemptions"] > runs // 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_lives_of_blocks(part: int) -> None:
    runs = RUNS // PARTS
    assert run_pool(range(1000 + part * runs, 1000 + (part + 1) * runs))["copies"] > runs // 2


@pytest.mark.parametrize("policy", ["chunked", "prefill_first", "static"])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_each_policy_under_pressure(policy: str, block_size: int, prefix_caching: bool) -> None:
    config = {
        "policy": policy,
        "block_size": block_size,
        "num_blocks": -(-48 // block_size),
        "prefix_caching": prefix_caching,
        "max_model_len": 40,
    }
    for seed in range(5000, 5006):
        Machine(seed, config=config).run()
