"""JSON schemas in the form in which llguidance takes them behind `%json`.

Owns what is held of a schema. One rule: a keyword that a grammar cannot hold is passed over where
the schema is not strict, and refused by its name where it is. What is always held more tightly than
the schema says: whole numbers have an end, dates exist, and no second is a leap second. Must not
know where a schema came from.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from pageturner.text.grammar.check import OPTIONS, TOO_EXPENSIVE, bad, code_of, wrong_with

# Room for a line break and nine levels of four spaces. Small models that begin with white space may
# go on with it for ever.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
MAX_OPTIONAL = 1000  # properties of an object that may be left out
MAX_DIGITS = 16  # of a whole number without bounds of its own: small models may never end one
LARGEST = 10**MAX_DIGITS - 2  # a compiler that counts in doubles knows no odd numbers of that size
LEAST = 1024 - 2**63  # of a whole number: with one that has no opposite the compiler never ends
# keywords whose value is data; in all others there may be schemas, if only for references
_DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_KEY_OF_ANY_KIND: tuple[Any, ...] = (True, {}, {"type": "string"})  # as `propertyNames`
# of ECMA 262
_ANY_CHARACTER = re.compile(r"(?<!\\)\[\^\]")
_CONTROL = re.compile(r"\\c[A-Za-z]")
# What the formats of llguidance let through besides: 29 February of any year, second 60 of any
# minute. A leap second is never written at all.
_DAY = (
    r"^(?:[0-9]{4}-(?:(?:0[13578]|1[02])-[0-3]|(?:0[469]|11)-(?:[0-2]|30)|02-(?:[01]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_SECOND = r":[0-9]{2}:[0-5]"
_EXACT = {"date": (_DAY,), "time": (_SECOND,), "date-time": (_DAY, _SECOND)}


def schema_text(schema: Mapping[str, Any], strict: bool, **options: Any) -> str:
    """The schema as llguidance takes it, with these options of its own. ValueError, TypeError or
    RecursionError where it cannot be written as JSON."""
    own = schema.get("x-guidance")
    guidance: dict[str, Any] = {"lenient": not strict, "coerce_one_of": not strict}
    guidance |= {**own, **options} if isinstance(own, Mapping) else options
    if "whitespace_flexible" not in guidance:
        guidance = {"whitespace_pattern": WHITE_SPACE, **guidance}
    made = as_grammars_take_it({**schema, "x-guidance": guidance}, strict=strict)
    return json.dumps(made, allow_nan=False)


def as_grammars_take_it(schema: Any, *, strict: bool = False) -> Any:
    """The schema without what says nothing, with whole numbers that have an end, and, where it is
    not strict, without patterns and bounds that a grammar cannot hold. ClientError for more
    properties than it can hold, RecursionError where it is nested too deep."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {name: _within(name, one, strict) for name, one in schema.items()}
    for name in _COUNTS:
        if isinstance(value := made.get(name), float) and value.is_integer():
            made[name] = int(value)
    if made.get("propertyNames") in _KEY_OF_ANY_KIND:
        made.pop("propertyNames", None)
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = _ANY_CHARACTER.sub(r"[\\s\\S]", pattern)
    _check_optional(made)
    _tighten(made)
    kinds = made.get("type")
    whole = kinds == "integer"
    if isinstance(kinds, list):
        whole = "integer" in kinds and "number" not in kinds
    upper = (
        int(made[name]) for name in _UPPER if whole and isinstance(made.get(name), int | float)
    )
    if _too_low([made.get("const"), made.get("enum"), *upper]):
        raise bad("invalid_schema", f"a whole number below {LEAST} can be no value")
    if whole:
        _check_lower(made, strict)
        _bound(made)
    if not strict:
        _pass_over(made, ("number", "integer")[whole])
    _near_values(made, strict)
    exact = _EXACT.get(str(made.get("format")), ())
    if exact and isinstance(made.get("allOf", []), list):
        made["allOf"] = [*made.get("allOf", []), *({"pattern": one} for one in exact)]
    return made


