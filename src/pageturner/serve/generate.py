"""The endpoints that generate: what happens to a request from its first byte to its last.

Owns the order of it: read, opened as streams, answered in one piece or piece by piece, cut off when its
client leaves. Must not know the fields of a request or the bytes of an answer (the dialect does), nor how the
engine is kept alive (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.request import Failure, Request
from pageturner.serve import replies
from pageturner.serve.api_keys import cache_salt_of
from pageturner.serve.call import Call, ServedModel
from pageturner.serve.dialect import Dialect
from pageturner.serve.error_responses import error_body, error_of
from pageturner.serve.middleware import RequestInfo, read_body, until_client_leaves
from pageturner.serve.open_streams import OpenStreams, PieceQueue, WholeAnswer
from pageturner.serve.replies import Reply
from pageturner.serve.service import Service
from pageturner.serve.service_level import ServiceLevel, service_level_of
from pageturner.text.output_stream import OutputPiece, OutputSink, OutputStream, output_streams

LONG_BODY = 32 * 1024  # bytes; longer ones are read in a thread, so that streams do not wait for them
MANY_LOGPROBS = 256  # of prompt tokens in an answer; more are written in a thread, for the same reason
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON_HEADERS = [(b"content-type", b"application/json")]


class GenerateEndpoint:
    """One endpoint, in one shape of the API."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, info = self._service, scope["pageturner"]
        service.check_open()
        service.quota.check(info.key)
        served = service.served()
        arrival = time.monotonic()
        call = await self._understand(await read_body(receive, service.config.max_body_size), served)
        info.release_body()
        sink: PieceQueue | WholeAnswer = PieceQueue() if call.body.stream else WholeAnswer(len(call.prompts))
        level = service_level_of(call.body, scope["headers"], info.key)
        streams = self._streams(call, sink, arrival, level, info.tenant)
        service.quota.admit(info.key, streams, len(service.streams.unfinished))
        service.supervisor.open(streams)
        service.quota.enter(info.key, streams)
        service.active += 1
        name = call.body.request_id or info.id
        service.history.begin(streams, name, info.tenant)
        left = asyncio.ensure_future(until_client_leaves(receive))
        try:
            answer = Answer(
                streams=streams,
                dialect=self._dialect,
                reply=self._reply(call, info),
                open_streams=service.streams,
            )
            if isinstance(sink, PieceQueue):
                await answer.stream(sink, left, send, info)
            else:
                await answer.send_whole(sink, left, send, info)
        finally:
            left.cancel()
            service.active -= 1
            service.quota.leave(info.key, streams)
            for stream in streams:
                service.supervisor.cancel(stream)
            service.history.end(streams, name, info.tenant, time.monotonic())
            info.add_answer(streams)

    async def _understand(self, raw: bytes, served: ServedModel) -> Call:
        body = self._dialect.decode(raw)
        if len(raw) < LONG_BODY and not body.response_format and not body.structured_outputs:
            return self._dialect.read(body, served)
        return await asyncio.to_thread(self._dialect.read, body, served)

    def _streams(
        self, call: Call, sink: OutputSink, arrival: float, level: ServiceLevel, tenant: str
    ) -> list[OutputStream]:
        """One for each choice; the first of a prompt is the parent of its others."""
        body, service = call.body, self._service
        streams: list[OutputStream] = []
        for i in range(0, len(call.prompts), call.made):
            first = Request(
                id=next(service.ids),
                prompt=call.prompts[i],
                params=call.params[i],
                arrival=arrival,
                priority=level.priority,
                deadline=None if level.deadline is None else arrival + level.deadline,
                ttft_target=level.ttft,
                tpot_target=level.tpot,
                tenant=level.tenant,
                salt=cache_salt_of(tenant, body.cache_salt),
            )
            streams += output_streams(
                first,
                [sink] * call.made,
                service.ids,
                service.tokenizer,
                choice=i,
                skip_special=body.skip_special_tokens is not False,
                silent=call.only_echoes,
            )
        return streams

    def _reply(self, call: Call, info: RequestInfo) -> Reply:
        service = self._service
        ready = service.supervisor.ready
        assert ready is not None
        return Reply(
            call,
            self._dialect.shape,
            id=f"{self._dialect.id_prefix}-{call.body.request_id or info.id}",
            created=int(time.time()),
            model=service.model,
            fingerprint=ready.fingerprint,
            tokenizer=service.tokenizer,
            name=service.history.names(info.tenant),
        )


@dataclass(slots=True)
class Answer:
    """The answer to one request on its way out."""

    streams: list[OutputStream]
    dialect: Dialect
    reply: Reply
    open_streams: OpenStreams

    async def send_whole(
        self, whole_answer: WholeAnswer, left: asyncio.Future[None], send: Send, info: RequestInfo
    ) -> None:
        """In one piece, once all choices have ended."""
        await asyncio.wait({whole_answer.done, left}, return_when=asyncio.FIRST_COMPLETED)
        if not whole_answer.done.done():
            info.abort_reason = "client left"
            return
        for stream in self.streams:
            if stream.failure is not None:
                raise error_of(stream.failure)
        if self.reply.call.body.timings:
            await self.open_streams.wait_for_timings(self.streams)
        logprobs = sum(len(stream.prompt_logprobs) for stream in self.streams)
        body = await _written(logprobs, self.dialect.whole, self.reply, self.streams, whole_answer)
        headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def stream(
        self, queue: PieceQueue, left: asyncio.Future[None], send: Send, info: RequestInfo
    ) -> None:
        """Piece by piece, until it ends or its reader has left or hopelessly fallen behind."""
        sender = asyncio.ensure_future(self._send_chunks(queue, send))
        try:
            await asyncio.wait({sender, left, queue.overflowed}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                info.abort_reason = "client left" if left.done() else "client too slow"
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientError):
                await sender

    async def _send_chunks(self, queue: PieceQueue, send: Send) -> None:
        """Nothing is sent before the first token, so that a refusal still has its status code."""
        pieces = await queue.get_all()
        if (failure := _failed(pieces)) is not None:
            raise error_of(failure)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        unfinished = len(self.streams)
        while True:
            failure = _failed(pieces)
            unfinished -= sum(piece.last for piece in pieces)
            logprobs = sum(len(piece.stream.prompt_logprobs) for piece in pieces if piece.n <= 1)
            body = await _written(logprobs, self._chunks, pieces)
            if failure is not None or unfinished == 0:
                break
            await send({"type": "http.response.body", "body": body, "more_body": True})
            pieces = await queue.get_all()
        if failure is not None:
            error = error_of(failure)
            body += replies.sse_event(error_body(error.status, error.code, error.message))
        elif self.reply.call.body.timings:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await self.open_streams.wait_for_timings(self.streams)
            body = self.reply.last_timings(self.streams)
        if failure is None and self.reply.call.options.include_usage:
            body += self.reply.last_usage(self.streams)
        await send({"type": "http.response.body", "body": body + replies.DONE})

    def _chunks(self, pieces: list[OutputPiece]) -> bytes:
        chunk, reply = self.dialect.chunk, self.reply
        return b"".join([chunk(reply, piece) for piece in pieces if piece.stream.failure is None])


async def _written(logprobs: int, write: Callable[..., bytes], *what: Any) -> bytes:
    """What `write` makes of it: in a thread where so many prompt logprobs are in there that it takes long."""
    return await asyncio.to_thread(write, *what) if logprobs > MANY_LOGPROBS else write(*what)


def _failed(pieces: list[OutputPiece]) -> Failure | None:
    return next((piece.stream.failure for piece in pieces if piece.stream.failure is not None), None)
