"""Arguments of a call that are not written as JSON, as rules of a grammar made from a JSON schema: those of
Python's calls and of Gemma's.

Owns what of a schema is held in these two: types, properties in order, required ones, enum, const, anyOf,
items and references within the schema. The rest of it is passed over. Must not know what stands around
arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pageturner.text.tool_formats import GEMMA, PYTHON

MOST_RULES = 4096
_NUMBERS = r"""
INTEGER: /-?(0|[1-9][0-9]{0,15})/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/
"""
_PYTHON = r"""
STRING: /"([^"\\\n]|\\["'\\nt])*"|'([^'\\\n]|\\["'\\nt])*'/
KEY: STRING
COMMA: /, ?/
COLON: /: ?/
value: STRING | INTEGER | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (COMMA value)*)? "]"
dict: "{" (KEY COLON value (COMMA KEY COLON value)*)? "}"
pairs: (NAME "=" value (COMMA NAME "=" value)*)?
NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/
"""
_GEMMA = r"""
KEY: /[A-Za-z0-9_\-]{1,64}/
COMMA: ","
COLON: ":"
value: string | INTEGER | NUMBER | "true" | "false" | "null" | list | dict
list: "[" (value (COMMA value)*)? "]"
dict: "{" (KEY COLON value (COMMA KEY COLON value)*)? "}"
"""


class Unwritable(Exception):
    """A schema that asks for what this way of writing has no form for."""


@dataclass(slots=True)
class ArgumentRules:
    """The rules of all tools of a request, in one way of writing.

    quote  symbol of the mark around Gemma's strings
    """

    kind: str
    quote: str = ""
    rules: list[str] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)
    _root: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """All rules that were made, and those that they stand on."""
        if self.kind == PYTHON:
            return "\n".join((_NUMBERS, _PYTHON, *self.rules))
        string = f"string: {self.quote} {self._rest()}\n"
        return "\n".join((_NUMBERS, _GEMMA, string, *self.rules))

    def _rest(self) -> str:
        """Behind the mark that opens a string of Gemma."""
        if self.quote.startswith("<"):
            return f"GEMMA_TEXT {self.quote}\nGEMMA_TEXT: /(?s:.*)/"
        return 'gemma_rest\ngemma_rest[lazy]: /(?s:.*)<\\|"\\|>/'

    def arguments(self, schema: dict[str, Any]) -> str:
        """The symbol of what stands where a call has its arguments."""
        self._root, self._known = schema, {}
        if self.kind == GEMMA:
            return self._object(schema)
        if "properties" not in schema:
            return "pairs"
        return self._pairs(schema, "=")

    def _rule(self, body: str) -> str:
        if len(self.rules) >= MOST_RULES:
            raise Unwritable(f"more than {MOST_RULES} rules")
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return "value"
        if id(schema) in self._known:
            return self._known[id(schema)]
        name = self._rule("")
        place = int(name[1:])
        self._known[id(schema)] = name
        self.rules[place] = f"{name}: {self._body(schema)}"
        return name

    def _body(self, schema: dict[str, Any]) -> str:
        if "$ref" in schema:
            return self._value(self._referred(schema["$ref"]))
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return " | ".join(map(self._literal, schema["enum"]))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                return " | ".join(map(self._value, schema[word]))
        types = schema.get("type")
        kinds = types if isinstance(types, list) else [types]
        return " | ".join(self._type(kind, schema) for kind in kinds) or "value"

    def _type(self, kind: Any, schema: dict[str, Any]) -> str:
        made: dict[Any, Callable[[], str]] = {
            "string": lambda: "STRING" if self.kind == PYTHON else "string",
            "integer": lambda: "INTEGER",
            "number": lambda: "NUMBER",
            "boolean": lambda: f"{self._literal(True)} | {self._literal(False)}",
            "null": lambda: self._literal(None),
            "array": lambda: self._list(schema),
            "object": lambda: self._object(schema),
        }
        return made[kind]() if isinstance(kind, str) and kind in made else "value"

    def _list(self, schema: dict[str, Any]) -> str:
        item = self._value(schema.get("items"))
        least = schema.get("minItems", 0)
        inner = f"{item} (COMMA {item})*"
        return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        if not isinstance(schema.get("properties"), dict):
            return "dict"
        return f'"{{" {self._pairs(schema, ":")} "}}"'

    def _pairs(self, schema: dict[str, Any], sign: str) -> str:
        """The properties, in order: each rule is what may still come, behind one or as the first of them."""
        required = schema.get("required") or ()
        names = list(schema["properties"])
        if self.kind == GEMMA:
            names.sort()  # as its templates write them
        first = more = self._rule('""')
        for name in reversed(names):
            one = f"{self._name(name, sign)} {self._value(schema['properties'][name])}"
            if name in required:
                first, more = self._rule(f"{one} {more}"), self._rule(f"COMMA {one} {more}")
            else:
                first = self._rule(f"{one} {more} | {first}")
                more = self._rule(f"COMMA {one} {more} | {more}")
        return first

    def _name(self, name: str, sign: str) -> str:
        if self.kind == PYTHON and sign == ":":
            return f"{self._literal(name)} COLON"
        if not (name.isidentifier() if self.kind == PYTHON else name.replace("-", "_").isidentifier()):
            raise Unwritable(f"a property {name[:40]!r}")
        return json.dumps(name + sign, ensure_ascii=False)

    def _literal(self, value: Any) -> str:
        """A value as it must stand."""
        if self.kind == PYTHON:
            return json.dumps(repr(value), ensure_ascii=False)
        if isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
            return f"{self.quote} {text} {self.quote}" if value else f"{self.quote} {self.quote}"
        return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)

    def _referred(self, reference: Any) -> Any:
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise Unwritable("a reference to another schema")
        for step in reference.lstrip("#").strip("/").split("/"):
            if step:
                found = found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise Unwritable("a reference to nothing")
        return found
