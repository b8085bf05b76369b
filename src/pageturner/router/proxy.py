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

from starlette.applications import Starlette
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
from pageturner.router.prefix_digest import prefix_digests
from pageturner.serve import prometheus, replies
from pageturner.serve.error_responses import error_body, error_handlers
from pageturner.serve.middleware import RequestInfo, read_body, until_client_leaves
from pageturner.serve.prometheus import Exposition

ELSEWHERE = (429, 503)  # what a replica answers when it cannot take a request, and another one may
# between two neighbours only (RFC 9110, 7.6.1); what uvicorn or `request_bytes` writes anew; and the Origin,
# which the router has judged by its own name
HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"host", b"expect", b"date", b"x-request-id",
    b"origin",
})  # fmt: skip
DigestPrefix = Callable[[bytes, bytes], tuple[bytes, ...]]


@dataclass(slots=True)
class Router:
    """Everything that a request needs. `draining`: no new requests; `active`: requests under way."""

    fleet: Fleet
    config: RouterConfig
    draining: bool = False
    active: int = 0
    retries: int = 0
    cut_short: int = 0  # answers that broke off after their first byte
    rejected: Counter[str] = field(default_factory=Counter)

    def check_open(self) -> None:
        """ClientError where no more requests are taken."""
        if self.draining:
            raise ClientError(503, "shutting_down", "the router is shutting down: ask another one")
        if self.active >= self.config.max_open:
            message = f"{self.active} requests are open, and no more are taken: try again in a moment"
            raise ClientError(429, "queue_full", message)


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as it came."""

    method: str
    target: str
    headers: Headers
    body: bytes
    prefix: tuple[bytes, ...]


class Relay:
    """An endpoint that a replica answers. `digest_prefix` tells where its prefix may be cached."""

    def __init__(self, router: Router, digest_prefix: DigestPrefix) -> None:
        self._router = router
        self._digest_prefix = digest_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, info = self._router, scope["pageturner"]
        router.check_open()
        router.active += 1
        try:
            body = await read_body(receive, router.config.max_body_size)
            forwarded = _forwarded(scope, body, info, self._digest_prefix)
            left = asyncio.ensure_future(until_client_leaves(receive))
            work = asyncio.ensure_future(self._answer(forwarded, send, info))
            try:
                await asyncio.wait({left, work}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                else:
                    info.abort_reason = "client left"
            finally:
                left.cancel()
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClientError):
                    await work
        finally:
            router.active -= 1

    async def _answer(self, forwarded: ForwardedRequest, send: Send, info: RequestInfo) -> None:
        """By the first replica that gives one. ClientError when none does."""
        fleet, tried = self._router.fleet, list[Replica]()
        refusal: tuple[int, Headers, bytes] | None = None
        while len(tried) <= self._router.config.retries:
            replica = fleet.choose(forwarded.prefix, tried)
            if replica is None:
                break
            self._router.retries += bool(tried)
            tried.append(replica)
            info.about = f" replica={replica.address} tries={len(tried)}"
            request = http_client.request_bytes(
                replica.address, forwarded.method, forwarded.target, forwarded.headers, forwarded.body
            )
            try:
                async with fleet.exchange_with(replica, request) as exchange:
                    if exchange.status not in ELSEWHERE:
                        await self._pass_on(exchange, send, info)
                        return
                    refusal = exchange.status, _kept(exchange.headers), await exchange.read_rest()
                    if exchange.status == 503:
                        replica.check_now.set()
            except ConnectionLost as lost:
                if info.status:
                    return
                if lost.code == "silent":
                    raise ClientError(504, "replica_silent", f"no answer: {lost}") from None
        if refusal is None:
            raise ClientError(503, "no_replica", "no replica is there: try again in a moment")
        await _send_whole(send, *refusal)

    async def _pass_on(self, exchange: Exchange, send: Send, info: RequestInfo) -> None:
        """Piece by piece, each sent before the next one is read: a slow client slows its replica."""
        headers = _kept(exchange.headers)
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        piece = b""
        while True:
            try:
                piece = await exchange.read_piece()
            except ConnectionLost as lost:
                self._router.cut_short += 1
                info.abort_reason = "replica lost"
                if _is_stream(headers):  # anything else ends with its connection, short of its length
                    await send({"type": "http.response.body", "body": _last_words(lost, piece)})
                raise
            await send({"type": "http.response.body", "body": piece, "more_body": not exchange.ended})
            if exchange.ended:
                return


def _forwarded(scope: Scope, body: bytes, info: RequestInfo, digest_prefix: DigestPrefix) -> ForwardedRequest:
    headers = _kept(scope["headers"])
    query = scope["query_string"].decode("latin-1")
    authorization = dict(headers).get(b"authorization", b"")
    headers = [(name, value) for name, value in headers if name != b"content-length"]
    headers.append((b"x-request-id", info.id.encode()))
    # HEAD is asked as GET: what is not sent to the client is at least parsed alike
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    target = scope["path"] + (f"?{query}" if query else "")
    return ForwardedRequest(
        method=method, target=target, headers=headers, body=body, prefix=digest_prefix(body, authorization)
    )


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
    words = error_body(502, "replica_lost", f"the answer broke off: {lost}; ask again")
    between = b"" if last.endswith(b"\n\n") else b"\n\n"
    return between + replies.sse_event(words) + replies.sse_event(b"[DONE]")


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _no_prefix(body: bytes, authorization: bytes) -> tuple[bytes, ...]:
    return ()


class RouterPages:
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
        return replies.json_response(
            {"status": "ok", "healthy": there, "replicas": len(router.fleet.replicas)}
        )

    async def ping(self, _: HTTPRequest) -> Response:
        return Response()

    async def version(self, _: HTTPRequest) -> Response:
        return replies.json_response({"version": pageturner.__version__})

    async def load(self, _: HTTPRequest) -> Response:
        return replies.json_response({"server_load": self._router.active})

    async def metrics(self, _: HTTPRequest) -> Response:
        return Response(_exposition(self._router), media_type=prometheus.MEDIA_TYPE)


def _exposition(router: Router) -> bytes:
    """What the router has counted, as Prometheus reads it."""
    exposition, fleet = Exposition(), router.fleet
    replicas = {str(replica.address): replica for replica in fleet.replicas}

    def of_each(value: Callable[[Replica], float]) -> dict[str, float]:
        return {name: value(replica) for name, replica in replicas.items()}

    def counts(counter: Callable[[Replica], Counter[str]]) -> dict[tuple[str, ...], float]:
        return {(name, key): n for name, replica in replicas.items() for key, n in counter(replica).items()}

    prefix, where = "pageturner:router_", ("replica",)
    for name, help, values in (
        ("replica_up", "1 while it takes requests", of_each(lambda one: one.healthy)),
        ("replica_open", "Requests of ours that it has", of_each(lambda one: one.open)),
        (
            "replica_others",
            "Answers under way there for others, when last asked",
            of_each(lambda one: one.others),
        ),
    ):
        exposition.gauges(prefix + name, help, where, values)
    help = "Answers begun, refusals too"
    exposition.counters(prefix + "answers", help, ("replica", "status"), counts(lambda one: one.answers))
    help = "Requests whose replica was gone, silent, or broke off"
    exposition.counters(prefix + "losses", help, ("replica", "reason"), counts(lambda one: one.losses))
    help = "Prompts, by whether they went where their beginning is known"
    exposition.counters(prefix + "placed", help, ("how",), fleet.placed)
    help = "Requests that the router refused itself"
    exposition.counters(prefix + "rejections", help, ("reason",), router.rejected)
    exposition.counter(prefix + "retries", "Requests tried on one more replica", router.retries)
    exposition.counter(prefix + "cut", "Answers that broke off after their first byte", router.cut_short)
    return exposition.text()


def create_app(router: Router) -> Starlette:
    """All routes. Errors of the router have the shape of the servers'."""
    pages = RouterPages(router)
    prompts, others = Relay(router, prefix_digests), Relay(router, _no_prefix)
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
    not_found = "the router has no such path: ask a replica"
    errors = error_handlers(not_found, _retry_after, router.rejected)
    return Starlette(routes=routes, exception_handlers=errors)


def _retry_after(error: ClientError) -> int | None:
    return 1 if error.status in ELSEWHERE else None
