"""Plans made one step ahead: every answer is the truth, no block is given out early (ahead_machine.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from pageturner.params import SamplingParams
from pageturner.policies.orders import ORDERS
from pageturner.request import EXPIRED, Request
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Output, Plan, Result
from support.schedulers import check, make_stack

from .ahead_machine import AheadMachine
from .machine import rare, runs

# what the machine must bring about in 300 runs
FORCED = {
    "ahead": 6000,
    "unknown": 6000,
    "passed_over": 600,
    "joined_ahead": 200,
    "preemptions": 50,
    "expired": 60,
    "copies": 100,
    "evictions": 2000,
}


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 100), pytest.param(100, 1200, marks=pytest.mark.slow)]
)
def test_random_workloads(begin: int, end: int) -> None:
    totals: Counter[str] = Counter()
    for machine in runs(lambda seed: AheadMachine(seed, make_stack), range(begin, end)):
        totals.update(machine.totals)
    assert rare(totals, FORCED, (end - begin) / 300) == {}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", ["chunked", "prefill_first", "orca", "static"])
def test_each_order_under_pressure(policy: str, order: str) -> None:
    """A policy that remembers its steps (static) has none of them made ahead."""
    for block_size in (1, 16):
        config = {"policy": policy, "order": order, "block_size": block_size, "max_model_len": 40}
        one = AheadMachine(5000, make_stack, config | {"num_blocks": -(-48 // block_size)}).run()
        assert policy != "static" or not one.totals["ahead"]


def two_steps(prompt: int, **config: int) -> tuple[Scheduler, Plan, Plan]:
    """A scheduler in which a first step, which gives a token, and the one behind it are under way."""
    stack = make_stack(num_blocks=8, block_size=4, max_model_len=32, **config)
    stack.scheduler.add(
        Request(1, tuple(range(prompt)), SamplingParams(max_tokens=9, stop_ids=(7,)))
    )
    first = stack.scheduler.plan(0.0)
    ahead = stack.scheduler.plan_ahead(0.0)
    check(stack)
    return stack.scheduler, first, ahead


def test_the_token_of_the_step_before_is_planned_before_it_is_known() -> None:
    scheduler, first, ahead = two_steps(4)
    assert [(item.start, item.n, item.wants_logits, item.drafted) for item in ahead.items] == [
        (4, 1, True, 0)
    ]
    assert len(scheduler.running[0].blocks) == 2
    scheduler.commit(first, Result([Output([3])]), 0.0)
    assert [(item.start, item.n, item.wants_logits, item.drafted) for item in ahead.items] == [
        (4, 1, True, 0)
    ]
    assert len(scheduler.running[0].blocks) == 2, "the step under way needs the second one"
    events = scheduler.commit(ahead, Result([Output([5])]), 0.0)
    assert [(event.position, event.tokens) for event in events] == [(5, (5,))]


def test_a_sequence_that_ends_has_its_item_passed_over_and_its_blocks_held() -> None:
    scheduler, first, ahead = two_steps(4)
    ended = scheduler.commit(first, Result([Output([7])]), 0.0)
    assert [event.finish for event in ended] == ["stop"]
    assert scheduler.has_work, "a step is under way"
    assert scheduler.pool.full.available == 6
    assert scheduler.commit(ahead, Result([Output([5])]), 0.0) == []
    assert scheduler.pool.full.available == 8
    assert not scheduler.has_work


def test_an_abort_under_two_steps_keeps_the_blocks_for_both() -> None:
    scheduler, first, ahead = two_steps(4)
    assert scheduler.abort(1)
    assert scheduler.pool.full.available == 6
    assert scheduler.commit(first, Result([Output([7])]), 0.0) == []
    assert scheduler.pool.full.available == 6
    assert scheduler.commit(ahead, Result([Output([5])]), 0.0) == []
    assert scheduler.pool.full.available == 8


def test_nothing_is_planned_behind_the_last_token() -> None:
    stack = make_stack(num_blocks=8, block_size=4, max_model_len=32)
    stack.scheduler.add(Request(1, (1, 2, 3), SamplingParams(max_tokens=1)))
    stack.scheduler.plan(0.0)
    assert stack.scheduler.plan_ahead(0.0).items == []


def test_where_somebody_would_have_to_give_way_the_plan_is_not_made_ahead() -> None:
    stack = make_stack(num_blocks=4, block_size=4, max_model_len=16)
    scheduler, gained = stack.scheduler, Result([Output([3]), Output([3])])
    for id in (1, 2):
        scheduler.add(Request(id, (id, 2, 3), SamplingParams(max_tokens=9)))
    under_way = [scheduler.plan(0.0)]
    for _ in range(5):  # four blocks hold eight tokens of each
        under_way.append(scheduler.plan_ahead(0.0))
        assert len(under_way[1].items) == 2
        scheduler.commit(under_way.pop(0), gained, 0.0)
    assert scheduler.plan_ahead(0.0).items == []
    scheduler.commit(under_way.pop(0), gained, 0.0)
    plan = scheduler.plan(0.0)
    assert (list(plan.preempted), len(plan.items)) == ([2], 1)


def test_one_plan_ahead_and_in_order() -> None:
    scheduler, first, ahead = two_steps(4)
    with pytest.raises(RuntimeError, match="not committed"):
        scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="one plan ahead"):
        scheduler.plan_ahead(0.0)
    with pytest.raises(ValueError, match="not the first"):
        scheduler.commit(ahead, Result([Output([5])]), 0.0)
    assert not scheduler.reconfigure(4, 0, None, None, 1)
    scheduler.commit(first, Result([Output([3])]), 0.0)


def test_a_request_may_be_ended_under_one_plan_and_not_under_two() -> None:
    scheduler, first, ahead = two_steps(4)
    with pytest.raises(AssertionError, match="two plans"):
        scheduler.end(1, EXPIRED)
    scheduler.commit(first, Result([Output([3])]), 0.0)
    (event,) = scheduler.end(1, EXPIRED)
    assert (event.finish, event.failure) == ("error", EXPIRED)
    held = len(scheduler.pool.full.held)
    assert held == 2, "the step under way still writes to both blocks"
    assert scheduler.commit(ahead, Result([Output([5])]), 0.0) == []
    assert (len(scheduler.pool.full.held), scheduler.has_work) == (0, False)
