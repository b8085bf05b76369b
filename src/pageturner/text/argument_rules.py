"""Arguments of a call that are not written as JSON, as rules of a grammar made from a JSON schema:
those of Python's calls, of Gemma's, and those between marks of their own.

Owns what of a schema is held in these: types with their bounds, properties in order, required
ones, enum, const, anyOf, allOf, items and references within the schema; patterns and formats of
texts in Python's calls; all of a value between marks that is no text. The rest is passed over, or
refused where the schema is strict. Must not know what stands around arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pageturner.text.call_arguments import ITEM, type_name
from pageturner.text.grammar.json_schema import as_grammars_take_it, schema_text
from pageturner.text.structured_outputs import literal_regex
from pageturner.text.tool_formats import GEMMA, PYTHON, TAGGED, ToolFormat, to_json

MAX_RULES = 4096
MAX_COUNTED = 4096  # characters of a text or items of a list, to which a bound is held
_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LENGTHS = ("minLength", "maxLength")
_TEXTS = (*_LENGTHS, "pattern", "format")
_HELD_WORDS = (
    "type properties required enum const anyOf oneOf allOf items minItems maxItems "
    "additionalProperties $ref"
)
_HELD = frozenset((*_NUMBER_BOUNDS, *_TEXTS, *_HELD_WORDS.split()))
# keywords that say nothing of a value
_SAYING_NOTHING_WORDS = (
    "title description default examples deprecated readOnly writeOnly nullable $defs "
    "definitions $schema $id $comment"
)
_SAYING_NOTHING = frozenset(_SAYING_NOTHING_WORDS.split())
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


_TAGGED = r"""
KEY: /[A-Za-z0-9_\-]{1,64}/
"""
_TAG = re.compile(r'[^/<>"\n][^<>"\n]{0,127}')
TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_NESTED = 8  # schemas whose types are looked up


class Unwritable(Exception):
    """A schema that asks for what this way of writing has no form for."""


@dataclass(slots=True)
class ArgumentRules:
    """The rules of all tools of a request, in one way of writing.

    symbols  what a pattern of the format is in the grammar
    strict   of the schema that is written: nothing of it is passed over
    """

    format: ToolFormat
    symbols: Callable[[str], str] = str
    strict: bool = False
    _within: int = 0  # other values, whose members have marks
    rules: list[str] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)
    _root: dict[str, Any] = field(default_factory=dict)
    _terminals: dict[tuple[int, int | None, str], tuple[str, str]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.format.arguments

    def text(self) -> str:
        """All rules that were made, and those that they stand on."""
        if self.kind == PYTHON:
            return "\n".join((_NUMBERS, _PYTHON, *self.rules))
        base = [_TAGGED]
        if self.kind == GEMMA:
            base = [_NUMBERS, _GEMMA, f"string: {self._string({})}"]
        return "\n".join((*base, *(rule for _, rule in self._terminals.values()), *self.rules))

    def _until(self, least: int, most: int | None, mark: str) -> str:
        """So many characters of any text that does not have the mark, and the mark behind it."""
        key = (least, most, mark)
        if key not in self._terminals:
            self._terminals[key] = self._text(f"TEXT{len(self._terminals)}", key)
        return self._terminals[key][0]

    def _text(self, name: str, key: tuple[int, int | None, str]) -> tuple[str, str]:
        least, most, mark = key
        bare = literal_regex(mark.strip("\n"))
        ends = self.symbols(mark)
        count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        rule = f"{name}: /(?s:.{count})/ & ~(/(?s:.*){bare}(?s:.*)/)"
        if ends.startswith("<["):
            return f"{name} {ends}", rule
        return name.lower(), f"{rule}\n{name.lower()}[lazy]: {name} /{literal_regex(mark)}/"

    def arguments(self, schema: dict[str, Any], strict: bool) -> str:
        """The symbol of what stands where a call has its arguments."""
        self._root, self._known, self.strict = schema, {}, strict
        self._check(schema)
        schema = self._merged(schema)
        if self.kind == GEMMA:
            return self._object(schema)
        if isinstance(schema.get("properties"), dict):
            return self._pairs(schema, "=")
        if self.kind == PYTHON:
            return "pairs"
        pair = self._rule(self._tagged("$KEY", True))
        return f"({pair} ({self._comma} {pair})*)?"

    @property
    def _comma(self) -> str:
        """Return what stands between two arguments."""
        if self.kind != TAGGED:
            return "COMMA"
        return "WS?" * (" $ARGS" in self.format.calls[0])

    def _tagged(self, name: str, schema: Any) -> str:
        """An argument between its marks. A word for its type tells texts from what is as in JSON;
        without one its types do."""
        if name != "$KEY" and not _TAG.fullmatch(name):
            raise Unwritable(f"a property {name[:40]!r}")
        if isinstance(schema, dict):
            self._check(schema)
        if schema is False:
            raise Unwritable("what may never be there")
        types = self.types(schema)
        words = self.format.types
        ways = []
        if not types or "string" in types:
            value = self._tagged_value(name, schema, True)
            ways.append(self._marked(name, words.get("string", ""), value))
        others = sorted(types - {"string"})
        if not ways or (words and (others or not types)):
            value = self._tagged_value(name, _narrowed(schema, others), False)
            word = words.get("".join(others), words.get("", ""))
            ways.append(self._marked(name, word, value))
        return " | ".join(ways)

    def _marked(self, name: str, word: str, value: str) -> str:
        head = self.format.parameter.partition("$VALUE")[0].replace("$TYPE", word)
        before, _, behind = head.partition("$KEY")
        if name == "$KEY":
            return f"{self.symbols(before)} KEY {self.symbols(behind)} {value}"
        return f"{self.symbols(before + name.replace(' ', '␣') + behind)} {value}"

    def _tagged_value(self, name: str, schema: Any, text: bool) -> str:
        """A value with the mark behind it."""
        close = self.format.parameter.partition("$VALUE")[2].replace("$KEY", name)
        if not text:
            return f"{self._as_whole(schema)} {self.symbols(close)}"
        least: int | None = None
        most: int | None = None
        if isinstance(schema, dict):
            merged = self._merged(schema)
            if known := _known(merged):
                ways = " | ".join(to_json(str(one)) for one in known)
                return f"({ways}) {self.symbols(close)}"
            least, most = self._counts(merged, _LENGTHS)
        return self._until(least or 0, most, close)

    def _as_whole(self, schema: Any) -> str:
        """A value as JSON, with all that its schema says, or with its members in marks."""
        if self.format.nested and isinstance(schema, dict) and self._within < MAX_NESTED:
            self._within += 1
            members = self._members(self._merged(schema), self.types(schema))
            self._within -= 1
            if members:
                return self._rule(members)
        names = ("$defs", "definitions")
        made = {name: self._root[name] for name in names if name in self._root}
        if isinstance(schema, dict):
            made = schema | made
        return self._rule(f"%json {schema_text(made, self.strict)}")

    def _members(self, schema: dict[str, Any], types: set[str]) -> str:
        """The members of an object or a list, each in its marks; "": it is written as JSON."""
        if types == {"object"} and isinstance(schema.get("properties"), dict):
            return self._pairs(schema, "=")
        if types != {"array"} or not isinstance(schema.get("items"), dict):
            return ""
        least, most = self._counts(schema, ("minItems", "maxItems"))
        item = self._rule(self._tagged(ITEM, schema["items"]))
        return f"{item}{{{least or 0},{'' if most is None else most}}}"

    def types(self, schema: Any, depth: int = 0) -> set[str]:
        """Return what JSON Schema calls the types that a value may have; (): any."""
        if not isinstance(schema, dict) or depth > MAX_NESTED:
            return set()
        schema = self._merged(schema)
        if known := _known(schema):
            return set(map(type_name, known))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                found = [self.types(one, depth + 1) for one in schema[word]]
                return set().union(*found) if all(found) else set()
        types = schema.get("type", "object" * ("properties" in schema))
        if isinstance(types, str):
            types = [types]
        return {one for one in types or () if one in TYPES}

    def _rule(self, body: str) -> str:
        if len(self.rules) >= MAX_RULES:
            raise Unwritable(f"more than {MAX_RULES} rules")
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _check(self, schema: dict[str, Any]) -> None:
        """Unwritable where a keyword of a strict schema would be passed over."""
        held = _HELD if self.kind == PYTHON else _HELD - {"pattern", "format"}
        unknown = schema.keys() - held - _SAYING_NOTHING
        unknown = {name for name in unknown if not name.startswith("x-")}
        if self.strict and unknown:
            raise Unwritable(f"the keyword {min(unknown)[:40]!r}")

    def _value(self, schema: Any) -> str:
        if schema is False:
            raise Unwritable("what may never be there")
        if not isinstance(schema, dict):
            return "value"
        self._check(schema)
        if id(schema) in self._known:
            return self._known[id(schema)]
        name = self._rule("")
        place = int(name[1:])
        self._known[id(schema)] = name
        self.rules[place] = f"{name}: {self._body(schema)}"
        return name

    def _merged(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema with all of `allOf` in it."""
        if "$ref" in schema:
            return self._merged(self._referred(schema["$ref"]))
        made = {name: value for name, value in schema.items() if name != "allOf"}
        for one in schema.get("allOf") or ():
            for name, value in self._merged(one).items() if isinstance(one, dict) else ():
                known = made.get(name)
                if isinstance(known, dict) and isinstance(value, dict):
                    made[name] = {**known, **value}
                elif name == "required":
                    made[name] = [*(known or ()), *value]
                else:
                    made[name] = value
        return made

    def _body(self, schema: dict[str, Any]) -> str:
        if "allOf" in schema:
            return self._body(self._merged(schema))
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
            "string": lambda: self._string(schema),
            "integer": lambda: self._as_json("integer", schema, _NUMBER_BOUNDS) or "INTEGER",
            "number": lambda: self._as_json("number", schema, _NUMBER_BOUNDS) or "NUMBER",
            "boolean": lambda: f"{self._literal(True)} | {self._literal(False)}",
            "null": lambda: self._literal(None),
            "array": lambda: self._list(schema),
            "object": lambda: self._object(schema),
        }
        return made[kind]() if isinstance(kind, str) and kind in made else "value"

    def _as_json(self, kind: str, schema: dict[str, Any], keywords: tuple[str, ...]) -> str:
        """The symbol of a value that is written as in JSON, where one of the keywords holds it;
        else ""."""
        held = {name: schema[name] for name in keywords if name in schema}
        if kind == "string":
            held |= zip(_LENGTHS, self._counts(schema, _LENGTHS), strict=True)
        held = {name: value for name, value in held.items() if value is not None}
        if not held:
            return ""
        held = as_grammars_take_it({"type": kind, **held}, strict=self.strict)
        held["x-guidance"] = {"lenient": not self.strict}
        return self._rule(f"%json {json.dumps(held, allow_nan=False)}")

    def _string(self, schema: dict[str, Any]) -> str:
        if self.kind == PYTHON:
            return self._as_json("string", schema, _TEXTS) or "STRING"
        least, most = self._counts(schema, _LENGTHS)
        quote = self.format.quote
        return self._rule(f"{self.symbols(quote)} {self._until(least or 0, most, quote)}")

    def _counts(
        self, schema: dict[str, Any], names: tuple[str, str]
    ) -> tuple[int | None, int | None]:
        """The least and the most of a schema that are held; None: there is no such bound."""
        least, most = (None if schema.get(name) is None else int(schema[name]) for name in names)
        if (least or 0) > MAX_COUNTED or (self.strict and (most or 0) > MAX_COUNTED):
            raise Unwritable(f"a bound of more than {MAX_COUNTED}")
        if most is not None and most < (least or 0):
            raise Unwritable(f"{names[0]} above {names[1]}")
        return least, None if (most or 0) > MAX_COUNTED else most

    def _list(self, schema: dict[str, Any]) -> str:
        item = self._value(schema.get("items"))
        least, most = self._counts(schema, ("minItems", "maxItems"))
        if most == 0:
            return '"[" "]"'
        more = f"{{{max((least or 0) - 1, 0)},{'' if most is None else most - 1}}}"
        inner = item if most == 1 else f"{item} (COMMA {item}){'*' if more == '{0,}' else more}"
        return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        if isinstance(schema.get("properties"), dict):
            return f'"{{" {self._pairs(schema, ":")} "}}"'
        if not isinstance(schema.get("additionalProperties"), dict):
            return "dict"
        pair = f"KEY COLON {self._value(schema['additionalProperties'])}"
        return f'"{{" ({pair} (COMMA {pair})*)? "}}"'

    def _pairs(self, schema: dict[str, Any], sign: str) -> str:
        """The properties, in order: each rule is what may still come, behind one or as the first of
        them."""
        required, known = schema.get("required") or (), schema["properties"]
        comma = self._comma
        names = list(dict.fromkeys((*known, *required)))
        if self.kind == GEMMA:
            names.sort()  # as its templates write them
        first = more = self._rule('""')
        for name in reversed(names):
            if self.kind == TAGGED:
                one = self._rule(self._tagged(name, known.get(name)))
            else:
                one = f"{self._name(name, sign)} {self._value(known.get(name))}"
            if name in required:
                first, more = self._rule(f"{one} {more}"), self._rule(f"{comma} {one} {more}")
            else:
                first = self._rule(f"{one} {more} | {first}")
                more = self._rule(f"{comma} {one} {more} | {more}")
        return first

    def _name(self, name: str, sign: str) -> str:
        if self.kind == PYTHON and sign == ":":
            return f"{self._literal(name)} COLON"
        word = name
        if self.kind != PYTHON:
            word = name.replace("-", "_")
        if not word.isidentifier():
            raise Unwritable(f"a property {name[:40]!r}")
        return to_json(name + sign)

    def _literal(self, value: Any) -> str:
        """A value as it must stand."""
        if self.kind == PYTHON:
            return to_json(repr(value))
        if isinstance(value, str):
            quote = self.symbols(self.format.quote)
            if not value:
                return f"{quote} {quote}"
            return f"{quote} {to_json(value)} {quote}"
        return to_json(to_json(value))

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


