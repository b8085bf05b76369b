"""What one request may ask for: told from its size, before any of it is made, always as a 400 that helps."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.server.admission.limits import RequestLimits, count_values
from pageturner.server.api.base.body import decode
from pageturner.server.api.base.call import Call
from pageturner.server.api.openai import completions
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.observability.metrics import Metrics
from pageturner.text import parameters
from pageturner.text.output_stream import OutputStream, output_streams
from support.refusals import client_error

from .bytes_tokenizer import BytesTokenizer
from .conftest import Server
from .test_http import HI, post
from .test_openai import SERVED, chat, completion, refusal

LIMITS = RequestLimits(1024, 1088, 100, 266, 4096, entries=1200, logprobs=4000, text=100)
BOUNDED = replace(SERVED, limits=LIMITS)


def bounded(**fields: Any) -> Call:
    raw = json.dumps({"prompt": "hello", **fields}).encode()
    return completions.read(decode(raw, LIMITS), BOUNDED)


def prompts(of: str, count: int) -> bytes:
    return ('{"prompt": [' + ", ".join([of] * count) + "]}").encode()


# -- before anything is made ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (prompts("[1]", 900_000), "too_many_prompts"),
        (prompts('"a"', 900_000), "too_many_prompts"),
        (prompts('"\\\\"', 600_000), "too_many_prompts"),
        (prompts('"a", 1', 500_000), "too_many_prompts"),
        (prompts("1", 900_000), "context_length_exceeded"),
        (prompts("[" + "1," * 999 + "1]", 900), "context_length_exceeded"),
        (b'{"prompt": "a", "stop_token_ids": [' + b"1," * 900_000 + b"1]}", "too_many_values"),
        (b'{"prompt": "a", "stop": [' + b'"s",' * 900_000 + b'"s"]}', "too_many_values"),
        (b'{"messages": [' + b"{}," * 900_000 + b"{}]}", "too_many_values"),
        (b'{"prompt": "a", "documents": [' + b"{}," * 900_000 + b"{}]}", "unsupported_parameter"),
        (b'{"prompt": "a", "guided_json": [' + b"{}," * 900_000 + b"{}]}", "too_many_values"),
    ],
)
def test_what_can_never_run_is_refused_without_making_it(raw: bytes, code: str) -> None:
    tracemalloc.start()
    with client_error() as caught:
        decode(raw, LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (caught.value.status, caught.value.code) == (400, code)
    assert peak < 4 * len(raw)


def test_unknown_fields_are_passed_over_however_many() -> None:
    raw = b"{" + b", ".join(b'"a%d": [1]' % i for i in range(100_000)) + b', "prompt": "x"}'
    tracemalloc.start()
    assert decode(raw, LIMITS).prompt == "x"
    assert tracemalloc.get_traced_memory()[1] < len(raw)
    tracemalloc.stop()


def test_the_whole_vocabulary_may_be_named() -> None:
    limits = replace(LIMITS, vocabulary=5000)
    every = {str(token): -1.5 for token in range(5000)}
    raw = json.dumps(
        {"prompt": "a", "logit_bias": every, "allowed_token_ids": list(range(5000))}
    ).encode()
    assert len(decode(raw, limits).logit_bias or ()) == 5000
    error = refusal(lambda: decode(raw, replace(limits, vocabulary=3000)))
    assert (error.code, "3000 tokens" in error.message) == ("too_many_values", True)


def test_of_very_many_tokens_only_those_are_made_that_may_be_kept() -> None:
    raw = json.dumps({"prompt": [7] * 500_000 + [1, 2, 3], "truncate_prompt_tokens": 2}).encode()
    tracemalloc.start()
    body = decode(raw, LIMITS)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(raw)
    tracemalloc.stop()
    assert len(body.prompt or ()) == LIMITS.context
    assert completions.read(body, BOUNDED).prompts == ((2, 3),)


@pytest.mark.parametrize(
    ("value", "strings"),
    [
        ([], 0),
        (["a,b[", 'c"d"', "\\", '\\"'], 4),
        ([[1, 2], [3]], 0),
        ({"a": {"b": ["c"]}}, 3),
        (["é\n\t/"], 1),
    ],
)
def test_strings_are_counted_as_they_stand(value: Any, strings: int) -> None:
    assert count_values(json.dumps(value).encode(), 100)[0] == strings


def test_text_with_brackets_and_commas_is_text() -> None:
    code = json.dumps(["x[0], {y}, [z]\\n" * 50] * 40)
    assert decode(f'{{"prompt": {code}, "stop": "a"}}'.encode(), replace(LIMITS, prompts=40)).prompt
    assert decode(f'{{"messages": {code[:0]}[{{"content": {code}}}]}}'.encode(), LIMITS).messages


def test_a_long_text_is_refused_before_it_is_tokenised() -> None:
    class Deaf(BytesTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            raise AssertionError("it was tokenised")

    served, text = replace(SERVED, tokenizer=Deaf()), "x" * 1_000_000
    for fields in ({"prompt": text}, {"prompt": [text]}):
        with client_error(r"at least \d{5} tokens"):
            completions.read(decode(json.dumps(fields).encode()), served)
    assert len(completion(prompt=text, truncate_prompt_tokens=3).prompts[0]) == 3
    error = refusal(chat, messages=[{"role": "user", "content": text}])
    assert error.code == "context_length_exceeded"
    assert "at least" in error.message


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenised() -> None:
    class Listening(BytesTokenizer):
        heard = 0

        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            self.heard += len(text)
            return super().encode(text, add_special=add_special, parse_special=parse_special)

        def least_tokens(self, text: str) -> int:
            return 0

    tokenizer = Listening()
    served, words = replace(SERVED, tokenizer=tokenizer), "some words " * 10_000
    for text in (words, "x" * 100_000, "<|bos|>" + words):
        with client_error("at least"):
            completions.read(decode(json.dumps({"prompt": text}).encode()), served)
    assert tokenizer.heard <= 3 * 16 * 80


def test_a_text_of_long_tokens_is_tokenised_whole() -> None:
    class Hundreds(BytesTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            return [65] * (len(text) // 100)

        def least_tokens(self, text: str) -> int:
            return len(text) // 100

    served = replace(SERVED, tokenizer=Hundreds())
    assert (
        len(
            completions.read(decode(json.dumps({"prompt": "x" * 7900}).encode()), served).prompts[0]
        )
        == 79
    )


# -- counts and prices ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ["a"] * 1025}, "too_many_prompts", "prompt"),
        ({"prompt": [[1]] * 1025}, "too_many_prompts", "prompt"),
        ({"prompt": ["a"] * 1000, "n": 2}, "too_many_choices", "n"),
        (
            {"prompt": ["a"] * 10, "allowed_token_ids": list(range(120))},
            "request_too_costly",
            "allowed_token_ids",
        ),
        (
            {"n": 8, "logit_bias": {str(i): 1 for i in range(160)}},
            "request_too_costly",
            "logit_bias",
        ),
        ({"n": 8, "bad_words": list("abcdefghij")}, "request_too_costly", "bad_words"),
        ({"n": 60, "max_tokens": 60, "logprobs": 1}, "request_too_costly", "logprobs"),
        ({"prompt": ["a" * 70] * 20, "prompt_logprobs": 2}, "request_too_costly", "logprobs"),
    ],
)
def test_a_request_has_a_price(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(bounded, **fields)
    assert (error.status, error.code, error.param) == (400, code, param)
    assert "send" in error.message or "lower" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 1024},
        {"allowed_token_ids": list(range(266)), "bad_words": ["a"] * 1000},
        {"n": 64, "logprobs": 20, "max_tokens": 1},
        {"max_tokens": 70, "logprobs": 20},
        {"use_beam_search": True, "n": 4, "stop_token_ids": list(range(20))},
    ],
)
def test_what_ordinary_clients_ask_for_has_its_price_too(fields: dict[str, Any]) -> None:
    assert bounded(**fields).prompts


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (
            SamplingParams(stop_ids=tuple(range(1025))),
            "stop_token_ids has 1025 tokens, at most 1024",
        ),
        (SamplingParams(stop_ids=tuple(range(33)), beam_width=32), "32 beams take at most 32"),
        (SamplingParams(stop=("x" * 1025,)), "a string may have 1024 characters"),
        (SamplingParams(stop=("x" * 1000,) * 5), "all of them together 4096"),
        (SamplingParams(bad_words=("x" * 1000,) * 66), "all of them together 65536"),
    ],
)
def test_what_every_token_is_held_against_is_bounded(params: SamplingParams, named: str) -> None:
    with client_error(named, status=400, code="invalid_value"):
        parameters.resolve(params, BytesTokenizer(), 5000)


def test_ids_that_are_given_twice_count_once() -> None:
    twice = SamplingParams(stop_ids=(5, 6) * 1000, allowed_token_ids=(7, 8, 7))
    found = parameters.resolve(twice, BytesTokenizer(), 266)
    assert (found.stop_ids, found.allowed_token_ids) == ((257, 5, 6), (7, 8))


@pytest.mark.parametrize(
    ("temperature", "taken"), [(0.0, 0.0), (1e-40, 0.0), (1e-320, 0.0), (0.01, 0.01)]
)
def test_a_temperature_that_float32_has_not_is_greedy(temperature: float, taken: float) -> None:
    assert (
        parameters.resolve(
            SamplingParams(temperature=temperature), BytesTokenizer(), 266
        ).temperature
        == taken
    )


# -- what is kept --------------------------------------------------------------------------------------------
def test_an_answer_under_way_keeps_nothing_of_its_body_but_small_things() -> None:
    body = completion(stop=["a"], logit_bias={"5": 1}, allowed_token_ids=[1], user="u").body
    assert (body.prompt, body.stop, body.logit_bias, body.allowed_token_ids) == (
        None,
        None,
        None,
        None,
    )
    assert body.user == "u"


def streams(id: int, ids: int) -> list[OutputStream]:
    request = Request(id, (1,), SamplingParams(allowed_token_ids=tuple(range(ids))))
    return output_streams(request, [None], iter(range(1000)), BytesTokenizer())  # type: ignore[list-item]


def test_what_reshapes_logits_is_bounded_over_all_requests() -> None:
    open_streams = OpenStreams(Metrics(), 100, most_entries=100)
    first = streams(1, 90)
    open_streams.add(first)
    with client_error(status=429, code="queue_full"):
        open_streams.check_room(streams(2, 11))
    open_streams.check_room(streams(3, 10))
    open_streams.add(streams(3, 10))
    open_streams.cancel(first[0])
    open_streams.check_room(streams(4, 90))
    open_streams.add(streams(4, 90))
    open_streams.cancel(open_streams.unfinished[3])
    open_streams.cancel(open_streams.unfinished[4])
    open_streams.check_room(streams(5, 101))  # sending it again would not help: alone it is taken


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", "a\nb"),
        ("request_id", ""),
        ("request_id", "x" * 129),
        ("request_id", "a/b"),
        ("cache_salt", "x" * 257),
        ("user", "x" * 257),
    ],
)
def test_names_that_are_kept_are_short_and_safe(name: str, value: str) -> None:
    error = refusal(completion, **{name: value})
    assert (error.status, error.code, error.param) == (400, "invalid_value", name)


# -- over HTTP -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_server_says_so_and_counts_it(start: Callable[..., Server]) -> None:
    server = start(
        "--max-queue",
        "10",
        "--max-num-seqs",
        "2",
        "--max-tokenize-size",
        "40",
        "--max-prompts-per-request",
        "20",
    )
    for fields, code in (
        ({"prompt": [[1]] * 12}, 200),
        ({"prompt": [[1]] * 13}, "too_many_choices"),
        ({"prompt": [[1]] * 7, "n": 2}, "too_many_choices"),
        ({"prompt": [[1]] * 21}, "too_many_prompts"),
        ({"model": "x" * 5000}, "model_not_found"),
    ):
        answer = post(server, max_tokens=1, **fields)
        assert answer.status_code == code or answer.json()["error"]["reason"] == code
        assert len(answer.text) < 5000
    assert (
        server.metric(
            'pageturner:refusals_total{engine="0",model_name="fake",reason="too_many_choices"}'
        )
        == 2
    )


def test_tokenize_and_detokenize_have_limits_of_their_own(start: Callable[..., Server]) -> None:
    server = start("--max-tokenize-size", "40")
    for path, fields, status in (
        ("/tokenize", {"prompt": "x" * 40}, 200),
        ("/tokenize", {"prompt": "x" * 41}, 400),
        ("/tokenize", {"messages": HI * 2}, 400),
        ("/detokenize", {"tokens": [65] * 40}, 200),
        ("/detokenize", {"tokens": [65] * 41}, 400),
        ("/detokenize", {"tokens": [65] * 4100}, 400),
    ):
        assert server.http.post(path, json=fields).status_code == status, (path, fields)
