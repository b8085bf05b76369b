"""Streams: repeats are dropped, gaps noticed, slow readers cut off."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.params import SamplingParams
from pageturner.request import Event, Failure, Request, Timings
from pageturner.server.api.base.usage import usage
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.engine_client.open_streams import MAX_STOPPED, OpenStreams, PieceQueue
from pageturner.server.observability.metrics import Metrics
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.output_stream import (
    OutputPiece,
    OutputStream,
    StreamGap,
    StreamTimes,
    output_streams,
)
from support.refusals import client_error

from .bytes_tokenizer import BytesTokenizer


class Kept:
    def __init__(self) -> None:
        self.pieces: list[OutputPiece] = []

    def put(self, piece: OutputPiece) -> None:
        self.pieces.append(piece)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def make(id: int = 1, **params: object) -> tuple[OutputStream, Kept]:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    kept = Kept()
    text = Detokenizer(BytesTokenizer(), sampling.stop)
    request = Request(id, (1, 2, 3), sampling)
    return OutputStream(request, 0, text, kept, StreamTimes(0.0), eos_ids=(257,)), kept


def events(data: bytes, at: int = 3, finish: str | None = None) -> Event:
    return Event(1, 0, at, tuple(data), finish=finish)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=30))
def test_repeated_and_overlapping_events_never_repeat_a_token(spans: list[tuple[int, int]]) -> None:
    truth = b"abcdefghijklmnopqrstuvwxyz0123"
    stream, kept = make()
    for start, n in spans:
        event = events(truth[start : start + n], 3 + start)
        if start > len(stream.tokens):
            with pytest.raises(StreamGap):
                stream.add_event(event, 0.0)
        else:
            stream.add_event(event, 0.0)
    assert bytes(stream.tokens) == truth[: len(stream.tokens)]
    assert kept.text == truth[: len(stream.tokens)].decode()


def test_overshoot_after_a_stop_string_is_dropped_from_an_event_of_several_tokens() -> None:
    stream, kept = make(stop=("cd",), logprobs=0)
    stream.add_event(Event(1, 0, 3, tuple(b"abcdef"), tuple((-0.5, ()) for _ in range(6))), 0.0)
    assert (kept.text, bytes(stream.tokens), len(stream.logprobs)) == ("ab", b"abcd", 4)
    assert (stream.finish, stream.stop_reason) == ("stop", "cd")


def test_the_end_of_a_sequence_is_counted_and_not_shown() -> None:
    stream, kept = make()
    stream.add_event(Event(1, 0, 3, (104, 257), finish="stop"), 0.0)
    assert (kept.text, len(stream.tokens), stream.finish, stream.stop_reason) == (
        "h",
        2,
        "stop",
        None,
    )


def test_a_stop_id_is_the_reason() -> None:
    stream, kept = make()
    stream.add_event(Event(1, 0, 3, (104, 105), finish="stop"), 0.0)
    assert (kept.text, stream.stop_reason) == ("h", 105)


def test_a_stream_resumes_with_its_tokens_and_seed() -> None:
    stream, _ = make(seed=7)
    assert stream.resumable() is stream.request
    stream.add_event(events(b"ab"), 0.0)
    request = stream.resumable()
    assert request.resume[0].tokens == tuple(b"ab")
    assert request.params.seed == 7


def test_what_was_computed_once_more_adds_up_over_engines() -> None:
    stream, _ = make()
    stream.resumable()
    stream.add_event(Event(1, 0, 3, tuple(b"a"), cached=2, recomputed=0), 0.0)
    stream.add_event(Event(1, 0, 4, tuple(b"b"), cached=2, recomputed=5), 0.0)
    assert "recomputed_tokens" not in usage([make()[0]])
    stream.resumable()
    stream.add_event(Event(1, 0, 5, tuple(b"c"), cached=0, recomputed=4), 0.0)
    stream.add_event(Event(1, 0, 6, tuple(b"d"), cached=0, recomputed=4), 0.0)
    used = usage([stream])
    assert (used["recomputed_tokens"], used["prompt_tokens_details"]["cached_tokens"]) == (9, 2)


def test_the_answers_to_one_prompt_have_one_parent_and_streams_of_their_own() -> None:
    tokenizer, sinks = BytesTokenizer(), [Kept(), Kept(), Kept()]
    params = SamplingParams(stop=("x",), prompt_logprobs=0)
    first = Request(7, (1, 2), params, arrival=3.0)
    streams = output_streams(first, sinks, itertools.count(8), tokenizer, choice=6)
    assert [stream.request.id for stream in streams] == [7, 8, 9]
    assert [(stream.request.index, stream.request.parent) for stream in streams] == [
        (0, None),
        (1, 7),
        (2, 7),
    ]
    assert [stream.choice for stream in streams] == [6, 7, 8]
    assert all(stream.request.logits_from == 0 for stream in streams)
    assert {stream.times.arrival for stream in streams} == {3.0}
    streams[1].add_event(Event(8, 1, 2, ()), 0.0)
    assert streams[1].times is not streams[0].times


@pytest.mark.parametrize(("ignored", "reason"), [(False, None), (True, 257)])
def test_an_end_of_sequence_that_is_ignored_is_a_stop_id_like_others(
    ignored: bool, reason: int | None
) -> None:
    params = SamplingParams(ignore_eos=ignored, stop_ids=(257,))
    (stream,) = output_streams(
        Request(1, (1, 2, 3), params), [Kept()], itertools.count(2), BytesTokenizer()
    )
    stream.add_event(Event(1, 0, 3, (104, 257), finish="stop"), 0.0)
    assert (stream.finish, stream.stop_reason) == ("stop", reason)


def test_deliver_says_who_need_not_go_on_and_forgets_the_finished() -> None:
    streams = OpenStreams(Metrics(), limit=10)
    one, _ = make(1, stop=("b",))
    two, _ = make(2)
    streams.add([one, two])
    assert streams.deliver([events(b"a"), Event(2, 0, 3, (97,))]) == []
    assert streams.deliver([events(b"b", 4), Event(2, 0, 4, (98,), finish="length")]) == [1]
    assert streams.unfinished == {}
    assert streams.gained == 4
    assert streams.deliver([events(b"c", 5)]) == []


def stopped(streams: OpenStreams, id: int) -> OutputStream:
    """A stream that a stop string has just ended."""
    stream, _ = make(id, stop=("b",))
    streams.add([stream])
    assert streams.deliver([Event(id, 0, 3, tuple(b"ab"))]) == [id]
    return stream


async def test_timings_of_a_stopped_stream_are_waited_for() -> None:

    streams, timings = OpenStreams(Metrics(), limit=10), Timings(1.0, 2.0, {"queue": 1.0})
    stream, other = stopped(streams, 1), stopped(streams, 2)
    waiting = asyncio.ensure_future(streams.wait_for_timings([stream]))
    await asyncio.sleep(0)
    streams.settle_timings(2, None)
    streams.settle_timings(77, timings)
    await asyncio.sleep(0)
    assert not waiting.done()
    streams.settle_timings(1, timings)
    await asyncio.wait_for(waiting, 0.2)
    assert (stream.times.timings, other.times.timings) == (timings, None)
    await streams.wait_for_timings([stream, other, make(3)[0]])


def test_timings_of_a_stopped_stream_come_with_its_end_where_the_engine_was_quicker() -> None:
    """It had ended the request before it was told to, and knows nothing of it when it is."""
    streams, timings = OpenStreams(Metrics(), limit=10), Timings(1.0, 2.0, {"queue": 1.0})
    stream = stopped(streams, 1)
    assert streams.deliver([Event(1, 0, 5, (99,), finish="length", timings=timings)]) == []
    streams.settle_timings(1, None)
    assert stream.times.timings == timings


async def test_nobody_waits_for_the_timings_of_an_engine_that_is_lost() -> None:

    streams = OpenStreams(Metrics(), limit=10)
    waiting = asyncio.ensure_future(streams.wait_for_timings([stopped(streams, 1)]))
    await asyncio.sleep(0)
    streams.engine_lost()
    await asyncio.wait_for(waiting, 0.2)


async def test_only_so_many_timings_are_awaited() -> None:

    streams = OpenStreams(Metrics(), limit=10)
    first = stopped(streams, 0)
    waiting = asyncio.ensure_future(streams.wait_for_timings([first]))
    await asyncio.sleep(0)
    for id in range(1, MAX_STOPPED + 1):
        stopped(streams, id)
    await asyncio.wait_for(waiting, 0.2)
    streams.settle_timings(0, Timings(1.0, 2.0, {}))
    assert first.times.timings is None


def test_the_queue_is_bounded_all_or_none() -> None:
    streams = OpenStreams(Metrics(), limit=2)
    streams.add([make(1)[0]])
    with client_error(status=429):
        streams.check_room([make(2)[0], make(3)[0]])
    streams.check_room([make(2)[0], make(3)[0]], leaving=1)
    assert list(streams.unfinished) == [1]
    assert 1 <= streams.retry_after() <= 60


def test_failures_reach_whoever_waits() -> None:
    streams = OpenStreams(Metrics(), limit=2)
    stream, kept = make(1)
    streams.add([stream])
    streams.fail_all(Failure("x", "y"))
    assert kept.pieces[-1].last
    assert stream.failure == Failure("x", "y")


async def test_a_slow_reader_is_noticed_and_costs_no_more_memory() -> None:

    queue = PieceQueue(limit=5)
    stream, _ = make()
    stream.sink = queue
    stream.add_event(events(b"abcdefgh"), 0.0)
    assert queue.overflowed.done()
    assert len(await queue.get_all()) == 5


async def test_a_whole_answer_is_done_when_all_choices_are() -> None:

    whole_answer = WholeAnswer(2)
    both = [make(i)[0] for i in (0, 1)]
    for i, stream in enumerate(both):
        stream.choice, stream.sink = i, whole_answer
        assert not whole_answer.done.done()
        stream.add_event(events(b"xy", finish="length"), 0.0)
    assert whole_answer.done.done()
    assert whole_answer.texts == ["xy", "xy"]
    assert whole_answer.offsets == [[0, 1], [0, 1]]


def scored(start: int, end: int) -> Event:
    """The engine's news of prompt tokens start..end-1."""
    told = tuple((-float(position), position, ()) for position in range(start, end))
    return Event(1, 0, 10, prompt_logprobs=told, prompt_position=start)


