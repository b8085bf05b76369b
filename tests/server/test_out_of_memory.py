"""The API process when it may have no more memory: who comes is told so, who is there loses nothing."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pageturner.http.enduring_loop import EnduringLoop
from pageturner.http.memory_reserve import KEPT, LEFT, SMALL, MemoryReserve
from pageturner.params import SamplingParams
from pageturner.request import Event, Request
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.observability.metrics import Metrics
from pageturner.text.output_stream import OutputStream, output_streams
from support.refusals import refusal_of

from .bytes_tokenizer import BytesTokenizer, answer
from .conftest import Server
from .test_http import events, post, text_of

ROOM = 3 << 20  # bytes that a process may grow by
LARGE = {"prompt": "word " * 500_000, "max_tokens": 2}


def data_bytes(pid: int) -> int:
    """What the kernel counts against RLIMIT_DATA."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(
        next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]
    )


def test_large_bodies_are_refused_short_ones_are_not_and_a_stream_goes_on(
    start: Callable[..., Server],
) -> None:
    server = start(FAKE_STEP_SECONDS="0.01")
    pid, most = server.process.pid, resource.RLIM_INFINITY
    with ThreadPoolExecutor(5) as pool:
        beside = pool.submit(lambda: text_of(events(server, prompt="tale", max_tokens=100)))
        server.until(lambda: server.notes("submit"))
        resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid) + ROOM, most))
        found = [pool.submit(lambda: post(server, **LARGE)) for _ in range(4)]
        told = Counter(
            (one.result().status_code, one.result().json()["error"]["reason"]) for one in found
        )
        page = pool.submit(lambda: server.http.get("/health"))
        for size in (0, 50_000):  # read at once, and by another process
            short = post(server, prompt="short", max_tokens=5, padding="x" * size)
            assert (short.status_code, text_of([short.json()])) == (200, answer("short", 5))
        assert beside.result(60) == answer("tale", 100)
    resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))
    assert told == {(503, "out_of_memory"): 4}
    assert "retry-after" in found[0].result().headers
    assert page.result().status_code == 200
    assert post(server, **LARGE).json()["error"]["reason"] == "context_length_exceeded"
    assert server.metric("pageturner:engine_restarts_total") == 0


def test_small_requests_are_answered_where_the_process_may_not_grow_at_all(
    start: Callable[..., Server],
) -> None:
    server = start()
    pid, most = server.process.pid, resource.RLIM_INFINITY
    for page in 2 * ["/health", "/v1/models"]:
        assert server.http.get(page).status_code == 200
        resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid), most))
        found = [server.http.get(page, headers={"Connection": "close"}) for _ in range(20)]
        resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))
        assert {one.status_code for one in found} <= {200, 503}


def test_who_finds_an_engine_without_memory_is_not_to_blame(start: Callable[..., Server]) -> None:
    server = start(FAKE_STEP_SECONDS="0.01", FAKE_END="memory")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: text_of(events(server, prompt="tale", max_tokens=300)))
        told = post(server, prompt="<|poison|>", max_tokens=2)
        assert refusal_of(told) == (503, "out_of_memory")
        assert "retry-after" in told.headers
        assert beside.result(60) == answer("tale", 300)
    assert server.metric("pageturner:poisoned_requests_total") == 0


def test_a_loop_outlives_what_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    loop = EnduringLoop(lambda: told.append("no memory"))
    left = [MemoryError(), MemoryError()]

    def fails() -> None:
        raise left.pop()

    def fails_at_the_log(*_: object, **__: object) -> None:
        raise MemoryError

    async def work() -> str:
        loop.call_soon(fails)
        await asyncio.sleep(0)
        monkeypatch.setattr("asyncio.base_events.logger.error", fails_at_the_log)
        loop.call_soon(int, "x")  # what it writes to the log finds no memory
        await asyncio.sleep(0.01)
        return "done"

    try:
        assert loop.run_until_complete(work()) == "done"
    finally:
        loop.close()
    assert len(told) == 2


def opened(streams: OpenStreams, ids: list[int], sinks: list[WholeAnswer]) -> list[OutputStream]:
    found = []
    for id, sink in zip(ids, sinks, strict=True):
        request = Request(id, (1, 2), SamplingParams(max_tokens=3), 0.0)
        found += output_streams(request, [sink], iter(()), BytesTokenizer())
    streams.add(found)
    return found


async def test_a_stream_that_finds_no_memory_fails_alone() -> None:

    streams, sinks = OpenStreams(Metrics(), 8), [WholeAnswer(1), WholeAnswer(1)]
    one, other = opened(streams, [5, 6], sinks)

    def nothing_fits(token: int) -> str:
        raise MemoryError

    one.detokenizer.push = nothing_fits  # type: ignore[method-assign]
    stopped = streams.deliver([Event(5, 0, 2, tokens=[65]), Event(6, 0, 2, tokens=[65])])
    assert stopped == [5]
    assert one.failure is not None
    assert one.failure.code == "out_of_memory"
    assert list(streams.unfinished) == [6]
    assert other.tokens == [65]


def test_what_is_kept_is_given_up_and_taken_back() -> None:
    reserve = MemoryReserve()
    assert reserve.allows(1 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1, hard))
    try:
        allowed, given, kept = reserve.allows(0), reserve.give_way(), reserve.held
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert (allowed, given, kept) == (False, True, False)
    assert reserve.allows(0)
    assert reserve.held


def test_what_is_small_may_begin_with_a_part_of_what_is_kept() -> None:
    reserve, now = MemoryReserve(), data_bytes(os.getpid())
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + ROOM, hard))
    try:
        large, small = reserve.allows(SMALL + 1), reserve.allows(SMALL)
        taken = mmap.mmap(-1, KEPT - LEFT + ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        again = reserve.allows(SMALL)
        taken.close()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert (large, small, again) == (False, True, False)
    assert not reserve.held
    assert reserve.allows(SMALL)
    assert reserve.held


async def test_answers_that_take_much_memory_give_way_and_no_others() -> None:

    streams = OpenStreams(Metrics(), 8)
    large, small = opened(streams, [5, 6], [WholeAnswer(1), WholeAnswer(1)])
    large.prompt_logprobs = [[]] * 1000
    streams.make_room()
    assert list(streams.unfinished) == [6]
    assert (large.failure and large.failure.code, small.failure) == ("out_of_memory", None)
