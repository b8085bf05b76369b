"""Beam search from end to end: what it finds, over HTTP and in LLM, and what cannot be asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pageturner import LLM, SamplingParams, StructuredOutputsParams
from support.refusals import client_error
from support.servers import serving

GOLDENS = Path(__file__).parent.parent / "goldens"
MODEL = GOLDENS / "tiny_llama.gguf"
PROMPT = "the old house"
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(MODEL), backend="reference", kv_cache_dtype="float32", max_num_seqs=512)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(MODEL, "--backend", "reference", "--kv-cache-dtype", "float32") as client:
        yield client


@pytest.mark.slow
def test_a_search_wide_enough_finds_the_best_of_all(llm: LLM) -> None:
    """With as many beams as there are tokens, two steps are searched whole."""
    params = replace(SHORT, max_tokens=2, allowed_token_ids=tuple(range(40, 60)))
    found = llm.beam_search(PROMPT, 20, params)[0].outputs
    prompt = llm.tokenizer.encode(PROMPT, add_special=True, parse_special=True)

    def logprobs(tokens: list[int]) -> np.ndarray:
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, ignore_eos=True)
        values = []
        for token in range(40, 60):
            told = llm.generate([[*tokens, token]], scored)[0].prompt_logprobs
            assert told is not None
            assert told[-1] is not None
            values.append(told[-1][0])
        return np.array(values)

    first = logprobs(prompt)
    every = {
        (40 + i, 40 + j): (first[i] + value) / 2
        for i in range(20)
        for j, value in enumerate(logprobs([*prompt, 40 + i]))
    }
    best = sorted(every, key=lambda pair: -every[pair])[:20]
    assert [tuple(answer.token_ids) for answer in found] == best
    assert [answer.score for answer in found] == pytest.approx(
        [every[pair] for pair in best], abs=1e-4
    )


def test_one_beam_is_greedy(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    greedy = llm.generate(PROMPT, params)[0].outputs[0]
    beam = llm.beam_search(PROMPT, 1, params)[0].outputs[0]
    assert beam.token_ids == greedy.token_ids
    assert beam.text == greedy.text


def test_beams_are_ordered_and_scored(llm: LLM) -> None:
    for penalty in (0.0, 0.6, 1.4):
        params = SamplingParams(max_tokens=10, length_penalty=penalty, logprobs=2)
        answers = llm.beam_search(PROMPT, 4, params)[0].outputs
        scores = [answer.score for answer in answers]
        assert scores == sorted(scores, key=lambda score: -(score or 0))
        assert len({tuple(answer.token_ids) for answer in answers}) == 4
        for answer in answers:
            total = math.fsum(value for value, _ in answer.logprobs)
            assert answer.score == pytest.approx(total / len(answer.token_ids) ** penalty)
            assert all(len(top) == 2 for _, top in answer.logprobs)


def test_what_a_grammar_allows_is_searched(llm: LLM) -> None:
    grammar = StructuredOutputsParams(regex=r"[ab]{2}c")
    params = SamplingParams(max_tokens=20, structured_outputs=grammar)
    answers = llm.beam_search(PROMPT, 6, params)[0].outputs
    texts = [answer.text for answer in answers]
    assert {*texts} - {""} == {"aac", "abc", "bac", "bbc"} & {*texts}
    assert all(re.fullmatch(r"[ab]{2}c", text) for text in texts[:3]), "the best ones have the form"


def test_memory_comes_back(llm: LLM) -> None:
    llm.beam_search([PROMPT, "no"], 4, SamplingParams(max_tokens=20))
    stats = llm.built.engine.stats()
    assert stats["blocks_used"] == stats["running"] == stats["waiting"] == 0


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"beam_width": 513}, "beam_width"),
        ({"beam_width": 4, "n": 5}, "n"),
        ({"beam_width": 4, "stop": ("x",)}, "stop"),
        ({"beam_width": 4, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"beam_width": 4, "length_penalty": float("inf")}, "length_penalty"),
        ({"beam_width": 4, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": -1}, "beam_width"),
    ],
)
def test_what_cannot_be_asked_for(llm: LLM, asked: dict[str, Any], name: str) -> None:
    with client_error(param=name):
        llm.generate(PROMPT, replace(SHORT, **asked))


def test_beams_that_memory_cannot_hold() -> None:
    small = LLM(
        str(MODEL), backend="reference", max_num_seqs=8, max_model_len=64, kv_cache_memory=40 * 1024
    )
    with client_error(code="kv_too_small"):
        small.beam_search(PROMPT, 8, SamplingParams(max_tokens=50))


BEAMS: dict[str, Any] = {"use_beam_search": True, "prompt": PROMPT, "max_tokens": 8}


def test_over_http_as_in_llm(llm: LLM, http: httpx.Client) -> None:
    expected = [
        answer.text
        for answer in llm.beam_search(PROMPT, 4, SamplingParams(max_tokens=8))[0].outputs
    ]
    body = http.post("/v1/completions", json={**BEAMS, "n": 4}).json()
    assert [choice["text"] for choice in body["choices"]] == expected
    body = http.post("/v1/completions", json={**BEAMS, "n": 2, "best_of": 4}).json()
    assert [choice["text"] for choice in body["choices"]] == expected[:2]
    lines = http.post("/v1/completions", json={**BEAMS, "n": 4, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"n": 400}, "n"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_k": 3}, "top_k"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"early_stopping": "perhaps"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_cannot_be_asked_for_over_http(
    http: httpx.Client, asked: dict[str, Any], name: str
) -> None:
    answer = http.post("/v1/completions", json={**BEAMS, **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
