"""The HTTP surface: which path does what, and what happens to a request from its first byte to its last.

Owns routes, status codes and headers. Must not know the fields of a request (openai.py), the bytes of an
answer (replies.py) or how the engine is kept alive (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import pageturner
from pageturner.config import ServerConfig
from pageturner.core.types import Failure, Request
from pageturner.errors import ClientError
from pageturner.files.generation_config import GenerationDefaults
from pageturner.serve import metrics as prometheus
from pageturner.serve import openai, replies
from pageturner.serve.admin import AdminPages, Dials
from pageturner.serve.body import Body, bad, convert, decode
from pageturner.serve.keys import Keys, salt_of
from pageturner.serve.metrics import Metrics
from pageturner.serve.middleware import Note, body_of, gone
from pageturner.serve.open_streams import Inbox, OpenStreams, Outcome
from pageturner.serve.openai import Call, Served
from pageturner.serve.prefixes import Prefixes, PrefixPages
from pageturner.serve.refusals import refusal
from pageturner.serve.replies import Writer
from pageturner.serve.service_level import ServiceLevel, service_level_of
from pageturner.serve.supervisor import Supervisor
from pageturner.serve.timings import History, timeline_page
from pageturner.text.detokenizer import ChatTemplate, Detokenizer, Tokenizer, token_text
from pageturner.text.output_stream import OutputPiece, OutputSink, OutputStream, StreamTimes

LONG_BODY = 32 * 1024  # bytes; longer ones are read in a thread, so that streams do not wait for them
MANY_LOGPROBS = 256  # of prompt tokens in an answer; more are written in a thread, for the same reason
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON_HEADERS = [(b"content-type", b"application/json")]


@dataclass(slots=True)
class Service:
    """Everything that a request handler needs. `draining`: no new requests; `active`: answers under way."""

    config: ServerConfig
    model: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    supervisor: Supervisor
    streams: OpenStreams
    metrics: Metrics
    generation: GenerationDefaults
    keys: Keys
    dials: Dials
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: int = 0
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    prefixes: Prefixes = field(init=False)
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(self.supervisor, self.tokenizer, self.ids)

    def served(self) -> Served:
        """What can be asked for. ClientError 503 before the engine was ever ready."""
        ready = self.supervisor.ready
        if ready is None:
            raise ClientError(503, "loading", "the model is still being loaded: try again in a moment")
        return Served(
            model=self.model,
            tokenizer=self.tokenizer,
            template=self.template,
            context=ready.max_model_len,
            capacity=ready.num_blocks * ready.block_size,
            vocab_size=min(ready.vocab_size, self.tokenizer.vocab_size),
            slots=self.dials.slots,
            block_size=ready.block_size,
            developer=self.config.developer,
            defaults=self.generation.sampling,
        )

    def check_open(self) -> None:
        if self.draining:
            raise ClientError(503, "shutting_down", "the server is shutting down: ask another one")

    @property
    def healthy(self) -> bool:
        return self.supervisor.healthy and not self.draining

    def retry_after(self, error: ClientError) -> int | None:
        """Whole seconds for the Retry-After header of this answer."""
        if error.retry_after:
            return max(1, ceil(error.retry_after))
        return {429: self.streams.retry_after(), 503: 5 if self.draining else 1}.get(error.status)


class Generate:
    """The endpoint that generates: `read` understands its bodies, `prefix` begins its ids."""

    def __init__(self, service: Service, read: Callable[[Body, Served], Call], prefix: str) -> None:
        self._service = service
        self._read = read
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, note = self._service, scope["pageturner"]
        service.check_open()
        served = service.served()
        arrival = time.monotonic()
        raw = await body_of(receive, service.config.max_body_size)
        call = await self._understand(raw, served)
        sink: Inbox | Outcome = Inbox() if call.body.stream else Outcome(len(call.prompts))
        wanted = service_level_of(call.body, scope["headers"], note.tenant)
        streams = self._streams(call, sink, arrival, wanted, note.tenant)
        service.supervisor.open(streams)
        service.active += 1
        name = call.body.request_id or note.id
        service.history.begin(streams, name, note.tenant)
        left = asyncio.ensure_future(gone(receive))
        try:
            writer = self._writer(call, note)
            if isinstance(sink, Inbox):
                await _stream(Chunks(streams, sink, writer, call, service.streams), left, send, note)
            else:
                await _collect(streams, sink, writer, call, service.streams, left, send, note)
        finally:
            left.cancel()
            service.active -= 1
            for stream in streams:
                service.supervisor.cancel(stream)
            service.history.end(streams, name, note.tenant, time.monotonic())
            note.tell(streams)

    async def _understand(self, raw: bytes, served: Served) -> Call:
        body = decode(raw)
        if len(raw) < LONG_BODY and not body.response_format and not body.structured_outputs:
            return self._read(body, served)
        return await asyncio.to_thread(self._read, body, served)

    def _streams(
        self, call: Call, sink: OutputSink, arrival: float, wanted: ServiceLevel, tenant: str
    ) -> list[OutputStream]:
        """One for each choice; the first of a prompt is the parent of its others."""
        streams: list[OutputStream] = []
        for i in range(len(call.prompts)):
            index = i % call.made
            parent = streams[i - index].request.id if index else None
            streams.append(self._new(call, i, index, parent, sink, arrival, wanted, tenant))
        return streams

    def _new(
        self,
        call: Call,
        i: int,
        index: int,
        parent: int | None,
        sink: OutputSink,
        arrival: float,
        wanted: ServiceLevel,
        tenant: str,
    ) -> OutputStream:
        body, params, service = call.body, call.params[i], self._service
        request = Request(
            id=next(service.ids),
            index=index,
            parent=parent,
            prompt=call.prompts[i],
            params=params,
            arrival=arrival,
            priority=wanted.priority,
            deadline=None if wanted.deadline is None else arrival + wanted.deadline,
            ttft_target=wanted.ttft,
            tpot_target=wanted.tpot,
            tenant=wanted.tenant,
            salt=salt_of(tenant, body.cache_salt),
            logits_from=None if params.prompt_logprobs is None else 0,
        )
        text = Detokenizer(
            service.tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            skip_special=body.skip_special_tokens is not False,
            include_stop=params.include_stop_str_in_output,
        )
        eos = service.tokenizer.eos_ids
        return OutputStream(
            request, i, text, sink, StreamTimes(arrival), eos_ids=eos, silent=call.only_echoes
        )

    def _writer(self, call: Call, note: Note) -> Writer:
        ready = self._service.supervisor.ready
        assert ready is not None
        id = f"{self._prefix}-{call.body.request_id or note.id}"
        service = self._service
        known = service.history.names(note.tenant)
        return Writer(call, id, int(time.time()), service.model, ready.fingerprint, service.tokenizer, known)


async def _collect(
    streams: list[OutputStream],
    outcome: Outcome,
    writer: Writer,
    call: Call,
    open_streams: OpenStreams,
    left: asyncio.Future[None],
    send: Send,
    note: Note,
) -> None:
    """The answer in one piece."""
    await asyncio.wait({outcome.done, left}, return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done.done():
        note.cut = "client left"
        return
    for stream in streams:
        if stream.failure is not None:
            raise refusal(stream.failure)
    if call.body.timings:
        await open_streams.wait_for_timings(streams)
    told = sum(len(stream.prompt_logprobs) for stream in streams)
    body = await _written(told, writer.whole, streams, outcome)
    headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(chunks: Chunks, left: asyncio.Future[None], send: Send, note: Note) -> None:
    """The answer piece by piece, until it ends or its reader has left or hopelessly fallen behind."""
    sender = asyncio.ensure_future(chunks.send(send))
    try:
        await asyncio.wait({sender, left, chunks.inbox.overflowed}, return_when=asyncio.FIRST_COMPLETED)
        if sender.done():
            sender.result()
        else:
            note.cut = "client left" if left.done() else "client too slow"
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError, ClientError):
            await sender


@dataclass(slots=True)
class Chunks:
    """A streamed answer on its way out."""

    streams: list[OutputStream]
    inbox: Inbox
    writer: Writer
    call: Call
    open_streams: OpenStreams

    async def send(self, send: Send) -> None:
        """Nothing is sent before the first token, so that a refusal still has its status code."""
        pieces = await self.inbox.take()
        if (failure := _failed(pieces)) is not None:
            raise refusal(failure)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        unfinished = len(self.streams)
        while True:
            failure = _failed(pieces)
            unfinished -= sum(piece.last for piece in pieces)
            told = sum(len(piece.stream.prompt_logprobs) for piece in pieces if piece.n <= 1)
            body = await _written(told, self._write, pieces)
            if failure is not None or unfinished == 0:
                break
            await send({"type": "http.response.body", "body": body, "more_body": True})
            pieces = await self.inbox.take()
        if failure is not None:
            error = refusal(failure)
            body += replies.event(replies.error(error.status, error.code, error.message))
        else:
            if self.call.body.timings:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await self.open_streams.wait_for_timings(self.streams)
                body = self.writer.last_timings(self.streams)
            body += self.writer.last_usage(self.streams) if self.call.options.include_usage else b""
        await send({"type": "http.response.body", "body": body + replies.DONE})

    def _write(self, pieces: list[OutputPiece]) -> bytes:
        return b"".join([self.writer.chunks(piece) for piece in pieces if piece.stream.failure is None])


async def _written(told: int, write: Callable[..., bytes], *what: Any) -> bytes:
    """What `write` makes of it: in a thread where many prompt logprobs are in there."""
    return await asyncio.to_thread(write, *what) if told > MANY_LOGPROBS else write(*what)


def _failed(pieces: list[OutputPiece]) -> Failure | None:
    return next((piece.stream.failure for piece in pieces if piece.stream.failure is not None), None)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of /detokenize."""

    tokens: list[int]
    model: str | None = None


