"""What a server takes from clients that send or read too much, too slowly, or never: over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pageturner.config.settings import ServerConfig
from pageturner.errors import ClientError
from pageturner.http import lifecycle
from pageturner.http.api_keys import ApiKeys
from pageturner.http.http_limits import SMALL_BODY, BodyMemory, HttpLimits, limits_of
from pageturner.http.http_protocol import COUNTED, BoundedProtocol
from pageturner.http.memory_reserve import MemoryReserve
from pageturner.http.middleware import RequestMiddleware
from pageturner.http.receiving import read_body
from pageturner.http.tls import Certificates

from .conftest import Server

SOON = {"head_seconds": 0.2, "body_seconds": 0.2, "unread_seconds": 0.2, "linger_seconds": 0.2}
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


@dataclass
class Loopback:
    """A server of this test. asked: headers and body of each request that the application read."""

    port: int
    refused: Counter[str]
    asked: list[tuple[dict[bytes, bytes], bytes]] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    understands: bool = False  # what it reads at once, so that nobody has to keep it
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    tls: ssl.SSLContext | None = None  # of clients

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)
        self.writers.append(writer)
        return reader, writer

    async def send(self, *parts: bytes) -> str:
        """What is answered to these bytes until the server closes."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                return (await reader.read()).decode()
        return "reset"


@contextlib.asynccontextmanager
async def loopback(
    answer: bytes = b"ok", certificates: Certificates | None = None, **limits: Any
) -> AsyncIterator[Loopback]:
    """It reads each request and gives this answer."""
    chosen = HttpLimits(**{**SOON, **limits})
    listener = lifecycle.bind("127.0.0.1", 0)
    here = Loopback(listener.getsockname()[1], Counter())
    here.may_answer.set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            here.asked.append((dict(scope["headers"]), await read_body(receive, chosen.body_bytes)))
        except (
            ClientError
        ):  # its client has left; the log would keep what it raised, and the connection
            return
        if here.understands:
            scope["state"]["release_body"]()
        await here.may_answer.wait()
        length = str(len(answer)).encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        )
        await send({"type": "http.response.body", "body": answer})

    middleware = RequestMiddleware(app, ApiKeys(), chosen.body_bytes)
    server = lifecycle.http_server(middleware, chosen, here.refused, certificates=certificates)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield here
    finally:
        for writer in here.writers:
            writer.transport.abort()
        server.should_exit = True
        await serving
        listener.close()


