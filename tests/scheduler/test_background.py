"""The background takes only what others leave of a step, under any policy and order, and ends after all."""

from __future__ import annotations

import random
from itertools import count

import pytest

from pageturner.params import SamplingParams
from pageturner.policies.background import MAX_IDLE
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.request import BACKGROUND, Event, Request
from pageturner.scheduler.types import Item, Output, Plan, Result, State
from support.schedulers import check, make_stack

BUDGET, SLOTS = 128, 16


def stack_of(**options: object) -> SchedulerStack:
    sizes = {"num_blocks": 4000, "block_size": 4, "max_model_len": 1000, "max_num_seqs": SLOTS}
    return make_stack(**sizes | {"token_budget": BUDGET, "static_batch": 4} | options)


def some(
    id: int, tokens: int, answer: int = 50, *, arrival: float = 0.0, back: bool = False
) -> Request:
    prompt = tuple((id * 131 + i) % 997 for i in range(tokens))
    params = SamplingParams(max_tokens=answer)
    return Request(id, prompt, params, arrival=arrival, priority=BACKGROUND if back else 0)


def step(stack: SchedulerStack, now: float) -> tuple[Plan, list[Event]]:
    plan = stack.scheduler.plan(now)
    outputs = [Output([7] if item.wants_logits else []) for item in plan.items]
    return plan, stack.scheduler.commit(plan, Result(outputs), now)


def granted(plan: Plan, *, back: bool) -> int:
    return sum(item.n for item in plan.items if is_back(item) is back)


def is_back(item: Item) -> bool:
    return item.sequence.request.priority == BACKGROUND


def busy_background(stack: SchedulerStack, n: int = 8, answer: int = 400) -> None:
    """So many of the background that decode."""
    for id in range(1000, 1000 + n):
        stack.scheduler.add(some(id, 20, answer, back=True))
    for now in range(20):
        step(stack, float(now))


def test_a_prompt_of_others_has_the_step_for_itself() -> None:
    stack = stack_of()
    busy_background(stack)
    stack.scheduler.add(some(1, 300, arrival=100.0))
    for now in (100.0, 101.0, 102.0):
        plan, _ = step(stack, now)
        assert granted(plan, back=True) == 0
        assert granted(plan, back=False) == min(BUDGET, 300 - BUDGET * int(now - 100))


def test_beside_others_that_decode_it_gets_a_quarter_and_one_token_at_least() -> None:
    for others, share in ((1, 1), (4, 1), (8, 2)):
        stack = stack_of()
        busy_background(stack)
        for id in range(1, others + 1):
            stack.scheduler.add(some(id, 3, arrival=100.0))
        step(stack, 100.0)
        plan, _ = step(stack, 101.0)
        assert (granted(plan, back=False), granted(plan, back=True)) == (others, share)


def test_alone_its_steps_are_short() -> None:
    stack = stack_of()
    stack.scheduler.add(some(1, 300, back=True))
    assert granted(step(stack, 0.0)[0], back=True) == BUDGET // 16
    wide = stack_of(token_budget=100_000)
    wide.scheduler.add(some(1, 300, back=True))
    assert granted(step(wide, 0.0)[0], back=True) == MAX_IDLE


@pytest.mark.parametrize("order", ORDERS)
def test_it_stands_behind_all_others_however_long_it_has_waited(order: str) -> None:
    stack = stack_of(order=order, max_num_seqs=1, ageing=1.0)
    stack.scheduler.add(some(1, 5, back=True))
    stack.scheduler.add(some(2, 200, arrival=1000.0))
    stack.scheduler.add(some(3, 200, arrival=1001.0))
    ids = [seq.request.id for seq in stack.scheduler.queue(1002.0)]
    assert ids[-1] == 1
    plan, _ = step(stack, 1002.0)
    assert not any(map(is_back, plan.items))


def test_an_order_never_hears_of_it() -> None:
    """A tenant's batch must not count against what it asks for itself."""
    stack = stack_of(order="fair")
    for id in range(10, 14):
        stack.scheduler.add(some(id, 100, back=True))
    for now in range(30):
        step(stack, float(now))
    mine, theirs = some(1, 50, arrival=99.0), some(2, 50, arrival=100.0)
    stack.scheduler.add(mine)
    stack.scheduler.add(theirs)
    assert [seq.request.id for seq in stack.scheduler.queue(100.0)][:2] == [1, 2]


def test_one_that_computes_a_prompt_others_wait_for_gets_their_turn() -> None:
    """Else each would wait for the other for ever."""
    stack = stack_of()
    prompt = tuple(range(400))
    stack.scheduler.add(Request(1, prompt, SamplingParams(max_tokens=4), priority=BACKGROUND))
    step(stack, 0.0)
    stack.scheduler.add(some(3, 3, 300, arrival=1.0))  # others decode, too
    step(stack, 1.0)
    stack.scheduler.add(Request(2, prompt, SamplingParams(max_tokens=4), arrival=2.0))
    for now in range(2, 8):
        _, events = step(stack, float(now))
        if any(event.id == 2 for event in events):
            return
    raise AssertionError("the one in front waited for the background")


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_ends_under_every_policy(policy: str) -> None:
    dice, ids = random.Random(policy), count(1)
    stack = stack_of(policy=policy, order=dice.choice(list(ORDERS)), num_blocks=80)
    left = 30
    for now in range(6000):
        while left and dice.random() < 0.2:
            back, tokens = dice.random() < 0.6, dice.randrange(1, 100)
            stack.scheduler.add(
                some(next(ids), tokens, dice.randrange(1, 40), arrival=float(now), back=back)
            )
            left -= 1
        plan, _ = step(stack, float(now))
        if now % 9 == 0:
            check(stack)
        if granted(plan, back=False) and any(i.n > 1 and not is_back(i) for i in plan.items):
            admitted = [i for i in plan.items if is_back(i) and i.sequence.state is State.RUNNING]
            waits = plan.wait_reason is not None and plan.wait_reason.cause == "prompt"
            assert waits or not admitted, (
                "the background took part in a step with a prompt of others"
            )
        if not left and not stack.scheduler.has_work:
            return
    raise AssertionError("somebody never ended")


def test_a_request_that_is_alone_but_for_the_background_is_never_refused_for_its_target() -> None:
    from pageturner.policies.slo_admission import SloAdmission

    stack = stack_of()
    busy_background(stack)
    admission = SloAdmission(stack)
    for _ in range(40):
        stack.step_times.took(16, 1.0)
        stack.step_times.took(128, 8.0)
    request = some(1, 100, arrival=100.0)
    asked = Request(1, request.prompt, request.params, arrival=100.0, ttft_target=0.001)
    admission.add(asked, 100.0)
    assert 1 in stack.scheduler
