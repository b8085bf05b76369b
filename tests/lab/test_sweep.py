"""Sweeps: the knee, whose turn it is, what a point sends and counts, what is simulated beside it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.lab.bench import sweep_load
from pageturner.lab.bench.client import ResponseTimes
from pageturner.lab.bench.sweep import (
    FIGURES,
    LoadSweep,
    Sweeper,
    SweepPoint,
    SweepResults,
    SweptServer,
    knee,
    tied,
)
from pageturner.lab.bench.sweep_forecast import SimulatedServer, scheduler_settings
from pageturner.lab.bench.sweep_load import (
    PointBounds,
    PointRun,
    SentRequest,
    point_figures,
    point_seed,
)
from pageturner.lab.bench.sweep_servers import ask_models, key_of, named
from pageturner.lab.commands import bench_sweep
from pageturner.lab.reporting import sweep_page
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import TrafficRequest
from support.refusals import engine_fault
from support.sweeps import FAILED, figures, results

# -- knee ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ([], None),
        ([(100, 10)], None),
        ([(100, 10), (190, 12), (300, 20)], None),  # still gaining
        ([(100, 10), (190, 12), (195, 40), (196, 90)], 1),
        ([(100, 10), (80, 12)], 0),  # it falls
        ([(100, 10), (104, 9), (200, 20), (201, 30)], 2),  # no gain, but nobody waits longer either
        ([(100, 10), (105, 30)], None),  # 5 % is a gain
        ([(100, 10), (95, 20), (200, 30), (201, 60)], 2),  # what was lost comes back
    ],
)
def test_the_knee(points: list[tuple[float, float]], found: int | None) -> None:
    assert knee(points) == found


def test_spreads_that_overlap_are_tied() -> None:
    assert tied((1, 3), (3, 5))
    assert not tied((1, 2.9), (3, 5))
    assert tied((1, 9), (3, 5))


# -- whose turn it is ----------------------------------------------------------------------------------------


class Scripted:
    """Runs points of servers that get no faster from some load on; notes the order."""

    def __init__(self, limits: dict[str, float], failing: tuple[str, float] = ("", 0.0)) -> None:
        self.order: list[tuple[str, float, int]] = []
        self.limits, self.failing = limits, failing

    def __call__(
        self, server: SweptServer, sweep: LoadSweep, at: float, number: int, turn: int
    ) -> dict[str, Any]:
        self.order.append((server.name, at, turn))
        if (server.name, at) == self.failing:
            return figures(0.0, **FAILED)
        limit = self.limits[server.name]
        return figures(100 * min(at, limit) + turn, 10.0 * max(1.0, at / limit))


def swept(script: Scripted, sweep: LoadSweep, rounds: int = 2, **more: Any) -> Sweeper:
    servers = [SweptServer(name) for name in script.limits]
    found = Sweeper(
        servers, script, rounds, deadline=float("inf"), clock=itertools.count().__next__
    )
    for name, value in more.items():
        setattr(found, name, value)
    found.sweep(sweep)
    return found


def test_servers_take_turns_in_every_round() -> None:
    script = Scripted({"a": 9, "b": 9})
    swept(script, LoadSweep("concurrency", [1, 4]))
    assert script.order == [
        ("a", 1, 0),
        ("b", 1, 0),
        ("a", 1, 1),
        ("b", 1, 1),
        ("a", 4, 0),
        ("b", 4, 0),
        ("a", 4, 1),
        ("b", 4, 1),
    ]


def test_automatic_loads_double_to_the_knee_of_each() -> None:
    script, sweep = Scripted({"a": 2, "b": 8}), LoadSweep("concurrency")
    swept(script, sweep, rounds=1)
    seen = {name: [at for other, at, _ in script.order if other == name] for name in "ab"}
    assert seen == {"a": [1, 2, 4], "b": [1, 2, 4, 8, 16]}
    assert (sweep.knee("a"), sweep.knee("b")) == (2, 8)
    script, sweep = Scripted({"a": 1000}), LoadSweep("concurrency", most=20)
    swept(script, sweep, rounds=1)
    assert [point.at for point in sweep.points] == [1, 2, 4, 8, 16]
    assert sweep.knee("a") is None


def test_a_server_that_fails_is_said_and_the_others_go_on() -> None:
    script = Scripted({"a": 9, "b": 9}, failing=("a", 2))
    found = swept(script, LoadSweep("concurrency", [1, 2, 4]))
    assert [one for one in script.order if one[1] > 1] == [
        ("a", 2, 0),
        ("b", 2, 0),
        ("b", 2, 1),
        ("b", 4, 0),
        ("b", 4, 1),
    ]
    assert "HTTP 500" in found.servers[0].failed
    assert found.notes[0].startswith("a answered nothing at 2 clients")


def test_no_run_begins_behind_the_deadline() -> None:
    script, sweep = Scripted({"a": 9, "b": 9}), LoadSweep("rate", [1, 2, 4])
    found = swept(script, sweep, deadline=5)
    assert len(script.order) == 5
    assert "--total-seconds" in found.notes[0]
    assert sweep.points[1].rounds.keys() == {"a"}


# -- what a point sends and counts ---------------------------------------------------------------------------


class Server:
    """A client of a server that takes `seconds` for a request; error: what it always says."""

    def __init__(self, seconds: float = 0.01, error: str | None = None) -> None:
        self.seconds, self.error, self.open, self.most = seconds, error, 0, 0
        self.asked: list[str] = []

    async def complete(
        self, prompt: str, max_tokens: int, forced_end: int | None, times: ResponseTimes
    ) -> ResponseTimes:
        times.begin = time.monotonic()
        self.asked.append(prompt)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.open -= 1
        times.error, times.end = self.error, time.monotonic()
        times.chunks, times.tokens, times.prompt_tokens = [times.end], max_tokens, 3
        return times


def words(count: int = 10_000) -> Iterator[TrafficRequest]:
    return (TrafficRequest(f"p{number}", None, 4) for number in range(count))


def closed(server: Server, clients: int, bounds: PointBounds) -> PointRun:
    return asyncio.run(sweep_load.closed_point(server, words(), clients, bounds, lambda n: None))  # type: ignore[arg-type]


def test_a_closed_loop_keeps_so_many_requests_open() -> None:
    server = Server()
    run = closed(server, 3, PointBounds(60.0, requests=6))
    assert server.most == 3
    assert [one.ramp for one in run.sent] == [True] * 3 + [False] * 6
    found = point_figures(run, {"e2e": 60_000.0})
    assert (found["requests"], found["answered"], found["counted"], found["errors"]) == (9, 9, 6, 0)
    assert (found["goodput_share"], found["ramp_counts"]) == (1.0, False)


def test_whoever_never_answers_is_given_up() -> None:
    run = closed(Server(seconds=3600), 2, PointBounds(0.05))
    found = point_figures(run, {})
    assert (found["answered"], found["unanswered"], found["output_tokens_per_s"]) == (0, 2, 0.0)
    assert found["ttft_ms_p99"] >= 4 * 50, "they had waited that long at least"
    assert found["ramp_counts"]


def test_whoever_only_fails_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_load, "PAUSE", 0.0)
    server = Server(seconds=0.0, error="HTTP 500: no")
    found = point_figures(closed(server, 2, PointBounds(3600.0)), {"ttft": 5.0})
    assert len(server.asked) <= sweep_load.ENOUGH_ERRORS + 1
    assert found["errors"] == found["requests"]
    assert found["messages"] == ["HTTP 500: no"]
    assert found["goodput_share"] == 0.0


def test_an_open_loop_sends_at_poisson_times() -> None:
    bounds = PointBounds(2.0, requests=5)
    times = list(sweep_load.arrivals(100.0, bounds, 7))
    assert len(times) == 5
    assert times[0] == 0.0
    assert times == sorted(times) == list(sweep_load.arrivals(100.0, bounds, 7))
    many = list(sweep_load.arrivals(50.0, PointBounds(4.0), 1))
    assert 140 < len(many) < 260
    assert many[-1] <= 4.0
    server = Server()
    run = asyncio.run(sweep_load.open_point(server, words(), 100.0, bounds, 7, lambda n: None))  # type: ignore[arg-type]
    assert (len(run.sent), point_figures(run, {})["counted"]) == (5, 5)


def sent(begin: float, chunks: list[float], tokens: int, **more: Any) -> SentRequest:
    end = chunks[-1] if chunks else 0.0
    return SentRequest(
        TrafficRequest("x", None, tokens), ResponseTimes(begin, end, chunks, tokens=tokens), **more
    )


def test_figures_of_a_run() -> None:
    ramp = sent(0.0, [9.0, 10.0], 11, ramp=True)
    good = sent(10.0, [10.5, 12.5], 5)
    late = sent(10.0, [12.0, 16.0], 9)  # half of it behind the end of what is counted
    run = PointRun(0.0, stop=14.0, cut=16.0, sent=[ramp, good, late])
    found = point_figures(run, {"ttft": 1000.0})
    assert found["output_tokens_per_s"] == pytest.approx((11 + 5 + 1 + 8 / 2) / 14)
    assert (found["ttft_ms_p50"], found["tpot_ms_p99"]) == (
        pytest.approx(1250.0),
        pytest.approx(500.0),
    )
    assert found["goodput_share"] == 0.5
    assert found["requests_per_s"] == pytest.approx(found["output_tokens_per_s"] / (25 / 3))


def load(*flags: str) -> sweep_load.SweepLoad:
    parser = argparse.ArgumentParser()
    bench_sweep.add_arguments(parser)
    return sweep_load.load_from_flags(parser.parse_args(list(flags)), 0)


def prompts(made: sweep_load.SweepLoad, seed: int, count: int = 5) -> list[str]:
    return [one.text for one in itertools.islice(made.make(seed), count)]


def test_every_point_has_prompts_of_its_own(tmp_path: Path) -> None:
    workload, trace = tmp_path / "w.jsonl", tmp_path / "t.jsonl"
    workload.write_text(
        '{"prompt": "Who?", "max_tokens": 3}\n{"prompt": "Why?", "max_tokens": 4}\n'
    )
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 2}\n')
    for made in (load(), load("--workload", str(workload)), load("--trace", str(trace))):
        assert prompts(made, 1) == prompts(made, 1)
        assert not set(prompts(made, 1)) & set(prompts(made, 2))
        assert len(set(prompts(made, 1))) == 5
    assert prompts(load("--workload", str(workload)), 7, 2) == ["7.0: Who?", "7.0: Why?"]
    assert (
        len({point_seed(*each) for each in itertools.product(range(2), range(24), range(9))}) == 432
    )
    with engine_fault("not both"):
        load("--workload", str(workload), "--trace", str(trace))


# -- what is simulated ---------------------------------------------------------------------------------------

ABOUT = {
    "config": msgspec.to_builtins(EngineConfig(max_num_seqs=4)),
    "blocks": 500,
    "window": 0,
    "recent": 0,
    "max_model_len": 512,
}
COST = CalibratedCost([0.01, 0, 0.0001, 0, 0, 0, 0], (0, 0), 99, 0.0, ABOUT)


def test_the_simulator_has_the_knee_where_places_end() -> None:
    engine = SimulatedServer.of(COST, {})
    speeds = [
        engine.point("concurrency", clients, [(16, 20), (18, 22)], PointBounds(20.0), 1, {})
        for clients in (1, 2, 4, 8)
    ]
    assert all(set(FIGURES) <= set(one) for one in speeds), "as measured ones have"
    tokens = [one["output_tokens_per_s"] for one in speeds]
    assert tokens[1] > 1.8 * tokens[0]
    assert tokens[2] > 1.8 * tokens[1]
    assert tokens[3] == pytest.approx(tokens[2], rel=0.1)
    assert speeds[3]["ttft_ms_p99"] > 5 * speeds[2]["ttft_ms_p99"]
    assert SimulatedServer.of(COST, {"max_num_seqs": 8}).config.max_num_seqs == 8
    assert engine.fitting([(16, 16)]) == 250
    idle = engine.point("rate", 0.5, [(16, 20)], PointBounds(20.0), 1, {"ttft": 1000.0})
    assert idle["goodput_share"] == 1.0
    assert 0.3 * 20 < idle["output_tokens_per_s"] < 0.9 * 20
    assert engine.point("concurrency", 1, [(900, 20)], PointBounds(1.0), 1, {}) == {}, (
        "too long for it"
    )


def test_settings_of_the_scheduler_are_taken_from_flags() -> None:
    assert scheduler_settings("--policy static --threads 1 --port 9") == {"policy": "static"}
    assert scheduler_settings("") == {}


def test_errors_of_forecasts() -> None:
    sweep = LoadSweep("rate", points=[SweepPoint(1.0, {"a": [figures(100)]}), SweepPoint(2.0)])
    told = [SweepPoint(1.0, {"a": [figures(90)]}), SweepPoint(2.0)]
    found = SweepResults([], [sweep], {}, 1, {}, [], forecasts={(0, "a"): told})
    assert found.errors(0, "a", "output_tokens_per_s") == [pytest.approx(-0.1)]


# -- names, the table, JSON ----------------------------------------------------------------------------------


def test_names_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(["a=http://x", "b b=y=z"], "--server", "URL") == {"a": "http://x", "b b": "y=z"}
    for words in (["http://x"], ["=y"], ["a=1", "a=2"], ["a\n=1"]):
        with engine_fault():
            named(words, "--server", "URL")
    monkeypatch.setenv("PAGETURNER_SWEEP_KEY_LLAMA_CPP", "secret")
    assert (key_of("llama-cpp"), key_of("other")) == ("secret", "")


class Models(BaseHTTPRequestHandler):
    """A server that lists one model to whoever has the key."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer secret"
        body = b'{"data": [{"id": "m", "max_model_len": 512}]}' if known else b"{}"
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def test_models_are_asked_for_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server = SweptServer("x", f"http://127.0.0.1:{listening.server_port}/v1")
        with engine_fault("set PAGETURNER_SWEEP_KEY_X"):
            ask_models(server)
        monkeypatch.setenv("PAGETURNER_SWEEP_KEY_X", "secret")
        ask_models(server)
        assert (server.model, server.context) == ("m", 512)
        listening.shutdown()