def with_server(test: Callable[[Loopback], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        async with loopback(**limits) as here:
            await test(here)

    asyncio.run(run())


def said(answer: str) -> tuple[int, str]:
    """Status and code of a refusal, which has the shape of all our errors."""
    head, _, body = answer.partition("\r\n\r\n")
    error = json.loads(body)["error"]
    assert "connection: close" in head
    assert error["code"] == int(head.split()[1])
    return error["code"], error["reason"]


# -- heads ---------------------------------------------------------------------------------------------------
TOO_LARGE = (
    [b"GET /" + b"x" * 5000],
    [b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n"],
    [HEAD + b"a: " + b"x" * 1000, *[b"x" * 1000] * 5],
    [HEAD + b"a: b\r\n" * 20],
    [HEAD + b"a: b\r\n" * 20 + b"\r\n"],
    [HEAD, *[b"a: b\r\n"] * 20],
)


def test_a_head_that_is_too_large_is_a_431() -> None:
    async def test(here: Loopback) -> None:
        for answer in await asyncio.gather(*(here.send(*head) for head in TOO_LARGE)):
            assert said(answer) == (431, "head_too_large")
        assert here.refused["head_too_large"] == len(TOO_LARGE)
        assert not here.asked

    with_server(test, head_bytes=4096, headers=16, head_seconds=20)


def test_a_head_that_does_not_end_is_a_408() -> None:
    async def test(here: Loopback) -> None:
        parts = (b"G", b"\r\nGET / HT", HEAD, HEAD + b"a: b")
        for answer in await asyncio.gather(*map(here.send, parts)):
            assert said(answer) == (408, "request_timeout")

    with_server(test)


def test_empty_lines_keep_no_connection_open() -> None:
    async def test(here: Loopback) -> None:
        reader, writer = await here.connect()
        async with asyncio.timeout(20):
            while not (reader.at_eof() or reader.exception()):
                writer.write(b"\r\n")
                await asyncio.sleep(0.05)

    with_server(test, idle_seconds=1)


def test_what_is_no_http_is_told_so_in_our_shape() -> None:
    async def test(here: Loopback) -> None:
        assert said(await here.send(b"\x00\xff\r\n\r\n")) == (400, "invalid_http")

    with_server(test)


# -- bodies --------------------------------------------------------------------------------------------------
CHUNKED = HEAD + b"x-tenant: good\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"


def test_trailers_are_no_headers() -> None:
    async def test(here: Loopback) -> None:
        sent = CHUNKED + b"0\r\nX-Tenant: evil\r\nX-Priority: -9\r\n\r\n"
        reader, writer = await here.connect()
        for part in (sent, sent):  # a second time on the same connection
            writer.write(part)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        for headers, body in here.asked:
            assert (headers[b"x-tenant"], body) == (b"good", b"hi")
            assert b"x-priority" not in headers

    with_server(test)


ENDLESS = (
    [b"0\r\n" + b"a: b\r\n" * 20],
    [b"0\r\na: " + b"x" * 1000, *[b"x" * 1000] * 5],
    [b"2;a=" + b"x" * 1000, *[b"x" * 1000] * 5],
)


def test_trailers_and_chunk_extensions_have_an_end() -> None:
    async def test(here: Loopback) -> None:
        for answer in await asyncio.gather(*(here.send(CHUNKED, *rest) for rest in ENDLESS)):
            assert said(answer) == (431, "head_too_large")

    with_server(test, head_bytes=4096, headers=16)


def test_a_body_that_does_not_come_is_a_408() -> None:
    async def test(here: Loopback) -> None:
        for length in (b"content-length: 100", b"transfer-encoding: chunked"):
            assert said(await here.send(HEAD + length + b"\r\n\r\n")) == (408, "request_timeout")
        assert not here.asked

    with_server(test)


def test_a_body_that_trickles_is_a_408() -> None:
    async def test(here: Loopback) -> None:
        drops = [b"x"] * 40  # a byte every 10 ms
        answer = await here.send(HEAD + b"content-length: 1000\r\n\r\n", *drops, *drops)
        assert said(answer) == (408, "request_timeout")

    with_server(test, body_rate=100_000.0, linger_seconds=20.0)


def test_a_slow_body_that_keeps_coming_is_read() -> None:
    async def test(here: Loopback) -> None:
        reader, writer = await here.connect()
        writer.write(HEAD + b"content-length: 70\r\n\r\n")
        for _ in range(70):
            writer.write(b"x")
            await asyncio.sleep(0.01)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    with_server(test, body_rate=1.0, body_seconds=0.6)


def test_half_sent_bodies_hold_no_more_than_their_share() -> None:
    """The oldest gives way; who sends all of its body meanwhile is answered."""

    async def test(here: Loopback) -> None:
        half = HEAD + b"content-length: 1000000\r\n\r\n" + b"x" * 200_000
        waiting = [asyncio.ensure_future(here.send(half)) for _ in range(8)]
        async with asyncio.timeout(20):
            while here.refused["busy"] < 3:
                await asyncio.sleep(0.01)
        whole = HEAD + b"connection: close\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000
        assert (await here.send(whole)).endswith("ok")
        ends = Counter(map(said, await asyncio.gather(*waiting)))
        assert ends[503, "busy"] >= 3
        assert sum(ends.values()) == 8

    with_server(test, body_memory=1_000_000, body_seconds=1.0)


@pytest.mark.parametrize("understands", [False, True])
def test_whole_bodies_count_until_they_are_understood(understands: bool) -> None:
    async def test(here: Loopback) -> None:
        here.understands = understands
        here.may_answer.clear()
        whole = HEAD + b"connection: close\r\ncontent-length: 400000\r\n\r\n" + b"x" * 400_000
        first = [asyncio.ensure_future(here.send(whole)) for _ in range(2)]
        while len(here.asked) < 2:
            await asyncio.sleep(0.01)
        third = asyncio.ensure_future(here.send(whole))
        while len(here.asked) < 3 and not here.refused["busy"]:
            await asyncio.sleep(0.01)
        here.may_answer.set()
        assert (await third).endswith("ok") == understands
        assert all(answer.endswith("ok") for answer in await asyncio.gather(*first))

    with_server(test, body_memory=1_000_000)


# -- connections ---------------------------------------------------------------------------------------------
def test_who_waits_longest_without_a_request_makes_room() -> None:
    async def test(here: Loopback) -> None:
        first, *_ = [await here.connect() for _ in range(3)]
        await asyncio.sleep(0.05)
        answer = await here.send(HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n")
        assert answer.endswith("ok")
        with contextlib.suppress(ConnectionError):
            assert await first[0].read() == b""
        assert here.refused["idle_closed"] == 1

    with_server(test, connections=3)


def test_a_connection_too_many_is_a_503() -> None:
    async def test(here: Loopback) -> None:
        here.may_answer.clear()
        for _ in range(2):
            _, writer = await here.connect()
            writer.write(HEAD + b"content-length: 0\r\n\r\n")
        while len(here.asked) < 2:
            await asyncio.sleep(0.01)
        refused = await here.send()
        assert said(refused) == (503, "busy")
        assert "retry-after: 1" in refused
        here.may_answer.set()

    with_server(test, connections=2)


def test_who_does_not_read_is_cut_off() -> None:
    async def test(here: Loopback) -> None:
        _, writer = await here.connect()
        writer.write(HEAD + b"content-length: 0\r\n\r\n")
        async with asyncio.timeout(20):
            while not here.refused["client_too_slow"]:
                await asyncio.sleep(0.01)

    with_server(test, answer=b"x" * 20_000_000)


@pytest.mark.parametrize(
    ("rate", "piece", "unread", "cut"), [(1e9, 1 << 10, 0.2, 1), (1.0, 1 << 16, 1.0, 0)]
)
def test_who_only_drips_is_cut_off(rate: float, piece: int, unread: float, cut: int) -> None:
    """The pieces of who is cut off are so small that the answer would take minutes on any machine. Who is not
    may be held up by other programs for a second, and reads for longer than that."""

    async def test(here: Loopback) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.connect(("127.0.0.1", here.port))
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while await loop.sock_recv(sock, piece) and not here.refused["client_too_slow"]:
                    await asyncio.sleep(0.01)  # never for as long as nothing may be read
        assert here.refused["client_too_slow"] == cut

    with_server(test, answer=b"x" * 10_000_000, read_rate=rate, unread_seconds=unread)


def test_only_so_many_requests_are_pipelined() -> None:
    async def test(here: Loopback) -> None:
        get = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
        few = await here.send(get * 4 + get.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert few.count("200 OK") == 5
        await here.send(get * 1000)
        assert here.refused["too_many_pipelined"] == 1
        assert len(here.asked) < 30

    with_server(test)


def test_who_has_left_leaves_nothing_behind() -> None:
    async def test(here: Loopback) -> None:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                _, writer = await here.connect()
                writer.write(HEAD + b"content-length: 100000\r\n\r\n" + b"x" * 50_000)
            async with asyncio.timeout(20):
                while len(protocols()) < 3:
                    await asyncio.sleep(0.01)
                for writer in here.writers:
                    writer.close()
                while protocols():
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()

    def protocols() -> list[BoundedProtocol]:
        return [one for one in gc.get_objects() if type(one) is BoundedProtocol]

    with_server(test, body_seconds=20)


@pytest.mark.slow
def test_memory_of_half_sent_bodies_comes_back(start: Callable[..., Server]) -> None:
    server = start()

    def resident() -> int:  # bytes, without what is shared with others
        lines = Path(f"/proc/{server.process.pid}/smaps_rollup").read_text().splitlines()
        return sum(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:")
        )

    def send(count: int, size: int, least: int) -> None:
        """So many half-sent bodies grow side by side, until the server holds so much memory."""
        socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for part in (head, *[b"x" * 30_000] * (size // 30_000)):
            for sock in socks:
                sock.sendall(part)
        server.until(lambda: resident() > least)
        for sock in socks:
            sock.close()

    port = int(server.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000000\r\n\r\n"
    rest = resident()
    send(100, 240_000, rest + 20_000_000)
    server.until(lambda: resident() < rest + 8_000_000, 20)


# -- the account of bodies -----------------------------------------------------------------------------------
@dataclass(eq=False)
class Sender:
    memory: BodyMemory
    dropped: int = 0

    def make_room(self) -> None:
        raise AssertionError

    def drop_body(self) -> None:
        self.dropped += 1
        self.memory.release(self)


def test_the_body_that_is_on_its_way_for_longest_gives_way() -> None:
    memory = BodyMemory(10 * SMALL_BODY)
    whole, small, first, second = senders = [Sender(memory) for _ in range(4)]
    memory.add(whole, 5 * SMALL_BODY)
    memory.complete(whole)
    memory.add(small, SMALL_BODY)
    memory.add(first, 2 * SMALL_BODY)
    memory.add(second, 2 * SMALL_BODY)
    assert [one.dropped for one in senders] == [0, 0, 0, 0]
    memory.add(second, 1)
    assert [one.dropped for one in senders] == [0, 0, 1, 0]
    memory.release(whole)
    memory.release(whole)
    assert memory.total == 3 * SMALL_BODY + 1


def test_small_bodies_get_in_whatever_large_ones_take() -> None:
    memory = BodyMemory(SMALL_BODY)
    large, small = Sender(memory), Sender(memory)
    memory.add(large, SMALL_BODY)
    memory.complete(large)
    memory.add(small, SMALL_BODY)
    assert small.dropped == 0


def test_a_body_of_the_largest_size_fits_and_files_bound_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    limits = limits_of(ServerConfig(max_body_memory=0, max_body_size=1 << 20))
    assert limits.body_memory > 1 << 20
    assert limits.connections == 192


def test_chunks_of_a_byte_cost_no_look_at_the_memory_each(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()
    plain = MemoryReserve.allows
    monkeypatch.setattr(
        MemoryReserve, "allows", lambda self, size: looks.append(size) or plain(self, size)
    )

    async def work() -> None:
        async with loopback(head_seconds=9, body_seconds=9) as here:
            head = HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            told = await here.send(head, b"1\r\nx\r\n" * 3 * COUNTED + b"0\r\n\r\n")
            assert told.startswith("HTTP/1.1 200 OK")
            assert here.asked[0][1] == b"x" * 3 * COUNTED

    asyncio.run(work())
    assert len(looks) <= 4


def test_no_part_of_an_answer_waits_for_the_receipt_of_another() -> None:
    with (
        lifecycle.bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
