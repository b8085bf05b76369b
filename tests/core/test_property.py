"""Random workloads: every answer equals the truth, nothing leaks, everything drains (see machine.py)."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from pageturner.core.types import Sequence
from pageturner.policies.batching import POLICIES
from pageturner.policies.length_predictor import LengthPredictor
from pageturner.policies.orders import ORDERS, Context
from pageturner.policies.step_time import StepTimeModel
from pageturner.request import Request

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
        totals.update({name: int(value) for name, value in machine.pool.stats().items()})
        totals["refused"] += machine.refused
        totals["public"] += machine.shared
    return totals


def test_random_workloads() -> None:
    totals = run(range(300))
    assert totals["preemptions"] > 70, "the machine must force preemptions"
    assert totals["cached_tokens"] > 500, "and prefix hits"
    assert totals["evictions"] > 1000, "and evictions"
    assert totals["copies"] > 40, "and choices that part from the prompt they share"
    assert totals["unpinned"] > 5, "and pins"
    assert totals["public"] > 20, "and blocks below a salt that are everybody's"
    assert totals["recomputed_tokens"] > 500, "and recomputation"
    assert totals["given_back"] > 5000, "and windows that move on"
    assert totals["recent_evictions"] > 1000, "and evictions of what they gave back"
    assert totals["expired"] > 80, "and deadlines that pass"
    assert totals["refused_late"] > 5, "and targets that cannot be met"


def test_random_lives_of_blocks() -> None:
    totals = run_pool(range(400))
    assert totals["copies"] > 200
    assert totals["evictions"] > 200
    assert totals["refused"] > 200
    assert totals["public"] > 30
    assert totals["recent_copies"] > 50
    assert totals["recent_evictions"] > 100


RUNS = int(os.environ.get("PAGETURNER_PROPERTY_RUNS", "5600"))  # of the slow tests; `make soak` asks for more
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_each_policy_and_order_under_pressure(policy: str, order: str, block_size: int) -> None:
    config = {
        "policy": policy,
        "order": order,
        "block_size": block_size,
        "num_blocks": -(-48 // block_size),
        "max_model_len": 40,
    }
    for seed in range(5000, 5002):
        Machine(seed, config=config).run()


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "fair"])
def test_the_ageing_bound(name: str) -> None:
    """At any time, nothing stands in front of an aged request but what came before it; nor ever again."""
    dice = random.Random(3)
    for ageing in (0.0, 0.1, 1.0, 7.0, 30.0) * 10:
        order = ORDERS[name](
            Context(
                ageing, 2.0, lambda seq: dice.randrange(seq.prompt_len), LengthPredictor(), StepTimeModel()
            )
        )
        queue = [random_sequence(id, dice) for id in range(20)]
        for seq in queue:
            if order.listener.queued:
                order.listener.queued(seq)
        for seq in queue:
            start = seq.request.arrival + (ageing if name != "fcfs" else 0)
            before = {other for other in queue if other.request.arrival < seq.request.arrival}
            for now in (start, start + dice.uniform(0, 5), start + 1e6):
                order.begin_step((), now)
                in_front = {other for other in queue if order.key(other, now) < order.key(seq, now)}
                assert in_front == before


def random_sequence(id: int, dice: random.Random) -> Sequence:
    prompt, now = tuple(range(dice.randint(1, 30))), dice.uniform(0, 40)
    targets = {"deadline": now + dice.uniform(0, 9), "ttft_target": dice.uniform(0, 9)}
    request = Request(id, prompt, arrival=now, priority=dice.randrange(-9, 9), **targets)
    return Sequence(request, tokens=list(prompt), limit=len(prompt) + dice.randint(1, 99))
