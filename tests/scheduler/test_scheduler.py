"""The scheduler, rule by rule. The property machine covers what these leave out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pageturner.params import SamplingParams
from pageturner.policies.batching import POLICIES
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.request import Event, Failure, Refused, Request, Resume
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Item, Output, Plan, Result
from support.schedulers import audit_requests, check, make_stack


def stack_of(**options: Any) -> SchedulerStack:
    return make_stack(**({"num_blocks": 64, "block_size": 4} | options))


def make(*requests: Request, **options: Any) -> Scheduler:
    """A scheduler to which these requests have come."""
    scheduler = stack_of(**options).scheduler
    for request in requests:
        scheduler.add(request)
    return scheduler


def request(
    id: int, prompt: int | list[int] = 4, *, max_tokens: int | None = 4, **fields: Any
) -> Request:
    """A prompt of that many tokens that no other id shares."""
    tokens = [1000 * (id + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(id, tuple(tokens), params, arrival=float(id), **fields)


def answer(item: Item) -> Output:
    return Output([7] if item.wants_logits else [])


def commit(scheduler: Scheduler, plan: Plan) -> list[Event]:
    events = scheduler.commit(plan, Result([answer(item) for item in plan.items]), 0.0)
    audit_requests(scheduler)
    return events


def step(scheduler: Scheduler, now: float = 0.0) -> tuple[dict[int, int], list[Event]]:
    """{id: granted tokens} of the next plan, and the events of its commit."""
    plan = scheduler.plan(now)
    audit_requests(scheduler)
    granted = {item.sequence.request.id: item.n for item in plan.items}
    return granted, commit(scheduler, plan)


def drain(scheduler: Scheduler) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    while scheduler.has_work:
        for event in step(scheduler)[1]:
            events.setdefault(event.id, []).append(event)
    return events


# -- prompts beside who decodes ------------------------------------------------------------------------------
@pytest.mark.parametrize(("most", "chunks"), [(0, [29, 29]), (8, [8, 8]), (100, [29, 29])])
def test_whoever_decodes_waits_for_so_much_of_a_prompt(most: int, chunks: list[int]) -> None:
    scheduler = make(
        request(0, 40, max_tokens=9),
        max_prefill_beside_decode=most,
        token_budget=30,
        num_blocks=200,
    )
    assert [step(scheduler)[0] for _ in range(2)] == [{0: 30}, {0: 10}], "alone it takes the budget"
    scheduler.add(request(1, 70, max_tokens=2))
    assert [step(scheduler)[0] for _ in chunks] == [{0: 1, 1: n} for n in chunks]
    drain(scheduler)


# -- the door ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "refused", "options"),
    [
        ("empty_prompt", request(0, 0), {}),
        ("prompt_too_long", request(0, 32), {"max_model_len": 32}),
        ("kv_too_small", request(0, 10, max_tokens=8), {"num_blocks": 4}),
        ("kv_too_small", request(0, 17, max_tokens=None), {"num_blocks": 4}),
        ("nothing_to_generate", request(0, 4, max_tokens=2, resume=(Resume(0, (7, 7)),)), {}),
        ("n_unsupported", request(0, params=SamplingParams(n=2)), {}),
    ],
)
def test_what_can_never_run_is_refused(
    code: str, refused: Request, options: dict[str, int]
) -> None:
    scheduler = make(**options)
    with pytest.raises(Refused) as caught:
        scheduler.add(refused)
    assert caught.value.code == code
    assert not scheduler.has_work


def test_the_largest_request_that_fits_the_whole_memory_runs() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request(0, 10, max_tokens=7))  # 16 positions need KV: the last token does not
    assert drain(scheduler)[0][-1].finish == "length"


def test_the_queue_is_bounded_but_not_for_resumed_requests() -> None:
    scheduler = make(request(0), request(1), max_queue=2)
    with pytest.raises(Refused) as caught:
        scheduler.add(request(2))
    assert caught.value.code == "queue_full"
    scheduler.add(request(2, resume=(Resume(0, ()),)))
    assert set(drain(scheduler)) == {0, 1, 2}


def test_an_id_cannot_be_used_twice_at_once() -> None:
    scheduler = make(request(0))
    with pytest.raises(ValueError, match="here already"):
        scheduler.add(request(0))


@pytest.mark.parametrize(
    "option",
    [
        {"policy": "x"},
        {"order": "x"},
        {"admission": "x"},
        {"max_num_seqs": 0},
        {"order": "priority", "ageing": float("nan")},
        {"policy": "served_ratio", "served_ratio": -1.0},
        {"policy": "served_ratio", "served_steps": 0},
        {"policy": "window", "static_batch": 0},
    ],
)
def test_build_refuses_what_does_not_exist(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown|at least"):
        make(**option)


# -- the life of a request -----------------------------------------------------------------------------------
def test_positions_are_absolute_and_the_end_is_named() -> None:
    scheduler = make(request(0, 5, max_tokens=3))
    events = drain(scheduler)[0]
    assert [(event.position, event.tokens, event.finish) for event in events] == [
        (5, (7,), None),
        (6, (7,), None),
        (7, (7,), "length"),
    ]


def test_stop_id_ends_the_sequence_but_not_before_min_tokens() -> None:
    scheduler = make(request(0, params=SamplingParams(max_tokens=9, min_tokens=3, stop_ids=(7,))))
    events = drain(scheduler)[0]
    assert [event.finish for event in events] == [None, None, "stop"]


def test_the_context_ends_a_sequence() -> None:
    scheduler = make(request(0, 7, max_tokens=None), max_model_len=10)
    events = drain(scheduler)[0]
    assert len(events) == 3
    assert events[-1].finish == "length"


def test_a_stop_id_cuts_accepted_drafts() -> None:
    scheduler = make(request(0, params=SamplingParams(max_tokens=9, stop_ids=(2,))))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, Result([Output([5], draft=[6, 2, 8])]), 0.0)
    plan = scheduler.plan(0.0)
    assert plan.items[0].n == 4
    logprobs = [(-0.1 * i, ()) for i in range(4)]
    (event,) = scheduler.commit(plan, Result([Output([6, 2, 8, 9], logprobs)]), 0.0)
    assert (event.tokens, event.finish, len(event.logprobs)) == ((6, 2), "stop", 2)
    assert scheduler.stats()["blocks_used"] == 0


def test_a_failure_ends_one_sequence_alone() -> None:
    scheduler = make(request(0), request(1))
    plan = scheduler.plan(0.0)
    failure = Failure("poison", "it threw")
    events = scheduler.commit(plan, Result([Output(failure=failure), answer(plan.items[1])]), 0.0)
    assert [(event.id, event.finish, event.failure) for event in events] == [
        (0, "error", failure),
        (1, None, None),
    ]
    assert [event.finish for event in drain(scheduler)[1]] == [None, None, "length"]


def test_resume_goes_on_behind_its_tokens() -> None:
    scheduler = make(request(0, 4, max_tokens=4, index=2, resume=(Resume(2, (7, 7)),)))
    granted, (event,) = step(scheduler)
    assert granted == {0: 6}
    assert (event.index, event.position, event.cached) == (2, 6, 0)
    assert drain(scheduler)[0][-1].finish == "length"
    stats = scheduler.stats()
    assert (stats["generated_tokens"], stats["recomputed_tokens"], stats["prompt_tokens"]) == (
        2,
        5,
        0,
    )


def test_a_cached_prompt_still_computes_its_last_token_and_says_what_was_cached() -> None:
    scheduler = make()
    prompt = list(range(8))
    scheduler.add(request(0, prompt))
    drain(scheduler)
    scheduler.add(request(1, prompt))
    granted, (event,) = step(scheduler)
    assert granted == {1: 4}
    assert event.cached == 4
    stats = scheduler.stats()
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (16, 4)


def test_the_generated_part_is_found_too() -> None:
    scheduler = make(request(0, [1, 2, 3], max_tokens=6))
    drain(scheduler)
    scheduler.add(request(1, [1, 2, 3, 7, 7, 7, 7, 7, 9]))
    assert step(scheduler)[1][0].cached == 8


# -- plan and commit -----------------------------------------------------------------------------------------
def test_a_plan_is_committed_before_the_next() -> None:
    scheduler = make(request(0))
    plan = scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="not committed"):
        scheduler.plan(0.0)
    with pytest.raises(ValueError, match="under way"):
        scheduler.commit(Plan(items=list(plan.items)), Result(), 0.0)
    with pytest.raises(ValueError, match="outputs"):
        scheduler.commit(plan, Result(), 0.0)


@pytest.mark.parametrize("tokens", [[], [7, 7]])
def test_outputs_that_do_not_fit_their_item_are_a_fault(tokens: list[int]) -> None:
    scheduler = make(request(0))
    with pytest.raises(ValueError, match="tokens"):
        scheduler.commit(scheduler.plan(0.0), Result([Output(tokens)]), 0.0)


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = make()
    plan = scheduler.plan(0.0)
    assert (plan.items, plan.wake) == ([], None)
    assert scheduler.commit(plan, Result(), 0.0) == []


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_frees_the_blocks(steps: int) -> None:
    scheduler = make(request(0, 6), token_budget=4)
    for _ in range(steps):
        step(scheduler)
    assert scheduler.abort(0)
    assert not scheduler.abort(0)
    assert not scheduler.has_work
    assert scheduler.stats()["blocks_used"] == 0


def test_abort_under_a_plan_keeps_it_runnable_and_drops_its_output() -> None:
    scheduler = make(request(0), request(1))
    plan = scheduler.plan(0.0)
    assert scheduler.abort(0)
    assert plan.items[0].sequence.blocks, "the plan may be run again until its commit"
    audit_requests(scheduler)
    assert [event.id for event in commit(scheduler, plan)] == [1]
    drain(scheduler)
    assert scheduler.stats()["blocks_used"] == 0


# -- who runs ------------------------------------------------------------------------------------------------
def test_chunked_gives_every_decode_a_token_and_fills_up_with_prefill() -> None:
    scheduler = make(request(0, 4, max_tokens=9), token_budget=8)
    assert step(scheduler)[0] == {0: 4}
    scheduler.add(request(1, 20))
    scheduler.add(request(2, 4))
    assert step(scheduler)[0] == {0: 1, 1: 7}
    assert step(scheduler)[0] == {0: 1, 1: 7}
    assert step(scheduler)[0] == {0: 1, 1: 6, 2: 1}


def test_a_budget_below_max_num_seqs_still_serves_every_decode_in_every_step() -> None:
    scheduler = make(token_budget=3, max_num_seqs=64)
    for id in range(6):
        scheduler.add(request(id, 1, max_tokens=5))
    for _ in range(5):
        assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1}
    assert step(scheduler)[0] == {3: 1, 4: 1, 5: 1}


def test_drafts_never_take_another_sequences_token() -> None:
    scheduler = make(token_budget=4, max_num_seqs=2)
    for id in range(2):
        scheduler.add(request(id, 1, max_tokens=9))
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, Result([Output([7], draft=[7] * 8) for _ in plan.items]), 0.0)
    assert step(scheduler)[0] == {0: 2, 1: 2}


def test_max_num_seqs() -> None:
    scheduler = make(max_num_seqs=2)
    for id in range(4):
        scheduler.add(request(id))
    assert set(step(scheduler)[0]) == {0, 1}


def test_first_come_first_served_by_arrival_not_by_submission() -> None:
    scheduler = make(max_num_seqs=1)
    for id in (3, 1, 2):
        scheduler.add(request(id, max_tokens=1))
    assert [next(iter(step(scheduler)[0])) for _ in range(3)] == [1, 2, 3]


def test_prefill_first_lets_decodes_wait() -> None:
    scheduler = make(request(0, 4), policy="prefill_first", token_budget=10)
    assert step(scheduler)[0] == {0: 4}
    for id, prompt in ((1, 6), (2, 4), (3, 3), (4, 25)):
        scheduler.add(request(id, prompt))
    assert step(scheduler)[0] == {1: 6, 2: 4}
    assert step(scheduler)[0] == {3: 3}
    assert step(scheduler)[0] == {4: 25}, "one above the budget runs whole and alone"
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}


def test_static_waits_pads_and_lets_nobody_in() -> None:
    scheduler = make(request(0, 3, max_tokens=1), policy="static", static_batch=2)
    plan = scheduler.plan(5.0)
    assert (plan.items, plan.wake) == ([], 15.0)
    scheduler.add(request(1, 7, max_tokens=3))
    plan = scheduler.plan(5.01)
    assert [item.n for item in plan.items] == [3, 7]
    assert plan.ballast == [(4, 7)]
    assert plan.tokens == 14
    commit(scheduler, plan)
    scheduler.add(request(2))
    plan = scheduler.plan(5.02)
    assert [item.sequence.request.id for item in plan.items] == [1]
    assert plan.ballast == [(1, 8)], "the member that ended is still computed"
    commit(scheduler, plan)
    assert step(scheduler)[0] == {1: 1}
    plan = scheduler.plan(60.0)
    assert (plan.items, plan.wake) == ([], 70.0), "it counts from when the engine stood idle"
    assert scheduler.plan(70.0).items, "a short batch starts only when its patience is over"


def test_static_patience_is_not_used_up_by_those_who_left() -> None:
    scheduler = make(request(0), policy="static", static_batch=2, static_patience=3.0)
    assert scheduler.plan(0.0).wake == 3.0
    scheduler.abort(0)
    scheduler.add(request(9))  # arrived at 9.0
    plan = scheduler.plan(9.0)
    assert (plan.items, plan.wake) == ([], 12.0)


def test_window_starts_full_or_when_the_oldest_has_waited() -> None:
    scheduler = make(policy="window", static_batch=2, window_ms=250)
    scheduler.add(request(1, max_tokens=2))  # arrived at 1.0
    plan = scheduler.plan(1.125)
    assert (plan.items, plan.wake) == ([], 1.25)
    assert step(scheduler, 1.25)[0] == {1: 4}
    scheduler.add(request(2, max_tokens=1))
    assert step(scheduler, 9.0)[0] == {1: 1}, "nobody joins"
    assert step(scheduler, 9.0)[0] == {2: 4}, "what waited behind a batch starts at once"
    scheduler.add(request(9))
    scheduler.add(request(10))
    assert step(scheduler, 9.0)[0] == {9: 4, 10: 4}, "a full batch starts at once"


def test_window_goes_by_the_oldest_whatever_the_order() -> None:
    scheduler = make(
        request(1, priority=1),
        request(2, priority=0),
        policy="window",
        order="priority",
        window_ms=250,
    )
    assert scheduler.plan(1.0).wake == 1.25


def test_orca_runs_whole_prompts_beside_decodes() -> None:
    scheduler = make(request(0, 4, max_tokens=9), policy="orca", token_budget=8)
    assert step(scheduler)[0] == {0: 4}
    for id, prompt in ((1, 5), (2, 4), (3, 25), (4, 1)):
        scheduler.add(request(id, prompt, max_tokens=9))
    assert step(scheduler)[0] == {0: 1, 1: 5}
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 4}
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1, 3: 25}, (
        "one above the budget joins whole, and alone"
    )
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}


def test_orca_lets_one_in_as_one_leaves() -> None:
    scheduler = make(policy="orca", max_num_seqs=2)
    for id, max_tokens in ((0, 2), (1, 9), (2, 9)):
        scheduler.add(request(id, max_tokens=max_tokens))
    assert [set(step(scheduler)[0]) for _ in range(3)] == [{0, 1}, {0, 1}, {1, 2}]


def test_orca_reserves_whatever_admission_says() -> None:
    scheduler = two_that_collide(policy="orca", admission="none")
    assert set(step(scheduler)[0]) == {0}
    drain(scheduler)
    assert scheduler.stats()["preemptions"] == 0


def test_served_ratio_lets_prompts_in_by_ratio() -> None:
    scheduler = make(policy="served_ratio", served_ratio=0.5)
    for id in range(4):
        scheduler.add(request(id, max_tokens=9))
    assert set(step(scheduler)[0]) == {0, 1, 2, 3}, "nobody runs: at once"
    for id in (4, 5):
        scheduler.add(request(id, max_tokens=9))
        assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1, 3: 1}, "two of four do not exceed a half"
    scheduler.add(request(6, max_tokens=9))
    assert step(scheduler)[0] == {4: 4, 5: 4, 6: 4}, "three do, and the decodes wait"
    assert len(step(scheduler)[0]) == 7


def test_served_ratio_lets_prompts_in_after_enough_steps() -> None:
    scheduler = make(
        request(0, max_tokens=20), policy="served_ratio", served_ratio=5, served_steps=3
    )
    step(scheduler)
    for id in (1, 2):
        scheduler.add(request(id, max_tokens=20))
        assert [set(step(scheduler)[0]) for _ in range(4)] == [set(range(id))] * 3 + [{id}]


# -- who goes first ------------------------------------------------------------------------------------------
def test_priority_then_first_come() -> None:
    scheduler = make(order="priority", max_num_seqs=1)
    for id, priority in ((1, 1), (2, 0), (3, -1), (0, 0)):
        scheduler.add(request(id, max_tokens=1, priority=priority))
    assert [next(iter(step(scheduler)[0])) for _ in range(4)] == [3, 0, 2, 1]


def test_nothing_overtakes_a_request_that_has_waited_for_the_ageing() -> None:
    scheduler = make(
        request(0, max_tokens=1, priority=9), order="priority", max_num_seqs=1, ageing=5.0
    )
    for id in range(1, 9):
        scheduler.add(request(id, max_tokens=1, priority=0))
    order = [next(iter(step(scheduler, now)[0])) for now in (3.0, 4.0, 4.9, 5.0, 5.0)]
    assert order == [1, 2, 3, 0, 4]


def test_static_padding_never_leaves_the_context() -> None:
    scheduler = make(
        request(0, 15, max_tokens=1),
        request(1, 2, max_tokens=9),
        policy="static",
        static_batch=2,
        max_model_len=16,
    )
    contexts = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        contexts += [context for _, context in plan.ballast]
        commit(scheduler, plan)
    assert contexts == [15, *[16] * 8]


def test_static_cuts_the_batch_to_what_fits_padded() -> None:
    scheduler = make(policy="static", static_batch=4, num_blocks=8)
    for id, prompt in enumerate((4, 12, 4, 4)):
        scheduler.add(request(id, prompt, max_tokens=4))
    assert step(scheduler)[0] == {0: 4, 1: 12}


# -- memory --------------------------------------------------------------------------------------------------
def two_that_collide(**options: Any) -> Scheduler:
    """Two sequences that together outgrow the pool."""
    scheduler = make(
        request(0, 4, max_tokens=16),
        request(1, 4, max_tokens=16),
        num_blocks=6,
        prefix_caching=False,
        **options,
    )
    return scheduler


def test_the_largest_rank_gives_way_and_recomputes() -> None:
    scheduler = two_that_collide()
    while not (plan := scheduler.plan(0.0)).preempted:
        commit(scheduler, plan)
    assert list(plan.preempted) == [1]
    assert [item.sequence.request.id for item in plan.items] == [0]
    commit(scheduler, plan)
    events = drain(scheduler)
    assert events[0][-1].finish == events[1][-1].finish == "length"
    stats = scheduler.stats()
    assert stats["preemptions"] == 1, "hysteresis: let back in only when it can stay"
    assert stats["recomputed_tokens"] == 12
    assert stats["prompt_tokens"] == 8
    assert stats["generated_tokens"] == 32


def test_rank_is_priority_then_first_admission() -> None:
    scheduler = make(
        request(0, 4, max_tokens=16, priority=1),
        request(1, 4, max_tokens=16, priority=0),
        num_blocks=6,
        prefix_caching=False,
    )
    while not (plan := scheduler.plan(0.0)).preempted:
        commit(scheduler, plan)
    assert list(plan.preempted) == [0], "first come, but of the lower class"


def test_a_plan_that_preempted_admits_nobody() -> None:
    scheduler = two_that_collide()
    while not (plan := scheduler.plan(0.0)).preempted:
        commit(scheduler, plan)
        if scheduler.stats()["waiting"] == 0:
            scheduler.add(request(9, 1, max_tokens=1))
    assert [item.sequence.request.id for item in plan.items] == [0]


def test_full_reservation_never_preempts() -> None:
    scheduler = two_that_collide(admission="full")
    assert set(step(scheduler)[0]) == {0}
    drain(scheduler)
    assert scheduler.stats()["preemptions"] == 0


def test_recomputation_finds_its_own_blocks_and_does_not_call_that_a_hit() -> None:
    scheduler = make(request(0, 4, max_tokens=16), request(1, 4, max_tokens=16), num_blocks=6)
    events = drain(scheduler)
    stats = scheduler.stats()
    assert stats["preemptions"] >= 1
    assert stats["cached_tokens"] == 0
    assert all(event.cached == 0 for event in events[1])


def test_a_prompt_is_clipped_to_the_memory_that_is_left_before_anybody_gives_way() -> None:
    scheduler = make(num_blocks=15, block_size=1, token_budget=4, prefix_caching=False)
    for id, prompt, max_tokens in ((0, 1, 9), (1, 1, 9), (2, 9, 2)):
        scheduler.add(request(id, prompt, max_tokens=max_tokens))
    for _ in range(3):
        assert step(scheduler)[0] == {0: 1, 1: 1, 2: 2}
    assert step(scheduler)[0] == {0: 1, 1: 1, 2: 1}
    plan = scheduler.plan(0.0)
    assert list(plan.preempted) == [2]


def test_stats_name_everything_the_channel_promises() -> None:
    scheduler = make()
    promised = {
        "running",
        "waiting",
        "blocks_used",
        "blocks_cached",
        "blocks_total",
        "steps",
        "step_tokens",
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "recomputed_tokens",
        "preemptions",
    }
    assert promised <= set(scheduler.stats())


# -- windows -------------------------------------------------------------------------------------------------
def test_a_context_far_longer_than_the_recent_blocks_runs() -> None:
    """The door looks at the whole blocks; of the recent ones a step takes what there is."""
    scheduler = make(
        request(0, 1000, max_tokens=100),
        num_blocks=500,
        window=8,
        sliding=5,
        max_model_len=2000,
        token_budget=64,
    )
    peak = 0.0
    while scheduler.has_work:
        step(scheduler)
        peak = max(peak, scheduler.stats()["recent_blocks_used"])
    assert peak <= 5


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gets_on_with_prompts_longer_than_the_recent_blocks(policy: str) -> None:
    options = {"policy": policy, "static_batch": 3, "static_patience": 0.0, "window_ms": 0.0}
    scheduler = make(num_blocks=500, window=8, sliding=6, max_model_len=500, **options)
    for id in range(3):
        scheduler.add(request(id, 90, max_tokens=5))
    tokens = [0, 0, 0]
    for _ in range(60):  # 3 prompts of 90 tokens in steps of 24 at most, and what they answer
        for event in step(scheduler, now=9.0)[1]:
            tokens[event.id] += len(event.tokens)
    assert tokens == [5, 5, 5]


def test_a_promise_of_recent_blocks_is_a_window_and_a_step() -> None:
    """Ten long sequences side by side, though all their tokens together are many times the recent blocks."""
    scheduler = make(num_blocks=5000, window=8, sliding=80, max_model_len=900, token_budget=16)
    for id in range(10):
        scheduler.add(request(id, 100, max_tokens=700))
    for _ in range(100):
        step(scheduler)
    assert scheduler.stats()["running"] == 10
    assert scheduler.stats()["preemptions"] == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [10, 12])
def test_choices_of_one_prompt_compute_it_once_and_share_it(
    length: int, prefix_caching: bool
) -> None:
    scheduler = make(prefix_caching=prefix_caching)
    prompt = list(range(length))
    for id in range(3):
        scheduler.add(request(id, prompt, max_tokens=2, index=id, parent=0 if id else None))
    assert step(scheduler)[0] == {0: length}
    granted, events = step(scheduler)
    assert granted == {0: 1, 1: 1, 2: 1}
    assert [(event.id, event.index, event.cached) for event in events] == [
        (0, 0, 0),
        (1, 1, length - 1),
        (2, 2, length - 1),
    ]
    stats = scheduler.stats()
    assert stats["blocks_shared"] == length // 4 - (0 if prefix_caching or length % 4 else 1)
    assert stats["copies"] == 2
    drain(scheduler)
    assert scheduler.stats()["blocks_used"] == 0


def test_a_choice_goes_on_without_a_first_one_that_left() -> None:
    scheduler = make(prefix_caching=False)
    for id in range(2):
        scheduler.add(request(id, list(range(10)), index=id, parent=0 if id else None))
    assert step(scheduler)[0] == {0: 10}
    scheduler.abort(0)
    assert step(scheduler)[0] == {1: 10}


def test_a_choice_that_wants_prompt_logprobs_computes_all_of_it() -> None:
    scheduler = make()
    for id in range(2):
        scheduler.add(
            request(id, list(range(10)), index=id, parent=0 if id else None, logits_from=0)
        )
    plan = scheduler.plan(0.0)
    assert [(item.sequence.request.id, item.n) for item in plan.items] == [(0, 10), (1, 10)]


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    """The second one waits while the first runs, and for nothing else."""
    scheduler = make(token_budget=6, max_num_seqs=6)
    prompt = list(range(17))
    scheduler.add(request(0, prompt))
    scheduler.add(request(1, [*prompt[:12], 99, 98]))
    assert [step(scheduler)[0] for _ in range(3)] == [{0: 6}, {0: 6}, {0: 5, 1: 1}]
    assert scheduler.stats()["cached_tokens"] == 12


def test_nobody_waits_for_a_prompt_that_was_aborted() -> None:
    scheduler = make(token_budget=6, max_num_seqs=6)
    prompt = list(range(17))
    scheduler.add(request(0, prompt))
    scheduler.add(request(1, prompt))
    assert step(scheduler)[0] == {0: 6}
    scheduler.abort(0)
    assert step(scheduler)[0] == {1: 6}
    assert scheduler.stats()["cached_tokens"] == 4


def test_the_account_of_the_memory() -> None:
    """Block size 4: ten tokens of prompt that three share, and one of their own each in a copy of the third
    block; in the first step nobody shares yet."""
    scheduler = make(max_model_len=100)
    for id in range(3):
        scheduler.add(
            request(id, list(range(10)), max_tokens=5, index=id, parent=0 if id else None)
        )

    def account() -> tuple[float, ...]:
        stats = scheduler.stats()
        names = ("kv_reserved", "kv_used", "kv_wasted", "kv_saved", "kv_contiguous")
        return tuple(stats[name] for name in names)

    assert account() == (0, 0, 0, 0, 0)
    step(scheduler)
    assert account() == (12, 10, 2, 0, 100)
    step(scheduler)
    assert account() == (20, 8 + 3 + 2 + 2, 5, 16, 300)
    drain(scheduler)
    assert account() == (0, 0, 0, 0, 0)


class Unwalked(list[int]):
    """A block table that nobody may go through."""

    def __iter__(self) -> Any:
        raise AssertionError("the account went through all blocks of a sequence")


def test_the_account_does_not_go_through_blocks() -> None:
    """The engine asks for it four times a second between two steps of all streams."""
    scheduler = make(request(0, list(range(10)), max_tokens=5), max_model_len=100)
    step(scheduler)
    (seq,) = scheduler.running
    seq.blocks = Unwalked(seq.blocks)
    scheduler.pool.full.refs = Unwalked(scheduler.pool.full.refs)
    assert scheduler.stats()["kv_reserved"] == 12


def test_a_pinned_prompt_survives_eviction_until_it_is_let_go() -> None:
    stack = stack_of(num_blocks=8)
    scheduler = stack.scheduler
    prompt = list(range(9))
    scheduler.add(request(0, prompt, max_tokens=1, pin=True))
    assert drain(scheduler)[0][-1].finish == "length"
    stats = scheduler.stats()
    assert (stats["pinned"], stats["blocks_used"], stats["kv_reserved"]) == (1, 2, 8)
    for id in range(1, 5):
        scheduler.add(request(id, 16, max_tokens=4))  # all that is left
        drain(scheduler)
    scheduler.add(request(5, [*prompt, 99], max_tokens=1))
    assert drain(scheduler)[5][0].cached == 8
    assert stack.pins.drop(0)
    assert not stack.pins.drop(0)
    assert scheduler.stats()["blocks_used"] == 0
    for id in range(6, 9):
        scheduler.add(request(id, 24, max_tokens=4))
        drain(scheduler)
    scheduler.add(request(9, [*prompt, 99], max_tokens=1))
    assert drain(scheduler)[9][0].cached == 0


def test_pins_leave_room_for_those_who_were_let_in() -> None:
    scheduler = make(num_blocks=8)
    scheduler.add(request(0, 16, max_tokens=5))  # five blocks
    with pytest.raises(Refused, match="unpin something") as refused:
        scheduler.add(request(1, 16, max_tokens=1, pin=True))
    assert refused.value.code == "pin_too_large"
    scheduler.add(request(2, 12, max_tokens=1, pin=True))
    with pytest.raises(Refused, match="there is memory for 20"):
        scheduler.add(request(3, 20, max_tokens=3))
    drain(scheduler)
    assert scheduler.stats()["pinned"] == 1
    scheduler.add(request(4, 20, max_tokens=1))
    drain(scheduler)


def test_nothing_is_pinned_where_it_could_not_be_found() -> None:
    for options in ({"prefix_caching": False}, {"window": 8, "sliding": 16}):
        scheduler = make(**options)
        with pytest.raises(Refused, match="prefix caching") as refused:
            scheduler.add(request(0, pin=True))
        assert refused.value.code == "pin_unsupported"
        assert not scheduler.has_work


def test_a_pin_that_ends_badly_keeps_nothing() -> None:
    stack = stack_of(num_blocks=8)
    scheduler = stack.scheduler
    scheduler.add(request(0, 9, pin=True))
    scheduler.commit(
        scheduler.plan(0.0), Result([Output(failure=Failure("poison", "it threw"))]), 0.0
    )
    scheduler.add(request(1, 9, pin=True))
    scheduler.abort(1)
    assert (len(stack.pins), stack.pins.blocks) == (0, 0)
    check(stack)


@pytest.mark.parametrize("admission", ["none", "full", "predicted"])
def test_what_is_remembered_of_claims_is_what_adding_up_gives(
    admission: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd that fills the memory, with one who finds no room: whoever adds everything up anew each time
    lets in the same sequences in the same steps."""

    def plans(*, remember: bool) -> list[dict[int, int]]:
        scheduler = make(num_blocks=40, max_num_seqs=12, token_budget=32, admission=admission)
        for id in range(14):
            scheduler.add(
                request(id, [*range(9 if id % 3 else 3)], max_tokens=12 + id % 5, index=0)
            )
        seen = []
        while scheduler.has_work:
            if not remember:
                for seq in scheduler.running:
                    seq.estimate = None
            seen.append(step(scheduler)[0])
        return seen

    remembered = plans(remember=True)
    assert remembered == plans(remember=False)
    joined = [after.keys() - before.keys() for before, after in pairwise(remembered)]
    assert sum(map(bool, joined)) > 2, "several were let in later than others"


def test_a_waiter_who_finds_no_room_has_few_claims_found_anew() -> None:
    scheduler = make(
        num_blocks=193, max_num_seqs=65, token_budget=512, block_size=16, admission="full"
    )
    for id in range(65):
        scheduler.add(request(id, 16, max_tokens=33))
    step(scheduler)
    step(scheduler)
    asked, claims = 0, scheduler.pool.blocks_needed

    def counted(*args: Any) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return claims(*args)

    scheduler.pool.blocks_needed = counted  # type: ignore[method-assign]
    for _ in range(10):
        step(scheduler)
    assert scheduler.load[0] > 0, "somebody waits"
    assert asked < 10 * scheduler.load[1] / 4, "nearly all claims are known from the step before"


def test_a_search_that_is_too_wide_is_refused_before_its_sequences_are_made() -> None:
    made = []
    scheduler = make_stack(num_blocks=8, max_num_seqs=4).scheduler
    scheduler._requests.make = made.append  # type: ignore[assignment]
    with pytest.raises(Refused) as refused:
        scheduler.add(Request(1, (1,), SamplingParams(beam_width=1_000_000, max_tokens=1)))
    assert (refused.value.code, made) == ("too_many_beams", [])
