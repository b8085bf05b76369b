"""What orders, policies and admission are for: each promise is a small simulation that fails if it is broken.

A function takes `build`, so that mutants can be put to the same test. Time is simulated: a step takes FIXED
seconds and EACH for every token.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from pageturner.params import SamplingParams
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.request import Event, Request
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Item, Output, Plan, Result

Build = Callable[..., SchedulerStack]
FIXED, EACH, STOP = 0.01, 0.0005, 2
CAP = 400  # max_tokens of every request: the scheduler does not know how long answers are


@dataclass
class Run:
    """What happened, by request id; in seconds and tokens."""

    build: Build
    options: dict[str, Any]
    now: float = 0.0
    arrived: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    joined: list[int] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gap: float = (
        0.0  # the largest difference of service since a tenant began to have work at all times
    )
    # seconds, tokens, sequences that decode
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    together: int = 0
    stack: SchedulerStack = field(init=False)
    scheduler: Scheduler = field(init=False)
    lengths: dict[int, int] = field(default_factory=dict)
    add: Callable[[Request], None] = field(init=False)  # what a request that has come is handed to

    def __post_init__(self) -> None:
        usual = {
            "num_blocks": 4000,
            "block_size": 16,
            "max_num_seqs": 8,
            "ageing": 1e6,
            "max_queue": 100_000,
        }
        self.stack = self.build(**usual | self.options)
        self.scheduler = self.stack.scheduler
        self.add = self.scheduler.add

    def go(self, requests: Iterable[tuple[Request, int]], until: float = 1e9) -> Run:
        """Answer requests, which come at their time of arrival, with answers of so many tokens."""
        coming = sorted(requests, key=lambda pair: pair[0].arrival)
        self.lengths |= {request.id: length for request, length in coming}
        while (coming or self.scheduler.has_work) and self.now < until:
            while coming and coming[0][0].arrival <= self.now:
                request, _ = coming.pop(0)
                self.arrived[request.id] = self.now
                self.add(request)
            plan = self.scheduler.plan(self.now)
            if plan.items:
                self.step(plan)
            else:
                self.now = max(plan.wake or 0.0, coming[0][0].arrival if coming else 0.0, self.now)
        return self

    def step(self, plan: Plan) -> list[Event]:
        took = FIXED + EACH * plan.tokens
        decodes = sum(item.n == 1 == len(item.sequence.tokens) - item.start for item in plan.items)
        self.steps.append((took, plan.tokens, decodes))
        self.now += took
        self.together = max(self.together, len(plan.items))
        for item in plan.items:
            seq = item.sequence
            if seq.request.id not in self.joined[-64:] and seq.computed == seq.cached:
                self.joined.append(seq.request.id)
            inputs = max(0, min(seq.computed + item.n, seq.prompt_len) - seq.computed)
            self.service[seq.request.tenant] += inputs + 2.0 * (item.n - inputs)
        outputs = [self.output(item) for item in plan.items]
        events = self.scheduler.commit(plan, Result(outputs), self.now)
        for event in events:
            self.first.setdefault(event.id, self.now)
            if event.finish:
                self.ended[event.id] = self.now
        return events

    def output(self, item: Item) -> Output:
        if not item.wants_logits:
            return Output()
        seq = item.sequence
        return Output([STOP if seq.generated + 1 == self.lengths[seq.request.id] else 7])

    def ttft(self, ids: Iterable[int] | None = None) -> float:
        return mean(
            self.first[id] - self.arrived[id] for id in (self.first if ids is None else ids)
        )


def ask(id: int, prompt: int, at: float = 0.0, **fields: Any) -> Request:
    """A prompt that no other one begins like."""
    tokens = tuple(1000 * (id + 1) + i for i in range(prompt))
    return Request(
        id, tokens, SamplingParams(max_tokens=CAP, stop_ids=(STOP,)), arrival=at, **fields
    )


# -- fair ----------------------------------------------------------------------------------------------------
LONGEST, MEMORY = 64, 8 * (64 + 40)  # of the prompts below; tokens of eight sequences
BOUND = 2 * max(LONGEST, 2.0 * MEMORY)  # of the VTC paper: 2 U


def flood(tenant: str, count: int, ids: int, at: float = 0.0) -> list[tuple[Request, int]]:
    dice = random.Random(ids)
    asks = [
        ask(ids + i, dice.randint(16, LONGEST), at + 1e-6 * i, tenant=tenant) for i in range(count)
    ]
    return [(request, dice.randint(1, 40)) for request in asks]


def fair_shares(build: Build) -> None:
    """A tenant that sends ten times what nine others send gets no more than they do, and asked first."""
    load = flood("greedy", 1000, 0)
    for other in range(9):
        load += flood(f"tenant {other}", 100, 10_000 * (other + 1), at=0.001)
    run = Run(build, {"order": "fair"}).go(load, until=40.0)
    assert len(run.ended) < len(load) / 2, "nobody may run out of work"
    services = run.service.values()
    assert len(services) == 10
    assert max(services) - min(services) <= BOUND, dict(run.service)
    assert min(services) > BOUND, "too short to tell"


def fair_prompts_and_answers(build: Build) -> None:
    """A tenant of long answers and one of long prompts get the same, by weight."""
    talk = [(ask(i, 16, tenant="talk"), 200) for i in range(300)]
    read = [(ask(1000 + i, 400, tenant="read"), 1) for i in range(600)]
    run = Run(build, {"order": "fair"}).go(talk + read, until=100.0)
    assert len(run.ended) < 900, "nobody may run out of work"
    bound = 2 * max(400, 2.0 * 8 * 216)
    assert abs(run.service["talk"] - run.service["read"]) <= bound < run.service["talk"] / 4, dict(
        run.service
    )


def fair_in_one_step(build: Build) -> None:
    """Of those that join in one step no tenant has all places."""
    load = [(ask(i, 50, at=i / 1000, tenant="ab"[i >= 8]), 10) for i in range(16)]
    run = Run(build, {"order": "fair"})
    run.now = 1.0
    run.go(load)
    assert {id >= 8 for id in run.joined[:2]} == {True, False}, run.joined
    assert sum(id >= 8 for id in run.joined[:8]) == 4, run.joined


def fair_nothing_saved_up(build: Build) -> None:
    """Who comes back after a pause gets its share from then on, not what it left to others."""
    load = (
        flood("always", 1000, 0)
        + flood("sometimes", 1, 10_000)
        + flood("sometimes", 400, 20_000, at=30.0)
    )
    run = Run(build, {"order": "fair"})
    run.go(load, until=30.0)
    before = dict(run.service)
    later = [pair for pair in load if pair[0].arrival > 20]
    run.lengths |= {request.id: length for request, length in later}
    lengths = run.lengths
    for request, _ in later:
        run.scheduler.add(request)
    while run.now < 60.0:
        plan = run.scheduler.plan(run.now)
        run.lengths = lengths
        run.step(plan)
    gained = {tenant: run.service[tenant] - before[tenant] for tenant in before}
    assert abs(gained["always"] - gained["sometimes"]) <= BOUND, gained
    assert before["always"] - before["sometimes"] > 4 * BOUND, "no pause worth the name"


def fair_ages(build: Build) -> None:
    """A stream of ever new tenants, each with nothing served yet, cannot keep one waiting for ever."""
    load = [(ask(0, 64, tenant="old"), 30), (ask(1, 64, tenant="old", at=0.5), 5)]
    load += [(ask(2 + i, 16, tenant=f"new {i}", at=i / 50), 20) for i in range(3000)]
    run = Run(build, {"order": "fair", "ageing": 4.0, "max_num_seqs": 2}).go(load, until=40.0)
    assert 1 in run.first, "starved"
    assert run.first[1] - run.first[0] < 6.0, run.first[1]


# -- sjf, adaptive -------------------------------------------------------------------------------------------
def mixed(count: int, seed: int, gap: float) -> list[tuple[Request, int]]:
    """Two kinds of requests that show in their prompts: short questions have short answers."""
    dice, at, load = random.Random(seed), 0.0, []
    for i in range(count):
        at += dice.expovariate(1 / gap)
        long = dice.random() < 0.4
        prompt, answer = (
            (dice.randint(80, 120), dice.randint(150, 300)) if long else (20, dice.randint(4, 30))
        )
        load.append((ask(i, prompt, at), answer))
    return load


def shortest_first(build: Build) -> None:
    """On mixed lengths the mean time to the first token falls by more than 30 % against fcfs."""
    load = mixed(400, 1, 0.15)
    plain, short = (Run(build, {"order": order}).go(load) for order in ("fcfs", "sjf"))
    assert plain.ttft() > 3.0, "no queue worth the name"
    assert short.ttft() < 0.7 * plain.ttft(), (short.ttft(), plain.ttft())
    bound = Run(build, {"order": "sjf", "ageing": 8.0}).go(load)
    worst = max(bound.first[id] - bound.arrived[id] for id in bound.first)
    assert worst < max(plain.first[id] - plain.arrived[id] for id in plain.first) + 8.0 + 5.0


def liars_gain_nothing_lasting(build: Build) -> None:
    """A tenant whose requests look short, after a history of short answers, and are long: the predictor sees
    through it, and until then the bound holds for the others."""
    history = [(ask(i, 20, i / 100, tenant="liar"), 2) for i in range(20)]
    lies = [(ask(1000 + i, 20, 4.0 + i / 1000, tenant="liar"), 300) for i in range(200)]
    honest = [(ask(5000 + i, 20, 4.5 + i / 1000, tenant="honest"), 40) for i in range(50)]
    waits = {}
    for order, ageing in (("fcfs", 0.0), ("sjf", 10.0), ("sjf", 1e6)):
        run = Run(build, {"order": order, "ageing": ageing}).go(
            history + lies + honest, until=300.0
        )
        waits[order, ageing] = [
            run.first[request.id] - run.arrived[request.id] for request, _ in honest
        ]
    assert max(waits["sjf", 10.0]) < max(waits["fcfs", 0.0]) + 10.0
    assert mean(waits["sjf", 1e6]) < 0.5 * mean(waits["fcfs", 0.0]), "not seen through"


def batches_are_mixed(build: Build) -> None:
    """With long and short ones waiting the adaptive order never lets only long ones run for long, and the
    urgent class goes first."""
    load = mixed(400, 2, 0.15)
    plain, adaptive = (Run(build, {"order": order}).go(load) for order in ("fcfs", "adaptive"))
    assert adaptive.ttft() < 0.85 * plain.ttft(), (adaptive.ttft(), plain.ttft())
    load = [(ask(i, 20, i / 1000, priority=-4 * (i % 10 == 9)), 50) for i in range(100)]
    urgent = Run(build, {"order": "adaptive", "ageing": 100.0}).go(load)
    assert (
        set(urgent.joined[20:30]) >= {39, 49}
        or urgent.ttft(range(9, 100, 10)) < 0.5 * urgent.ttft()
    )


def waiting_counts(build: Build) -> None:
    """A long one, urgent as all others, gets past ever new short ones long before it is aged."""
    kinds = [(20, 4), (100, 200)] * 20
    load = [(ask(i, prompt, i / 10), answer) for i, (prompt, answer) in enumerate(kinds)]
    load.append((ask(50, 100, 100.0), 200))
    load += [(ask(51 + i, 100, 100.0), 200) for i in range(2)]
    load += [(ask(100 + i, 20, 100.0 + i / 20), 10) for i in range(2000)]
    run = Run(build, {"order": "adaptive", "ageing": 80.0, "max_num_seqs": 2}).go(load, until=190.0)
    worst = max(run.first.get(id, 1e9) - 100.0 for id in (50, 51, 52))
    assert worst < 60.0, f"waited for {worst} s"


# -- deadline, prefix ----------------------------------------------------------------------------------------
def deadlines_are_met(build: Build) -> None:
    """Of requests that come at once with different targets more are met than first come, first served; those
    that are lost anyway do not take others with them."""
    met = {}
    for order in ("fcfs", "deadline"):
        dice, load = random.Random(4), []
        for i in range(300):
            at = i * 0.05
            tight = dice.random() < 0.5
            load.append((ask(i, 60, at, ttft_target=0.6 if tight else 8.0), 20))
        run = Run(build, {"order": order}).go(load)
        met[order] = sum(run.first[q.id] <= q.arrival + (q.ttft_target or 0.0) for q, _ in load)
    assert met["deadline"] > 1.3 * met["fcfs"], met


def prompts_take_time(build: Build) -> None:
    """Of two with the same target the one with the longer prompt has to begin first."""
    warm = [(ask(i, 20 + 40 * i, i * 1.0), 3) for i in range(20)]
    load = [(ask(100 + i, 1200 if i == 9 else 20, 50.0, ttft_target=2.0), 3) for i in range(10)]
    run = Run(build, {"order": "deadline", "max_num_seqs": 1}).go(warm + load)
    assert run.joined[20] == 109, run.joined[20:]


def whole_answers_by_deadline(build: Build) -> None:
    """The deadline of the whole answer counts what the answer takes, once that is known."""
    kinds = [(20, 4), (100, 200)] * 60
    history = [(ask(i, prompt, i / 20), answer) for i, (prompt, answer) in enumerate(kinds)]
    begin = 200.0
    late = [(ask(1000 + i, 20, begin, deadline=begin + 4.0), 4) for i in range(20)]
    soon = [(ask(2000 + i, 100, begin, deadline=begin + 6.0), 200) for i in range(4)]
    run = Run(build, {"order": "deadline", "max_num_seqs": 4}).go(history + late + soon)
    assert set(run.joined[120:124]) == {request.id for request, _ in soon}, run.joined[120:130]


def cached_prefixes_first(build: Build) -> None:
    """In memory that holds one prefix and not both, those of one prefix follow each other."""
    dice, computed = random.Random(5), {}
    prefixes = [tuple(range(k * 1000, k * 1000 + 160)) for k in (1, 2, 3)]
    for order in ("fcfs", "prefix"):
        load = []
        for i in range(120):
            prompt = (*dice.choice(prefixes), 10_000 + i)
            load.append((Request(i, prompt, SamplingParams(max_tokens=30, stop_ids=(STOP,))), 20))
        options = {"order": order, "num_blocks": 30, "max_num_seqs": 2}
        stats = Run(build, options).go(load).scheduler.stats()
        computed[order] = stats["prompt_tokens"] - stats["cached_tokens"]
    assert computed["prefix"] < 0.25 * computed["fcfs"], computed


# -- adaptive_chunk, predicted admission ---------------------------------------------------------------------
def steps_keep_the_target(build: Build) -> None:
    """Under long prompts the steps of adaptive_chunk settle at the target; with plain chunks they do not."""
    load = [(ask(i, 1500, i * 0.2), 60) for i in range(60)]
    usual = {"token_budget": 2048, "max_num_seqs": 64, "num_blocks": 20_000}
    plain = Run(build, usual).go(load)
    run = Run(build, usual | {"policy": "adaptive_chunk", "tpot_ms": 100.0}).go(load)
    busy = [took for took, _, decodes in run.steps[20:] if decodes]
    assert sum(took > 0.11 for took in busy) < 0.05 * len(busy), "over the target"
    assert sum(took > 0.11 for took, _, decodes in plain.steps if decodes) > 0.2 * len(plain.steps)
    slow = Run(build, usual | {"policy": "adaptive_chunk", "tpot_ms": 100.0, "knee_tokens": 20}).go(
        load
    )
    assert slow.now < 1.3 * run.now, "never more tokens than at first"
    crowded = [took for took, _, decodes in run.steps[20:] if run.steps and decodes and took > 0.05]
    assert mean(crowded) > 0.085, "far below the target"


def few_enough_run(build: Build) -> None:
    """Where decoding alone is too slow fewer run at once; where there is room, as many as may."""
    load = [(ask(i, 4), 300) for i in range(200)]
    usual = {"policy": "adaptive_chunk", "token_budget": 256, "max_num_seqs": 128}
    run = Run(build, usual | {"tpot_ms": 30.0}).go(load)  # FIXED + 40 EACH
    late = [took for took, _, _ in run.steps[len(run.steps) // 2 :]]
    assert sum(took > 0.033 for took in late) < 0.05 * len(late), "over the target"
    rows = [decodes for _, _, decodes in run.steps[len(run.steps) // 3 : -310]]
    assert mean(rows) > 30, "far too few run"
    assert Run(build, usual | {"tpot_ms": 500.0}).go(load).together == 128
    first = Run(build, usual | {"tpot_ms": 500.0, "knee_seqs": 5, "knee_tokens": 20}).go(
        load, until=0.001
    )
    assert first.steps[0][1] <= 20
    assert first.together <= 5


def predicted_room(build: Build) -> None:
    """Room for what answers usually take: more run than with room for the most they may take, and fewer are
    preempted than with none."""
    dice = random.Random(6)
    load = [(ask(i, 30, i * 0.02), dice.randint(60, 90)) for i in range(300)]
    stats, together = {}, {}
    for admission in ("none", "full", "predicted"):
        options = {"admission": admission, "num_blocks": 100, "max_num_seqs": 64}
        run = Run(build, options).go(load)
        stats[admission] = run.scheduler.stats()["preemptions"]
        together[admission] = mean(decodes for _, _, decodes in run.steps)
    assert stats["full"] == 0
    assert stats["predicted"] < 0.3 * stats["none"], stats
    assert together["predicted"] > 2 * together["full"], together


# name of the order, policy or admission -> what it is for
PROMISES: dict[str, tuple[Callable[[Build], None], ...]] = {
    "fair": (
        fair_in_one_step,
        fair_ages,
        fair_shares,
        fair_prompts_and_answers,
        fair_nothing_saved_up,
    ),
    "sjf": (shortest_first, liars_gain_nothing_lasting),
    "adaptive": (waiting_counts, batches_are_mixed),
    "deadline": (prompts_take_time, whole_answers_by_deadline, deadlines_are_met),
    "prefix": (cached_prefixes_first,),
    "adaptive_chunk": (steps_keep_the_target, few_enough_run),
    "predicted": (predicted_room,),
}
