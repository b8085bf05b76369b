"""JSON Schema of the types by which requests are decoded, and small words to write schemas with.

Owns the way from a type of Python to a schema (JSON Schema 2020-12, as OpenAPI 3.1 takes it). Must
not know any field.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ANYTHING: Schema = {}
_WHOLE = ("enum", "anyOf", "$ref")  # keywords that say all there is to say of a type


def of_type(kind: Any) -> Schema:
    """The schema of what msgspec takes as this type, without references."""
    made = msgspec.json.schema(kind)
    return _flat(made, made.pop("$defs", {}))


def of_struct(kind: type[msgspec.Struct]) -> dict[str, Schema]:
    """The schema of each field of a struct."""
    return dict(_fields_of(kind))


@cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, Schema], ...]:
    names = kind.__struct_encode_fields__
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, of_type(hints[field]))
        for name, field in zip(names, kind.__struct_fields__, strict=True)
    )


def narrowed(schema: Schema, more: Mapping[str, Any]) -> Schema:
    """Return what both say. An enumeration or a choice of schemas stands for itself; what may be
    null still may."""
    if any(word in more for word in _WHOLE):
        return dict(more)
    return {**schema, **more}


def nullable(schema: Schema) -> Schema:
    """The same, or null."""
    if "type" not in schema or "enum" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": kinds if "null" in kinds else [*kinds, "null"]}


def one_of(*values: Any) -> Schema:
    """Return the schema of an enum of these values."""
    return {"enum": list(values)}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(properties: Mapping[str, Schema], *required: str, **more: Any) -> Schema:
    """An object with these properties, and whatever else. required: all but those whose names stand
    here behind a `-`, where any does; else exactly those that stand here."""
    if required and all(name.startswith("-") for name in required):
        absent = {name[1:] for name in required}
        required = tuple(name for name in properties if name not in absent)
    found: Schema = {"type": "object", "properties": dict(properties)}
    return {**found, **({"required": list(required)} if required else {}), **more}


def ref(name: str) -> Schema:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def _flat(schema: Schema, defs: Mapping[str, Schema]) -> Schema:
    if "$ref" in schema:
        return _flat(defs[schema["$ref"].rpartition("/")[2]], defs)
    made = {name: value for name, value in schema.items() if name not in ("title", "description")}
    for name in ("items", "additionalProperties"):
        if isinstance(made.get(name), dict):
            made[name] = _flat(made[name], defs)
    if "properties" in made:
        made["properties"] = {name: _flat(one, defs) for name, one in made["properties"].items()}
        if not made.get("required"):
            made.pop("required", None)
    if "anyOf" in made:
        return _joined([_flat(one, defs) for one in made["anyOf"]])
    if made.get("default", 0) is None:
        del made["default"]
    return made


def _joined(parts: list[Schema]) -> Schema:
    """Several schemas as one that names their types, where their other keywords do not get mixed
    up."""
    made: Schema = {"type": []}
    for part in parts:
        if (
            not isinstance(part.get("type"), str)
            or "enum" in part
            or part.keys() & made.keys() > {"type"}
        ):
            return {"anyOf": parts}
        made = {**made, **part, "type": [*made["type"], part["type"]]}
    return made
