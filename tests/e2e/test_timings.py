"""Where the time went, asked of a real server of a tiny model: it adds up to what a client's clock says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from support.engines import GOLDENS
from support.refusals import refusal_of
from support.servers import serving

FLAGS = ("--max-num-seqs", "2", "--threads", "1", "--kv-cache-memory", "4M")


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with serving(GOLDENS / "tiny_llama.gguf", *FLAGS) as client:
        yield client


def body(answer: int, **more: Any) -> dict[str, Any]:
    prompt = list(range(3, 60))
    return {"prompt": prompt, "max_tokens": answer, "ignore_eos": True, "timings": True, **more}


def adds_up(timings: dict[str, Any]) -> None:
    parts = timings["parts_ms"]
    assert sum(parts.values()) == pytest.approx(timings["e2e_ms"], abs=0.01)
    assert abs(parts["other"]) <= max(1.0, 0.02 * timings["e2e_ms"]), parts
    assert all(ms >= -0.01 for ms in parts.values()), parts
    for part in ("own_decode", "sampling", "overhead", "accept", "delivery"):
        assert parts[part] > 0, part


def test_the_parts_of_an_answer_add_up(server: httpx.Client) -> None:
    begin = time.monotonic()
    answer = server.post("/v1/completions", json=body(40)).raise_for_status().json()
    measured = 1000 * (time.monotonic() - begin)
    (timings,) = answer["timings"]
    adds_up(timings)
    assert timings["parts_ms"]["own_prefill"] > 0
    assert 0 < timings["ttft_ms"] < timings["e2e_ms"] <= measured


def test_who_waits_learns_behind_whom(server: httpx.Client) -> None:
    """Two may run: of eight at once, six wait for a place."""

    def ask(k: int) -> dict[str, Any]:
        headers = {"x-request-id": f"crowd-{k}"}
        return dict(
            server.post("/v1/completions", json=body(60), headers=headers).raise_for_status().json()
        )

    with ThreadPoolExecutor(8) as crowd:
        all_timings = [answer["timings"][0] for answer in crowd.map(ask, range(8))]
    for timings in all_timings:
        adds_up(timings)
    waited = [
        sum(ms for part, ms in t["parts_ms"].items() if part.startswith("queue_"))
        for t in all_timings
    ]
    assert sum(ms > 0 for ms in waited) >= 4, waited
    told = server.get("/v1/requests/crowd-3/timeline").raise_for_status().json()
    (choice,) = told["choices"]
    spans = choice["spans"]
    assert spans[0]["start_ms"] == 0
    assert spans[-1]["what"] == "delivery"
    for before, after in pairwise(spans):
        assert after["start_ms"] >= before["end_ms"] - 0.01, "two causes at one time"
    assert {"prefill", "decode"} & {span["what"] for span in spans}


def test_a_stream_tells_at_its_end(server: httpx.Client) -> None:
    with server.stream("POST", "/v1/completions", json=body(20, stream=True, n=2)) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert last["choices"] == []
    assert [timings["index"] for timings in last["timings"]] == [0, 1]
    for timings in last["timings"]:
        adds_up(timings)
    assert not any("timings" in json.loads(line) for line in lines[:-2])


def test_a_stop_string_ends_the_account_too(server: httpx.Client) -> None:
    plain = server.post("/v1/completions", json=body(30, seed=1)).raise_for_status().json()
    stop = plain["choices"][0]["text"][5:8]
    answer = (
        server.post("/v1/completions", json=body(30, seed=1, stop=[stop])).raise_for_status().json()
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    adds_up(answer["timings"][0])
    asked = body(30, seed=1, stop=[stop], stream=True)
    with server.stream("POST", "/v1/completions", json=asked) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    (timings,) = json.loads(lines[-2])["timings"]
    adds_up(timings)


def test_a_stop_string_ends_the_timeline_too(server: httpx.Client) -> None:
    """Even where the answer did not wait for it."""
    plain = server.post("/v1/completions", json=body(30, seed=1)).raise_for_status().json()
    asked = body(30, seed=1, stop=[plain["choices"][0]["text"][5:8]]) | {"timings": False}
    server.post(
        "/v1/completions", json=asked, headers={"x-request-id": "stopped"}
    ).raise_for_status()
    deadline = time.monotonic() + 10
    while (page := server.get("/v1/requests/stopped/timeline")).status_code == 404:
        assert time.monotonic() < deadline, "the engine's account never came"
        time.sleep(0.01)
    (choice,) = page.raise_for_status().json()["choices"]
    choice["parts_ms"]["delivery"] += 1e-6  # nothing is delivered behind the engine's own end
    adds_up(choice)
    for before, after in pairwise(choice["spans"]):
        assert after["start_ms"] >= before["end_ms"] - 0.01


@pytest.mark.slow
def test_nobody_is_told_who_did_not_ask(server: httpx.Client) -> None:
    asked = body(3) | {"timings": False}
    answer = server.post("/v1/completions", json=asked, headers={"x-request-id": "quiet"})
    assert "timings" not in answer.raise_for_status().json()
    assert server.get("/v1/requests/quiet/timeline").status_code == 200, "it can still be asked"
    missing = server.get("/v1/requests/nobody/timeline")
    assert refusal_of(missing) == (404, "unknown_request")
