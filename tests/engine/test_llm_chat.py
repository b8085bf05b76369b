"""Chats of the library with tools and thoughts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pageturner import LLM, SamplingParams, StructuredOutputsParams
from pageturner.text.chat_request import ToolCall
from support.engines import GOLDENS
from support.refusals import client_error

HI = [{"role": "user", "content": "hello"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": CITY}}
WAIT = {"type": "function", "function": {"name": "wait"}}
PARSERS: Any = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(GOLDENS / "tiny_llama.gguf"))


def forced(llm: LLM, text: str) -> SamplingParams:
    ids = tuple(llm.encode(text))
    return SamplingParams(temperature=0.0, max_tokens=len(ids), force_ids=ids)


def test_thoughts_and_calls_stand_beside_the_text(llm: LLM) -> None:
    params = forced(llm, f"<think>\nHm.\n</think>\n\nWell.\n{CALL}{CALL}")
    answer = llm.chat(HI, params, tools=[LOOK, WAIT], **PARSERS).outputs[0]
    call = ToolCall("look", '{"city": "Bonn"}')
    assert (answer.reasoning, answer.text, answer.tool_calls) == ("Hm.", "Well.", (call, call))
    plain = llm.chat(HI, forced(llm, CALL), tools=[LOOK], tool_choice="none", **PARSERS).outputs[0]
    assert (plain.text, plain.tool_calls) == (CALL, ())
    assert llm.chat(HI, forced(llm, "Yes")).outputs[0].text == "Yes"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "wait"}}])
def test_a_call_that_must_be_is_valid(llm: LLM, choice: Any) -> None:
    for seed in range(3):
        params = SamplingParams(max_tokens=120, seed=seed)
        more = {**PARSERS, "reasoning_effort": "none", "parallel_tool_calls": False}
        answer = llm.chat(HI, params, tools=[LOOK, WAIT], tool_choice=choice, **more).outputs[0]
        if answer.finish_reason == "length":
            continue  # white space without end
        (call,) = answer.tool_calls
        assert call.name in ("look", "wait")
        assert call.name == "wait" or isinstance(choice, str)
        assert len(json.loads(call.arguments).get("city", "")) <= 4


def test_the_conversation_reaches_the_template(llm: LLM) -> None:
    told = [*HI, {"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    output = llm.chat(told, SamplingParams(max_tokens=1))
    said = llm.tokenizer.decode(output.prompt_token_ids, skip_special=False)
    assert "system\nbe brief" in said


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [LOOK]}, "tools"),
        ({"tools": [{}], **PARSERS}, "tools"),
        ({"tools": [LOOK], "tool_choice": "must", **PARSERS}, "tool_choice"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        (
            {
                "tools": [LOOK],
                "params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
            },
            "structured_outputs",
        ),
    ],
)
def test_what_is_wrong_is_said(llm: LLM, asked: dict[str, Any], param: str) -> None:
    with client_error(param=param):
        llm.chat(HI, **asked)


@pytest.mark.parametrize(("messages", "code"), [("hi", "invalid_value"), ([], "missing_field")])
def test_what_is_no_conversation_is_told(llm: LLM, messages: Any, code: str) -> None:
    with client_error("messages is a list of at least one", code=code):
        llm.chat(messages)
