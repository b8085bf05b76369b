"""How messages reach a chat template: roles, content, calls and their results; and what tells formats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pageturner.formats.gguf import open_gguf
from pageturner.server.api.base import answer_grammar
from pageturner.server.api.base.answer_grammar import formats_of
from pageturner.server.api.base.body import RequestBody, decode
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.openai import chat as chats
from pageturner.server.api.openai import completions
from pageturner.server.text_workers import text_jobs
from pageturner.text import conversation, reasoning, tool_formats
from pageturner.text.answer_format import AnswerFormat
from pageturner.text.answer_format import read as parse
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import prompt_text
from support.refusals import client_error
from support.vocabs import vocab_path

from .bytes_tokenizer import TEMPLATE, BytesTokenizer
from .test_calls import said

WITH_TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages | tojson }}"
TOOLS = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": None}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": [1]}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}]}


def template_messages(
    messages: list[dict[str, Any]], template: ChatTemplate | None = None
) -> list[dict[str, Any]]:
    read = conversation.read_messages(messages)
    return conversation.template_messages(read, template, tools=True)


def served(template: str = WITH_TOOLS, **more: Any) -> ServedModel:
    made = ChatTemplate(template, "<|bos|>", "<|end|>")
    return ServedModel("m", BytesTokenizer(), made, 4000, 4000, 266, **more)


def read(model: ServedModel, **fields: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return chats.read(decode(json.dumps(body).encode()), model)


def prompt(call: Call) -> str:
    return bytes(token for token in call.prompts[0] if token < 256).decode()


def test_the_messages_of_a_call_and_its_result() -> None:
    developer, asked, result = template_messages(
        [{"role": "developer", "content": "Be."}, ASKED, RESULT]
    )
    assert developer == {"role": "system", "content": "Be."}
    assert asked["content"] == ""
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": {"a": [1]}}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "ok", "name": "look"}


RESPONSES = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% for r in m.tool_responses or [] %}{{ r | tojson }}{% endfor %}"
)


def test_results_go_with_the_call_where_the_template_wants_that() -> None:
    other = {"role": "tool", "tool_call_id": "x", "content": '{"t": 1}'}
    source = RESPONSES + "{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    (message,) = template_messages([ASKED, RESULT, other], ChatTemplate(source))
    assert message["tool_responses"] == [
        {"name": "look", "response": "ok"},
        {"name": "unknown", "response": {"t": 1}},
    ]


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
NAME, JSON = "[{{ c.function.name }}]", "{{ c.function.arguments | tojson }}"


@pytest.mark.parametrize(
    ("source", "arguments", "content"),
    [
        (CALLS.replace("%s", NAME + JSON), {"a": [1]}, ""),
        (CALLS.replace("%s", "{{ '(' + c.function.arguments + ')' }}"), '{"a": [1]}', ""),
        (CALLS.replace("%s", "{{ c.function.arguments }}"), '{"a": [1]}', ""),
        (
            CALLS.replace("%s", "{% if m.content is none %}" + JSON + "{% endif %}"),
            {"a": [1]},
            None,
        ),
        (
            CALLS.replace(
                "%s", "{% if m.content is none %}{{ '' + c.function.arguments }}{% endif %}"
            ),
            '{"a": [1]}',
            None,
        ),
        ("{{ raise_exception('never') }}", {"a": [1]}, ""),
    ],
)
def test_calls_are_given_as_the_template_writes_them(
    source: str, arguments: Any, content: Any
) -> None:
    (message,) = template_messages([ASKED], ChatTemplate(source))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert message["content"] == content


def test_calls_stand_in_the_content_where_the_template_has_no_place_for_them() -> None:
    asked = {**ASKED, "content": "Well."}
    for marks, text in (
        ("<tool_call>", '<tool_call>{"name": "look", "arguments": {"a": [1]}}</tool_call>'),
        ("<|tool_call|>", '<|tool_call|>[{"name": "look", "arguments": {"a": [1]}}]'),
        ("<|tool_list_start|>", "<|tool_call_start|>[look(a=[1])]<|tool_call_end|>"),
    ):
        source = f"{{{{ tools }}}}{marks}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
        (message,) = template_messages([asked], ChatTemplate(source))
        assert message["content"] == "Well." + text
    # its model's format is not known
    (message,) = template_messages(
        [asked], ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    assert (
        message["content"]
        == 'Well.<tool_call>{"name": "look", "arguments": {"a": [1]}}</tool_call>'
    )


@pytest.mark.parametrize("name", [name for name in tool_formats.NAMES if name != "harmony"])
def test_calls_that_are_written_are_read(name: str) -> None:
    given = [("look", {"a": [1, None, True], "b": {"c": 'x"\n{é'}}), ("wait", {})]
    format = tool_formats.tool_format(name)
    given = given if format.several else given[:1]
    *_, calls = said(parse(AnswerFormat(tools=name), conversation.written(format, given)))
    assert [(tool, json.loads(arguments)) for tool, arguments in calls] == given


def test_ids_are_short_where_the_template_takes_no_others() -> None:
    ids = "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    source = "{% for m in messages %}{{ m.content }}" + ids + JSON + "{% endfor %}{% endfor %}"
    asked, result = template_messages([ASKED, RESULT], ChatTemplate(source))
    assert len(asked["tool_calls"][0]["id"]) == 9
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]
    short = {**CALL, "id": "abcdefghi"}
    (asked,) = template_messages([{**ASKED, "tool_calls": [short]}], ChatTemplate(source))
    assert asked["tool_calls"][0]["id"] == "abcdefghi"


@pytest.mark.parametrize("refuses", [True, False])
def test_calls_stand_in_messages_of_their_own_where_a_template_writes_one(refuses: bool) -> None:
    once = (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('several') }}{% endif %}"
        if refuses
        else ""
    )
    source = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}" + once
    source += "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
    calls = [{**CALL, "id": f"call_{i}"} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"{i}"} for i in (2, 0, 1)]
    user = {"role": "user", "content": "hi"}
    made = template_messages(
        [{**ASKED, "content": "Well.", "tool_calls": calls}, *results, user], ChatTemplate(source)
    )
    said_of = [
        one["content"] if one["role"] != "assistant" else one["tool_calls"][0]["id"] for one in made
    ]
    assert said_of == ["call_0", "0", "call_1", "1", "call_2", "2", "hi"]
    assert [one["content"] for one in made[:5:2]] == ["Well.", "", ""]


def test_a_result_has_the_name_of_its_tool_and_no_calls_are_none() -> None:
    _, result, other = template_messages(
        [ASKED, RESULT, {**RESULT, "tool_call_id": "x"}], ChatTemplate(CALLS.replace("%s", JSON))
    )
    assert (result["name"], "name" in other) == ("look", False)
    (message,) = template_messages([{"role": "assistant", "content": "a", "tool_calls": []}])
    assert "tool_calls" not in message


def test_tools_are_told_to_the_user_where_a_template_knows_no_system() -> None:
    template = ChatTemplate(
        "{% for m in messages if m.role == 'user' %}U: {{ m.content }}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "look"}}
    told = prompt_text(template, [{"role": "user", "content": "Hm?"}], {"tools": [tool]})
    assert told.startswith("U: You may call these functions:")
    assert '"look"' in told
    assert told.endswith("Hm?")


def test_thoughts_of_former_turns_have_every_name() -> None:
    (message,) = template_messages([{"role": "assistant", "content": "a", "reasoning": "hm"}])
    assert message["reasoning_content"] == message["reasoning"] == message["thinking"] == "hm"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "own er", "content": "x"},
        {"role": "<|im_end|>", "content": "x"},
        {"role": "", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "user", "content": "x", "tool_calls": ""},
        {"role": "user", "content": "x", "tool_calls": {}},
        {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        {"role": "assistant", "function_call": "f"},
        {"role": "assistant", "function_call": {"arguments": "{}"}},
        {"role": "user"},
        {"role": "developer", "content": None},
        {"role": "tool"},
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any]) -> None:
    with client_error(r"messages\[0\]", status=400, param="messages"):
        template_messages([message])


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
    tokens = json.loads(text_jobs.tokenize(json.dumps(body).encode(), model, lambda _: None))[
        "tokens"
    ]
    assert tuple(tokens) == read(model, tools=TOOLS).prompts[0]


def test_with_the_choice_none_they_are_not() -> None:
    call = read(served(TEMPLATE), tools=TOOLS, tool_choice="none")
    assert prompt(call) == prompt(read(served(TEMPLATE)))
    assert (call.answer, call.params[0].structured_outputs) == (None, None)
    assert answer_grammar.asked(RequestBody(tools=TOOLS, tool_choice="none")) is None
    assert answer_grammar.asked(RequestBody(tools=TOOLS)) is not None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_unknown_format_is_a_400_that_names_the_flag(choice: str) -> None:
    with client_error(r"--tool-call-parser hermes, .*one of .*llama3", status=400, param="tools"):
        read(served(TEMPLATE), tools=TOOLS, tool_choice=choice)
    known = read(served(TEMPLATE, tool_call_parser="llama3"), tools=TOOLS, tool_choice=choice)
    assert known.answer is not None
    assert known.answer.tools == "llama3"


def test_a_prompt_that_has_begun_the_thoughts_is_noticed() -> None:
    switch = (
        "{{ messages[0].content }}<think>{% if enable_thinking is false %}</think>{% endif %}\n"
    )
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
    grammar = (
        read(served(switch), response_format={"type": "json_object"}).params[0].structured_outputs
    )
    assert "start: think_end WSP? answer" in str(grammar)
    always = "{{ messages[0].content }}<think>\n"  # whatever the client says
    for fields in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        call = read(served(always), response_format={"type": "json_object"}, **fields)
        assert call.answer is not None
        assert call.answer.thinking
        assert "start: think_end WSP? answer" in str(call.params[0].structured_outputs)
    off = {"reasoning_effort": "none", "response_format": {"type": "json_object"}}
    assert "think_end" not in str(read(served(switch), **off).params[0].structured_outputs)


def test_a_budget_needs_a_format_of_thoughts() -> None:
    with client_error(r"--reasoning-parser", status=400, param="thinking_token_budget"):
        read(served(), thinking_token_budget=3)
    params = read(served("<think>"), max_reasoning_tokens=3).params[0]
    assert (params.max_thinking_tokens, params.thinking_begin) == (3, ())
    assert bytes(params.thinking_end) == b"</think>"


def test_completions_have_no_tools() -> None:
    for field, value in (
        ("tools", TOOLS),
        ("tool_choice", "required"),
        ("thinking_token_budget", 3),
    ):
        with client_error(code="unsupported_parameter", param=field):
            completions.read(decode(json.dumps({"prompt": "x", field: value}).encode()), served())


def test_the_settings_are_the_formats() -> None:
    from pageturner.config.settings import ServerConfig, choices_of, settings_of

    choices = {one.name: choices_of(one) for one in settings_of("server")}
    assert choices["tool_call_parser"] == ("auto", *tool_formats.NAMES)
    assert choices["reasoning_parser"] == ("auto", "none", *reasoning.NAMES)
    assert ServerConfig().tool_call_parser == ServerConfig().reasoning_parser == "auto"


def of_file(name: str) -> ChatTemplate:
    source = open_gguf(vocab_path(name)).get("tokenizer.chat_template", str)
    return ChatTemplate(source, "<bos>", "<eos>")


@pytest.mark.model
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


@pytest.mark.model
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
    text = template.render(template_messages([user, ASKED, RESULT], template))
    assert rendered in text


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{# tool_calls #}",
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if tools %}{{ tool.name }}{% endif %}",
    ],
)
def test_tools_that_a_template_does_not_show_stand_in_a_system_message(source: str) -> None:
    tool = {"type": "function", "function": {"name": "peek", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hm?"}]
    for given in (messages, messages[1:]):
        text = conversation.prompt_text(
            ChatTemplate(source), given, conversation.variables([tool], None, None)
        )
        assert text.count('"peek"') == 1
        assert text.startswith("[system]")
        assert "<tool_call>" in text
        assert text.endswith("[user] Hm?")
