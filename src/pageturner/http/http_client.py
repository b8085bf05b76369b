"""An asynchronous HTTP/1.1 client: one request and its answer on a connection of its own.

Owns the bytes of requests and answers (httptools parses them), how long to wait for them and how
much of them is taken. The router asks its replicas with it, and load generators ask servers. Must
not know who is asked and why. A connection serves one request: so it is never stale, closing it
tells the server that its client has left, and what comes behind an answer is nobody's.

A server is not trusted: whatever it sends, an exchange holds at most MAX_HEAD bytes that are no
body and a few reads of body, ends in its time, and hands on only what is well formed.

Commands that run in a terminal do not need it: they wait for one answer at a time, and use
http.client of the standard library (cli/sources.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from pageturner.errors import bad_setting

# bytes; of an answer that its client does not read, twice as many wait here at most
READ_AT_ONCE = 64 * 1024
# bytes that bring an answer no further: its head, 1xx answers before it, sizes of chunks, trailers
MAX_HEAD = 64 * 1024
MAX_REST = 1 << 20  # bytes of an answer that is wanted in one piece
# errors of connect() that are the affair of this machine, not of the server: no files, no memory,
# no ports
_LOCAL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)
_METHOD = re.compile(r"[A-Z]+")
_TARGET = re.compile(r"/[\x21-\x7e]*")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
Headers = list[tuple[bytes, bytes]]


class ConnectionLost(Exception):
    """No answer, or no more of it. code: `connect` (nobody listens), `silent` (for too long),
    `broken` (it ends too early, or is no answer), or `local` (this machine lacks what a connection
    takes)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server; `base` stands in front of every path. tls: how it is encrypted;
    None: it is not."""

    host: str
    port: int
    base: str = ""
    tls: ssl.SSLContext | None = field(default=None, compare=False, repr=False)

    @property
    def authority(self) -> str:
        """HOST:PORT, as in the header Host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.authority}{self.base}"


