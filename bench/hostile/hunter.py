"""Hostile requests made from what the API says of itself: every field of every operation, with values that are
too large, too many, too deep, repeated, of the wrong kind, or another tenant's.

Owns which cases there are; all of them follow from a document of OpenAPI, which is made of the structs that
requests are read with, and from a seed. A new field, header or route is attacked on the day it is added. Must
not know how a case is sent (whole_server.py, hostile_requests.py), nor how its harm is measured.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hostile.binary import words
from pageturner.server.api.base.body import RequestBody
from pageturner.server.api.base.foreign_fields import UNSUPPORTED

Path = tuple[str | int, ...]
MARK = "\ufdd0hunted"  # stands for the hostile value until a body is written
LARGEST = 1 << 20  # bytes of a body, about
DEEPEST = 3  # of fields within fields
BOUNDARY = b"hunted"
ASKED = ("prompt", "input", "messages")  # one of these makes an honest body
SHORT = {
    "max_tokens": 2,
    "max_output_tokens": 2,
    "options": {"num_predict": 2},
}  # of honest answers
QUERIES = ("limit", "after", "order", "purpose", "stream")
NUMBERS = words("json numbers")
KINDS = ("number", "large", "many", "deep", "repeated", "type", "other tenant")
TYPES = words("json types")
UNITS = words("json units")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a hostile value goes. kind: body, header, query, variable or form."""

    method: str
    path: str
    kind: str
    field: Path

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.kind} {'.'.join(map(str, self.field))}"


class Case(NamedTuple):
    """One request. name: says what is wrong with it; route: its path as the document has it; admin: it takes
    the admin key."""

    name: str
    method: str
    route: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    admin: bool


