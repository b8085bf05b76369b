"""Bodies of requests to all endpoints, and answers of servers that are not what they should be: a few of the
cases of bench/fuzz_frames.py, and by name what was once found by them."""

from __future__ import annotations

import asyncio
import io
import random
from typing import Any

import pytest

from hostile import http_cases, json_bodies, whole_server
from hostile.whole_server import ADMIN, ask, check_answer
from pageturner.cli.stream_events import stream_events
from pageturner.http.http_client import MAX_REST, ConnectionLost, EventSplitter
from pageturner.lab.bench.client import Client
from support.refusals import client_error

KEY = [(b"authorization", b"Bearer " + ADMIN.encode())]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_asked_the_answer_has_a_form(seed: int) -> None:
    for number in range(4):
        json_bodies.json_body(random.Random(f"test {seed} {number}"))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_replica_answers_the_router_answers_in_form(seed: int) -> None:
    for number in range(6):
        http_cases.router(random.Random(f"test {seed} {number}"))


def test_whatever_a_server_answers_our_clients_say_what_it_is() -> None:
    for number in range(30):
        http_cases.client(random.Random(f"test {number}"))


@pytest.mark.parametrize("raw", [b'{"a":' + b"[" * 4000, b'{"\xff": 1}', b'"a"', b"{}]"])
def test_settings_that_are_no_json(raw: bytes) -> None:
    async def case() -> str:
        async with whole_server.server() as (app, _):
            assert (
                check_answer(await ask(app, "POST", "/v1/admin/config", raw, KEY)) == "invalid_json"
            )
        return ""

    whole_server.in_loop(case)


def test_a_body_that_is_too_long_and_whole_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is left of it to wait for: DISCARD_SECONDS would be for ever here."""
    monkeypatch.setattr("pageturner.http.receiving.DISCARD_SECONDS", 1000)

    async def case() -> str:
        async with whole_server.server() as (app, _):
            assert (await ask(app, "POST", "/v1/admin/config", b" " * 5000, KEY)).status == 413
        return ""

    monkeypatch.setattr(whole_server, "PATIENCE", 2.0)
    whole_server.in_loop(case)


NO_EVENTS = (
    b"5",
    b"null",
    b'"a"',
    b"[]",
    b'{"error": "no"}',
    b'{"error": [1]}',
    b'{"choices": 5}',
    b'{"choices": [null]}',
    b'{"choices": [{"delta": "x"}]}',
    b'{"choices": [{"text": 5}]}',
    b'{"usage": 5}',
    b"[" * 5000,
    b'{"a": ' + b"[" * 5000,
    b'"\xff"',
    b'{"usage": {"prompt_tokens": "x"}}',
)


@pytest.mark.parametrize("event", NO_EVENTS)
def test_what_is_no_event_is_one_error_at_a_terminal(event: bytes) -> None:
    with client_error() as caught:
        list(stream_events(io.BytesIO(b"data: " + event + b"\n\ndata: [DONE]\n\n")))
    assert caught.value.code in ("bad_event", "server_error")
    assert len(caught.value.message) < 3000


@pytest.mark.parametrize("event", NO_EVENTS)
def test_what_is_no_event_is_never_raised_where_times_are_measured(event: bytes) -> None:
    async def asked() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: " + event + b"\n\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await Client(f"http://127.0.0.1:{port}", "m").complete("x", 1)
        finally:
            server.close()

    assert asyncio.run(asked()).error


def test_an_event_without_an_end_is_not_kept() -> None:
    splitter = EventSplitter()
    for _ in range(1 + MAX_REST // 65536):
        assert splitter.feed(b"x" * 65536) == []
    with pytest.raises(ConnectionLost, match="longer than"):
        splitter.feed(b"x")


@pytest.mark.parametrize("name", ["priority", "max_tokens", "seed", "n", "logprobs"])
def test_numbers_beyond_64_bits_are_refused_by_whoever_reads_them(name: str) -> None:
    """A text worker reads what has a grammar, and could not even say what it had read."""
    body = b'{"prompt": "x", "structured_outputs": {"choice": ["a"]}, "%s": %s}' % (
        name.encode(),
        b"9" * 400,
    )

    async def case() -> str:
        async with whole_server.server() as (app, _):
            for raw in (body, body + b" " * 5000):
                answer = await ask(app, "POST", "/v1/completions", raw)
                assert (answer.status, check_answer(answer)) == (400, "invalid_value")
        return ""

    whole_server.in_loop(case)
