"""Faults at a token of a real model: the request that asks for one fails there, the others notice nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner.params import SamplingParams
from pageturner.request import Event, Request
from support.decoding import backend
from support.engines import GOLDENS, Model, Setup

CROWD: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "beam_width": 2},
    {"temperature": 1.0, "prompt_logprobs": 1, "repetition_penalty": 1.2},
)


@pytest.fixture(scope="module", params=["native", "reference"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(GOLDENS / "tiny_llama_quant.gguf", backend(request.param))


def served(model: Model, requests: list[Request]) -> dict[int, list[Event]]:
    engine = model.engine(Setup())
    told = [event for request in requests for event in engine.submit(request)]
    while engine.has_work:
        told += engine.step()
    return {
        request.id: [replace(e, timings=None) for e in told if e.id == request.id]
        for request in requests
    }


@pytest.mark.parametrize(
    ("kind", "code"), [("nan", "numerical_error"), ("exception", "step_failed")]
)
def test_it_fails_there_and_nobody_notices(model: Model, kind: str, code: str) -> None:
    requests = [
        Request(
            n,
            (5, n, 9, 40 + n),
            SamplingParams(max_tokens=6, seed=n, **kinds),
            logits_from=0 if "prompt_logprobs" in kinds else None,
        )
        for n, kinds in enumerate(CROWD * 2, 1)
    ]
    sound = served(model, requests)
    faulty = {2, 3, 5, 8}
    asked = [
        replace(one, params=replace(one.params, inject_fault=f"{kind}@3"))
        if one.id in faulty
        else one
        for one in requests
    ]
    for id, events in served(model, asked).items():
        if id not in faulty:
            assert events == sound[id]
            continue
        failure = events[-1].failure
        assert failure is not None
        assert failure.code == code
        before = [token for event in sound[id] for token in event.tokens][: 0 if id == 3 else 2]
        assert [token for event in events for token in event.tokens] == before
