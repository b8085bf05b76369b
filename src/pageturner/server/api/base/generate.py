"""The endpoints that generate: what happens to a request from its first byte to its last.

Owns the order of it: read, opened as streams, answered in one piece or piece by piece, cut off when
its client leaves. Must not know the fields of a request or the bytes of an answer (the dialect
does), what else the server does for a request (request_listeners.py), nor how the engine is kept
alive (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.http.api_keys import cache_salt_of
from pageturner.http.error_responses import error_of
from pageturner.http.receiving import read_body, until_client_leaves
from pageturner.http.request_info import RequestInfo
from pageturner.http.slices import MANY_LOGPROBS, in_slices
from pageturner.request import Failure, Request
from pageturner.server.admission.metered import metered
from pageturner.server.admission.quota import Work
from pageturner.server.admission.service_level import RequestContext, service_level_of
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import Reply
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.engine_client.open_streams import PieceQueue
from pageturner.server.request_listeners import TOO_SLOW, GeneratingRequest, listeners_of
from pageturner.server.service import Service
from pageturner.server.sessions import session_hint
from pageturner.text.output_stream import OutputPiece, OutputSink, OutputStream, output_streams

MANY_CHUNKS = 64  # are written, then others go on
MAX_AT_ONCE = 1 << 18  # bytes of an answer that are written; then others go on
ALIVE_SECONDS = 3.0  # between two signs of life before the first token: some clients fear silence
HEAD_SECONDS = 0.25  # for which a stream has no head, so that a refusal has its status code
JSON_HEADERS = [(b"content-type", b"application/json")]


class GenerateEndpoint:
    """One endpoint, in one shape of the API."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect
        self._listeners = listeners_of(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.check_open()
        with metered(self._service.quota, scope, receive) as (work, counted):
            await self.answer(scope, counted, send, work)

    async def answer(self, scope: Scope, receive: Receive, send: Send, work: Work) -> None:
        """The answer to a request that was let in as this work."""
        service, info = self._service, scope["pageturner"]
        served = service.served()
        arrival = time.monotonic()
        raw = await read_body(receive, service.config.max_body_size)
        call = await service.reader.call(self._dialect, raw, served, scope, receive)
        del raw
        info.release_body()
        info.id = call.body.request_id or info.id
        sink: PieceQueue | WholeAnswer = (
            PieceQueue() if call.body.stream else WholeAnswer(len(call.prompts))
        )
        level = service_level_of(call.body, scope["headers"], info.key)
        hint = session_hint(call, scope["headers"], info, level)
        adapter = await service.adapters.digest(call.body.model)
        context = RequestContext(arrival, level, info.tenant, hint, adapter)
        streams = self._streams(call, sink, context)
        request = GeneratingRequest(call, served, streams, info, work)
        for listener in self._listeners:
            listener.begin(request)
        left = asyncio.ensure_future(until_client_leaves(receive))
        with contextlib.ExitStack() as undo:
            undo.callback(left.cancel)
            for listener in self._listeners:
                undo.callback(listener.ended, request)
                listener.admitted(request)
            undo.callback(self._cancel, streams)
            service.supervisor.open(streams)
            info.model = service.answers_as(call.body.model)
            reply = self._reply(call, info)
            answer = Answer(streams, self._dialect, reply, service, info)
            if isinstance(sink, PieceQueue):
                await answer.stream(sink, left, send)
            else:
                await answer.send_whole(sink, left, send)
        await in_slices(_forget_logprobs(streams))

    def _cancel(self, streams: list[OutputStream]) -> None:
        for stream in streams:
            self._service.supervisor.cancel(stream)

    def _streams(self, call: Call, sink: OutputSink, context: RequestContext) -> list[OutputStream]:
        """Make a stream for each choice. The first choice of a prompt is the parent of its
        others."""
        body, service, level = call.body, self._service, context.level
        streams: list[OutputStream] = []
        for i in range(0, len(call.prompts), call.made):
            first = Request(
                id=next(service.ids),
                prompt=call.prompts[i],
                params=call.params[i],
                arrival=context.arrival,
                priority=level.priority,
                deadline=None if level.deadline is None else context.arrival + level.deadline,
                ttft_target=level.ttft,
                tpot_target=level.tpot,
                tenant=level.tenant,
                adapter=context.adapter,
                salt=cache_salt_of(context.tenant, body.cache_salt),
                session=context.session,
            )
            streams += output_streams(
                first,
                [sink] * call.made,
                service.ids,
                service.tokenizer,
                choice=i,
                skip_special=body.skip_special_tokens is not False,
                silent=call.only_echoes,
                answer=call.answer,
            )
        return streams

    def _reply(self, call: Call, info: RequestInfo, created: int = 0) -> Reply:
        service = self._service
        ready = service.supervisor.ready
        assert ready is not None
        return Reply(
            call,
            self._dialect.shape,
            id=f"{self._dialect.id_prefix}{self._dialect.separator}{info.id}",
            created=int(created or time.time()),
            model=service.answers_as(call.body.model),
            fingerprint=ready.fingerprint,
            tokenizer=service.tokenizer,
            name=service.history.names(info.tenant),
            tenant=info.tenant,
        )


@dataclass(slots=True)
class Answer:
    """The answer to one request on its way out."""

    streams: list[OutputStream]
    dialect: Dialect
    reply: Reply
    service: Service
    info: RequestInfo

    async def send_whole(
        self, whole_answer: WholeAnswer, left: asyncio.Future[None], send: Send
    ) -> None:
        """Send the answer in one piece, once all choices have ended."""
        await asyncio.wait({whole_answer.done, left}, return_when=asyncio.FIRST_COMPLETED)
        if not whole_answer.done.done():
            self.info.abort_reason = "client left"
            return
        for stream in self.streams:
            if stream.failure is not None:
                raise error_of(stream.failure)
        if self.reply.call.body.timings:
            await self.service.streams.wait_for_timings(self.streams)
        if self.reply.call.body.receipt and not await self.service.receipts.attach(
            self.reply, self.streams, left
        ):
            self.info.abort_reason = "client left"
            return
        body = await in_slices(
            self.dialect.whole(self.reply, self.streams, whole_answer), self.service.memory
        )
        headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i in range(0, len(body), MAX_AT_ONCE):
            await send(_part(body[i : i + MAX_AT_ONCE], i + MAX_AT_ONCE < len(body)))

    async def stream(self, queue: PieceQueue, left: asyncio.Future[None], send: Send) -> None:
        """Piece by piece, until it ends or its reader has left or hopelessly fallen behind."""
        sender = asyncio.ensure_future(self._send_chunks(queue, send))
        try:
            await asyncio.wait(
                {sender, left, queue.overflowed}, return_when=asyncio.FIRST_COMPLETED
            )
            if sender.done():
                sender.result()
            else:
                self.info.abort_reason = "client left" if left.done() else TOO_SLOW
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientError):
                await sender

    async def _send_chunks(self, queue: PieceQueue, send: Send) -> None:
        pieces = await self._first_pieces(queue, send)
        unfinished = len(self.streams)
        while True:
            failure = _failed(pieces)
            unfinished -= sum(piece.last for piece in pieces)
            body = await self._chunks(pieces, send)
            if failure is not None or unfinished == 0:
                break
            await send(_part(body))
            pieces = await queue.get_all()
        if failure is not None:
            body += self.dialect.failed(self.reply, error_of(failure))
        elif self.reply.call.body.timings:
            await send(_part(body))
            await self.service.streams.wait_for_timings(self.streams)
            body = self.reply.last_timings(self.streams)
        if failure is None and self.reply.call.body.receipt:
            await send(_part(body))
            body = await self.service.receipts.event(self.reply, self.streams)
        if failure is None:
            body += self.dialect.end(self.reply, self.streams)
        await send(_part(body, more=False))

    async def _first_pieces(self, queue: PieceQueue, send: Send) -> list[OutputPiece]:
        """Send the head, and return the first pieces. A refusal that comes within HEAD_SECONDS has
        its status code."""
        headers = [
            (b"content-type", self.dialect.media_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # asks a proxy to pass on what comes
        ]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_SECONDS):
                pieces = await queue.get_all()
            if (failure := _failed(pieces)) is not None:
                raise error_of(failure)
            await send(start)
            return pieces
        await send(start)
        sign = self.dialect.begin(self.reply, self.streams[0])
        while True:
            await send(_part(sign))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_SECONDS):
                    return await queue.get_all()
            sign = self.dialect.alive

    async def _chunks(self, pieces: list[OutputPiece], send: Send) -> bytes:
        """Return the chunks of these pieces. The chunks up to the last long one are sent
        already."""
        chunk, long_chunk = self.dialect.chunk, self.dialect.long_chunk
        reply = self.reply
        parts: list[bytes] = []
        for piece in pieces:
            if piece.stream.failure is not None:
                continue
            if long_chunk and piece.n <= 1 and len(piece.stream.prompt_logprobs) > MANY_LOGPROBS:
                parts.append(await in_slices(long_chunk(reply, piece), self.service.memory))
                await send(_part(b"".join(parts)))
                parts.clear()
            else:
                parts.append(chunk(reply, piece))
                if not len(parts) % MANY_CHUNKS:
                    await asyncio.sleep(0)
        return b"".join(parts)


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _failed(pieces: list[OutputPiece]) -> Failure | None:
    return next(filter(None, (piece.stream.failure for piece in pieces)), None)


def _forget_logprobs(streams: list[OutputStream]) -> Generator[None, None, None]:
    """Free what takes a while to be freed where there are millions."""
    for stream in streams:
        stream.logprobs.clear()
        stream.prompt_logprobs.clear()
        yield
