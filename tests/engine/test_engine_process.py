"""The engine process over its channel, with the fake executor: everything the API process relies on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.fake import next_token
from pageturner.ipc.channel import (
    Abort,
    Aborted,
    Configure,
    Configured,
    Events,
    Failed,
    ForgetPrefixes,
    FromEngine,
    MessageDecoder,
    Ready,
    Stats,
    Submit,
    encode,
)
from pageturner.ipc.ledger import Ledger
from pageturner.lab.simulation import log_replay, recorded_runs
from pageturner.params import SamplingParams
from pageturner.request import Event, Request, Resume
from pageturner.telemetry import step_log

VOCAB = 320


class Process:
    """An engine process and this end of its channel."""

    def __init__(self, config: EngineConfig, **environment: str) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(60)
        self.ledger, fd = Ledger.create()
        command = [
            sys.executable,
            "-m",
            "pageturner.engine.worker",
            "--channel-fd",
            str(theirs.fileno()),
        ]
        command += ["--ledger-fd", str(fd), "--config", msgspec.json.encode(config).decode()]
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(), fd), env={**os.environ, **environment}
        )
        theirs.close()
        os.close(fd)
        self._decoder = MessageDecoder(FromEngine)
        self._messages: list[object] = []
        self.ready: object = None

    def next(self, kind: type) -> object:
        """The next message of a kind; others are dropped."""
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if isinstance(message, kind):
                    return message
            data = self.sock.recv(1 << 16)
            assert data, "the engine closed its channel"
            self._messages += self._decoder.feed(data)

    def submit(self, *requests: Request) -> None:
        self.sock.sendall(b"".join(encode(Submit(request)) for request in requests))

    def collect(self, ids: set[int]) -> dict[int, list[Event]]:
        """All events of these requests, until each has ended."""
        got: dict[int, list[Event]] = {id: [] for id in ids}
        while any(not events or events[-1].finish is None for events in got.values()):
            message = self.next(Events)
            assert isinstance(message, Events)
            for event in message.events:
                if event.id in got:
                    got[event.id].append(event)
        return got


@pytest.fixture(scope="module")
def engine() -> Iterator[Process]:
    """One that tests share: ids of their requests differ."""
    process = Process(EngineConfig(backend="fake", max_queue=4, max_num_seqs=4, max_model_len=256))
    process.ready = process.next(Ready)
    yield process
    process.sock.close()
    assert process.process.wait(60) == 0, "the engine ends when its channel closes"


def truth(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def test_it_says_ready_and_answers(engine: Process) -> None:
    ready = engine.ready
    assert isinstance(ready, Ready)
    assert (ready.max_model_len, ready.vocab_size, ready.block_size) == (256, VOCAB, 16)
    requests = [Request(n, (n, n + 1, 5), SamplingParams(max_tokens=6 + n)) for n in range(4)]
    engine.submit(*requests)
    got = engine.collect({0, 1, 2, 3})
    for request in requests:
        assert tokens(got[request.id]) == truth(request.prompt, 6 + request.id)
        assert got[request.id][0].position == 3
        assert got[request.id][-1].finish == "length"
    begun, finished, *_ = engine.ledger.read()
    assert begun == finished > 0


def test_a_resumed_request_goes_on_where_it_was(engine: Process) -> None:
    expected = truth((1, 2, 3), 10)
    resume = (Resume(0, tuple(expected[:4])),)
    engine.submit(Request(9, (1, 2, 3), SamplingParams(max_tokens=10), resume=resume))
    events = engine.collect({9})[9]
    assert tokens(events) == expected[4:]
    assert events[0].position == 7


def test_a_refusal_is_an_event(engine: Process) -> None:
    engine.submit(Request(11, tuple(range(300))), Request(12, (1,), SamplingParams(max_tokens=2)))
    got = engine.collect({11, 12})
    failure = got[11][-1].failure
    assert failure is not None
    assert failure.code == "prompt_too_long"
    assert tokens(got[12]) == truth((1,), 2)


def stats_of_idle(process: Process, generated: float) -> dict[str, float]:
    """What it tells when it falls idle, once it has made so many tokens."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stats = process.next(Stats)
        assert isinstance(stats, Stats)
        if stats.values["running"] == 0 and stats.values["generated_tokens"] >= generated:
            return dict(stats.values)
    raise AssertionError("no stats of an idle engine")


def test_abort_frees_its_blocks_and_tells_the_account() -> None:
    config = EngineConfig(backend="fake", max_model_len=4096)
    process = Process(config, PAGETURNER_FAKE_STEP_SECONDS="0.005")
    try:
        process.submit(Request(1, (1, 2), SamplingParams(max_tokens=4000)))
        process.next(Events)
        process.sock.sendall(encode(Abort(1)) + encode(Abort(77)))
        told, unknown = process.next(Aborted), process.next(Aborted)
        assert isinstance(told, Aborted)
        assert told.id == 1
        assert told.timings is not None
        seconds = told.timings.until - told.timings.received
        assert sum(told.timings.parts.values()) == pytest.approx(seconds)
        assert unknown == Aborted(77, None)
        idle = stats_of_idle(process, 1)
        assert idle["blocks_used"] == 0
        assert idle["generated_tokens"] < 4000
        process.submit(Request(2, (1, 2), SamplingParams(max_tokens=3)))
        process.collect({2})
        until = idle["generated_tokens"] + 3
        assert stats_of_idle(process, until)["generated_tokens"] == until
    finally:
        process.sock.close()
        assert process.process.wait(60) == 0


