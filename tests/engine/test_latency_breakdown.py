"""Where the time of a request goes: every moment in one part, under a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pageturner.engine.engine import Engine
from pageturner.ipc.channel import Events, encode
from pageturner.params import SamplingParams
from pageturner.request import Event, Request, Timings
from pageturner.scheduler.types import Output, Plan, Result
from support.schedulers import make_stack


class Clock:
    """Time passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """An executor whose steps take `fixed` and so much for each token, and sampling a quarter second."""

    def __init__(self, clock: Clock, fixed: float = 1.0, each: float = 0.125) -> None:
        self.clock, self.fixed, self.each = clock, fixed, each

    def run(self, plan: Plan) -> Result:
        self.clock.now += self.fixed + self.each * plan.tokens + 0.25
        return Result(
            [Output([7] if item.wants_logits else []) for item in plan.items], {"sampling": 0.25}
        )


def engine(**options: Any) -> tuple[Engine, Clock]:
    settings: dict[str, Any] = {
        "num_blocks": 256,
        "block_size": 4,
        "token_budget": 64,
        "max_model_len": 512,
    }
    clock = Clock()
    return Engine(make_stack(**(settings | options)), Timed(clock), clock), clock


def request(id: int, prompt: int, answer: int, **params: Any) -> Request:
    tokens = tuple(id * 1000 + i for i in range(prompt))
    return Request(id, tokens, SamplingParams(max_tokens=answer, **params))