def _known(schema: dict[str, Any]) -> list[Any]:
    """The values that a schema names, if it does."""
    if "const" in schema:
        return [schema["const"]]
    named = schema.get("enum")
    if isinstance(named, list):
        return named
    return []


def _narrowed(schema: Any, types: list[str]) -> Any:
    """The schema for values of these types alone; []: of any."""
    if not types or not isinstance(schema, dict):
        return schema
    return {"allOf": [schema, {"type": types}]}


def property_types(schema: dict[str, Any]) -> dict[str, str]:
    """The types of each property of an object, and of those within it, by their paths, joined by
    commas; "": any."""
    rules = ArgumentRules(_ANY, _root=schema)
    found: dict[str, str] = {}

    def note(within: Any, path: str, depth: int) -> None:
        if not isinstance(within, dict) or depth > MAX_NESTED or len(found) > MAX_RULES:
            return
        merged = rules._merged(within)
        members = dict(merged.get("properties") or {})
        if isinstance(merged.get("items"), dict):
            members[ITEM] = merged["items"]
        for name, one in members.items():
            found[path + name] = ",".join(sorted(rules.types(one)))
            note(one, f"{path}{name}/", depth + 1)

    try:
        note(schema, "", 0)
        return found
    except (Unwritable, RecursionError, TypeError, AttributeError):
        return {}


_ANY = ToolFormat("", ())
