"""A replica of a model in Ray Serve: our server in the process of a Serve actor, its engine beside
it.

Owns what Serve calls: `answer` for a request, the health check, what it reports for routing and
scaling, and its end. Must not know which replica gets what, nor how Serve is told of a model
(deployments.py). Needs no Ray: Serve makes an actor of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import unquote

from starlette.types import Message, Scope

from pageturner.config import settings as config
from pageturner.errors import ClientError
from pageturner.http.error_responses import error_body_of
from pageturner.router.forwarding import told_error
from pageturner.router.ray.adapters import AdapterChange, AdapterTable
from pageturner.router.ray.choice import Ask
from pageturner.server.embedded import EmbeddedServer
from pageturner.server.server import listed_adapters

Head = tuple[int, list[tuple[bytes, bytes]]]  # status and headers
LEFT: Message = {"type": "http.disconnect"}


class ModelReplica:
    """One engine with its server.

    tables    [engine] and [server], as in a configuration file
    """

    def __init__(self, tables: Mapping[str, dict[str, Any]]) -> None:
        self._settings = config.load(None, {name: dict(table) for name, table in tables.items()})
        self._server: EmbeddedServer | None = None
        self._loading = asyncio.Lock()
        self._said = 0
        self._adapters = AdapterTable(dict(listed_adapters(self._settings.server.lora)))
        self._adapters_coming: dict[AdapterChange, asyncio.Future[None]] = {}

    async def start(self) -> EmbeddedServer:
        """The server, with its model loaded. Raises the EngineFault for which it cannot be."""
        async with self._loading:
            if self._server is None:
                logging.basicConfig(
                    stream=sys.stderr, level=self._settings.server.log_level.upper()
                )
                server = EmbeddedServer(self._settings)
                try:
                    await server.until_ready()
                except BaseException:
                    await server.close(0.0)
                    raise
                self._server = server
            return self._server

    async def answer(self, ask: Ask) -> AsyncIterator[Head | bytes]:
        """Status and headers, then the body in pieces: whatever has come since the last one."""
        server = await self.start()
        refusal = await self._lacks(server, ask)
        if refusal is not None:
            path = ask.target.partition("?")[0]
            yield refusal.status, [(b"content-type", b"application/json")]
            yield error_body_of(path, refusal)
            return
        call = _Call(ask)
        work = asyncio.ensure_future(server.app(call.scope, call.receive, call.send))
        work.add_done_callback(lambda _: call.news.set())
        try:
            while not (work.done() and not call.sent):
                await call.news.wait()
                call.news.clear()
                for one in call.taken():
                    yield one
                if call.complete:
                    break
            if not call.complete:
                await work  # raises what went wrong
        finally:
            call.left.set()
            if not work.done() and not call.complete:
                work.cancel()
            await asyncio.wait({work})

    async def _lacks(self, server: EmbeddedServer, ask: Ask) -> ClientError | None:
        """See that the adapter of a request is here: one that was loaded before this replica came
        is loaded now, once for all who wait. Why it cannot be: another replica may have it."""
        change = ask.adapter
        if change is None or not self._adapters.behind(change):
            return None
        work = self._adapters_coming.get(change)
        if work is None:
            loading = server.service.adapters.load(change.name, change.path, in_place=True)
            work = self._adapters_coming[change] = asyncio.ensure_future(loading)
            work.add_done_callback(lambda done: self._came(change, done))
        try:
            await asyncio.shield(work)
        except ClientError as error:
            return ClientError(
                503, error.code, f"adapter {change.name!r}: {error.message}", "model"
            )
        return None

    def _came(self, change: AdapterChange, work: asyncio.Future[None]) -> None:
        del self._adapters_coming[change]
        if not work.cancelled() and work.exception() is None:
            self._adapters.note(change)

    async def change_adapter(self, ask: Ask, change: AdapterChange) -> tuple[int, bytes, str]:
        """Load or unload an adapter as `ask` says, if its key may; `change` is noted when that was
        done. Status, body, and the reason of a refusal."""
        call, status, body = self.answer(ask), 0, b""
        async for one in call:
            if isinstance(one, tuple):
                status = one[0]
            else:
                body += one
        reason = "" if status == 200 else told_error(body).reason
        if status == 200 or (reason == "adapter_not_found" and not change.path):
            self._adapters.note(change)
        return status, body, reason

    async def drop_adapter(self, change: AdapterChange) -> tuple[int, bytes, str]:
        """Forget an adapter that another replica could not load."""
        server = await self.start()
        self._adapters.note(change)
        with contextlib.suppress(ClientError):  # it is not here
            server.service.adapters.unload(change.name)
        return 200, b"", ""

    async def check_health(self) -> None:
        """EngineFault while there is no engine. Serve takes another replica after some of them in a
        row."""
        (await self.start()).check()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the statistics that choice.py places requests by."""
        self._said += 1
        service = (await self.start()).service
        return {
            "said": self._said,
            "active": service.active,
            "adapters": service.adapters.in_memory,
            "changes": self._adapters.told(),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what router/autoscaling.py asks for."""
        server = await self.start()
        met, answers = server.targets_met
        active, places = server.service.active, max(1, server.service.live_settings.slots)
        return {"met": met, "answers": answers, "open": active, "busy": active / places}

    async def close(self) -> None:
        """End with the engine. What still runs has had its time: Serve waited for it."""
        if self._server is not None:
            await self._server.close(0.0)


class _Call:
    """One request to an ASGI application, and what it sends. news: there is something; left: nobody
    reads on."""

    def __init__(self, ask: Ask) -> None:
        self.scope = _scope_of(ask)
        self.sent: list[Message] = []
        self.news, self.left = asyncio.Event(), asyncio.Event()
        self.complete = False
        self._body: bytes | None = ask.body

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return LEFT

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.news.set()

    def taken(self) -> list[Head | bytes]:
        """Return what was sent since it was last asked: the head, the body in one piece."""
        sent, self.sent = self.sent, []
        found: list[Head | bytes] = [
            (one["status"], list(one["headers"]))
            for one in sent
            if one["type"] == "http.response.start"
        ]
        bodies = [one for one in sent if one["type"] == "http.response.body"]
        if piece := b"".join(one.get("body", b"") for one in bodies):
            found.append(piece)
        self.complete = self.complete or any(not one.get("more_body", False) for one in bodies)
        return found


def _scope_of(ask: Ask) -> Scope:
    path, _, query = ask.target.partition("?")
    length = (b"content-length", str(len(ask.body)).encode())
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": ask.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [*ask.headers, *([length] if ask.body else [])],
        "client": None,
        "server": None,
        "state": {},
    }
