"""The HTTP surface of a router: a request goes to one of several replicas, its answer comes back as
it is.

Owns what happens to a request in between: when another replica is tried, and what is said when
nobody is left. Must not know how replicas are watched or chosen (fleet.py), nor understand requests
and answers.

While its client was sent nothing, a request whose replica is gone, refuses it (429, 503) or breaks
over it (500, 502) is tried on another one: requests change nothing at a replica, so that asking
twice does no harm. A stream that breaks off later goes on at another replica, behind the last token
that was passed on (stream_copy.py); any other answer belongs to its replica from its first byte on.
Keys are the replicas' business: they are passed on, and never logged.

Neither side is trusted with the form of a message: path, query and headers that go to a replica are
written anew, and headers that are meant for neighbours go no further, in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from pageturner.config.settings import RouterConfig
from pageturner.errors import ClientError
from pageturner.http.error_responses import error_body_of
from pageturner.http.http_client import AnswerPieces, ConnectionLost, Headers, ServerAddress
from pageturner.http.receiving import read_body, until_client_leaves
from pageturner.http.request_info import ELAPSED, RequestInfo, elapsed_of
from pageturner.http.responses import sse_event
from pageturner.http.stream_marks import MOVES, RESUME
from pageturner.router.breaker import Attempt, Attempts
from pageturner.router.fleet import Fleet
from pageturner.router.forwarding import forwarded_headers, is_stream, kept_headers, told_error
from pageturner.router.keepers import ANYWHERE, RoutingConstraint, anywhere, tagged
from pageturner.router.replica import Replica, ReplicaRequest
from pageturner.router.request_hints import DigestPrefix, RequestHints, hints_of
from pageturner.router.retry_budget import RetryBudget
from pageturner.router.stream_copy import StreamCopy, copy_of

ELSEWHERE = (429, 503)  # what a replica answers when it cannot take a request, and another one may
# what it answers when something is wrong with it, or with the request. A 504 is the request's own
# deadline
FAILURES = (500, 502, 503)
POISON = "poisoned_request"  # it brought down the engine of one replica, and is not handed to the next one
# bytes of such an answer, and the time that they may take
MAX_REFUSAL, REFUSAL_SECONDS = 64 * 1024, 5.0
MOVE_PAUSE = 0.1  # seconds between two looks for one
MAX_MOVES = 50  # that are remembered
PATIENT_SECONDS = (
    1.0  # for which a client may hold up its answer; one that breaks off later is its own fault
)
_UNSAFE = re.compile(rb"[^A-Za-z0-9._~!$&'()*+,;=:@/?%-]")  # in a query (RFC 3986, 3.4)
MODEL_PAGE = "/v1/models/{id:path}"  # which names its model itself
NOT_FOUND = "the router has no such path: ask a replica"
ConstraintOf = Callable[[Fleet, bytes, str, bytes], RoutingConstraint]


@dataclass(slots=True)
class Router:
    """Everything that a request needs. `draining`: no new requests; `active`: requests under
    way."""

    fleet: Fleet
    config: RouterConfig
    draining: bool = False
    active: int = 0
    retries: int = 0
    moved: int = 0  # times that a stream went on at another replica
    # of the last streams that moved: at_s, request, from, to, tokens that it had
    moves: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_MOVES))
    cut_short: int = 0  # answers that broke off after their first byte
    rejected: Counter[str] = field(default_factory=Counter)
    retry_budget: RetryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.retry_budget = RetryBudget(self.config.retry_budget)

    def note_move(self, forwarded: ForwardedRequest, copy: StreamCopy, to: str) -> None:
        """A stream goes on at this address."""
        self.moved += 1
        move = {"request": forwarded.info.id[:8], "from": forwarded.answered_by, "to": to}
        self.moves.append({"at_s": time.monotonic(), "tokens": len(copy.tokens), **move})
        forwarded.answered_by = to

    def check_open(self) -> None:
        """ClientError where no more requests are taken."""
        if self.draining:
            raise ClientError(503, "shutting_down", "the router is shutting down: ask another one")
        if self.active >= self.config.max_open:
            raise ClientError(
                429,
                "queue_full",
                f"{self.active} requests are open, and no more are taken: try again in a moment",
            )

    def check_room(self, model: str) -> None:
        """ClientError where each replica that is there has as many requests as it may have."""
        if self.fleet.full(model):
            most = self.config.max_open_per_replica
            message = f"each replica has {most} requests, and no more are given to it: try again in a moment"
            raise ClientError(429, "queue_full", message)


@dataclass(slots=True)
class ForwardedRequest:
    """A request as it came. `body` is dropped when its answer begins: streams may last long.
    `since`: when its client began to wait, here or at a router before this one; `time.monotonic`.
    place: who may get it."""

    method: str
    target: str
    headers: Headers
    body: bytes
    asked: RequestHints
    since: float
    send: Send
    info: RequestInfo
    place: RoutingConstraint = ANYWHERE
    copy: StreamCopy | None = None
    attempts: Attempts = field(default_factory=lambda: Attempts(alone=True))
    keeper: ServerAddress | None = (
        None  # whose name its id has: of the replica where its answer began
    )
    answered_by: str = ""  # address of the replica that answers now
    streams: bool = False  # its answer is a stream
    last: bytes = b""  # piece of its answer that was passed on
    # of a stream whose first token has not come: the replica that was asked, and when
    timed: Replica | None = None
    timed_from: float = 0.0

    def head(self, address: ServerAddress) -> Headers:
        """Return the headers for a replica. They include the time that the request has already
        waited, because its deadline goes on while other replicas are tried."""
        waited = 1000 * (time.monotonic() - self.since)
        id = self.info.id
        if self.place.tagged:
            id = tagged(id, self.keeper or address)
        moves = [(MOVES, b"1")] if self.copy is not None else []
        return [*self.headers, *moves, (b"x-request-id", id.encode()), (ELAPSED, b"%.3f" % waited)]

    def to(self, address: ServerAddress) -> ReplicaRequest:
        """Return what the replica at this address gets."""
        return ReplicaRequest(self.method, self.target, self.head(address), self.body, self.asked)

    def resumed(self, address: ServerAddress, copy: StreamCopy) -> ReplicaRequest:
        """Return what the replica at this address gets to go on with a stream."""
        return ReplicaRequest("POST", RESUME, self.head(address), copy.request(), self.asked)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer of a replica that does not take a request."""

    status: int
    headers: Headers
    body: bytes


