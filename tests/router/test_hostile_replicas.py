"""Replicas that send what they should not: the router answers in its own words, holds little, and goes on;
and clients that try to write a replica's request themselves."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from pageturner.config.settings import RouterConfig
from pageturner.http.http_client import ConnectionLost, connect, get, is_header, parse_address
from pageturner.router.fleet import Fleet
from support.refusals import refusal_of

from .replica import Answer, Replica, Routed, begin_stream, chunk, routed, whole, write
from .test_route import fleet, never

HEAD, END = b"HTTP/1.1 200 OK\r\n", b"Content-Length: 2\r\n\r\n{}"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HUGE = 204 << 20  # bytes after which something endless ends
MAX_KEPT = 4 << 20  # bytes


def says(first: bytes, again: bytes = b"", pause: float | None = None) -> Answer:
    """These bytes, then others again and again until they are many; pause: seconds between them."""

    async def answer(replica: Replica, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await writer.drain()
        sent, block = 0, again if pause else again * (65536 // max(len(again), 1))
        while again and sent < HUGE:
            writer.write(block)
            await writer.drain()
            sent += len(block)
            await asyncio.sleep(pause or 0)
        if pause is not None:
            await asyncio.sleep(3600)

    return answer


BROKEN = {
    "nothing": b"",
    "half a head": HEAD + b"Content-Le",
    "garbage": b"\x16\x03\x01\x02\x00SSH-2.0\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n" + END,
    "status 0": b"HTTP/1.1 000 Zero\r\n" + END,
    "status 999": b"HTTP/1.1 999 Many\r\n" + END,
    "another protocol": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n{}",
    "a redirect": b"HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/\r\n" + END,
    "NUL in a value": HEAD + b"A: x\x00y\r\n" + END,
    "NUL in a name": HEAD + b"A\x00: x\r\n" + END,
    "carriage return in a value": HEAD + b"A: x\ry\r\n" + END,
    "control character in a value": HEAD + b"A: x\x1by\r\n" + END,
    "space before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
    "folded line": HEAD + b"A: x\r\n y\r\n" + END,
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
    "negative length": HEAD + b"Content-Length: -2\r\n\r\n{}",
    "length that is none": HEAD + b"Content-Length: 0x2\r\n\r\n{}",
    "length beyond all": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 3\r\n" + END,
    "length and chunks": HEAD + b"Transfer-Encoding: chunked\r\n" + END,
    "chunks and length": HEAD
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunk size that is none": CHUNKED + b"-2\r\n{}\r\n",
    "chunk size beyond all": CHUNKED + b"fffffffffffffffff\r\n{}\r\n",
}
ENDLESS = {
    "header": says(HEAD + b"A: ", b"x"),
    "header name": says(HEAD, b"x"),
    "headers": says(HEAD, b"A: x\r\n"),
    "reason": says(b"HTTP/1.1 200 ", b"x"),
    "interim answers": says(b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
    "chunk size": says(CHUNKED, b"0"),
    "chunk extension": says(CHUNKED + b"2;", b"x"),
    "trailers": says(CHUNKED + b"0\r\n", b"A: x\r\n"),
    "error": says(b"HTTP/1.1 500 Broken\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
}
SILENT = (
    never,
    says(HEAD + b"Content-", pause=0),  # half a head
    says(HEAD + b"Content-Length: 2000000000\r\n\r\n", pause=0),
    says(HEAD + b"A: ", b"x", pause=0.02),  # a byte of a header now and then
    says(CHUNKED, b"0", pause=0.02),  # a digit of a chunk size now and then
)


async def fail_and_go_on(there: Routed, replica: Replica, ways: dict[str, Answer]) -> None:
    for what, replica.answer in ways.items():
        response = await there.ask()
        said = response.status_code, response.json()["error"]["reason"]
        assert said == (502, "replica_lost"), f"{what}: {response.text}"
        replica.answer = whole
        assert await there.by() == replica.name, what


async def test_what_is_no_answer_is_a_502() -> None:
    replica = Replica("a")
    async with routed([replica]) as there:
        await fail_and_go_on(there, replica, {what: says(sent) for what, sent in BROKEN.items()})


async def test_what_has_no_end_is_a_502_and_is_not_kept() -> None:
    replica = Replica("a")
    async with routed([replica]) as there:
        tracemalloc.start()
        try:
            await fail_and_go_on(there, replica, ENDLESS)
            assert tracemalloc.get_traced_memory()[1] < MAX_KEPT
        finally:
            tracemalloc.stop()


async def test_silence_and_what_is_as_good_as_silence_is_a_504() -> None:
    ways = iter(SILENT)

    async def next_way(replica: Replica, writer: asyncio.StreamWriter) -> None:
        await next(ways)(replica, writer)

    replica = Replica("a", next_way)
    async with routed([replica], read_timeout=0.5) as there:
        for response in await asyncio.gather(*(there.ask() for _ in SILENT)):
            assert refusal_of(response) == (
                504,
                "replica_silent",
            )
        assert next(ways, None) is None
        replica.answer = whole
        assert await there.by() == "a"


async def test_a_stream_that_gets_no_further_ends() -> None:
    async def drips(_: Replica, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        chunk(writer, b"data: 1\n\n")
        while True:
            writer.write(b"0")
            await asyncio.sleep(0.02)

    async with routed([Replica("a", drips)], read_timeout=0.3) as there:
        text = (await there.ask()).text
        assert text.startswith("data: 1\n\n")
        assert "replica_lost" in text
        assert text.endswith("data: [DONE]\n\n")


async def test_an_answer_ends_where_it_ends() -> None:
    replica = Replica("a")
    async with routed([replica]) as there:
        for sent, text in (
            (HEAD + END + b"and more", "{}"),
            (HEAD + END + b"HTTP/1.1 500 Broken\r\nContent-Length: 9\r\n\r\nsomething", "{}"),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n" + HEAD + END, "{}"),
            (CHUNKED + b"2;x=y\r\n{}\r\n0\r\nA: b\r\n\r\n", "{}"),
            (b"HTTP/1.1 204 Nothing\r\nContent-Length: 9\r\n\r\n", ""),
        ):
            replica.answer = says(sent)
            response = await there.ask()
            assert (response.is_success, response.text) == (True, text), sent
            assert "a" not in response.headers


async def test_headers_for_neighbours_go_no_further_on_the_way_back() -> None:
    more = (
        "Connection: x-secret, close",
        "X-Secret: 1",
        "Keep-Alive: timeout=9",
        "Upgrade: h2c",
        "TE: x",
        "Trailer: A",
        "Proxy-Authenticate: x",
        "X-Request-Id: not-mine",
        "X-Kept: 1",
    )

    async def answer(replica: Replica, writer: asyncio.StreamWriter) -> None:
        write(writer, 200, {}, *more)

    async with routed([Replica("a", answer)]) as there:
        response = await there.ask()
        got = {line.partition(":")[0].lower() for line in more} & set(response.headers)
        assert got == {"x-request-id", "x-kept"}
        assert "not-mine" not in response.headers.get_list("x-request-id")


# -- pages that a replica answers badly ----------------------------------------------------------------------
@contextlib.asynccontextmanager
async def raw(
    answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address of a server that answers by hand, whatever of a request it has read by then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await answer(await reader.readuntil(b"\r\n\r\n"), writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0.01)


async def test_an_endless_page_is_not_read_to_its_end() -> None:
    async def pours(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        for _ in range(HUGE >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()

    async with raw(pours) as url:
        with pytest.raises(ConnectionLost, match="longer than 1000 bytes"):
            await get(parse_address(url, "it"), "/health", 5.0, 1000)


async def test_a_load_that_makes_no_sense_is_none() -> None:
    load = b""

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        body = load if b"/load" in head else b"{}"
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with raw(answer) as url:
        there = Fleet([parse_address(url, "it")], RouterConfig(health_timeout=5.0))
        for load in (
            b'{"server_load": "\xff"}',
            b"[" * 60_000,
            b'{"server_load": 1e999}',
            b'{"server_load": -5}',
            b"",
            b'{"a\xff": 1}',
        ):
            await there.check_health()
            assert (there.replicas[0].healthy, there.load(there.replicas[0])) == (True, 0), load


async def test_an_answer_is_heard_that_comes_before_the_request_was_read() -> None:
    async def refuses(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 401 No\r\n" + END)
        await writer.drain()
        await asyncio.sleep(3600)

    async with raw(refuses) as url, connect(parse_address(url, "it"), 5.0, 5.0) as exchange:
        await exchange.send(
            b"POST / HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n" + bytes(9_000_000)
        )
        assert (exchange.status, await exchange.read_rest()) == (401, b"{}")


# -- clients that try to write a replica's request -----------------------------------------------------------
async def send(
    url: str, *parts: bytes, between: Callable[[], Awaitable[None]] | None = None
) -> bytes:
    """These bytes, and whatever comes back until the connection closes or nothing comes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for n, part in enumerate(parts):
        if n and between:
            await between()
        writer.write(part)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(1 << 16), 20)
    writer.transport.abort()
    return answer


