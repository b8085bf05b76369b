"""A server elsewhere that answers the lines of a batch.

Owns how it is asked, and how many lines it is given at once. Must not know what a batch is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from pageturner.errors import EngineFault
from pageturner.http.http_client import (
    ConnectionLost,
    Headers,
    connect,
    get,
    parse_address,
    request_bytes,
)
from pageturner.request import BACKGROUND
from pageturner.server.api.base.body import json_or_none
from pageturner.server.api.batches.batch_journal import BatchRecord
from pageturner.server.api.batches.batch_lines import Answered, Question, retry_after_of

CONNECT_SECONDS, LOOK_SECONDS = 5.0, 5.0
ANSWER_SECONDS = (
    3600.0  # until the first byte of an answer: one in the background may wait for long
)
MAX_ANSWER = 1 << 30  # bytes
USUAL_WINDOW = 16  # lines at a server that does not say how many it runs at once
AHEAD = 8  # a line for each so many waits there, so that no slot is empty for long
GONE_SECONDS = 120.0  # without any answer, after which nobody is there


class AskedServer:
    """One server. window: most lines that it is given at once, 0: as many as it says.

    gone  done with the reason when it has not answered for long
    """

    def __init__(
        self, url: str, key: str, window: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = parse_address(url, "--url")
        self.gone: asyncio.Future[EngineFault] | None = None
        self._window, self._clock = window, clock
        self._heard_at = clock()
        self._headers: Headers = [
            (b"Content-Type", b"application/json"),
            (b"X-Priority", b"%d" % BACKGROUND),
        ]
        if key:
            self._headers.append((b"Authorization", b"Bearer " + key.encode()))

    async def look(self) -> None:
        """See that it is there, and how many requests it runs at once. EngineFault where nobody
        answers."""
        self.gone = asyncio.get_running_loop().create_future()
        try:
            status, page = await get(self.address, "/props", LOOK_SECONDS)
        except ConnectionLost as error:
            raise EngineFault("no_server", f"{self.address}: {error}") from error
        slots = _slots(page) if status == 200 else 0
        self._window = self._window or (slots + slots // AHEAD if slots else USUAL_WINDOW)

    def room(self, under_way: int) -> int:
        """Return how many more lines may start."""
        return self._window - under_way

    async def ask(self, question: Question, _: BatchRecord) -> Answered:
        """Its answer; a 503 of our own where it is not there."""
        named = (b"X-Request-Id", question.request_id.encode())
        headers = [*self._headers, named]
        raw = request_bytes(self.address, "POST", question.url, headers, question.body)
        try:
            async with connect(self.address, CONNECT_SECONDS, ANSWER_SECONDS) as exchange:
                await exchange.send(raw)
                body = await exchange.read_rest(MAX_ANSWER, ANSWER_SECONDS)
        except ConnectionLost as error:
            self._count_silence(str(error))
            return Answered(503, b"{}")
        self._heard_at = self._clock()
        return Answered(exchange.status, body, retry_after_of(exchange.headers))

    def _count_silence(self, why: str) -> None:
        if self._clock() - self._heard_at > GONE_SECONDS and self.gone and not self.gone.done():
            message = f"{self.address} has not answered for {GONE_SECONDS:g} s: {why}"
            self.gone.set_result(
                EngineFault("no_server", f"{message}; the same command goes on from there")
            )


class _Props(msgspec.Struct):
    total_slots: int = 0


def _slots(page: bytes) -> int:
    slots = (json_or_none(page, _Props) or _Props()).total_slots
    return slots if 0 < slots <= 4096 else 0