def _too_low(value: Any) -> bool:
    """Return whether a value is, or has in it, a whole number below LEAST."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_too_low, value))
    return type(value) is int and value < LEAST


def _within(name: str, value: Any, strict: bool) -> Any:
    if name in _DATA:
        return value
    if name in _NAMED and isinstance(value, Mapping):
        return {key: as_grammars_take_it(one, strict=strict) for key, one in value.items()}
    if isinstance(value, list):
        return [as_grammars_take_it(one, strict=strict) for one in value]
    return as_grammars_take_it(value, strict=strict)


def _check_optional(schema: dict[str, Any]) -> None:
    known = schema.get("properties")
    required = schema.get("required", [])
    if isinstance(known, Mapping) and isinstance(required, list):
        optional = len(known.keys() - {name for name in required if isinstance(name, str)})
        if optional > MAX_OPTIONAL:
            raise bad(
                "grammar_too_expensive",
                f"{TOO_EXPENSIVE}: an object has {optional} properties that may be left out, at"
                f" most {MAX_OPTIONAL} are taken: require some of them, or divide the object",
            )


def _tighten(schema: dict[str, Any]) -> None:
    """Put bounds that no double is, by which the compiler would let their neighbours through, at
    the next double within."""
    for name in (*_LOWER, *_UPPER):
        one = schema.get(name)
        if type(one) is not int or abs(one) > sys.float_info.max or int(float(one)) == one:
            continue
        near, inward = float(one), -math.inf
        if name in _LOWER:
            inward = math.inf
        if (near < one) == (name in _LOWER):
            near = math.nextafter(near, inward)
        schema[name] = int(near)


def _check_lower(schema: dict[str, Any], strict: bool) -> None:
    """Pass over, or refuse, lower bounds of whole numbers beyond those that the compiler knows."""
    for name in _LOWER:
        if isinstance(one := schema.get(name), int | float) and one >= 2**63:
            if strict:
                raise bad(
                    "unsupported_schema",
                    f"{name} of a whole number is {one}, and cannot be held from 2^63 on",
                )
            for bound in (*_LOWER, *_UPPER):
                schema.pop(bound, None)


def _near_values(schema: dict[str, Any], strict: bool) -> None:
    """Let through the neighbours of whole numbers among `const` and `enum` that the compiler, which
    counts in doubles, would write as others. Strict: these are refused."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        return
    whole = (one for one in values if type(one) is int and 2**53 < abs(one) < 2**63 - 2048)
    beyond = [one for one in whole if Decimal(repr(float(one))) != one]
    if not beyond:
        return
    if strict:
        raise bad("unsupported_schema", f"the value {beyond[0]} cannot be held: no double is it")
    ways: list[dict[str, Any]] = []
    for near in map(float, beyond):
        low = int(math.nextafter(near, -math.inf))
        high = int(math.nextafter(near, math.inf))
        ways.append({"type": "integer", "minimum": low, "maximum": high})
    rest = [one for one in values if one not in beyond]
    if rest:
        ways.append({"enum": rest})
    for name in ("enum", "const"):
        schema.pop(name, None)
    before = schema.get("allOf", [])
    if isinstance(before, list):
        schema["allOf"] = [*before, {"anyOf": ways}]


def _bound(schema: dict[str, Any]) -> None:
    """Give a whole number the bounds that it lacks, unless its own one is beyond them and can be
    held."""
    if not schema.keys().isdisjoint({"enum", "const"}):
        return
    given = {name: schema[name] for name in (*_LOWER, *_UPPER) if name in schema}
    if not all(isinstance(one, int | float) for one in given.values()):
        return
    for name, one in given.items():
        if isinstance(one, float) and one.is_integer():
            schema[name] = given[name] = int(one)
    large = {name: one for name, one in given.items() if abs(one) >= LARGEST}
    if large and not _cannot_hold({"type": "integer", **given}):
        return
    if any((one < 0) != (name in _LOWER) for name, one in large.items()):
        return  # no number between ours fits: it is passed over, or refused
    for name in large:
        del schema[name]
    if schema.keys().isdisjoint(_LOWER):
        schema["minimum"] = -LARGEST
    if schema.keys().isdisjoint(_UPPER):
        schema["maximum"] = LARGEST


def _pass_over(schema: dict[str, Any], number: str) -> None:
    """Remove the patterns and bounds that a grammar cannot hold."""
    for names, kind in (
        (("pattern",), "string"),
        (("patternProperties",), "object"),
        (("multipleOf",), number),
        ((*_LOWER, *_UPPER, "multipleOf"), number),
    ):
        held = {name: schema[name] for name in names if name in schema}
        if isinstance(held.get("patternProperties"), dict):
            held["patternProperties"] = dict.fromkeys(held["patternProperties"], True)
        if held and _cannot_hold({"type": kind, **held}):
            for name in held:
                del schema[name]


def _cannot_hold(schema: dict[str, Any]) -> bool:
    try:
        return _unsupported(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError):  # it is no JSON, which is said of the whole
        return False


@lru_cache(maxsize=4096)
def _unsupported(schema: str) -> bool:
    wrong = wrong_with.__wrapped__(f"{OPTIONS}start: %json {schema}") or ""
    unsupported = code_of(wrong) == "unsupported_schema"
    if unsupported or not wrong.startswith("regex parse error"):
        return unsupported
    parts = json.loads(schema)
    return all(map(_is_regex, parts.get("patternProperties", [parts.get("pattern")])))


def _is_regex(pattern: str) -> bool:
    """Return whether it is a regex after all, in the syntax of others than Rust."""
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(_CONTROL.sub("c", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return True
