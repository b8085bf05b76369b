"""Settings changed in the middle of random runs: every answer stays the same, nothing leaks, all drains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner.params import SamplingParams
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.request import Request
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Output, Plan, Result, Sequence
from support.schedulers import check, make_stack

from .machine import Machine


class NoRules:
    """What orders and policies promise holds while they stay; here they do not."""

    def prepare(self, queue: list[Sequence], now: float) -> None: ...

    def audit(
        self, plan: Plan, running: list[Sequence], queue: list[Sequence], now: float
    ) -> None: ...

    def computed(self, plan: Plan, now: float) -> None: ...


class Retuned(Machine):
    """Now and then something else is wanted. An engine that was started again gets it at once."""

    def _boot(self) -> None:
        if "states" in self.config:  # a draft is shorter than a chunk, as the engine's are
            self.drafting = min(self.drafting, self.config["chunk"] - 1)
        self.start = getattr(self, "start", None) or dict(self.config)
        self.config = dict(self.start)
        super()._boot()
        self.wanted: SchedulerConfig = getattr(self, "wanted", self.stack.config)
        self.widest = max(getattr(self, "widest", 0), self.stack.config.slots)
        self.most = self.config["max_num_seqs"]
        self.rules: Any = NoRules()
        self.apply()

    def apply(self) -> None:
        before = self.stack.config
        applied = self.stack.reconfigure(self.wanted, self.widest)
        self.totals["waited"] = self.totals.get("waited", 0) + (not applied)
        if applied:
            self.totals["changed"] = self.totals.get("changed", 0) + (self.wanted != before)
            kept = self.wanted.policy in ("chunked", "adaptive_chunk")
            self.most = max(self.most, self.wanted.max_num_seqs, self.widest)
            self.config |= {
                "token_budget": self.wanted.max_num_batched_tokens,
                "max_num_seqs": self.most,
                "policy": "chunked" if kept else "prefill_first",
            }

    def step(self) -> bool:
        if self.rng.random() < 0.2:
            rng = self.rng
            self.wanted = changed(
                self.stack.config,
                rng.choice((0, 1, 3, 7, 16, 64)),
                rng.choice((1, 2, 3, 9, 64)),
                rng.choice(tuple(POLICIES)),
                rng.choice(tuple(ORDERS)),
            )
            self.widest = max(self.widest, self.wanted.slots)
        self.apply()
        check(self.stack)
        return super().step()


@pytest.mark.slow
def test_changes_in_the_middle_change_no_answer() -> None:
    totals: dict[str, float] = {}
    for seed in range(25):
        try:
            found = Retuned(seed).run().totals
        except Exception as error:
            raise AssertionError(f"Retuned({seed}): {error}") from error
        totals = {
            name: totals.get(name, 0) + found.get(name, 0) for name in totals.keys() | found.keys()
        }
    assert totals["changed"] > 150, "a machine that changes nothing proves nothing"
    assert totals["waited"] > 20, "batches that ended first"
    assert totals["preemptions"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_changes(part: int) -> None:
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        try:
            Retuned(seed).run()
        except Exception as error:
            raise AssertionError(f"Retuned({seed}): {error}") from error


def changed(
    config: SchedulerConfig, budget: int, seqs: int, policy: str, order: str
) -> SchedulerConfig:
    return replace(
        config, max_num_batched_tokens=budget, max_num_seqs=seqs, policy=policy, order=order
    )


def stack_with(**settings: Any) -> tuple[Scheduler, SchedulerStack]:
    told: dict[str, Any] = {
        "token_budget": 64,
        "max_num_seqs": 8,
        "policy": "chunked",
        "order": "fcfs",
    }
    stack = make_stack(
        num_blocks=64, block_size=4, max_model_len=64, static_batch=2, **(told | settings)
    )
    return stack.scheduler, stack


def reconfigure(stack: SchedulerStack, budget: int, seqs: int, policy: str, order: str) -> bool:
    return stack.reconfigure(changed(stack.config, budget, seqs, policy, order), 8)


def step(scheduler: Scheduler, now: float) -> list[int]:
    """Ids of who was in it."""
    plan = scheduler.plan(now)
    outputs = [
        Output([7])
        if item.wants_logits and not item.sequence.request.params.beam_width
        else Output()
        for item in plan.items
    ]
    for item, output in zip(plan.items, outputs, strict=True):
        if item.wants_logits and not output.tokens:
            output.candidates = [(token, -float(token)) for token in range(1, 9)]
    scheduler.commit(plan, Result(outputs), now + 0.01)
    return [item.sequence.request.id for item in plan.items]


def request(id: int, prompt: int = 4, max_tokens: int = 6, **more: Any) -> Request:
    return Request(
        id, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens, **more), arrival=id / 1000
    )


def test_a_smaller_number_ends_nobody_and_admits_nobody() -> None:
    scheduler, stack = stack_with()
    for id in range(4):
        scheduler.add(request(id))
    assert step(scheduler, 1.0) == [0, 1, 2, 3]
    scheduler.add(request(4))
    assert reconfigure(stack, 64, 2, "chunked", "fcfs")
    for moment in range(2, 7):
        assert step(scheduler, moment) == [0, 1, 2, 3]
    assert step(scheduler, 7.0) == [4]
    assert scheduler.slots == 2


def test_a_batch_ends_before_its_policy() -> None:
    scheduler, stack = stack_with(policy="static")
    for id in range(3):
        scheduler.add(request(id))
    assert step(scheduler, 0.0) == [0, 1]
    for moment in range(1, 6):
        assert not reconfigure(stack, 32, 8, "chunked", "fcfs")
        assert step(scheduler, moment) == [0, 1]
    assert reconfigure(stack, 32, 8, "chunked", "fcfs")
    assert step(scheduler, 6.0) == [2], "no batch has to be full any more"


def test_no_change_under_a_plan() -> None:
    scheduler, stack = stack_with()
    scheduler.add(request(0))
    plan = scheduler.plan(0.0)
    assert not reconfigure(stack, 1, 1, "chunked", "fcfs")
    scheduler.commit(plan, Result([Output([7])]), 0.1)
    assert reconfigure(stack, 1, 1, "chunked", "fcfs")


def test_a_search_that_is_too_wide_now_runs_alone() -> None:
    scheduler, stack = stack_with()
    scheduler.add(request(0))
    step(scheduler, 0.0)
    scheduler.add(request(1, max_tokens=3, beam_width=4))
    assert reconfigure(stack, 64, 2, "chunked", "fcfs")
    alone = False
    for moment in range(1, 40):
        ids = step(scheduler, moment)
        alone = alone or set(ids) == {1}
        assert len(set(ids)) <= 1, "nobody beside it"
    assert alone
    assert not scheduler.has_work
    scheduler.add(request(2, max_tokens=3, beam_width=8))  # the widest that was ever accepted


def test_the_new_order_knows_who_waits() -> None:
    scheduler, stack = stack_with(max_num_seqs=1)
    for id, length in enumerate((4, 24, 12, 4)):
        scheduler.add(request(id, length, 2))
    assert step(scheduler, 0.01) == [0]
    assert reconfigure(stack, 64, 1, "chunked", "sjf")
    order = [id for moment in range(1, 12) for id in step(scheduler, moment / 100)]
    assert list(dict.fromkeys(order)) == [0, 3, 2, 1]


@pytest.mark.parametrize(
    "wanted",
    [
        (64, 8, "nonsense", "fcfs"),
        (64, 8, "chunked", "nonsense"),
        (64, 0, "chunked", "fcfs"),
        (-2, 8, "chunked", "fcfs"),
    ],
)
def test_what_does_not_exist_is_refused_and_changes_nothing(
    wanted: tuple[int, int, str, str],
) -> None:
    scheduler, stack = stack_with()
    with pytest.raises(ValueError, match=r"unknown|at least"):
        reconfigure(stack, *wanted)
    assert scheduler.slots == 8


def test_a_budget_that_nobody_set_stays() -> None:
    scheduler, stack = stack_with()
    before = scheduler.budget
    assert reconfigure(stack, -1, 4, "chunked", "fcfs")
    assert (scheduler.budget, stack.config.max_num_batched_tokens, scheduler.slots) == (
        before,
        before,
        4,
    )


@pytest.mark.parametrize("seats", [1, 3])
def test_more_sequences_than_states_were_made_for_wait(seats: int) -> None:
    """A larger max_num_seqs takes no state from a sequence that runs."""
    scheduler, stack = stack_with(max_num_seqs=seats, states=2 * seats, tails=2 * seats, chunk=8)
    assert reconfigure(stack, 64, 16, "chunked", "fcfs")
    for id in range(12):
        scheduler.add(request(id, prompt=13, max_tokens=20))
    most, now = 0, 0.0
    while scheduler.has_work:
        step(scheduler, now)
        most, now = max(most, len(scheduler.running)), now + 1
        check(stack)
    assert most == seats
    assert scheduler.stats()["preemptions"] == 0
