"""The grammar that an answer must match, as one text: a grammar in llguidance's Lark dialect,
checked.

Ground floor: whoever takes a request makes the grammar, the engine compiles it for its vocabulary.
Must not know requests, tokens or where a schema came from. llguidance is imported when the first
grammar is made.
"""

from __future__ import annotations

import json as text_of
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from pageturner.errors import ClientError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
FIELD = "structured_outputs"
MAX_CHARACTERS = 256 * 1024  # of a grammar
MAX_CHOICES = 4096
# Room for a line break and nine levels of four spaces. Small models that begin with white space may
# go on with it for ever.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# llguidance's compiler calls itself for every rule and schema on its way down a chain of
# references, at up to 5 KiB of stack each, and does not look how much is left: 128 MiB are enough
# for so many.
MAX_NESTED = 8192
MAX_STATES = 50_000  # of a grammar's lexer, at about a kilobyte; copies of a matcher share it
# Ways in which an answer may go on at one place, at some microseconds for each pair of them. A
# property that may be left out is four.
MAX_WAYS = 5000
MAX_OPTIONAL = 1000
WALKED = 32  # bytes of an answer that are tried when a grammar is checked
LIKED = b'{["tfn-0123456789:,}]'  # the first of these that is possible is tried, else any
TOO_EXPENSIVE = "what the answer must match takes more work than one token may"
STACK_BYTES = 128 * 1024 * 1024  # of addresses; what is not needed is never touched
# Where only one text can follow, llguidance would name the tokens that its tokenizer makes of that
# text; we want every token that can follow, whatever the tokenizer thinks of a text's beginning.
OPTIONS = '%llguidance {"no_forcing": true}\n'
_NO_OPTIONS = re.compile(r"\A\s*%llguidance\s*\{\s*\}")
_ECHO = re.compile(r"^ *\d+ \| ", re.MULTILINE)  # from here on a message shows the grammar
_NOTES = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")
# what a message begins with -> its code
_SCHEMA_CODES = {
    "Unimplemented": "unsupported_schema",  # keys
    "Unknown": "unsupported_schema",  # format
    "oneOf": "unsupported_schema",  # of which several can hold
    "Unsatisfiable": "unsatisfiable_schema",
}


