"""A fleet in which some fail: who is asked how often, what clients see of it, and whom it is held against."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter

import pytest

from pageturner.config.settings import RouterConfig
from pageturner.http.http_client import ServerAddress
from pageturner.router import proxy
from pageturner.router.breaker import STRIKES
from pageturner.router.fleet import Fleet
from support.refusals import refusal_of

from .replica import Answer, Replica, Routed, begin_stream, chunk, routed, whole, write
from .test_route import fleet, never


def fails_with(status: int, reason: str = "internal_error") -> Answer:
    async def answer(replica: Replica, writer: asyncio.StreamWriter) -> None:
        write(writer, status, {"error": {"reason": reason, "by": replica.name}})

    return answer


async def works(replica: Replica, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.02)
    await whole(replica, writer)


async def statuses(there: Routed, requests: int, at_once: int = 16) -> Counter[int]:
    """Of so many requests, by so many clients."""
    todo, found = iter(range(requests)), Counter[int]()

    async def client() -> None:
        for _ in todo:
            found[(await there.ask()).status_code] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return found


@pytest.mark.parametrize(
    "placement", ["prefix_aware", pytest.param("round_robin", marks=pytest.mark.slow)]
)
@pytest.mark.slow
async def test_one_of_four_that_fails_at_once_gets_a_handful_and_clients_do_not_notice(
    placement: str,
) -> None:
    replicas = fleet(4, answer=works)
    async with routed(replicas, placement=placement) as there:
        await statuses(there, 20)
        replicas[1].answer, already = fails_with(500), len(replicas[1].asked)
        assert await statuses(there, 200) == {200: 200}
        assert len(replicas[1].asked) - already < 10


@pytest.mark.slow
async def test_who_was_put_aside_is_tried_and_comes_back() -> None:
    now = 1000.0
    replicas = fleet(2, answer=works)
    replicas[1].answer = fails_with(500)
    async with routed(replicas, lambda: now, placement="round_robin") as there:
        assert await statuses(there, 20) == {200: 20}
        assert await there.metric("pageturner:router_replica_aside") == 1
        assert await there.metric("pageturner:router_replica_put_aside_total") == 1
        already = len(replicas[1].asked)
        for seconds in (1, 2, 4):
            now += seconds
            assert await statuses(there, 9, at_once=1) == {200: 9}
            already += 1
            assert len(replicas[1].asked) == already, "one request tries it, and finds it as before"
        now += 8
        replicas[1].answer = works
        assert await statuses(there, 10, at_once=1) == {200: 10}
        assert len(replicas[1].asked) == already + 5
        assert await there.metric("pageturner:router_replica_aside") == 0


@pytest.mark.parametrize("status", [502, 503])
async def test_other_errors_are_held_against_it_too(status: int) -> None:
    replicas = [Replica("a", fails_with(status)), Replica("b", works)]
    async with routed(replicas, placement="least_loaded") as there:
        assert await statuses(there, 30, at_once=8) == {200: 30}
        assert 0 < len(replicas[0].asked) <= 8


async def test_streams_that_break_off_put_it_aside() -> None:
    async def breaks(replica: Replica, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        chunk(writer, b"data: 1\n\n")
        await writer.drain()

    replicas = [Replica("a", breaks), Replica("b", works)]
    async with routed(replicas, lambda: 1000.0, placement="round_robin") as there:
        texts = [(await there.ask()).text for _ in range(20)]
        assert sum("replica_lost" in text for text in texts) == STRIKES


async def test_a_client_that_reads_too_slowly_puts_nobody_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "PATIENT_SECONDS", 0.1)

    stuck, all_stuck = 0, asyncio.Event()

    async def cuts_slow_readers(replica: Replica, writer: asyncio.StreamWriter) -> None:
        """Writes until nothing goes on: turns of the loop tell a full way from a busy machine."""
        nonlocal stuck
        begin_stream(writer)
        left, turns = 0, 0
        while turns < 20:
            if left == 0:
                chunk(writer, bytes(1 << 20))
            await asyncio.sleep(0.01)
            before, left = left, writer.transport.get_write_buffer_size()
            turns = turns + 1 if left == before > 0 else 0
        stuck += 1
        if stuck == STRIKES:
            all_stuck.set()

    async with routed([Replica("a", cuts_slow_readers)]) as there:

        async def read_late() -> None:
            async with there.http.stream("POST", "/v1/completions", json={}) as answer:
                pieces = answer.aiter_bytes()
                await anext(pieces)
                await all_stuck.wait()
                async for _ in pieces:
                    pass

        await asyncio.gather(*(read_late() for _ in range(STRIKES)))
        assert await there.metric("pageturner:router_cut_total") == STRIKES
        assert await there.metric("pageturner:router_replica_put_aside_total") == 0


async def test_what_clients_cause_is_held_against_nobody() -> None:
    replicas = fleet(2)
    async with routed(replicas) as there:
        for status in (400, 401, 404, 422, 429, 504):
            replicas[0].answer = replicas[1].answer = fails_with(status)
            assert await statuses(there, 6, at_once=3) == {status: 6}
        assert await there.metric("pageturner:router_replica_put_aside_total") == 0
        assert len(replicas[0].asked + replicas[1].asked) == 6 * 6 + 6, (
            "only the 429 is tried elsewhere"
        )


async def test_a_request_that_fails_everywhere_puts_nobody_aside() -> None:
    replicas = fleet(3, answer=fails_with(500))
    async with routed(replicas) as there:
        assert await statuses(there, 12, at_once=3) == {500: 12}
        assert await there.metric("pageturner:router_replica_put_aside_total") == 0
        for replica in replicas:
            replica.answer = works
        assert {await there.by() for _ in range(6)} == {"a", "b", "c"}


async def test_poison_meets_one_replica() -> None:
    replicas = fleet(3, answer=fails_with(500, "poisoned_request"))
    async with routed(replicas) as there:
        response = await there.ask()
        assert refusal_of(response) == (
            500,
            "poisoned_request",
        )
        assert sum(len(replica.asked) for replica in replicas) == 1
        await statuses(there, 12, at_once=1)
        assert await there.metric("pageturner:router_replica_put_aside_total") == 0


async def test_poison_is_known_in_every_shape() -> None:
    async def as_ollama_says(replica: Replica, writer: asyncio.StreamWriter) -> None:
        write(writer, 500, {"error": "it brought the engine down", "reason": "poisoned_request"})

    replicas = fleet(3, answer=as_ollama_says)
    async with routed(replicas) as there:
        assert (await there.http.post("/api/chat", json={})).status_code == 500
        assert sum(len(replica.asked) for replica in replicas) == 1


async def test_where_all_are_put_aside_the_least_bad_one_is_asked() -> None:
    replicas = fleet(2, answer=fails_with(500))
    async with routed(replicas, retries=0) as there:
        assert await statuses(there, 12, at_once=2) == {500: 12}
        assert await there.metric("pageturner:router_replica_aside") == 2
        for replica in replicas:
            replica.answer = works
        assert await statuses(there, 12, at_once=4) == {200: 12}
        assert await there.metric("pageturner:router_replica_aside") < 2


async def test_a_refusal_that_says_when_to_come_again_goes_before_an_error() -> None:
    replicas = fleet(3, answer=fails_with(500))
    replicas[1].answer = fails_with(429, "queue_full")
    async with routed(replicas) as there:
        assert await statuses(there, 3, at_once=1) == {429: 3}


async def test_requests_at_one_replica_are_bounded() -> None:
    replicas = fleet(2, answer=never)
    async with routed(replicas, max_open_per_replica=1) as there:
        waiting = [asyncio.ensure_future(there.ask()) for _ in range(2)]
        await there.until(lambda: all(replica.asked for replica in replicas))
        refused = await there.ask()
        assert refusal_of(refused) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        for task in waiting:
            task.cancel()
        await there.until(lambda: there.router.active == 0)


async def test_no_files_left_is_not_the_replicas_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "open_connection", none_left)
    there = Fleet([ServerAddress("127.0.0.1", 1)], RouterConfig())
    there.replicas[0].healthy = True
    await there.check_health()
    assert there.replicas[0].healthy
