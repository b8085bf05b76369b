"""Traffic: what traces and generators become, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, pstdev

import pytest

from pageturner.lab.traffic.traffic import END, OpenLoop, Sessions
from pageturner.lab.traffic.traffic_files import TraceRow, TraceScaling, from_trace
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic, with_times
from support.refusals import engine_fault


def opened(rows: list[TraceRow], scaling: TraceScaling = TraceScaling()) -> OpenLoop:  # noqa: B008
    source, _ = from_trace(rows, scaling, "t")
    assert isinstance(source, OpenLoop)
    return source


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is() -> None:
    rows = [
        TraceRow(1100, 5, 0.0, [7, 8, 9]),
        TraceRow(1030, 5, 1.0, [7, 8, 4]),
        TraceRow(600, 5, 2.0),
        TraceRow(600, 5, 3.0),
    ]
    one, two, three, four = (
        a.engine_request(i).prompt for i, a in enumerate(opened(rows).requests)
    )
    assert (len(one), len(two), len(three)) == (1100, 1030, 600)
    assert one[:1024] == two[:1024]
    assert not set(one[1024:]) & set(two[1024:])
    assert not set(three) & {*one, *two, *four}


def test_a_request_says_the_cap_and_hides_the_length() -> None:
    request = (
        opened([TraceRow(10, 700, 4.0, client_id=3)], TraceScaling(cap=512, rate=2.0, length=0.5))
        .requests[0]
        .engine_request(1)
    )
    assert (request.params.max_tokens, request.params.stop_ids, request.params.forced_end) == (
        512,
        (END,),
        350,
    )
    assert (request.arrival, request.tenant, len(request.prompt)) == (2.0, "3", 5)


def test_requests_that_are_too_long_are_left_out_and_counted() -> None:
    source, out = from_trace(
        [TraceRow(10, 5, 0.0), TraceRow(900, 5, 1.0)], TraceScaling(cap=100, context=200), "t"
    )
    assert (source.total, out) == (1, 1)
    with engine_fault("no request of t fits 105 tokens beside a cap of 100"):
        from_trace([TraceRow(10, 5, 0.0)], TraceScaling(cap=100, context=105), "t")


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((0.0, None), "request 2 has no arrival time: give --rate"),
        ((0.0, -1.0), "request 2 arrives at -1.0 s"),
        ((0.0, float("nan")), "request 2 arrives at nan s"),
        ((0.0, float("inf")), "request 2 arrives at inf s"),
        ((5.0, 4.0), "request 2 arrives at 4 s, the one before it at 5 s: sort the trace"),
    ],
)
def test_times_that_make_no_sense_are_refused(times: tuple[float | None, ...], said: str) -> None:
    with engine_fault(said):
        from_trace([TraceRow(1, 1, at) for at in times], TraceScaling(), "t")


def test_sessions_of_a_trace_in_their_turns() -> None:
    rows = [
        TraceRow(20, 5, 0.0, session_id="b", turn=0, session_start_s=8.0),
        TraceRow(50, 5, 1.0, session_id="a", turn=1, think_s=100.0),
        TraceRow(10, 5, 0.0, session_id="a", turn=0),
    ]
    source, out = from_trace(rows, TraceScaling(think=9.0), "t")
    assert isinstance(source, Sessions)
    assert (source.total, out, sorted(source.starts)) == (3, 0, [0.0, 8.0])
    first = next(iter(source.arrivals()))
    (second,) = source.after(first, 30.0)
    assert second is not None
    assert second.arrival == 39.0
    prompt = second.engine_request(2).prompt
    assert prompt[:10] == first.engine_request(1).prompt
    assert prompt[10:14] == (first.answer,) * 4
    assert len(prompt) == 50
    assert source.after(second, 50.0) == []
    with engine_fault("negative think_s"):
        from_trace([TraceRow(1, 1, session_id="a", think_s=-1.0)], TraceScaling(), "t")


def test_gaps_have_the_mean_and_the_variation_that_were_asked_for() -> None:
    for cv in (0.3, 1.0, 3.0):
        times = [a.arrival for a in SyntheticTraffic(6000, 4.0, cv=cv, seed=1).open_loop().requests]
        gaps = [b - a for a, b in pairwise(times)]
        assert mean(gaps) == pytest.approx(0.25, rel=0.15)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.15)
    for rate, cv in ((0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with engine_fault("more than 0"):
            SyntheticTraffic(3, rate, cv=cv).open_loop()


def test_times_can_be_made_up_and_made_faster() -> None:
    rows = with_times([TraceRow(5, 5), TraceRow(6, 6)], 10.0, 1.0, 0)
    source = opened(rows)
    assert [a.arrival for a in source.faster(2.0).requests] == [
        a.arrival / 2 for a in source.requests
    ]
    assert source.requests[0].arrival > 0


def test_made_up_lengths_are_around_their_means() -> None:
    each = SyntheticTraffic(2000, 1.0, prompt=100, output=40, seed=2).open_loop().requests
    assert mean(len(a.engine_request(0).prompt) for a in each) == pytest.approx(100, rel=0.05)
    assert mean(a.output for a in each) == pytest.approx(40, rel=0.05)
    assert {a.output for a in each} <= set(range(20, 61))
