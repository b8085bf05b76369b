"""What every HTTP request meets first and last: its id, the API key, where it comes from, the size of its
body, the log.

Must not know what any path does. Never logs prompts or keys.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.serve.api_keys import ANYBODY, ApiKey, ApiKeys, KeyRing
from pageturner.serve.error_responses import error_body_of, unforeseen_of
from pageturner.serve.limits import is_safe_id
from pageturner.serve.origins import EVERYTHING, OriginRules
from pageturner.serve.receiving import check_body, discard
from pageturner.text.output_stream import OutputStream

log = logging.getLogger("pageturner")

# no key, no line in the log; the page asks for the live view all the time
OPEN_PATHS = frozenset(["/", "/health", "/ping", "/load", "/metrics", "/version", "/openapi.json", "/docs"])
NO_UPLOADS: Mapping[str, int] = {}
QUIET_PATHS = OPEN_PATHS | {"/v1/live"}
ADMIN_PATHS = ("/v1/admin/", "/v1/load_lora_", "/v1/unload_lora_", "/v1/live")  # with a key of their own
# whose a request is, how urgent, and where it comes from: two of a kind would leave open which one holds
ONCE = frozenset({
    b"authorization", b"x-api-key", b"host", b"origin", b"content-type", b"x-request-id", b"x-tenant",
    b"x-priority", b"x-deadline-ms", b"x-ttft-target-ms", b"x-tpot-target-ms", b"x-elapsed-ms",
    b"x-session-id",
})  # fmt: skip


@dataclass(slots=True)
class RequestInfo:
    """One request: its id, whose it is, and what its log line will say.

    id      as the client gave it, in its body or before it, or a new one
    tenant  whose key it came with, "" where keys do not tell tenants apart
    status  of its answer, 0 before that begins
    about   more for the log line
    abort_reason  why the answer was cut off, "" where it was not
    key     what it came with
    release_body  tells the connection that its body is not kept any more
    """

    id: str
    tenant: str = ""
    status: int = 0
    about: str = ""
    abort_reason: str = ""
    key: ApiKey = ANYBODY
    release_body: Callable[[], None] = field(default=lambda: None)

    def add_answer(self, streams: Iterable[OutputStream]) -> None:
        """Tokens and times of a generating request."""
        streams = list(streams)
        prompt = sum(len(stream.request.prompt) for stream in streams)
        output = sum(len(stream.tokens) for stream in streams)
        cached = sum(stream.cached for stream in streams)
        again = sum(stream.recomputed for stream in streams)
        begun = [stream.times for stream in streams if stream.tokens]
        first = min((times.first_at - times.arrival for times in begun), default=0.0)
        ends = ",".join(stream.finish or "unfinished" for stream in streams[:8])
        once_more = f" recomputed={again}" if again else ""
        self.about = f" prompt={prompt} cached={cached}{once_more} output={output} ttft={first:.3f}s"
        self.about += f" finish={ends}"


class RequestMiddleware:
    """Wraps the application: sees each request before it and each answer behind it. rules: hold where no key
    is needed; uploads: paths whose bodies are read piece by piece, with the most bytes of one."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | KeyRing, max_body_size: int, rules: OriginRules = EVERYTHING,
        uploads: Mapping[str, int] = NO_UPLOADS,
    ) -> None:  # fmt: skip
        self._app = app
        self._keys = keys
        self._most = max_body_size
        self._uploads = uploads
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        info = RequestInfo(given if is_safe_id(given) else uuid.uuid4().hex)
        info.release_body = scope.get("state", {}).get("release_body", info.release_body)
        scope["pageturner"] = info
        begin = time.monotonic()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                echo = (b"x-request-id", info.id.encode())
                message = {**message, "headers": [*message["headers"], echo]}
            await send(message)

        try:
            await self._enter(scope, receive, answer, headers, info)
        except Exception:
            log.exception("request %s failed", info.id)
            if info.status == 0:
                await _respond(answer, 500, unforeseen_of(scope["path"]))
        finally:
            if scope["path"] not in QUIET_PATHS or info.status >= 500:
                seconds = time.monotonic() - begin
                log.info(
                    "%s %s %s %s %.3fs%s%s", info.id, scope["method"], ascii(scope["path"][:128]),
                    info.status or 499, seconds, info.about,
                    f" ({info.abort_reason})" if info.abort_reason else "",
                )  # fmt: skip

    async def _enter(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes], info: RequestInfo
    ) -> None:
        try:
            self._admit(scope, headers, info)
        except ClientError as error:
            content = error_body_of(scope["path"], error)
            more = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
            await _respond(send, error.status, content, *more)
            return
        length = headers.get(b"content-length", b"0")
        most = self._uploads.get(scope["path"], self._most)
        if length.isdigit() and int(length) > most:
            await self._too_large(scope["path"], receive, send, most)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes], info: RequestInfo) -> None:
        """Find out whose request it is. ClientError when it may not come in."""
        once = [name for name, _ in scope["headers"] if name in ONCE]
        if len(once) != len(set(once)):
            twice = max(once, key=once.count).decode()
            raise ClientError(400, "duplicate_header", f"the header {twice} may be there only once")
        path = scope["path"]
        if path in OPEN_PATHS:
            return
        key = self._keys.find(headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b""))
        if key is None and not path.startswith(ADMIN_PATHS):
            raise ClientError(401, "invalid_api_key", "send the API key as 'Authorization: Bearer KEY'")
        if not self._keys.needed:
            self._rules.check(scope["method"], headers)
        check_body(scope["method"], path, headers)
        info.key = key or ANYBODY
        info.tenant = info.key.tenant

    async def _too_large(self, path: str, receive: Receive, send: Send, most: int) -> None:
        """Answer before reading. Then read on a while: closing at once would reset the connection under the
        answer of a client that first writes everything."""
        error = ClientError(413, "body_too_large", f"a request body may have {most} bytes")
        content = error_body_of(path, error)
        headers = _headers(content, (b"connection", b"close"))
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        await discard(receive)
        await send({"type": "http.response.body", "body": b""})


def _headers(content: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    length = (b"content-length", str(len(content)).encode())
    return [(b"content-type", b"application/json"), length, *more]


async def _respond(send: Send, status: int, content: bytes, *more: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _headers(content, *more)})
    await send({"type": "http.response.body", "body": content})
