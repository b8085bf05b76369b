"""Streams that move: a server goes on with an answer that another one began, at its next token.

A router that asks for it (`X-Pageturner-Moves: 1`) finds marks in a stream, comments to any reader
of server-sent events: how the answer began, and behind the events of each token that token. With
them and the request, `POST /v1/streams/resume` has another server go on. An answer depends on its
request and its seed alone, so what follows is what would have followed, byte for byte. Streams of
one choice without logprobs move.

Owns the marks and that request. Must not know the bytes of an answer (dialect), nor who moves it
(router).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.http.decoding import decode_body
from pageturner.http.receiving import again, read_body
from pageturner.http.request_info import RequestInfo
from pageturner.http.responses import json_response
from pageturner.http.stream_marks import (
    ALIVE,
    BEGIN,
    LEAVING,
    MOVES,
    RESPONSES,
    RESUME,
    STREAMED,
    MovedStream,
    StreamBeginning,
    token_mark,
)
from pageturner.request import Event
from pageturner.server.admission.service_level import RequestContext
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.generate import GenerateEndpoint
from pageturner.server.api.base.replies import Reply
from pageturner.server.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from pageturner.server.api.ollama.ollama_pages import OllamaEndpoint
from pageturner.server.api.responses.response_store import ResponseRecord, ResponseStore
from pageturner.server.api.responses.responses import dialect_of
from pageturner.server.api.responses.responses_pages import ResponsesPages
from pageturner.server.service import Service
from pageturner.server.text_workers.text_jobs import SPOKEN
from pageturner.text.output_stream import OutputPiece, OutputSink, OutputStream

MAX_DRAIN_BODY = 1024  # bytes


class DrainOrder(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/admin/drain. drain: false takes it back."""

    drain: bool = True


@dataclass(slots=True)
class DrainSet:
    """The streams of one server that a router could have go on elsewhere; done: it shall."""

    open: set[asyncio.Future[None]] = field(default_factory=set)

    def leave(self) -> int:
        """Have all of them leave. How many there are."""
        waiting = [one for one in self.open if not one.done()]
        for one in waiting:
            one.set_result(None)
        return len(waiting)

    async def answer(
        self,
        application: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        only_here: Callable[[], bool],
    ) -> None:
        """Let an application answer until it has ended or shall go on elsewhere. only_here:
        nobody else could begin it."""
        begun = movable = ended = False

        async def sent(message: Message) -> None:
            nonlocal begun, movable, ended
            begun = True
            movable = movable or message.get("body", b"").startswith(BEGIN)
            ended = ended or (
                message["type"] == "http.response.body" and not message.get("more_body", False)
            )
            await send(message)

        leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open.add(leave)
        work = asyncio.ensure_future(application(scope, receive, sent))
        try:
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and (movable or not (begun or only_here())):
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                if not begun:
                    raise ClientError(503, "draining", "the server is drained: ask another one")
                if not ended:
                    await send({"type": "http.response.body", "body": LEAVING})
                return
            await work
        finally:
            self.open.discard(leave)
            work.cancel()


