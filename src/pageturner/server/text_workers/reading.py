"""The place where the text of a request is read: here at once, or by a text worker.

Owns that choice. What is small is read in the event loop, within limits that keep it short;
everything else, and what turns out to be more work, goes to the pool, and is given up when its
client leaves. Must not know what reading is (text_jobs.py), nor how the pool works.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from starlette.types import Receive, Scope

from pageturner.config.settings import ServerConfig
from pageturner.errors import ClientError
from pageturner.http.memory_reserve import MemoryReserve
from pageturner.http.receiving import until_client_leaves
from pageturner.http.request_info import RequestInfo
from pageturner.http.slices import in_slices
from pageturner.server.api.base import answer_grammar
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.text_workers import text_jobs
from pageturner.server.text_workers.fork_server import ForkServer
from pageturner.server.text_workers.text_pool import TextPool
from pageturner.server.text_workers.text_worker import Job, facts_of, worker_of
from pageturner.text import output_format
from pageturner.text.chat_template import TemplateLimits, TemplateTooLong
from pageturner.text.tool_grammar import without_thoughts

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 4 * 1024  # bytes of a body that is read in the event loop
ROUND_SECONDS = 0.002  # of reading, until others go on
# of a template that is rendered in the event loop
AT_ONCE_LIMITS = TemplateLimits(steps=5_000, characters=128 * 1024, prompt=32 * 1024)
ANSWER_PER_BODY = 4  # an answer of /tokenize may be so many times as long as the longest body
WAITING_BODIES = 16  # of the longest ones, in a lane of the pool


def start_text_pool(served: ServedModel, config: ServerConfig, memory: MemoryReserve) -> TextPool:
    """The pool of a server. It forks: call it before the event loop runs. served: all but what the
    engine says of itself."""

    def start() -> ForkServer:
        return ForkServer(worker_of(served, config.text_memory))

    most = WAITING_BODIES * config.max_body_size
    return TextPool(start, seconds=config.text_timeout, most=most, memory=memory)


class TextReader:
    """Reads requests, some of them in the pool. most: bytes of the longest body."""

    def __init__(self, pool: TextPool, most: int) -> None:
        self._pool = pool
        self._most = most
        self._grammars = output_format.KnownGrammars()
        self._turn = asyncio.Lock()

    async def call(
        self, dialect: Dialect, raw: bytes, served: ServedModel, scope: Scope, receive: Receive
    ) -> Call:
        """The request, understood. ClientError for what is wrong with it."""
        asked = None
        if len(raw) <= AT_ONCE:
            body = dialect.decode(raw, served.limits)
            asked = answer_grammar.asked(body)
            grammar = None if asked is None else self._grammars.get(asked)
            if asked is None or grammar is not None:
                with contextlib.suppress(TemplateTooLong):
                    return await self._at_once(dialect.read, body, served.with_grammar(grammar))
        packed = await self._in_pool(dialect.id_prefix, raw, served, scope, receive)
        call = await in_slices(text_jobs.unpack_call(packed))
        if asked is not None and (made := call.params[0].structured_outputs) is not None:
            self._grammars.put(asked, without_thoughts(made))
        return call

    async def page(
        self, name: str, raw: bytes, served: ServedModel, scope: Scope, receive: Receive
    ) -> bytes:
        """The outcome of one of text_jobs.PAGES."""
        if len(raw) <= AT_ONCE:
            with contextlib.suppress(TemplateTooLong):
                return await self._at_once(text_jobs.do, name, raw, served)
        return await self._in_pool(name, raw, served, scope, receive)

    async def run(self, name: str, raw: bytes, served: ServedModel, key: str) -> bytes:
        """A job whose client is the server itself."""
        job = Job(name, facts_of(served), ANSWER_PER_BODY * max(self._most, 1 << 20))
        return await self._pool.run(job, raw, key)

    async def _at_once(self, read: Callable[P, T], *what: P.args, **more: P.kwargs) -> T:
        """Read it here. What takes a while is one in each round of the event loop, however many
        have come."""
        async with self._turn:
            began = time.monotonic()
            try:
                return read(*what, **more)
            finally:
                if time.monotonic() - began > ROUND_SECONDS:
                    await asyncio.sleep(0)

    async def _in_pool(
        self, name: str, raw: bytes, served: ServedModel, scope: Scope, receive: Receive
    ) -> bytes:
        work = asyncio.ensure_future(self.run(name, raw, served, key_of(scope)))
        left = asyncio.ensure_future(until_client_leaves(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientError(400, "client_left", "the client left before its request was read")
            return work.result()
        finally:
            work.cancel()
            left.cancel()


def key_of(scope: Scope) -> str:
    """Return the key for taking turns: the tenant, or the client's address if keys have no
    tenants."""
    info: RequestInfo = scope["pageturner"]
    client = scope.get("client")
    return info.tenant or (client[0] if client else "")
