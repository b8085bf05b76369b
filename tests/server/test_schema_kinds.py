"""What is held of a JSON schema, what is passed over, and what is refused: by its kind, and by `strict`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner.text import output_format
from pageturner.text.grammar import check as grammar_check
from pageturner.text.grammar.check import byte_tokens, compiled
from pageturner.text.structured_outputs import StructuredOutputsParams
from pageturner.text.tool_formats import tool_format
from pageturner.text.tool_grammar import check_tools
from pageturner.text.tools import read
from support.refusals import client_error

INT64, FLOAT32 = 2**63, 3.4028234663852886e38
# what no grammar can hold: passed over, and under strict refused with a word that names it
CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": r"^(?!\.{1,2}$)[a-z.]+$"}, "look-ahead"),
    ({"type": "string", "pattern": "a(?=b)b"}, "look-ahead"),
    ({"type": "string", "pattern": "(?<=a)b"}, "look-behind"),
    ({"type": "string", "pattern": "(?<!a)b"}, "look-behind"),
    ({"type": "string", "pattern": r"\bfoo\b"}, "Word"),
    ({"type": "string", "pattern": r"\Bfoo"}, "Word"),
    ({"type": "string", "pattern": r"(a|b)\1"}, "backreferences"),
    ({"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32}, "float range"),
    ({"type": "number", "exclusiveMaximum": 1e300}, "float range"),
    ({"type": "number", "multipleOf": 1.234567890123e-11}, "multipleOf"),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"minLength": 2}}, "propertyNames"),
    ({"patternProperties": {"a": {}, "b": {}}, "type": "object"}, "not disjoint"),
    ({"patternProperties": {"(?!a)": {}}, "type": "object"}, "look-ahead"),
    ({"minProperties": 1, "properties": {"a": {}, "b": {}}}, "min/maxProperties"),
    ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}, "anyOf"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "format": "regex"}, "regex"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"const": 1}, "then": {"const": 2}}, "if"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"$dynamicRef": "#a"}, "dynamicRef"),
    ({"enum": [123456789012345678, "a"]}, "no double"),
    ({"type": "integer", "minimum": INT64, "maximum": 2 * INT64}, "2^63"),
    ({"type": "integer", "exclusiveMinimum": INT64 - 3}, "2^63"),
]
# regexes in ECMA's syntax that Rust does not have
ELSEWHERE = ["a{,3}", r"^\cA$", "{", "[[]a"]
# what says nothing, or is held by saying it in another way, also under strict
HELD: list[dict[str, Any] | bool] = [
    True,
    {"type": "string", "maxLength": 10.0},
    {"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": {}},
    {"type": "object", "minProperties": 0.0},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    {"type": "object", "propertyNames": True},
    {"type": "string", "pattern": "^[^]$"},
    {"type": "integer", "minimum": -INT64},
    {"type": "integer", "minimum": 1e17},
    {"type": "integer", "minimum": -INT64, "maximum": INT64 - 1},
    {"type": ["integer", "null"], "exclusiveMinimum": -INT64},
    {"type": "string", "format": "date", "pattern": "^2024-02-29$"},
    {"type": "string", "format": "date", "pattern": "^2000-02-29$"},
    {"type": "string", "format": "date-time", "pattern": "^1996-02-29T23:59:59Z$"},
]
BAD: list[tuple[Any, str]] = json.loads(
    Path(__file__).with_name("refused_schemas.json").read_bytes()
)


def response_format(schema: Any, strict: bool | None) -> None:
    named = {"name": "n", "schema": schema, "strict": strict}
    output_format.grammar_of({"type": "json_schema", "json_schema": named}, None)


def tool(format: str) -> Callable[[Any, bool | None], None]:
    def check(schema: Any, strict: bool | None) -> None:
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        function = {"name": "f", "parameters": parameters, "strict": strict}
        choice = read([{"type": "function", "function": function}], "auto", None)
        check_tools(tool_format(format), choice)

    return check


ASKED = [response_format, tool("hermes"), tool("llama3"), tool("mistral")]


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize(("schema", "word"), CANNOT)
def test_what_no_grammar_can_hold_is_passed_over_or_named(
    ask: Callable[..., None], schema: Any, word: str
) -> None:
    ask(schema, None)
    ask({"type": "object", "properties": {"deep": {"items": schema}}}, False)
    with client_error(code="unsupported_schema") as refused:
        ask(schema, True)
    assert word in refused.value.message
    assert "coerce_one_of" not in refused.value.message


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_a_regex_of_another_syntax_is_passed_over(pattern: str) -> None:
    response_format({"type": "string", "pattern": pattern}, None)
    response_format({"type": "object", "patternProperties": {pattern: {}}}, False)


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("schema", HELD)
def test_what_says_nothing_or_can_be_said_otherwise_is_held(schema: Any, strict: Any) -> None:
    response_format(schema, strict)


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(("schema", "code"), BAD)
def test_what_is_wrong_with_a_schema_is_told_apart(schema: Any, code: str, strict: Any) -> None:
    with client_error(code=code):
        response_format(schema, strict)


def takes(grammar: str, text: str) -> bool:
    matcher = compiled(byte_tokens(), grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": -INT64, "maximum": 9}, ["-123456789", "9"], ["10"]),
        # a compiler that counts in doubles
        ({"minimum": 2**53 + 1, "type": "integer"}, [f"{2**53 + 2}"], [f"{2**53}", "1"]),
        ({"maximum": 2**53 + 1, "type": "number"}, [f"{2**53}"], [f"{2**53 + 2}"]),
        ({"minimum": -(2**53) - 1}, [f"{-(2**53)}", "1"], [f"{-(2**53) - 2}"]),
        ({"enum": [123456789012345678, 7]}, ["123456789012345678", "7"], ["8", "1234567890123"]),
        ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
        ({"type": "string", "pattern": "^[^]$"}, ['"x"', '"é"'], ['""', '"xy"']),
        # the rest of a schema is held beside what is passed over
        ({"type": "string", "pattern": r"\bx", "maxLength": 2}, ['"ab"'], ['"abc"', "1"]),
        ({"type": "number", "minimum": -FLOAT32}, ["1.5", "-2"], ['"1"']),
        ({"type": "number", "minimum": 3, "multipleOf": 1.234567890123e-11}, ["4"], ["2"]),
        ({"oneOf": [{"const": 1}, {"type": "integer"}]}, ["1", "2"], ['"a"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2021-04-31"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"']),
    ],
)
def test_what_is_held_holds(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = StructuredOutputsParams(json=schema)
    assert all(takes(grammar, text) for text in good)
    assert not any(takes(grammar, text) for text in bad)


@pytest.mark.parametrize("place", ["not", "then", "x-common", "definitions"])
def test_schemas_that_are_only_referred_to_are_seen_to(place: str) -> None:
    schema = {"$ref": f"#/{place}/more/one", place: {"more": {"one": {"pattern": "(?!a)b"}}}}
    response_format(schema, None)
    data = {"type": "object", "const": {"pattern": "(?!a)"}}
    assert takes(StructuredOutputsParams(json=data), '{"pattern":"(?!a)"}')


# -- json_object -----------------------------------------------------------------------------------
@pytest.mark.parametrize("schema", [{"const": "blue"}, {"enum": ["blue"]}, {"pattern": "^blue$"}])
def test_a_schema_beside_json_object_is_held(schema: Any) -> None:
    asked = {"type": "json_object", "schema": {"type": "string", **schema}}
    grammar = output_format.grammar_of(asked, None)
    assert grammar is not None
    assert takes(grammar, '"blue"')
    assert not takes(grammar, "{}")


@pytest.mark.parametrize("schema", [123, "x", [], {"type": "hiccup"}, {"properties": 5}])
def test_a_bad_schema_beside_json_object_is_refused(schema: Any) -> None:
    with client_error(code="invalid_schema", param="response_format"):
        output_format.grammar_of({"type": "json_object", "schema": schema}, None)


def test_json_object_alone_is_any_object() -> None:
    for asked in ({"type": "json_object"}, {"type": "json_object", "schema": None}):
        grammar = output_format.grammar_of(asked, None)
        assert grammar is not None
        assert takes(grammar, '{"a":1}')
        assert not takes(grammar, "1")


# -- GBNF ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "good", "bad"),
    [
        (r'"\u0041"', "A", "B"),
        (r'"\U00000041\x42"', "AB", "A"),
        (r'"\u00e9\xe9\U0001F600"', "éé😀", "é"),
        (r'"\x22\x5c\x0a\u005D"', '"\\\n]', '"'),
        (r'"\\u0041"', r"\u0041", "A"),
        (r"[\u0041-\u0043]{2}", "AC", "AD"),
        (r"[\U0001F600-\U0001F64F]", "😃", "a"),
        (r"[^\u0000-\u007f]", "é", "z"),
        (r"[\x5d\x5e\x2d]{3}", "]^-", "abc"),
        (r'"\[a\] \\[b.c]"', r"[a] \[b.c]", r"\[a\]"),
        (r'"\ud83d\ude00"', "😀", "?"),
        (r"[&&~b\]\[]{6}", "&&~b][", "a&&~b]"),
        (". .", "\n\u2028", "a"),
    ],
)
def test_characters_of_gbnf_by_number(written: str, good: str, bad: str) -> None:
    grammar = StructuredOutputsParams(grammar=f"root ::= {written} # \\u0041")
    assert takes(grammar, good)
    assert not takes(grammar, bad)


@pytest.mark.parametrize("written", [r'"\u41"', r'"\ud800"', r'"\U00110000"', r'"\q"', r"[\u12]"])
def test_characters_that_gbnf_does_not_have(written: str) -> None:
    with client_error(code="invalid_grammar"):
        StructuredOutputsParams(grammar=f"root ::= {written}")


# -- what one token may cost -----------------------------------------------------------------------
def optional(count: int, name: str = "p") -> dict[str, Any]:
    one = {"type": "string", "maxLength": 50}
    return {"type": "object", "properties": {f"{name}{i}": one for i in range(count)}}


@pytest.mark.parametrize("count", [450, 500, 800])
def test_hundreds_of_optional_properties_are_held(count: int) -> None:
    grammar = StructuredOutputsParams(json=optional(count))
    assert takes(grammar, json.dumps({"p0": "a", f"p{count - 1}": "b"}))


@pytest.mark.parametrize("ask", ASKED)
def test_thousands_are_refused_before_they_are_compiled(
    ask: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(grammar_check, "compiled", lambda _, grammar: made.append(grammar))
    deep = {"anyOf": [{"type": "array", "items": {"allOf": [optional(1001)]}}]}
    for schema in (optional(2000), optional(5000), deep):
        for strict in (None, True):
            with client_error(code="grammar_too_expensive") as refused:
                ask(schema, strict)
            assert "may be left out" in refused.value.message
    assert made == []


def test_required_properties_are_not_counted() -> None:
    schema = optional(1500)
    schema["required"] = [f"p{i}" for i in range(600)]
    assert StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"anyOf": [optional(700, name) for name in "abc"]}},
        {"grammar": "root ::= " + " ".join(f'("{chr(97 + i % 26)}{i}")?' for i in range(6000))},
    ],
)
def test_a_place_with_too_many_ways_is_refused(asked: dict[str, Any]) -> None:
    with client_error(code="grammar_too_expensive"):
        StructuredOutputsParams(**asked)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -INT64},
        {"enum": [1, {"a": [-INT64]}]},
        {"type": "integer", "minimum": -INT64, "maximum": -INT64},
        {"items": {"const": 1 - INT64}},
    ],
)
def test_whole_numbers_without_an_opposite_are_refused(schema: dict[str, Any]) -> None:
    """The compiler of grammars never ended with them."""
    with client_error("can be no value"):
        StructuredOutputsParams(json=schema)
    assert StructuredOutputsParams(
        json={"type": "integer", "minimum": -INT64, "maximum": INT64 - 1}
    )
