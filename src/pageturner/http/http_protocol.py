"""One connection of a client, with bounds on all that it may send, hold and leave unread.

Owns when a request is refused before the application sees it, or its connection cut. The syntax of
HTTP, and the way from a request to the application, are uvicorn's. Must not know what is asked, nor
who asks.

uvicorn bounds neither heads nor trailers nor pipelined requests, waits for ever for a request that
has begun and for a client that does not read, and takes trailers for headers. Here every state in
which the client has to do something has a limit of time, watched by one timer that only runs in
such a state.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import sys
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pageturner.http.error_responses import error_body
from pageturner.http.http_limits import OpenConnections
from pageturner.http.memory_reserve import MESSAGE, OUT_OF_MEMORY

COUNTED = 4096  # bytes of a body that are counted together: a chunk may have a single one
_HOST = re.compile(rb"[\w!$%&'()*+,.;=~:\[\]-]*")


class Phase(enum.Enum):
    """The part of a request that is being received."""

    BETWEEN = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's protocol with bounds. `shared`: what all connections have in common, the memory
    that they read into too: asyncio's own is new for each read, and where the system refuses it a
    client with a small request would get no answer."""

    def __init__(self, shared: OpenConnections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._shared = shared
        self._limits = shared.limits
        self._phase = Phase.BETWEEN
        self._since = 0.0  # when this phase began, or reading was taken up again in it
        self._fed = 0  # bytes since then that were no body
        self._head_size = self._headers = 0
        self._parsed = b""  # what the parser is reading
        self._body_size = self._uncounted = 0
        self._body_seen = 0  # at the last look, and when that was different from the one before
        self._heard_at = 0.0
        self._body_base = 0  # what had come at `_since`
        self._unread = 0  # bytes of the answer that were not taken off us at the last look
        self._read_at = self._behind_since = (
            0.0  # it last read something; it began to have something to read
        )
        self._read = 0  # bytes since then, at least
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self.lower: asyncio.Transport | None = (
            None  # where it is encrypted: what has the bytes behind that
        )

    # -- connection --------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._shared.enter(self):
            wait = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(
                wait, self.timeout_keep_alive_handler
            )
        elif self._shared.crowded:
            transport.abort()
        else:
            self._refuse(503, "busy", "too many connections are open: try again in a moment")

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.leave(self)
        for timer in (self._timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # both know this connection: it, and what came of a body, would stay until the garbage is
        # collected
        if self.cycle is not None:
            self.cycle.body = bytearray()
            self.cycle = None  # type: ignore[assignment]
            self.scope = {}  # type: ignore[typeddict-item]

    def make_room(self) -> None:
        self._shared.refused["idle_closed"] += 1
        self.transport.abort()

    def drop_body(self) -> None:
        self._refuse(503, "busy", "too many large bodies are being sent: try again in a moment")

    # -- what comes in -----------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.read

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._shared.read[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._phase is Phase.BETWEEN:
            if not data.strip(b"\r\n"):
                return  # empty lines before a request mean nothing, and keep no connection open
            self._begin_head()
        had = self._body_size
        self._fed += len(data)
        self._parse(data)
        if self._refused or self.parser is None:
            return
        if self._body_size > had:
            self._fed = 0
        elif self._phase is not Phase.BETWEEN and self._fed > self._limits.head_bytes:
            self._refuse_head()
        if self._phase is not Phase.BETWEEN:
            self._watch()

    def _parse(self, data: bytes) -> None:
        self._parsed = data
        super().data_received(data)

    def _unsupported_upgrade_warning(self) -> None:
        """Read on without the Upgrade, which is ignored because it is not taken (RFC 9110, 7.8).
        The parser takes all that follows such a head for another protocol, a body too: so a new
        parser gets the head without it."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._begin_head()
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + self._parsed[upgrade.args[0] :])

    def _begin_head(self) -> None:
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        self._fed = self._head_size = self._headers = 0

    def on_message_begin(self) -> None:
        if self._phase is not Phase.HEAD:  # behind another request, in the same packet
            self._begin_head()
        super().on_message_begin()
        self.scope["state"]["release_body"] = self._release_body

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """The headers of a head. Trailers are counted and dropped: what comes behind a body must
        not override what a gateway has said before it, and nobody here needs them."""
        self._headers += 1
        self._count_head(len(name) + len(value) + 4)
        if self._phase is Phase.HEAD:
            super().on_header(name, value)

    def _count_head(self, n: int) -> None:
        self._head_size += n
        if self._head_size > self._limits.head_bytes or self._headers > self._limits.headers:
            self._refuse_head()
            raise httptools.HttpParserError("too large")  # which stops the parser

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # this head will be read again
        if (fault := self._head_fault()) is not None:
            self._refuse(*fault)
            raise httptools.HttpParserError(fault[1])
        if len(self.pipeline) >= self._limits.pipelined:
            self._refuse(
                429, "too_many_pipelined", "wait for answers before you send more requests"
            )
            raise httptools.HttpParserError("too many")
        super().on_headers_complete()  # refuses what is no address, and is a request no longer then
        if self.scope["http_version"] == "1.0":
            _end_with_connection(self.cycle)
        self._phase = Phase.BODY
        self._since = self._heard_at = self.loop.time()
        self._fed = self._head_size = self._headers = 0
        self._body_size = self._body_seen = self._body_base = self._uncounted = 0

    def _head_fault(self) -> tuple[int, str, str] | None:
        """Return status, code and message for a head that must not be taken (RFC 9112, 2.3, 3.2 and
        6.1), None for any other."""
        version, headers = self.parser.get_http_version(), dict(self.headers)
        if version not in ("1.0", "1.1"):
            return 505, "http_version", f"HTTP/{version} is not spoken here: send HTTP/1.1"
        if b"host" not in headers and version == "1.1":
            return 400, "missing_host", "a request of HTTP/1.1 must have the header Host"
        host = headers.get(b"host", b"").lower()
        target = self.url.lower().partition(b"://")[2].partition(b"/")[0]
        if not _HOST.fullmatch(host) or (self.url[:1] != b"/" and target not in (b"", host)):
            return 400, "invalid_host", "the header Host is HOST or HOST:PORT, as in the target"
        if b"transfer-encoding" in headers and version == "1.0":
            return 400, "invalid_http", "HTTP/1.0 has no Transfer-Encoding: send Content-Length"
        return None

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        self._uncounted += len(body)
        if self._uncounted >= COUNTED:
            self._count_body()
        super().on_body(body)

    def _count_body(self) -> None:
        if self._body_size > self._limits.body_bytes:
            self._release_body()  # it will be refused, and is not kept
        elif not (self._refused or self.cycle.response_started):
            self._shared.bodies.add(self, self._uncounted)
            if not self._shared.memory.allows(self._body_size):
                self._refuse_for_memory()
        self._uncounted = 0
        if self._refused:
            raise httptools.HttpParserError("refused")

    def on_message_complete(self) -> None:
        if self._phase is Phase.HEAD:
            return  # which will be read again
        if self._uncounted:
            self._count_body()
        self._phase = Phase.BETWEEN
        self._shared.bodies.complete(self)
        if not self.cycle.response_complete:
            self._shared.busy(self)
        super().on_message_complete()

    def _release_body(self) -> None:
        self._shared.bodies.release(self)

    # -- what goes out -----------------------------------------------------------------------------
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._release_body()
        if self.pipeline:
            self.flow.pause_reading()
        if not self._answering():
            self._shared.rest(self)
        if self._waiting_bytes() or self._parting():
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read += (
            HIGH_WATER_LIMIT // 2
        )  # between two looks, perhaps: the buffer goes down to a quarter

    def _waiting_bytes(self) -> int:
        """Return how many bytes of the answer are still in the write buffers."""
        if self.lower is None:
            return self.transport.get_write_buffer_size()
        above = 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()
        return above + self.lower.get_write_buffer_size()

    def _parting(self) -> bool:
        """Return whether the connection only waits for the client's end of the TLS shutdown."""
        return self.lower is not None and self.transport.is_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._parting():
            self._watch()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # -- time --------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Look after this client in a moment: it has something to send or to read."""
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.tick, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._refused:
            self.transport.abort()  # it had its time to read why
            return
        now = self.loop.time()
        if self._check_reader(now) | self._check_sender(now):
            self._watch()

    def _check_reader(self, now: float) -> bool:
        """Return whether it has something to read. Cut off when it reads nothing for too long, or
        hardly anything. While an answer is being written and its reader is not far behind, what
        waits here says nothing about the reader."""
        waiting, limits = self._waiting_bytes(), self._limits
        if not self._unread or not (self.flow.write_paused or not self._answering()):
            self._behind_since = self._read_at = now
            self._read = 0
        if waiting < self._unread:
            self._read_at = now
            self._read += self._unread - waiting
        self._unread = waiting
        least = limits.read_rate * (now - self._behind_since - limits.unread_seconds)
        if waiting and (now - self._read_at > limits.unread_seconds or self._read < least):
            if not (
                self._answering() and self.transport.is_closing()
            ):  # which counted when it was given up
                self._shared.refused["client_too_slow"] += 1
            self.transport.abort()
            return False
        if not waiting and self._parting():
            self.transport.abort()  # it had the time between two looks
        return waiting > 0

    def _check_sender(self, now: float) -> bool:
        """Return whether it has something to send. Refused when that takes too long."""
        if self._phase is Phase.BETWEEN or self._refused:
            return False
        limits, behind_an_answer = self._limits, self._phase is Phase.HEAD and self._answering()
        if self.flow.read_paused or self.pipeline or behind_an_answer:  # it is for us to go on
            self._since = self._heard_at = now
            self._body_base = self._body_size
        if self._body_size != self._body_seen:
            self._body_seen, self._heard_at = self._body_size, now
        took = now - self._since
        if self._phase is Phase.HEAD:
            late = took > limits.head_seconds
        else:
            least = limits.body_rate * (took - limits.body_seconds)
            late = (
                now - self._heard_at > limits.body_seconds
                or self._body_size - self._body_base < least
            )
        if late:
            what = "head" if self._phase is Phase.HEAD else "body"
            self._refuse(
                408, "request_timeout", f"the {what} of the request did not arrive in time"
            )
        return not late

    # -- refusals ----------------------------------------------------------------------------------
    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in our shape. Called after each of our own refusals
        too, and for everything that a callback of the parser raises."""
        if isinstance(
            getattr(sys.exception(), "__context__", None), MemoryError
        ):  # a name would be a cycle
            self._refuse_for_memory()
        self._refuse(400, "invalid_http", "the request is not valid HTTP/1.1")

    def _refuse_for_memory(self) -> None:
        self._refuse(503, OUT_OF_MEMORY, MESSAGE)

    def _refuse_head(self) -> None:
        bytes, headers = self._limits.head_bytes, self._limits.headers
        message = f"the first line and the headers of a request may have {bytes} bytes, in {headers} headers"
        self._refuse(431, "head_too_large", message)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, and close when the client had time to read it. Where an answer would be taken for
        another one's, or for a part of it, the connection is cut without a word."""
        if self._refused:
            return
        self._refused = True
        self._shared.refused[code] += 1
        self._release_body()
        if self._timer is not None:
            self._timer.cancel()
        begun = self._phase is Phase.BODY and not self.cycle.response_started and not self.pipeline
        if not begun and (self._phase is Phase.BODY or self._answering()):
            self.transport.abort()
            return
        if (
            self._answering()
        ):  # the application is reading the body: it is told that its client has left
            self.cycle.waiting_for_100_continue = False
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_response(status, code, message))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # it has gone in this very moment
                self.transport.write_eof()
        self._timer = self.loop.call_later(self._limits.linger_seconds, self._look)


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have an answer to HTTP/1.0, which knows no chunks, end with its connection."""
    send = cycle.send

    async def plain(message: Any) -> None:
        cycle.chunked_encoding = False
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]


def _response(status: int, code: str, message: str) -> bytes:
    """The whole answer of a refusal."""
    content = error_body(status, code, message)
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        *(["retry-after: 1"] if status in (429, 503) else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content
