"""Where the time of a request under way went so far, and who was in its way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Server
from .test_http import post

Start = Callable[..., Server]
SLOW = {"FAKE_STEP_SECONDS": "0.03", "PAGETURNER_FAKE_STEP_SECONDS": "0.03"}


def told_of(server: Server, name: str) -> list[dict[str, Any]]:
    answer = server.http.get(f"/v1/requests/{name}/timeline")
    return list(answer.json()["choices"]) if answer.status_code == 200 else []


def waiting_for(server: Server, name: str, *parts: str) -> dict[str, Any]:
    """Its only choice, as soon as it is told these parts."""
    server.until(
        lambda: told_of(server, name) and set(parts) <= set(told_of(server, name)[0]["parts_ms"])
    )
    (choice,) = told_of(server, name)
    return choice


@pytest.mark.slow
def test_who_runs_and_who_waits_are_told_before_they_end(start: Start) -> None:
    server = start("--max-num-seqs", "1", FAKE_ENGINE="own", **SLOW)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            post, server, prompt="one", max_tokens=2000, request_id="first", ignore_eos=True
        )
        running = waiting_for(server, "first", "own_decode")
        second = pool.submit(post, server, prompt="two", max_tokens=2, request_id="second")
        waiting = waiting_for(server, "second", "queue_slots")
        assert not first.done()
        assert not second.done()
        server.process.kill()  # the rest of the answers is of no interest
    for told, state in ((running, "running"), (waiting, "waiting")):
        assert (told["unfinished"], told["state"]) == (True, state)
        assert sum(told["parts_ms"].values()) == pytest.approx(told["so_far_ms"], abs=0.01)
        assert "delivery" not in told["parts_ms"]
        assert told["spans"][-1]["end_ms"] <= told["so_far_ms"] + 0.01
    assert running["ttft_ms"] > 0
    assert waiting["ttft_ms"] is None
    assert {one["request"] for one in waiting["behind"]} == {"first"}
    assert waiting["behind"][0]["part"] == "queue_slots"


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_waited_for_a_moment_only(start: Start) -> None:
    server = start(**SLOW)
    with ThreadPoolExecutor(2) as pool:
        for name in ("first", "second"):
            pool.submit(post, server, prompt=name, max_tokens=150, request_id=name)
        told = waiting_for(server, "second", "step_under_way")
    assert told["unfinished"]
    assert told["so_far_ms"] > 0
    assert {one["request"] for one in told["behind"]} <= {"first"}
    assert told_of(server, "second") == [], "this fake engine never tells where the time went"


def test_each_tenant_finds_its_own(start: Start) -> None:
    server = start("--api-key", "one:k1,two:k2", FAKE_ENGINE="own", **SLOW)
    keys = {
        tenant: {"authorization": f"Bearer {key}"} for tenant, key in (("one", "k1"), ("two", "k2"))
    }
    body = {"prompt": "one", "max_tokens": 200, "ignore_eos": True, "request_id": "mine"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.http.post, "/v1/completions", json=body, headers=keys["one"])
        url = "/v1/requests/mine/timeline"
        server.until(lambda: server.http.get(url, headers=keys["one"]).status_code == 200)
        assert server.http.get(url, headers=keys["one"]).json()["choices"][0]["unfinished"]
        assert server.http.get(url, headers=keys["two"]).status_code == 404
        assert asked.result().status_code == 200
    (ended,) = server.http.get(url, headers=keys["one"]).json()["choices"]
    assert "unfinished" not in ended
    assert ended["e2e_ms"] > 0
