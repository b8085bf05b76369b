"""What can be seen of a server from outside: that its engine stands still, and what it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.server.engine_client.process import RunDelay, run_delays
from pageturner.server.engine_client.supervisor import PATIENCE, Supervisor
from support.refusals import refusal_of

from .bytes_tokenizer import answer
from .conftest import Server
from .test_admin import KEY, change
from .test_alive import in_threads, raw_request
from .test_http import post

Start = Callable[..., Server]


def health(server: Server) -> tuple[int, str]:
    response = server.http.get("/health")
    return response.status_code, response.json().get("error", {}).get("reason", "")


def state(server: Server) -> Any:
    response = server.http.get("/v1/admin/state", headers={"authorization": f"Bearer {KEY}"})
    assert response.status_code == 200, response.text
    return response.json()


# -- health --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_work_and_an_engine_that_stands_still_are_a_503_long_before_the_restart(
    start: Start, begun: bool
) -> None:
    server = start("--engine-timeout", "4", FAKE_STEP_SECONDS="0.01")
    run = in_threads(server, ["story"], max_tokens=60)
    if not begun:  # it stands still when the work comes
        os.kill(server.engine_pid(), signal.SIGSTOP)
    next(run)
    if begun:
        server.until(lambda: server.metric("vllm:generation_tokens_total") > 0)
        os.kill(server.engine_pid(), signal.SIGSTOP)
    assert health(server) == (200, "")
    server.until(lambda: health(server) == (503, "no_engine"))
    assert len(server.notes("start")) == 1, "nothing was restarted yet"
    assert server.metric("pageturner:engine_up") == 0
    os.kill(server.engine_pid(), signal.SIGCONT)
    assert next(run) == [answer("story", 60)]
    assert health(server) == (200, "")
    assert len(server.notes("start")) == 1, "it went on in time"


@pytest.mark.slow
def test_a_step_that_never_ends_is_a_503(start: Start) -> None:
    server = start("--engine-timeout", "1")
    with raw_request(server, '{"prompt": "a<|hang|>", "max_tokens": 20}'):
        server.until(lambda: health(server) == (503, "no_engine"))
        server.until(lambda: len(server.notes("start")) == 2)
        server.until(lambda: health(server) == (200, ""))


@pytest.mark.slow
def test_idleness_and_steps_without_tokens_are_no_standstill(start: Start) -> None:
    server = start("--engine-timeout", "2", FAKE_STEP_SECONDS="0.01")
    with raw_request(server, '{"prompt": "<|stall|>", "max_tokens": 9}'):
        server.until(lambda: server.notes("submit"))
        end = time.monotonic() + 1.3
        while time.monotonic() < end:
            assert health(server) == (200, "")
    server.until(lambda: server.metric("vllm:num_requests_running") == 0)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    time.sleep(1.1)
    assert health(server) == (200, ""), "nobody waits for it"
    assert len(server.notes("start")) == 1
    os.kill(server.engine_pid(), signal.SIGCONT)


# -- what runs -----------------------------------------------------------------------------------------------
def test_only_the_admin_key_opens_the_state(start: Start) -> None:
    server = start("--api-key", "client-key", "--admin-key", KEY)
    for key in ("client-key", "none"):
        refused = server.http.get("/v1/admin/state", headers={"authorization": f"Bearer {key}"})
        assert refusal_of(refused) == (
            403,
            "invalid_admin_key",
        )
    assert (
        server.http.post("/v1/admin/state", headers={"authorization": f"Bearer {KEY}"}).status_code
        == 405
    )


def test_the_state_tells_of_each_request_and_nothing_that_was_said(start: Start) -> None:
    server = start("--admin-key", KEY, "--api-key", "acme:sesame,umbrella:seed")
    secret = "the treasure is under the oak"
    idle = state(server)
    assert (idle["requests"], idle["queue"]["unfinished"]) == ([], 0)
    body = f'{{"prompt": "{secret}<|slow|>", "max_tokens": 500, "stream": true, "n": 2}}'
    with raw_request(server, body, "authorization: Bearer sesame\r\nx-request-id: mine\r\n"):
        server.until(
            lambda: len([one for one in state(server)["requests"] if one["output_tokens"] > 2]) == 2
        )
        now = state(server)
        text = server.http.get("/v1/admin/state", headers={"authorization": f"Bearer {KEY}"}).text
    first, second = now["requests"]
    assert (first["request"], first["tenant"], first["choice"], second["choice"]) == (
        "mine",
        "acme",
        0,
        1,
    )
    assert (first["state"], first["max_tokens"], first["engines"]) == ("running", 500, 1)
    assert first["prompt_tokens"] == len(secret) + 1
    assert first["age_s"] >= first["since_last_token_s"] >= 0
    assert (now["engine"]["pid"], now["engine"]["epoch"], now["engine"]["restarts"]) == (
        server.engine_pid(),
        1,
        0,
    )
    assert now["engine"]["pool"]["blocks_total"] == 256
    assert (now["queue"]["unfinished"], now["queue"]["held"], now["settings"]["policy"]) == (
        2,
        0,
        "chunked",
    )
    assert not any(word in text for word in (secret, "treasure", "sesame", "seed", KEY))


@pytest.mark.slow
def test_the_state_tells_who_waits_who_is_held_and_how_often_the_engine_died(start: Start) -> None:
    server = start("--admin-key", KEY, FAKE_START_SECONDS="1")
    socks = [raw_request(server, '{"prompt": "<|stall|>", "max_tokens": 9}') for _ in range(66)]
    server.until(lambda: len(server.notes("submit")) == 66)
    places = [one["state"] for one in state(server)["requests"]]
    assert (places.count("running"), places.count("waiting")) == (64, 2)
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: state(server)["queue"]["held"] == 66)
    server.until(lambda: state(server)["queue"]["held"] == 0)
    engine = state(server)["engine"]
    assert (engine["epoch"], engine["restarts"], engine["suspects"]) == (2, 1, [])
    change(server, {"order": "fair"})
    assert state(server)["settings"]["order"] == "fair"
    for sock in socks:
        sock.close()
    server.until(lambda: state(server)["queue"]["unfinished"] == 0)
    assert post(server, max_tokens=1).status_code == 200


@pytest.mark.slow
def test_the_state_is_bounded(start: Start) -> None:
    server = start("--admin-key", KEY, "--max-queue", "3000", "--max-prompts-per-request", "2000")
    prompts = ", ".join('"<|stall|>"' for _ in range(1200))
    with raw_request(server, f'{{"prompt": [{prompts}], "max_tokens": 9}}'):
        server.until(lambda: state(server)["queue"]["unfinished"] == 1200)
        now = state(server)
        assert (len(now["requests"]), now["requests_left_out"]) == (1000, 200)


# -- a busy machine ------------------------------------------------------------------------------------------
def test_what_others_took_from_the_engine_is_no_hang() -> None:
    threads = {"1": 0, "2": 0}
    delay = RunDelay(lambda: dict(threads))
    for second in range(
        8
    ):  # thread 2 is kept from running three quarters of each second, thread 1 for less
        threads["1"] += 200_000_000
        threads["2"] += 750_000_000
        delay.sample(100.0 + second)
    assert delay.since(102.0) == pytest.approx(5 * 0.75)
    assert delay.since(102.5) == pytest.approx(4 * 0.75), "from the first sample behind it"
    assert delay.since(107.5) == 0.0
    threads.pop("2")  # it has ended; another begins
    threads["3"] = 500_000_000
    delay.sample(108.0)
    assert delay.since(107.0) == pytest.approx(0.5)


def test_the_kernel_says_of_a_process_that_sleeps_that_nobody_kept_it_from_running() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process_delay = RunDelay(partial(run_delays, process.pid))
        process_delay.sample(0.0)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.3)
        process_delay.sample(1.0)
        process.kill()
    assert process_delay.since(0.0) < 0.25, "stopped, it waited for no processor"
    assert run_delays(process.pid) == {}, "it is gone"


def test_children_are_asked_too() -> None:
    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = process.stdout.readline().strip()
        asked = run_delays(process.pid)
        os.kill(int(child), signal.SIGKILL)
    assert {str(process.pid), child} <= asked.keys()


def test_an_engine_that_others_keep_from_running_gets_four_times_as_long_at_most() -> None:
    always = SimpleNamespace(since=lambda then: 1e9)
    supervisor = SimpleNamespace(_awake_since=0.0, process=SimpleNamespace(run_delay=always))
    assert Supervisor._since(supervisor, time.monotonic() - 8) >= 8 / PATIENCE  # type: ignore[arg-type]
