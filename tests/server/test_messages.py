"""Anthropic's API: its events in order, its blocks, its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.anthropic.messages import MESSAGES
from support.refusals import client_error

from .bytes_tokenizer import answer
from .conftest import Server, named_events
from .test_openai import SERVED

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|bos|>user\nhi<|end|>\n<|bos|>assistant\n"
PROMPT_TOKENS = 21


def call(**fields: Any) -> Any:
    raw = json.dumps({"max_tokens": 5, "messages": HI, **fields}).encode()
    return MESSAGES.read(MESSAGES.decode(raw, NO_LIMITS), SERVED)


def said(**fields: Any) -> str:
    return bytes(token for token in call(**fields).prompts[0] if token < 256).decode()


def refusal(**fields: Any) -> ClientError:
    with client_error() as caught:
        call(**fields)
    return caught.value


def test_a_message(server: Server) -> None:
    body = {"model": "fake", "messages": HI, "max_tokens": 9}
    response = server.http.post(PATH, json=body, headers={"x-request-id": "one-1"})
    assert response.json() == {
        "id": "msg_one-1",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": answer(PROMPT, 9)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": PROMPT_TOKENS - 16,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": 9,
        },
    }


def test_events_come_in_order(server: Server) -> None:
    told = named_events(
        server.http.post(PATH, json={"messages": HI, "max_tokens": 9, "stream": True})
    )
    kinds = [event["type"] for event in told]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = told[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    assert (
        start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == PROMPT_TOKENS
    )
    texts = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(texts) == answer(PROMPT, 9)
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 9


def test_why_a_message_ends(server: Server) -> None:
    text = answer(PROMPT, 40)

    def ends(**fields: Any) -> tuple[Any, ...]:
        whole = server.http.post(PATH, json={"messages": HI, "max_tokens": 40, **fields}).json()
        streamed = named_events(
            server.http.post(
                PATH, json={"messages": HI, "max_tokens": 40, "stream": True, **fields}
            )
        )
        deltas = [
            event["delta"]["text"] for event in streamed if event["type"] == "content_block_delta"
        ]
        assert "".join(deltas) == whole["content"][0]["text"]
        assert streamed[-2]["delta"]["stop_reason"] == whole["stop_reason"]
        return whole["stop_reason"], whole["stop_sequence"], whole["content"][0]["text"]

    assert ends(stop_sequences=["zzz", text[9:12]]) == ("stop_sequence", text[9:12], text[:9])
    assert ends(messages=[{"role": "user", "content": "<|short|>"}])[:2] == ("end_turn", None)


def test_contents_and_systems_of_all_kinds() -> None:
    block = {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}
    assert said(system="be") == "system\nbe\nuser\nhi\nassistant\n"
    assert said(system=[{"type": "text", "text": "one"}, block]).startswith("system\none\ntwo\n")
    messages = [
        {"role": "user", "content": [block]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, block]},
        {"role": "user", "content": "x"},
    ]
    assert said(messages=messages) == "user\ntwo\nassistant\ntwo\nuser\nx\nassistant\n"


def test_fields_reach_the_parameters() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "stop_sequences": ["x"],
        "max_tokens": 7,
    }
    params = call(
        **fields, thinking={"type": "disabled"}, metadata={"user_id": "me"}, tools=[]
    ).params[0]
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.5)
    assert (params.stop, params.max_tokens) == (("x",), 7)
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert call(output_config={"format": schema, "effort": "low"}).params[0].structured_outputs
    assert call(output_format=schema).params[0].structured_outputs


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"max_tokens": None}, "missing_field", "max_tokens"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"messages": None}, "missing_field", "messages"),
        ({"messages": []}, "missing_field", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "unsupported_parameter",
            "image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "unsupported_parameter",
            "doc",
        ),
        ({"system": [{"type": "tool_result"}]}, "unsupported_parameter", "tool_result"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
        ({"messages": 5}, "invalid_type", "messages"),
        ({"system": [{"type": "text"}]}, "invalid_type", "system[0].text"),
        ({"stop_sequences": [""]}, "invalid_value", "stop_sequences"),
        ({"stop_sequences": "x"}, "invalid_type", "stop_sequences"),
        ({"output_format": {"type": "xml"}}, "unsupported_parameter", "json_schema"),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "x"}}},
            "invalid_schema",
            "x",
        ),
        ({"model": "claude"}, "model_not_found", "claude"),
    ],
)
def test_refusals(fields: dict[str, Any], code: str, says: str) -> None:
    error = refusal(**fields)
    assert (error.code, says in error.message) == (code, True), error.message


def test_errors_have_their_shape(start: Callable[..., Server]) -> None:
    server = start("--api-key", "sesame", "--max-body-size", "9K")
    body = {"messages": HI, "max_tokens": 2}
    key = {"x-api-key": "sesame"}
    for response, status, kind in (
        (server.http.post(PATH, json=body), 401, "authentication_error"),
        (
            server.http.post(PATH, json=body, headers={"x-api-key": "wrong"}),
            401,
            "authentication_error",
        ),
        (server.http.post(PATH, json=body | {"model": "x"}, headers=key), 404, "not_found_error"),
        (server.http.post(PATH, json={}, headers=key), 400, "invalid_request_error"),
        (
            server.http.post(PATH, json=body | {"system": "x" * 9999}, headers=key),
            413,
            "request_too_large",
        ),
        (server.http.get(PATH, headers=key), 405, "invalid_request_error"),
    ):
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (
            status,
            "error",
            kind,
        )
        assert error["error"]["message"]
    assert server.http.post(PATH, json=body, headers=key).status_code == 200
    assert (
        server.http.post(PATH, json=body, headers={"authorization": "Bearer sesame"}).status_code
        == 200
    )
    doubled = [("x-api-key", "sesame"), ("x-api-key", "sesame")]
    assert (
        server.http.post(PATH, json=body, headers=doubled).json()["error"]["reason"]
        == "duplicate_header"
    )
    fails = body | {
        "messages": [{"role": "user", "content": "<|fail|>"}],
        "max_tokens": 9,
        "stream": True,
    }
    last = named_events(server.http.post(PATH, json=fails, headers=key))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_tokens_are_counted(server: Server) -> None:
    def count(**fields: Any) -> Any:
        response = server.http.post(
            f"{PATH}/count_tokens", json={"model": "fake", "messages": HI, **fields}
        )
        return response.json()

    assert count() == {"input_tokens": PROMPT_TOKENS}
    assert count(system="be") == {"input_tokens": PROMPT_TOKENS + len("<system\nbe>\n")}
    assert count(messages=[{"role": "user", "content": "x" * 6000}]) == {
        "input_tokens": PROMPT_TOKENS + 5998
    }
    assert count(tools=[{}])["error"]["type"] == "invalid_request_error"
    assert count(model="other")["error"]["type"] == "not_found_error"
