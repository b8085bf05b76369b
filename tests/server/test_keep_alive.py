"""Streams whose first token takes long: the head at once, then signs of life, in every shape of the API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pageturner.http.responses import encode
from pageturner.http.stream_marks import MOVES

from .conftest import Server, shared
from .test_stream_migration import BODIES

STALL = [{"role": "user", "content": "<|stall|>"}]  # it never gets a token
SIGNS = {
    "/v1/completions": [": keep-alive", "", ": keep-alive"],
    "/v1/chat/completions": [": keep-alive", "", ": keep-alive"],
    "/v1/messages": ["event: message_start", "event: content_block_start", "event: ping"],
    "/v1/responses": ["event: response.created", "event: response.in_progress", ": keep-alive"],
    "/api/chat": [],
    "/api/generate": [],
}


lively = shared(FAKE_ALIVE_SECONDS="0.3")  # its streams show soon that they live


def stalled(path: str) -> dict[str, Any]:
    asked = {"prompt": "<|stall|>"} if "prompt" in BODIES[path] else {"messages": STALL}
    if path == "/v1/responses":
        asked = {"input": STALL}
    return BODIES[path] | asked | {"stream": True}


def signs(url: str, path: str) -> list[str]:
    """The first lines of a stream that has no token: those that say what its first ones are."""
    wanted, told = SIGNS[path], list[str]()
    with httpx.stream("POST", url + path, json=stalled(path), timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-accel-buffering"] == "no"
        lines = answer.iter_lines()
        while wanted and not all(one in told for one in wanted):
            told.append(next(lines))
        pings = told.count("event: ping")
        while path == "/v1/messages" and told.count("event: ping") == pings:
            told.append(next(lines))  # the next one, a moment later
        return told


@pytest.mark.parametrize("through", ["server", "router"])
def test_a_stream_shows_that_it_lives(lively: Server, start: Any, through: str) -> None:
    url = lively.url if through == "server" else start(lively.url, command="route").url
    with ThreadPoolExecutor(len(SIGNS)) as pool:
        told = dict(zip(SIGNS, pool.map(lambda path: signs(url, path), SIGNS), strict=True))
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert set(told[path]) == {": keep-alive", ""}
    lively.until(lambda: lively.metric("vllm:num_requests_running") == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/api/chat"])
def test_signs_of_life_have_no_marks_where_a_stream_cannot_move(lively: Server, path: str) -> None:
    several = {"logprobs": True} if path == "/api/chat" else {"n": 2}
    asked = stalled(path) | several
    with httpx.stream(
        "POST", lively.url + path, json=asked, headers={MOVES.decode(): "1"}, timeout=5
    ) as answer:
        told, lines = list[str](), answer.iter_lines()
        with contextlib.suppress(httpx.ReadTimeout):
            while told.count(": keep-alive") < 2:
                told.append(next(lines))
    assert set(told) <= {": keep-alive", ""}


def test_a_stream_without_a_token_goes_on_at_another_server(start: Callable[..., Server]) -> None:
    servers = [start() for _ in range(2)]
    router = start(*(server.url for server in servers), "--health-interval", "0.1", command="route")
    with contextlib.ExitStack() as stack:
        answers = []
        for path in SIGNS:
            asked = httpx.stream("POST", router.url + path, json=stalled(path), timeout=60)
            answers.append(stack.enter_context(asked))
        assert {answer.status_code for answer in answers} == {200}
        left = [server for server in servers if server.metric("vllm:num_requests_running")]
        left[0].process.kill()
        other = servers[servers[0] is left[0]]
        router.until(lambda: other.metric("vllm:num_requests_running") == len(SIGNS))
        router.until(lambda: router.metric("pageturner:router_moved_total") >= 1)
        assert router.metric("pageturner:router_cut_total") == 0


SPLIT = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1ee"


def test_json_is_one_line_to_every_client(server: Server) -> None:
    assert json.loads(encode({SPLIT: [SPLIT]})) == {SPLIT: [SPLIT]}
    assert len(encode({SPLIT: SPLIT}).decode().splitlines()) == 1
    for stream in (False, True):
        body = {"prompt": SPLIT, "echo": True, "max_tokens": 1, "stream": stream}
        told = server.http.post("/v1/completions", json=body).text
        assert "a\\u2028b\\u2029c\\u0085d" in told
        assert told.splitlines() == told.split("\n")[: len(told.splitlines())]
    for path, fields in (
        ("/tokenize", {"prompt": SPLIT, "return_token_strs": True}),
        ("/detokenize", {"tokens": list(SPLIT.encode())}),
        ("/v1/responses", {"input": "hi", "instructions": SPLIT, "max_output_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": SPLIT}]}),
    ):
        assert len(server.http.post(path, json=fields).text.splitlines()) == 1, path


@pytest.mark.parametrize("path", BODIES)
def test_a_byte_order_mark_means_nothing(server: Server, path: str) -> None:
    whole = BODIES[path] | {"stream": False}
    whole.pop("stream_options", None)
    for content in (BODIES[path], whole):
        raw = json.dumps(content).encode()
        for begin, status in ((b"\xef\xbb\xbf", 200), (b"\xff", 400)):
            headers = {"content-type": "application/json"}
            answer = server.http.post(path, content=begin + raw, headers=headers)
            assert answer.status_code == status, answer.text
