"""JSON Schema for tests, as far as the document of the API needs it: whether a value is valid, and values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
_KINDS: dict[str, Any] = {
    "null": type(None),
    "boolean": bool,
    "string": str,
    "array": list,
    "object": dict,
    "number": int | float,
    "integer": int | float,
}
KNOWN = frozenset(
    {
        "$ref",
        "type",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "not",
        "if",
        "then",
        "else",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "minLength",
        "maxLength",
        "pattern",
        "items",
        "contains",
        "minItems",
        "maxItems",
        "uniqueItems",
        "properties",
        "required",
        "additionalProperties",
        "propertyNames",
        "maxProperties",
        "description",
        "default",
        "examples",
        "contentMediaType",
        "title",
        "x-neutral",
    }
)


class Validator:
    """Schemas of one document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def resolved(self, schema: Schema) -> Schema:
        """The schema that a reference means."""
        while "$ref" in schema:
            place: Any = self._document
            for part in schema["$ref"].split("/")[1:]:
                place = place[part]
            schema = place
        return schema

    def valid(self, schema: Schema, value: Any) -> bool:
        return self.wrong(schema, value) == ""

    def wrong(self, schema: Schema, value: Any, at: str = "$") -> str:
        """ "" or what is wrong with a value."""
        schema = self.resolved(schema)
        assert schema.keys() <= KNOWN, f"{at}: {schema.keys() - KNOWN}"
        for found in (
            self._whole(schema, value, at),
            self._sized(schema, value, at),
            self._within(schema, value, at),
        ):
            if found:
                return found
        return ""

    def _whole(self, schema: Schema, value: Any, at: str) -> str:
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(kind, value) for kind in kinds):
            return f"{at} is {value!r:.60}, no {kinds}"
        if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
            return f"{at} is {value!r:.60}, none of {schema['enum']}"
        if "const" in schema and not _same(value, schema["const"]):
            return f"{at} is {value!r:.60}, not {schema['const']}"
        if "not" in schema and self.valid(schema["not"], value):
            return f"{at} is {value!r:.60}, which it must not be"
        if "anyOf" in schema and not any(self.valid(one, value) for one in schema["anyOf"]):
            return f"{at}: " + " and ".join(self.wrong(one, value, at) for one in schema["anyOf"])
        for one in schema.get("allOf", ()):
            if found := self.wrong(one, value, at):
                return found
        if "if" in schema:
            branch = "then" if self.valid(schema["if"], value) else "else"
            return self.wrong(schema.get(branch, {}), value, at)
        return ""

    def _sized(self, schema: Schema, value: Any, at: str) -> str:
        if _is("number", value):
            least, above = (
                schema.get("minimum", -math.inf),
                schema.get("exclusiveMinimum", -math.inf),
            )
            if not (value >= least and value > above and value <= schema.get("maximum", math.inf)):
                return f"{at} is {value}, out of bounds"
        size = len(value) if isinstance(value, str | list) else 0
        least, most = (
            ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        )
        if isinstance(value, str | list) and not schema.get(least, 0) <= size <= schema.get(
            most, math.inf
        ):
            return f"{at} has {size}"
        if (
            isinstance(value, str)
            and "pattern" in schema
            and not re.search(_python(schema["pattern"]), value)
        ):
            return f"{at} is {value!r:.60}, not as {schema['pattern']}"
        return ""

    def _within(self, schema: Schema, value: Any, at: str) -> str:
        if isinstance(value, list):
            for i, one in enumerate(value):
                if found := self.wrong(schema.get("items", {}), one, f"{at}[{i}]"):
                    return found
            if "contains" in schema and not any(
                self.valid(schema["contains"], one) for one in value
            ):
                return f"{at} has nothing of what it must have"
            if schema.get("uniqueItems") and any(
                _same(a, b) for i, a in enumerate(value) for b in value[:i]
            ):
                return f"{at} has something twice"
        if isinstance(value, dict):
            return self._of_object(schema, value, at)
        return ""

    def _of_object(self, schema: Schema, value: dict[str, Any], at: str) -> str:
        properties = schema.get("properties", {})
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{at} has no {missing}"
        if len(value) > schema.get("maxProperties", math.inf):
            return f"{at} has {len(value)} properties"
        for name, one in value.items():
            if "propertyNames" in schema and (
                found := self.wrong(schema["propertyNames"], name, at)
            ):
                return found
            more = schema.get("additionalProperties", {})
            of = properties.get(
                name, {"not": {}} if more is False else {} if more is True else more
            )
            if found := self.wrong(of, one, f"{at}.{name}"):
                return found
        return ""

    # -- values ----------------------------------------------------------------------------------------------
    def values(self, schema: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
        """Values that are valid."""
        whole = self.resolved(schema)
        made = self._values(whole, depth)
        return made.filter(lambda value: self.valid(whole, value))

    def _values(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        if "enum" in schema or "const" in schema:
            return st.sampled_from(schema.get("enum", [schema.get("const")]))
        if "anyOf" in schema and "type" not in schema:
            return st.one_of([self.values(one, depth + 1) for one in schema["anyOf"]])
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds:
            return JSON
        return st.one_of([self._of_kind(kind, schema, depth) for kind in kinds])

    def _of_kind(self, kind: str, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        if kind == "null":
            return st.none()
        if kind == "boolean":
            return st.booleans()
        if kind == "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        if kind == "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(least, schema.get("maximum"), allow_nan=False, allow_infinity=False)
        if kind == "string":
            if "pattern" in schema:
                return st.from_regex(
                    _python(schema["pattern"]), alphabet=st.characters(codec="utf-8")
                )
            return st.text(TEXT, min_size=schema.get("minLength", 0), max_size=20)
        if kind == "array":
            items = self.values(schema["items"], depth + 1) if "items" in schema else JSON
            least = schema.get("minItems", 1 if "contains" in schema else 0)
            return st.lists(
                items, min_size=least, max_size=min(least + 2, schema.get("maxItems", least + 2))
            )
        return self._objects(schema, depth)

    def _objects(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        if schema.get("maxProperties") == 0:
            return st.just({})
        known = {
            name: self.values(one, depth + 1)
            for name, one in schema.get("properties", {}).items()
            if depth < 3
        }
        required = {name: known.pop(name, JSON) for name in schema.get("required", ())}
        if not known and not required and schema.get("additionalProperties") is not False:
            names = (
                self.values({"type": "string", **schema.get("propertyNames", {})})
                if "propertyNames" in schema
                else st.text(TEXT, max_size=4)
            )
            more = schema.get("additionalProperties", {})
            return st.dictionaries(
                names,
                self.values(more, depth + 1) if more and more is not True else JSON,
                max_size=2,
            )
        few = (
            st.lists(st.sampled_from(sorted(known)), max_size=2, unique=True)
            if known
            else st.just([])
        )
        return few.flatmap(
            lambda names: st.fixed_dictionaries(
                {**required, **{name: known[name] for name in names}}
            )
        )

    def others(self, schema: Schema) -> st.SearchStrategy[Any]:
        """Values that are not valid: of all kinds, and those beside the bounds."""
        whole = self.resolved(schema)
        near: list[Any] = [None, True, "", "x", [], {}, -1, 0, 1.5, [None], [[]], {"x": 1}, ["", 5]]
        for word in ("minimum", "maximum", "exclusiveMinimum"):
            if word in whole:
                near += [whole[word] - 1, whole[word] + 1, whole[word] - 0.5]
        near += ["x" * (whole[word] + 1) for word in ("maxLength",) if word in whole]
        near += [
            [one] * (whole["maxItems"] + 1)
            for one in ("y", 1)
            if whole.get("maxItems", 5000) < 5000
        ]
        wrong = [value for value in near if not self.valid(whole, value)]
        if not wrong:
            return st.nothing()
        return st.one_of(
            st.sampled_from(wrong), JSON.filter(lambda value: not self.valid(whole, value))
        )


TEXT = st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs"))
_LEAF = st.none() | st.booleans() | st.integers(-5, 5) | st.text(TEXT, max_size=5)
JSON = st.recursive(
    _LEAF,
    lambda some: (
        st.lists(some, max_size=2) | st.dictionaries(st.text(TEXT, max_size=3), some, max_size=2)
    ),
    max_leaves=3,
)


def _python(pattern: str) -> str:
    """A pattern as Python has it: `$` is the very end."""
    return pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind]) and not (kind == "integer" and value != int(value))


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
