"""Retries do not multiply the load of replicas that fail, and do not begin a request's deadline anew."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.router import retry_budget
from pageturner.router.retry_budget import LEAST, WINDOW, RetryBudget
from pageturner.server.admission.service_level import service_level_of
from pageturner.server.api.base.body import RequestBody
from support.refusals import client_error

from .replica import Replica, routed, whole, write
from .test_route import fleet


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 300)), max_size=60), st.floats(0, 1))
def test_in_every_window_retries_are_a_share(asks: list[tuple[float, int]], share: float) -> None:
    now, came, tried = 0.0, list[int](), list[int]()
    budget = RetryBudget(share, lambda: now)
    for pause, count in asks:
        now += pause
        for _ in range(count):
            budget.request()
            came.append(int(now))
            tried += [int(now)] * budget.take()
    for end in set(tried):
        window = range(end - WINDOW + 1, end + 1)
        most = WINDOW * LEAST + share * sum(at in window for at in came)
        assert sum(at in window for at in tried) <= most
    assert budget.withheld == len(came) - len(tried)


def test_few_are_always_tried_again_and_the_window_moves_on() -> None:
    now = 5.0
    budget = RetryBudget(0.0, lambda: now)
    assert [budget.take() for _ in range(WINDOW * LEAST + 1)].count(True) == WINDOW * LEAST
    now += WINDOW
    assert budget.take()


async def fails(replica: Replica, writer: asyncio.StreamWriter) -> None:
    write(writer, 500, {"by": replica.name})


async def test_where_all_fail_the_first_failure_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_budget, "LEAST", 0)
    replicas = fleet(4, answer=fails)
    async with routed(replicas, retry_budget=0.2) as there:
        for _ in range(50):
            assert (await there.ask()).status_code == 500
        assert sum(len(one.asked) for one in replicas) <= 60
        assert await there.metric("pageturner:router_retries_total") == 10
        assert await there.metric("pageturner:router_retries_withheld_total") == 50


async def test_who_was_not_there_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "LEAST", 0)
    replicas = fleet(2, answer=whole)
    async with routed(replicas, retry_budget=0, health_interval=3600) as there:
        await replicas[0].stop()
        assert {(await there.ask()).status_code for _ in range(4)} == {200}


async def test_a_deadline_goes_on_counting() -> None:
    async def later(replica: Replica, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        write(writer, 503, {})

    replicas = fleet(2, answer=later)
    async with routed(replicas) as there:
        await there.http.post("/v1/completions", json={}, headers={"x-elapsed-ms": "1000"})
        told = sorted(
            float(one.headers["x-elapsed-ms"]) for replica in replicas for one in replica.asked
        )
        assert len(told) == 2
        assert told[0] >= 1000
        assert told[1] >= told[0] + 50


def test_what_a_router_took_is_taken_from_deadline_and_target() -> None:
    body = RequestBody(deadline_ms=1000, ttft_target_ms=500)
    level = service_level_of(body, [(b"x-elapsed-ms", b"400.5")])
    assert level.deadline == pytest.approx(0.5995)
    assert level.ttft == pytest.approx(0.0995)
    with client_error("before the request came here", status=504, code="deadline_exceeded"):
        service_level_of(body, [(b"x-elapsed-ms", b"1500")])
    for nonsense in (b"nan", b"-5", b"inf", json.dumps("x").encode(), b"1e300"):
        assert service_level_of(body, [(b"x-elapsed-ms", nonsense)]).deadline == 1.0
