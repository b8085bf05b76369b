"""The first and last code that every HTTP request meets: its id, the API key, where it comes from,
the size of its body, the log.

Must not know what any path does. Never logs prompts or keys.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.http.api_keys import ANYBODY, ApiKeys
from pageturner.http.error_responses import error_response, unforeseen
from pageturner.http.origins import EVERYTHING, OriginRules
from pageturner.http.receiving import body_too_large, canonical_path, check_body, discard
from pageturner.http.request_info import CLIENT_LEFT, RequestInfo, is_safe_id, is_watching

if TYPE_CHECKING:
    from pageturner.http.http_metrics import HttpMetrics
    from pageturner.http.tracing import Traces

log = logging.getLogger("pageturner")

# no key, and at `info` no line in the log
OPEN_PATHS = frozenset(
    ["/", "/health", "/ping", "/load", "/metrics", "/version", "/openapi.json", "/docs"]
)
PAGES = ("/", "/openapi.json", "/docs")  # that a browser shows, under the server's names alone
NO_UPLOADS: Mapping[str, int] = {}
ADMIN_PATHS = (
    "/v1/admin/",
    "/v1/load_lora_",
    "/v1/unload_lora_",
    "/v1/live",
)  # with a key of their own
# whose a request is, how urgent, and where it comes from: two of a kind would leave open which one
# holds
ONCE = frozenset(
    {
        b"authorization",
        b"x-api-key",
        b"host",
        b"origin",
        b"content-type",
        b"x-request-id",
        b"x-tenant",
        b"x-priority",
        b"x-deadline-ms",
        b"x-ttft-target-ms",
        b"x-tpot-target-ms",
        b"x-elapsed-ms",
        b"x-session-id",
    }
)


class RequestMiddleware:
    """Wraps the application: sees each request before it and each answer behind it. rules: hold
    where no key is needed; uploads: paths whose bodies are read piece by piece, with the most bytes
    of one; traces: where they are wanted; counts: told of each request but those of who only
    watches. Behind it each path has its version and no slash at its end."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_body_size: int,
        rules: OriginRules = EVERYTHING,
        uploads: Mapping[str, int] = NO_UPLOADS,
        traces: Traces | None = None,
        counts: HttpMetrics | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._most = max_body_size
        self._uploads = uploads
        self._rules = rules
        self._traces = traces
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        scope["path"] = canonical_path(scope["path"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        info = RequestInfo(given if is_safe_id(given) else uuid.uuid4().hex)
        info.release_body = scope.get("state", {}).get("release_body", info.release_body)
        scope["pageturner"] = info
        begin = time.monotonic()
        trace = self._traces.begin(scope) if self._traces else None

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                echo = (b"x-request-id", info.id.encode())
                message = {**message, "headers": [*message["headers"], echo]}
            await send(message)

        try:
            await self._enter(scope, receive, answer, headers, info)
        except Exception as error:
            log.exception("request %s failed", info.id, extra={"fields": {"request_id": info.id}})
            if info.status == 0:
                refusal = error_response(scope["path"], unforeseen(error))
                await refusal(scope, receive, answer)
        finally:
            seconds = time.monotonic() - begin
            if log.isEnabledFor(level := info.log_level(scope["path"], OPEN_PATHS)):
                info.write(level, scope["method"], scope["path"], seconds)
            if self._counts and not is_watching(scope["path"], OPEN_PATHS):
                self._counts.count(scope, info.status or CLIENT_LEFT, seconds)
            if self._traces and trace:
                self._traces.end(trace, info)
            else:
                info.streams = []  # the connection keeps this until its next request

    async def _enter(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        info: RequestInfo,
    ) -> None:
        try:
            self._admit(scope, headers, info)
        except ClientError as error:
            info.about["error"] = error.code
            more = {"www-authenticate": "Bearer"} if error.status == 401 else None
            await error_response(scope["path"], error, more)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        most = self._uploads.get(scope["path"], self._most)
        if length.isdigit() and int(length) > most:
            info.about["error"] = "body_too_large"
            await self._too_large(scope["path"], receive, send, body_too_large(most))
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes], info: RequestInfo) -> None:
        """Authenticate a request. Raises ClientError if it is refused."""
        once = [name for name, _ in scope["headers"] if name in ONCE]
        if len(once) != len(set(once)):
            twice = max(once, key=once.count).decode()
            raise ClientError(400, "duplicate_header", f"the header {twice} may be there only once")
        path = scope["path"]
        if path in OPEN_PATHS:
            if path in PAGES and not self._keys.needed:
                self._rules.check(scope["method"], headers)
            return
        key = self._keys.find(
            headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        )
        if key is None and not path.startswith(ADMIN_PATHS):
            raise ClientError(
                401, "invalid_api_key", "send the API key as 'Authorization: Bearer KEY'"
            )
        if not self._keys.needed:
            self._rules.check(scope["method"], headers)
        check_body(scope["method"], path, headers)
        info.key = key or ANYBODY
        info.tenant = info.key.tenant

    async def _too_large(self, path: str, receive: Receive, send: Send, error: ClientError) -> None:
        """Answer before reading. Then read on a while: closing at once would reset the connection
        under the answer of a client that first writes everything."""
        refusal = error_response(path, error, {"connection": "close"})
        headers = refusal.raw_headers
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        await discard(receive)
        await send({"type": "http.response.body", "body": b""})