async def test_no_path_becomes_a_part_of_a_request() -> None:
    replicas = fleet(1)
    async with routed(replicas) as there:
        for more in (b"%0a", b"%0D%0aX-Evil:%201", b"%20HTTP/1.1", b"/x%0a"):
            head = b"GET /v1/models%b HTTP/1.1\r\nHost: evil\r\n\r\n" % more
            answer = await send(there.url, head)
            assert answer.startswith(b"HTTP/1.1 404"), answer
            assert b"evil" not in answer
        assert not replicas[0].asked


async def test_paths_and_queries_are_written_anew() -> None:
    replicas = fleet(1)
    async with routed(replicas) as there:
        for given, told in (
            (b"/v1/%6dodels?a=b%20c&d=%0d%0a", "/v1/models?a=b%20c&d=%0d%0a"),
            (b"/v1/models/", "/v1/models"),
            (b"/v1/models/org/%6dodel%20%0da:%20b%3f", "/v1/models/org/model%20%0Da:%20b%3F"),
            (b'/v1/models?a="|{}<>^`\\', "/v1/models?a=%22%7C%7B%7D%3C%3E%5E%60%5C"),
        ):
            await send(there.url, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % given)
            assert replicas[0].asked[-1].line == f"GET {told} HTTP/1.1"


