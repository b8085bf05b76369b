"""The HTTP surface of a router: a request goes to one of several replicas, its answer comes back as it is.

Owns what happens to a request in between: when another replica is tried, and what is said when nobody is
left. Must not know how replicas are watched or chosen (fleet.py), nor understand requests and answers.

While its client was sent nothing, a request whose replica is gone, or refuses it (429, 503), is tried on
another one. From the first byte on it belongs to its replica. Keys are the replicas' business: they are
passed on, and never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import pageturner
from pageturner import http_client
from pageturner.config import RouterConfig
from pageturner.errors import ClientError
from pageturner.http_client import ConnectionLost, Exchange, Headers
from pageturner.router.fleet import Fleet, Replica
from pageturner.router.prefix_digest import beginning_of
from pageturner.serve import metrics, replies
from pageturner.serve.middleware import Note, body_of, gone

ELSEWHERE = (429, 503)  # what a replica answers when it cannot take a request, and another one may
# between two neighbours only (RFC 9110, 7.6.1); and what uvicorn or `request_bytes` writes anew
HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"host", b"expect", b"date", b"x-request-id",
})  # fmt: skip
Beginning = Callable[[bytes, bytes], tuple[bytes, ...]]


@dataclass(slots=True)
class Router:
    """Everything that a request needs. `draining`: no new requests; `active`: requests under way."""

    fleet: Fleet
    config: RouterConfig
    draining: bool = False
    active: int = 0
    retries: int = 0
    cut: int = 0  # answers that broke off after their first byte
    rejected: Counter[str] = field(default_factory=Counter)

    def check_open(self) -> None:
        """ClientError where no more requests are taken."""
        if self.draining:
            raise ClientError(503, "shutting_down", "the router is shutting down: ask another one")
        if self.active >= self.config.max_open:
            message = f"{self.active} requests are open, and no more are taken: try again in a moment"
            raise ClientError(429, "queue_full", message)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    method: str
    target: str
    headers: Headers
    body: bytes
    beginning: tuple[bytes, ...]


class Relay:
    """An endpoint that a replica answers. `beginning`: what tells where its prefix may be cached."""

    def __init__(self, router: Router, beginning: Beginning) -> None:
        self._router = router
        self._beginning = beginning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, note = self._router, scope["pageturner"]
        router.check_open()
        router.active += 1
        try:
            body = await body_of(receive, router.config.max_body_size)
            asked = _asked(scope, body, note, self._beginning)
            left = asyncio.ensure_future(gone(receive))
            work = asyncio.ensure_future(self._answer(asked, send, note))
            try:
                await asyncio.wait({left, work}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                else:
                    note.cut = "client left"
            finally:
                left.cancel()
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClientError):
                    await work
        finally:
            router.active -= 1

    async def _answer(self, asked: Asked, send: Send, note: Note) -> None:
        """By the first replica that gives one. ClientError when none does."""
        fleet, tried = self._router.fleet, list[Replica]()
        refusal: tuple[int, Headers, bytes] | None = None
        while len(tried) <= self._router.config.retries:
            replica = fleet.choose(asked.beginning, tried)
            if replica is None:
                break
            self._router.retries += bool(tried)
            tried.append(replica)
            note.about = f" replica={replica.address} tries={len(tried)}"
            request = http_client.request_bytes(
                replica.address, asked.method, asked.target, asked.headers, asked.body
            )
            try:
                async with fleet.asking(replica, request) as exchange:
                    if exchange.status not in ELSEWHERE:
                        await self._pass_on(exchange, send, note)
                        return
                    refusal = exchange.status, _kept(exchange.headers), await exchange.read_rest()
                    if exchange.status == 503:
                        replica.doubt.set()
            except ConnectionLost as lost:
                if note.status:
                    return
                if lost.code == "silent":
                    raise ClientError(504, "replica_silent", f"no answer: {lost}") from None
        if refusal is None:
            raise ClientError(503, "no_replica", "no replica is there: try again in a moment")
        await _send_whole(send, *refusal)

    async def _pass_on(self, exchange: Exchange, send: Send, note: Note) -> None:
        """Piece by piece, each sent before the next one is read: a slow client slows its replica."""
        headers = _kept(exchange.headers)
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        piece = b""
        while True:
            try:
                piece = await exchange.read_piece()
            except ConnectionLost as lost:
                self._router.cut += 1
                note.cut = "replica lost"
                if _is_stream(headers):  # anything else ends with its connection, short of its length
                    await send({"type": "http.response.body", "body": _last_words(lost, piece)})
                raise
            await send({"type": "http.response.body", "body": piece, "more_body": not exchange.ended})
            if exchange.ended:
                return


def _asked(scope: Scope, body: bytes, note: Note, beginning: Beginning) -> Asked:
    headers = _kept(scope["headers"])
    query = scope["query_string"].decode("latin-1")
    whose = dict(headers).get(b"authorization", b"")
    headers = [(name, value) for name, value in headers if name != b"content-length"]
    headers.append((b"x-request-id", note.id.encode()))
    # HEAD is asked as GET: what is not sent to the client is at least parsed alike
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    target = scope["path"] + (f"?{query}" if query else "")
    return Asked(method, target, headers, body, beginning(body, whose))


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Those that are meant for the other end."""
    headers = list(headers)
    named = b",".join(value for name, value in headers if name == b"connection").lower()
    dropped = HOP | {name.strip() for name in named.split(b",")}
    return [(name, value) for name, value in headers if name not in dropped]


