"""response_format and structured_outputs: what is taken, what is refused and how, and what an answer gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner import SamplingParams, StructuredOutputsParams
from pageturner.server.api.base.body import RequestBody
from pageturner.server.api.base.call import Call
from pageturner.server.api.openai import completions
from pageturner.text import parameters
from pageturner.text.grammar.check import byte_tokens, compiled
from support.refusals import client_error

from .bytes_tokenizer import BytesTokenizer
from .test_openai import SERVED, chat, completion, refusal

SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["a"],
}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "it", "strict": False, "schema": SCHEMA},
}
NESTED: Any = "x"
for _ in range(900):
    NESTED = {"not_a_keyword": NESTED}


def grammar_of(call: Call) -> str | None:
    return call.params[0].structured_outputs


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": JSON_SCHEMA}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "string"}'}}, {"json": {"type": "string"}}),
        ({"structured_outputs": {"json": True}}, {"json": {}}),
        ({"structured_outputs": {"regex": "[a-c]+"}}, {"regex": "[a-c]+"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ("yes", "no")}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"json_object": True}),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, {"regex": "a"}),
        (
            {
                "structured_outputs": {
                    "json": SCHEMA,
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ?",
                }
            },
            {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " ?"},
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            {"regex": "a"},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "string"}'}, {"json": {"type": "string"}}),
        ({"guided_regex": "[a-c]+", "guided_json": None}, {"regex": "[a-c]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ("yes", "no")}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        # a client that does not know which of them the server has sends both
        (
            {
                "guided_regex": "a",
                "structured_outputs": {"regex": "a"},
                "guided_decoding_backend": "x",
            },
            {"regex": "a"},
        ),
    ],
)
def test_both_endpoints_take_both_fields(fields: dict[str, Any], same: dict[str, Any]) -> None:
    expected = StructuredOutputsParams(**same)
    assert grammar_of(completion(**fields)) == grammar_of(chat(**fields)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {}},
        {"structured_outputs": None},
        {"response_format": {"type": "text"}},
    ],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert grammar_of(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_grammar": "start: X", "structured_outputs": {"json": SCHEMA}}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
    ],
)
def test_two_forms_under_two_names_are_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(completion, **fields)
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)


def test_a_grammar_may_begin_with_options_that_are_none() -> None:
    plain = 'start: x\nx[capture]: X\nX: "a" | "b"\n'
    as_guidance_sends_it = grammar_of(completion(guided_grammar="%llguidance {}\n\n" + plain))
    assert as_guidance_sends_it is not None
    matcher = compiled(byte_tokens(), as_guidance_sends_it)
    assert matcher.try_consume_tokens(list(b"b")) == 1


def test_properties_are_written_in_the_order_of_the_schema() -> None:
    grammar = grammar_of(completion(structured_outputs={"json": SCHEMA}))
    assert grammar is not None
    assert grammar.index('"b"') < grammar.index('"a"')


@pytest.mark.parametrize(
    ("asked", "longest"),
    [
        ({}, 40),
        ({"whitespace_pattern": " {1,3}"}, 3),
        ({"whitespace_pattern": " +"}, 99),
        ({"disable_any_whitespace": True}, 0),
        ({"json": SCHEMA | {"x-guidance": {"whitespace_pattern": " {1,5}"}}}, 5),
        ({"json": SCHEMA | {"x-guidance": {"whitespace_flexible": True}}}, 99),
        (
            {
                "json": SCHEMA | {"x-guidance": {"whitespace_pattern": " "}},
                "whitespace_pattern": "  ",
            },
            2,
        ),
    ],
)
def test_white_space_comes_to_an_end(asked: dict[str, Any], longest: int) -> None:
    grammar = StructuredOutputsParams(**{"json": SCHEMA} | asked)
    matcher = compiled(byte_tokens(), grammar)
    assert matcher.try_consume_tokens(list(b"{" + 99 * b" ")) == 1 + longest


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"json": {"type": "objekt"}}, "invalid_schema", "objekt"),
        ({"json": "{"}, "invalid_schema", "JSON"),
        ({"json": {"type": "string", "pattern": "("}}, "invalid_schema", "unclosed group"),
        ({"json": {"$ref": "#/none"}}, "invalid_schema", "/none"),
        ({"json": NESTED}, "invalid_schema", ""),
        (
            {"json": {"minimum": 3, "maximum": 1, "type": "integer"}},
            "unsatisfiable_schema",
            "greater",
        ),
        ({"json": False}, "unsatisfiable_schema", "false"),
        ({"regex": "("}, "invalid_regex", "unclosed group"),
        ({"regex": "a(?=b)"}, "invalid_regex", "look-around"),
        ({"regex": ""}, "invalid_regex", "empty"),
        ({"regex": "a" * 300_000}, "invalid_regex", "300000"),
        ({"choice": []}, "invalid_choice", "at least one"),
        ({"choice": ["a", ""]}, "invalid_choice", "empty"),
        ({"choice": ["a"] * 5000}, "invalid_choice", "5000"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "invalid_grammar", "9001"),
        ({"grammar": "start: " + "(" * 8000 + '"a"' + ")" * 8000}, "invalid_grammar", "deep"),
        ({"json": '{"items":' * 9000 + "{}" + "}" * 9000}, "invalid_schema", "depth"),
        ({"json": {"anyOf": [{}] * 9000}}, "invalid_schema", "at most 8192"),
        ({"grammar": "hello"}, "invalid_grammar", "neither Lark nor GBNF"),
        ({"grammar": "start: foo"}, "invalid_grammar", "foo"),
        ({"grammar": "root ::= foo"}, "invalid_grammar", "foo"),
        (
            {"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'},
            "invalid_grammar",
            "options",
        ),
        (
            {"grammar": '%llguidance {}\n%llguidance {"a": 1}\nstart: "a"'},
            "invalid_grammar",
            "options",
        ),
        ({"grammar": 'start: start "a"'}, "unsatisfiable_grammar", "nothing"),
        ({"json_object": True, "regex": "a"}, "invalid_value", "regex and json_object"),
        ({"json_object": False}, "invalid_value", "one of"),
        ({"regex": "a", "disable_any_whitespace": True}, "invalid_value", "JSON"),
        ({"regex": 5}, "invalid_value", "regex"),
        ({"choice": ["a", 5]}, "invalid_value", "choice"),
        ({"structural_tag": "{}"}, "invalid_value", "structural_tag"),
    ],
)
def test_a_bad_one_is_a_400_that_says_what_is_wrong(
    asked: dict[str, Any], code: str, says: str
) -> None:
    error = refusal(completion, structured_outputs=asked)
    assert (error.status, error.code, error.param) == (400, code, "structured_outputs"), error
    assert says in error.message
    assert len(error.message) < 600
    assert "\n" not in error.message


def chain(length: int) -> dict[str, Any]:
    """A schema whose references lead deep down; it refers to itself nowhere."""
    refs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
    return {"$defs": refs | {f"d{length}": {"const": 1}}, "$ref": "#/$defs/d0"}


def test_chains_of_references_do_not_break_the_process() -> None:
    """They did: a stack of 8 MiB holds less than 2,000 of them."""
    assert grammar_of(completion(structured_outputs={"json": chain(3000)})) is not None
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(5000))
    assert (
        grammar_of(completion(structured_outputs={"grammar": f'start: r0\n{rules}r5000: "a"'}))
        is not None
    )
    error = refusal(completion, structured_outputs={"json": chain(5000)})
    assert (error.code, error.param) == ("invalid_schema", "structured_outputs")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}, "invalid_schema"),
        ({"type": "json_schema", "json_schema": {"name": "it"}}, "invalid_schema"),
        ({"type": "json_schema"}, "invalid_schema"),
        ({"type": "structural_tag"}, "unsupported_parameter"),
        ({"schema": {}}, "unsupported_parameter"),
    ],
)
def test_a_bad_response_format(asked: dict[str, Any], code: str) -> None:
    error = refusal(chat, response_format=asked)
    assert (error.status, error.code, error.param) == (400, code, "response_format")
    assert error.message.startswith("response_format")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"response_format": JSON_SCHEMA}, "structured_outputs"),
    ],
)
def test_what_contradicts_a_grammar(more: dict[str, Any], param: str) -> None:
    error = refusal(completion, structured_outputs={"regex": "a"}, **more)
    assert (error.status, error.code, error.param) == (400, "invalid_value", param)


def test_forced_end_contradicts_a_grammar() -> None:
    body = RequestBody(prompt="hello", structured_outputs={"regex": "a"}, forced_end=2)
    with client_error(code="invalid_value", param="forced_end"):
        completions.read(body, replace(SERVED, developer=True))


def test_parameters_of_llm_are_checked_too() -> None:
    endless = BytesTokenizer(eos_ids=())
    made = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert (
        parameters.resolve(made, BytesTokenizer(), 266).structured_outputs
        == made.structured_outputs
    )
    raw: Any = {"regex": "a"}
    for params, tokenizer in (
        (made, endless),
        (SamplingParams(structured_outputs=raw), BytesTokenizer()),
    ):
        with client_error(param="structured_outputs"):
            parameters.resolve(params, tokenizer, 266)
