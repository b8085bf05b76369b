"""Recorded runs: replayed exactly, measured, sent again; what differs or lacks is said."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import engine_again, make_engine
from pageturner.lab.bench import engine_bench
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation import calibration, log_replay, recorded_runs
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic_generators import TokenPrompts, burst_times
from pageturner.params import SamplingParams
from pageturner.request import Request, SessionHint
from pageturner.telemetry import step_log
from pageturner.telemetry.step_log import Arrived, Header, Left, LostRecords, Record, StepRecord
from support import smollm2
from support.refusals import engine_fault


def record(path: Path, seed: int = 0, longest: int = 40, **settings: Any) -> None:
    """A random crowd on the fake engine: late arrivals, aborts, shared prefixes, pins, drafts or not."""
    dice = random.Random(seed)
    engine = make_engine(
        EngineConfig(**{"backend": "fake", "step_log": str(path)} | settings)
    ).engine
    ids = iter(range(1, 1000))
    coming = 14
    while coming or engine.has_work:
        if coming and dice.random() < 0.8:
            coming -= 1
            prompt = (
                *range(dice.choice([3, 20, 45])),
                *dice.choices(range(300), k=dice.randint(1, 30)),
            )
            params = SamplingParams(max_tokens=dice.randint(1, longest), stop_ids=(3,), seed=seed)
            if dice.random() < 0.15 and settings.get("policy") not in ("static", "window"):
                params = replace(params, beam_width=3, stop_ids=(3,))
            engine.submit(
                Request(next(ids), prompt, params, engine.clock(), priority=dice.randint(0, 2))
            )
        engine.step()
        if dice.random() < 0.05:
            engine.abort(dice.randint(1, 14))
    engine.close()


SETTINGS: list[dict[str, Any]] = [
    {
        "policy": policy,
        "order": order,
        "kv_cache_memory": blocks * 16,
        "max_num_batched_tokens": budget,
        "max_model_len": 200,
        "static_patience": 0.001,
        "window_ms": 1.0,
        "max_num_seqs": 6,
    }
    for policy, order, blocks, budget in (
        ("chunked", "fcfs", 18, 32),
        ("chunked", "priority", 400, 512),
        ("prefill_first", "fcfs", 14, 64),
        ("served_ratio", "fcfs", 400, 64),
        ("orca", "priority", 30, 64),
        ("window", "fcfs", 400, 64),
        ("static", "fcfs", 60, 64),
        ("adaptive_chunk", "sjf", 400, 64),
        ("chunked", "fair", 500, 32),
        ("chunked", "prefix", 600, 32),
        ("chunked", "adaptive", 700, 32),
        ("chunked", "deadline", 800, 32),
    )
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: f"{s['policy']}-{s['kv_cache_memory']}"
)
@pytest.mark.parametrize("tokens", [False, True])
def test_plans_are_the_same_when_told_the_recorded_times(
    tmp_path: Path, settings: dict[str, Any], tokens: bool
) -> None:
    path = tmp_path / "steps"
    scarce = settings["kv_cache_memory"] < 20 * 16
    record(path, longest=100 if scarce else 40, **settings, step_log_tokens=tokens)
    run = recorded_runs.last_run(path)
    found = log_replay.replay_plans(run)
    assert found.differences == []
    assert found.compared == len(list(run.steps)) > 30
    if scarce and settings["policy"] == "chunked":
        assert any(step.preempted for step in run.steps), "the memory was to be too small"


@pytest.mark.parametrize("tokens", [False, True])
def test_what_sessions_say_is_replayed(tmp_path: Path, tokens: bool) -> None:
    """Who waits for whom, and whose blocks go, follows from what is in the log."""
    path, dice, now = tmp_path / "steps", random.Random(7), itertools.count()
    config = EngineConfig(
        backend="fake",
        step_log=str(path),
        step_log_tokens=tokens,
        kv_cache_memory=30 * 16,
        max_model_len=200,
        session_wait=0.8,
    )
    engine = make_engine(config).engine
    engine.clock = lambda: next(now) / 100
    said: dict[str, tuple[int, ...]] = {}
    for id in range(1, 150):
        name = dice.choice("abcdef")
        prompt = (*said.get(name, ())[-120:], *dice.choices(range(300), k=dice.randint(1, 40)))
        said[name] = prompt
        hint = SessionHint(
            name,
            dice.choice(("red", "blue")),
            dice.choice((0.0, 2.0, 9.0)),
            dice.choice((0.0, 0.5)),
            dice.choice(("", "", "b")),
            dice.random() < 0.2,
            dice.random() < 0.1,
        )
        params = SamplingParams(max_tokens=dice.randint(1, 20), ignore_eos=True, seed=id)
        engine.submit(
            Request(
                id, prompt, params, engine.clock(), session=hint if dice.random() < 0.8 else None
            )
        )
        for _ in range(dice.randint(1, 12)):
            engine.step()
        if dice.random() < 0.1:
            engine.release_session(dice.choice("abcdef"))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (
        min(
            stats["session_turns_found"],
            stats["session_turns_missed"],
            stats["session_blocks_given_up"],
        )
        > 5
    )
    engine.close()
    found = log_replay.replay_plans(recorded_runs.last_run(path))
    assert (found.differences, found.compared > 300) == ([], True)


@pytest.mark.parametrize("order", ["fcfs", "sjf", "fair", "adaptive", "deadline"])
def test_refusals_and_deadlines_are_replayed(tmp_path: Path, order: str) -> None:
    """A replay makes no forecasts: it does as the engine did, and forecasts left no trace in the plans."""
    path, dice, now = tmp_path / "steps", random.Random(order), itertools.count()
    config = EngineConfig(backend="fake", step_log=str(path), order=order, max_num_seqs=3)
    engine = make_engine(config).engine
    engine.clock = lambda: next(now) / 1000
    ends: Counter[str] = Counter()
    for id in range(1, 120):
        at, prompt = engine.clock(), tuple(dice.choices(range(300), k=dice.randint(1, 60)))
        targets = {"ttft_target": dice.uniform(0.01, 0.3), "deadline": at + dice.uniform(0.02, 0.6)}
        params = SamplingParams(max_tokens=dice.randint(1, 40), seed=id)
        tenant = dice.choice(("red", "blue"))
        events = engine.submit(Request(id, prompt, params, at, tenant=tenant, **targets))
        for _ in range(dice.randint(1, 4)):
            events += engine.step()
        ends.update(event.failure.code for event in events if event.failure is not None)
    while engine.has_work:
        engine.step()
    engine.close()
    assert ends["ttft_target_unreachable"] + ends["deadline_unreachable"] > 9, ends
    assert ends["deadline_exceeded"] > 3, ends
    found = log_replay.replay_plans(recorded_runs.last_run(path))
    assert (found.differences, found.compared > 100) == ([], True)


def changed(path: Path, change: Any) -> recorded_runs.RecordedRun:
    """The last run with each record that `change` gives something for replaced."""
    run = recorded_runs.last_run(path)
    run.records = [change(one) or one for one in run.records]
    return run


def test_a_plan_that_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    record(path, longest=100, **SETTINGS[0])
    steps = list(recorded_runs.last_run(path).steps)
    place = next(i for i, step in enumerate(steps) if i > 10 and step.items)
    wrong = replace_item(steps[place], n=99)
    found = log_replay.replay_plans(
        changed(path, lambda one: wrong if one == steps[place] else None)
    )
    assert found.differences[0].startswith(f"step {place + 1}: (id, index, n, computed) is ")
    victim = next(i for i, step in enumerate(steps) if step.preempted)
    other = msgspec.structs.replace(steps[victim], preempted=[])
    found = log_replay.replay_plans(
        changed(path, lambda one: other if one == steps[victim] else None)
    )
    assert found.differences[0].startswith(f"step {victim + 1}: preempted [")


def replace_item(step: StepRecord, **change: Any) -> StepRecord:
    items = [msgspec.structs.replace(step.items[0], **change), *step.items[1:]]
    return msgspec.structs.replace(step, items=items)


def test_answers_are_the_same_and_one_that_is_not_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    record(path, **SETTINGS[0], step_log_tokens=True)
    found = log_replay.replay_tokens(recorded_runs.last_run(path), progress=False)
    assert found.differences == []
    assert found.compared > 8
    step = next(
        s
        for s in recorded_runs.last_run(path).steps
        if s.items and s.items[0].tokens and not s.ended
    )
    wrong = replace_item(step, tokens=[step.items[0].tokens[0] + 1])
    found = log_replay.replay_tokens(
        changed(path, lambda one: wrong if one == step else None), progress=False
    )
    assert len(found.differences) == 1
    assert f"request {step.items[0].id}: token " in found.differences[0]


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    record(path, **SETTINGS[1])
    run = recorded_runs.last_run(path)
    with engine_fault("digests instead of tokens"):
        log_replay.replay_tokens(run)
    run.records.insert(5, LostRecords(3))
    with engine_fault("lacks 3 records"):
        log_replay.replay_plans(run)
    record(tmp_path / "other", step_log_tokens=True)
    run = recorded_runs.last_run(tmp_path / "other")
    run.header = msgspec.structs.replace(run.header, fingerprint="another")
    with engine_fault("the log is of another"):
        log_replay.replay_tokens(run)
    run.header = msgspec.structs.replace(run.header, model="12-ab")
    with engine_fault("the log is of the model 12-ab, and "):
        log_replay.replay_tokens(run)


def header(**change: Any) -> Header:
    values: dict[str, Any] = {
        "model": "",
        "fingerprint": "f",
        "config": {"unheard_of": 1},
        "num_blocks": 50,
        "sliding": 0,
        "window": 0,
        "max_model_len": 100,
        "clock": 10.0,
        "wall": 1000.0,
        "content": "digests",
    }
    return Header(**values | change)


def arrived(at: float, id: int, **more: Any) -> Arrived:
    return Arrived(at, id, at, b"\x01\x00\x00\x00\x02\x00\x00\x00", {"max_tokens": 9}, more)


def step(start: float, end: float, gained: dict[int, list[int]], *ended: int) -> StepRecord:
    items = [step_log.ItemRecord(id, 0, 1, 2, tokens, [], False) for id, tokens in gained.items()]
    return StepRecord(
        start, end, items, len(items), 3, [], [], [(id, 0, "stop") for id in ended], 0, 1, 1
    )


def test_times_of_requests_are_those_of_the_log() -> None:
    records: list[Record] = [
        arrived(10.0, 1),
        arrived(10.5, 2),
        arrived(11.0, 3),
        step(11.0, 12.0, {1: [5], 2: [6]}),
        step(12.0, 12.5, {1: [], 2: [7, 8]}),
        Left(12.6, 3),
        step(13.0, 14.0, {1: [3], 2: [3]}, 1, 2),
    ]
    found = recorded_runs.request_metrics(recorded_runs.RecordedRun(header(), records))
    assert list(found.ttft) == [2.0, 1.5]
    assert list(found.tpot) == pytest.approx([2.0, 2.0 / 3])
    assert list(found.e2e) == [4.0, 3.5]
    assert list(found.gap) == [2.0, 1.5]
    figures = found.figures(LatencyTargets(1.6, 1.0))
    assert figures["goodput_share"] == 0.5
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 4)


def test_traffic_of_a_log_goes_on_behind_a_restart() -> None:
    before: list[Record] = [arrived(12.0, 1), arrived(13.0, 2), step(13.0, 14.0, {1: [5], 2: [6]})]
    resumed = {"resume": [{"index": 0, "tokens": [5], "cum_logprob": 0.0}]}
    after: list[Record] = [
        arrived(1.0, 1, **resumed),
        step(1.0, 2.0, {1: [7, 3]}, 1),
        arrived(3.0, 1),
    ]
    runs = [
        recorded_runs.RecordedRun(header(), before),
        recorded_runs.RecordedRun(header(clock=0.5, wall=1010.0), after),
    ]
    source = recorded_runs.recorded_traffic(runs)
    assert [(one.arrival, one.output) for one in source.requests] == [(0.0, 3), (1.0, 1)]
    assert (source.requests[0].prompt, source.requests[0].answer) == ((1, 2), (5, 7, 3))
    request = source.requests[0].engine_request(8)
    assert (request.prompt, request.params.max_tokens, request.params.forced_end) == ((1, 2), 9, 3)
    with engine_fault("no request that was answered"):
        recorded_runs.recorded_traffic([recorded_runs.RecordedRun(header(), [arrived(1.0, 1)])])


def test_logs_without_anything_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(step_log.MAGIC + bytes([step_log.VERSION]))
    with engine_fault("holds nothing yet"):
        recorded_runs.read_runs(path)
    step_log.StepLog(path, header()).close()
    with engine_fault("holds no step"):
        recorded_runs.last_run(path)
    assert recorded_runs.read_runs(path)[0].config == EngineConfig(), (
        "a setting of another version was not left out"
    )


def test_a_simulated_run_is_the_run_when_steps_take_what_they_took(tmp_path: Path) -> None:
    """A load on the fake engine in real time; its fit, and its simulation with the same lengths."""
    bench = EngineBench.load(EngineConfig(backend="fake", max_num_seqs=8))
    load = TokenPrompts(20, 12, 320).at(burst_times(30, 400.0, 1), 1)
    run = bench.measure(load, progress=False)
    found = recorded_runs.request_metrics(run)
    assert sorted(found.tokens) == sorted(one.answer_length for one in load.requests)
    steps = len([one for one in run.steps if one.items])
    cost = CalibratedCost([1e-3, 0, 0, 0, 0, 0, 0], (0, 0), steps, 0.0, {})
    check = calibration.checked(run, cost, "p")
    assert list(check.errors) == list(check.steady) == list(calibration.CHECKED)
    slow = calibration.checked(
        run, msgspec.structs.replace(cost, weights=[2e-3, 0, 0, 0, 0, 0, 0]), "p"
    )
    assert slow.drift == pytest.approx(check.drift / 2)
    assert slow.steady == pytest.approx(check.steady)
    made = calibration.predicted(run, cost)
    assert sorted(made.tokens) == sorted(found.tokens)
    assert min(made.ttft) >= 1e-3


def test_loads_keep_their_rates() -> None:
    prompts = TokenPrompts(64, 16, 99)
    found = calibration.check_loads(100.0, prompts, 400, 0)
    rates = [load.total / max(load.requests[-1].arrival, 1e-9) for load in found]
    assert rates[0] > 1e6
    assert rates[1:4] == pytest.approx([40, 70, 95], rel=0.2)
    assert rates[4] == pytest.approx(70, rel=0.4)
    load = calibration.training(100.0, prompts, 300, 0, 200)
    lengths = [len(request.prompt_tokens()) for request in load.requests]
    assert [i for i, length in enumerate(lengths) if length == 200 - 2 * 16] == list(
        range(0, 450, 12)
    )
    assert max(length for i, length in enumerate(lengths) if i % 12) == 96
    train = [request.arrival for request in load.requests]
    assert train == sorted(train)
    assert len(train) == 450
    assert train[150] == train[-1] > train[149], "not all, or not all at once"
    assert train[37] > train[149] - train[37], "nobody is ever alone"


@pytest.mark.model
def test_a_real_model_gives_the_recorded_plans_and_tokens_again(tmp_path: Path) -> None:
    """SmolLM2: a load in real time, its plans and its tokens once more."""
    path = tmp_path / "steps"
    smollm2.model_path()
    config = EngineConfig(kv_cache_memory=32 << 20, max_model_len=512, max_num_batched_tokens=64)
    built = make_engine(config)
    engine = engine_again(built, replace(config, step_log=str(path), step_log_tokens=True))
    load = TokenPrompts(60, 16, built.vocab_size).at(burst_times(10, 6.0, 3), 3)
    engine_bench.drive(engine, load.engine_requests(), engine_bench.WallClock(), lambda: None)
    engine.close()
    run = recorded_runs.last_run(path)
    assert run.header.model
    plans, tokens = log_replay.replay_plans(run), log_replay.replay_tokens(run, progress=False)
    assert plans.differences == tokens.differences == []
    assert (tokens.compared, plans.compared) == (10, len(list(run.steps)))
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with engine_fault("the log is of the model "):
        log_replay.replay_tokens(run, model=str(tmp_path / "other.gguf"))
