"""The search for settings, on a cost made for the purpose; and what is measured, on the null engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.planning.settings_search import (
    Candidate,
    SearchSpace,
    check_possible,
    first_seconds,
    mark_tied,
    measure_trials,
    score,
    search_settings,
)
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import Traffic, in_vocabulary
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from support.refusals import engine_fault

COST = CalibratedCost([5e-3, 0, 2e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})
SMALL = SearchSpace(("chunked", "prefill_first"), ("fcfs", "sjf"), (16, 32))
POOR = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, policy="static")


def scenario(**change: Any) -> Scenario:
    def source(rate: float) -> Traffic:
        return SyntheticTraffic(40, 40.0 * rate, 60, 20, cap=64).open_loop()

    base = Scenario(POOR, KVSizes(500), 2000, COST, source, LatencyTargets(0.4, 0.03))
    return replace(base, **change)


@pytest.mark.slow
def test_it_finds_better_settings_than_those_given() -> None:
    trials = search_settings(
        scenario(), SMALL, 600, clock=itertools.count().__next__, progress=False
    )
    assert trials[0].simulated["goodput_share"] == 1.0
    given = next(one for one in trials if one.candidate == Candidate.of(POOR))
    assert given.simulated["goodput_share"] < 0.5
    mark_tied(trials, trials[0], scenario().targets)
    assert (trials[0].tied, given.tied) == (True, False)
    near = replace(trials[0], simulated=trials[0].simulated | {"goodput_range": (0.9, 1.0)})
    mark_tied([near], trials[0], scenario().targets)
    assert near.tied
    ranks = [score(one.simulated, scenario().targets) for one in trials]
    assert ranks == sorted(ranks)
    assert len({one.candidate for one in trials}) == len(trials), "nothing twice"
    best = trials[0].candidate
    assert {*SMALL.beside(best)} <= {one.candidate for one in trials}, (
        "no neighbour of the best is untried"
    )
    best_run = replace(scenario(), config=best.settings(POOR))
    if best.block_size == POOR.block_size:
        assert best_run.run(progress=False)["goodput_share"] == trials[0].simulated["goodput_share"]


def test_it_stops_when_the_time_is_up() -> None:
    trials = search_settings(scenario(), SMALL, 7, clock=itertools.count().__next__, progress=False)
    assert len(trials) < 7
    assert Candidate.of(POOR) in [one.candidate for one in trials]


def test_the_kv_memory_stays_what_it_is() -> None:
    trials = search_settings(
        scenario(), SearchSpace(("chunked",), ("fcfs",)), 900, clock=itertools.count().__next__
    )
    assert len({one.candidate.block_size for one in trials}) > 2
    assert all(one.simulated["refused"] == 0 for one in trials)


@pytest.mark.parametrize(
    ("policies", "orders"), [(("nonsense",), ("fcfs",)), (("orca",), ("x",)), ((), ("fcfs",))]
)
def test_unknown_names_are_refused(policies: tuple[str, ...], orders: tuple[str, ...]) -> None:
    with engine_fault(r"unknown .* one of"):
        SearchSpace(policies, orders)


def test_impossible_targets_are_said_to_be() -> None:
    targets = LatencyTargets(0.001, None)
    trials = search_settings(scenario(targets=targets), SMALL, 30, clock=itertools.count().__next__)
    with engine_fault(r"no setting that was tried .* 0\.0% .* 99\.0% are wanted"):
        check_possible(trials[0], targets)


def test_what_is_measured_is_the_traffic() -> None:
    source = SyntheticTraffic(40, 200.0, 30, 5, cap=8).open_loop()
    load = first_seconds(source, 0.1)
    assert 5 < load.total < 40
    known = in_vocabulary(load, 320).engine_requests()
    assert [len(one.prompt) for one in known] == [len(one.prompt_tokens()) for one in load.requests]
    assert all(0 < token < 320 for one in known for token in one.prompt)
    config = EngineConfig(backend="fake", max_model_len=256)
    trials = search_settings(
        scenario(config=config), SMALL, 2, clock=itertools.count().__next__, progress=False
    )
    trials = [trials[0], replace(trials[0], candidate=replace(trials[0].candidate, block_size=4))]
    measure_trials(trials, config, load, LatencyTargets(10.0, 10.0), progress=False)
    for one in trials:
        assert one.measured["requests"] == load.total
        assert one.measured["output_tokens"] == sum(min(each.output, 8) for each in load.requests)
        assert one.measured["goodput_share"] == 1.0


def test_sessions_cannot_be_measured() -> None:
    with engine_fault("simulated only"):
        first_seconds(SyntheticTraffic(4, 2.0, 30, 5).sessions(3, 1.0), 5.0)
