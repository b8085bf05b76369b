"""Work beside tokens is part of the one budget: steps stay bounded, dear requests end, others go on."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import engine_again, make_engine
from pageturner.lab.simulation.log_replay import replay_plans
from pageturner.lab.simulation.recorded_runs import last_run
from pageturner.params import SamplingParams
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Plan, Result
from pageturner.telemetry.step_log import Arrived, Record
from pageturner.telemetry.work import ModelCosts
from pageturner.telemetry.work_price import FREE, context_price, work_prices
from support.schedulers import make_stack

BUDGET, SLOTS = 64, 8
STOPS = tuple(range(10))
SMOLLM2 = ModelCosts(
    int8=2.2e8,
    fp32=0,
    layers=64_000_000,
    ending_int8=1.25e8,
    ending_fp32=0,
    ending=32_000_000,
    pair=69_120,
    position=23_040,
)


def stack_of(policy: str = "chunked", **options: Any) -> SchedulerStack:
    sizes = {"num_blocks": 4000, "block_size": 4, "max_model_len": 400, "max_num_seqs": SLOTS}
    return make_stack(**sizes | {"token_budget": BUDGET, "policy": policy, **options})


def output_of(item: Item) -> Output:
    scored = [(0.0, 1, ())] * len(item.scored)
    if not item.wants_logits:
        return Output(prompt_logprobs=scored)
    if item.sequence.request.params.beam_width:
        return Output(candidates=[(token, -float(token)) for token in range(40, 100)])
    return Output([30], prompt_logprobs=scored, draft=[30, 30, 31])


def commit(stack: SchedulerStack, plan: Plan, now: float) -> None:
    stack.scheduler.commit(plan, Result([output_of(item) for item in plan.items]), now)


def rows_of(item: Item) -> int:
    return len(item.scored) + (1 + item.drafted if item.wants_logits else 0)


def price_of(item: Item) -> float:
    return rows_of(item) * item.sequence.request.row_price


def some_request(dice: random.Random, id: int) -> Request:
    """Ordinary ones, dear rows, dear prompts, dear searches."""
    prompt = tuple(dice.randrange(20, 30) for _ in range(dice.randrange(1, 200)))
    match dice.randrange(5):
        case 0:
            return Request(id, prompt, SamplingParams(max_tokens=20), row_price=7.8)
        case 1:
            return Request(id, prompt, SamplingParams(max_tokens=5), logits_from=0, row_price=3.5)
        case 2:
            params = SamplingParams(max_tokens=9, beam_width=3, stop_ids=STOPS)
            return Request(id, prompt, params, row_price=16.5)
    return Request(id, prompt, SamplingParams(max_tokens=dice.randrange(1, 30)))


def scored(row_price: float) -> Request:
    """A prompt whose logprobs are wanted."""
    return Request(
        1, tuple(range(100)), SamplingParams(max_tokens=1), logits_from=0, row_price=row_price
    )


@pytest.mark.parametrize("policy", ["chunked", "adaptive_chunk"])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_costs_no_more_than_the_budget_and_everybody_ends(policy: str, seed: int) -> None:
    dice, stack, ids = random.Random(seed), stack_of(policy, enable_prefix_caching=False), count(1)
    for _ in range(40):
        stack.scheduler.add(some_request(dice, next(ids)))
    for now in range(4000):
        running = list(stack.scheduler.running)
        plan = stack.scheduler.plan(float(now))
        decoding = {seq for seq in running if len(seq.tokens) - seq.computed == 1}
        assert decoding <= {item.sequence for item in plan.items}, "one that decodes got nothing"
        dear = {item.sequence.request.id for item in plan.items if price_of(item)}
        cost = plan.tokens + sum(map(price_of, plan.items))
        assert cost <= BUDGET + len(dear) or len(dear) == 1
        commit(stack, plan, float(now))
        if not stack.scheduler.has_work:
            return
    raise AssertionError("somebody never ended")


def test_prompts_whose_logprobs_are_wanted_come_in_smaller_pieces() -> None:
    stack = stack_of()
    stack.scheduler.add(scored(3.0))
    assert [item.n for item in stack.scheduler.plan(0.0).items] == [
        BUDGET // 4
    ]  # a position costs one and three


def test_without_a_price_only_tokens_count() -> None:
    stack = stack_of()
    stack.scheduler.add(scored(0.0))
    assert [item.n for item in stack.scheduler.plan(0.0).items] == [BUDGET]


def test_who_is_too_dear_stands_aside_and_the_others_go_on() -> None:
    stack = stack_of()
    SamplingParams(max_tokens=50, logit_bias=dict.fromkeys(range(1200), 1.0))  # 31 a row
    for id in (1, 2, 3):
        stack.scheduler.add(Request(id, (1, 2, 3), SamplingParams(max_tokens=50), row_price=31.0))
    stack.scheduler.add(Request(4, (4, 5), SamplingParams(max_tokens=2)))
    plan = stack.scheduler.plan(0.0)
    assert [item.sequence.request.id for item in plan.items] == [1, 4]
    assert plan.wait_reason is not None
    assert (plan.wait_reason.cause, plan.wait_reason.head) == ("budget", 2)
    commit(stack, plan, 0.0)
    stack.scheduler.abort(1)
    assert [item.sequence.request.id for item in stack.scheduler.plan(1.0).items] == [4, 2]


def test_one_request_always_runs_whatever_it_costs_and_takes_no_token_of_others() -> None:
    stack = stack_of()
    stack.scheduler.add(Request(1, (1, 2), SamplingParams(max_tokens=9), row_price=234.0))
    for id in range(2, SLOTS + 1):
        stack.scheduler.add(Request(id, (id, 3), SamplingParams(max_tokens=9)))
    for now in range(3):
        plan = stack.scheduler.plan(float(now))
        commit(stack, plan, float(now))
    assert len(plan.items) == SLOTS


def pieces(stack: SchedulerStack) -> list[tuple[int, int]]:
    """Where each step begins in the prompt of request 1, and how much of it is computed."""
    found = []
    for now in range(1, 100):
        plan = stack.scheduler.plan(float(now))
        for item in plan.items:
            if item.sequence.request.id == 1:
                found.append((item.sequence.computed, item.n))
        commit(stack, plan, float(now))
        if found and found[-1][0] + found[-1][1] >= 350:
            break
    return found


def test_long_prompts_come_in_smaller_pieces_while_others_decode() -> None:
    # a position costs a hundredth
    stack = stack_of(context_price=10.0, enable_prefix_caching=False)
    stack.scheduler.add(Request(2, (7, 8), SamplingParams(max_tokens=200)))
    commit(stack, stack.scheduler.plan(0.0), 0.0)
    stack.scheduler.add(Request(1, tuple(range(350)), SamplingParams(max_tokens=1)))
    found = pieces(stack)
    assert [begin for begin, _ in found] == [
        sum(n for _, n in found[:i]) for i in range(len(found))
    ]
    assert found[0] == (0, BUDGET - 4), "one decodes, with three drafts"
    for begin, n in found[1:-1]:
        assert n * (1 + begin / 100) <= BUDGET - 4 < (n + 1) * (1 + begin / 100)


def long_prompt(id: int) -> Request:
    return Request(id, tuple(range(id, id + 350)), SamplingParams(max_tokens=1))


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    stack = stack_of(context_price=10.0, enable_prefix_caching=False)
    for id in (1, 2, 3):
        stack.scheduler.add(long_prompt(id))
    commit(stack, stack.scheduler.plan(0.0), 0.0)
    for id in (4, 5):
        stack.scheduler.add(Request(id, (id,) * 9, SamplingParams(max_tokens=30)))
    plan = stack.scheduler.plan(1.0)
    assert {item.sequence.request.id: item.n for item in plan.items} == {1: BUDGET - 18, 4: 9, 5: 9}
    commit(stack, plan, 1.0)
    begun = {1: 0.0, 4: 1.0, 5: 1.0}
    for now in range(2, 60):
        plan = stack.scheduler.plan(float(now))
        begun |= {
            item.sequence.request.id: float(now)
            for item in plan.items
            if item.sequence.request.id not in begun
        }
        commit(stack, plan, float(now))
    assert begun[2] < begun[3], "long ones keep their order"
    assert not stack.scheduler.has_work


def test_short_prompts_take_no_more_than_half_of_a_step_from_a_long_one() -> None:
    stack = stack_of(context_price=10.0, enable_prefix_caching=False)
    stack.scheduler.add(long_prompt(1))
    commit(stack, stack.scheduler.plan(0.0), 0.0)
    for id in range(2, SLOTS + 4):
        stack.scheduler.add(Request(id, (id,) * 12, SamplingParams(max_tokens=3)))
    plan = stack.scheduler.plan(1.0)
    assert plan.items[0].n == BUDGET // 2
    assert plan.tokens == BUDGET


def test_nobody_waits_for_a_long_prompt_where_nobody_decodes() -> None:
    stack = stack_of(context_price=10.0, enable_prefix_caching=False)
    stack.scheduler.add(Request(1, tuple(range(350)), SamplingParams(max_tokens=1)))
    assert [n for _, n in pieces(stack)] == [BUDGET] * 5 + [350 - 5 * BUDGET]


@pytest.mark.parametrize("policy", ["prefill_first", "orca", "static"])
def test_policies_that_compute_prompts_whole_are_as_they_were(policy: str) -> None:
    stack = stack_of(policy, static_batch=1)
    stack.scheduler.add(scored(3.0))
    assert [item.n for item in stack.scheduler.plan(0.0).items] == [100]


def test_another_policy_is_priced_too() -> None:
    stack = stack_of("orca")
    assert stack.reconfigure(stack_of("chunked").config, SLOTS)
    stack.scheduler.add(scored(3.0))
    assert [item.n for item in stack.scheduler.plan(0.0).items] == [BUDGET // 4]


def test_ordinary_requests_are_free() -> None:
    prices = work_prices(SMOLLM2)
    ordinary = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        logprobs=5,
        stop_ids=(1, 2),
        min_tokens=3,
        repetition_penalty=1.1,
    )
    assert prices.of_row(Request(1, (1,), ordinary)) == 0.0
    assert prices.of_row(Request(1, (1,), SamplingParams(beam_width=4, stop_ids=(2,)))) == 0.0
    # at the end of its 8,192 positions
    assert context_price(SMOLLM2) * 8 == pytest.approx(2.5, abs=0.1)


def test_prices_grow_with_what_is_asked_for() -> None:
    prices = work_prices(SMOLLM2)

    def row(logits_from: int | None = None, **fields: Any) -> float:
        return prices.of_row(Request(1, (1, 2), SamplingParams(**fields), logits_from=logits_from))

    whole = dict.fromkeys(range(49_152), 1.0)
    assert row(logit_bias=whole) > row(allowed_token_ids=tuple(whole)) > FREE
    assert (
        row(beam_width=32, stop_ids=tuple(range(64)))
        > row(beam_width=32, stop_ids=tuple(range(8)))
        > FREE
    )
    assert row(stop_ids=tuple(range(9000)), min_tokens=1) > row(stop_ids=tuple(range(9000))) == 0.0
    assert row(logits_from=0, prompt_logprobs=20) > row(logits_from=0, prompt_logprobs=0) > 0.25


def test_the_engine_prices_and_a_replay_knows_it(tmp_path: Path) -> None:
    """Digests leave out what a client wrote, its biases too: the price is in the log by itself."""
    dice, path = random.Random(1), tmp_path / "steps"
    built = make_engine(
        EngineConfig(backend="fake", max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS)
    )
    log = EngineConfig(
        backend="fake", max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS, step_log=str(path)
    )
    engine = engine_again(replace(built, needs=SMOLLM2), log)
    biased = SamplingParams(max_tokens=9, logit_bias=dict.fromkeys(range(200_000), 1.0))
    for id in range(1, 20):
        prompt = tuple(dice.choices(range(300), k=dice.randint(1, 60)))
        engine.submit(
            Request(id, prompt, biased if id % 3 else SamplingParams(max_tokens=9), engine.clock())
        )
    while engine.has_work:
        engine.step()
    engine.close()
    run = last_run(path)
    assert max(sum(item.id % 3 > 0 for item in step.items) for step in run.steps) == 3, (
        "15 tokens a row each"
    )
    assert replay_plans(run).differences == []
    run.records = [_without_price(one) for one in run.records]
    assert replay_plans(run).differences


def _without_price(record: Record) -> Record:
    if not isinstance(record, Arrived):
        return record
    more = {name: value for name, value in record.more.items() if name != "row_price"}
    return msgspec.structs.replace(record, more=more)
