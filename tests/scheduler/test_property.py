"""Random workloads: every answer equals the truth, nothing leaks, everything drains (see machine.py)."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from pageturner.policies.batching import POLICIES
from pageturner.policies.length_predictor import LengthPredictor
from pageturner.policies.orders import ORDERS, Context
from pageturner.policies.programs import Programs
from pageturner.policies.step_time import StepTimeModel
from pageturner.request import Request
from pageturner.scheduler.types import Sequence
from pageturner.telemetry.kv_usage import pool_stats

from .machine import Machine, rare, runs
from .pool_machine import PoolMachine


def run(seeds: range) -> Counter[str]:
    totals: Counter[str] = Counter()
    for machine in runs(Machine, seeds):
        totals.update(machine.totals)
    return totals


def run_pool(seeds: range) -> Counter[str]:
    totals: Counter[str] = Counter()
    for machine in runs(PoolMachine, seeds):
        totals.update({name: int(value) for name, value in pool_stats(machine.pool).items()})
        totals["refused"] += machine.refused
        totals["public"] += machine.shared
    return totals


# what the machine must bring about in 300 runs, so that its assertions mean something
FORCED = {
    "preemptions": 70,
    "cached_tokens": 500,
    "evictions": 1000,
    "copies": 40,  # choices that part from the prompt they share
    "unpinned": 5,
    "public": 15,  # blocks below a salt that are everybody's
    "recomputed_tokens": 500,
    "given_back": 5000,  # by windows that move on
    "recent_evictions": 1000,  # of what they gave back
    "state_evictions": 100,
    "state_blocks_cached": 200,
    "state_hits": 40,
    "expired": 80,
    "refused_late": 5,
}
# and that of the lives of blocks in 400
FORCED_OF_BLOCKS = {
    "copies": 200,
    "evictions": 200,
    "refused": 200,
    "public": 30,
    "recent_copies": 50,
    "recent_evictions": 100,
    "state_evictions": 50,
    "state_blocks_cached": 100,
}


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 100), pytest.param(100, 300, marks=pytest.mark.slow)]
)
def test_random_workloads(begin: int, end: int) -> None:
    totals = run(range(begin, end))
    assert rare(totals, FORCED, (end - begin) / 300) == {}


@pytest.mark.parametrize(("begin", "end"), [(0, 80), pytest.param(80, 400, marks=pytest.mark.slow)])
def test_random_lives_of_blocks(begin: int, end: int) -> None:
    totals = run_pool(range(begin, end))
    assert rare(totals, FORCED_OF_BLOCKS, (end - begin) / 400) == {}


# of the slow tests; `make soak` asks for more
RUNS = int(os.environ.get("PAGETURNER_PROPERTY_RUNS", "2400"))
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
@pytest.mark.parametrize("seed", [5000, pytest.param(5001, marks=pytest.mark.slow)])
def test_each_policy_and_order_under_pressure(
    policy: str, order: str, block_size: int, seed: int
) -> None:
    config = {
        "policy": policy,
        "order": order,
        "block_size": block_size,
        "num_blocks": -(-48 // block_size),
        "max_model_len": 40,
    }
    Machine(seed, config=config).run()


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "fair"])
def test_the_ageing_bound(name: str) -> None:
    """At any time, nothing stands in front of an aged request but what came before it; nor ever again."""
    dice = random.Random(3)
    for ageing in (0.0, 0.1, 1.0, 7.0, 30.0) * 10:
        order = ORDERS[name](
            Context(
                ageing,
                2.0,
                lambda seq: dice.randrange(seq.prompt_len),
                LengthPredictor(),
                StepTimeModel(),
                Programs(),
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
