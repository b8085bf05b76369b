"""Whatever clients send, in whatever pieces, and however they leave: nothing is raised, nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from pageturner.http import http_limits
from pageturner.http.http_limits import HttpLimits, OpenConnections
from pageturner.http.memory_reserve import MemoryReserve

from .test_http_limits import HEAD, Loopback, loopback, said

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
WHOLE = [
    b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
    HEAD + b"content-length: 5\r\n\r\nhello",
    HEAD + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\nhello",
    CHUNKED + b"0\r\n\r\n",
    CHUNKED + b"0\r\nx-tenant: evil\r\n\r\n",
    HEAD + b"content-length: 60000\r\n\r\n" + b"x" * 60_000,
    HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
    b"\r\n",
    HEAD + b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 5\r\n\r\nhello",
]
BROKEN = [
    b"\x00",
    HEAD,
    HEAD + b"content-length: 60000\r\n\r\n" + b"x" * 50_000,
    CHUNKED,
    CHUNKED + b"zzz\r\n",
    HEAD + b"a: b\r\n" * 300,
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\n",
    CHUNKED + b"0\r\n" + b"a: b\r\n" * 300,
]


async def one_client(here: Loopback, chance: random.Random) -> None:
    reader, writer = await here.connect()
    with contextlib.suppress(ConnectionError):
        for piece in chance.choices(WHOLE, k=chance.randrange(5)) + chance.choices(
            BROKEN, k=chance.randrange(2)
        ):
            cut = chance.randrange(len(piece) + 1)
            for part in (piece[:cut], piece[cut:]):
                writer.write(part)
                await asyncio.sleep(chance.choice((0.0, 0.0, 0.002)))
        if chance.random() < 0.5:
            await asyncio.wait_for(reader.read(), 30)
    writer.transport.abort()


@pytest.mark.parametrize("seed", range(2))
async def test_nothing_is_raised_and_nothing_is_kept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OpenConnections] = []

    def remembered(
        limits: HttpLimits, refused: Counter[str], memory: MemoryReserve
    ) -> OpenConnections:
        made.append(OpenConnections(limits, refused, memory))
        return made[-1]

    monkeypatch.setattr(http_limits, "OpenConnections", remembered)

    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    limits = {"connections": 80, "body_memory": 400_000, "pipelined": 3, "idle_seconds": 1}
    async with loopback(answer=b"x" * 300_000, **limits) as here:
        await asyncio.gather(*(one_client(here, random.Random(100 * seed + i)) for i in range(100)))
        async with asyncio.timeout(20):
            while made[0].open:
                await asyncio.sleep(0.01)
        assert (made[0].bodies.total, raised) == (0, [])
        assert said(await here.send(b"\x00\r\n\r\n")) == (400, "invalid_http")
        assert here.refused.keys() >= {
            "invalid_http",
            "head_too_large",
            "request_timeout",
            "idle_closed",
        }
        before = len(here.asked)
        whole = HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n"
        for _ in range(20):  # whoever comes behind all of that is served as ever
            assert (await here.send(whole)).startswith("HTTP/1.1 200")
        assert len(here.asked) == before + 20