def parse_address(url: str, name: str, roots: str = "") -> ServerAddress:
    """The address in http://HOST:PORT, with or without http:// in front and a /v1 behind it; or
    https.

    name  what the user gave it as ("a replica", "--base-url"), for the EngineFault('bad_setting')
          that says what is wrong with it
    roots  PEM file of those that vouch for its certificate; "": those of this machine
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = {"http": 80, "https": 443}.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError:
        port = 0
    plain = url.isascii() and url.isprintable() and " " not in url
    known = parts.scheme in ("http", "https") and not parts.username and not parts.query
    if not known or not parts.hostname or not port or not plain:
        raise bad_setting(f"{name} is given as http://HOST:PORT, not {url!r}")
    tls = _client_context(roots) if parts.scheme == "https" else None
    return ServerAddress(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"), tls)


def _client_context(roots: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=roots or None)
    except OSError as error:
        raise bad_setting(
            f"cannot read certificates from {roots}: {error.strerror or error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def is_header(name: bytes, value: bytes) -> bool:
    """Return whether both may stand in a head: else they could end it, or begin another message
    behind it."""
    return _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None


class AnswerPieces(Protocol):
    """An answer as it comes, by whatever way. `status` and `headers` are there when it has
    begun."""

    status: int
    headers: Headers

    @property
    def ended(self) -> bool:
        """Nothing of the answer is left."""
        ...

    async def read_piece(self) -> bytes:
        """Return what has come of the body since the last piece: at least a byte, unless it ended.
        Raises ConnectionLost."""
        ...

    async def read_rest(self, most: int = MAX_REST, seconds: float | None = None) -> bytes:
        """All of the body that is left, of at most `most` bytes. Raises ConnectionLost."""
        ...


class Exchange:
    """A request and its answer. `status` and `headers` are there after `send`.

    timeout      seconds that the server has to begin its answer, and then for each next piece of it
    received_at  time.monotonic() at which the last bytes came
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float
    ) -> None:
        self.status = 0
        self.headers: Headers = []
        self.received_at = 0.0
        self._reader, self._writer = reader, writer
        self._timeout = timeout
        self._body = bytearray()
        self._has_head = False
        self._done = False
        self._barren = 0  # bytes since the answer last got further
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes) -> None:
        """Send all of it, and wait for the head of the answer and the first of its body. Raises
        ConnectionLost; until `send` returns, another server can still be asked instead."""
        # nobody waits until it has gone: a server may answer before it has read all
        self._writer.write(request)
        async with self._in_time(self._timeout):
            while not self._has_head or not (self._body or self._done):
                await self._read()

    async def read_piece(self) -> bytes:
        """Return what has come of the body since the last piece: at least a byte, unless it ended.
        Raises ConnectionLost."""
        if not self._body and not self._done:
            async with self._in_time(self._timeout):
                while not self._body and not self._done:
                    await self._read()
        piece, self._body = bytes(self._body), bytearray()
        return piece

    async def read_rest(self, most: int = MAX_REST, seconds: float | None = None) -> bytes:
        """All of the body that is left. Raises ConnectionLost('broken') when that is more than
        `most` bytes or takes more than so many seconds; None: `timeout`."""
        patience = self._timeout if seconds is None else seconds
        async with self._in_time(patience, "broken", f"the rest of its answer took {patience:g} s"):
            while not self._done and len(self._body) <= most:
                await self._read()
        if len(self._body) > most:
            raise ConnectionLost("broken", f"its answer is longer than {most} bytes")
        piece, self._body = bytes(self._body), bytearray()
        return piece

    @property
    def ended(self) -> bool:
        """Nothing of the answer is left."""
        return self._done and not self._body

    def abort(self) -> None:
        """Abort the exchange: its waiter gets ConnectionLost('broken')."""
        self._writer.transport.abort()

    async def _read(self) -> None:
        room = MAX_HEAD - self._barren
        if room <= 0:
            raise ConnectionLost(
                "broken", f"{MAX_HEAD} bytes from it are no part of an answer's body"
            )
        data = await self._reader.read(min(READ_AT_ONCE, room))
        self.received_at = time.monotonic()
        if data:
            self._barren += len(data)
            self._feed(data)
        elif self._has_head and not self._has_length:
            self._done = True  # an answer without a length ends with its connection
        else:
            raise ConnectionLost(
                "broken", "it closed the connection before the answer was complete"
            )

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._done:  # what comes behind a whole answer does not matter
                wrong = error.__context__ if isinstance(error.__context__, ValueError) else error
                raise ConnectionLost("broken", f"it sent no HTTP/1.1 answer: {wrong}") from error

    @contextlib.asynccontextmanager
    async def _in_time(
        self, seconds: float, code: str = "silent", what: str = ""
    ) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ConnectionLost(code, what or f"it said nothing for {seconds:g} s") from None
        except OSError as error:
            raise ConnectionLost("broken", str(error) or type(error).__name__) from error

    @property
    def _has_length(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # -- what the parser calls; once there is a whole answer, whatever it calls is ignored ---------
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer, which nobody waits for
            return
        if not is_header(name, value):
            raise ValueError(f"a header {name[:40]!r} that must not be")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_head:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self.headers.clear()  # the answer is still to come
            return
        if not 200 <= status < 600:
            raise ValueError(f"status {status}, which was not asked for")
        if any(
            value.lower() != b"chunked"
            for name, value in self.headers
            if name == b"transfer-encoding"
        ):
            raise ValueError("a transfer encoding other than chunked")
        self.status, self._has_head, self._barren = status, True, 0

    def on_body(self, body: bytes) -> None:
        if self._has_head and not self._done:
            self._body += body
            self._barren = 0

    def on_message_complete(self) -> None:
        self._done = self._has_head


@contextlib.asynccontextmanager
async def connect(
    address: ServerAddress, connect_timeout: float, read_timeout: float
) -> AsyncIterator[Exchange]:
    """A connection, there within `connect_timeout` seconds, or else ConnectionLost('connect').
    Closed at the end, in whatever state it is."""
    try:
        async with asyncio.timeout(connect_timeout):
            opening = asyncio.open_connection(
                address.host, address.port, limit=READ_AT_ONCE, ssl=address.tls
            )
            reader, writer = await opening
    except TimeoutError:
        raise ConnectionLost("connect", f"no connection within {connect_timeout:g} s") from None
    except UnicodeError as error:
        raise ConnectionLost("connect", f"{address.host} is no name of a machine") from error
    except OSError as error:
        raise ConnectionLost(
            "local" if error.errno in _LOCAL else "connect", error.strerror or str(error)
        ) from error
    exchange = Exchange(reader, writer, read_timeout)
    try:
        yield exchange
    finally:
        exchange.abort()


def request_bytes(
    address: ServerAddress, method: str, target: str, headers: Headers, body: bytes
) -> bytes:
    """The bytes of a request. target: path and query, in printable ASCII; headers: without those
    that this sets itself (Host, Connection, Content-Length). ValueError for what would make another
    request of it."""
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise ValueError(f"no method and target of a request: {method[:20]!r} {target[:80]!r}")
    for name, value in headers:
        if not is_header(name, value):
            raise ValueError(f"no header of a request: {name[:40]!r}")
    lines = [
        f"{method} {address.base}{target} HTTP/1.1",
        f"Host: {address.authority}",
        "Connection: close",
    ]
    if body or method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    ours = "\r\n".join(lines).encode("latin-1")
    theirs = b"".join(b"\r\n" + name + b": " + value for name, value in headers)
    return ours + theirs + b"\r\n\r\n" + body


async def get(
    address: ServerAddress,
    path: str,
    timeout: float,
    most: int = MAX_REST,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> tuple[int, bytes]:
    """Status and body of a page of at most `most` bytes. timeout: seconds for the connection, for
    the beginning and for the rest. Raises ConnectionLost."""
    async with connect(address, timeout, timeout) as exchange:
        await exchange.send(request_bytes(address, "GET", path, list(headers), b""))
        return exchange.status, await exchange.read_rest(most)


class EventSplitter:
    """Splits the body of a streamed answer into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` events that are complete with these bytes. Raises
        ConnectionLost('broken') for one without an end."""
        if len(self._rest) > MAX_REST:
            raise ConnectionLost("broken", f"an event is longer than {MAX_REST} bytes")
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        return [event[6:] for event in whole if event.startswith(b"data: ")]
