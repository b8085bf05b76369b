"""Grammars of tools: what is held to one is a call that the parser reads, and text around calls is free.

Most of it is done with bytes as tokens, so that no vocabulary is needed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.text import tools
from pageturner.text.answer_format import AnswerFormat, read
from pageturner.text.argument_rules import property_types
from pageturner.text.call_parser import first_text, parts_of
from pageturner.text.grammar.check import byte_tokens, compiled, wrong_with
from pageturner.text.reasoning import reasoning_format
from pageturner.text.tool_formats import FORMATS, ToolFormat, tool_format
from pageturner.text.tool_grammar import (
    check_tools,
    no_control,
    tool_grammar,
    with_thoughts,
    without_thoughts,
)
from support.refusals import client_error

from .test_calls import said

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "units": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/place"},
        "only": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": ["number", "null"]}},
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get"}},
]
TYPES = {"get_weather": property_types(WEATHER)}
PATTERNED = [one for one in FORMATS if one.calls]


def choice(asked: Any, parallel: bool | None = None, **more: Any) -> tools.ToolChoice:
    return tools.read(more.get("tools", TOOLS), asked, parallel)


def walk(grammar: str, seed: int, begin: str = "") -> str:
    """A random text that the grammar allows, one that hurries to its end."""
    assert wrong_with(grammar) is None, grammar
    matcher, draw = compiled(byte_tokens(), grammar), random.Random(seed)
    text = begin.encode()
    assert matcher.try_consume_tokens(list(text)) == len(text), begin
    for _ in range(1500):
        if matcher.is_accepting() and (draw.random() < 0.6 or matcher.is_stopped()):
            return text.decode("utf-8", "replace")
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8, 32)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert allowed, text
        wanted = hurrying(text)
        ends = [token for token in wanted if token in allowed]
        printable = [token for token in allowed if 32 < token < 127] or allowed
        token = draw.choice(
            ends if ends and draw.random() < (0.95 if len(wanted) == 1 else 0.4) else printable
        )
        assert matcher.try_consume_tokens([token]) == 1
        text += bytes([token])
    raise AssertionError(f"no end: {text[:300]!r}")


def hurrying(text: bytes) -> bytes:
    """What brings an end nearer: the next character of the mark behind Gemma's strings, and brackets."""
    mark = b'<|"|>'
    begun = max(n for n in range(len(mark)) if text.endswith(mark[:n]))
    return mark[begun : begun + 1] if begun else b'"}])><'


def fits(name: str, arguments: str) -> bool:
    """Whether these are arguments of this tool."""
    given = json.loads(arguments)
    if name == "get":
        return bool(given == {})
    place = given.pop("at")
    return (
        name == "get_weather"
        and set(given) <= {"city", "days", "units", "only"}
        and isinstance(given["city"], str)
        and isinstance(given.get("days", 1), int)
        and given.get("units", "C") in ("C", "F")
        and all(isinstance(one, bool) for one in given.get("only", []))
        and set(place) <= {"x"}
        and isinstance(place.get("x"), int | float | None)
    )