def StructuredOutputsParams(
    *,
    json: str | bool | Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Iterable[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    disable_any_whitespace: bool = False,
    whitespace_pattern: str | None = None,
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

    ClientError 400: invalid_schema, unsupported_schema (a keyword or a format that is not known),
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
        raise _bad("unsatisfiable_schema", "the schema is false: nothing matches it")
    if len(given) != 1:
        named = " and ".join(given) or "none of them"
        raise _bad("invalid_value", f"give one of {', '.join(kinds)}, not {named}")
    options: dict[str, Any] = {"whitespace_flexible": False} if disable_any_whitespace else {}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    if options and (json is None and not json_object):
        raise _bad("invalid_value", "disable_any_whitespace and whitespace_pattern are for JSON")
    code = f"invalid_{'schema' if given[0].startswith('json') else given[0]}"
    for text in (regex, grammar):
        _check_size(text or "", code)
    if regex is not None:
        made = _lark_of_regex(regex, code)
    elif choice is not None:
        made = _lark_of_regex("|".join(map(literal_regex, _choices(choice))), code)
    elif grammar is not None:
        made = _lark(grammar)
        check_nesting(made, ":([", code)
    else:
        made = _lark_of_schema({"type": "object"} if json is None else json, options)
        check_nesting(made, "{", code)
    return checked(OPTIONS + made, code)


def _lark_of_schema(schema: Any, options: dict[str, Any]) -> str:
    if isinstance(schema, str):
        try:
            schema = text_of.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _bad("invalid_schema", f"the schema is not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise _bad("invalid_schema", "a schema is a JSON object")
    own = schema.get("x-guidance", {})
    if isinstance(own, Mapping):
        usual = (
            {}
            if "whitespace_flexible" in {**own, **options}
            else {"whitespace_pattern": WHITE_SPACE}
        )
        schema = {**schema, "x-guidance": {**usual, **own, **options}}
    try:
        schema = as_grammars_take_it(schema)
        return f"start: %json {text_of.dumps(schema, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad("invalid_schema", f"the schema cannot be written as JSON: {error}") from None


def _lark_of_regex(regex: str, code: str) -> str:
    from llguidance import regex_to_lark

    if not regex:
        raise _bad(code, "the regex is empty")
    try:
        return f"start: /{regex_to_lark(regex, 'd')}/"
    except UnicodeEncodeError:
        raise _bad(code, "the regex has lone surrogates, which no text can hold") from None


def _choices(choice: Iterable[str]) -> list[str]:
    choices = [] if isinstance(choice, str) else list(choice)
    if not choices or not all(isinstance(one, str) and one for one in choices):
        raise _bad("invalid_choice", "choice is a list of texts, at least one, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise _bad(
            "invalid_choice", f"choice has {len(choices)} texts, at most {MAX_CHOICES} are taken"
        )
    return choices


def literal_regex(text: str) -> str:
    """A regex that matches this text only."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = _NO_OPTIONS.sub("", grammar)  # guidance begins all of its grammars with that
    if "%llguidance" in grammar:
        raise _bad("invalid_grammar", "a grammar may not set options of llguidance")
    try:
        made: str = any_to_lark(grammar)
    except Exception as error:
        raise _bad("invalid_grammar", f"the grammar is neither Lark nor GBNF: {error}") from None
    return made


def checked(grammar: str, code: str) -> str:
    """The grammar, if it can be compiled and something matches it."""
    _check_size(grammar, code)
    wrong = wrong_with(grammar)
    if wrong == _MATCHES_NOTHING:
        raise _bad("unsatisfiable_grammar", wrong)
    if wrong is not None and wrong.startswith(TOO_EXPENSIVE):
        raise _bad("grammar_too_expensive", wrong)
    if wrong is not None:
        code = _SCHEMA_CODES.get(wrong.split(" ", 1)[0], code)
        raise _bad(code, wrong)
    return grammar


def _check_size(text: str, code: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise _bad(code, f"{len(text)} characters, at most {MAX_CHARACTERS} are taken")


def check_nesting(text: str, marks: str, code: str) -> None:
    """Nothing can be nested deeper than the number of marks that open a level."""
    levels = sum(map(text.count, marks))
    if levels > MAX_NESTED:
        raise _bad(code, f"{levels} rules or schemas within it, at most {MAX_NESTED} are taken")


_MATCHES_NOTHING = "nothing matches it"


@lru_cache(maxsize=64)
def wrong_with(grammar: str) -> str | None:
    """None, or why it is no grammar. Compiles it for bytes as tokens, which takes a millisecond or
    a few, and leaves the interpreter to other threads meanwhile."""
    try:
        matcher = compiled(byte_tokens(), grammar)
    except ValueError as error:  # such as lone surrogates, which no UTF-8 can hold
        return str(error)
    if matcher.is_error():
        return message_of(matcher.get_error())
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        return _MATCHES_NOTHING
    return _walked(matcher)


def _walked(matcher: LLMatcher) -> str | None:
    """None, or that one of the first bytes of an answer takes more work than a byte may."""
    for _ in range(WALKED):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        possible = [byte for byte in (*LIKED, *range(33, 256)) if bits >> byte & 1]
        if not possible:
            break
        matcher.consume_token(possible[0])
    if not matcher.is_error():
        return None
    return f"{TOO_EXPENSIVE}: {message_of(matcher.get_error())}"


@lru_cache(maxsize=1)
def byte_tokens() -> LLTokenizer:
    """A vocabulary of bytes, to look at grammars without a model."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def compiled(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """The grammar for a vocabulary; it may be in error. Other threads go on meanwhile."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_STATES, max_items_in_row=MAX_WAYS)
    return _with_stack(lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=limits))


_starting = threading.Lock()  # the size of a stack is a setting of the whole process


def _with_stack(work: Callable[[], T]) -> T:
    """Run it in a thread whose stack has room for MAX_NESTED levels."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="compile")
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return future.result()


def message_of(error: str) -> str:
    """The message of llguidance in one line, without the grammar and its place in it."""
    said = " ".join(_ECHO.split(error, maxsplit=1)[0].split())
    return _NOTES.sub("", _NOTES.sub("", said))[:400] or "it cannot be compiled"


def _bad(code: str, message: str) -> ClientError:
    return ClientError(400, code, f"{FIELD}: {message}", FIELD)


# -- schemas ---------------------------------------------------------------------------------------


# of the draft's formats those that a grammar can hold; the draft has validators pass over the
# others
FORMATS = frozenset(
    {
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    }
)
MAX_DIGITS = 16  # of a whole number without bounds of its own: small models may never end one
LARGEST = 10**MAX_DIGITS - 2  # a compiler that counts in doubles knows no odd numbers of that size
# keyword -> whether it has one schema, a list of schemas, or schemas by name
_ONE = frozenset(
    {
        "additionalProperties",
        "additionalItems",
        "contains",
        "propertyNames",
        "items",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def as_grammars_take_it(schema: Any, *, strict: bool = False) -> Any:
    """The schema without `uniqueItems`, without formats that are not known, and with whole numbers
    that have no bound of at most 16 digits. strict: with these two, so that whoever compiles it
    refuses them. RecursionError where it is nested too deep."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "uniqueItems" and isinstance(value, bool) and not strict:
            continue
        if name == "format" and isinstance(value, str) and value not in FORMATS and not strict:
            continue
        made[name] = _within(name, value, strict)
    kinds = made.get("type")
    if kinds == "integer" or (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    ):
        _bound(made)
    return made


def _bound(schema: dict[str, Any]) -> None:
    """Give a whole number the bounds that it lacks, unless its own one is beyond them."""
    if not schema.keys().isdisjoint({"enum", "const"}):
        return
    least = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    most = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    if not all(isinstance(one, int | float) and abs(one) < LARGEST for one in least + most):
        return
    if not least:
        schema["minimum"] = -LARGEST
    if not most:
        schema["maximum"] = LARGEST


def _within(name: str, value: Any, strict: bool) -> Any:
    if name in _NAMED and isinstance(value, Mapping):
        return {key: as_grammars_take_it(one, strict=strict) for key, one in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [as_grammars_take_it(one, strict=strict) for one in value]
    return as_grammars_take_it(value, strict=strict) if name in _ONE else value