class Relay:
    """An endpoint that a replica answers. `path` is the same there; `digest_prefix` tells where the
    prefix of a request may be cached, `place` which replicas may answer it."""

    def __init__(
        self, router: Router, path: str, digest_prefix: DigestPrefix, place: ConstraintOf = anywhere
    ) -> None:
        self._router = router
        self._path = path
        self._digest_prefix = digest_prefix
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, info = self._router, scope["pageturner"]
        if scope["path"] != self._filled(scope):  # a route takes a line feed behind it for its end
            raise ClientError(404, "not_found", NOT_FOUND)
        router.check_open()
        router.active += 1
        router.retry_budget.request()
        since = time.monotonic() - elapsed_of(dict(scope["headers"]).get(ELAPSED))
        try:
            headers = forwarded_headers(scope)  # before the body: what follows it are no headers
            body = await read_body(receive, router.config.max_body_size)
            forwarded = self._forwarded(scope, headers, body, send)
            forwarded.since = since
            if forwarded.place.only is None:
                router.fleet.check_model(forwarded.asked.model)
            left = asyncio.ensure_future(until_client_leaves(receive))
            work = asyncio.ensure_future(self._answer(forwarded))
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

    def _filled(self, scope: Scope) -> str:
        """The path with its variable."""
        id = scope.get("path_params", {}).get("id", "")
        return self._path.replace("{id:path}", id).replace("{id}", id)

    def _forwarded(
        self, scope: Scope, headers: Headers, body: bytes, send: Send
    ) -> ForwardedRequest:
        query = _UNSAFE.sub(lambda byte: b"%%%02X" % byte[0][0], scope["query_string"]).decode(
            "ascii"
        )
        given = dict(headers)
        authorization = given.get(b"authorization", given.get(b"x-api-key", b""))
        owner = hashlib.blake2b(authorization, digest_size=16).digest()
        id = scope.get("path_params", {}).get("id", "")
        return ForwardedRequest(
            # HEAD is asked as GET: what is not sent to the client is at least parsed alike
            method="GET" if scope["method"] == "HEAD" else scope["method"],
            target=quote(self._filled(scope), safe="/:@") + (f"?{query}" if query else ""),
            headers=headers,
            body=body,
            asked=self._asked(scope, body, self._digest_prefix(body, authorization)),
            since=0.0,
            send=send,
            info=scope["pageturner"],
            place=self._place(self._router.fleet, body, id, owner),
            copy=copy_of(scope["method"], self._path, body),
        )

    def _asked(self, scope: Scope, body: bytes, prefix: tuple[bytes, ...]) -> RequestHints:
        if self._path == MODEL_PAGE:
            return RequestHints(model=scope["path_params"]["id"])
        return hints_of(body, prefix)

    async def _answer(self, forwarded: ForwardedRequest) -> None:
        """Pass on the answer of the first replica that gives one. Raises ClientError if none
        does."""
        router, tried, info = self._router, list[Replica](), forwarded.info
        refusal: Refusal | None = None
        broken: ConnectionLost | None = None
        free = True  # nothing was asked of anybody yet
        with Attempts(alone=not router.config.retries) as forwarded.attempts:
            while len(tried) <= router.config.retries:
                replica = forwarded.place.among(router.fleet, forwarded.asked, tried)
                if replica is None or not (free or router.retry_budget.take()):
                    break
                router.retries += bool(tried)
                tried.append(replica)
                info.about = {"replica": str(replica.address), "tries": len(tried)}
                try:
                    told = await self._ask(replica, forwarded)
                except ConnectionLost as lost:
                    if info.status:
                        await self._go_on(lost, forwarded, tried)
                        return
                    if lost.code == "silent":
                        raise ClientError(504, "replica_silent", f"no answer: {lost}") from None
                    broken = lost if lost.code == "broken" else broken
                    free = lost.code == "connect"  # it never saw the request
                    if forwarded.place.once and not free:
                        break
                    continue
                free = False
                if told is None:
                    return
                if refusal is None or told.status in ELSEWHERE or refusal.status not in ELSEWHERE:
                    refusal = told
                if _is_poison(told):
                    break
        if refusal is not None:
            await _send_whole(forwarded.send, refusal)
            return
        if broken is not None:
            raise ClientError(
                502, "replica_lost", f"no replica gave a whole answer: {broken}; ask again"
            )
        forwarded.place.check()
        router.check_room(forwarded.asked.model)
        raise ClientError(503, "no_replica", "no replica is there: try again in a moment")

    async def _ask(self, replica: Replica, forwarded: ForwardedRequest) -> Refusal | None:
        """Ask one replica and pass on its answer. Returns the refusal if it refused, else None.
        Raises ConnectionLost."""
        attempts = forwarded.attempts
        attempt = attempts.begin(replica.breaker)
        begin = time.monotonic()
        try:
            async with self._router.fleet.exchange_with(
                replica, forwarded.to(replica.address)
            ) as exchange:
                if 300 <= exchange.status < 400:
                    raise ConnectionLost(
                        "broken", f"it sends clients elsewhere (status {exchange.status})"
                    )
                if exchange.status not in ELSEWHERE and exchange.status not in FAILURES:
                    attempts.answered(attempt)
                    forwarded.body, forwarded.keeper = b"", replica.address
                    forwarded.answered_by = str(replica.address)
                    if is_stream(exchange.headers):
                        forwarded.timed = replica
                        forwarded.timed_from = begin
                    await self._pass_on(exchange, forwarded, attempt)
                    return None
                rest = await exchange.read_rest(MAX_REFUSAL, REFUSAL_SECONDS)
                refusal = Refusal(exchange.status, kept_headers(exchange.headers), rest)
        except ConnectionLost as lost:
            _blame(attempts, attempt, lost, begun=bool(forwarded.info.status))
            raise
        if refusal.status in FAILURES and not _is_poison(refusal):
            attempts.suspect(attempt)
        if refusal.status == 503:
            replica.check_now.set()
        return refusal

    async def _pass_on(
        self, exchange: AnswerPieces, forwarded: ForwardedRequest, attempt: Attempt
    ) -> None:
        """The answer from its first byte on."""
        headers = kept_headers(exchange.headers)
        if exchange.status == 204:  # which has no body, whatever length it claims
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        if exchange.status != 200 or not is_stream(headers):
            forwarded.copy = None
        forwarded.streams = is_stream(headers)
        start = {"type": "http.response.start", "status": exchange.status, "headers": headers}
        await forwarded.send(start)
        await self._pass_pieces(exchange, forwarded, attempt)

    async def _pass_pieces(
        self, exchange: AnswerPieces, forwarded: ForwardedRequest, attempt: Attempt
    ) -> None:
        """Piece by piece, each sent before the next one is read: a slow client slows its replica,
        which may then cut it off without being to blame. Raises ConnectionLost, also for a stream
        that shall move."""
        copy, held_up = forwarded.copy, 0.0
        while True:
            try:
                piece = await exchange.read_piece()
            except ConnectionLost:
                if held_up > PATIENT_SECONDS:
                    attempt.dropped()
                raise
            if copy is not None:
                piece = copy.feed(piece)
                piece += copy.rest() if exchange.ended and not copy.leaving else b""
            leaving = copy is not None and copy.leaving
            over = exchange.ended and not leaving
            begin = time.monotonic()
            if forwarded.timed is not None and (over or copy is None or not copy.waits):
                forwarded.timed.first_bytes.append(begin - forwarded.timed_from)
                forwarded.timed = None
            if piece or over:
                body = {"type": "http.response.body", "body": piece, "more_body": not over}
                await forwarded.send(body)
                forwarded.last = piece
            held_up += time.monotonic() - begin
            if over or leaving:
                attempt.ended()
            if leaving:
                raise ConnectionLost("leaving", "the replica is drained")
            if over:
                return

    async def _go_on(
        self, lost: ConnectionLost, forwarded: ForwardedRequest, tried: list[Replica]
    ) -> None:
        """Resume a stream whose replica is lost at another replica, or end it with an error if
        there is none."""
        copy, fleet, patience = forwarded.copy, self._router.fleet, self._router.config.move_timeout
        until = time.monotonic() + patience
        while copy is not None and copy.movable and time.monotonic() < until:
            copy.lost()
            replica = fleet.choose(forwarded.asked, tried)
            if replica is None:
                tried.clear()  # one of them may have been started again
                await asyncio.sleep(MOVE_PAUSE)
                continue
            tried.append(replica)
            forwarded.info.about = {"replica": str(replica.address), "tries": len(tried)}
            known, attempt = len(copy.tokens), forwarded.attempts.begin(replica.breaker)
            try:
                await self._ask_to_go_on(replica, forwarded, copy, attempt)
                return
            except ConnectionLost as again:
                lost = again
                _blame(forwarded.attempts, attempt, again, begun=True)
            if len(copy.tokens) > known:
                tried, until = [replica], time.monotonic() + patience
        self._router.cut_short += 1
        forwarded.info.abort_reason = "replica lost"
        if forwarded.streams:  # anything else ends with its connection, short of its length
            await forwarded.send(
                {
                    "type": "http.response.body",
                    "body": _last_words(lost, forwarded.last, self._path),
                }
            )

    async def _ask_to_go_on(
        self, replica: Replica, forwarded: ForwardedRequest, copy: StreamCopy, attempt: Attempt
    ) -> None:
        """Raises ConnectionLost."""
        async with self._router.fleet.exchange_with(
            replica, forwarded.resumed(replica.address, copy)
        ) as exchange:
            if exchange.status != 200:
                attempt.dropped()
                raise ConnectionLost(
                    "leaving", f"it does not go on with a stream (status {exchange.status})"
                )
            forwarded.attempts.answered(attempt)
            self._router.note_move(forwarded, copy, str(replica.address))
            if forwarded.place.tagged and forwarded.keeper is not None:
                id = tagged(forwarded.info.id, forwarded.keeper)
                self._router.fleet.kept_elsewhere(id, forwarded.place.owner, replica)
            await self._pass_pieces(exchange, forwarded, attempt)


