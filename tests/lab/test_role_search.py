"""The search that lets some replicas compute prompts for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.planning.capacity_search import Option, search_capacity, splits_of
from pageturner.lab.planning.parallel_runs import SerialRuns
from pageturner.lab.simulation.fleet import Roles
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic

COST = CalibratedCost([1e-3, 0, 1e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})
ENGINE = EngineConfig(max_num_batched_tokens=512, max_queue=1000)


def scenario(tpot: float, token_seconds: float = 1e-6) -> Scenario:
    return Scenario(
        ENGINE,
        KVSizes(400),
        2000,
        COST,
        lambda rate: SyntheticTraffic(120, 40.0 * rate, 400, 60, seed=3).open_loop(),
        LatencyTargets(2.0, tpot, 0.95),
        roles=Roles(prefill=1, token_seconds=token_seconds),
    )


def search(options: list[Option]) -> tuple[dict[str, object], list[str]]:
    said: list[str] = []
    best, _ = search_capacity(options, lambda them: SerialRuns(them, progress=False), said.append)
    return best, said


@pytest.fixture(scope="module")
def tight() -> tuple[dict[str, object], list[str]]:
    return search(splits_of(Option(1, scenario(0.004), "X")))


@pytest.mark.slow
def test_prompts_apart_take_fewer_where_tokens_must_come_steadily(
    tight: tuple[dict[str, object], list[str]],
) -> None:
    best, said = tight
    together, _ = search([Option(1, scenario(0.004), "X")])
    assert int(str(best["gpus"])) < int(str(together["gpus"]))
    assert str(best["roles"]).startswith("prefill=")
    assert any("of them for prompts: enough" in line for line in said), "what is tried is said"


@pytest.mark.slow
def test_what_it_finds_is_enough_and_one_less_is_not(
    tight: tuple[dict[str, object], list[str]],
) -> None:
    best, _ = tight
    prefill, decode = (int(part.split("=")[1]) for part in str(best["roles"]).split(","))
    assert prefill + decode == best["replicas"]
    one = scenario(0.004)
    found = replace(one, replicas=prefill + decode, roles=replace(one.roles, prefill=prefill))
    assert found.run(progress=False)["goodput_share"] == best["goodput_share"]
    for option in splits_of(Option(1, one)):
        less = option.with_replicas(prefill + decode - 1)
        assert less.run(progress=False)["goodput_share"] < 0.95


@pytest.mark.slow
def test_where_the_link_is_slow_they_stay_together() -> None:
    best, _ = search(splits_of(Option(1, scenario(0.1, token_seconds=0.1), "X")))
    assert best["roles"] == ""
