"""Replicas that end, and that come and go with the load: every request is answered, and its price is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation import simulator as simulator_module
from pageturner.lab.simulation.fleet import Roles
from pageturner.lab.simulation.replica_changes import (
    Autoscaling,
    Failures,
    ReplicaEvent,
    read_events,
)
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import OpenLoop, Pieces, TrafficRequest
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from support.refusals import engine_fault

COST = CalibratedCost([1e-2, 0, 1e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})
BASE = Scenario(
    EngineConfig(max_num_batched_tokens=512, max_num_seqs=8),
    KVSizes(400),
    1000,
    COST,
    lambda rate: SyntheticTraffic(80, 6.0 * rate, 200, 60).open_loop(),
    LatencyTargets(1.0),
    replicas=4,
)


def run(**change: Any) -> dict[str, Any]:
    return replace(BASE, **change).run(progress=False)


def ends(*events: ReplicaEvent, **change: Any) -> Failures:
    return Failures(events=events, **change)


# 41 tokens, the first after 42 ms, then one each 10.1 ms
ONE = TrafficRequest(Pieces(((1, 320),)), 41, 64)


def test_a_stream_goes_on_at_its_next_token() -> None:
    """The replica ends after 0.2 s: the other one computes prompt and answer so far, and goes on."""
    change: dict[str, Any] = {"replicas": 2, "traffic": lambda rate: OpenLoop([ONE])}
    whole = run(**change)
    moved = run(failures=ends(ReplicaEvent(0.2, 0, "end"), delay=0.05), **change)
    found = moved["turnover"]
    assert (found["streams_moved"], found["replicas_failed"], found["tokens_lost"]) == (1, 1, 0)
    assert moved["ttft_ms"] == whole["ttft_ms"]
    assert moved["output_tokens"] == whole["output_tokens"] == 41
    before = 1 + int((0.2 - 0.042) / 0.0101)  # tokens that it had
    assert found["tokens_recomputed"] == 320 + before - 1
    first = 0.2 + 0.05 + 1e-2 + 1e-4 * (320 + before)
    assert moved["e2e_s"]["max"] == pytest.approx(first + (41 - before - 1) * 0.0101)
    assert found["longest_gap_ms"]["max"] == pytest.approx(
        1e3 * (first - 0.042 - (before - 1) * 0.0101)
    )


def test_without_moving_it_begins_again() -> None:
    change: dict[str, Any] = {"replicas": 2, "traffic": lambda rate: OpenLoop([ONE])}
    again = run(failures=ends(ReplicaEvent(0.2, 0, "end"), move=False, delay=0.05), **change)
    found = again["turnover"]
    assert (found["streams_moved"], found["streams_restarted"]) == (0, 1)
    assert found["tokens_lost"] == 1 + int((0.2 - 0.042) / 0.0101)
    assert again["ttft_ms"]["max"] == pytest.approx(1e3 * (0.25 + 0.042))
    assert again["output_tokens"] == 41


def test_what_the_other_replica_has_is_found() -> None:
    """Both replicas were sent the prompt: of a moved stream only its tail is computed again."""
    both = [
        replace(ONE, output=2),
        replace(ONE, output=2, arrival=0.001),
        replace(ONE, arrival=1.0),
    ]
    change: dict[str, Any] = {"replicas": 2, "placement": "round_robin"}
    found = run(
        traffic=lambda rate: OpenLoop(both), failures=ends(ReplicaEvent(1.1, 0, "end")), **change
    )["turnover"]
    assert found["streams_moved"] == 1
    assert 0 < found["tokens_recomputed"] < 40


def test_a_drained_replica_ends_what_it_has() -> None:
    change: dict[str, Any] = {"replicas": 2, "traffic": lambda rate: OpenLoop([ONE])}
    whole = run(**change)
    drained = run(failures=ends(ReplicaEvent(0.2, 0, "drain"), grace=5.0), **change)
    assert drained["e2e_s"] == whole["e2e_s"]
    assert drained["turnover"]["streams_moved"] == 0
    hurried = run(failures=ends(ReplicaEvent(0.2, 0, "drain"), grace=0.1), **change)
    assert hurried["turnover"]["streams_moved"] == 1
    assert hurried["output_tokens"] == 41


@pytest.mark.parametrize("roles", [None, Roles(prefill=1, token_seconds=1e-4, latency=0.05)])
@pytest.mark.parametrize("move", [True, False])
def test_failures_cost_time_and_no_answer(move: bool, roles: Roles | None) -> None:
    whole = run(roles=roles)
    failures = Failures(per_hour=900.0, back=1.0, move=move)
    found = run(roles=roles, failures=failures)
    for name in ("requests", "refused", "output_tokens"):
        assert found[name] == whole[name]
    assert found["turnover"]["replicas_failed"] > 3
    assert found["e2e_s"]["mean"] > whole["e2e_s"]["mean"]
    assert found == run(roles=roles, failures=failures)


def test_while_no_replica_is_there_requests_wait() -> None:
    events = (ReplicaEvent(0.2, 0, "end"), ReplicaEvent(5.0, 0, "start"))
    change: dict[str, Any] = {"replicas": 1, "traffic": lambda rate: OpenLoop([ONE])}
    found = run(failures=ends(*events), **change)
    assert found["output_tokens"] == 41
    assert 5.0 < found["e2e_s"]["max"] < 6.0
    gone = run(failures=ends(events[0], per_hour=60.0), **change)
    assert gone["refused"] == gone["requests"] == 1, "nobody comes back, and nobody waits for ever"


@pytest.mark.slow
def test_replicas_follow_the_load() -> None:
    """One is too few, and fewer than the six that may be had are enough."""
    made = SyntheticTraffic(500, 3.0, 200, 40)
    scaling = Autoscaling(1, 6, start=10.0, up=5.0, down=30.0)
    change: dict[str, Any] = {
        "cost": CalibratedCost([0.1, 0, 1e-3, 0, 0, 0, 0], (0, 0), 1, 0.0, {}),
        "traffic": lambda rate: made.open_loop(),
        "targets": LatencyTargets(5.0, 0.2),
    }
    scaled, fixed = run(scaling=scaling, replicas=6, **change), run(replicas=1, **change)
    found = scaled["turnover"]
    assert scaled["output_tokens"] == fixed["output_tokens"]
    assert found["replicas_added"] > 0
    assert 1 < found["replicas_mean"] < found["replicas_most"] <= 6
    assert found["replica_seconds"] == pytest.approx(found["replicas_mean"] * scaled["seconds"])
    assert scaled["goodput_share"] > fixed["goodput_share"]
    assert repr(scaled) == repr(run(scaling=scaling, replicas=6, **change))  # no gaps: nan


def test_long_prompts_get_replicas_while_places_are_empty() -> None:
    """256 places of which a few are taken: goodput says that one replica is too few."""
    made = SyntheticTraffic(300, 8.0, 3000, 20)
    change: dict[str, Any] = {
        "config": EngineConfig(max_num_batched_tokens=512, max_num_seqs=256),
        "sizes": KVSizes(4000),
        "max_model_len": 8000,
        "traffic": lambda rate: made.open_loop(),
        "targets": LatencyTargets(2.0, 0.1),
    }
    scaling = Autoscaling(2, 8, start=10.0, up=5.0, down=30.0, goal=0.9)
    scaled, fixed = run(scaling=scaling, replicas=8, **change), run(replicas=2, **change)
    assert scaled["turnover"]["replicas_added"] > 0
    assert scaled["goodput_share"] > fixed["goodput_share"]


def test_who_is_not_needed_goes() -> None:
    """A burst, then hardly anything: those that were added leave, and nobody notices."""
    burst = SyntheticTraffic(400, 20.0, 200, 100).open_loop().requests
    after = [replace(ONE, arrival=60.0 + 10.0 * i) for i in range(30)]
    scaling = Autoscaling(1, 6, start=5.0, up=2.0, down=20.0)
    found = run(scaling=scaling, replicas=6, traffic=lambda rate: OpenLoop([*burst, *after]))
    assert found["requests"] == 430
    assert found["turnover"]["replicas_removed"] == found["turnover"]["replicas_added"] > 0


def test_replicas_that_sleep_keep_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """More replicas than are kept awake: the same steps, the same answers."""
    made = SyntheticTraffic(40, 5.0, 100, 20).sessions(3, 1.0)
    change: dict[str, Any] = {"replicas": 30, "traffic": lambda rate: made, "max_model_len": 2000}
    awake = run(**change)
    monkeypatch.setattr(simulator_module, "MAX_AWAKE", 0)
    assert run(**change) == awake
    assert awake["engines"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"roles": Roles(prefill=1, token_seconds=1e-4, latency=0.05)},
        {"failures": Failures(per_hour=900.0)},
        {"scaling": Autoscaling(1, 4)},
    ],
    ids=["roles", "failures", "autoscaling"],
)
def test_loads_in_tokens_are_refused_where_replicas_have_roles_or_come_and_go(
    change: dict[str, Any],
) -> None:
    with engine_fault(code="bad_setting") as caught:
        run(loads="tokens", **change)
    assert caught.value.message == (
        "loads are counted in requests where replicas have roles, or come and go: leave --loads tokens out"
    )
    assert run(loads="requests", **change)["requests"] == run(loads="tokens")["requests"] == 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "truncated"),
        ('{"at": 1, "replica": 4, "event": "end"}', "replicas are 0 to 3"),
        ('{"at": -1, "replica": 0, "event": "end"}', "at is 0 or more"),
        ('{"at": 1, "replica": 0, "event": "nap"}', "nap"),
        ('{"at": 1, "replica": 0}', "event"),
    ],
)
def test_events_that_cannot_be_are_refused_with_their_line(
    tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "events"
    path.write_text(f'{{"at": 1, "replica": 3, "event": "drain"}}\n\n{line}\n')
    with engine_fault(said) as caught:
        read_events(path, 4)
    assert "events:3" in caught.value.message
