"""JSON schemas as they are handed to the compiler of grammars.

Owns what is changed in them: what no grammar can hold and may be left out, and what keeps numbers from going
on for ever. Must not know how a schema becomes a grammar (structured_outputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# of the draft's formats those that a grammar can hold; the draft has validators pass over the others
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
    """The schema without `uniqueItems`, without formats that are not known, and with whole numbers that have
    no bound of at most 16 digits. strict: with these two, so that whoever compiles it refuses them.
    RecursionError where it is nested too deep."""
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
