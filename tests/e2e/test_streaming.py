"""Every sampling parameter, through a real server on a tiny model: completions and chats, streamed and not,
and LLM, all give the same answer; and it is not the answer without the parameter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner import LLM, SamplingParams, StructuredOutputsParams
from support.hf_folder import make_folder
from support.servers import serving

PROMPT = "the old house, the old"
MESSAGES = [{"role": "user", "content": PROMPT}]
BASE: dict[str, Any] = {"max_tokens": 24, "seed": 7, "ignore_eos": True}
ENDPOINTS = ["completions", "chat/completions"]


@dataclass
class Answer:
    """What a client sees of an answer, however it came."""

    text: str
    token_ids: list[int]
    finish: str
    reason: str | int | None
    usage: dict[str, Any]
    logprobs: Any = None
    prompt_logprobs: Any = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("streaming") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), backend="reference")


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with serving(folder, "--backend", "reference") as client:
        yield client


def body_of(endpoint: str, asked: dict[str, Any]) -> dict[str, Any]:
    content = {"messages": MESSAGES} if "chat" in endpoint else {"prompt": PROMPT}
    return {**content, **BASE, "return_token_ids": True, **asked}


def whole(http: httpx.Client, endpoint: str, asked: dict[str, Any]) -> Answer:
    response = http.post(f"/v1/{endpoint}", json=body_of(endpoint, asked))
    assert response.status_code == 200, response.text
    body = response.json()
    (choice,) = body["choices"]
    return Answer(
        choice["message"]["content"] if "chat" in endpoint else choice["text"],
        choice["token_ids"],
        choice["finish_reason"],
        choice["stop_reason"],
        body["usage"],
        choice["logprobs"],
        body.get("prompt_logprobs", choice.get("prompt_logprobs")),
    )


def streamed(http: httpx.Client, endpoint: str, asked: dict[str, Any]) -> Answer:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    response = http.post(f"/v1/{endpoint}", json=body_of(endpoint, asked) | more)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line[:1] == "d"]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    chat = "chat" in endpoint
    first = chunks[0] if chat else choices[0]
    return Answer(
        "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices),
        [token for c in choices for token in c.get("token_ids") or ()],
        choices[-1]["finish_reason"],
        choices[-1]["stop_reason"],
        chunks[-1]["usage"],
        joined([c["logprobs"] for c in choices if c.get("logprobs")]),
        first.get("prompt_logprobs"),
    )


def joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Logprobs of chunks, as one answer has them."""
    return {key: [x for part in parts for x in part[key]] for key in parts[0]} if parts else None


def offline(llm: LLM, endpoint: str, asked: dict[str, Any]) -> list[Answer]:
    """From LLM, at once and streamed. Logprobs are compared where both are HTTP."""
    known = {field.name for field in fields(SamplingParams)}
    given = {
        "stop_ids" if name == "stop_token_ids" else name: v for name, v in (BASE | asked).items()
    }
    given = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if name in known
    }
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    given |= {"logprobs": None}
    params, prompt = (
        SamplingParams(**given),
        llm.chat_tokens(MESSAGES) if "chat" in endpoint else PROMPT,
    )
    pieces, stream = [], llm.stream(prompt, params)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            outputs = [llm.generate([prompt], params)[0], end.value]
            break
    assert "".join(pieces) == outputs[1].outputs[0].text
    return [
        Answer(
            a.text,
            a.token_ids,
            str(a.finish_reason),
            a.stop_reason,
            {"prompt_tokens": len(o.prompt_token_ids), "completion_tokens": len(a.token_ids)},
        )
        for o in outputs
        for a in o.outputs
    ]


