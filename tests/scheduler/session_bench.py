"""A scheduler under sessions, driven turn by turn, and what sessions promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pageturner.engine.fake import FakeExecutor
from pageturner.params import SamplingParams
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.policies.session_worth import FIRST_GAP, PATIENCE
from pageturner.request import Request, SessionHint
from pageturner.scheduler.types import Plan
from support.schedulers import make_stack

Build = Callable[..., SchedulerStack]
SIZE = 4
VOCABULARY = 60


class Bench:
    """A scheduler with its clock, driven to the end of each request."""

    def __init__(
        self, blocks: int = 40, build: Callable[..., SchedulerStack] = make_stack, **options: Any
    ) -> None:
        sizes = {"num_blocks": blocks, "block_size": SIZE, "max_model_len": 200, "max_num_seqs": 8}
        self.stack = build(**sizes | options)
        self.sessions, self.pool = self.stack.sessions, self.stack.pool
        self.now = 0.0
        self.ids = 0
        self.cached: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}
        self.executor = FakeExecutor(VOCABULARY)

    def add(self, prompt: list[int], tokens: int = 6, **hint: Any) -> int:
        self.ids += 1
        session = SessionHint(**hint) if hint else None
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.stack.scheduler.add(
            Request(self.ids, tuple(prompt), params, self.now, session=session)
        )
        self.answers[self.ids] = []
        return self.ids

    def step(self) -> Plan:
        plan = self.stack.scheduler.plan(self.now)
        self.now += 0.05
        if plan.items:
            for event in self.stack.scheduler.commit(plan, self.executor.run(plan), self.now):
                self.answers[event.id] += event.tokens
                self.cached[event.id] = event.cached
        return plan

    def drain(self) -> None:
        for _ in range(2000):
            if not self.stack.scheduler.has_work:
                return
            self.step()
        raise AssertionError("it does not end")

    def turn(self, prompt: list[int], **hint: Any) -> tuple[list[int], int]:
        """What was said then, and how much of the prompt was cached."""
        id = self.add(prompt, **hint)
        self.drain()
        return [*prompt, *self.answers[id]], self.cached[id]

    def claimed(self) -> int:
        return len(self.sessions.claims)


def fresh(number: int, length: int = 24) -> list[int]:
    """A prompt that no other number has anything in common with."""
    return [(number * 7 + i * i) % VOCABULARY for i in range(length - 1)] + [number % VOCABULARY]


# -- promises ------------------------------------------------------------------------------------------------
def kept_is_found(build: Build) -> None:
    bench = Bench(build=build)
    said, _ = bench.turn(fresh(1), name="a", keep=60.0)
    for number in range(12):
        bench.turn(fresh(100 + number))
    assert bench.turn([*said, 1, 2, 3], name="a", keep=60.0)[1] == 28


def claims_are_bounded(build: Build) -> None:
    bench = Bench(40, build=build, max_session_share=0.5, session_wait=0.0)
    for number in range(4):
        bench.turn(fresh(number, 28), name=f"s{number}", keep=60.0)
        assert bench.claimed() <= 20


def silence_makes_cheap(build: Build) -> None:
    bench = Bench(40, build=build, max_session_share=0.5, session_wait=0.0)
    bench.turn(fresh(0, 28), name="silent", keep=60.0, next_in=0.5)
    bench.turn(fresh(1, 28), name="a", keep=60.0, next_in=2.0)
    bench.now += 10.0
    bench.turn(fresh(2, 28), name="b", keep=60.0, next_in=2.0)
    bench.turn(fresh(1, 28), name="a", keep=60.0, next_in=2.0)
    sizes = {one.name: len(one.keys) for one in bench.sessions}
    assert sizes["silent"] < sizes["a"] == sizes["b"] == 8, sizes


def one_too_many_waits(build: Build) -> None:
    """Until nobody waits for the others any more."""
    bench = Bench(25, build=build, max_session_share=0.8)
    for number in range(2):
        bench.turn(fresh(number, 28), name=f"s{number}", keep=60.0, next_in=2.0)
    bench.add(fresh(5, 28), name="late", keep=60.0)
    plan = bench.step()
    assert not plan.items
    assert plan.wake is not None
    assert plan.wake < bench.now + PATIENCE * FIRST_GAP
    bench.now = plan.wake
    assert bench.step().items


PROMISES = (kept_is_found, claims_are_bounded, silence_makes_cheap, one_too_many_waits)
