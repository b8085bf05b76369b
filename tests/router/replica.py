"""A replica that does as a test says, an HTTP/1.1 server in the test's own event loop; and a router before
several of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from pageturner.config.settings import RouterConfig
from pageturner.http import lifecycle
from pageturner.http.api_keys import ApiKeys
from pageturner.http.http_client import parse_address
from pageturner.http.http_limits import limits_of
from pageturner.http.middleware import RequestMiddleware
from pageturner.router.app import create_app
from pageturner.router.fleet import Fleet
from pageturner.router.members import Listed, Members
from pageturner.router.proxy import Router
from pageturner.router.replica import Member

Answer = Callable[["Replica", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class ForwardedRequest:
    line: str
    headers: dict[str, str]
    body: bytes


async def whole(replica: Replica, writer: asyncio.StreamWriter) -> None:
    """An ordinary answer, which says who gave it."""
    write(writer, 200, {"by": replica.name})


def write(writer: asyncio.StreamWriter, status: int, page: Any, *headers: str) -> None:
    body = json.dumps(page).encode()
    lines = [
        f"HTTP/1.1 {status} Some",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        *headers,
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@dataclass
class Replica:
    """health: status of /health, 0: it says nothing; load: what /load says; answer: to all other requests."""

    name: str
    answer: Answer = whole
    health: int = 200
    load: int = 0
    asked: list[ForwardedRequest] = field(default_factory=list)
    left: int = 0  # connections that were closed under an answer
    url: str = ""
    port: int = 0
    server: asyncio.Server | None = None
    open: bool = False
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.open = True
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """At once, with all connections."""
        assert self.server is not None
        # asyncio forgets a connection that it is just accepting when the server closes: let it finish
        for sock in self.server.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
        self.open = False
        for _ in range(3):
            await asyncio.sleep(0)
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(lambda _: (self.tasks.discard(task), writer.transport.abort()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._one(reader, writer)
        except asyncio.CancelledError:
            pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left += 1

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
        if head[0].startswith("GET /health"):
            if not self.health:
                await reader.read()  # until whoever asks has had enough
                return
            write(writer, self.health, {})
        elif head[0].startswith("GET /load"):
            write(writer, 200, {"server_load": self.load})
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.asked.append(ForwardedRequest(head[0], headers, body))
            work = asyncio.ensure_future(self.answer(self, writer))
            hung_up = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait({work, hung_up}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ConnectionError  # counted once, whether it was closed or reset
            finally:
                work.cancel()
                hung_up.cancel()
                await asyncio.gather(work, hung_up, return_exceptions=True)
        await writer.drain()


@dataclass
class Routed:
    http: httpx.AsyncClient
    router: Router

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    async def ask(self, prompt: str = "hello", **more: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **more})

    async def by(self, prompt: str = "hello", **more: Any) -> str:
        """Which replica answers."""
        response = await self.ask(prompt, **more)
        assert response.status_code == 200, response.text
        return str(response.json()["by"])

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def metric(self, line: str) -> float:
        text = (await self.http.get("/metrics")).text
        found = [float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line)]
        assert found, f"no {line} in\n{text}"
        return sum(found)


@contextlib.asynccontextmanager
async def routed(
    replicas: Sequence[Replica], clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[Routed]:
    """A router in front of these replicas, which are started where they are not. Looks after them often."""
    settings = {"health_interval": 0.02, "health_timeout": 1.5, "connect_timeout": 1.0, **settings}
    config = RouterConfig(**settings)
    for replica in replicas:
        if replica.server is None:
            await replica.start()
    addresses = [parse_address(replica.url, "a replica") for replica in replicas]
    router = Router(Fleet(addresses, config, clock), config)
    await router.fleet.check_health()
    listener = lifecycle.bind("127.0.0.1", 0)
    members = Members(config, Listed(tuple(map(Member, addresses))), router.fleet.set_members)
    app = RequestMiddleware(create_app(router, members), ApiKeys(), config.max_body_size)
    server = lifecycle.http_server(app, limits_of(config), router.rejected)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    watching = asyncio.ensure_future(router.fleet.watch())
    client = httpx.AsyncClient(
        base_url=lifecycle.url_of(listener), timeout=30, verify=False, trust_env=False
    )
    try:
        yield Routed(client, router)
    finally:
        await client.aclose()
        for replica in replicas:
            await replica.stop()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        server.should_exit = True
        await serving
        listener.close()
        await asyncio.sleep(0.01)  # for transports to close