def drain(engine: Engine, clock: Clock, pause: float = 0.0) -> dict[int, tuple[Timings, float]]:
    """The account of each request, and when it ended. `pause` passes between two steps."""
    found: dict[int, tuple[Timings, float]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.finish is not None:
                assert event.timings is not None
                found[event.id] = event.timings, clock.now
        clock.now += pause
    return found


def complete(timings: Timings) -> None:
    """The parts add up to its time, and so do the pieces of its timeline, which follow each other."""
    assert sum(timings.parts.values()) == pytest.approx(timings.until - timings.received, abs=1e-9)
    assert all(seconds >= 0 for seconds in timings.parts.values()), timings.parts
    assert timings.spans[-1][1] == timings.until
    for (_, end, _, _), (start, _, _, _) in zip(timings.spans, timings.spans[1:], strict=False):
        assert end <= start


def test_alone() -> None:
    one, clock = engine()
    one.submit(request(1, 16, 3))
    clock.now += 2.0  # before the first plan
    timings, end = drain(one, clock, pause=0.5)[1]
    complete(timings)
    assert (timings.received, timings.until) == (100.0, end)
    assert timings.parts == pytest.approx(
        {
            "overhead": 2.0 + 2 * 0.5,
            "own_prefill": 1 + 16 * 0.125,
            "own_decode": 2 * 1.125,
            "sampling": 0.75,
        }
    )
    assert [span[2] for span in timings.spans] == ["overhead", "prefill", "decode"]


def test_a_neighbours_prompt_is_paid_by_who_decodes_and_named() -> None:
    one, clock = engine()
    one.submit(request(1, 8, 40))
    for _ in range(30):  # lets the pace of steps be known
        one.step()
    one.submit(request(2, 40, 1))
    before = clock.now
    found = drain(one, clock)
    timings = found[1][0]
    complete(timings)
    complete(found[2][0])
    assert before < timings.until
    assert timings.parts["others_prefill"] == pytest.approx(40 * 0.125, rel=0.25)
    assert [(part, by) for part, by, _ in timings.named] == [("others_prefill", 2)]
    assert ("decode", 2) in [span[2:] for span in timings.spans]
    assert found[2][0].parts["others_decode"] > 0, "it had a neighbour that decoded"
    assert "others_prefill" not in found[2][0].parts


@pytest.mark.parametrize(
    ("options", "cause", "behind"),
    [
        ({"max_num_seqs": 1}, "slots", 0),
        ({"num_blocks": 9, "prefix_caching": False, "admission": "full"}, "blocks", 1),
        ({"policy": "static", "static_batch": 1}, "policy", 0),
        ({"token_budget": 8}, "budget", 1),
    ],
)
def test_what_the_queue_waits_for(options: dict[str, Any], cause: str, behind: int) -> None:
    """The second request waits for the first, and the third behind the second."""
    one, clock = engine(**options)
    for id in (1, 2, 3):
        one.submit(request(id, 24, 5))
    begin = clock.now
    found = drain(one, clock)
    for timings, end in found.values():
        complete(timings)
        assert (timings.received, timings.until) == (begin, end)
    second, third = found[2][0], found[3][0]
    assert second.parts[f"queue_{cause}"] > 3.0
    assert third.parts[f"queue_{cause}"] > second.parts[f"queue_{cause}"]
    named = {(part, by) for part, by, _ in second.named}
    assert ((f"queue_{cause}", behind) in named) == bool(behind)
    if cause != "slots":  # where nobody may run, nobody was asked who is next
        assert (f"queue_{cause}", 2) in {(part, by) for part, by, _ in third.named}


def test_waiting_for_a_prompt_that_another_computes() -> None:
    one, clock = engine(token_budget=16)
    shared = request(1, 40, 2)
    one.submit(shared)
    one.submit(replace(shared, id=2))
    timings = drain(one, clock)[2][0]
    complete(timings)
    assert timings.parts["queue_prompt"] + timings.parts.get("queue_budget", 0) > 2.0
    assert timings.parts["queue_prompt"] > 0
    assert ("queue_prompt", 1) in {(part, by) for part, by, _ in timings.named}


def test_preemption_names_who_took_the_blocks() -> None:
    one, clock = engine(num_blocks=9, prefix_caching=False)
    one.submit(request(1, 8, 24))
    one.submit(request(2, 8, 24))
    timings = drain(one, clock)[2][0]
    complete(timings)
    assert timings.parts["preempted"] > 1.0
    assert timings.parts["own_recompute"] > 1.0
    assert ("preempted", 1) in {(part, by) for part, by, _ in timings.named}


def test_who_runs_without_a_token_is_stalled() -> None:
    """prefill_first lets decodes wait for prompts."""
    one, clock = engine(policy="prefill_first")
    one.submit(request(1, 8, 8))
    one.step()
    one.submit(request(2, 32, 2))
    timings = drain(one, clock)[1][0]
    complete(timings)
    assert timings.parts["others_prefill"] == pytest.approx(1 + 32 * 0.125)
    assert ("stalled", 2) in [span[2:] for span in timings.spans]


def test_padding_of_static_batches_is_told() -> None:
    one, clock = engine(policy="static", static_batch=2)
    one.submit(request(1, 8, 8))
    one.submit(request(2, 32, 2))
    found = drain(one, clock)
    for timings, _ in found.values():
        complete(timings)
    rows = 24 * 9.0 / 64  # of the first step, in which both wait for what pads the shorter prompt
    assert found[2][0].parts["padding"] == pytest.approx(rows)
    assert found[1][0].parts["padding"] > rows, (
        "then for what stands in the place of the one that left"
    )


def test_an_account_is_told_once_with_its_end() -> None:
    """Stop strings may end a request at any token, and its tokens are as cheap to tell as those of others."""
    one, _ = engine()
    one.submit(request(1, 8, 5, stop=("x",)))
    one.submit(request(2, 8, 5))
    told: dict[int, list[Event]] = {1: [], 2: []}
    while one.has_work:
        for event in one.step():
            told[event.id].append(event)
    for events in told.values():
        assert [event.timings is not None for event in events] == [False] * 4 + [True]
        assert events[-1].timings is not None
        complete(events[-1].timings)


def test_stop_strings_make_no_step_more_to_tell() -> None:
    """64 streams with stop strings: the message of each step is as long as that of streams without."""

    def sizes(**params: Any) -> list[int]:
        one, _ = engine(num_blocks=2048, token_budget=1024, max_num_seqs=64)
        for id in range(1, 65):
            one.submit(request(id, 8, 20, **params))
        return [len(encode(Events(one.step()))) for _ in range(19)]  # all steps but the last

    assert sizes(stop=("x", "y")) == sizes()


def test_an_aborted_request_is_told_its_account() -> None:
    one, clock = engine(max_num_seqs=1)
    one.submit(request(1, 8, 50))
    one.submit(request(2, 8, 50))
    for _ in range(4):
        one.step()
    clock.now += 0.5
    running, waiting = one.abort(1), one.abort(2)
    assert running is not None
    assert waiting is not None
    assert (
        sum(running.parts.values())
        == pytest.approx(running.until - running.received)
        == clock.now - 100
    )
    assert running.parts["own_decode"] > 3
    complete(waiting)
    assert waiting.parts["queue_slots"] > 3
    assert one.abort(1) is None


def test_a_request_may_be_aborted_before_the_first_plan() -> None:
    one, clock = engine()
    one.submit(request(1, 8, 50))
    clock.now += 0.5
    timings = one.abort(1)
    assert timings is not None
    assert timings.parts == {"overhead": 0.5}


def test_choices_of_a_search_have_one_account() -> None:
    one, clock = engine()
    params = SamplingParams(max_tokens=3, beam_width=2)
    first = Request(1, (5, 6, 7), params)
    clock_run: Callable[[Plan], Result] = one.executor.run

    def run(plan: Plan) -> Result:
        spent = clock_run(plan).spent
        return Result(
            [Output(candidates=[(k, -1.0 - k) for k in range(4)]) for _ in plan.items], spent
        )

    one.executor.run = run  # type: ignore[method-assign]
    one.submit(first)
    one.submit(replace(first, id=2, index=1, parent=1))
    found = drain(one, clock)
    assert found[1][0].parts == found[2][0].parts
    complete(found[1][0])
    assert found[1][0].parts["own_decode"] > 2.0


def test_what_is_aborted_or_refused_leaves_no_account() -> None:
    one, _ = engine(max_num_seqs=1)
    for id in (1, 2):
        one.submit(request(id, 8, 5))
    one.step()
    one.abort(1)
    one.abort(2)
    assert one.submit(request(3, 600, 5))[0].failure is not None
    assert not one.latency.open_ids
    assert not one.has_work


def test_a_long_timeline_is_cut_and_the_parts_are_not() -> None:
    one, clock = engine()
    one.submit(request(1, 8, 200))
    for id in range(2, 102):
        one.submit(request(id, 8, 1))
        one.step()
    timings = drain(one, clock)[1][0]
    complete(timings)
    assert len(timings.spans) == 64
    assert timings.spans[-1][2] == "later"
