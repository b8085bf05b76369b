"""Batches of one server: its journal and files in one folder, and lines that are asked of the
server itself.

Owns the folder, and how a line becomes a request in the background of this server. Must not know
HTTP's side of it (batch_pages.py), nor how a batch is run (batch_runner.py).
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

from pageturner.errors import EngineFault
from pageturner.http.api_keys import ApiKey
from pageturner.http.error_responses import error_body, error_body_of, unforeseen
from pageturner.http.receiving import again, body_too_large
from pageturner.http.request_info import RequestInfo
from pageturner.private_files import own_folder
from pageturner.request import BACKGROUND
from pageturner.server.api.batches.batch_journal import (
    BatchRecord,
    FileRecord,
    Journal,
    JournalError,
)
from pageturner.server.api.batches.batch_lines import Answered, Question, retry_after_of
from pageturner.server.api.batches.batch_runner import BatchPaths, BatchRunner
from pageturner.server.service import Service

if TYPE_CHECKING:
    from pageturner.http.tracing import Traces

log = logging.getLogger("pageturner")
INPUT, OUTPUT = "batch", "batch_output"  # purposes
_FILE_ID = re.compile(r"file-[0-9a-z_]{1,64}")


class Batches:
    """The batches of a server with a --batch-dir, and their runner. traces: for the requests that
    the server sends to itself."""

    def __init__(self, service: Service, app: ASGIApp, traces: Traces | None = None) -> None:
        folder = Path(service.config.batch_dir)
        self._files = folder / "files"
        try:
            own_folder(folder)
            own_folder(self._files)
            self.journal = Journal(folder / "journal.sqlite")
        except (JournalError, OSError) as error:
            raise EngineFault("bad_setting", f"batch_dir: {error}") from error
        paths = BatchPaths(lambda record: self.path(record.input), self._written)
        room, asked = service.background.room, SelfAsked(service, app, traces=traces)
        self.runner = BatchRunner(
            self.journal, paths, asked.ask, room, service.config.max_body_size
        )
        self._traces = traces

    async def start(self) -> None:
        """Take away what belongs to nothing, and go on with what had not ended."""
        try:
            await self.runner.do(self._sweep)
            await self.runner.resume()
        except (JournalError, OSError) as error:
            log.error("batches do not go on: %s", error)

    def begin(self, record: BatchRecord, scope: Any) -> None:
        """Run a new batch, which this request asked for."""
        if self._traces is not None:
            self._traces.remember(record.id, scope)
        self.runner.begin(record)

    async def close(self) -> None:
        await self.runner.close()
        self.journal.close()

    # -- files -------------------------------------------------------------------------------------
    def path(self, id: str) -> Path:
        """Return the path of a file. ValueError if `id` is not a file id."""
        if not _FILE_ID.fullmatch(id):
            raise ValueError(id)
        return self._files / id

    def _sweep(self) -> None:
        known = self.journal.every_file()
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def _written(self, record: BatchRecord, ok: bool) -> tuple[Path, FileRecord] | None:
        if not (record.answered if ok else record.failed):
            return None
        kind = "output" if ok else "error"
        id = f"file-{record.id.removeprefix('batch_')}_{kind}"
        name = f"{record.id}_{kind}.jsonl"
        return self.path(id), FileRecord(id, record.tenant, OUTPUT, name, 0, int(time.time()))


class SelfAsked:
    """A server that is asked by itself. app: its routes, without what stands between them and a
    network; priority: of what it asks; traces: of each of its requests, where they are wanted."""

    def __init__(
        self,
        service: Service,
        app: ASGIApp,
        priority: int = BACKGROUND,
        traces: Traces | None = None,
    ) -> None:
        self._service, self._app, self._priority, self._traces = service, app, priority, traces

    async def ask(self, question: Question, record: BatchRecord) -> Answered:
        """A request of the server to itself, as its client would have sent it."""
        key = self._key(record)
        if key is None:
            message = "the API key of this batch is not valid any more"
            return Answered(401, error_body(401, "invalid_api_key", message))
        info = RequestInfo(question.request_id, tenant=record.tenant, key=key)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": question.url,
            "raw_path": question.url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": {},
            "pageturner": info,
        }
        sent = _Sent()
        if len(question.body) > self._service.config.max_body_size:
            most = self._service.config.max_body_size
            error = body_too_large(most)
            return Answered(413, error_body(413, error.code, error.message))
        trace = self._traces.begin_named(record.id, question.url) if self._traces else None
        try:
            await self._app(scope, again(question.body), sent)
        except Exception:
            if not sent.status:
                raise
        finally:
            info.status = sent.status
            if self._traces and trace:
                self._traces.end(trace, info)
        body = bytes(sent.body) or error_body_of(question.url, unforeseen())
        return Answered(sent.status or 500, body, sent.retry_after)

    def _key(self, record: BatchRecord) -> ApiKey | None:
        """The key of a batch, as it holds for what nobody waits for: an account of its own, so that
        a batch takes nothing of what its owner may ask meanwhile."""
        for _, key in self._service.numbered_keys():
            if key.sha256.hex() == record.key:
                own = hashlib.sha256(b"batches of " + key.sha256).digest() if key.sha256 else b""
                return replace(
                    key, sha256=own, max_concurrent=0, queue_share=0.0, most_urgent=self._priority
                )
        return None


class _Sent:
    """The response that an ASGI application sends, collected."""

    def __init__(self) -> None:
        self.status = 0
        self.retry_after = 0.0
        self.body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.retry_after = retry_after_of(message["headers"])
        else:
            self.body += message.get("body", b"")
