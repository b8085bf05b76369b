"""The endpoints of /v1/responses: an answer is made, gone back to, forgotten, cancelled.

Owns what happens around an answer: what went before it, whether its client waits for it, and what
is kept of it. Must not know how it is generated (generate.py) or written (responses.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.http.error_responses import unforeseen
from pageturner.http.receiving import again, read_body, stays
from pageturner.http.request_info import TRACE, RequestInfo
from pageturner.http.responses import json_response
from pageturner.http.stream_marks import StreamBeginning
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.admission.metered import metered
from pageturner.server.admission.quota import Work
from pageturner.server.api.base import replies
from pageturner.server.api.base.body import bad_request
from pageturner.server.api.base.generate import GenerateEndpoint
from pageturner.server.api.base.translate import Fields, fields_of, value_of
from pageturner.server.api.responses.response_items import (
    offered_tools,
    options_of,
    with_references,
)
from pageturner.server.api.responses.response_store import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    ResponseRecord,
    ResponseStore,
)
from pageturner.server.api.responses.response_writer import REPEATED, error_object, response_object
from pageturner.server.api.responses.responses import RESPONSES, dialect_of
from pageturner.server.service import Service

if TYPE_CHECKING:
    from pageturner.http.tracing import RequestTrace

log = logging.getLogger("pageturner")
STATUS = {
    FAILED: 500,
    CANCELLED: 499,
}  # in the log's and the trace's terms, of what was not completed
OURS = ("previous_response_id", "store", "background")  # fields that are understood here


class ResponsesPages:
    """The endpoints of one server; called as an application itself it is POST /v1/responses."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._generate = GenerateEndpoint(service, dialect_of(store))
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses: an answer, for a client that waits for it or for one that comes
        back."""
        await self.answer(scope, receive, send, lambda record: self._generate)

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        endpoint: Callable[[ResponseRecord], GenerateEndpoint],
        begun: StreamBeginning | None = None,
    ) -> None:
        """The same. endpoint: generates it, given its record; begun: it began so at another
        server."""
        self._service.check_open()
        with contextlib.ExitStack() as stack:
            work, counted = stack.enter_context(metered(self._service.quota, scope, receive))
            info: RequestInfo = scope["pageturner"]
            most = self._service.config.max_body_size
            fields = fields_of(await read_body(counted, most), NO_LIMITS)
            record = self._record(fields, info, begun)
            raw = msgspec.json.encode(fields)
            if len(raw) > most:
                size = f"{len(raw)} bytes with what went before"
                message = f"the conversation has {size}, and may have {most}"
                raise bad_request("too_expensive", message, "previous_response_id")
            self._store.open(record)
            if record.background:
                taken = asyncio.Event()
                own = {**scope, "pageturner": replace(info, release_body=taken.set)}
                under_way = stack.pop_all()  # the answer outlives this request
                task = asyncio.ensure_future(self._run(record, own, raw, work, under_way))
                told = await self._told_at_once(record, task, taken)
                info.release_body()
                await told(scope, stays, send)
                return
            try:
                await endpoint(record).answer(scope, again(raw, counted), send, work)
            finally:
                self._store.close(record)

    def _record(
        self, fields: Fields, info: RequestInfo, begun: StreamBeginning | None
    ) -> ResponseRecord:
        """Make the record of an answer before it begins. Replaces `input` in the fields with the
        whole conversation."""
        previous = value_of(fields, "previous_response_id", str)
        asked = {name: fields[name].copy() for name in REPEATED if name in fields}
        asked["tools"] = offered_tools(fields)
        store, background = (
            value_of(fields, "store", bool, True),
            value_of(fields, "background", bool, False),
        )
        if background and (value_of(fields, "stream", bool, False) or not store):
            message = (
                "background takes no stream and no store: false: come back for the answer by its id"
            )
            raise bad_request("unsupported_parameter", message, "background")
        items = begun.items.encode() if begun is not None else b""
        items = items or self._conversation(_items(fields), previous, info.tenant)
        only_here = previous is not None or items != _items(fields)
        if items:
            fields["input"] = msgspec.Raw(items)
        for name in OURS:
            fields.pop(name, None)
        return ResponseRecord(
            id=f"{RESPONSES.id_prefix}{RESPONSES.separator}{info.id}",
            tenant=info.tenant,
            created=begun.created if begun is not None else int(time.time()),
            asked=asked,
            items=items,
            background=background,
            store=store,
            options=options_of(fields),
            only_here=only_here,
            status=QUEUED if background else IN_PROGRESS,
        )

    def _conversation(self, items: bytes, previous: str | None, tenant: str) -> bytes:
        """The whole of it: what went before, which is kept here, and these items."""
        items = with_references(items, partial(self._store.item, tenant=tenant))
        if previous is None:
            return items
        before = self._store.find(previous, tenant)
        if not before.ended:
            message = f"the response {previous!r} is not complete yet: come back later"
            raise bad_request("invalid_value", message, "previous_response_id")
        return _joined(before.items, before.output, items)

    # -- background --------------------------------------------------------------------------------
    async def _told_at_once(
        self, record: ResponseRecord, task: asyncio.Task[None], taken: asyncio.Event
    ) -> Response:
        """Return the response to a background request once the request is accepted. Raises the
        error if it is refused. task: makes the answer; taken: set when the request was
        validated."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        waiting = asyncio.ensure_future(taken.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done() and (error := task.exception()) is not None:
            raise error  # it was refused: between `release_body` and the queue nothing waits
        if not record.ended:
            record.status = IN_PROGRESS
        return self._told(record)

    async def _run(
        self,
        record: ResponseRecord,
        scope: Scope,
        raw: bytes,
        work: Work,
        under_way: contextlib.ExitStack,
    ) -> None:
        """The answer to a client that does not wait. Raises what refuses the request. under_way: is
        closed when this work has ended."""

        async def until_cancelled() -> Message:
            await record.cancelled.wait()
            return {"type": "http.disconnect"}

        asked: RequestTrace | None = scope.get(TRACE)
        trace = asked.traces.begin_apart(asked.path, asked.origin) if asked else None
        try:
            with under_way:
                await self._generate.answer(scope, again(raw, until_cancelled), _nowhere, work)
        except ClientError as error:
            if record.status == QUEUED:
                record.store = False
                raise
            self._fail(record, error)
        except Exception as error:
            log.exception("the response %s failed", record.id)
            self._fail(record, unforeseen(error))
        finally:
            if not record.ended:
                record.status = CANCELLED
                record.body = self._body(record)
            self._store.close(record)
            if trace is not None and record.store:  # what was refused is in the span of its request
                info: RequestInfo = scope["pageturner"]
                info.status = STATUS.get(record.status, 200)
                info.abort_reason = record.status if record.status in STATUS else ""
                trace.traces.end(trace, info)

    def _fail(self, record: ResponseRecord, error: ClientError) -> None:
        record.status = FAILED
        record.body = self._body(record, error=error_object(error))

    # -- what was answered -------------------------------------------------------------------------
    async def get(self, request: HTTPRequest) -> Response:
        if request.query_params.get("stream") == "true":
            message = "stream is not supported here yet: ask for the answer when it is complete"
            raise bad_request("unsupported_parameter", message, "stream")
        return self._told(self._find(request))

    async def delete(self, request: HTTPRequest) -> Response:
        id = request.path_params["id"]
        self._store.delete(id, request.scope["pageturner"].tenant)
        return json_response({"id": id, "object": "response.deleted", "deleted": True})

    async def cancel(self, request: HTTPRequest) -> Response:
        record = self._find(request)
        if not record.background:
            message = "only a response with background: true can be cancelled: close the connection of others"
            raise bad_request("invalid_value", message)
        record.cancelled.set()
        await record.closed.wait()
        return self._told(record)

    async def input_items(self, request: HTTPRequest) -> Response:
        items = msgspec.Raw(self._find(request).items or b"[]")
        return json_response({"object": "list", "data": items, "has_more": False})

    def _find(self, request: HTTPRequest) -> ResponseRecord:
        return self._store.find(request.path_params["id"], request.scope["pageturner"].tenant)

    def _told(self, record: ResponseRecord) -> Response:
        return Response(record.body or self._body(record), media_type="application/json")

    def _body(self, record: ResponseRecord, **more: Any) -> bytes:
        """An answer without items, as JSON."""
        return replies.encode(response_object(record, self._service.model, [], **more))


async def _nowhere(_: Message) -> None:
    """Send callable that drops the response."""


def _items(fields: Fields) -> bytes:
    """Return the input as a JSON list of items; b"" if it is neither a string nor a list."""
    raw = bytes(fields.get("input", msgspec.Raw(b"")))
    if raw[:1] == b'"':
        said: dict[str, Any] = {"type": "message", "role": "user", "content": msgspec.Raw(raw)}
        return msgspec.json.encode([said])
    return raw if raw[:1] == b"[" else b""


def _joined(*lists: bytes) -> bytes:
    """Several JSON lists as one."""
    inner = [one.strip()[1:-1].strip() for one in lists if one]
    return b"[" + b",".join(one for one in inner if one) + b"]"
