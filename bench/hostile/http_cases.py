"""Answers over HTTP with one thing wrong: as the router takes them from replicas, and as our own clients do.

Whatever a server sends, the router answers its client in good form, and a client of ours says what is
wrong in one error of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from hostile import frames, json_bodies, whole_server
from hostile.binary import Dice, damaged
from hostile.whole_server import ask, check
from pageturner.cli.sampling_flags import SamplingOptions
from pageturner.cli.sources import RemoteServer
from pageturner.config.settings import RouterConfig
from pageturner.errors import ClientError
from pageturner.http.api_keys import ApiKeys
from pageturner.http.http_client import is_header, parse_address
from pageturner.http.middleware import RequestMiddleware
from pageturner.lab.bench.client import Client
from pageturner.router.app import create_app
from pageturner.router.fleet import Fleet
from pageturner.router.proxy import Router

BEGIN = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
MIDDLE = {"index": 0, "text": "Hello", "delta": {"content": "Hello"}, "finish_reason": None}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
EVENTS: tuple[Any, ...] = (
    {"id": "x", "choices": [BEGIN]},
    {"id": "x", "choices": [MIDDLE]},
    {"id": "x", "choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE},
)
ERROR = {
    "error": {"message": "no", "type": "X", "param": None, "code": 500, "reason": "internal_error"}
}
STATUSES = (200, 200, 200, 200, 204, 400, 429, 500, 502, 503, 101, 100, 301, 0, 999)
READ_TIMEOUT = 0.05  # seconds


def stream(dice: Dice) -> bytes:
    """Server-sent events with something wrong, or nothing."""
    events = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in EVENTS] + [
        b"data: [DONE]\n\n"
    ]
    at = dice.randrange(len(events))
    kind = dice.choice(("none", "json", "json", "json", "bytes", "drop", "line", "ends", "endless"))
    if kind == "json":
        value = dice.choice((*EVENTS, ERROR))
        events[at] = b"data: " + json_bodies.changed(value, dice).replace(b"\n", b" ") + b"\n\n"
    elif kind == "bytes":
        events[at] = damaged(events[at], dice)[0]
    elif kind == "drop":
        del events[at]
    elif kind == "line":
        events.insert(
            at,
            dice.choice(
                (b": a comment\n\n", b"event: x\n", b"data:\n\n", b"data: \xff\n\n", b"\r\n")
            ),
        )
    elif kind == "ends":
        return b"".join(events).replace(b"\n", dice.choice((b"\r\n", b"\r", b"")))
    elif kind == "endless":
        events.insert(at, b"data: " + b"x" * 3_000_000)
    return b"".join(events)


def answer(dice: Dice) -> bytes:
    """An HTTP answer with something wrong in it, or nothing."""
    streamed = dice.random() < 0.6
    body = (
        stream(dice)
        if streamed
        else json_bodies.changed(dice.choice((ERROR, {"server_load": 3}, *EVENTS)), dice)
    )
    status = dice.choice(STATUSES)
    head = [
        b"HTTP/1.1 %d OK" % status,
        b"Content-Type: " + (b"text/event-stream" if streamed else b"application/json"),
    ]
    if dice.random() < 0.6:
        head.append(b"Transfer-Encoding: chunked")
        parts = frames.pieces(body, dice)
        body = b"".join(b"%x\r\n" % len(part) + part + b"\r\n" for part in parts) + b"0\r\n\r\n"
    elif dice.random() < 0.8:
        head.append(b"Content-Length: %d" % (len(body) + dice.choice((0, 0, 0, -1, 1, 10**6))))
    head += dice.choice(
        ((), (), (b"A: b",), (b"A: " + b"x" * 70_000,), (b"A:\x00b",), (b"Connection: a, close",))
    )
    raw = b"\r\n".join(head) + b"\r\n\r\n" + body
    if dice.random() < 0.4:
        raw = damaged(raw, dice, dice.choice((200, 1 << 30)))[0]
    return raw


@contextlib.asynccontextmanager
async def replica(dice: Dice) -> AsyncIterator[str]:
    """The address of a server that answers whatever it is asked like that, and good pages with some luck."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, EOFError, asyncio.CancelledError, asyncio.LimitOverrunError
        ):
            await reader.readuntil(b"\r\n\r\n")
            for piece in frames.pieces(answer(dice), dice):
                writer.write(piece)
                await writer.drain()
            if dice.random() < 0.2:
                await asyncio.sleep(2 * READ_TIMEOUT)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0)


def router(dice: Dice) -> str:
    """What a router makes of replicas that answer wrongly."""

    async def case() -> str:
        async with replica(dice) as one, replica(dice) as other:
            config = RouterConfig(
                health_timeout=READ_TIMEOUT, connect_timeout=1.0, read_timeout=READ_TIMEOUT
            )
            fleet = Fleet(
                [parse_address(url, "a replica") for url in (one, other)], config, time.monotonic
            )
            await fleet.check_health()
            for each in fleet.replicas:
                each.healthy = True
            router = Router(fleet, config)
            app = RequestMiddleware(create_app(router), ApiKeys(), config.max_body_size)
            body = json.dumps({"prompt": "hello", "stream": True}).encode()
            came = []
            for method, path in (
                ("POST", "/v1/completions"),
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
            ):
                try:
                    got = await ask(app, method, path, body)
                except whole_server.Found as found:
                    raise whole_server.Found(f"{path}: {found}") from found
                check(200 <= got.status < 600, f"status {got.status}")
                check(all(is_header(*header) for header in got.headers), "a header that is none")
                check(path != "/metrics" or got.status == 200, f"/metrics is a {got.status}")
                came.append(got.status)
            return str(came[0])

    return whole_server.in_loop(case, cut_off="replica lost")


def client(dice: Dice) -> str:
    """What our clients make of a server that answers wrongly: the one that measures, and a terminal's."""

    async def case() -> str:
        async with replica(dice) as url:
            got = await Client(url, "m", endpoint=dice.choice(("completions", "chat"))).complete(
                "hello", 3
            )
            said = await asyncio.to_thread(_chat, url)
        check(got.end >= got.begin, "times that are none")
        if not got.error:
            check(
                got.ttft >= 0 and got.tpot >= 0 and "".join(got.text) is not None,
                "figures that are none",
            )
        return said if got.error else "answer"

    return whole_server.in_loop(case)


def _chat(url: str) -> str:
    try:
        for _ in RemoteServer(url, "m").chat([{"role": "user", "content": "x"}], SamplingOptions()):
            pass
        RemoteServer(url)
    except ClientError as error:
        return error.code if error.code.isidentifier() else "odd"
    return "answer"