def test_what_cannot_start_says_why_and_ends() -> None:
    process = Process(EngineConfig(model="/nowhere/model.gguf"))
    try:
        message = process.next(Failed)
        assert isinstance(message, Failed)
        assert message.code == "model_not_found"
    finally:
        process.sock.close()
        assert process.process.wait(60) == 1


def test_waiting_on_purpose_is_no_stall() -> None:
    """A supervisor restarts an engine that has work and does not move; one that waits for a batch moves."""
    config = EngineConfig(backend="fake", policy="static", static_batch=2, static_patience=60.0)
    process = Process(config)
    try:
        process.next(Ready)
        first, second = (
            Request(n, (n, 5), SamplingParams(max_tokens=2), arrival=time.monotonic())
            for n in (1, 2)
        )
        process.submit(first)
        told = []
        for _ in range(2):
            process.next(Stats)
            told.append(process.ledger.read())
        assert [(begun, finished) for begun, finished, *_ in told] == [(0, 0)] * 2, (
            "it runs nothing"
        )
        assert told[0][3] < told[1][3] <= time.monotonic(), "and says that it is alive"
        process.submit(second)
        got = process.collect({1, 2})
        assert tokens(got[1]) == truth((1, 5), 2)
    finally:
        process.sock.close()
        assert process.process.wait(60) == 0


@pytest.mark.slow
def test_a_step_log_is_whole_when_the_process_ends_and_readable_when_it_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "steps"
    for killed in (False, True):
        process = Process(EngineConfig(backend="fake", step_log=str(path)))
        process.next(Ready)
        process.submit(Request(1, (5, 6, 7), SamplingParams(max_tokens=6, stop_ids=())))
        process.collect({1})
        if killed:
            while len(runs := recorded_runs.read_runs(path)) < 2 or not any(
                step.ended for step in runs[1].steps
            ):
                time.sleep(step_log.WRITE_EVERY)  # the test's own timeout ends it
            process.process.kill()
        process.sock.close()
        process.process.wait(30)
    first, second = recorded_runs.read_runs(path)
    assert [list(recorded_runs.request_metrics(run).tokens) for run in (first, second)] == [
        [6],
        [6],
    ]
    assert (
        log_replay.replay_plans(first).differences
        == log_replay.replay_plans(second).differences
        == []
    )


@pytest.mark.parametrize("running", [False, True])
def test_other_settings_in_the_middle_of_answers(tmp_path: Path, running: bool) -> None:
    """A batch of `static` ends first, nobody is lost, and the log replays to the same plans; even if that
    batch is all there was."""
    path = tmp_path / "steps"
    engine = Process(EngineConfig(backend="fake", max_model_len=256, step_log=str(path)))
    engine.next(Ready)
    params = SamplingParams(max_tokens=200)
    engine.submit(*(Request(id, (5, id, 7), params) for id in range(1, 5)))
    if running:
        engine.next(Events)
    for policy, order, most in (
        ("static", "sjf", 1),
        ("chunked", "fair", 2),
        ("orca", "deadline", 9),
    ):
        wanted = Configure(8, most, policy, order, 64)
        engine.sock.sendall(encode(wanted))
        told = engine.next(Configured)
        assert isinstance(told, Configured)
        assert told.settings == wanted
    engine.submit(Request(9, (1, 2, 3), params))
    assert engine.collect({9})[9][-1].finish == "length"
    engine.sock.close()
    assert engine.process.wait(60) == 0
    run = recorded_runs.last_run(path)
    assert sum(isinstance(record, step_log.Changed) for record in run.records) == 3
    assert list(recorded_runs.request_metrics(run).tokens) == [200] * 5
    found = log_replay.replay_plans(run)
    assert found.compared > 200
    assert found.differences == []


def test_prefixes_are_forgotten_but_for_what_is_pinned(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    engine = Process(EngineConfig(backend="fake", max_model_len=256, step_log=str(path)))
    params, pinned = SamplingParams(max_tokens=2), tuple(range(100, 164))
    prompts = {1: tuple(range(64)), 2: tuple(range(64)), 3: tuple(range(64)), 4: (*pinned, 7)}

    def cached(id: int) -> int:
        engine.submit(Request(id, prompts[id], params))
        return engine.collect({id})[id][0].cached

    engine.submit(Request(9, pinned, params, pin=True))
    engine.collect({9})
    assert [cached(1), cached(2)] == [0, 48]
    engine.sock.sendall(encode(ForgetPrefixes()))
    assert [cached(3), cached(4)] == [0, 64]
    engine.sock.close()
    assert engine.process.wait(60) == 0
    run = recorded_runs.last_run(path)
    found = log_replay.replay_plans(run)
    assert found.differences == []
    assert found.compared > 5
