"""The pooled row of a prompt: what it is of, and that nothing but the prompt changes a bit of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from pageturner.formats.gguf import open_gguf
from pageturner.models.decoder import Decoder
from pageturner.params import POOLINGS, SamplingParams
from pageturner.request import POOLED_UNIT, Event, Request
from pageturner.text import parameters
from pageturner.text.output_stream import OutputPiece, StreamGap, output_streams
from pageturner.text.pooled_sum import PooledSum
from server.bytes_tokenizer import BytesTokenizer
from support.decoding import backend
from support.engines import GOLDENS, Model, Setup
from support.refusals import client_error

GOLDEN = np.load(GOLDENS / "tiny_llama.npz")
PROMPT = tuple(GOLDEN["prompt_2"].tolist())


USUAL = Setup()


@pytest.fixture(scope="module", params=["reference", "native"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(GOLDENS / "tiny_llama.gguf", backend(request.param), kv_dtype="float32")


def request(id: int, pooling: str, prompt: tuple[int, ...] = PROMPT) -> Request:
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    return Request(id, prompt, params, logits_from=None if pooling == "last" else 0)


def rows(model: Model, requests: list[Request], setup: Setup = USUAL) -> dict[int, PooledSum]:
    """The sums of those requests that are pooled, as their events bring them."""
    engine, found = (
        model.engine(setup),
        {one.id: PooledSum() for one in requests if one.params.pooling},
    )
    for one in requests:
        assert engine.submit(one) == []
    while engine.has_work:
        for event in engine.step():
            assert event.failure is None
            if event.pooled is not None:
                assert event.prompt_position - 1 == found[event.id].positions
                found[event.id].add(*event.pooled)
    return found


def sums(
    model: Model, pooling: str, setup: Setup = USUAL, prompt: tuple[int, ...] = PROMPT
) -> list[int]:
    return rows(model, [request(1, pooling, prompt)], setup)[1].total.tolist()


def test_rows_are_what_the_head_sees(model: Model) -> None:
    """The head is linear: it makes the logits of Transformers of them, and their mean of the mean."""
    kind, _, data = open_gguf(GOLDENS / "tiny_llama.gguf").tensor("token_embd.weight")
    head = np.frombuffer(data, np.float32 if kind == "F32" else np.float16).astype(np.float64)
    head = head.reshape(320, -1)
    logits = GOLDEN["logits_2"].astype(np.float64)
    for pooling, expected in (
        ("last", logits[-1]),
        ("cls", logits[0]),
        ("mean", logits.mean(axis=0)),
    ):
        pooled = rows(model, [request(1, pooling)])[1]
        vector = np.array(pooled.vector(pooling, normalize=False))
        np.testing.assert_allclose(head @ vector, expected, atol=2e-3)


def test_a_mean_is_that_of_the_last_rows_of_all_beginnings(model: Model) -> None:
    prompt = PROMPT[:9]
    lasts = np.array([sums(model, "last", prompt=prompt[: n + 1]) for n in range(9)])
    assert sums(model, "mean", prompt=prompt) == lasts.sum(axis=0).tolist()
    assert sums(model, "cls", prompt=prompt) == lasts[0].tolist()
    assert (
        sums(model, "cls", prompt=prompt[:1])
        == sums(model, "mean", prompt=prompt[:1])
        == lasts[0].tolist()
    )


@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_chunk_and_no_company_changes_a_bit(model: Model, pooling: str) -> None:
    alone = sums(model, pooling)
    for budget in (1, 5, 16):
        assert sums(model, pooling, Setup(token_budget=budget)) == alone
    others = [
        Request(2, PROMPT[:20], SamplingParams(max_tokens=9)),
        Request(3, PROMPT[:30], SamplingParams(max_tokens=5, prompt_logprobs=2), logits_from=0),
        request(4, "mean", PROMPT[5:]),
        request(5, "last", PROMPT[:33]),
    ]
    for budget in (7, 64):
        crowd = [*others[:2], request(1, pooling), *others[2:]]
        found = rows(model, crowd, Setup(token_budget=budget))
        assert found[1].total.tolist() == alone
        assert found[4].total.tolist() == sums(model, "mean", prompt=PROMPT[5:])
    # behind one another
    cached = rows(model, [request(9, "last"), request(1, pooling)], Setup(max_num_seqs=1))
    assert cached[1].total.tolist() == alone
    short = Setup(kv_tokens=64, token_budget=8)  # not enough for two
    assert rows(model, [request(1, pooling), request(2, "mean")], short)[1].total.tolist() == alone


def test_a_second_engine_goes_on_where_the_first_was(model: Model) -> None:
    pooled, engine = PooledSum(), model.engine(Setup(token_budget=8))
    engine.submit(request(1, "mean"))
    for _ in range(3):
        for event in engine.step():
            assert event.pooled is not None
            pooled.add(*event.pooled)
    assert 0 < pooled.positions < len(PROMPT)
    second = model.engine(Setup())
    second.submit(replace(request(1, "mean"), logits_from=pooled.positions))
    while second.has_work:
        for event in second.step():
            assert event.pooled is not None
            assert event.prompt_position - 1 == pooled.positions
            pooled.add(*event.pooled)
    assert pooled.total.tolist() == sums(model, "mean")


def test_what_is_no_number_fails_its_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Decoder.normed

    def broken(self: Decoder, hidden: np.ndarray) -> np.ndarray:
        return true(self, hidden) * (np.nan if len(hidden) == 3 else 1)

    monkeypatch.setattr(Decoder, "normed", broken)
    engine = model.engine(Setup())
    engine.submit(request(1, "mean", PROMPT[:3]))
    engine.submit(request(2, "mean", PROMPT[:4]))
    events = []
    while engine.has_work:
        events += engine.step()
    failures = {event.id: event.failure for event in events}
    assert failures[2] is None
    assert failures[1] is not None
    assert failures[1].code == "numerical_error"


def test_a_vector_is_as_long_as_is_wanted() -> None:
    pooled, one = PooledSum(), round(1 / POOLED_UNIT)
    pooled.add(1, np.array([3 * one, 4 * one, 12 * one], np.int64).tobytes())
    pooled.add(1, b"")
    assert pooled.vector("mean", normalize=False) == [1.5, 2.0, 6.0]
    assert pooled.vector("cls", dimensions=2) == [0.6, 0.8]
    assert math.isclose(math.hypot(*pooled.vector("last")), 1.0)
    empty = PooledSum(total=pooled.total[:0])
    assert empty.vector("mean") == []


def test_a_stream_keeps_what_came_once() -> None:
    sink: list[OutputPiece] = []
    asked = replace(request(1, "mean", (5, 6, 7, 8)), logits_from=None)

    class Sink:
        def put(self, piece: OutputPiece) -> None:
            sink.append(piece)

    (stream,) = output_streams(asked, [Sink()], count(2), BytesTokenizer(), silent=True)
    assert stream.request.logits_from == 0
    two = np.array([11, 2], np.int64).tobytes()
    first = Event(1, 0, 4, pooled=(2, two), prompt_position=1)
    for _ in range(2):  # the second time it is no news
        stream.add_event(first, 0.0)
    assert (stream.pooled.positions, stream.resumable().logits_from, sink) == (2, 2, [])
    with pytest.raises(StreamGap):
        stream.add_event(Event(1, 0, 4, (9,), finish="length"), 0.0)
    stream.add_event(Event(1, 0, 4, (9,), finish="length", pooled=(2, two), prompt_position=3), 0.0)
    assert stream.pooled.total.tolist() == [22, 4]
    assert (stream.finish, stream.tokens, len(sink)) == ("length", [], 1)


def test_nothing_that_answers_takes_a_pooling() -> None:
    with client_error("pooling is for embeddings"):
        parameters.resolve(SamplingParams(pooling="mean"), BytesTokenizer(), 266)
