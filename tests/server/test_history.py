"""Timelines by X-Request-Id: nobody's is erased by somebody who uses the same one, or very many."""

from __future__ import annotations

from pageturner.params import SamplingParams
from pageturner.request import Request, Timings
from pageturner.server.observability.timings import RequestHistory
from pageturner.text.output_stream import OutputStream, output_streams

from .bytes_tokenizer import BytesTokenizer


def ended(history: RequestHistory, id: int, name: str, tenant: str = "") -> None:
    """One request that took `id` seconds in the engine."""
    request = Request(id, (1,), SamplingParams())
    stream: OutputStream
    (stream,) = output_streams(request, [None], iter(()), BytesTokenizer())  # type: ignore[list-item]
    history.begin([stream], name, tenant)
    stream.finish, stream.times.timings = "stop", Timings(0.0, float(id), {"own_decode": float(id)})
    history.end([stream], name, tenant, float(id))


def told(history: RequestHistory, name: str, tenant: str = "") -> list[float]:
    return [one["e2e_ms"] for one in history.find(name, tenant) or []]


def test_the_same_id_again_erases_nothing() -> None:
    history = RequestHistory()
    ended(history, 1, "mine")
    ended(history, 2, "mine")
    ended(history, 3, "mine", "other")
    assert told(history, "mine") == [1000, 2000]
    assert told(history, "mine", "other") == [3000]


def test_a_tenant_drives_out_its_own_only() -> None:
    history = RequestHistory(most=8)
    ended(history, 1, "quiet", "a")
    for id in range(2, 40):
        ended(history, id, f"loud {id}", "b")
    assert told(history, "quiet", "a") == [1000]
    assert told(history, "loud 39", "b") == [39_000]
    assert told(history, "loud 2", "b") == []


def test_long_accounts_are_bounded_by_their_bytes() -> None:
    history = RequestHistory(most_bytes=100_000)
    spans = tuple((float(n), float(n + 1), "step", 0) for n in range(64))
    ended(history, 1, "quiet", "a")
    for number in range(50):
        streams = []
        for choice in range(20):
            request = Request(1000 * number + choice, (1,), SamplingParams())
            (stream,) = output_streams(request, [None], iter(()), BytesTokenizer())  # type: ignore[list-item]
            stream.finish = "stop"
            stream.times.timings = Timings(0.0, 9.0, {}, spans)
            streams.append(stream)
        history.end(streams[: 20 if number < 49 else 2], f"loud {number}", "b", 9.0)
    assert told(history, "quiet", "a") == [1000]
    assert [len(told(history, f"loud {number}", "b")) for number in (48, 49)] == [0, 2]
