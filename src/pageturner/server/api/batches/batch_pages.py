"""/v1/files and /v1/batches, in OpenAI's shape.

Owns the fields of both, who may see what, and how a file comes in and goes out. Must not know how a
batch is run (batch_runner.py), nor how anything is kept (batch_journal.py).
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

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
from pageturner.private_files import open_private, sync_folder
from pageturner.server.admission.metered import metered
from pageturner.server.api.base.body import NOT_JSON, bad_request
from pageturner.server.api.batches.batch_journal import (
    BATCH_FAILED,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchRecord,
    FileRecord,
    Journal,
    JournalError,
)
from pageturner.server.api.batches.batch_lines import ENDPOINTS
from pageturner.server.api.batches.batches import INPUT, Batches
from pageturner.server.service import Service

P = ParamSpec("P")
T = TypeVar("T")
WRITE_AT_ONCE = 1 << 20  # bytes
MAX_AROUND_FILE = 1 << 17  # bytes of an upload beside its file
MAX_UNFINISHED = 100  # batches of a tenant
MAX_METADATA = 16
LISTED_FILES, LISTED_BATCHES = 10_000, 100  # most in one answer
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
LONGEST_WINDOW = 30 * 86_400
LATER = (FINALIZING, COMPLETED, BATCH_FAILED, EXPIRED, CANCELLING, CANCELLED)  # states
STATUS = {"disk_full": 503, "journal_broken": 500, "journal_in_use": 503}


class NewBatch(msgspec.Struct):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class AskedBatches:
    """A request about the files and batches of its tenant."""

    http: HTTPRequest
    batches: Batches

    @property
    def info(self) -> RequestInfo:
        info: RequestInfo = self.http.scope["pageturner"]
        return info

    @property
    def journal(self) -> Journal:
        return self.batches.journal

    @property
    def id(self) -> str:
        """The id in the path of the request."""
        id: str = self.http.path_params["id"]
        return id

    async def do(self, work: Callable[P, T], *what: P.args, **more: P.kwargs) -> T:
        """Have it done by the thread that may wait for the disk."""
        return await self.batches.runner.do(work, *what, **more)

    async def file(self) -> FileRecord:
        """The file of the path. ClientError 404 where its tenant has none of this id."""
        file = await self.do(self.journal.file, self.id)
        if file is None or file.tenant != self.info.tenant:
            raise _no_file(self.id)
        return file

    async def batch(self, id: str) -> BatchRecord:
        """A batch. ClientError 404 where its tenant has none of this id."""
        record = await self.do(self.journal.batch, id)
        if record is None or record.tenant != self.info.tenant:
            raise ClientError(404, "batch_not_found", f"there is no batch {id[:80]!r}", "batch_id")
        return record

    def told(self, record: BatchRecord) -> dict[str, Any]:
        return batch_object(record, self.batches.runner.trouble)


Page = Callable[[AskedBatches], Awaitable[Response]]


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
                raise ClientError(
                    404,
                    "batches_off",
                    "this server keeps no files and no batches: start it with --batch-dir PATH",
                )
            self._service.check_open()
            try:
                return await page(AskedBatches(request, self.batches))
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
    async def upload(self, asked: AskedBatches) -> Response:
        info, boundary = asked.info, boundary_of(asked.http.headers.get("content-type", ""))
        files = await asked.do(asked.journal.files, info.tenant)
        if len(files) + self._uploading[info.tenant] >= self._service.config.max_files:
            most = self._service.config.max_files
            raise ClientError(
                429, "too_many_files", f"{most} files are kept at most: delete some of yours"
            )
        id = f"file-{uuid.uuid4().hex}"
        path = asked.batches.path(id)
        self._uploading[info.tenant] += 1
        try:
            with metered(self._service.quota, asked.http.scope, asked.http.receive) as (_, receive):
                fields, name, size = await self._receive(asked, path, receive, boundary)
            told = FileRecord(id, info.tenant, _purpose(fields), name, size, int(time.time()))
            await asked.do(asked.journal.add_file, told)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            self._uploading[info.tenant] -= 1
        return json_response(file_object(told))

    async def _receive(
        self, asked: AskedBatches, path: Path, receive: Receive, boundary: bytes
    ) -> tuple[dict[str, str], str, int]:
        """Write what comes to the disk. Returns the other fields, the name of the file, and its
        size."""
        held, size, lines = bytearray(), 0, 0
        config = self._service.config
        most = config.max_file_size
        handle = await asked.do(_on_disk, open_private, path, os.O_EXCL | os.O_WRONLY)

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
                await asked.do(_write, handle, bytes(held))
                held.clear()

        try:
            fields, name = await read_form(receive, boundary, take)
            if name is None:
                raise bad_request("missing_field", "file is missing", "file")
            await asked.do(_write, handle, bytes(held))
            await asked.do(_on_disk, os.fsync, handle)
        finally:
            os.close(handle)
        await asked.do(_on_disk, sync_folder, path.parent)
        return fields, name[:255], size

    async def list_files(self, asked: AskedBatches) -> Response:
        files = await asked.do(asked.journal.files, asked.info.tenant)
        purpose = asked.http.query_params.get("purpose")
        if asked.http.query_params.get("order", "desc") == "asc":
            files.reverse()
        found = [file_object(file) for file in files if purpose in (None, file.purpose)]
        return _listed(found, asked, LISTED_FILES, LISTED_FILES)

    async def get_file(self, asked: AskedBatches) -> Response:
        return json_response(file_object(await asked.file()))

    async def content(self, asked: AskedBatches) -> Response:
        file = await asked.file()
        path = asked.batches.path(file.id)
        if not path.exists():  # the disk was full, or the power failed, when it was deleted
            raise _no_file(file.id)
        return FileResponse(path, media_type="application/octet-stream")

    async def delete_file(self, asked: AskedBatches) -> Response:
        file = await asked.file()
        content = asked.batches.path(file.id)
        if not await asked.do(asked.journal.delete_file, file.id, content):
            raise ClientError(
                409, "file_in_use", "a batch that has not ended reads this file: cancel it first"
            )
        return json_response({"id": file.id, "object": "file", "deleted": True})

    # -- batches -----------------------------------------------------------------------------------
    async def create(self, asked: AskedBatches) -> Response:
        info = asked.info
        with metered(self._service.quota, asked.http.scope, asked.http.receive) as (_, receive):
            raw = await read_body(receive, self._service.config.max_body_size)
        wanted = _decoded(raw)
        file = await asked.do(asked.journal.file, wanted.input_file_id)
        usable = file is not None and file.tenant == info.tenant and file.purpose == INPUT
        if file is None or not usable or not asked.batches.path(file.id).exists():
            message = f"there is no file {wanted.input_file_id[:80]!r} of purpose batch"
            raise bad_request("invalid_input_file", message, "input_file_id")
        unfinished = await asked.do(asked.journal.unfinished)
        if sum(one.tenant == info.tenant for one in unfinished) >= MAX_UNFINISHED:
            raise ClientError(
                429, "too_many_batches", f"at most {MAX_UNFINISHED} batches may be unfinished"
            )
        record = await asked.do(
            asked.journal.create,
            BatchRecord(
                f"batch_{uuid.uuid4().hex}",
                tenant=info.tenant,
                key=info.key.sha256.hex(),
                endpoint=wanted.endpoint,
                input=file.id,
                window=wanted.completion_window,
                metadata=wanted.metadata,
                expires=int(time.time()) + seconds_of(wanted.completion_window),
            ),
        )
        asked.batches.begin(record, asked.http.scope)
        return json_response(asked.told(record))

    async def list_batches(self, asked: AskedBatches) -> Response:
        most = _limit(asked, LISTED_BATCHES, 20)
        before = 1 << 62
        if after := asked.http.query_params.get("after"):
            before = (await asked.batch(after)).number
        tenant = asked.info.tenant
        found = await asked.do(asked.journal.batches, tenant, before, most + 1)
        told = [asked.told(record) for record in found[:most]]
        return json_response(_page(told, len(found) > most))

    async def get_batch(self, asked: AskedBatches) -> Response:
        return json_response(asked.told(await asked.batch(asked.id)))

    async def cancel(self, asked: AskedBatches) -> Response:
        record = await asked.batch(asked.id)
        if record.ended:
            raise ClientError(
                409, "batch_ended", f"the batch has ended: its status is {record.status}"
            )
        await asked.do(asked.journal.move, record.id, CANCELLING, CANCELLED)
        asked.batches.runner.end(record.id)
        return json_response(asked.told(await asked.batch(record.id)))


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
        "in_progress_at": times.get(IN_PROGRESS),
        "expires_at": record.expires or None,
        **{f"{status}_at": times.get(status) for status in LATER},
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


def _listed(found: list[dict[str, Any]], asked: AskedBatches, most: int, usual: int) -> Response:
    limit = _limit(asked, most, usual)
    if after := asked.http.query_params.get("after"):
        ids = [one["id"] for one in found]
        if after not in ids:
            raise bad_request(
                "invalid_value", f"after: there is no {after[:80]!r} in this list", "after"
            )
        found = found[ids.index(after) + 1 :]
    return json_response(_page(found[:limit], len(found) > limit))


def _limit(asked: AskedBatches, most: int, usual: int) -> int:
    text = asked.http.query_params.get("limit", str(usual))
    if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= most):
        raise bad_request("invalid_value", f"limit is 1 to {most}", "limit")
    return int(text)


# -- requests --------------------------------------------------------------------------------------
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
    except NOT_JSON as error:
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


def _no_file(id: str) -> ClientError:
    return ClientError(404, "file_not_found", f"there is no file {id[:80]!r}", "file_id")


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
