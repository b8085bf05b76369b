"""Streams that move: marks, going on behind any token, draining, and what a router makes of marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pageturner.http.stream_marks import LEAVING, MOVES, RESUME
from pageturner.router.stream_copy import LONGEST_MARK, MAX_BODY, MAX_HELD, StreamCopy, copy_of

from .bytes_tokenizer import answer
from .conftest import Server
from .test_http import HI, events, text_of

MARKED = {MOVES.decode(): "1", "x-request-id": "the-same"}
MARK = re.compile(rb"^:pt .*\n\n", re.M)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 12, "stream": True},
    "/v1/chat/completions": {
        "messages": HI,
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["jumps"],
    },
    "/v1/messages": {"model": "fake", "messages": HI, "max_tokens": 12, "stream": True},
    "/v1/responses": {"input": HI, "max_output_tokens": 12, "stream": True},
    "/api/chat": {"model": "fake", "messages": HI, "options": {"num_predict": 12}},
    "/api/generate": {"model": "fake", "prompt": "hello", "options": {"num_predict": 12}},
}


def marked(server: Server, path: str, **more: Any) -> bytes:
    """The bytes of a marked stream."""
    response = server.http.post(path, json=BODIES[path] | more, headers=MARKED)
    assert response.status_code == 200, response.text
    return response.content


def resumed(server: Server, of: str, begun: Any, tokens: list[int], **more: Any) -> httpx.Response:
    wanted = {"path": of, "body": json.dumps(BODIES[of]), "begun": begun, "tokens": tokens} | more
    return server.http.post(RESUME, json=wanted, headers=MARKED)


def parts(stream: bytes) -> tuple[Any, list[tuple[bytes, int]], bytes]:
    """How it began; the events of each token; what stands behind the last mark."""
    begun, rest = stream.split(b"\n\n", 1)
    *pieces, last = re.split(rb"^:pt (\d+)\n\n", rest, flags=re.M)
    told = [(pieces[i], int(pieces[i + 1])) for i in range(0, len(pieces), 2)]
    return json.loads(begun.removeprefix(b":pt begin ")), told, last


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_who_only_has_the_model_loaded_is_answered(server: Server, path: str) -> None:
    """Ollama's clients do that through a router too."""
    for body in ({"model": "fake"}, {"messages": [], "stream": False}, {"prompt": ""}):
        told = [server.http.post(path, json=body, headers=headers) for headers in (MARKED, {})]
        assert [one.status_code for one in told] == [200, 200]
        assert [one.json()["done_reason"] for one in told] == ["load", "load"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_goes_on_behind_any_token(server: Server, path: str) -> None:
    whole = marked(server, path)
    begun, told, _ = parts(whole)
    assert len(told) == 11, "the last of 12 has no mark"
    seed = {"seed": begun["seed"]} if "completions" in path else {}
    unmarked = server.http.post(
        path, json=BODIES[path] | seed, headers={"x-request-id": "the-same"}
    )
    assert clean(MARK.sub(b"", whole)) == clean(unmarked.content)
    for n in range(len(told) + 1):
        rest = resumed(server, path, begun, [token for _, token in told[:n]])
        assert rest.status_code == 200, rest.text
        again, _, _ = parts(rest.content)
        assert again == begun
        both = b"".join(text for text, _ in told[:n]) + MARK.sub(b"", rest.content)
        assert clean(both) == clean(MARK.sub(b"", whole)), n


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_elsewhere_behind_what_came_before_its_first_token(
    server: Server, path: str
) -> None:
    begun, _, _ = parts(marked(server, path))
    new = MARK.sub(b"", resumed(server, path, begun, []).content)
    rest = MARK.sub(b"", resumed(server, path, begun, [], told=True).content)
    if path in ("/v1/messages", "/v1/responses"):
        start = new.index(b"event: content_block_delta" if "messages" in path else b"delta") - 1
        start = new.rindex(b"event: ", 0, start + 8)
        assert clean(rest) == clean(new[start:])
    else:
        assert clean(rest) == clean(new)


def clean(stream: bytes) -> bytes:
    """Without the second at which it was made, its times, and what it found in the cache."""
    stream = re.sub(rb'"created_at":"[^"]*"|_duration":\d+', b"", stream)
    return uncached(re.sub(rb'"created(_at)?":\d+', b'"created":0', stream))


def uncached(stream: bytes) -> bytes:
    named = rb'"(cached_tokens|cache_read_input_tokens|input_tokens|completed_at)":\d+'
    return re.sub(named, rb'"\1":0', stream)


def test_what_tokens_do_not_tell_has_no_marks(server: Server) -> None:
    for more in ({"logprobs": 1}, {"n": 2}, {"prompt_logprobs": 1}, {"prompt": ["a", "b"]}):
        assert b":pt" not in marked(server, "/v1/completions", **more)
    assert b":pt" not in server.http.post("/v1/completions", json=BODIES["/v1/completions"]).content


def test_streams_that_cannot_go_on_are_refused(server: Server) -> None:
    path = "/v1/completions"
    begun, told, _ = parts(marked(server, path))
    tokens = [token for _, token in told]
    for status, code, response in (
        (409, "other_engine", resumed(server, path, begun | {"fingerprint": "other"}, tokens)),
        (400, "invalid_value", resumed(server, path, begun, tokens, path="/v1/embeddings")),
        (400, "invalid_value", resumed(server, path, begun, [1 << 20])),
        (400, "invalid_value", resumed(server, path, begun, [97] * 12)),
        (400, "invalid_json", resumed(server, path, begun, [-1])),
        (400, "invalid_json", resumed(server, path, begun, tokens, more=1)),
        (400, "invalid_json", resumed(server, path, begun, tokens, body="{")),
        (
            400,
            "invalid_value",
            resumed(server, path, begun, tokens, body='{"prompt":"a","max_tokens":64}'),
        ),
    ):
        assert response.status_code == status, response.text
        assert response.json()["error"]["reason"] == code, response.text


def test_a_drained_server_hands_its_streams_on(start: Callable[..., Server]) -> None:
    servers = [start("--admin-key", "k", FAKE_STEP_SECONDS="0.02") for _ in range(2)]
    router = start(*(server.url for server in servers), "--health-interval", "0.1", command="route")
    prompts = [f"story {i}" for i in range(6)]
    admin = {"authorization": "Bearer k"}
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(events, router, prompt=prompt, max_tokens=100) for prompt in prompts]
        router.until(lambda: [len(server.notes("submit")) for server in servers] == [3, 3])
        servers[0].until(lambda: servers[0].metric("vllm:generation_tokens_total") >= 9)
        assert servers[0].http.post("/v1/admin/drain", json={}).status_code == 403
        told = servers[0].http.post("/v1/admin/drain", json={}, headers=admin).json()
        assert told["draining"]
        assert told["moved"] == 3
        servers[0].until(lambda: servers[0].http.get("/load").json()["server_load"] == 0)
        assert not any(future.done() for future in running), "they go on elsewhere"
        for prompt, future in zip(prompts, running, strict=True):
            assert text_of(future.result(60)) == answer(prompt, 100)
    assert servers[0].http.get("/health").status_code == 503
    assert router.metric("pageturner:router_moved_total") == 3
    assert router.metric("pageturner:router_replica_put_aside_total") == 0
    assert (
        servers[0]
        .http.post("/v1/admin/drain", json={"drain": False}, headers=admin)
        .json()["draining"]
        is False
    )
    assert servers[0].http.get("/health").status_code == 200


