"""/v1/files and /v1/batches, in OpenAI's shape.

Owns the fields of both, who may see what, and how a file comes in and goes out. Must not know how a
batch is run (batch_runner.py), nor how anything is kept (batch_journal.py).
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from pageturner.errors import ClientError
from pageturner.http.multipart import boundary_of, read_form
from pageturner.http.receiving import read_body
from pageturner.http.request_info import RequestInfo
from pageturner.http.responses import json_response
from pageturner.private_files import sync_folder
from pageturner.server.admission.metered import metered
from pageturner.server.api.base.body import bad_request
from pageturner.server.api.batches.batch_journal import (
    CANCELLING,
    VALIDATING,
    BatchRecord,
    FileRecord,
)
from pageturner.server.api.batches.batch_lines import ENDPOINTS
from pageturner.server.api.batches.batches import (
    INPUT,
    Batches,
    begin_file,
    new_id,
    no_batches,
    remove,
)
from pageturner.server.api.batches.durable_files import JournalError
from pageturner.server.service import Service

WRITE_AT_ONCE = 1 << 20  # bytes
MAX_AROUND_FILE = 1 << 17  # bytes of an upload beside its file
MAX_UNFINISHED = 100  # batches of a tenant
MAX_METADATA = 16
LISTED_FILES, LISTED_BATCHES = 10_000, 100  # most in one answer
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
LONGEST_WINDOW = 30 * 86_400
STATUS = {"disk_full": 503, "journal_broken": 500, "journal_in_use": 503}


class NewBatch(msgspec.Struct):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


Page = Callable[[HTTPRequest, Batches], Awaitable[Response]]


class BatchPages:
    """The pages of one server. `batches`: None where it keeps none; the pages then say how to have
    them."""

    def __init__(self, service: Service) -> None:
        self.batches: Batches | None = None
        self._service = service
        self._uploading = Counter[str]()  # of each tenant

    def page(self, page: Page) -> Callable[[HTTPRequest], Awaitable[Response]]:
        """The endpoint of a page. What is wrong with the disk becomes an answer."""

        async def endpoint(request: HTTPRequest) -> Response:
            if self.batches is None:
                raise no_batches()
            self._service.check_open()
            try:
                return await page(request, self.batches)
            except JournalError as error:
                raise ClientError(
                    STATUS[error.code], error.code, _without_path(error.message)
                ) from error

        return endpoint

    def routes(self) -> list[Route]:
        page = self.page
        return [
            Route("/v1/files", page(self.upload), methods=["POST"]),
            Route("/v1/files", page(self.list_files)),
            Route("/v1/files/{id}", page(self.get_file)),
            Route("/v1/files/{id}", page(self.delete_file), methods=["DELETE"]),
            Route("/v1/files/{id}/content", page(self.content)),
            Route("/v1/batches", page(self.create), methods=["POST"]),
            Route("/v1/batches", page(self.list_batches)),
            Route("/v1/batches/{id}", page(self.get_batch)),
            Route("/v1/batches/{id}/cancel", page(self.cancel), methods=["POST"]),
        ]

    # -- files -------------------------------------------------------------------------------------
    async def upload(self, request: HTTPRequest, batches: Batches) -> Response:
        info, boundary = _info(request), boundary_of(request.headers.get("content-type", ""))
        files = await batches.runner.do(batches.journal.files, info.tenant)
        if len(files) + self._uploading[info.tenant] >= self._service.config.max_files:
            most = self._service.config.max_files
            raise ClientError(
                429, "too_many_files", f"{most} files are kept at most: delete some of yours"
            )
        id = new_id("file-")
        self._uploading[info.tenant] += 1
        try:
            with metered(self._service.quota, request.scope, request.receive) as (_, receive):
                fields, name, size = await self._receive(batches, id, receive, boundary)
            told = FileRecord(id, info.tenant, _purpose(fields), name, size, int(time.time()))
            await batches.runner.do(batches.journal.add_file, told)
        except BaseException:
            remove(batches.path(id))
            raise
        finally:
            self._uploading[info.tenant] -= 1
        return json_response(file_object(told))

    async def _receive(
        self, batches: Batches, id: str, receive: Receive, boundary: bytes
    ) -> tuple[dict[str, str], str, int]:
        """Write what comes to the disk. Returns the other fields, the name of the file, and its
        size."""
        held, size, lines = bytearray(), 0, 0
        config = self._service.config
        most = config.max_file_size
        path = batches.path(id)
        handle = await batches.runner.do(_on_disk, begin_file, path)

        async def take(piece: bytes) -> None:
            nonlocal size, lines
            size += len(piece)
            lines += piece.count(b"\n")
            if size > most:
                raise ClientError(413, "file_too_large", f"a file may have {most} bytes", "file")
            if lines > config.max_batch_lines:
                message = f"a file may have {config.max_batch_lines} lines: send several"
                raise ClientError(413, "too_many_lines", message, "file")
            held.extend(piece)
            if len(held) >= WRITE_AT_ONCE:
                await batches.runner.do(_write, handle, bytes(held))
                held.clear()

        try:
            fields, name = await read_form(receive, boundary, take)
            if name is None:
                raise bad_request("missing_field", "file is missing", "file")
            await batches.runner.do(_write, handle, bytes(held))
            await batches.runner.do(_on_disk, os.fsync, handle)
        finally:
            os.close(handle)
        await batches.runner.do(_on_disk, sync_folder, path.parent)
        return fields, name[:255], size

    async def list_files(self, request: HTTPRequest, batches: Batches) -> Response:
        files = await batches.runner.do(batches.journal.files, _info(request).tenant)
        purpose = request.query_params.get("purpose")
        if request.query_params.get("order", "desc") == "asc":
            files.reverse()
        found = [file_object(file) for file in files if purpose in (None, file.purpose)]
        return _listed(found, request, LISTED_FILES, LISTED_FILES)

    async def get_file(self, request: HTTPRequest, batches: Batches) -> Response:
        return json_response(file_object(await _file(request, batches)))

    async def content(self, request: HTTPRequest, batches: Batches) -> Response:
        file = await _file(request, batches)
        path = batches.path(file.id)
        if not path.exists():  # the disk was full, or the power failed, when it was deleted
            raise _no_file(file.id)
        return FileResponse(path, media_type="application/octet-stream")

    async def delete_file(self, request: HTTPRequest, batches: Batches) -> Response:
        file = await _file(request, batches)
        content = batches.path(file.id)
        if not await batches.runner.do(batches.journal.delete_file, file.id, content):
            message = "a batch that has not ended reads this file: cancel it first"
            raise ClientError(409, "file_in_use", message)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    # -- batches -----------------------------------------------------------------------------------
    async def create(self, request: HTTPRequest, batches: Batches) -> Response:
        info = _info(request)
        with metered(self._service.quota, request.scope, request.receive) as (_, receive):
            raw = await read_body(receive, self._service.config.max_body_size)
        wanted = _decoded(raw)
        file = await batches.runner.do(batches.journal.file, wanted.input_file_id)
        usable = file is not None and file.tenant == info.tenant and file.purpose == INPUT
        if file is None or not usable or not batches.path(file.id).exists():
            message = f"there is no file {wanted.input_file_id[:80]!r} of purpose batch"
            raise bad_request("invalid_input_file", message, "input_file_id")
        unfinished = await batches.runner.do(batches.journal.unfinished)
        if sum(one.tenant == info.tenant for one in unfinished) >= MAX_UNFINISHED:
            raise ClientError(
                429, "too_many_batches", f"at most {MAX_UNFINISHED} batches may be unfinished"
            )
        record = await batches.runner.do(
            batches.journal.create,
            new_id("batch_"),
            tenant=info.tenant,
            key=info.key.sha256.hex(),
            endpoint=wanted.endpoint,
            input=file.id,
            window=wanted.completion_window,
            metadata=wanted.metadata,
            expires=int(time.time()) + seconds_of(wanted.completion_window),
        )
        batches.begin(record, request.scope)
        return self._told(record, batches)

    async def list_batches(self, request: HTTPRequest, batches: Batches) -> Response:
        most = _limit(request, LISTED_BATCHES, 20)
        before = 1 << 62
        if after := request.query_params.get("after"):
            before = (await _batch(after, request, batches)).number
        tenant = _info(request).tenant
        found = await batches.runner.do(batches.journal.batches, tenant, before, most + 1)
        told = [batch_object(record, batches.runner.trouble) for record in found[:most]]
        return json_response(_page(told, len(found) > most))

    async def get_batch(self, request: HTTPRequest, batches: Batches) -> Response:
        return self._told(await _batch(request.path_params["id"], request, batches), batches)

    async def cancel(self, request: HTTPRequest, batches: Batches) -> Response:
        record = await _batch(request.path_params["id"], request, batches)
        if record.ended:
            message = f"the batch has ended: its status is {record.status}"
            raise ClientError(409, "batch_ended", message)
        await batches.runner.do(batches.journal.move, record.id, CANCELLING, "cancelled")
        batches.runner.end(record.id)
        return self._told(await _batch(record.id, request, batches), batches)

    def _told(self, record: BatchRecord, batches: Batches) -> Response:
        return json_response(batch_object(record, batches.runner.trouble))


# -- shapes ----------------------------------------------------------------------------------------
def file_object(file: FileRecord) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(record: BatchRecord, trouble: str = "") -> dict[str, Any]:
    """trouble: why nothing gets on at present."""
    problems = list(record.problems)
    if trouble and not record.ended:
        why = {"code": "disk_full", "message": _without_path(trouble), "param": None, "line": None}
        problems.insert(0, why)
    times, tokens = record.times, (record.input_tokens, record.output_tokens)
    total = 0 if record.status == VALIDATING else record.total
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": record.input,
        "completion_window": record.window,
        "status": record.status,
        "output_file_id": record.output or None,
        "error_file_id": record.errors or None,
        "created_at": record.created,
        "in_progress_at": times.get("in_progress"),
        "expires_at": record.expires or None,
        "finalizing_at": times.get("finalizing"),
        "completed_at": times.get("completed"),
        "failed_at": times.get("failed"),
        "expired_at": times.get("expired"),
        "cancelling_at": times.get("cancelling"),
        "cancelled_at": times.get("cancelled"),
        "request_counts": {"total": total, "completed": record.answered, "failed": record.failed},
        "metadata": record.metadata,
        "usage": {
            "input_tokens": tokens[0],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(tokens),
        },
    }


def _page(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ids = [one["id"] for one in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": data, **ends, "has_more": more}


def _listed(found: list[dict[str, Any]], request: HTTPRequest, most: int, usual: int) -> Response:
    limit = _limit(request, most, usual)
    if after := request.query_params.get("after"):
        ids = [one["id"] for one in found]
        if after not in ids:
            raise bad_request(
                "invalid_value", f"after: there is no {after[:80]!r} in this list", "after"
            )
        found = found[ids.index(after) + 1 :]
    return json_response(_page(found[:limit], len(found) > limit))


def _limit(request: HTTPRequest, most: int, usual: int) -> int:
    text = request.query_params.get("limit", str(usual))
    if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= most):
        raise bad_request("invalid_value", f"limit is 1 to {most}", "limit")
    return int(text)


# -- requests --------------------------------------------------------------------------------------
def _info(request: HTTPRequest) -> RequestInfo:
    info: RequestInfo = request.scope["pageturner"]
    return info


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.pop("purpose", "")
    if purpose != INPUT:
        raise bad_request("invalid_value", f"purpose is batch, not {purpose[:40]!r}", "purpose")
    if fields:
        name = min(fields)[:80]
        raise bad_request("unsupported_parameter", f"{name} is not supported: leave it out", name)
    return purpose


def _decoded(raw: bytes) -> NewBatch:
    try:
        wanted = msgspec.json.decode(raw, type=NewBatch)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        raise bad_request("invalid_value", str(error)[:400], name or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("invalid_json", f"the body is not valid JSON: {error}"[:400]) from None
    if wanted.endpoint not in ENDPOINTS:
        message = f"endpoint is one of {', '.join(ENDPOINTS)}, not {wanted.endpoint[:80]!r}"
        raise bad_request("invalid_value", message, "endpoint")
    seconds_of(wanted.completion_window)
    pairs = (wanted.metadata or {}).items()
    if len(pairs) > MAX_METADATA or any(
        len(name) > 64 or len(value) > 512 for name, value in pairs
    ):
        message = f"metadata has at most {MAX_METADATA} names of 64 characters, with values of 512"
        raise bad_request("invalid_value", message, "metadata")
    return wanted


def seconds_of(window: str) -> int:
    """ClientError 400 for what is no completion window."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_WINDOW:
        message = f"completion_window is 24h, or another number of m, h or d up to 30d, not {window[:40]!r}"
        raise bad_request("invalid_value", message, "completion_window")
    return seconds


async def _file(request: HTTPRequest, batches: Batches) -> FileRecord:
    id = request.path_params["id"]
    file = await batches.runner.do(batches.journal.file, id)
    if file is None or file.tenant != _info(request).tenant:
        raise _no_file(id)
    return file


def _no_file(id: str) -> ClientError:
    return ClientError(404, "file_not_found", f"there is no file {id[:80]!r}", "file_id")


async def _batch(id: str, request: HTTPRequest, batches: Batches) -> BatchRecord:
    record = await batches.runner.do(batches.journal.batch, id)
    if record is None or record.tenant != _info(request).tenant:
        raise ClientError(404, "batch_not_found", f"there is no batch {id[:80]!r}", "batch_id")
    return record


# -- the disk --------------------------------------------------------------------------------------
def _on_disk(work: Callable[..., Any], *what: Any) -> Any:
    try:
        return work(*what)
    except OSError as error:
        _full(error)


def _write(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[_on_disk(os.write, handle, view) :]


def _full(error: OSError) -> NoReturn:
    raise ClientError(503, "disk_full", f"the file cannot be kept: {error.strerror}") from error


def _without_path(message: str) -> str:
    """The message of a JournalError, for those who need not know where anything is."""
    return message.rpartition(": ")[2]