class Hunter:
    """The cases of one API.

    document  as /openapi.json has it
    known     values by which honest requests pass further: name of a field or a path's variable -> value
    theirs    what another tenant has: ids of responses, files, batches, sessions and so on
    """

    def __init__(
        self, document: dict[str, Any], known: dict[str, Any], theirs: tuple[str, ...] = ("theirs",)
    ) -> None:
        self._document, self._known, self._theirs = document, known, theirs
        self.bodies: dict[str, Any] = {}
        self._admin: set[str] = set()
        self._forms: set[str] = set()
        self.places = list(self._places())

    # -- what there is to attack -----------------------------------------------------------------------------
    def _places(self) -> Iterator[Place]:
        for path, operations in self._document["paths"].items():
            for method, one in operations.items():
                route = f"{method.upper()} {path}"
                if one.get("security") == [{"AdminKey": []}]:
                    self._admin.add(route)
                for parameter in map(self._resolved, one.get("parameters", [])):
                    kind = "variable" if parameter["in"] == "path" else "header"
                    yield Place(method.upper(), path, kind, (parameter["name"],))
                for query in QUERIES if method == "get" else ():
                    yield Place(method.upper(), path, "query", (query,))
                for form, content in one.get("requestBody", {}).get("content", {}).items():
                    schema = self._resolved(content["schema"])
                    body = self.bodies[route] = self._honest(schema)
                    hidden = (*RequestBody.__struct_fields__, *UNSUPPORTED)
                    names = [
                        (name,) for name in hidden if "max_tokens" in schema.get("properties", {})
                    ]
                    fields = [*self._fields(schema, 0), *names] if isinstance(body, dict) else [()]
                    kind = "body" if "json" in form else "form"
                    if kind == "form":
                        self._forms.add(route)
                    for field in dict.fromkeys([*fields, ("a_new_field",), ()]):
                        yield Place(method.upper(), path, kind, field)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema without a reference at its top, or several of which one is to be chosen."""
        while True:
            if "$ref" in schema:
                found: Any = self._document
                for name in schema["$ref"].split("/")[1:]:
                    found = found[name]
                schema = found
            elif inner := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
                own = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf", "allOf")}
                parts = [own, *map(self._resolved, inner)]
                every = {
                    k: v for part in reversed(parts) for k, v in part.get("properties", {}).items()
                }
                schema = own | parts[1] | ({"properties": every} if every else {})
            else:
                return schema

    def _fields(self, schema: dict[str, Any], depth: int, at: Path = ()) -> Iterator[Path]:
        schema = self._resolved(schema)
        for name, inner in schema.get("properties", {}).items() if depth < DEEPEST else ():
            yield (*at, name)
            yield from self._fields(inner, depth + 1, (*at, name))
        if "items" in schema and depth < DEEPEST:
            yield (*at, 0)
            yield from self._fields(schema["items"], depth + 1, (*at, 0))

    def _honest(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> Any:
        """The smallest value that a schema takes."""
        schema = self._resolved(schema)
        if name in self._known:
            return self._known[name]
        for word in ("const", "default"):
            if word in schema:
                return schema[word]
        if "enum" in schema:
            return schema["enum"][0]
        kind = schema.get("type", "object")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            wanted = schema.get("required", [])
            properties = schema.get("properties", {})
            if not wanted and not depth:
                wanted = [
                    name for name in ASKED if "enum" not in (properties.get(name) or {"enum": 0})
                ][:1]
            made = {one: self._honest(properties.get(one, {}), one, depth + 1) for one in wanted}
            short = (
                [] if depth else [k for k in SHORT if "enum" not in properties.get(k, {"enum": 0})]
            )
            return made | {name: SHORT[name] for name in short}
        if kind == "array":
            return [self._honest(schema.get("items", {}), "", depth + 1)] * max(
                1, schema.get("minItems", 1)
            )
        return {"string": "hello", "boolean": False, "null": None}.get(
            kind, max(1, schema.get("minimum", 1))
        )

    # -- what is done to it ----------------------------------------------------------------------------------
    def plan(self, seed: int) -> list[tuple[Place, str]]:
        """Every place with every kind of harm, in the order of a seed."""
        wanted = [(place, kind) for place in self.places for kind in KINDS]
        random.Random(seed).shuffle(wanted)
        return wanted

    def cases(self, seed: int, count: int, first: int = 0) -> Iterator[Case]:
        """So many cases: behind the last one of the plan come the same with other sizes."""
        plan = self.plan(seed)
        for number in range(first, first + count):
            place, kind = plan[number % len(plan)]
            dice = random.Random(f"{seed} {number}")
            yield self.case(place, kind, self._value(kind, dice), dice)

    def numbers(self) -> Iterator[Case]:
        """Every field of every body with each of the first three NUMBERS."""
        dice = random.Random(0)
        for place in self.places:
            for number in NUMBERS[:3] if place.kind == "body" else ():
                yield self.case(place, "number", number, dice)

    def _value(self, kind: str, dice: random.Random) -> str:
        """JSON."""
        unit = dice.choice(UNITS)
        n = int(100 * (LARGEST / 100) ** dice.random())
        if kind == "large":
            return f'"{unit * (n // len(unit))}"'
        if kind == "many":
            one = dice.choice(
                ("1", '"a"', "null", "{}", "[]", '{"role":"user","content":"a"}', "1e9")
            )
            if dice.random() < 0.3:
                return "{" + ",".join(f'"k{i}":{one}' for i in range(n // 16 + 1)) + "}"
            return f"[{','.join([one] * (n // len(one) + 1))}]"
        if kind == "deep":
            return dice.choice(("[" * n + "]" * n, '{"a":' * (n // 6) + "1" + "}" * (n // 6)))
        if kind == "other tenant":
            return json.dumps(dice.choice(self._theirs))
        return dice.choice(NUMBERS if kind == "number" else TYPES)

    def case(self, place: Place, kind: str, value: str, dice: random.Random) -> Case:
        """A request that is honest but for one value."""
        route = f"{place.method} {place.path}"
        headers = [(b"content-type", b"application/json")]
        path, body = place.path, b""
        plain = value.strip('"').encode("utf-8", "replace")[:60_000]
        for name in [part[1:-1] for part in path.split("/") if part.startswith("{")]:
            told = quoted(plain) if place.kind == "variable" else str(self._known.get(name, "none"))
            path = path.replace(f"{{{name}}}", told)
        if place.kind == "query":
            path += f"?{place.field[0]}={quoted(plain)}"
        if place.kind == "header":
            headers.append((str(place.field[0]).lower().encode(), printable(plain)))
        if route in self.bodies:
            body = self._written(route, place, kind, value)
        if route in self._forms:
            headers[0] = (b"content-type", b"multipart/form-data; boundary=" + BOUNDARY)
            body = form(place, plain, dice)
        name = f"{place} {kind} {value[:40]!r} of {len(value)}"
        return Case(name, place.method, place.path, path, headers, body, route in self._admin)

    def _written(self, route: str, place: Place, kind: str, value: str) -> bytes:
        text = json.dumps(self.bodies[route])
        if place.kind == "body":
            text = json.dumps(put(self.bodies[route], place.field, MARK))
        if kind == "repeated" and place.field and isinstance(place.field[-1], str):
            value = ",".join([value] + [f"{json.dumps(place.field[-1])}:{value}"] * 99)
        return text.replace(json.dumps(MARK), value).encode("utf-8", "replace")


def put(value: Any, field: Path, new: Any) -> Any:
    """A copy of a value with something new at a place of it, which is made where it is missing."""
    if not field:
        return new
    step, rest = field[0], field[1:]
    if isinstance(step, int):
        return [put(value[0] if isinstance(value, list) and value else None, rest, new)]
    table = dict(value) if isinstance(value, dict) else {}
    return table | {step: put(table.get(step), rest, new)}


def quoted(text: bytes) -> str:
    """A text as a part of a path or a query."""
    return "".join(chr(c) if chr(c).isalnum() else f"%{c:02X}" for c in text[:8000])


def printable(text: bytes) -> bytes:
    """A text as the value of a header."""
    return bytes(c for c in text[:20_000] if 32 <= c != 127)


def form(place: Place, text: bytes, dice: random.Random) -> bytes:
    """An upload with one part that is hostile, or many."""
    parts = {"purpose": b"batch", "file": b'{"custom_id":"a"}\n'}
    if place.kind == "form" and place.field:
        parts[str(place.field[0])] = text
    pieces = []
    for name, content in parts.items():
        head = f'Content-Disposition: form-data; name="{name}"' + (
            '; filename="f"' if name == "file" else ""
        )
        pieces += [b"--%s\r\n%s\r\n\r\n%s\r\n" % (BOUNDARY, head.encode(), content)] * dice.choice(
            (1, 1, 1, 99)
        )
    return b"".join(pieces) + b"--" + BOUNDARY + b"--\r\n"
