"""Searches and sweeps, on a cost made for the purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.planning.capacity_search import Option, search_capacity
from pageturner.lab.planning.parallel_runs import SerialRuns
from pageturner.lab.simulation.scenario import Scenario, sweep
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import Traffic
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from support.refusals import engine_fault

COST = CalibratedCost([5e-3, 0, 2e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})


def scenario(**change: Any) -> Scenario:
    def source(rate: float) -> Traffic:
        return SyntheticTraffic(60, 20.0 * rate, 60, 20).open_loop()

    base = Scenario(EngineConfig(), KVSizes(500), 2000, COST, source, LatencyTargets(0.3, 0.02))
    return replace(base, **change)


def fewest_replicas(one: Scenario) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return search_capacity(
        [Option(1, one)], lambda each: SerialRuns(each, progress=False), lambda line: None
    )


def test_one_replica_less_is_too_few() -> None:
    best, tried = fewest_replicas(scenario(rate=16.0))
    by_count = {run["replicas"]: run["goodput_share"] for run in tried}
    assert best["replicas"] > 2
    assert by_count[best["replicas"]] >= 0.99
    assert by_count[best["replicas"] - 1] < 0.99
    assert all(share < 0.99 for count, share in by_count.items() if count < best["replicas"])


def test_a_target_that_a_lone_request_misses_is_impossible() -> None:
    with engine_fault(r"no number of replicas .* alone .* 99\.0% are wanted .* try --ttft-ms"):
        fewest_replicas(scenario(targets=LatencyTargets(0.001, None)))


def test_goodput_falls_as_load_grows() -> None:
    shares = [run["goodput_share"] for run in sweep(scenario(), [0.5, 4.0, 16.0])]
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize(
    "change", [{"replicas": 0}, {"placement": "x"}, {"config": replace(EngineConfig(), policy="x")}]
)
def test_what_does_not_exist_is_refused(change: dict[str, Any]) -> None:
    with engine_fault(r"not 0|unknown"):
        scenario(**change).run()
