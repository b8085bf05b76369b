"""The live view: who may look, and what is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Server
from .test_http import events, post

Start = Callable[..., Server]


def test_a_running_batch_is_seen_step_by_step(start: Start) -> None:
    server = start(FAKE_STEP_SECONDS="0.02")
    assert server.http.get("/v1/live").json()["steps"] == []
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(events, server, prompt=text, max_tokens=150) for text in ("one", "two")
        ]
        server.until(lambda: len(server.http.get("/v1/live").json()["requests"]) == 2)
        server.until(lambda: len(server.http.get("/v1/live").json()["steps"]) > 9)
        seen = server.http.get("/v1/live").json()
        assert [one.result()[-1] for one in running]
    rows = [row for step in seen["steps"] for row in step["rows"]]
    assert {id for id, _, _ in rows} == {one["id"] for one in seen["requests"]}
    assert {prompt for _, _, prompt in rows} == {0, 1}
    assert all(step["ended_s"] >= step["begun_s"] for step in seen["steps"][:-1])
    assert {one["state"] for one in seen["requests"]} <= {"running", "waiting"}
    later = server.http.get("/v1/live", params={"since": seen["steps"][-1]["number"]}).json()
    assert all(step["number"] > seen["steps"][-1]["number"] for step in later["steps"])
    assert len(later["first_tokens_ms"]) == 2
    assert later["requests"] == []
    assert later["figures"]["blocks_total"] > 0
    assert math.isfinite(later["now_s"])
    assert "/v1/live" not in server.log, "polls are no news"


def test_it_tells_nothing_of_what_is_said(server: Server) -> None:
    assert post(server, prompt="a secret", max_tokens=2).status_code == 200
    assert "secret" not in server.http.get("/v1/live").text


@pytest.mark.parametrize("since", ["-1", "x", "1e3", "9" * 17, "٣"])
def test_a_number_that_is_none(server: Server, since: str) -> None:
    refused = server.http.get("/v1/live", params={"since": since})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")


@pytest.mark.slow
def test_where_there_are_keys_only_the_admin_looks(start: Start) -> None:
    server = start("--api-key", "k", "--admin-key", "a")
    for key, status in (("", 403), ("k", 403), ("a", 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert server.http.get("/v1/live", headers=headers).status_code == status
    server = start("--api-key", "k")
    refused = server.http.get("/v1/live", headers={"authorization": "Bearer k"})
    assert (refused.status_code, json.loads(refused.text)["error"]["reason"]) == (404, "not_found")