def _blame(attempts: Attempts, attempt: Attempt, lost: ConnectionLost, *, begun: bool) -> None:
    """Record a lost connection against the replica, or as a suspected fault of the request."""
    if lost.code in ("local", "leaving"):
        return
    if lost.code == "broken" and not begun:
        attempts.suspect(attempt)
    else:
        attempt.failed()


def _is_poison(refusal: Refusal) -> bool:
    return refusal.status == 500 and told_error(refusal.body).reason == POISON


def _last_words(lost: ConnectionLost, last: bytes, path: str) -> bytes:
    """The end of a stream that broke off behind this piece, perhaps inside of an event."""
    error = ClientError(502, "replica_lost", f"the answer broke off: {lost}; ask again")
    words = error_body_of(path, error)
    if path.startswith("/api/"):
        return (b"" if last.endswith(b"\n") else b"\n") + words + b"\n"
    between = b"" if last.endswith(b"\n\n") else b"\n\n"
    if path.startswith("/v1/messages"):
        return between + b"event: error\n" + sse_event(words)
    return between + sse_event(words) + sse_event(b"[DONE]")


async def _send_whole(send: Send, refusal: Refusal) -> None:
    length = (b"content-length", str(len(refusal.body)).encode())
    headers = [*(header for header in refusal.headers if header[0] != length[0]), length]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