@pytest.mark.parametrize("format", PATTERNED, ids=lambda one: one.name)
@pytest.mark.parametrize(
    "asked", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_what_is_required_is_a_call(format: ToolFormat, asked: Any) -> None:
    grammar = tool_grammar(format, choice(asked), no_control)
    for seed in range(6):
        text = walk(grammar, seed)
        thoughts, content, calls = said(read(AnswerFormat(tools=format.name, types=TYPES), text))
        assert calls, text
        assert (thoughts, content) == ("", ""), text
        assert all(fits(*call) for call in calls), text
        assert asked == "required" or [name for name, _ in calls] == ["get_weather"]


@pytest.mark.parametrize("format", PATTERNED, ids=lambda one: one.name)
def test_a_call_that_has_begun_goes_on_as_one(format: ToolFormat) -> None:
    grammar = tool_grammar(format, choice("auto"), no_control)
    begin = {
        "llama3": '{"name": "get"',
        "json": '```json\n{"name": "get"',
        "pythonic": "[get_weather(",
        "functionary_v32": "get_weather\n",
        "xlam": '[{"name": "get_weather"',
        "glm4": "get_weather\n",
    }.get(format.name)
    begin = begin or "Well. " + first_text(parts_of(format.opening + format.calls[0]))
    for seed in range(3):
        text = walk(grammar, seed, begin)
        _, content, calls = said(read(AnswerFormat(tools=format.name, types=TYPES), text))
        assert calls or any(name in text for name in format.direct), text
        assert all(fits(*call) for call in calls), text
        assert content.startswith("Well.") or format.at_start


@pytest.mark.parametrize("format", PATTERNED, ids=lambda one: one.name)
def test_without_a_call_every_text_is_possible(format: ToolFormat) -> None:
    matcher = compiled(byte_tokens(), tool_grammar(format, choice("auto"), no_control))
    text = 'Hm. {"a": [1]} <b> [x](y) é\n\n```json\n{}\n``` func('.encode()
    assert matcher.try_consume_tokens(list(text)) == len(text)
    assert matcher.is_accepting()


def test_a_model_may_say_that_it_answers_directly() -> None:
    """Only where no call is asked for; where a tool has that name it is a call of this tool."""
    format, name = tool_format("command_r"), "directly-answer"
    text = f'Action: ```json [{{"tool_name":"{name}","parameters":{{"a":"Hi"}}}}]```'
    for asked, taken in ((None, True), ("required", False)):
        matcher = compiled(byte_tokens(), tool_grammar(format, choice(asked), no_control))
        assert bool(matcher.consume_tokens(list(text.encode()))) == taken
    found = [said(read(AnswerFormat(tools="command_r", names=one), text)) for one in ((), (name,))]
    assert found == [("", "Hi", []), ("", "", [(name, '{"a":"Hi"}')])]


def test_one_call_where_only_one_is_wanted() -> None:
    call = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    for asked, several, taken in (
        ("auto", True, 2),
        ("auto", False, 1),
        ("required", None, 2),
        ("required", False, 1),
    ):
        grammar = tool_grammar(tool_format("hermes"), choice(asked, several), no_control)
        matcher = compiled(byte_tokens(), grammar)
        assert matcher.try_consume_tokens(list((call * 2).encode())) == taken * len(call)
        assert matcher.is_accepting()


def test_a_tool_that_is_not_there_cannot_be_called() -> None:
    matcher = compiled(
        byte_tokens(), tool_grammar(tool_format("hermes"), choice("auto"), no_control)
    )
    known = '<tool_call>{"name": "get'
    assert matcher.try_consume_tokens(list((known + "s").encode())) == len(known)


def test_marks_that_are_control_tokens_are_those() -> None:
    grammar = tool_grammar(
        tool_format("mistral"), choice("auto"), {"[TOOL_CALLS]": 300, "[ARGS]": 301}.get
    )
    assert "FREE <[300]> begun" in grammar
    assert 'begun: ("get_weather" <[301]> args0 | ' in grammar
    assert "[TOOL_CALLS]" not in grammar.partition("call: ")[0]


def test_harmony_calls_on_its_channel() -> None:
    marks = {
        "<|channel|>": 300,
        "<|message|>": 301,
        "<|end|>": 302,
        "<|start|>": 303,
        "<|constrain|>": 304,
    }
    grammar = tool_grammar(tool_format("harmony"), choice("required"), marks.get)
    head = 'call0: <[300]> "commentary to=functions.get_weather" '
    assert head + '(WS? <[304]> "json" | WS "json"?)? <[301]> args0' in grammar
    assert '"final"' not in grammar
    assert '"final"' in tool_grammar(tool_format("harmony"), choice("auto"), marks.get)


@pytest.mark.parametrize("asked", ["required", "auto"])
def test_harmony_where_its_marks_are_plain_text(asked: str) -> None:
    grammar = tool_grammar(tool_format("harmony"), choice(asked), no_control)
    thought = "<|channel|>analysis<|message|>Hm <|.<|end|><|start|>assistant"
    for head in (
        "<|channel|>commentary to=functions.get <|constrain|>json<|message|>",
        " to=functions.get<|channel|>commentary json<|message|>",
    ):
        matcher, text = compiled(byte_tokens(), grammar), thought + head + "{}"
        assert matcher.try_consume_tokens(list(text.encode())) == len(text)
        assert matcher.is_accepting()
        assert said(read(AnswerFormat(tools="harmony"), text)) == ("Hm <|.", "", [("get", "{}")])
    glued = "<|channel|>commentary to=functions.getjson"  # which would be another name
    assert (
        compiled(byte_tokens(), grammar).try_consume_tokens(list(glued.encode())) == len(glued) - 4
    )
    matcher, text = compiled(byte_tokens(), grammar), "<|channel|>final<|message|>x <|channel|>"
    assert matcher.try_consume_tokens(list(text.encode())) == (
        11 if asked == "required" else len(text) - 1
    )


def test_an_answer_has_its_form_or_is_a_call() -> None:
    answer = 'start: %json {"type": "object", "required": ["ok"]}'
    grammar = tool_grammar(tool_format("hermes"), choice("auto"), no_control, answer)
    for text, whole in (
        ('{"ok": 1}', True),
        ('<tool_call>{"name": "get", "arguments": {}}</tool_call>', True),
        ("no", False),
    ):
        matcher = compiled(byte_tokens(), grammar)
        assert (matcher.try_consume_tokens(list(text.encode())) == len(text)) == whole, text
        assert matcher.is_accepting() == whole


@pytest.mark.parametrize(("thinking", "begin"), [(False, "<think>"), (True, "")])
def test_an_answer_may_think_before_its_grammar(thinking: bool, begin: str) -> None:
    inner = tool_grammar(tool_format("hermes"), choice("required"), no_control)
    grammar = with_thoughts(inner, reasoning_format("think"), thinking, no_control)
    assert without_thoughts(grammar) == inner
    assert without_thoughts(inner) == inner
    text = (
        begin
        + 'what <tool_call> is\n</think>\n<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    )
    matcher = compiled(byte_tokens(), grammar)
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    assert matcher.is_accepting()
    format = AnswerFormat(tools="hermes", reasoning="think", thinking=thinking)
    assert said(read(format, text)) == ("what <tool_call> is", "", [("get", "{}")])


def test_little_white_space_stands_in_front_of_thoughts() -> None:
    """A budget counts from their beginning, which it looks for where the answer begins."""
    inner = tool_grammar(tool_format("hermes"), choice("required"), no_control)
    matcher = compiled(
        byte_tokens(), with_thoughts(inner, reasoning_format("think"), False, no_control)
    )
    assert matcher.try_consume_tokens(list(b"\n\n \t\n")) == 4


def test_an_answer_has_its_form_behind_thoughts() -> None:
    answer = 'start: %json {"type": "object", "required": ["ok"]}'
    inner = tool_grammar(tool_format("hermes"), choice("auto"), no_control, answer)
    grammar = with_thoughts(inner, reasoning_format("think"), False, no_control)
    for text in (
        '{"ok": 1}',
        '<think>{</think>\n{"ok": 1}',
        '<tool_call>{"name": "get", "arguments": {}}</tool_call>',
    ):
        matcher = compiled(byte_tokens(), grammar)
        assert matcher.try_consume_tokens(list(text.encode())) == len(text), text
        assert matcher.is_accepting()


def tool(parameters: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


@pytest.mark.parametrize(
    ("parameters", "strict", "code"),
    [
        ({"properties": {"a": {"type": "colour"}}}, False, "invalid_schema"),
        (
            {"properties": {"a": {"format": "no such format", "type": "string"}}},
            True,
            "unsupported_schema",
        ),
        ({"properties": {"a": {"format": "no such format", "type": "string"}}}, False, None),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, True, "unsatisfiable_schema"),
        (None, True, None),
        ({}, False, None),
    ],
)
def test_schemas_are_checked_at_the_door(parameters: Any, strict: bool, code: str | None) -> None:
    asked = choice("auto", tools=tool(parameters, strict=strict))
    if code is None:
        check_tools(tool_format("hermes"), asked)
        return
    with client_error("tools: the parameters of 'f'", code=code, param="tools"):
        check_tools(tool_format("hermes"), asked)


@pytest.mark.parametrize("name", ["gemma", "pythonic"])
def test_a_schema_that_a_way_of_writing_cannot_hold_is_refused(name: str) -> None:
    for parameters in (
        {"properties": {"a b": {}}, "required": ["a b"]},
        {"properties": {"a": {"$ref": "https://elsewhere"}}},
    ):
        with client_error(code="unsupported_schema"):
            check_tools(tool_format(name), choice("auto", tools=tool(parameters)))


BOUNDED: Any = json.loads(Path(__file__).with_name("bounded_parameters.json").read_bytes())


@pytest.mark.parametrize("name", ["gemma", "pythonic"])
@pytest.mark.parametrize("strict", [False, True])
def test_bounds_are_held_in_arguments_that_are_no_json(name: str, strict: bool) -> None:
    asked = choice("required", tools=tool(BOUNDED, strict=strict))
    grammar = tool_grammar(tool_format(name), asked, no_control)
    for seed in range(4):
        *_, calls = said(read(AnswerFormat(tools=name), walk(grammar, seed)))
        for _, arguments in calls:
            given = json.loads(arguments)
            assert 2 <= len(given["s"]) <= 4
            assert -3 <= given["i"] <= 12
            assert 2 <= len(given["l"]) <= 3
            assert min(given["l"]) > 0
            assert isinstance(given["z"]["q"], bool)
            assert all(isinstance(one, bool) for one in given.get("m", {}).values())
            assert "more" in given


@pytest.mark.parametrize(
    "one",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "minItems": 5000},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"not": {}},
        False,
    ],
)
def test_what_cannot_be_held_of_a_strict_schema_is_refused(one: Any) -> None:
    for name in ("gemma", "pythonic"):
        with client_error(code="unsupported_schema"):
            check_tools(
                tool_format(name),
                choice("auto", tools=tool({"properties": {"a": one}}, strict=True)),
            )
    check_tools(
        tool_format("gemma"), choice("auto", tools=tool({"properties": {"a": {"not": {}}}}))
    )