class Pages:
    """The endpoints that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _: HTTPRequest) -> Response:
        if self._service.healthy:
            return replies.page({"status": "ok"})
        self._service.check_open()
        self._service.served()
        raise ClientError(503, "no_engine", "the engine is not there: it is being restarted, or it is stuck")

    async def ping(self, _: HTTPRequest) -> Response:
        return Response()

    async def version(self, _: HTTPRequest) -> Response:
        return replies.page({"version": pageturner.__version__})

    async def load(self, _: HTTPRequest) -> Response:
        return replies.page({"server_load": self._service.active})

    async def models(self, _: HTTPRequest) -> Response:
        service, ready = self._service, self._service.supervisor.ready
        model = {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "pageturner",
            "root": service.model,
            "parent": None,
            "max_model_len": None if ready is None else ready.max_model_len,
            "permission": [],
        }
        return replies.page({"object": "list", "data": [model]})

    async def metrics(self, _: HTTPRequest) -> Response:
        service, ready = self._service, self._service.supervisor.ready
        cache = {"block_size": "0", "num_gpu_blocks": "0"}
        if ready is not None:
            cache = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        text = prometheus.render(service.metrics, service.model, service.healthy, cache)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: HTTPRequest) -> Response:
        service, served = self._service, self._service.served()
        body = convert(await body_of(request.receive, service.config.max_body_size), TokenizeBody)
        tokens = await asyncio.to_thread(_tokenize, body, served)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": served.context,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_text(service.tokenizer, token) for token in tokens]
        return replies.page(answer)

    async def detokenize(self, request: HTTPRequest) -> Response:
        service, served = self._service, self._service.served()
        body = convert(await body_of(request.receive, service.config.max_body_size), DetokenizeBody)
        openai.check_model(Body(model=body.model), served)
        if any(not 0 <= token < served.vocab_size for token in body.tokens):
            raise bad("invalid_value", f"token ids are 0 to {served.vocab_size - 1}", "tokens")
        return replies.page({"prompt": service.tokenizer.decode_whole(body.tokens, skip_special=False)})


def _tokenize(body: TokenizeBody, served: Served) -> list[int]:
    openai.check_model(Body(model=body.model), served)
    if body.messages is not None:
        chat = Body(
            messages=body.messages,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return openai.chat_tokens(chat, served)
    if body.prompt is None:
        raise bad("missing_field", "prompt or messages is missing", "prompt")
    special = body.add_special_tokens is not False
    return served.tokenizer.encode(body.prompt, add_special=special, parse_special=True)


def create_app(service: Service) -> Starlette:
    """All routes. Errors of every kind have the same JSON shape."""

    async def refuse(_: HTTPRequest, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):
            path = "no such path: see docs/api.md" if error.status_code == 404 else str(error.detail)
            client = ClientError(error.status_code, error.detail.lower().replace(" ", "_"), path)
            headers.update(error.headers or {})
        else:
            assert isinstance(error, ClientError)
            client = error
        wait = service.retry_after(client)
        if wait is not None:
            headers["retry-after"] = str(wait)
            service.metrics.rejected[client.code] += 1
        content = replies.error(client.status, client.code, client.message, client.param)
        return Response(content, client.status, headers, "application/json")

    pages = Pages(service)
    prefixes = PrefixPages(service.prefixes, service.served, service.config.max_body_size)
    admin = AdminPages(service.dials, service.config.admin_key)
    routes = [
        Route("/v1/completions", Generate(service, openai.completion, "cmpl"), methods=["POST"]),
        Route("/v1/chat/completions", Generate(service, openai.chat, "chatcmpl"), methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/prefixes", prefixes.make, methods=["POST"]),
        Route("/v1/prefixes", prefixes.list),
        Route("/v1/prefixes/{id}", prefixes.delete, methods=["DELETE"]),
        Route("/v1/admin/config", admin.config, methods=["GET", "POST"]),
        Route("/v1/requests/{id}/timeline", timeline_page(service.history)),
        Route("/health", pages.health),
        Route("/ping", pages.ping, methods=["GET", "POST"]),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
        Route("/load", pages.load),
        Route("/tokenize", pages.tokenize, methods=["POST"]),
        Route("/detokenize", pages.detokenize, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={ClientError: refuse, HTTPException: refuse})
