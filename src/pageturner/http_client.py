"""An asynchronous HTTP/1.1 client: one request and its answer on a connection of its own.

Owns the bytes of requests and answers (httptools parses them), and how long to wait for them. The router asks
its replicas with it, and load generators ask servers. Must not know who is asked and why. A connection serves
one request: so it is never stale, and closing it tells the server that its client has left.

Commands that run in a terminal do not need it: they wait for one answer at a time, and use http.client of the
standard library (commands/sources.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from pageturner.errors import EngineFault

READ_AT_ONCE = 64 * 1024  # bytes; of an answer that its client does not read, twice as many wait here at most
Headers = list[tuple[bytes, bytes]]


class ConnectionLost(Exception):
    """No answer, or no more of it. code: `connect` (nobody listens), `silent` (for too long) or `broken`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is; `base` stands in front of every path."""

    host: str
    port: int
    base: str = ""

    @property
    def authority(self) -> str:
        """HOST:PORT, as in the header Host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.authority}{self.base}"


def parse_address(url: str, name: str) -> ServerAddress:
    """The address in http://HOST:PORT, with or without http:// in front and a /v1 behind it.

    name  what the user gave it as ("a replica", "--base-url"), for the EngineFault('bad_setting') that says
          what is wrong with it
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = 80 if parts.port is None else parts.port
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.username or parts.query:
        raise EngineFault("bad_setting", f"{name} is given as http://HOST:PORT, not {url!r}")
    return ServerAddress(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


class Exchange:
    """A request and its answer. `status` and `headers` are there after `send`.

    timeout      seconds for which the server may say nothing
    received_at  time.monotonic() at which the last bytes came
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self.received_at = 0.0
        self._reader, self._writer = reader, writer
        self._timeout = timeout
        self._body = bytearray()
        self._done = False
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes) -> None:
        """Send all of it, and wait for the head of the answer and the first of its body. Raises
        ConnectionLost; until `send` returns, another server can still be asked instead."""
        with self._as_connection_lost():
            async with asyncio.timeout(self._timeout):
                self._writer.write(request)
                await self._writer.drain()
        while not self.status or not (self._body or self._done):
            await self._read()

    async def read_piece(self) -> bytes:
        """What has come of the body since the last piece: at least a byte, unless it ended. Raises
        ConnectionLost."""
        while not self._body and not self._done:
            await self._read()
        piece, self._body = bytes(self._body), bytearray()
        return piece

    async def read_rest(self) -> bytes:
        """All of the body that is left. Raises ConnectionLost."""
        pieces = [await self.read_piece()]
        while not self.ended:
            pieces.append(await self.read_piece())
        return b"".join(pieces)

    @property
    def ended(self) -> bool:
        """Nothing of the answer is left."""
        return self._done and not self._body

    def abort(self) -> None:
        """Give it up: whoever waits for it gets ConnectionLost('broken')."""
        self._writer.transport.abort()

    async def _read(self) -> None:
        with self._as_connection_lost():
            async with asyncio.timeout(self._timeout):
                data = await self._reader.read(READ_AT_ONCE)
            self.received_at = time.monotonic()
            if data:
                self._parser.feed_data(data)
            elif self.status and not self._has_length:
                self._done = True  # an answer without a length ends with its connection
            else:
                raise ConnectionLost("broken", "it closed the connection before the answer was complete")

    @contextlib.contextmanager
    def _as_connection_lost(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ConnectionLost("silent", f"it said nothing for {self._timeout:g} s") from None
        except (OSError, httptools.HttpParserError) as error:
            raise ConnectionLost("broken", str(error) or type(error).__name__) from error

    @property
    def _has_length(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # -- what the parser calls -------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # afterwards they are trailers, which nobody waits for
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._done = True


@contextlib.asynccontextmanager
async def connect(
    address: ServerAddress, connect_timeout: float, read_timeout: float
) -> AsyncIterator[Exchange]:
    """A connection, there within `connect_timeout` seconds, or else ConnectionLost('connect'). Closed at the
    end, in whatever state it is."""
    try:
        async with asyncio.timeout(connect_timeout):
            opening = asyncio.open_connection(address.host, address.port, limit=READ_AT_ONCE)
            reader, writer = await opening
    except TimeoutError:
        raise ConnectionLost("connect", f"no connection within {connect_timeout:g} s") from None
    except OSError as error:
        raise ConnectionLost("connect", error.strerror or str(error)) from error
    exchange = Exchange(reader, writer, read_timeout)
    try:
        yield exchange
    finally:
        exchange.abort()


def request_bytes(address: ServerAddress, method: str, target: str, headers: Headers, body: bytes) -> bytes:
    """The bytes of a request. target: path and query; headers: without those that this sets itself (Host,
    Connection, Content-Length)."""
    lines = [f"{method} {address.base}{target} HTTP/1.1", f"Host: {address.authority}", "Connection: close"]
    if body or method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    ours = "\r\n".join(lines).encode("latin-1")
    theirs = b"".join(b"\r\n" + name + b": " + value for name, value in headers)
    return ours + theirs + b"\r\n\r\n" + body


async def get(address: ServerAddress, path: str, timeout: float) -> tuple[int, bytes]:
    """Status and body of a page. Raises ConnectionLost."""
    async with connect(address, timeout, timeout) as exchange:
        await exchange.send(request_bytes(address, "GET", path, [], b""))
        return exchange.status, await exchange.read_rest()


class EventSplitter:
    """Splits the body of a streamed answer into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` events that are complete with these bytes."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        return [event[6:] for event in whole if event.startswith(b"data: ")]
