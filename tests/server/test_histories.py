"""What clients of other shapes say of tools, thoughts and earlier turns, and the chat that it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.anthropic.messages import MESSAGES, count_tokens
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.translate import fields_of
from pageturner.server.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from pageturner.server.api.responses.response_items import offered_tools, opened, options_of, sealed
from pageturner.server.api.responses.responses import RESPONSES
from pageturner.text.chat_template import ChatTemplate
from support.refusals import client_error

from .test_openai import SERVED

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": SCHEMA},
}
WIDE = replace(SERVED, context=4000, capacity=4000, tool_call_parser="hermes")
SHOWS = ChatTemplate("{{ messages|tojson }}{{ tools|tojson }}{{ enable_thinking }}<think>")
THINKS = replace(WIDE, template=SHOWS, reasoning_parser="think")
HI = {"role": "user", "content": "hi"}


def decoded(dialect: Dialect, **fields: Any) -> Any:
    needed = {"messages": [HI], "max_tokens": 5} if dialect is MESSAGES else {"input": "hi"}
    return dialect.decode(json.dumps({**needed, **fields}).encode(), NO_LIMITS)


def refusal(dialect: Dialect, **fields: Any) -> ClientError:
    with client_error() as caught:
        dialect.read(decoded(dialect, **fields), WIDE)
    return caught.value


STRICT = ChatTemplate(
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('twice') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def test_conversations_of_agents_go_through_templates_that_know_only_turns() -> None:
    strict = replace(WIDE, template=STRICT)
    late = {"role": "system", "content": "new"}
    told = [HI, late, {"role": "assistant", "content": "so"}, late, HI]
    for dialect, fields in (
        (MESSAGES, {"messages": told, "system": "be"}),
        (RESPONSES, {"input": [{"role": "developer", "content": "be"}, *told]}),
    ):
        said = bytes(
            token for token in dialect.read(decoded(dialect, **fields), strict).prompts[0]
        ).decode()
        new = "<system>\nnew\n</system>"
        assert said == f"[system:be][user:hi\n\n{new}][assistant:so][user:{new}\n\nhi]"
    twice = {"role": "assistant", "content": "so"}
    with client_error("twice"):
        RESPONSES.read(
            decoded(RESPONSES, input=[HI, {"role": "assistant", "content": ""}, twice, twice]),
            strict,
        )
    raw = json.dumps({"messages": told}).encode()
    assert json.loads(count_tokens(raw, strict, lambda _: None))["input_tokens"] > 0


# -- Anthropic's ---------------------------------------------------------------------------------------------
TOOL = {
    "name": "look",
    "description": "d",
    "input_schema": SCHEMA,
    "cache_control": {"type": "ephemeral"},
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Bonn"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_tools_and_choices_of_anthropic(choice: Json, expected: Any) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    body = decoded(
        MESSAGES, tools=[TOOL, hosted], tool_choice={**choice, "disable_parallel_tool_use": True}
    )
    assert (body.tools, body.tool_choice, body.parallel_tool_calls) == (
        [CHAT_TOOL],
        expected,
        False,
    )
    MESSAGES.read(body, WIDE)


def test_turns_of_anthropic_become_messages() -> None:
    told = [
        {"role": "user", "content": [{"type": "text", "text": "where?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                USE,
                {**USE, "id": "toolu_2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "!"}],
                },
                {"type": "tool_result", "tool_use_id": "other"},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    calls = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": {"city": "Bonn"}}}
        for id in ("toolu_1", "toolu_2")
    ]
    turn = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": calls,
    }
    assert decoded(MESSAGES, messages=told, system=[{"type": "text", "text": "be"}]).messages == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "where?"},
        turn,
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sun", "name": "look"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: rain\n!", "name": "look"},
        {"role": "tool", "tool_call_id": "other", "content": ""},
        {"role": "user", "content": "so?"},
    ]


def test_a_header_among_the_system_blocks_is_none_of_the_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abcde;"}
    system = [header, {"type": "text", "text": "be"}]
    assert decoded(MESSAGES, system=system).messages[0] == {"role": "system", "content": "be"}
    assert decoded(MESSAGES, system=[header]).messages == [HI]


@pytest.mark.parametrize(
    ("fields", "effort", "budget", "switch"),
    [
        ({}, "none", None, False),
        ({"thinking": {"type": "disabled"}}, "none", None, False),
        ({"thinking": {"type": "adaptive"}}, None, None, None),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            "max",
            None,
            True,
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, None, 9, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "none", None, True),
    ],
)
def test_thinking(
    fields: Json, effort: str | None, budget: int | None, switch: bool | None
) -> None:
    body = decoded(MESSAGES, **fields)
    assert (body.reasoning_effort, body.thinking_token_budget) == (effort, budget)
    call = MESSAGES.read(body, THINKS)
    assert call.params[0].max_thinking_tokens == budget
    said = bytes(token for token in call.prompts[0] if token < 256).decode()
    assert said.endswith(f"{'' if switch is None else switch}<think>")


def test_a_budget_holds_for_a_model_that_does_not_think() -> None:
    body = decoded(MESSAGES, thinking={"type": "enabled", "budget_tokens": 9})
    assert MESSAGES.read(body, WIDE).params[0].max_thinking_tokens is None


def test_max_tokens_may_be_more_than_there_is_room_for() -> None:
    call = MESSAGES.read(decoded(MESSAGES, max_tokens=32_000), SERVED)
    assert call.params[0].max_tokens == 81 - len(call.prompts[0])
    long = [{"role": "user", "content": "x" * 200}]
    with client_error(
        "prompt is too long: This model's maximum context length",
        code="context_length_exceeded",
        param="messages",
    ):
        MESSAGES.read(decoded(MESSAGES, messages=long), SERVED)


def test_what_agents_send_beside_all_that_is_taken() -> None:
    fields = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1"},
        "betas": ["x"],
        "output_config": {"effort": "high"},
        "cache_control": {"type": "ephemeral"},
        "tool_choice": {"type": "auto"},
        "tools": [],
    }
    MESSAGES.read(decoded(MESSAGES, **fields), WIDE)


def test_tools_are_counted() -> None:
    def count(**fields: Any) -> int:
        raw = json.dumps({"messages": [HI], **fields}).encode()
        return int(json.loads(count_tokens(raw, THINKS, lambda _: None))["input_tokens"])

    assert count(tools=[TOOL]) > count() + len('"description": "d"')
    assert count(tools=[TOOL], tool_choice={"type": "none"}) == count()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"tools": [{"name": "f"}]},
            "tools",
            "tools[0]: send a name, a description and an input_schema",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools",
            "'bash_20250124' are not known",
        ),
        ({"tools": [{"name": "f", "input_schema": {"type": "x"}}]}, "tools", "object"),
        ({"tools": [TOOL, TOOL]}, "tools", "two tools"),
        ({"tools": 5}, "tools", "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "tool_choice is one of"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice", "'g'"),
        ({"thinking": {"type": "often"}}, "thinking", "enabled, adaptive or disabled"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": "x"}},
            "thinking.budget_tokens",
            "thinking",
        ),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages", "'tool_use'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages",
            "tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": 5}]}, HI]},
            "messages",
            "input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "name": 5}]}, HI]},
            "messages",
            "name",
        ),
    ],
)
def test_refusals_of_anthropic(fields: Json, param: str, says: str) -> None:
    error = refusal(MESSAGES, **fields)
    assert (error.param, says in error.message) == (param, True), error.message


# -- Ollama's ------------------------------------------------------------------------------------------------
def test_turns_of_ollama_become_messages() -> None:
    call = {"function": {"name": "look", "arguments": {"city": "Bonn"}}}
    told = [
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "look", "content": "sun"},
    ]
    body = OLLAMA_CHAT.decode(
        json.dumps({"messages": told, "tools": [CHAT_TOOL]}).encode(), NO_LIMITS
    )
    assert body.messages == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "sun"},
    ]
    assert body.tools == [CHAT_TOOL]
    OLLAMA_CHAT.read(body, WIDE)


@pytest.mark.parametrize(
    ("think", "switch", "effort"),
    [(None, "", None), (True, "True", None), (False, "False", "none"), ("low", "True", "low")],
)
def test_think(think: Any, switch: str, effort: str | None) -> None:
    for dialect, asked in ((OLLAMA_CHAT, {"messages": [HI]}), (OLLAMA_GENERATE, {"prompt": "hi"})):
        body = dialect.decode(json.dumps({**asked, "think": think}).encode(), NO_LIMITS)
        assert body.reasoning_effort == effort
        said = bytes(
            token for token in dialect.read(body, THINKS).prompts[0] if token < 256
        ).decode()
        assert said.endswith(f"null{switch}<think>")
        if think:
            with client_error("think: it is not known how this model thinks"):
                dialect.read(body, WIDE)


# -- /v1/responses -------------------------------------------------------------------------------------------
FUNCTION = {"type": "function", "name": "look", "description": "d", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
SPACE = {"type": "namespace", "name": "mcp__git__", "tools": [FUNCTION, CUSTOM]}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        ({"type": "function", "name": "look"}, named("look")),
        ({"type": "custom", "name": "patch"}, named("patch")),
        ({"type": "function", "name": "look", "namespace": "mcp__git__"}, named("mcp__git__look")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [named("look")]},
            },
        ),
    ],
)
def test_tools_and_choices_of_responses(choice: Any, expected: Any) -> None:
    hosted = {"type": "web_search", "external_web_access": False}
    body = decoded(
        RESPONSES,
        tools=[FUNCTION, CUSTOM, hosted, SPACE],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    names = [tool["function"]["name"] for tool in body.tools]
    assert names == ["look", "patch", "mcp__git__look", "mcp__git__patch"]
    assert (body.tools[0], body.tool_choice, body.parallel_tool_calls) == (
        CHAT_TOOL,
        expected,
        False,
    )
    assert RESPONSES.read(body, WIDE).params[0].structured_outputs is not None


def test_allowed_tools_are_the_only_ones_to_be_called_and_all_are_shown() -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "look"}]}
    body = decoded(RESPONSES, tools=[FUNCTION, CUSTOM], tool_choice=allowed)
    call = RESPONSES.read(body, replace(THINKS, reasoning_parser="none"))
    assert "patch" not in str(call.params[0].structured_outputs)
    assert "look" in str(call.params[0].structured_outputs)
    assert b"patch" in bytes(token for token in call.prompts[0] if token < 256)


def test_custom_tools_are_functions_of_one_text() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools = decoded(
        RESPONSES, tools=[{**CUSTOM, "format": GRAMMAR}, {**CUSTOM, "format": regex}]
    ).tools
    told, held = (tool["function"] for tool in tools)
    assert 'start: "a"' in told["description"]
    assert told["parameters"]["properties"] == {"input": {"type": "string"}}
    assert held["parameters"]["properties"]["input"]["pattern"] == "^(?:a+)$"
    assert held["strict"] is True
    for definition, taken in (("a+", True), ("a(", False)):
        tool = {**CUSTOM, "format": {**regex, "definition": definition}}
        body = decoded(RESPONSES, tools=[tool], tool_choice="required")
        if taken:
            assert '"pattern": "^(?:a+)$"' in str(
                RESPONSES.read(body, WIDE).params[0].structured_outputs
            )
        else:
            with client_error("tools: the parameters of 'patch'"):
                RESPONSES.read(body, WIDE)


@pytest.mark.parametrize(
    ("dialect", "kind"), [(RESPONSES, "web_search"), (MESSAGES, "web_search_20250305")]
)
def test_what_is_passed_over_is_said_once(
    dialect: Dialect, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="pageturner"):
        decoded(dialect, tools=[{"type": kind, "name": "s"}] * 3)
    assert [kind in record.getMessage() for record in caplog.records] == [True]


def test_what_is_passed_over_is_not_among_the_tools_that_an_answer_repeats() -> None:
    tools = [FUNCTION, {"type": "web_search"}, {**CUSTOM, "format": GRAMMAR}, SPACE]
    fields = fields_of(json.dumps({"tools": tools}).encode(), NO_LIMITS)
    assert json.loads(bytes(offered_tools(fields))) == [FUNCTION, CUSTOM, SPACE]
    options = options_of(fields)
    assert options.custom == {"patch", "mcp__git__patch"}
    assert options.spaces["mcp__git__look"] == ("mcp__git__", "look")


def test_items_become_messages() -> None:
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "look",
        "arguments": '{"city": "Bonn"}',
    }
    items = [
        {"role": "user", "content": "where?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        call,
        {
            "type": "custom_tool_call",
            "call_id": "c2",
            "name": "patch",
            "input": "x",
            "namespace": "git",
        },
        {"type": "web_search_call", "status": "completed"},
        {
            "type": "function_call",
            "call_id": "c3",
            "name": "look",
            "arguments": "{",
            "status": "incomplete",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "y"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "well"}]},
        call,
        {"type": "function_call_output", "call_id": "c9", "output": ""},
        {"type": "reasoning", "summary": [], "encrypted_content": "another's"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("nobody answers")},
        {"type": "agent_message", "content": [{"type": "input_text", "text": "so?"}]},
    ]
    function = {"name": "look", "arguments": '{"city": "Bonn"}'}
    first = {"id": "c1", "type": "function", "function": function}
    second = {
        "id": "c2",
        "type": "function",
        "function": {"name": "git__patch", "arguments": {"input": "x"}},
    }
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    assert decoded(RESPONSES, input=items).messages == [
        {"role": "user", "content": "where?"},
        {**turn, "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun", "name": "look"},
        {"role": "tool", "tool_call_id": "c2", "content": "y", "name": "git__patch"},
        {"role": "assistant", "content": "", "reasoning_content": "well", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "c9", "content": ""},
        {"role": "user", "content": "so?"},
    ]


def test_thoughts_come_back_as_they_were_given() -> None:
    assert opened(sealed("hm é")) == "hm é"
    assert opened(sealed("hm")[:-1]) == opened("pageturner:é") == opened(5) == ""


def test_what_codex_sends_is_taken() -> None:
    fields = {
        "instructions": "be",
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "client_metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_retention": "24h",
    }
    body = decoded(RESPONSES, **{name: value for name, value in fields.items() if name != "store"})
    assert body.reasoning_effort == "high"
    RESPONSES.read(body, WIDE)
    options = options_of(fields_of(json.dumps(fields).encode(), NO_LIMITS))
    assert (options.summary, options.encrypted) == (True, True)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools", "'file_search'"),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools", "'mcp'"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [5]}]},
            "tools",
            "tools[0].tools[0]",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "'namespace'"),
        (
            {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "abnf"}}]},
            "tools",
            "lark or regex",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "tool_choice is",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": []}},
            "tool_choice",
            "",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort is one of"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input", "arguments"),
        ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input", "input[0].content.text"),
    ],
)
def test_refusals_of_responses(fields: Json, param: str, says: str) -> None:
    error = refusal(RESPONSES, **fields)
    assert (error.param, says in error.message) == (param, True), error.message