def _is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _last_words(lost: ConnectionLost, last: bytes) -> bytes:
    """The end of a stream that broke off behind this piece, perhaps inside of an event."""
    words = replies.error(502, "replica_lost", f"the answer broke off: {lost}; ask again")
    between = b"" if last.endswith(b"\n\n") else b"\n\n"
    return between + replies.sse_event(words) + replies.sse_event(b"[DONE]")


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _no_beginning(body: bytes, whose: bytes) -> tuple[bytes, ...]:
    return ()


class Pages:
    """What the router answers itself."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, _: HTTPRequest) -> Response:
        router = self._router
        if router.draining:
            raise ClientError(503, "shutting_down", "the router is shutting down")
        there = sum(replica.healthy for replica in router.fleet.replicas)
        if not there:
            raise ClientError(503, "no_replica", "no replica is there")
        return replies.page({"status": "ok", "healthy": there, "replicas": len(router.fleet.replicas)})

    async def ping(self, _: HTTPRequest) -> Response:
        return Response()

    async def version(self, _: HTTPRequest) -> Response:
        return replies.page({"version": pageturner.__version__})

    async def load(self, _: HTTPRequest) -> Response:
        return replies.page({"server_load": self._router.active})

    async def metrics(self, _: HTTPRequest) -> Response:
        text = metrics.exposition(_families(self._router))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _families(router: Router) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, help: str, values: dict[str, float]) -> Any:
        family = GaugeMetricFamily(f"pageturner:router_{name}", help, labels=["replica"])
        for replica, value in values.items():
            family.add_metric([replica], value)
        return family

    def counter(name: str, help: str, labels: str, rows: Iterable[tuple[list[str], float]]) -> Any:
        family = CounterMetricFamily(f"pageturner:router_{name}", help, labels=labels.split())
        for row in rows:
            family.add_metric(*row)
        return family

    def each(counts: Callable[[Replica], Counter[str]]) -> Iterable[tuple[list[str], float]]:
        return (([name, key], n) for name, one in named.items() for key, n in counts(one).items())

    named = {str(one.address): one for one in router.fleet.replicas}
    yield gauge("replica_up", "1 while it takes requests", {n: one.healthy for n, one in named.items()})
    yield gauge("replica_open", "Requests of ours that it has", {n: one.open for n, one in named.items()})
    help = "Answers under way there for others, when last asked"
    yield gauge("replica_others", help, {n: one.others for n, one in named.items()})
    yield counter("answers", "Answers begun, refusals too", "replica status", each(lambda one: one.answers))
    help = "Requests whose replica was gone, silent, or broke off"
    yield counter("losses", help, "replica reason", each(lambda one: one.losses))
    help = "Prompts, by whether they went where their beginning is known"
    yield counter("placed", help, "how", (([how], n) for how, n in router.fleet.placed.items()))
    help = "Requests that the router refused itself"
    yield counter("rejections", help, "reason", (([code], n) for code, n in router.rejected.items()))
    yield counter("retries", "Requests tried on one more replica", "", [([], router.retries)])
    yield counter("cut", "Answers that broke off after their first byte", "", [([], router.cut)])


def create_app(router: Router) -> Starlette:
    """All routes. Errors of the router have the shape of the servers'."""

    async def refuse(_: HTTPRequest, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):
            path = "the router has no such path: ask a replica" if error.status_code == 404 else error.detail
            client = ClientError(error.status_code, error.detail.lower().replace(" ", "_"), path)
            headers.update(error.headers or {})
        else:
            assert isinstance(error, ClientError)
            client = error
        if client.status in ELSEWHERE:
            headers["retry-after"] = "1"
            router.rejected[client.code] += 1
        content = replies.error(client.status, client.code, client.message, client.param)
        return Response(content, client.status, headers, "application/json")

    pages = Pages(router)
    prompts, others = Relay(router, beginning_of), Relay(router, _no_beginning)
    routes = [
        Route("/v1/completions", prompts, methods=["POST"]),
        Route("/v1/chat/completions", prompts, methods=["POST"]),
        Route("/v1/models", others, methods=["GET"]),
        Route("/tokenize", others, methods=["POST"]),
        Route("/detokenize", others, methods=["POST"]),
        Route("/health", pages.health),
        Route("/ping", pages.ping, methods=["GET", "POST"]),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
        Route("/load", pages.load),
    ]
    return Starlette(routes=routes, exception_handlers={ClientError: refuse, HTTPException: refuse})
