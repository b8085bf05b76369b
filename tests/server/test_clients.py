"""What clients send that is not quite what the protocol says, and what they look for in answers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from pageturner.server.api.base.body import decode
from pageturner.text.grammar.check import byte_tokens, compiled
from pageturner.text.structured_outputs import StructuredOutputsParams
from support.refusals import client_error, refusal_of

from .conftest import Server
from .test_openai import chat, completion, refusal

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


# -- context overflow ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 100},  # over the context
        {"prompt": "x" * 99_000},  # told from its text
        {"prompt": "x" * 90},  # over the KV memory
        {"max_tokens": 200},
        {"prompt": "x" * 60, "max_tokens": 30},
    ],
)
def test_words_by_which_clients_know_that_the_context_is_too_short(fields: dict[str, Any]) -> None:
    error = refusal(completion, **fields)
    assert error.code in ("context_length_exceeded", "kv_capacity_exceeded")
    assert error.message.startswith("This model's maximum context length is ")


def test_so_does_a_list_of_tokens_that_is_never_read(server: Server) -> None:
    raw = {"prompt": [5] * 40_000}
    error = server.http.post("/v1/completions", json=raw).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 2048 tokens")


# -- JSON ----------------------------------------------------------------------------------------------------
def test_whole_numbers_with_a_point_are_whole_numbers() -> None:
    body = decode(b'{"max_tokens": 2.0, "seed": -7.00, "n": 1.0, "logprobs": 3.0}')
    assert (body.max_tokens, body.seed, body.n, body.logprobs) == (2, -7, 1, 3)
    for wrong in (b"2.5", b"25e-1", b'"2.0"', b"99999999999999999999.0"):
        with client_error("max_tokens"):
            decode(b'{"max_tokens": ' + wrong + b"}")


@pytest.mark.parametrize(
    ("raw", "half"),
    [
        (b'{"prompt": "cut \\ud83d"}', "ud83d"),
        (b'{"prompt": "cut \\uD83D and more"}', "uD83D"),
        (b'{"prompt": "\\ud83d\\ude00 fine, \\ude00 not"}', "ude00"),
        (b'{"messages": [{"role": "user", "content": "a\\\\\\udbff"}]}', "udbff"),
    ],
)
def test_half_a_character_is_called_that(raw: bytes, half: str) -> None:
    with client_error("half of a surrogate pair", code="invalid_json") as caught:
        decode(raw)
    assert half in caught.value.message


def test_whole_characters_and_backslashes_are_taken() -> None:
    assert decode(b'{"prompt": "\\ud83d\\ude00"}').prompt == "\U0001f600"
    assert decode(b'{"prompt": "\\\\ud83d"}').prompt == "\\ud83d"
    with client_error(r"not valid JSON: (?!.*surrogate)"):
        decode(b'{"prompt": "\\\\ud83d}')


# -- HTTP ----------------------------------------------------------------------------------------------------
def test_a_compressed_body_is_a_415(server: Server) -> None:
    body = gzip.compress(json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    response = server.http.post(
        "/v1/completions", content=body, headers={"content-encoding": "gzip"}
    )
    assert refusal_of(response) == (
        415,
        "unsupported_encoding",
    )
    plain = {"content-encoding": "identity"}
    response = server.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=plain
    )
    assert response.status_code == 200


def test_a_slash_at_the_end_of_a_path_changes_nothing(server: Server) -> None:
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    response = server.http.post("/v1/completions/", json={"prompt": "a", "max_tokens": 1})
    assert response.status_code == 200


def test_an_unknown_path_is_answered_with_those_that_there_are(server: Server) -> None:
    message = server.http.get("/v1/chat").json()["error"]["message"]
    assert "/v1/chat/completions" in message
    assert "docs/" not in message
    assert "admin" not in message


def test_a_request_has_one_id_everywhere(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "request_id": "mine-1"}
    response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "gateway-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    server.until(lambda: "mine-1 POST" in server.log)
    assert "gateway-1" not in server.log


# -- schemas -------------------------------------------------------------------------------------------------
def test_what_pydantic_writes_for_sets_and_bytes_is_taken() -> None:
    schema = {
        "type": "object",
        "properties": {
            "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "raw": {"type": "string", "format": "binary"},
            "day": {"type": "string", "format": "date"},
        },
        "$defs": {"P": {"type": "string", "format": "path"}},
    }
    assert StructuredOutputsParams(json=schema)


def matches(schema: dict[str, Any], text: str) -> bool:
    matcher = compiled(byte_tokens(), StructuredOutputsParams(json=schema))
    taken = matcher.consume_tokens(list(text.encode()))
    return bool(taken and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-7", "9" * 15 + "8", "-" + "9" * 15 + "8"], ["1" + "0" * 16]),
        ({"type": ["integer", "null"]}, ["null", "12"], ["1" + "0" * 16]),
        ({"type": "integer", "minimum": 3}, ["3", "9" * 15 + "8"], ["2", "1" + "0" * 16]),
        (
            {"type": "integer", "exclusiveMaximum": 0},
            ["-1", "-" + "9" * 15 + "8"],
            ["0", "-1" + "0" * 16],
        ),
        ({"type": "integer", "minimum": 10**17}, ["1" + "0" * 17], ["5"]),
        ({"type": "integer", "enum": [10**17, 2]}, ["2", "1" + "0" * 17], ["3"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1]"], ["[1" + "0" * 16 + "]"]),
    ],
)
def test_whole_numbers_come_to_an_end(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [matches(schema, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


# -- logprobs ------------------------------------------------------------------------------------------------
def test_the_token_that_ends_an_answer_is_not_in_its_logprobs(server: Server) -> None:
    fields = {
        "messages": [{"role": "user", "content": "<|short|>"}],
        "logprobs": True,
        "max_tokens": 9,
    }
    whole = server.http.post(CHAT, json=fields).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"] - 1 == 5
    lines = server.http.post(CHAT, json={**fields, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for one in logprobs if one for entry in one["content"]] == content
    cut = server.http.post(CHAT, json={**fields, "max_tokens": 5}).json()  # nothing ends it
    assert len(cut["choices"][0]["logprobs"]["content"]) == 5


# -- fields of others ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("regex", "a+", "structured_outputs"),
        ("ebnf", "root ::= x", "structured_outputs"),
        ("stop_regex", "a", "not supported"),
        ("samplers", ["top_k"], "not supported"),
        ("n_predict", 5, "max_tokens"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("lora_path", "x", "not supported"),
        ("logprob_token_ids", [1], "not supported"),
        ("store", True, "not supported"),
        ("web_search_options", {}, "not supported"),
        ("stop_sequences", ["a"], "send stop"),
        ("typical_p", 0.9, "not supported"),
    ],
)
def test_what_would_change_the_answer_is_not_passed_over(name: str, value: Any, says: str) -> None:
    for ask in (completion, chat):
        error = refusal(ask, **{name: value})
        assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
        assert says in error.message


def test_values_of_them_that_change_nothing_are_taken() -> None:
    neutral = {
        "repeat_penalty": 1.0,
        "n_predict": -1,
        "lora_path": None,
        "store": False,
        "regex": None,
    }
    hints = {
        "prediction": {"type": "content", "content": "a"},
        "service_tier": "auto",
        "metadata": {},
    }
    assert chat(**neutral, **hints).prompts == chat().prompts


def test_penalties_that_no_logit_survives_are_refused() -> None:
    for penalty in (1e-39, 3e-38, 1e-4, 1e38):
        error = refusal(completion, repetition_penalty=penalty)
        assert (error.code, error.param) == ("invalid_value", "repetition_penalty")


# -- misspelt fields -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("max_token", "max_tokens"),  # a letter too few
        ("temperatures", "temperature"),  # one too many
        ("temprature", "temperature"),
        ("presence_penalti", "presence_penalty"),  # a wrong one
        ("reponse_format", "response_format"),
        ("frequency_penatly", "frequency_penalty"),  # two in each other's place
        ("topP", "top_p"),
        ("max-completion-tokens", "max_completion_tokens"),
    ],
)
def test_a_misspelt_field_is_refused_by_the_name_that_was_meant(typed: str, meant: str) -> None:
    with client_error() as caught:
        decode(json.dumps({"prompt": "x", typed: 1}).encode())
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", typed)
    assert error.message == f"{typed} is not a field here: did you mean {meant}?"


# fields of other servers and of gateways, which clients send whoever answers
OTHERS = [
    "api_base",
    "backend",
    "bootstrap_host",
    "bootstrap_port",
    "cache_control",
    "cache_prompt",
    "chat_history",
    "data_parallel_rank",
    "decoder_input_details",
    "details",
    "drop_params",
    "dynatemp_exponent",
    "enable_thinking",
    "extra_body",
    "fallbacks",
    "guided_decoding_backend",
    "id_slot",
    "include_usage",
    "keep_alive",
    "kv_transfer_params",
    "litellm_params",
    "max_time",
    "metadata",
    "min_keep",
    "mirostat_eta",
    "mirostat_tau",
    "mode",
    "models",
    "n_keep",
    "num_beams",
    "num_ctx",
    "options",
    "plugins",
    "post_sampling_probs",
    "prediction",
    "preset",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_mode",
    "provider",
    "random_seed",
    "reasoning",
    "reasoning_format",
    "rid",
    "route",
    "safe_prompt",
    "safety_identifier",
    "sampler_order",
    "seeds",
    "separate_reasoning",
    "service_tier",
    "session_id",
    "session_params",
    "stop_strings",
    "stream_reasoning",
    "tags",
    "think",
    "thinking",
    "timeout",
    "tool_prompt",
    "trace_id",
    "transforms",
    "truncation_length",
    "usage",
    "user_id",
    "users",
    "verbosity",
    "xtc_threshold",
]


@pytest.mark.parametrize("field", OTHERS)
def test_fields_of_other_servers_are_no_misspelt_ones(field: str) -> None:
    assert decode(json.dumps({"prompt": "x", field: 1}).encode()).prompt == "x"


def test_no_known_field_is_taken_for_another() -> None:
    both = {
        "min_tokens": 1,
        "max_tokens": 2,
        "top_p": 0.5,
        "top_k": 3,
        "guided_regex": None,
        "tools": None,
    }
    body = decode(json.dumps(both).encode())
    assert (body.min_tokens, body.max_tokens, body.top_p, body.top_k) == (1, 2, 0.5, 3)
