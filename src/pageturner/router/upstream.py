"""One request to a replica and its answer: HTTP/1.1 on a connection of its own, parsed by httptools.

Owns the bytes and how long to wait for them. Must not know which replica is asked and why, or what is said.
A connection serves one request: it is never stale, and closing it tells the replica that its client left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from pageturner.errors import EngineFault

READ_AT_ONCE = 64 * 1024  # bytes; of an answer that its client does not read, twice as many wait here at most
Headers = list[tuple[bytes, bytes]]


class Lost(Exception):
    """No answer, or no more of it. code: `connect` (nobody listens), `silent` (for too long) or `broken`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica is; `base` stands in front of every path."""

    host: str
    port: int
    base: str = ""

    @property
    def authority(self) -> str:
        """HOST:PORT, as in the header Host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.authority}{self.base}"


def address_of(url: str) -> Address:
    """http://HOST:PORT, with or without http:// and a /v1 behind it. EngineFault('bad_setting') otherwise."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = 80 if parts.port is None else parts.port
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.username or parts.query:
        raise EngineFault("bad_setting", f"a replica is given as http://HOST:PORT, not {url!r}")
    return Address(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


class Exchange:
    """A request and its answer. `status` and `headers` are there after `send`.

    patience  seconds for which the replica may say nothing
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self._reader, self._writer = reader, writer
        self._patience = patience
        self._body = bytearray()
        self._done = False
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes) -> None:
        """Send all of it, and wait for the head of the answer and the first of its body: until then, another
        replica can answer as well. Raises Lost."""
        with self._losing():
            async with asyncio.timeout(self._patience):
                self._writer.write(request)
                await self._writer.drain()
        while not self.status or not (self._body or self._done):
            await self._read()

    async def piece(self) -> bytes:
        """What has come of the body since the last piece: at least a byte, unless it ended. Raises Lost."""
        while not self._body and not self._done:
            await self._read()
        piece, self._body = bytes(self._body), bytearray()
        return piece

    async def rest(self) -> bytes:
        """All of the body that is left."""
        pieces = [await self.piece()]
        while not self.ended:
            pieces.append(await self.piece())
        return b"".join(pieces)

    @property
    def ended(self) -> bool:
        """Nothing of the answer is left."""
        return self._done and not self._body

    def abort(self) -> None:
        """Give it up: whoever waits for it gets Lost('broken')."""
        self._writer.transport.abort()

    async def _read(self) -> None:
        with self._losing():
            async with asyncio.timeout(self._patience):
                data = await self._reader.read(READ_AT_ONCE)
            if data:
                self._parser.feed_data(data)
            elif self.status and not self._framed:
                self._done = True  # an answer without a length ends with its connection
            else:
                raise Lost("broken", "it closed the connection before the answer was complete")

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise Lost("silent", f"it said nothing for {self._patience:g} s") from None
        except (OSError, httptools.HttpParserError) as error:
            raise Lost("broken", str(error) or type(error).__name__) from error

    @property
    def _framed(self) -> bool:
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
async def connected(address: Address, connect: float, patience: float) -> AsyncIterator[Exchange]:
    """A connection, `connect` seconds at most until it is there. Closed at the end, in whatever state."""
    try:
        async with asyncio.timeout(connect):
            opening = asyncio.open_connection(address.host, address.port, limit=READ_AT_ONCE)
            reader, writer = await opening
    except TimeoutError:
        raise Lost("connect", f"no connection within {connect:g} s") from None
    except OSError as error:
        raise Lost("connect", error.strerror or str(error)) from error
    exchange = Exchange(reader, writer, patience)
    try:
        yield exchange
    finally:
        exchange.abort()


def request_of(address: Address, method: str, target: str, headers: Headers, body: bytes) -> bytes:
    """The bytes of a request. target: path and query; headers: without those that this sets itself."""
    lines = [f"{method} {address.base}{target} HTTP/1.1", f"Host: {address.authority}", "Connection: close"]
    if body or method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    ours = "\r\n".join(lines).encode("latin-1")
    theirs = b"".join(b"\r\n" + name + b": " + value for name, value in headers)
    return ours + theirs + b"\r\n\r\n" + body


async def get(address: Address, path: str, patience: float) -> tuple[int, bytes]:
    """Status and body of a page. Raises Lost."""
    async with connected(address, patience, patience) as exchange:
        await exchange.send(request_of(address, "GET", path, [], b""))
        return exchange.status, await exchange.rest()
