"""The grammar that an answer must match, as one text: a grammar in llguidance's Lark dialect,
checked.

Ground floor: whoever takes a request makes the grammar, the engine compiles it for its vocabulary.
Must not know requests, tokens or where a schema came from. llguidance is imported when the first
grammar is made.
"""

from __future__ import annotations

import json as text_of
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pageturner.errors import lacks_memory
from pageturner.text.grammar.check import OPTIONS, bad, check_nesting, check_size, checked
from pageturner.text.grammar.json_schema import schema_text

MAX_CHOICES = 4096
_NO_OPTIONS = re.compile(r"\A\s*%llguidance\s*\{\s*\}")
# Comments, texts and classes of GBNF, and its sign for any character
_PARTS = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*]|\.""", re.DOTALL)
# Its ways to write a character by its number, and what has a meaning in classes of llguidance alone
_BY_NUMBER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)|[&~]", re.DOTALL
)
_ANY = "[\\x00-\U0010ffff]"


def StructuredOutputsParams(
    *,
    json: str | bool | Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Iterable[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    disable_any_whitespace: bool = False,
    whitespace_pattern: str | None = None,
    strict: bool = False,
) -> str:
    """The grammar for `SamplingParams(structured_outputs=...)`, from exactly one of the first five.
    Named as vLLM's class, and called as it is.

    json         a JSON schema, as text or as an object
    regex        of the whole answer, in the syntax of Rust's regex: no look-around; \\d is 0 to 9
    choice       the texts of which the answer is one
    grammar      Lark, or GBNF (EBNF with ::=)
    json_object  any JSON object
    disable_any_whitespace, whitespace_pattern  of the JSON; without them there may be white space
                                                everywhere, at most 40 characters of it at once
    strict       the JSON schema holds to the letter; else what no grammar can hold is passed over

    ClientError 400: invalid_schema, unsupported_schema (strict, and no grammar can hold it),
    unsatisfiable_schema, invalid_regex, invalid_choice, invalid_grammar, unsatisfiable_grammar;
    invalid_value for anything else.
    """
    kinds = {
        "json": json,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "json_object": json_object,
    }
    given = [
        name for name, value in kinds.items() if value is not None and kinds[name] is not False
    ]
    if json is False:
        raise bad("unsatisfiable_schema", "the schema is false: nothing matches it")
    if len(given) != 1:
        named = " and ".join(given) or "none of them"
        raise bad("invalid_value", f"give one of {', '.join(kinds)}, not {named}")
    options: dict[str, Any] = {"whitespace_flexible": False} if disable_any_whitespace else {}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    if options and (json is None and not json_object):
        raise bad("invalid_value", "disable_any_whitespace and whitespace_pattern are for JSON")
    code = f"invalid_{'schema' if given[0].startswith('json') else given[0]}"
    for text in (regex, grammar):
        check_size(text or "", code)
    if regex is not None:
        made = _lark_of_regex(regex, code)
    elif choice is not None:
        made = _lark_of_regex("|".join(map(literal_regex, _choices(choice))), code)
    elif grammar is not None:
        made = _lark(grammar)
        check_nesting(made, ":([", code)
    else:
        made = _lark_of_schema({"type": "object"} if json is None else json, strict, options)
        check_nesting(made, "{", code)
    return checked(OPTIONS + made, code)


def _lark_of_schema(schema: Any, strict: bool, options: dict[str, Any]) -> str:
    if isinstance(schema, str):
        try:
            schema = text_of.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad("invalid_schema", f"the schema is not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise bad("invalid_schema", "a schema is a JSON object")
    try:
        return f"start: %json {schema_text(schema, strict, **options)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise bad("invalid_schema", f"the schema cannot be written as JSON: {error}") from None


def _lark_of_regex(regex: str, code: str) -> str:
    from llguidance import regex_to_lark

    if not regex:
        raise bad(code, "the regex is empty")
    try:
        return f"start: /{regex_to_lark(regex, 'd')}/"
    except UnicodeEncodeError:
        raise bad(code, "the regex has lone surrogates, which no text can hold") from None


def _choices(choice: Iterable[str]) -> list[str]:
    choices = [] if isinstance(choice, str) else list(choice)
    if not choices or not all(isinstance(one, str) and one for one in choices):
        raise bad("invalid_choice", "choice is a list of texts, at least one, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise bad(
            "invalid_choice", f"choice has {len(choices)} texts, at most {MAX_CHOICES} are taken"
        )
    return choices


def literal_regex(text: str) -> str:
    """A regex that matches this text only."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def _part(found: re.Match[str]) -> str:
    """A part of a GBNF grammar as llguidance's reader of it takes it."""
    part = found[0]
    if part == ".":  # a newline too
        return _ANY
    if part.startswith("#"):
        return part
    part = _BY_NUMBER.sub(_character, part)
    if part.startswith('"'):
        part = re.sub(r"(\\\\)|\\([][])", lambda one: one[1] or one[2], part)
    return part


def _character(found: re.Match[str]) -> str:
    number = found[1] or found[2] or found[3] or ""
    if found[0] in ("&", "~"):
        number = f"{ord(found[0]):x}"
    if not number:
        return found[0]
    code = int(number, 16)
    return f"\\x{code:02x}" if code < 128 else chr(code)


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = _NO_OPTIONS.sub("", grammar)  # guidance begins all of its grammars with that
    if "%llguidance" in grammar:
        raise bad("invalid_grammar", "a grammar may not set options of llguidance")
    try:
        if "::=" in grammar:
            grammar = _PARTS.sub(_part, grammar)
            # two halves of a surrogate pair are one character
            grammar = grammar.encode("utf-16", "surrogatepass").decode("utf-16")
        made: str = any_to_lark(grammar)
    except Exception as error:
        if lacks_memory(error):
            raise
        raise bad("invalid_grammar", f"the grammar is neither Lark nor GBNF: {error}") from None
    return made
