"""Every sampling field through the offline API on a tiny model: what it does; a stream is the same answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pageturner import LLM, SamplingParams
from support.refusals import client_error

GOLDENS = Path(__file__).parent.parent / "goldens"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = "the old house"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(GOLDENS / "tiny_llama.gguf"), backend="reference", kv_cache_dtype="float32")


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def tokens(llm: LLM, **fields: Any) -> list[int]:
    return llm.generate(PROMPT, replace(GREEDY, **fields))[0].outputs[0].token_ids


FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.7},
    {"logit_bias": {40: 3.0, 50: -9.0}},
    {"bad_words": ("e", "th", " a")},
    {"allowed_token_ids": tuple(range(60, 120))},
    {"min_tokens": 5, "stop_ids": tuple(range(0, 300, 5))},
    {"stop": ("e", "th", "a")},
    {"stop": ("e", "a"), "min_tokens": 6},
    {"stop": ("e", "a"), "include_stop_str_in_output": True},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"truncate_prompt_tokens": 2},
]


@pytest.mark.parametrize("fields", FIELDS, ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_stream_is_the_same_answer(llm: LLM, fields: dict[str, Any], temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, seed=3, **fields)
    whole = llm.generate(PROMPT, params)[0]
    crowd = llm.generate([PROMPT, "a", PROMPT, "b c d"], [params, GREEDY, params, params])
    pieces = []
    stream = llm.stream(PROMPT, params)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            streamed = end.value
            break
    assert "".join(pieces) == whole.outputs[0].text
    for other in (streamed, crowd[0], crowd[2]):
        assert other.outputs == whole.outputs
        assert other.prompt_logprobs == whole.prompt_logprobs


def test_a_biased_token_is_chosen(llm: LLM) -> None:
    assert tokens(llm, logit_bias={42: 100.0}) == [42] * 16
    assert tokens(llm, logit_bias={42: 1e6}) == [42] * 16, "taken as 100"


def test_only_allowed_tokens_are_chosen(llm: LLM, plain: list[int]) -> None:
    allowed = tuple(range(1, 300, 3))
    assert not set(plain) <= set(allowed)
    assert set(tokens(llm, allowed_token_ids=allowed)) <= set(allowed)


def test_bad_words_are_never_written(llm: LLM) -> None:
    params = replace(GREEDY, temperature=1.0, max_tokens=60, seed=1)
    text = llm.generate(PROMPT, params)[0].outputs[0].text
    words = tuple({letter for letter in text if letter.isalpha() and letter.isascii()})
    assert len(words) > 3
    ids = llm.generate(PROMPT, replace(params, bad_words=words))[0].outputs[0].token_ids
    for word in words:
        (token,) = llm.tokenizer.encode(word, add_special=False, parse_special=False)
        assert token not in ids


def test_penalties_hold_back_what_was_written(llm: LLM) -> None:
    """As the penalty grows, fewer tokens come again; a negative one brings more of them."""
    distinct = [len(set(tokens(llm, max_tokens=40, frequency_penalty=p))) for p in (-2.0, 0.0, 2.0)]
    assert distinct == sorted(distinct)
    assert distinct[0] < distinct[2]
    prompt = set(llm.generate(PROMPT, GREEDY)[0].prompt_token_ids)
    penalised = tokens(llm, max_tokens=40, repetition_penalty=50.0)
    assert len(set(penalised)) == 40
    assert not prompt & set(penalised), "the prompt counts too"


def test_scoring_an_answer_gives_the_logprobs_it_was_chosen_with(llm: LLM) -> None:
    """Bit for bit: prefill and decode are the same arithmetic."""
    first = llm.generate(PROMPT, replace(GREEDY, temperature=1.0, seed=9, logprobs=3))[0]
    answer = first.outputs[0]
    whole = [*first.prompt_token_ids, *answer.token_ids]
    scored = llm.generate([whole], replace(GREEDY, max_tokens=1, prompt_logprobs=3))[0]
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(whole)
    behind = scored.prompt_logprobs[len(first.prompt_token_ids) :]
    assert [(p, top) for p, _, top in behind if top] == answer.logprobs
    for (_, rank, top), token in zip(behind, answer.token_ids, strict=True):
        assert (rank <= 3) == (token in [t for t, _ in top])


@pytest.mark.slow
def test_truncation_keeps_the_end(llm: LLM) -> None:
    ids = llm.generate(PROMPT, GREEDY)[0].prompt_token_ids
    cut = llm.generate(PROMPT, replace(GREEDY, truncate_prompt_tokens=2))[0]
    assert cut.prompt_token_ids == ids[-2:]
    assert cut.outputs == llm.generate([ids[-2:]], GREEDY)[0].outputs
    context = llm.built.max_model_len
    full = llm.generate([[5] * 9000], replace(GREEDY, max_tokens=2, truncate_prompt_tokens=-1))[0]
    assert len(full.prompt_token_ids) == context - 2


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1000.0},
        {"temperature": 1e-5},
        {"temperature": 1e-40},
        {"top_p": 1e-320},
        {"min_p": 1e-40},
        {"top_k": 2**31 - 1},
        {"repetition_penalty": 0.001, "presence_penalty": -2.0, "temperature": 1000.0},
        {"repetition_penalty": 1000.0, "logit_bias": {5: 1e308}},
        {"beam_width": 4, "length_penalty": -10.0, "repetition_penalty": 0.001},
    ],
)
def test_the_ends_of_the_limits_are_numbers_to_the_kernels(
    llm: LLM, fields: dict[str, Any]
) -> None:
    params = replace(GREEDY, max_tokens=6, ignore_eos=True, seed=1, logprobs=1, temperature=1.0)
    (answer,) = llm.generate(PROMPT, replace(params, **fields))[0].outputs
    assert len(answer.token_ids) == 6


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"temperature": 1e39}, "temperature"),
        ({"top_k": 10**400}, "top_k"),
        ({"min_tokens": 10**5000}, "min_tokens"),
        ({"n": 2**31}, "n"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words_token_ids": ((),)}, "bad_words_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": 10**9}, "truncate_prompt_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop_ids": (10**9,)}, "stop_token_ids"),
    ],
)
def test_wrong_values_are_refused_by_name(llm: LLM, fields: dict[str, Any], name: str) -> None:
    with client_error(code="invalid_value", param=name) as refused:
        llm.generate(PROMPT, replace(GREEDY, **fields))
    assert name in refused.value.message


def test_a_request_that_leaves_nothing_to_choose_fails(llm: LLM) -> None:
    with client_error(code="nothing_allowed"):
        tokens(llm, allowed_token_ids=(42,), bad_words=(llm.tokenizer.decode([42]),))
    assert not llm.built.engine.scheduler.has_work


# -- several answers to one prompt ---------------------------------------------------------------------------
SEVERAL = SamplingParams(temperature=1.1, max_tokens=12, ignore_eos=True, seed=7, n=4)


def test_several_answers_share_the_prompt(llm: LLM) -> None:
    prompt = list(range(3, 40))
    before = llm.built.engine.scheduler.stats()
    output = llm.generate([prompt], SEVERAL)[0]
    after = llm.built.engine.scheduler.stats()
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    texts = [tuple(answer.token_ids) for answer in output.outputs]
    assert len(set(texts)) == 4
    assert after["cached_tokens"] - before["cached_tokens"] >= 3 * 36
    assert llm.generate([prompt], replace(SEVERAL, n=1))[0].outputs[0].token_ids == list(texts[0])
    crowd = llm.generate([PROMPT, prompt, prompt], [GREEDY, SEVERAL, replace(SEVERAL, n=2)])
    assert [tuple(answer.token_ids) for answer in crowd[1].outputs] == texts
    assert [tuple(answer.token_ids) for answer in crowd[2].outputs] == texts[:2]


def test_a_stop_string_ends_one_answer_alone(llm: LLM) -> None:
    whole = llm.generate(PROMPT, SEVERAL)[0].outputs
    stop = whole[1].text[3:5]
    cut = llm.generate(PROMPT, replace(SEVERAL, stop=(stop,)))[0].outputs
    for one, other in zip(whole, cut, strict=True):
        assert other.text == one.text.split(stop)[0]


def test_the_best_of_several_answers(llm: LLM) -> None:
    every = llm.generate(PROMPT, replace(SEVERAL, logprobs=0))[0].outputs
    means = [sum(value for value, _ in answer.logprobs) for answer in every]
    order = sorted(range(4), key=lambda i: -means[i])
    best = llm.generate(PROMPT, replace(SEVERAL, n=2, best_of=4))[0].outputs
    assert [answer.token_ids for answer in best] == [every[i].token_ids for i in order[:2]]
    assert [(answer.index, answer.logprobs) for answer in best] == [(0, []), (1, [])]


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": 65}, {"n": 3, "best_of": 2}, {"best_of": 0}])
def test_numbers_of_answers_that_cannot_be(llm: LLM, fields: dict[str, int]) -> None:
    with client_error(r"must be|at once"):
        llm.generate(PROMPT, replace(GREEDY, **fields))


def test_a_stream_has_one_answer(llm: LLM) -> None:
    with client_error("n must be 1"):
        next(llm.stream(PROMPT, replace(GREEDY, n=2)))
