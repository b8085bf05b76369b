"""How messages reach a chat template: roles, content, calls and their results; and what tells formats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.files.gguf import open_gguf
from pageturner.serve import answer_grammar, completions, text_jobs
from pageturner.serve import chat as chats
from pageturner.serve.answer_grammar import formats_of
from pageturner.serve.body import RequestBody, decode
from pageturner.serve.call import Call, ServedModel
from pageturner.text import reasoning, tool_formats
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import template_messages
from support.vocabs import vocab_path

from .bytes_tokenizer import TEMPLATE, BytesTokenizer

WITH_TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages | tojson }}"
TOOLS = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": None}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": [1]}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}]}


def served(template: str = WITH_TOOLS, **more: Any) -> ServedModel:
    made = ChatTemplate(template, "<|bos|>", "<|end|>")
    return ServedModel("m", BytesTokenizer(), made, 4000, 4000, 266, **more)


def read(model: ServedModel, **fields: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return chats.read(decode(json.dumps(body).encode()), model)


def prompt(call: Call) -> str:
    return bytes(token for token in call.prompts[0] if token < 256).decode()


def test_the_messages_of_a_call_and_its_result() -> None:
    developer, asked, result = template_messages([{"role": "developer", "content": "Be."}, ASKED, RESULT])
    assert developer == {"role": "system", "content": "Be."}
    assert asked["content"] == ""
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": {"a": [1]}}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "ok"}


def test_results_go_with_the_call_where_the_template_wants_that() -> None:
    other = {"role": "tool", "tool_call_id": "x", "content": '{"t": 1}'}
    (message,) = template_messages([ASKED, RESULT, other], "{{ message.tool_responses }}")
    assert message["tool_responses"] == [
        {"name": "look", "response": "ok"},
        {"name": "unknown", "response": {"t": 1}},
    ]


def test_thoughts_of_former_turns_have_every_name() -> None:
    (message,) = template_messages([{"role": "assistant", "content": "a", "reasoning": "hm"}])
    assert message["reasoning_content"] == message["reasoning"] == message["thinking"] == "hm"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "owner", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match=r"messages\[0\]") as caught:
        template_messages([message])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_tools_are_shown_as_they_were_sent() -> None:
    call = read(served(), tools=TOOLS)
    text = prompt(call)
    shown = json.loads(text[: text.index("<tool_call>")])
    assert shown[0]["function"] == {
        "name": "look",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    assert call.answer is not None
    assert call.answer.tools == "hermes"
    assert "start: (until begun)* FREE" in str(call.params[0].structured_outputs)


def test_tokenize_sees_the_same_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    model = served()
    tokens = json.loads(text_jobs.tokenize(json.dumps(body).encode(), model, lambda _: None))["tokens"]
    assert tuple(tokens) == read(model, tools=TOOLS).prompts[0]


def test_with_the_choice_none_they_are_not() -> None:
    call = read(served(TEMPLATE), tools=TOOLS, tool_choice="none")
    assert prompt(call) == prompt(read(served(TEMPLATE)))
    assert (call.answer, call.params[0].structured_outputs) == (None, None)
    assert answer_grammar.asked(RequestBody(tools=TOOLS, tool_choice="none")) is None
    assert answer_grammar.asked(RequestBody(tools=TOOLS)) is not None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_unknown_format_is_a_400_that_names_the_flag(choice: str) -> None:
    with pytest.raises(ClientError, match=r"--tool-call-parser, one of .*hermes") as caught:
        read(served(TEMPLATE), tools=TOOLS, tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    known = read(served(TEMPLATE, tool_call_parser="llama3"), tools=TOOLS, tool_choice=choice)
    assert known.answer is not None
    assert known.answer.tools == "llama3"


def test_a_prompt_that_has_begun_the_thoughts_is_noticed() -> None:
    switch = "{{ messages[0].content }}<think>{% if enable_thinking is false %}</think>{% endif %}\n"
    for fields, thinking in (
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ):
        answer = read(served(switch), **fields).answer
        assert answer is not None
        assert (answer.reasoning, answer.thinking) == ("think", thinking)
    assert read(served(switch, reasoning_parser="none")).answer is None
    grammar = read(served(switch), response_format={"type": "json_object"}).params[0].structured_outputs
    assert "start: think_end WSP? answer" in str(grammar)
    off = {"reasoning_effort": "none", "response_format": {"type": "json_object"}}
    assert "think_end" not in str(read(served(switch), **off).params[0].structured_outputs)


def test_a_budget_needs_a_format_of_thoughts() -> None:
    with pytest.raises(ClientError, match=r"--reasoning-parser") as caught:
        read(served(), thinking_token_budget=3)
    assert (caught.value.status, caught.value.param) == (400, "thinking_token_budget")
    params = read(served("<think>"), max_reasoning_tokens=3).params[0]
    assert (params.max_thinking_tokens, params.thinking_begin) == (3, ())
    assert bytes(params.thinking_end) == b"</think>"


def test_completions_have_no_tools() -> None:
    for field, value in (("tools", TOOLS), ("tool_choice", "required"), ("thinking_token_budget", 3)):
        with pytest.raises(ClientError) as caught:
            completions.read(decode(json.dumps({"prompt": "x", field: value}).encode()), served())
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


def test_the_settings_are_the_formats() -> None:
    from pageturner.config import ServerConfig, choices_of, settings_of

    choices = {one.name: choices_of(one) for one in settings_of("server")}
    assert choices["tool_call_parser"] == ("auto", *tool_formats.NAMES)
    assert choices["reasoning_parser"] == ("auto", "none", *reasoning.NAMES)
    assert ServerConfig().tool_call_parser == ServerConfig().reasoning_parser == "auto"


def of_file(name: str) -> ChatTemplate:
    source = open_gguf(vocab_path(name)).get("tokenizer.chat_template", str)
    return ChatTemplate(source, "<bos>", "<eos>")


@pytest.mark.parametrize(
    ("name", "tools", "thoughts"),
    [
        ("qwen2.5-coder-0.5b-instruct-q4_k_m", "hermes", None),
        ("gemma-4", "gemma", "gemma"),
        ("command-r", None, None),
    ],
)
def test_the_formats_of_real_templates(name: str, tools: str | None, thoughts: str | None) -> None:
    model = replace(served(), template=of_file(name))
    found, thinks = formats_of(model).tools, formats_of(model).reasoning
    assert (found and found.name, thinks and thinks.name) == (tools, thoughts)


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        (
            "qwen2.5-coder-0.5b-instruct-q4_k_m",
            '<tool_call>\n{"name": "look", "arguments": {"a": [1]}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nok\n</tool_response>",
        ),
        (
            "gemma-4",
            '<|tool_call>call:look{a:[1]}<tool_call|><|tool_response>response:look{value:<|"|>ok<|"|>}',
        ),
    ],
)
def test_history_in_real_templates(name: str, rendered: str) -> None:
    template = of_file(name)
    user = {"role": "user", "content": "hi"}
    text = template.render(template_messages([user, ASKED, RESULT], template.source))
    assert rendered in text
