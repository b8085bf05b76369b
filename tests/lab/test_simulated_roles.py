"""Prompts that are computed elsewhere, simulated: the same answers, KV that is found, and its price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation.fleet import Roles
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import OpenLoop, Pieces, TrafficRequest
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic

COST = CalibratedCost([1e-3, 0, 1e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})
BASE = Scenario(
    EngineConfig(max_num_batched_tokens=512),
    KVSizes(400),
    1000,
    COST,
    lambda rate: SyntheticTraffic(80, 60.0 * rate, 200, 30).open_loop(),
    LatencyTargets(1.0),
    replicas=4,
)


def run(roles: Roles | None, **change: Any) -> dict[str, Any]:
    return replace(BASE, roles=roles, **change).run(progress=False)


def test_every_request_is_answered_once() -> None:
    apart, together = run(Roles(prefill=2)), run(None)
    for name in ("requests", "refused", "output_tokens"):
        assert apart[name] == together[name]
    assert apart["engines"]["most_open"] > 0


def test_who_answers_is_not_stalled_by_prompts() -> None:
    apart, together = run(Roles(prefill=2)), run(None)
    assert apart["longest_gap_ms"]["p99"] < together["longest_gap_ms"]["p99"] / 2


def test_one_prompt_takes_its_computation_the_link_and_a_step() -> None:
    """320 tokens, of which the answering replica finds all whole blocks but the last."""
    one = TrafficRequest(Pieces(((1, 320),)), 3, 8)
    link = 1e-3
    roles = Roles(prefill=1, token_seconds=link, latency=0.5)
    found = run(roles, replicas=2, traffic=lambda rate: OpenLoop([one]))
    computed = 1e-3 + 320e-4
    on_the_way = max(320 * link, 320 * link - computed) + 0.5
    first = 1e-3 + 16e-4  # the last block of its prompt
    assert found["ttft_ms"]["max"] == pytest.approx(1e3 * (computed + on_the_way + first))
    assert found["engines"]["cached_tokens"] == 304


def test_what_was_cached_hides_no_transfer() -> None:
    """The same prompt again, answered by another replica: hardly anything is computed, and all KV is sent."""
    each = [TrafficRequest(Pieces(((1, 320),)), 3, 8, arrival=10.0 * i) for i in range(2)]
    roles = Roles(prefill=1, token_seconds=1e-3)
    change: dict[str, Any] = {"replicas": 3, "placement": "round_robin"}
    ttft = run(roles, traffic=lambda rate: OpenLoop(each), **change)["ttft_ms"]
    alone = run(roles, traffic=lambda rate: OpenLoop(each[:1]), **change)["ttft_ms"]["max"]
    again = 2 * ttft["mean"] - alone
    assert 320 < again < alone


def test_what_is_there_already_is_not_sent() -> None:
    """The same prompt again at the same replica, which has 304 of its 320 tokens: 16 go over the link."""
    each = [TrafficRequest(Pieces(((1, 320),)), 3, 8, arrival=10.0 * i) for i in range(2)]
    roles = Roles(prefill=1, token_seconds=1e-3)
    ttft = run(roles, replicas=2, traffic=lambda rate: OpenLoop(each))["ttft_ms"]
    alone = run(roles, replicas=2, traffic=lambda rate: OpenLoop(each[:1]))["ttft_ms"]["max"]
    step = 1e-3 + 16e-4  # what is not cached of it, at the one and at the other
    assert 2 * ttft["mean"] - alone == pytest.approx(1e3 * (2 * step + 16e-3))


def test_short_prompts_stay_where_they_are_answered() -> None:
    found, together = run(Roles(prefill=1, least=10_000, latency=9.0), replicas=5), run(None)
    assert found["ttft_ms"] == together["ttft_ms"]


def test_refusals_are_counted_once() -> None:
    config = replace(BASE.config, max_queue=1, max_num_seqs=1)
    found = run(Roles(prefill=2), config=config, rate=20.0)
    assert found["refused"] > 0
    assert found["requests"] == 80