class MarkedRoute(Route):
    """A route of those who ask for marks; to all others it is not there."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        asked = scope["type"] == "http" and (MOVES, b"1") in scope["headers"]
        return super().matches(scope) if asked else (Match.NONE, {})


class MovableEndpoint:
    """An endpoint whose streams are marked."""

    def __init__(self, service: Service, dialect: Dialect, departures: DrainSet) -> None:
        self._service, self._dialect, self._departures = service, dialect, departures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(None, scope, receive, send)

    async def answer(
        self, moved: MovedStream | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """An answer, which goes on from `moved` where there is something."""
        marked = MarkedAnswer(self._service, self._dialect, moved)
        answer = self._application(marked, moved)
        await self._departures.answer(answer, scope, receive, send, lambda: marked.only_here)

    def _application(self, marked: MarkedAnswer, moved: MovedStream | None) -> ASGIApp:
        """Return what stands in front of the marked answer."""
        if moved is None and self._dialect in (OLLAMA_CHAT, OLLAMA_GENERATE):
            return OllamaEndpoint(self._service, self._dialect, marked)
        return marked


class MovableResponses(MovableEndpoint):
    """POST /v1/responses, with marks for who asks for them. Its answers are kept where they end."""

    def __init__(
        self, service: Service, pages: ResponsesPages, store: ResponseStore, departures: DrainSet
    ) -> None:
        super().__init__(service, dialect_of(store), departures)
        self._pages = pages

    def _application(self, marked: MarkedAnswer, moved: MovedStream | None) -> ASGIApp:
        def endpoint(record: ResponseRecord) -> MarkedAnswer:
            marked.record = record
            return marked

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            begun = None if moved is None else moved.begun
            await self._pages.answer(scope, receive, send, endpoint, begun)

        return answer


class ResumePage:
    """`POST /v1/streams/resume`. endpoints: by the paths whose streams move."""

    def __init__(self, service: Service, endpoints: dict[str, MovableEndpoint]) -> None:
        self._service, self._endpoints = service, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        service.check_open()
        raw = await read_body(receive, 2 * service.config.max_body_size)
        moved = decode_body(raw, MovedStream, "no stream that could go on")
        endpoint, ready = self._endpoints.get(moved.path), service.supervisor.ready
        if endpoint is None:
            known = ", ".join(self._endpoints)
            message = f"streams of {moved.path[:80]!r} do not move: those of {known} do"
            raise ClientError(400, "invalid_value", message, "path")
        if ready is None or moved.begun.fingerprint != ready.fingerprint:
            message = "this server computes other answers (another model, type or processor): ask another one"
            raise ClientError(409, "other_engine", message, "begun")
        if max(moved.tokens, default=0) >= service.served().vocab_size:
            raise ClientError(400, "invalid_value", "no such token in the vocabulary", "tokens")
        inner = {**scope, "path": moved.path}
        await endpoint.answer(moved, inner, again(moved.body.encode(), receive), send)


class MarkedAnswer(GenerateEndpoint):
    """One answer with marks, which goes on from `moved` where there is something."""

    def __init__(self, service: Service, dialect: Dialect, moved: MovedStream | None) -> None:
        marked = replace(
            dialect, chunk=self._marked, begin=self._begins, alive=dialect.alive + ALIVE
        )
        super().__init__(service, marked)
        self._unmarked = dialect
        self._moved = moved
        self._begun = False
        self._replayed: list[OutputPiece] = []
        self.record: ResponseRecord | None = None  # of an answer that is kept

    @property
    def only_here(self) -> bool:
        """Return whether no other server could resume this answer."""
        return self.record is not None and self.record.only_here

    def put(self, piece: OutputPiece) -> None:
        """A piece that the client has already."""
        self._replayed.append(piece)

    def _marked(self, reply: Reply, piece: OutputPiece) -> bytes:
        events = self._beginning(reply, piece.stream) + self._unmarked.chunk(reply, piece)
        # what stands behind the last mark is passed on when the stream has ended
        return events if piece.last or piece.token is None else events + token_mark(piece.token)

    def _begins(self, reply: Reply, stream: OutputStream) -> bytes:
        events = self._unmarked.begin(reply, stream)
        return self._beginning(reply, stream) + events + ALIVE

    def _beginning(self, reply: Reply, stream: OutputStream) -> bytes:
        """The mark at the beginning, the first time."""
        if self._begun:
            return b""
        self._begun = True
        about = reply.about()
        seed = stream.request.params.seed or 0
        begun = StreamBeginning(about["fingerprint"], seed, about["created"])
        if self.record is not None:
            begun.created = self.record.created
            begun.items = self.record.items.decode() if self.record.only_here else ""
        return BEGIN + msgspec.json.encode(begun) + b"\n\n"

    def _streams(self, call: Call, sink: OutputSink, context: RequestContext) -> list[OutputStream]:
        if self._moved is None:
            return super()._streams(call, sink, context)
        if not _can_move(call) or not call.body.stream:
            raise ClientError(
                400, "invalid_value", "only streams of one choice without logprobs move", "body"
            )
        seeded = tuple(replace(params, seed=self._moved.begun.seed) for params in call.params)
        call = replace(call, params=seeded)
        [stream] = super()._streams(call, self, context)
        _replay(stream, self._moved.tokens)
        stream.sink = sink
        self._resumed = stream
        return [stream]

    def _reply(self, call: Call, info: RequestInfo, created: int = 0) -> Reply:
        if not _can_move(call):
            self._dialect = self._unmarked
        reply = super()._reply(
            call, info, created if self._moved is None else self._moved.begun.created
        )
        if self._moved is not None and self._moved.told:
            self._unmarked.begin(reply, self._resumed)
        for piece in self._replayed:
            self._unmarked.chunk(reply, piece)
        self._replayed.clear()
        return reply


def _can_move(call: Call) -> bool:
    """Return whether tokens say all of an answer."""
    params = call.params[0]
    plain = call.logprobs is None and params.logprobs is None and params.prompt_logprobs is None
    return (
        plain
        and len(call.params) == 1
        and not (params.beam_width or call.only_echoes or call.body.receipt)
    )


def _replay(stream: OutputStream, tokens: list[int]) -> None:
    """Have the stream be where it was behind these tokens. ClientError 400 where it would have
    ended."""
    request = stream.request
    for position, token in enumerate(tokens, len(request.prompt)):
        if stream.done or len(stream.tokens) + 1 >= (request.params.max_tokens or 1):
            message = f"the answer ends before its token {position - len(request.prompt) + 1}"
            raise ClientError(400, "invalid_value", message, "tokens")
        stream.add_event(Event(request.id, request.index, position, (token,)), stream.times.arrival)
    if stream.done:
        raise ClientError(400, "invalid_value", "the answer has ended", "tokens")


class DrainPage:
    """`POST /v1/admin/drain`: no new requests, and every stream that can goes on elsewhere."""

    def __init__(
        self, service: Service, departures: DrainSet, admit: Callable[[HTTPRequest], None]
    ) -> None:
        self._service, self._departures, self._admit = service, departures, admit

    async def post(self, request: HTTPRequest) -> Response:
        self._admit(request)
        raw = await read_body(request.receive, MAX_DRAIN_BODY)
        wanted = 'the body is {"drain": true} or false'
        order = decode_body(raw or b"{}", DrainOrder, wanted)
        self._service.draining = order.drain
        moved = self._departures.leave() if order.drain else 0
        return json_response(
            {"draining": order.drain, "moved": moved, "active": self._service.active}
        )


def moving_routes(
    service: Service,
    admit: Callable[[HTTPRequest], None],
    pages: ResponsesPages,
    store: ResponseStore,
) -> list[Route]:
    """The endpoints whose streams move, and what moves them."""
    departures = DrainSet()
    endpoints = {path: MovableEndpoint(service, SPOKEN[path], departures) for path in STREAMED}
    endpoints[RESPONSES] = MovableResponses(service, pages, store, departures)
    drain = DrainPage(service, departures, admit)
    return [
        *(MarkedRoute(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route(RESUME, ResumePage(service, endpoints), methods=["POST"]),
        Route("/v1/admin/drain", drain.post, methods=["POST"]),
    ]
