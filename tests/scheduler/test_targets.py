"""Targets are kept or refused: how true forecasts are, when a refusal is right, what a deadline ends."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil
from statistics import median

import pytest

from pageturner.policies.slo_admission import SloAdmission
from pageturner.request import Event, Refused, Request, Resume
from pageturner.scheduler.types import Plan
from support.schedulers import check, make_stack

from .promises import STOP, Run, ask

AGES = 1e6


def traffic(rate: float, count: int, seed: int, target: float) -> list[tuple[Request, int]]:
    """Poisson arrivals, log-normal lengths."""
    dice, at, load = random.Random(seed), 0.0, []
    for id in range(count):
        at += dice.expovariate(rate)
        prompt, answer = (
            min(1500, dice.lognormvariate(5, 1)),
            min(300, dice.lognormvariate(3.5, 0.7)),
        )
        load.append((ask(id, int(prompt) + 1, at, ttft_target=target), int(answer) + 1))
    return load


class Held(Run):
    """A run whose requests come through the door."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets = SloAdmission(self.stack)
        self.foretold: dict[int, float] = {}
        self.refused: dict[int, Refused] = {}
        self.add = self.enter

    def enter(self, request: Request) -> None:
        try:
            self.targets.add(request, self.now)
        except Refused as refused:
            self.refused[request.id] = refused
        else:
            self.foretold[request.id] = self.targets._due[request.id][1]

    def step(self, plan: Plan) -> list[Event]:
        events = super().step(plan)
        self.targets.saw(events, self.now)
        return events


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "chunked"},
        {"policy": "prefill_first"},
        {"policy": "orca"},
        {"policy": "chunked", "num_blocks": 150, "max_num_seqs": 64, "admission": "full"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_forecasts_are_true(options: dict[str, object]) -> None:
    """Of loads that queue up: the median of foretold / true TTFT is near 1, and four of five are near it."""
    run = Held(make_stack, options)
    load = traffic(5.0, 160, 1, AGES)
    run.go(load)
    ratios = sorted(
        (run.foretold[request.id] - request.arrival) / (run.first[request.id] - request.arrival)
        for request, _ in load[50:]
    )
    assert run.ttft() > 0.5, "a load that nobody waits in shows nothing"
    assert 0.85 < median(ratios) < 1.15, ratios
    assert ratios[len(ratios) // 10] > 0.5, ratios
    assert ratios[-len(ratios) // 10] < 1.6, ratios


def test_refusing_at_the_door_keeps_promises() -> None:
    """Under twice the load that can be answered: who is let in gets its first token in time, and more do
    than without a door."""
    load = traffic(9.0, 300, 2, 2.0)
    held, plain = Held(make_stack, {}).go(load), Run(make_stack, {}).go(load)

    def in_time(run: Run) -> int:
        return sum(run.first[q.id] <= q.arrival + 2.0 for q, _ in load if q.id in run.first)

    assert len(held.first) < len(load), "nobody was refused"
    assert in_time(held) > 0.85 * len(held.first)
    assert in_time(held) > 3 * in_time(plain)


def test_who_comes_again_when_it_was_told_is_taken() -> None:
    """Time and again under load: who waits as long as Retry-After says, in whole seconds, gets in, if nobody
    came in between."""
    tried = 0
    for seed in range(12):
        run = Held(make_stack, {"max_num_seqs": 4})
        load = [
            (replace(q, arrival=0.001 * i), n)
            for i, (q, n) in enumerate(traffic(9.0, 40, seed, 3.0))
        ]
        run.go(load, until=2.0)
        late = max(run.refused, default=None)
        if late is None:
            continue
        tried += 1
        wait = ceil(run.refused[late].retry_after)
        again = run.now + wait
        while run.now < again and run.scheduler.has_work:
            run.step(run.scheduler.plan(run.now))
        run.now = max(run.now, again)
        run.enter(replace(load[late][0], id=1000, arrival=run.now))
        assert 1000 not in run.refused, (wait, run.refused[1000].message)
    assert tried > 6


def busy(**options: object) -> tuple[Run, SloAdmission]:
    """An engine whose only place is taken for a while, and that knows what steps take."""
    run = Run(make_stack, {"max_num_seqs": 1, **options})
    run.go([(ask(1, 50), 30), (ask(2, 400, 0.001), 30)])
    targets = SloAdmission(run.stack)
    targets.add(ask(3, 100, run.now), run.now)
    run.lengths[3] = 60
    run.step(run.scheduler.plan(run.now))
    return run, targets


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"ttft_target": 0.05}, "ttft_target_unreachable"),
        ({"deadline": 0.05}, "deadline_unreachable"),
    ],
)
def test_a_refusal_leaves_nothing_behind(fields: dict[str, float], code: str) -> None:
    run, targets = busy()
    fields = {
        name: value + (run.now if name == "deadline" else 0.0) for name, value in fields.items()
    }
    with pytest.raises(Refused, match="ask again in 1 s") as caught:
        targets.add(ask(4, 10, run.now, **fields), run.now)
    assert caught.value.code == code
    assert 0 < caught.value.retry_after < 1
    assert run.scheduler.load[0] == 0
    assert targets.stats()["refused_late"] == 1
    check(run.stack)