ECHOED = "Well, "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "maximum": 200},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
Fields = Callable[[Answer], dict[str, Any]]
# What is asked for, given the answer without it. Stop strings begin and end inside of tokens.
PARAMETERS: dict[str, Fields] = {
    "stop": lambda plain: {"stop": plain.text[5:9]},
    "several stops": lambda plain: {
        "stop": ["never there", plain.text[11:14], plain.text[7:12], "\x00\x00"]
    },
    "include_stop_str_in_output": lambda plain: {
        "stop": [plain.text[7:12]],
        "include_stop_str_in_output": True,
    },
    "stop_token_ids": lambda plain: {"stop_token_ids": [300, plain.token_ids[6]]},
    "min_tokens": lambda plain: {"stop_token_ids": list(range(3, 320, 2)), "min_tokens": 12},
    "min_tokens and stop": lambda plain: {"stop": list(set(plain.text)), "min_tokens": 9},
    "bad_words": lambda plain: {
        "bad_words": sorted({c for c in plain.text if c.isascii() and c.isalpha()})
    },
    "allowed_token_ids": lambda plain: {"allowed_token_ids": list(range(3, 259, 2))},
    "logit_bias": lambda plain: {"logit_bias": {str(plain.token_ids[0]): -100, "70": 3.5}},
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.8},
    "presence_penalty": lambda plain: {"presence_penalty": 2.0},
    "frequency_penalty": lambda plain: {"frequency_penalty": 2.0},
    "truncate_prompt_tokens": lambda plain: {"truncate_prompt_tokens": 5},
    "prompt_logprobs": lambda plain: {"prompt_logprobs": 2},
    "max_tokens": lambda plain: {"max_tokens": 9},
    "json": lambda plain: {
        "structured_outputs": {"json": SCHEMA},
        "ignore_eos": False,
        "max_tokens": 99,
    },
    "regex": lambda plain: {
        "structured_outputs": {"regex": "[a-z é東]{4,40}"},
        "ignore_eos": False,
    },
    "end of sequence": lambda plain: {"ignore_eos": False, "logit_bias": {"2": 6.0}},
}
ONLY_HTTP: dict[str, Fields] = {
    "logprobs": lambda plain: {"logprobs": 2},
    "echo": lambda plain: {"echo": True},
    "echo and logprobs": lambda plain: {"echo": True, "logprobs": 1, "truncate_prompt_tokens": 9},
    "skip_special_tokens": lambda plain: {"skip_special_tokens": False, "logit_bias": {"1": 100}},
}


@pytest.fixture(scope="module")
def plain(http: httpx.Client) -> Callable[[str, float], Answer]:
    """The answer that nothing was asked of."""
    return cache(lambda endpoint, temperature: whole(http, endpoint, {"temperature": temperature}))


def fields_of(parameter: str, endpoint: str, temperature: float, without: Answer) -> dict[str, Any]:
    asked = {**PARAMETERS, **ONLY_HTTP}[parameter](without) | {"temperature": temperature}
    if "chat" in endpoint and "logprobs" in asked:
        asked |= {"logprobs": True, "top_logprobs": asked["logprobs"]}
    if "chat" in endpoint and "echo" in parameter:  # what is gone on with
        last = {"role": "assistant", "content": ECHOED}
        asked |= {"messages": [*MESSAGES, last], "continue_final_message": True}
        asked |= {"add_generation_prompt": False}
    return asked


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("parameter", [*PARAMETERS, *ONLY_HTTP])
def test_streamed_and_not_are_the_same_answer(
    http: httpx.Client,
    llm: LLM,
    plain: Callable[[str, float], Answer],
    parameter: str,
    endpoint: str,
    temperature: float,
) -> None:
    without = plain(endpoint, temperature)
    asked = fields_of(parameter, endpoint, temperature, without)
    answer = whole(http, endpoint, asked)
    assert streamed(http, endpoint, asked) == answer
    assert answer != without, "the parameter changes something"
    assert answer.text.startswith(ECHOED if "messages" in asked else "")
    assert ("stop" in asked or "stop_token_ids" in asked) == (answer.reason is not None)
    if parameter in PARAMETERS:
        for other in offline(llm, endpoint, asked):
            assert (other.text, other.token_ids) == (answer.text, answer.token_ids)
            assert (other.finish, other.reason) == (answer.finish, answer.reason)
            assert all(answer.usage[name] == count for name, count in other.usage.items())


@pytest.mark.slow
def test_a_bad_schema_is_refused_with_its_code(http: httpx.Client) -> None:
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
    }
    for endpoint in ENDPOINTS:
        for stream in (False, True):
            body = body_of(endpoint, {**asked, "ignore_eos": False, "stream": stream})
            refused = http.post(f"/v1/{endpoint}", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["reason"]) == (400, "invalid_schema")
            assert "objekt" in error["message"]