@pytest.mark.slow
def test_an_answer_that_is_kept_moves_and_is_found_again(start: Callable[..., Server]) -> None:
    servers = [start(FAKE_STEP_SECONDS="0.02") for _ in range(2)]
    router = start(*(server.url for server in servers), "--health-interval", "0.1", command="route")
    first = router.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 5}).json()
    keeper = next(one for one in servers if one.notes("submit"))
    other = next(one for one in servers if one is not keeper)
    body = {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 60}
    whole = router.http.post("/v1/responses", json=body).json()

    def stream() -> list[dict[str, Any]]:
        with router.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        keeper.until(lambda: len(keeper.notes("submit")) == 3)
        keeper.until(lambda: keeper.metric("vllm:generation_tokens_total") >= 75)
        keeper.process.kill()
        told = running.result(60)
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    response = told[-1]["response"]
    assert {one["response"]["id"] for one in told if "response" in one} == {response["id"]}
    assert response["output"][0]["content"] == whole["output"][0]["content"], (
        "not a byte is changed"
    )
    assert response["previous_response_id"] == first["id"]
    assert response["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert router.metric("pageturner:router_moved_total") == 1
    assert len(other.notes("submit")) == 1
    assert router.http.get(f"/v1/responses/{response['id']}").json() == response
    more = {"input": "?", "previous_response_id": response["id"], "max_output_tokens": 3}
    assert router.http.post("/v1/responses", json=more).json()["usage"]["input_tokens"] > 60


@pytest.mark.slow
def test_a_stream_with_nobody_left_ends_honestly(start: Callable[..., Server]) -> None:
    first = start(FAKE_STEP_SECONDS="0.02")
    router = start(first.url, "--health-interval", "0.1", "--move-timeout", "0.5", command="route")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(events, router, prompt="alone", max_tokens=200)
        first.until(lambda: first.metric("vllm:generation_tokens_total") >= 5)
        first.process.kill()
        chunks = running.result(60)
    assert chunks[-1]["error"]["reason"] == "replica_lost"
    assert answer("alone", 200).startswith(text_of(chunks[:-1]))


# -- what a router makes of marks ------------------------------------------------------------------------
STREAM = (
    b':pt begin {"fingerprint":"f","seed":3,"created":7}\n\ndata: {"a":1}\n\n:pt 11\n\ndata: b\n\n'
    b"data: c\n\n:pt 12\n\n:pt 13\n\ndata: end\n\ndata: [DONE]\n\n"
)


def test_marks_are_taken_out_however_the_bytes_come() -> None:
    for size in range(1, len(STREAM) + 1):
        copy, out = StreamCopy("/v1/completions", b"{}"), b""
        for i in range(0, len(STREAM), size):
            out += copy.feed(STREAM[i : i + size])
        assert copy.tokens == [11, 12, 13]
        assert copy.movable
        assert out + copy.rest() == MARK.sub(b"", STREAM)
        assert json.loads(copy.request()) == {
            "path": "/v1/completions",
            "body": "{}",
            "tokens": [11, 12, 13],
            "told": False,
            "begun": {"fingerprint": "f", "seed": 3, "created": 7},
        }


def test_a_client_never_has_what_has_no_mark() -> None:
    for end in range(len(STREAM)):
        copy = StreamCopy("/v1/completions", b"{}")
        out = copy.feed(STREAM[:end])
        copy.lost()
        assert out in (b"", b'data: {"a":1}\n\n', b'data: {"a":1}\n\ndata: b\n\ndata: c\n\n')
        assert copy.rest() == b""
        assert bool(out) == bool(copy.tokens)


def test_other_streams_are_passed_on_as_they_are() -> None:
    for stream in (
        b"data: x\n\n:pt 5\n\n",
        b":ping\n\ndata: y\n\n",
        b":pt begin {]\n\ndata: z\n\n:pt 1\n\n",
    ):
        copy, out = StreamCopy("/v1/completions", b"{}"), b""
        for i in range(len(stream)):
            out += copy.feed(stream[i : i + 1])
        assert not copy.movable
        assert out + copy.rest() in (stream, b"data: z\n\n:pt 1\n\n")
    copy = StreamCopy("/v1/completions", b"{}")
    begun = STREAM.index(b"data: {")
    for end in range(1, 9):  # of a piece that is too long to be held, within the mark behind it
        copy = StreamCopy("/v1/completions", b"{}")
        out = copy.feed(STREAM[:begun]) + copy.feed(b"d" * MAX_HELD + b"\n\n:pt 11\n\n"[:end])
        assert len(out) > MAX_HELD - LONGEST_MARK
        assert not copy.movable
        out += copy.feed(b"\n\n:pt 11\n\n"[end:] + STREAM[STREAM.index(b"data: b") :])
        assert out + copy.rest() == b"d" * MAX_HELD + b"\n\n" + MARK.sub(
            b"", STREAM[STREAM.index(b"data: b") :]
        )
        assert copy.movable
        assert copy.tokens == [11, 12, 13]
    leaving = StreamCopy("/v1/completions", b"{}")
    leaving.feed(STREAM[: STREAM.index(b"data: b")] + LEAVING)
    assert leaving.leaving


def test_only_small_texts_are_kept() -> None:
    assert copy_of("POST", "/v1/completions", b"{}") is not None
    for method, path, body in (
        ("GET", "/v1/completions", b""),
        ("POST", "/api/embed", b"{}"),
        ("POST", "/v1/completions", b"\xff"),
        ("POST", "/v1/completions", bytes(MAX_BODY + 1)),
    ):
        assert copy_of(method, path, body) is None
