"""The fewest GPUs: what is asked, that giving up changes nothing, and that processes answer alike."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig, RouterConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.prompt_alone import (
    KnownBeginnings,
    alone,
    judge,
    prefill_seconds,
    prompts_of,
)
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.planning.capacity_search import (
    CapacityAnswer,
    CapacityQuestion,
    Option,
    Search,
    fewest_gpus,
    first_guess,
    next_questions,
    search_capacity,
)
from pageturner.lab.planning.parallel_runs import ParallelRuns, SerialRuns
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import OpenLoop, Pieces, Traffic, TrafficRequest
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from support.refusals import engine_fault

COST = CalibratedCost([5e-3, 0, 2e-4, 0, 0, 0, 1e-7], (0, 0), 1, 0.0, {})


def traffic_at(count: int, prompt: int, rate: float) -> Traffic:
    return SyntheticTraffic(count, 20.0 * rate, prompt, 20).open_loop()


def scenario(count: int = 60, prompt: int = 60, **change: Any) -> Scenario:
    traffic = partial(traffic_at, count, prompt)
    base = Scenario(EngineConfig(), KVSizes(500), 2000, COST, traffic, LatencyTargets(0.3, 0.02))
    return replace(base, **change)


# -- what is asked -------------------------------------------------------------------------------------------


def walk(
    search: Search, enough: Mapping[int, int]
) -> tuple[tuple[int, int] | None, list[CapacityQuestion]]:
    """The answer and the questions, where option i needs enough[i] replicas."""
    questions = []
    try:
        question = next(search)
        while True:
            questions.append(question)
            question = search.send(CapacityAnswer(question.replicas >= enough[question.option]))
    except StopIteration as ended:
        return ended.value, questions


@pytest.mark.parametrize("seed", range(30))
def test_the_fewest_gpus_are_found_and_one_replica_less_was_asked(seed: int) -> None:
    dice = random.Random(seed)
    options = [Option(gpus, scenario()) for gpus in (1, 2, 4)]
    needs = {i: dice.choice([1, 2, 3, 7, 40, 900]) for i in range(3)}
    guesses = [dice.choice([1, 2, 5, 100]) for _ in options]
    best, questions = walk(fewest_gpus(options, guesses.__getitem__), needs)
    assert best is not None
    index, replicas = best
    assert replicas == needs[index]
    assert options[index].gpus * replicas == min(options[i].gpus * needs[i] for i in needs)
    assert replicas == 1 or (index, replicas - 1) in {
        (one.option, one.replicas) for one in questions
    }
    assert len({*questions}) == len(questions), "nothing is asked twice"


def test_what_is_looked_at_ahead_begins_with_what_is_asked() -> None:
    options = [Option(1, scenario())]

    def search() -> Search:
        return fewest_gpus(options)

    known = {CapacityQuestion(0, 1): CapacityAnswer(enough=False)}
    ahead = next_questions(search, known, 3)
    assert [one.replicas for one in ahead] == [2, 4, 8]


def test_a_lone_request_that_misses_ends_the_search() -> None:
    search = fewest_gpus([Option(1, scenario())])
    next(search)
    with pytest.raises(StopIteration) as ended:
        search.send(CapacityAnswer(enough=False, lone=True))
    assert ended.value.value is None


# -- giving up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_giving_up_is_certain(seed: int) -> None:
    dice = random.Random(seed)
    targets = LatencyTargets(dice.choice([0.05, 0.3, None]), dice.choice([0.01, 0.02, None]), 0.9)
    one = scenario(rate=dice.choice([1.0, 6.0, 20.0]), targets=targets, replicas=dice.randint(1, 4))
    one = replace(one, config=replace(one.config, max_queue=dice.choice([3, 1000])))
    whole, short = one.run(progress=False), one.run(progress=False, give_up=True)
    if "given_up" in short:
        assert whole["goodput_share"] <= short["goodput_share"] < targets.share
    else:
        assert whole["goodput_share"] >= targets.share
        assert short == whole


def test_a_run_that_nobody_wants_ends() -> None:
    found = scenario(count=2000).run(progress=False, cancelled=lambda: True)
    assert found["requests"] < 2000


# -- a prompt alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 100, 512, 900, 1500])
def test_a_prompt_alone_takes_what_the_simulation_says(length: int) -> None:
    request = TrafficRequest(Pieces(((1, length),)), 5, 5)
    one = scenario(traffic=lambda rate: OpenLoop([request]), targets=LatencyTargets(1.0))
    run = one.run(progress=False)
    budget = one.check().scheduler.budget
    assert 1e3 * prefill_seconds(COST, 0, length, budget) == pytest.approx(run["ttft_ms"]["max"])


def test_beginnings_are_known_when_they_come_again() -> None:
    known = KnownBeginnings()
    assert known.note(Pieces(((1, 512), (2, 512), (OWN_A, 100)))) == 0
    assert known.note(Pieces(((1, 512), (3, 512)))) == 512
    assert known.note(Pieces(((1, 512), (2, 512), (4, 9)))) == 1024
    assert known.note(Pieces(((2, 512),))) == 0
    assert known.note(tuple(range(600))) <= 15
    assert known.note((*range(520), 7)) == 520
    assert 300 <= known.note((*range(300), *range(1000, 1100))) <= 315


OWN_A = 1 << 40


def test_a_cached_beginning_makes_the_impossible_possible() -> None:
    each = [TrafficRequest(Pieces(((1, 900), (10 + i, 20))), 2, 2, float(i)) for i in range(100)]
    targets = LatencyTargets(0.1)
    for caching in (True, False):
        verdict = judge(alone(prompts_of(OpenLoop(each), caching=caching), COST, budget=0), targets)
        assert verdict.possible is caching


def test_the_next_turn_finds_the_answer_before_it() -> None:
    """No simulated request is sooner than the bound."""
    talks = SyntheticTraffic(3, 1.0, 20, 300).sessions(4, 1.0)
    cost, targets = COST, LatencyTargets(0.02)
    least = sorted(one.ttft for one in alone(prompts_of(talks, caching=True), cost, budget=512))
    one = replace(scenario(), traffic=lambda _: talks, targets=targets, replicas=3)
    run = one.run()
    assert run["requests"] == len(least) == 12
    assert least[-1] <= run["ttft_ms"]["max"] / 1e3 + 1e-9
    assert least[len(least) // 2] <= run["ttft_ms"]["p50"] / 1e3 + 1e-9


def test_the_impossible_is_said_before_anything_is_simulated() -> None:
    class Nobody:
        def run(self, *_: object) -> Any:
            raise AssertionError("nothing is to be simulated")

    one = Option(1, scenario(targets=LatencyTargets(0.01)), "H100")
    with engine_fault(r"alone .*--gpus 2,4,8.* --ttft-ms", code="impossible"):
        search_capacity([one], lambda options: Nobody(), lambda line: None)


# -- where it begins -----------------------------------------------------------------------------------------


def test_the_guess_is_near_where_prompts_wait_for_prompts() -> None:
    """Of prompts that share nothing and answers of one token, what is simulated is what is guessed."""
    each = [TrafficRequest(Pieces(((OWN_A + i, 500),)), 1, 1, 0.05 * i) for i in range(200)]
    one = Option(1, scenario(traffic=lambda rate: OpenLoop(each), targets=LatencyTargets(0.25)))
    best, tried = search_capacity(
        [one], lambda options: SerialRuns(options, progress=False), lambda line: None
    )
    assert first_guess(one) == best["replicas"] > 1
    assert len(tried) == 2, "the answer, and one replica less"


def test_a_guess_that_finds_nothing_begins_with_one() -> None:
    assert first_guess(Option(1, scenario(targets=LatencyTargets(1e-6)))) == 1


# -- who answers ---------------------------------------------------------------------------------------------


def test_each_count_is_told_as_it_is_tried() -> None:
    told: list[str] = []
    one = Option(1, scenario(rate=16.0), "H100")
    best, tried = search_capacity(
        [one], lambda options: SerialRuns(options, progress=False), told.append
    )
    assert len(told) == len(tried)
    assert any(line.startswith(f"{best['replicas']} replicas of 1 x H100: enough") for line in told)
    assert best["gpus"] == best["replicas"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_give_the_answer_of_one() -> None:
    one = Option(2, scenario(count=300, rate=16.0))
    options = [one, Option(3, replace(one.scenario, sizes=KVSizes(700)))]
    serial = search_capacity(
        options, lambda each: SerialRuns(each, progress=False), lambda line: None
    )
    with ParallelRuns(options, 2, lambda line: None) as runs:
        parallel = search_capacity(options, lambda each: runs, lambda line: None)
    assert repr(parallel) == repr(serial)  # nan is not equal to nan


def test_the_simulator_places_as_the_router_does() -> None:
    assert scenario().placement == RouterConfig().placement
