"""Streams survive the engine; clients that leave free what they held; draining, refusing, giving up."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner.server.engine_client.quarantine import PATIENCE
from support.refusals import refusal_of

from .bytes_tokenizer import answer
from .conftest import Server
from .test_http import events, post, text_of

Start = Callable[..., Server]


def in_threads(server: Server, prompts: list[str], **fields: Any) -> Iterator[list[str]]:
    """Streams of all prompts at once. Yields a list that fills with their texts when they end; then waits."""
    texts = [""] * len(prompts)

    def one(i: int) -> None:
        texts[i] = text_of(events(server, prompt=prompts[i], **fields))

    with ThreadPoolExecutor(len(prompts)) as pool:
        done = [pool.submit(one, i) for i in range(len(prompts))]
        yield texts
        for future in done:
            future.result(60)
    yield texts


def test_kill_with_16_open_streams(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.005")
    prompts = [f"story {i}" for i in range(16)]
    server.hold(10)
    run = in_threads(server, prompts, max_tokens=200)
    next(run)
    for round, then in enumerate((20, 30, 0)):
        server.kill_when_held(16, then)
        server.until(lambda round=round: len(server.notes("start")) == round + 2)
    assert next(run) == [answer(prompt, 200) for prompt in prompts]
    resumed = [note for note in server.notes("submit") if note["resume"] > 0]
    assert len(resumed) == 48
    seeds = {note["submit"]: note["seed"] for note in server.notes("submit")}
    assert all(seeds[note["submit"]] == note["seed"] for note in resumed)
    assert server.metric("pageturner:engine_restarts_total") == 3
    assert server.metric("pageturner:poisoned_requests_total") == 0
    assert server.http.get("/health").status_code == 200


@pytest.mark.slow
def test_a_stopped_engine_is_noticed_and_replaced_with_16_open_streams(start: Start) -> None:
    server = start("--engine-timeout", "2", FAKE_STEP_SECONDS="0.005")
    prompts = [f"tale {i}" for i in range(16)]
    server.hold(10)
    run = in_threads(server, prompts, max_tokens=150)
    next(run)
    server.kill_when_held(16, sign=signal.SIGSTOP)
    server.until(lambda: server.http.get("/health").status_code == 503)
    assert next(run) == [answer(prompt, 150) for prompt in prompts]
    assert len(server.notes("start")) == 2
    assert server.metric("pageturner:engine_strikes_total") == 0  # no request can stop an engine


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_loads_is_replaced(start: Start) -> None:
    server = start("--engine-timeout", "1", FAKE_HANGING_STARTS="2")
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert post(server, max_tokens=9).json()["choices"][0]["text"] == answer("hello", 9)
    assert len(server.notes("start")) == 3


@pytest.mark.slow
def test_a_server_that_was_stopped_itself_takes_no_engine_for_stuck(start: Start) -> None:
    server = start("--engine-timeout", "3", FAKE_STEP_SECONDS="0.001")
    prompts = [f"tale {i}" for i in range(32)]
    run = in_threads(server, prompts, max_tokens=300)
    next(run)
    server.until(lambda: len(server.notes("submit")) == 32)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(4.5)  # in which the engine says more than is taken in at once, and has ended
    server.process.send_signal(signal.SIGCONT)
    assert next(run) == [answer(prompt, 300) for prompt in prompts]
    assert len(server.notes("start")) == 1


def test_a_server_stopped_while_it_waited_takes_no_engine_for_stuck(start: Start) -> None:
    server = start("--engine-timeout", "2", FAKE_STEP_SECONDS="0.2")
    run = in_threads(server, ["a slow tale"], max_tokens=3)
    next(run)
    server.until(lambda: len(server.notes("submit")) == 1)
    # it waits for the next of them: its watch comes due before it has read what came
    time.sleep(0.1)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    server.process.send_signal(signal.SIGCONT)
    assert next(run) == [answer("a slow tale", 3)]
    assert len(server.notes("start")) == 1


@pytest.mark.slow
def test_an_engine_stopped_while_idle_is_replaced_when_work_comes(start: Start) -> None:
    server = start("--engine-timeout", "2")
    os.kill(server.engine_pid(), signal.SIGSTOP)
    time.sleep(1.5)
    assert len(server.notes("start")) == 1  # nothing to do is no reason
    assert post(server, max_tokens=9).json()["choices"][0]["text"] == answer("hello", 9)
    assert len(server.notes("start")) == 2


@pytest.mark.slow
def test_an_engine_that_crashes_hangs_or_talks_nonsense_once_is_replaced(start: Start) -> None:
    server = start("--engine-timeout", "2")
    for prompt in ("a<|crash|>", "a<|hang|>", "a<|gap|>", "a<|noise|>"):
        assert post(server, prompt=prompt, max_tokens=20).json()["choices"][0]["text"] == answer(
            prompt, 20
        )
    assert server.metric("pageturner:engine_restarts_total") == 4
    assert server.stop(signal.SIGINT) == 0


@pytest.mark.slow
def test_the_memory_for_kv_is_handed_from_engine_to_engine(start: Start) -> None:
    """The fake one adds a byte to it."""
    server = start()
    for round in range(2):
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.until(lambda round=round: len(server.notes("start")) == round + 2)
        assert post(server, max_tokens=2).status_code == 200
    assert [note["kv"] for note in server.notes("start")] == [0, 1, 2]


@pytest.mark.slow
def test_an_engine_that_does_not_start_with_the_memory_of_another_gets_a_new_one(
    start: Start,
) -> None:
    server = start(FAKE_START="once")
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: len(server.notes("start")) >= 4)
    assert [note["kv"] for note in server.notes("start")][:4] == [0, 1, 0, 0]


@pytest.mark.slow
def test_a_waiting_answer_that_is_not_streamed_survives_too(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.01")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, max_tokens=100)
        server.until(lambda: server.notes("submit"))
        time.sleep(0.2)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert waiting.result(30).json()["choices"][0]["text"] == answer("hello", 100)


def test_poison_fails_alone(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.005")
    prompts = [f"tale {i}" for i in range(11)]
    run = in_threads(server, prompts, max_tokens=250)
    next(run)
    server.until(lambda: len(server.notes("submit")) == 11)
    bad = post(server, prompt="x<|poison|>", max_tokens=9)
    assert bad.status_code == 500
    assert bad.json()["error"]["reason"] == "poisoned_request"
    assert next(run) == [answer(prompt, 250) for prompt in prompts]
    assert server.metric("pageturner:poisoned_requests_total") == 1
    assert server.metric("pageturner:engine_strikes_total") > 0
    assert len(server.notes("start")) <= 9


@pytest.mark.slow
def test_poison_alone_fails_and_the_server_goes_on(start: Start) -> None:
    server = start()
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "<|poison|>", "stream": True}
    ) as response:
        told = response.read()  # on a busy machine the head has gone out meanwhile
        assert response.status_code in (200, 500)
        assert b"poisoned_request" in told
    assert post(server, max_tokens=2).status_code == 200


@pytest.mark.slow
def test_a_request_that_crashes_the_engine_before_any_step_fails_alone(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.005")
    run = in_threads(server, prompts := [f"tale {i}" for i in range(5)], max_tokens=150)
    next(run)
    server.until(lambda: len(server.notes("submit")) == 5)
    bad = post(server, prompt="x<|untakable|>", max_tokens=9)
    assert refusal_of(bad) == (500, "poisoned_request")
    assert next(run) == [answer(prompt, 150) for prompt in prompts]
    assert len(server.notes("start")) <= 8


@pytest.mark.slow
def test_engines_that_die_while_they_load_do_not_stop_the_halving(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.005", FAKE_DYING_STARTS="2,4")
    run = in_threads(server, prompts := [f"tale {i}" for i in range(3)], max_tokens=150)
    next(run)
    server.until(lambda: len(server.notes("submit")) == 3)
    bad = post(server, prompt="x<|poison|>", max_tokens=9)
    assert bad.json()["error"]["reason"] == "poisoned_request"
    assert next(run) == [answer(prompt, 150) for prompt in prompts]
    assert len(server.notes("start")) <= 12


@pytest.mark.slow
def test_kills_from_outside_are_nobodys_fault(start: Start) -> None:
    """As an operator or want of memory does it, while a lone stream gets no token for long."""
    server = start()
    with raw_request(server, '{"prompt": "<|stall|>"}'):
        for kills in range(PATIENCE):
            server.until(lambda kills=kills: len(server.notes("submit")) == kills + 1)
            os.kill(server.engine_pid(), signal.SIGKILL)
        server.until(lambda: len(server.notes("submit")) == PATIENCE + 1)
        assert server.metric("pageturner:engine_strikes_total") == 0
        assert server.metric("pageturner:engine_restarts_total") == PATIENCE
        assert server.metric("vllm:request_success_total") == 0


def test_requests_that_come_during_a_restart_wait(start: Start) -> None:
    server = start(FAKE_START_SECONDS="0.5")
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: server.http.get("/health").status_code == 503)
    assert post(server, max_tokens=5).json()["choices"][0]["text"] == answer("hello", 5)


# -- clients that leave --------------------------------------------------------------------------------------
def raw_request(server: Server, body: str, headers: str = "") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())
    return sock


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("where", ["prefill", "decode", "queue"])
def test_a_client_that_leaves_is_aborted_at_once(server: Server, stream: str, where: str) -> None:
    prompt = {"prefill": "<|stall|>", "decode": "<|slow|>", "queue": "<|stall|>"}[where]
    before, asked = len(server.notes("abort")), len(server.notes("submit"))
    crowd = 65 if where == "queue" else 1
    socks = [
        raw_request(server, f'{{"prompt": "{prompt}", "max_tokens": 1000, "stream": {stream}}}')
        for _ in range(crowd)
    ]
    server.until(lambda: len(server.notes("submit")) == asked + crowd)
    if where == "decode":
        time.sleep(0.1)
    for sock in socks:
        sock.close()
    server.until(lambda: len(server.notes("abort")) == before + crowd, 5)
    assert server.notes("abort")[-1]["left"] == 0
    server.until(lambda: server.metric("vllm:num_requests_running") == 0)
    server.until(lambda: server.http.get("/load").json()["server_load"] == 0)


def test_a_client_that_does_not_read_is_cut_off(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0")
    prompts = ", ".join('"hello"' for _ in range(48))
    body = f'{{"prompt": [{prompts}], "max_tokens": 2000, "stream": true}}'
    with raw_request(server, body):
        server.until(lambda: "client too slow" in server.log, 40)
        server.until(lambda: len(server.notes("abort")) > 0)
    assert server.metric("pageturner:cut_readers_total") == 1
    assert post(server, max_tokens=1).status_code == 200


def test_stop_strings_end_the_engines_work(server: Server) -> None:
    before = len(server.notes("abort"))
    post(server, stop=answer("hello", 4)[3], max_tokens=1000)
    server.until(lambda: len(server.notes("abort")) == before + 1)


# -- limits, start and end -----------------------------------------------------------------------------------
def test_a_full_queue_is_a_429_with_retry_after(start: Start) -> None:
    server = start("--max-num-seqs", "1", "--max-queue", "2")
    socks = [raw_request(server, '{"prompt": "<|stall|>", "max_tokens": 9}') for _ in range(3)]
    server.until(lambda: len(server.notes("submit")) == 3)
    response = post(server)
    assert refusal_of(response) == (429, "queue_full")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert server.metric("vllm:admission_rejections_total") == 1
    for sock in socks:
        sock.close()
    server.until(lambda: post(server, max_tokens=1).status_code == 200)


@pytest.mark.slow
def test_before_the_engine_is_ready_everything_is_a_503(start: Start) -> None:
    server = start("--port", str(port := free_port()), FAKE_START_SECONDS="2", wait=False)
    server.url = f"http://127.0.0.1:{port}"
    server.http = httpx.Client(base_url=server.url)
    server.until(lambda: reachable(port))
    for response in (server.http.get("/health"), post(server)):
        assert response.status_code == 503
        assert response.json()["error"]["reason"] == "loading"
        assert int(response.headers["retry-after"]) >= 1
    assert server.http.get("/ping").status_code == 200
    server.until(lambda: server.http.get("/health").status_code == 200)


def test_sigterm_drains(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.01")
    run = in_threads(server, ["a", "b", "c"], max_tokens=150)
    next(run)
    server.until(lambda: len(server.notes("submit")) == 3)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.http.get("/health").status_code == 503)
    refused = post(server)
    assert refusal_of(refused) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert next(run) == [answer(prompt, 150) for prompt in "abc"]
    assert server.process.wait(60) == 0
    server.until(lambda: not alive(server.engine_pid()))


@pytest.mark.slow
def test_draining_ends_with_the_timeout(start: Start) -> None:
    server = start("--shutdown-timeout", "0.3")
    texts: list[str] = []
    asking = threading.Thread(
        target=lambda: texts.append(
            post(server, prompt="<|slow|>", max_tokens=2000, stream=True).text
        )
    )
    asking.start()
    server.until(lambda: server.notes("submit"))
    time.sleep(0.1)
    assert server.stop(signal.SIGINT) == 0
    asking.join(60)
    assert "answers under way: 1, waiting at most 0.3 s" in server.finished()
    assert "answers cut off: 1" in server.log
    assert "shutting_down" in texts[0]
    assert texts[0].endswith("data: [DONE]\n\n")


def test_a_second_signal_ends_at_once(start: Start) -> None:
    server = start()
    with raw_request(server, '{"prompt": "<|stall|>"}'):
        server.until(lambda: server.notes("submit"))
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.http.get("/health").status_code == 503)
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
    server.until(lambda: not alive(server.engine_pid()))


def test_the_engine_leaves_when_the_server_is_killed(start: Start) -> None:
    server = start()
    pid = server.engine_pid()
    server.stop(signal.SIGKILL)
    server.until(lambda: not alive(pid))


def command_of(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_stopped_engine_leaves_with_a_server_that_is_killed(start: Start) -> None:
    server = start(FAKE_ENGINE="own")
    own = server.process.pid
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    (pid,) = (int(child) for child in children if "engine.worker" in command_of(child))
    os.kill(pid, signal.SIGSTOP)
    server.stop(signal.SIGKILL)
    try:
        server.until(lambda: not alive(pid), 10)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_crash_loop_is_a_503_for_as_long_as_it_lasts(start: Start) -> None:
    server = start("--max-restarts", "2", FAKE_START="once", FAKE_STEP_SECONDS="0.01")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, max_tokens=1000)
        server.until(lambda: server.notes("submit"))
        os.kill(server.engine_pid(), signal.SIGKILL)
        refused = [waiting.result(30), post(server), server.http.get("/health")]
    reasons = [response.json()["error"]["reason"] for response in refused]
    assert reasons == ["engine_unavailable", "engine_unavailable", "crash_loop"]
    assert {
        (response.status_code, response.headers["retry-after"]) for response in refused[:2]
    } == {(503, "5")}
    assert "ended 3 times in a row" in refused[2].json()["error"]["message"]
    assert "exit code 9" in refused[2].json()["error"]["message"]
    Path(f"{server.notes_path}.once").unlink()
    server.until(lambda: post(server, max_tokens=1).status_code == 200)
    assert server.http.get("/health").status_code == 200
    assert server.stop() == 0


def test_the_device_stays_when_the_engine_is_started_again(start: Start) -> None:
    server = start(FAKE_DEVICE="cuda")
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: len(server.notes("start")) == 2)
    assert post(server, max_tokens=1).status_code == 200
    assert [note["device"] for note in server.notes("start")] == ["", "cuda"]


@pytest.mark.slow
def test_a_device_that_is_gone_is_a_503_of_its_own_until_it_is_back(start: Start) -> None:
    server = start("--max-restarts", "2", FAKE_DEVICE="cuda", FAKE_STEP_SECONDS="0.01")
    gone = Path(f"{server.notes_path}.once")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, max_tokens=1000)
        server.until(lambda: server.notes("submit"))
        gone.touch()
        os.kill(server.engine_pid(), signal.SIGKILL)
        refused = [waiting.result(30), post(server)]
    assert [one.json()["error"]["reason"] for one in refused] == ["device_unavailable"] * 2
    assert {(one.status_code, one.headers["retry-after"]) for one in refused} == {(503, "5")}
    assert "gpu_absent" in server.http.get("/health").json()["error"]["message"]
    gone.unlink()
    server.until(lambda: post(server, max_tokens=1).status_code == 200)
    assert {note["device"] for note in server.notes("start")[1:]} == {"cuda"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [("failed", "no memory for the KV cache"), ("dies", "ended while it started")],
)
def test_an_engine_that_cannot_start_is_one_line_and_code_1(
    start: Start, how: str, message: str
) -> None:
    server = start(FAKE_START=how, wait=False)
    assert server.process.wait(20) == 1
    assert message in server.finished().splitlines()[-1]
    assert "Traceback" not in server.log


def test_a_port_in_use_is_one_line_before_anything_is_loaded(start: Start) -> None:
    first = start()
    port = first.url.rsplit(":", 1)[1]
    second = start("--port", port, wait=False)
    assert second.process.wait(20) == 1
    assert f"port {port}" in second.finished()
    assert second.log.count("\n") == 1
    assert second.notes("start") == []


# -- helpers -------------------------------------------------------------------------------------------------
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def reachable(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