async def test_headers_for_neighbours_go_no_further_on_the_way_there() -> None:
    replicas = fleet(1)
    dropped = (
        "Connection: X-Hop, close",
        "Connection: x-other",
        "X-Hop: 1",
        "X-Other: 1",
        "TE: trailers",
        "Keep-Alive: timeout=9",
        "Proxy-Connection: x",
        "Proxy-Authorization: Basic x",
        "Trailer: A",
        "Upgrade: h2c",
        'X-Request-Id: "odd"',
    )
    async with routed(replicas) as there:
        lines = ["GET /v1/models HTTP/1.1", "Host: evil", *dropped, "X-Kept: 1", "", ""]
        await send(there.url, "\r\n".join(lines).encode())
        got = replicas[0].asked[0].headers
        assert {line.partition(":")[0].lower() for line in dropped} & got.keys() == {
            "connection",
            "x-request-id",
        }
        assert (got["connection"], got["x-kept"]) == ("close", "1")
        assert "odd" not in got["x-request-id"]
        assert "evil" not in got["host"]


async def test_what_follows_a_body_is_no_header() -> None:
    replicas = fleet(1)
    async with routed(replicas) as there:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Tenant: mine\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n2\r\n{"
        rest = b"}\r\n0\r\nX-Tenant: yours\r\nX-Priority: -9\r\n\r\n"

        async def underway() -> None:
            await there.until(lambda: there.router.active)

        await send(there.url, head, rest, between=underway)
        asked = replicas[0].asked[0]
        assert (asked.headers["x-tenant"], asked.body) == ("mine", b"{}")
        assert "x-priority" not in asked.headers


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        (b"X-A", b"b \t\xff", True),
        (b"", b"", False),
        (b"a b", b"", False),
        (b"a:", b"", False),
        (b"a\n", b"", False),
        (b"a", b"b\n", False),
        (b"a", b"\r", False),
        (b"a", b"\x00", False),
    ],
)
def test_what_may_stand_in_a_head(name: bytes, value: bytes, good: bool) -> None:
    assert is_header(name, value) == good