def test_whole_numbers_of_tools_end() -> None:
    asked = choice(
        "required", tools=tool({"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    )
    matcher = compiled(byte_tokens(), tool_grammar(tool_format("hermes"), asked, no_control))
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 30
    assert matcher.try_consume_tokens(list(text.encode())) == len(text) - 14


def test_a_schema_may_refer_to_itself() -> None:
    tree = {
        "properties": {"kids": {"$ref": "#/$defs/kids"}},
        "$defs": {"kids": {"type": "array", "items": {"$ref": "#/$defs/kids"}}},
    }
    grammar = tool_grammar(
        tool_format("pythonic"), choice("required", tools=tool(tree)), no_control
    )
    matcher = compiled(byte_tokens(), grammar)
    assert matcher.try_consume_tokens(list(b"[f(kids=[[], [[]]])]")) == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ((tool({}), "sometimes", None), "tool_choice"),
        ((tool({}), {"type": "function", "function": {"name": "g"}}, None), "tool_choice"),
        (([], "required", None), "tool_choice"),
        ((["x"], None, None), "tools"),
        (([{"type": "web_search"}], None, None), "tools"),
        ((tool({}, name="a b"), None, None), "tools"),
        ((tool([]), None, None), "tools"),
        ((tool({"type": "string"}), None, None), "tools"),
        ((tool({}, description=1), None, None), "tools"),
        ((tool({}) * 2, None, None), "tools"),
        ((tool({}) * 129, None, None), "tools"),
    ],
)
def test_what_is_wrong_with_the_fields_is_said(fields: Any, param: str) -> None:
    with client_error(status=400, param=param):
        tools.read(*fields)


def test_with_the_choice_none_no_tool_is_shown() -> None:
    assert choice("none") == tools.read(None, None, None) == tools.NOT_ASKED
    assert len(choice("auto").shown) == 2
