"""What requests may say: defaults, types, limits, and a 400 that names the field for everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.server.api.base.body import RequestBody, decode
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.openai import chat as chats
from pageturner.server.api.openai import completions
from pageturner.text.chat_template import ChatTemplate
from support.refusals import client_error

from .bytes_tokenizer import TEMPLATE, BytesTokenizer

SERVED = ServedModel(
    "m", BytesTokenizer(), ChatTemplate(TEMPLATE, "<|bos|>", "<|end|>"), 100, 80, 266
)
HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> Call:
    return completions.read(decode(json.dumps({"prompt": "hello", **fields}).encode()), SERVED)


def chat(**fields: Any) -> Call:
    return chats.read(decode(json.dumps({"messages": HI, **fields}).encode()), SERVED)


def refusal(call: Any, **fields: Any) -> ClientError:
    with client_error() as caught:
        call(**fields)
    return caught.value


def test_forced_end_is_for_developers() -> None:
    refused = refusal(completion, forced_end=3)
    assert (refused.status, refused.code, refused.param) == (
        400,
        "unsupported_parameter",
        "forced_end",
    )
    served = replace(SERVED, developer=True)
    call = completions.read(RequestBody(prompt="hello", forced_end=3), served)
    assert (call.params[0].forced_end, call.params[0].stop_ids) == (3, (257,))
    for wrong in ({"forced_end": 0}, {"forced_end": 3, "ignore_eos": True}):
        with client_error("forced_end is 1 or more"):
            completions.read(RequestBody(prompt="hello", **wrong), served)


def test_defaults() -> None:
    params = completion().params[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.stop_ids, params.logprobs) == (16, (257,), None)
    assert params.seed is not None
    assert params.seed != completion().params[0].seed


def test_a_chat_may_use_the_rest_of_what_there_is_room_for() -> None:
    call = chat()
    # KV memory, and the last token needs none
    assert call.params[0].max_tokens == 81 - len(call.prompts[0])
    assert bytes(t for t in call.prompts[0] if t < 256) == b"user\nhi\nassistant\n"


def test_the_default_of_completions_shrinks_to_the_room_there_is() -> None:
    assert completion(prompt="x" * 75).params[0].max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ("<|bos|>a", [(256, 97)]),
    ],
)
def test_prompts(prompt: Any, expected: list[tuple[int, ...]]) -> None:
    assert list(completion(prompt=prompt).prompts) == expected


def test_fields_reach_the_sampling_parameters() -> None:
    params = completion(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        logprobs=3,
    ).params[0]
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 2, 0)
    assert (params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 7, 0.1, 2**63 - 1)
    assert (params.stop, params.stop_ids, params.logprobs) == (("a", "b"), (5,), 3)
    assert completion(stop="x", stop_token_ids=[5]).params[0].stop_ids == (257, 5)
    assert completion(top_k=-1).params[0].top_k == 0
    nucleus = completion(top_p=0, temperature=2).params[0]
    assert (nucleus.temperature, nucleus.top_p) == (0, 1)
    assert completion(seed=2**64 - 1).params[0].seed == 2**63 - 1
    assert completion(seed=-(2**63)).params[0].seed == 0
    assert chat(max_tokens=3, max_completion_tokens=4).params[0].max_tokens == 4
    assert chat(logprobs=True).params[0].logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).params[0].logprobs == 5


def test_what_reshapes_logits_reaches_the_sampling_parameters() -> None:
    params = completion(
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"5": 101, "7": -3.5},
        bad_words=["ab", " c"],
        allowed_token_ids=[1, 2],
        prompt_logprobs=4,
        truncate_prompt_tokens=3,
        include_stop_str_in_output=True,
    ).params[0]
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.2,
        -2,
        0.5,
    )
    assert params.logit_bias == {5: 100.0, 7: -3.5}, "a bias is at most 100, as in vLLM"
    assert params.bad_words_token_ids == ((97, 98), (99,)), (
        "a word behind a space is more tokens here"
    )
    assert (params.allowed_token_ids, params.prompt_logprobs) == ((1, 2), 4)
    assert params.include_stop_str_in_output
    assert completion(truncate_prompt_tokens=3).prompts == (tuple(b"llo"),)
    assert completion(prompt=["hello", "x"], truncate_prompt_tokens=2).prompts == (
        tuple(b"lo"),
        tuple(b"x"),
    )
    assert completion(prompt="x" * 100, truncate_prompt_tokens=-1, max_tokens=9).prompts == (
        (120,) * 72,
    )
    assert len(chat(truncate_prompt_tokens=4).prompts[0]) == 4
    neutral = completion(logit_bias={}, bad_words=[], repetition_penalty=None).params[0]
    assert (neutral.logit_bias, neutral.bad_words_token_ids, neutral.repetition_penalty) == (
        None,
        (),
        1.0,
    )


def test_echo() -> None:
    call = completion(prompt=["hello", "é"], echo=True, logprobs=2)
    assert call.echoes == ("hello", "é")
    assert call.params[0].prompt_logprobs == 2
    assert completion(prompt="hello", echo=True, truncate_prompt_tokens=2).echoes == ("lo",)
    assert completion(prompt=[256, 97], echo=True).echoes == ("<|bos|>a",)
    assert completion(echo=True, logprobs=2, prompt_logprobs=5).params[0].prompt_logprobs == 5
    assert completion(echo=True).params[0].prompt_logprobs is None
    assert completion(logprobs=2).echoes == ()
    nothing = completion(echo=True, max_tokens=0)
    assert (nothing.only_echoes, nothing.params[0].max_tokens) == (True, 1)
    assert not completion(echo=True, max_tokens=1).only_echoes


@pytest.mark.parametrize(
    ("raw", "tokens"), [(b"[1.0, 2e0]", (1, 2)), (b"[[3.0], [4]]", (3,)), (b"[5, 6]", (5, 6))]
)
def test_whole_numbers_may_have_a_point(raw: bytes, tokens: tuple[int, ...]) -> None:
    body = b'{"prompt": %b, "max_tokens": 2.0, "stop_token_ids": [7.0], "seed": 3.0}' % raw
    call = completions.read(decode(body), SERVED)
    assert (call.prompts[0], call.params[0].max_tokens, call.params[0].seed) == (tokens, 2, 3)
    assert 7 in call.params[0].stop_ids
    assert refusal(completion, stop_token_ids=[1.5]).code == "invalid_type"
    assert refusal(completion, prompt=[1.5]).code == "invalid_type"


def test_null_means_not_given() -> None:
    fields = dict.fromkeys(
        ["stop", "seed", "temperature", "max_tokens", "logprobs", "n", "stream_options"]
    )
    assert completion(**fields).params[0].max_tokens == 16


def test_message_contents_of_all_kinds() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "system", "content": ""}, {"role": "user", "content": parts}])
    assert bytes(t for t in call.prompts[0] if t < 256) == b"system\n\nuser\nab\nassistant\n"
    call = chat(messages=[*HI, {"role": "assistant", "content": None}], add_generation_prompt=False)
    assert bytes(t for t in call.prompts[0] if t < 256) == b"user\nhi\nassistant\n\n"


NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "echo": False,
    "suffix": None,
    "prompt_logprobs": None,
    "use_beam_search": False,
    "structured_outputs": None,
}


def test_neutral_values_of_what_is_not_there_yet_are_taken() -> None:
    assert completion(**NEUTRAL).prompts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("suffix", "x"),
        ("guided_whitespace_pattern", "x"),
        ("grammar_lazy", True),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(completion, **{name: value})
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert name in error.message


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt": []}, "empty_prompt", "prompt"),
        ({"prompt": [[]]}, "empty_prompt", "prompt"),
        ({"prompt": ["a", ""]}, "empty_prompt", "prompt"),
        ({"prompt": None}, "missing_field", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": [1, "a"]}, "invalid_type", "prompt"),
        ({"prompt": [1.5]}, "invalid_type", "prompt"),
        ({"prompt": [True]}, "invalid_type", "prompt"),
        ({"prompt": [266]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": [2**70]}, "invalid_value", "prompt"),
        ({"prompt": "x" * 100}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 99}, "kv_capacity_exceeded", "prompt"),
        ({"prompt": "x" * 50, "max_tokens": 51}, "context_length_exceeded", "max_tokens"),
        ({"prompt": "x" * 50, "max_tokens": 32}, "kv_capacity_exceeded", "max_tokens"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": -5}, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"min_tokens": -1}, "invalid_value", "min_tokens"),
        ({"min_tokens": 17}, "invalid_value", "min_tokens"),
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_p": -0.1}, "invalid_value", "top_p"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        ({"seed": 2**64}, "invalid_value", "seed"),
        ({"logit_bias": {"1": 1, "ab": 1}}, "invalid_value", "logit_bias"),
        ({"top_p": 1.1}, "invalid_value", "top_p"),
        ({"min_p": -0.1}, "invalid_value", "min_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a", ""]}, "invalid_value", "stop"),
        ({"stop": [1]}, "invalid_type", "stop"),
        ({"stop": ["a"] * 65}, "invalid_value", "stop"),
        ({"stop_token_ids": [266]}, "invalid_value", "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "invalid_type", "stop_token_ids"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"logprobs": -1}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_type", "logprobs"),
        ({"seed": 1.5}, "invalid_type", "seed"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"stream_options": {"include_usage": 3}}, "invalid_type", "stream_options"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": -1}, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": "a"}, "invalid_type", "repetition_penalty"),
        ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
        ({"presence_penalty": True}, "invalid_type", "presence_penalty"),
        ({"frequency_penalty": -2.1}, "invalid_value", "frequency_penalty"),
        ({"logit_bias": {"266": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": "a"}}, "invalid_type", "logit_bias"),
        ({"logit_bias": [5]}, "invalid_type", "logit_bias"),
        ({"bad_words": [""]}, "invalid_value", "bad_words"),
        ({"bad_words": ["a", "  "]}, "invalid_value", "bad_words"),
        ({"bad_words": "a"}, "invalid_type", "bad_words"),
        ({"bad_words": ["<|noise|>"]}, "invalid_value", "bad_words"),
        ({"bad_words": ["a"] * 1025}, "invalid_value", "bad_words"),
        ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [266]}, "invalid_value", "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "invalid_type", "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": True}, "invalid_type", "prompt_logprobs"),
        ({"echo": 1}, "invalid_type", "echo"),
        ({"echo": True, "max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"echo": True, "logprobs": 21}, "invalid_value", "logprobs"),
        ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 101}, "invalid_value", "truncate_prompt_tokens"),
    ],
)
def test_wrong_completions(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(completion, **fields)
    assert (error.status, error.code, error.param) == (400, code, param)
    assert param in error.message or code.endswith("exceeded")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": []}, "missing_field"),
        ({"messages": None}, "missing_field"),
        ({"messages": "hi"}, "invalid_type"),
        ({"messages": ["hi"]}, "invalid_type"),
        ({"messages": [{"content": "x"}]}, "invalid_type"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_parameter",
        ),
        ({"logprobs": 2}, "invalid_type"),
        ({"top_logprobs": 2}, "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value"),
        ({"suffix": "x"}, "unsupported_parameter"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "context_length_exceeded"),
    ],
)
def test_wrong_chats(fields: dict[str, Any], code: str) -> None:
    error = refusal(chat, **fields)
    assert (error.status, error.code) == (400, code)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b'{"a": NaN}',
        b'{"temperature": 1e999}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_a_400(raw: bytes) -> None:
    with client_error(status=400):
        completions.read(decode(raw), SERVED)


def test_another_model_is_a_404() -> None:
    error = refusal(completion, model="gpt-5")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_a_client_that_chose_none_sends_an_empty_name() -> None:
    assert completion(model="", prompt="words").prompts


def test_unknown_fields_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pageturner"):
        assert completion(frobnicate=1, prompt="secret words").prompts
    assert "frobnicate" in caplog.text
    assert "secret" not in caplog.text
