"""Prompt logprobs of a real model: against one forward pass over everything, in chunks, over preemption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pageturner.executor import prompt_scores, sampler
from pageturner.executor.batch import pack
from pageturner.kernels.reference import ReferenceOps
from pageturner.params import SamplingParams
from pageturner.request import Event, PromptLogprob, Request
from pageturner.scheduler.types import Item, Plan, Sequence
from support.engines import Model, Setup, answers

TINY = Path(__file__).parent.parent / "goldens" / "tiny_llama.gguf"
PROMPT = tuple((11 * i + 3) % 290 for i in range(45))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, ReferenceOps(), kv_dtype="float32")


@pytest.fixture(scope="module")
def truth(model: Model) -> list[PromptLogprob]:
    """All logits of the prompt at once, straight from the decoder."""
    sequence = Sequence(Request(1, PROMPT), tokens=list(PROMPT), blocks=[0, 1, 2])
    batch = pack(Plan([Item(sequence, len(PROMPT), sequence.computed)]), 16, 3)
    batch.logit_rows = np.arange(len(PROMPT) - 1, dtype=np.int32)
    logits = model.decoder.forward(
        batch, model.ops.alloc_kv(model.decoder.kv_spec(4, 16, "float32"))
    )
    found = sampler.score(model.ops, logits, list(PROMPT[1:]), [2] * (len(PROMPT) - 1))
    assert all(score is not None for score in found)
    return [score for score in found if score is not None]


def request(id: int = 1, prompt: tuple[int, ...] = PROMPT, **params: int) -> Request:
    sampling = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 5, "prompt_logprobs": 2, **params}
    )
    return Request(id, prompt, sampling, logits_from=0)


@pytest.mark.parametrize("budget", [0, 7, 16, 64])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_they_are_those_of_one_forward_pass(
    model: Model,
    truth: list[PromptLogprob],
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    rows: int,
) -> None:
    monkeypatch.setattr(prompt_scores, "SCORED_ROWS", rows)
    plain = answers(model.engine(Setup()), [replace(request(), logits_from=None)])[1]
    found = answers(model.engine(Setup(token_budget=budget)), [request()])[1]
    assert list(found.prompt_logprobs) == truth
    assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs), (
        "asking changed the answer"
    )


def test_few_logits_are_in_memory_at_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    logits = model.ops.logits

    def counting(x: np.ndarray, *rest: object) -> np.ndarray:
        counts.append(len(x))
        return logits(x, *rest)

    monkeypatch.setattr(prompt_scores, "SCORED_ROWS", 8)
    monkeypatch.setattr(model.ops, "logits", counting)
    answers(model.engine(Setup(token_budget=0)), [request(), request(2, PROMPT[:30])])
    assert max(counts) == 8
    assert sum(counts) == 44 + 29 + 2 * 5


def test_cached_blocks_are_not_used_where_logits_are_wanted(
    model: Model, truth: list[PromptLogprob]
) -> None:
    engine = model.engine(Setup())
    answers(engine, [replace(request(7), logits_from=None)])
    found = answers(engine, [request()])[1]
    assert list(found.prompt_logprobs) == truth
    halfway = answers(engine, [replace(request(2), logits_from=20)])[2]
    assert list(halfway.prompt_logprobs) == truth[20:]
    assert engine.scheduler.stats()["cached_tokens"] == 16, (
        "what lies before the wanted logits is shared"
    )


def test_a_prompt_of_one_token_has_none(model: Model) -> None:
    found = answers(model.engine(Setup()), [request(1, (5,))])[1]
    assert found.prompt_logprobs == ()
    assert len(found.tokens) == 5


def crowd() -> Iterator[Request]:
    for id in range(1, 9):
        yield request(id, tuple((id * 7 + 13 * i) % 290 for i in range(10 + 5 * id)), max_tokens=30)


def test_preempted_and_never_told_twice(model: Model) -> None:
    """`answers` fails when a prompt logprob comes twice."""
    alone = {}
    for one in crowd():
        alone |= answers(model.engine(Setup()), [one])
    engine = model.engine(Setup(kv_tokens=160, token_budget=24, block_size=8))
    assert answers(engine, list(crowd())) == alone
    assert engine.scheduler.stats()["preemptions"] > 0


def test_numbers_that_are_none_fail_their_own_request(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference never makes NaN of a sound model: the first scored row of one request becomes it."""
    logits = model.decoder.logits

    def broken(hidden: np.ndarray, adapters: object) -> np.ndarray:
        found = logits(hidden).copy()
        if len(hidden) == 44 + 29:
            found[0] = np.nan
        return found

    monkeypatch.setattr(prompt_scores, "SCORED_ROWS", 100)
    monkeypatch.setattr(model.decoder, "logits", broken)
    engine = model.engine(Setup(token_budget=0))
    events: list[Event] = []
    for one in (request(), request(2, PROMPT[:30])):
        engine.submit(one)
    while engine.scheduler.has_work:
        events += engine.step()
    failures = {event.id: event.failure.code for event in events if event.failure is not None}
    assert failures == {1: "numerical_error"}
    assert sum(len(event.prompt_logprobs) for event in events) == 29