def make_scored() -> OutputStream:
    request = Request(1, tuple(range(10)), SamplingParams(prompt_logprobs=0), logits_from=0)
    return OutputStream(request, 0, Detokenizer(BytesTokenizer()), Kept(), StreamTimes(0.0))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=12))
def test_prompt_logprobs_are_never_repeated_and_never_missed(spans: list[tuple[int, int]]) -> None:
    stream = make_scored()
    for start, n in spans:
        event = scored(start, min(start + n, 10))
        if start > len(stream.prompt_logprobs) + 1:
            with pytest.raises(StreamGap):
                stream.add_event(event, 0.0)
        else:
            stream.add_event(event, 0.0)
        assert stream.resumable().logits_from == len(stream.prompt_logprobs)
    assert [rank for _, rank, _ in stream.prompt_logprobs] == list(
        range(1, len(stream.prompt_logprobs) + 1)
    )


def test_a_token_before_the_prompt_is_told_is_a_gap() -> None:
    stream = make_scored()
    stream.add_event(scored(1, 9), 0.0)
    with pytest.raises(StreamGap):
        stream.add_event(Event(1, 0, 10, (65,)), 0.0)
    stream.add_event(scored(9, 10), 0.0)
    stream.add_event(Event(1, 0, 10, (65,)), 0.0)
    assert stream.tokens == [65]


def test_prompt_logprobs_are_progress() -> None:
    """A crash behind them is no strike against who gained them."""
    streams = OpenStreams(Metrics(), 10)
    stream = make_scored()
    streams.add([stream])
    streams.deliver([scored(1, 6)])
    streams.deliver([scored(4, 8)])
    assert (streams.gained, streams.tokens()) == (7, {1: 7})
    streams.deliver([scored(8, 10), Event(1, 0, 10, (65,))])
    assert (streams.gained, streams.tokens()) == (10, {1: 10})


def test_a_silent_stream_ends_with_nothing() -> None:
    stream, kept = make()
    stream.silent = True
    stream.add_event(events(b"a", finish="length"), 0.0)
    assert (stream.finish, stream.tokens, stream.done) == ("length", [], True)
    assert [(piece.token, piece.text, piece.last) for piece in kept.pieces] == [(None, "", True)]