def test_the_table_fits_a_hundred_columns() -> None:
    found = results()
    for server in found.servers:
        for point in found.sweeps[0].points:
            if server.name in point.rounds:
                point.rounds[server.name * 5] = point.rounds.pop(server.name)
        server.name *= 5
    found.sweeps[0].points.append(replace(found.sweeps[0].points[0], at=12800.0))
    found.forecasts.clear()
    shown = sweep_page.table(found, 0)
    assert max(map(len, shown.splitlines())) <= 100
    assert "2 knee" in sweep_page.table(results(), 0)
    assert "simulated" in sweep_page.table(results(), 0)


def test_what_is_a_lower_bound_looks_like_one() -> None:
    point = SweepPoint(1.0, {"a": [figures(10, 500.0, unanswered=1)], "b": [figures(10, 500.0)]})
    shown = [sweep_page.figure_text(point, name, "ttft_ms_p99") for name in "ab"]
    assert shown == ["≥500", "500"]
    assert sweep_page.figure_text(point, "a", "tpot_ms_p99") == "500"


def test_what_is_said_of_a_sweep() -> None:
    found = results()
    ranking, *each = sweep_page.verdict(found, found.sweeps[0])
    assert ranking.startswith("ours gives most: 182 output tokens/s at 2 clients, 3.57x evil")
    assert "ours has its knee at 2 clients: 182 tokens/s" in each[0]
    assert "no knee was reached" in each[1]
    points = found.sweeps[0].points
    points[0].rounds[found.servers[1].name] = [figures(170), figures(190)]
    assert "are tied" in sweep_page.verdict(found, found.sweeps[0])[0]