def test_who_is_not_refused() -> None:
    run, targets = busy()
    hurry = ask(4, 10, run.now, ttft_target=0.01)
    targets.add(replace(hurry, id=5, resume=(Resume(0, (7,)),)), run.now)  # it was taken before
    targets.add(replace(hurry, id=6, parent=3), run.now)  # one more choice of what was taken
    targets.add(replace(hurry, id=7, ttft_target=99.0), run.now)
    idle = SloAdmission(make_stack(num_blocks=100, block_size=16))
    idle.add(hurry, 50.0)  # hopeless, and hurts nobody
    still = make_stack(num_blocks=100, block_size=16, policy="static")
    for id in range(2):  # nothing can be foretold of whoever waits for company
        SloAdmission(still).add(replace(hurry, id=id, arrival=0.0), 0.0)


def test_deadlines_end_who_waits_and_who_runs() -> None:
    run, targets = busy(num_blocks=60)
    now = run.now
    for id, deadline in ((4, 5.0), (5, 9.0), (6, 7.0)):
        targets.add(ask(id, 20, now, deadline=now + deadline), now)
    targets.add(ask(7, 20, now), now)
    assert targets.expired(now + 4.9) == []
    (event,) = targets.expired(now + 5.0)
    assert (event.id, event.finish, event.position) == (4, "error", 20)
    assert event.failure is not None
    assert event.failure.code == "deadline_exceeded"
    assert set(targets._due) == {5, 6}, "no forecast is kept of who is gone"
    run.scheduler.abort(6)
    run.scheduler.abort(3)
    run.lengths |= {5: 300, 7: 2}
    run.now = now + 5.0
    for _ in range(3):
        run.step(run.scheduler.plan(run.now))
    (event,) = targets.expired(now + 9.0)
    assert (event.id, event.position) == (5, 20 + 3), "it ran, and keeps what it has"
    run.go([])
    assert 7 in run.ended
    assert run.scheduler.stats()["blocks_used"] == 0
    assert targets.stats()["expired"] == 2


def test_a_deadline_that_has_passed_is_refused_at_the_door() -> None:
    run, targets = busy()
    for resume in ((), (Resume(0, (STOP + 1,)),)):
        with pytest.raises(Refused) as caught:
            targets.add(ask(4, 10, 0.0, deadline=run.now, resume=resume), run.now)
        assert (caught.value.code, caught.value.retry_after) == ("deadline_exceeded", 0.0)
    assert run.scheduler.load[0] == 0


def test_passed_deadlines_are_forgotten() -> None:
    stack = make_stack(num_blocks=100, block_size=16)
    targets, scheduler = SloAdmission(stack), stack.scheduler
    for id in range(3000):
        targets.add(ask(id, 5, 0.0, deadline=1e5), 0.0)
        scheduler.abort(id)
        targets.forget(id)
    assert len(targets._deadlines) < 1100


def test_it_says_how_true_its_forecasts_were() -> None:
    run = Held(make_stack, {})
    targets = run.targets
    for request, _ in traffic(5.0, 40, 3, AGES):
        run.now = request.arrival
        run.enter(request)
    stats = targets.stats()
    assert stats["ttft_forecasts"] == 0
    due = dict(targets._due)
    targets.saw([Event(0, 0, 5, (1,))], run.foretold[0] + 1.0)
    targets.saw([Event(1, 0, 5, (1,))], run.foretold[1] - 0.001)
    targets.saw([Event(0, 0, 6, (1,)), Event(2, 0, 5, finish="error")], 99.0)
    stats = targets.stats()
    assert (stats["ttft_forecasts"], stats["ttft_forecast_later"]) == (2, 0.5)
    assert stats["ttft_forecast_log_error"] > 0
    assert set(targets._due) == due.keys() - {0, 1, 2}
