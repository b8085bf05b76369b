"""Text workers that say what they should not, and ones that hear it: a few of the cases of
bench/fuzz_frames.py, and by name what was once found by them."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hostile import frames, text_cases
from pageturner.errors import ClientError
from pageturner.server.api.base.replies import at_once
from pageturner.server.text_workers import text_jobs
from pageturner.server.text_workers.text_pool import TextPool
from pageturner.server.text_workers.text_worker import (
    DOING,
    DONE,
    GREETING,
    HEAD,
    HELLO,
    REFUSED,
    Job,
    JobRefusal,
    facts_of,
    frame,
)
from support.refusals import client_error

from .test_openai import SERVED

HELLO_FRAME = frame(HELLO, GREETING.pack(12345, False))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_worker_says_no_job_hangs_or_gets_another_ones_outcome(seed: int) -> None:
    for number in range(8):
        text_cases.server(random.Random(f"test {seed} {number}"))


def test_whatever_a_worker_hears_the_next_one_is_there() -> None:
    for number in range(10):
        text_cases.worker(random.Random(f"test {number}"))


def test_whatever_an_outcome_says_it_is_taken_or_refused() -> None:
    came = {text_cases.outcome(random.Random(f"test {number}")) for number in range(200)}
    assert came == {"taken", "refused"}


class Scripted(text_cases.StubForks):
    """Whose first worker answers each job as it is told; the next ones are honest."""

    def __init__(self, say: Callable[[bytes, int], bytes]) -> None:
        super().__init__(random.Random(0))
        self.wrong = 1
        self._say = say

    async def _work(self, sock: socket.socket, dice: Any) -> None:
        if dice is None:
            await super()._work(sock, None)
            return
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        writer.write(HELLO_FRAME)
        try:
            while True:
                for _ in range(2):
                    _, number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                    raw = await reader.readexactly(size)
                writer.write(self._say(raw, number))
        except (OSError, EOFError):
            writer.close()


def done(raw: bytes, number: int) -> bytes:
    return frame(DONE, text_cases.outcome_of(raw), number)


def refusal(status: int, code: str = "odd") -> bytes:
    return msgspec.msgpack.encode(JobRefusal(status, code, "no", None))


WRONG: dict[str, Callable[[bytes, int], bytes]] = {
    "an outcome of another job": lambda raw, number: done(raw, number + 1),
    "an outcome too long": lambda raw, number: HEAD.pack(DONE, number, 3 << 30) + b"x",
    "what it does is no text": lambda raw, number: frame(DOING, b"\xff", number),
    "a refusal that is none": lambda raw, number: frame(REFUSED, b"noise", number),
    "a refusal deeper than any stack": lambda raw, number: frame(REFUSED, frames.DEEP, number),
    "a refusal with status 200": lambda raw, number: frame(REFUSED, refusal(200), number),
    "a refusal for no reason": lambda raw, number: frame(REFUSED, refusal(400, "o\x00d"), number),
    "a kind that there is not": lambda raw, number: frame(0x55, b"", number),
}


def both(say: Callable[[bytes, int], bytes]) -> list[Any]:
    """What comes of two jobs that wait at the same time."""

    async def ask() -> list[Any]:
        forks: Any = Scripted(say)
        pool = TextPool(lambda: forks, seconds=5, most=1 << 20)
        try:
            jobs = [
                pool.run(Job("x", facts_of(SERVED), 1 << 20), raw, "")
                for raw in (b"first", b"second")
            ]
            return list(await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 4))
        finally:
            await pool.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("what", WRONG)
def test_a_worker_that_makes_no_sense_costs_the_job_that_it_has(what: str) -> None:
    first, second = both(WRONG[what])
    assert isinstance(first, ClientError)
    assert (first.status, first.code) == (503, "busy")
    assert second == text_cases.outcome_of(b"second")


def test_what_a_worker_says_once_more_is_nobodys() -> None:
    """Else it would be the outcome of the next job, perhaps of another client."""
    first, second = both(lambda raw, number: done(raw, number) * 2)
    assert first == text_cases.outcome_of(b"first")
    assert isinstance(second, ClientError)


def test_a_call_that_makes_no_sense_is_refused() -> None:
    for raw in (b"", b"noise", frames.DEEP):
        with client_error() as call:
            at_once(text_jobs.unpack_call(raw))
        with client_error() as prefix:
            text_jobs.unpack_prefix(raw)
        assert call.value.status == prefix.value.status == 503