def test_answers_that_are_shorter_are_said() -> None:
    found = results()
    assert sweep_page.answers_differ(found) == []
    found.sweeps[0].points[0].rounds["ours"] = [figures(100, answer_tokens=6.0)]
    (said,) = sweep_page.answers_differ(found)
    assert said.startswith("answers of ours are shorter than asked: 6.0 tokens on average at 1 cl")


def test_the_json_file() -> None:
    data = json.loads(msgspec.json.encode(results().as_json()))
    assert data["schema"] == 1
    assert set(data) == {
        "schema",
        "about",
        "interrupted",
        "rounds",
        "goodput_targets_ms",
        "notes",
        "forecast",
        "servers",
        "sweeps",
    }
    assert [set(one) for one in data["servers"]] == [
        {"name", "url", "model", "started_with", "failed"}
    ] * 2
    sweep = data["sweeps"][0]
    assert set(sweep) == {"over", "unit", "points", "knees", "forecast_errors"}
    assert sweep["knees"]["ours"] == 2.0
    ours = sweep["points"][0]["servers"]["ours"]
    assert ours["median"]["output_tokens_per_s"] == 102.0
    assert ours["least_and_most"]["output_tokens_per_s"] == [100.0, 104.0]
    assert ours["forecast"]["output_tokens_per_s"] == 90.0
    assert len(ours["rounds"]) == 2
    failed = sweep["points"][1]["servers"][data["servers"][1]["name"]]
    assert (failed["errors"], failed["median"]["ttft_ms_p99"]) == (5, None)
    errors = sweep["forecast_errors"]["ours"]["output_tokens_per_s"]
    assert errors["least"] == pytest.approx(90 / 102 - 1)


def test_the_documented_fields_are_those_of_the_file() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    data = results().as_json()
    point = data["sweeps"][0]["points"][0]["servers"]["ours"]
    for name in (*data, *data["servers"][0], *data["sweeps"][0], *point, *FIGURES):
        assert f"`{name}`" in text, name
