"""Translate the fields of another API to ours: rename, pass on, or refuse them.

Owns what all such dialects have in common. Must not know any of them. Values stay the bytes they
are: what is wrong with them is said by whoever understands them, by the name that the client knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pageturner.errors import ClientError
from pageturner.server.admission.limits import RequestLimits, check_values
from pageturner.server.api.base.body import (
    NOT_JSON,
    OURS,
    RequestBody,
    bad_request,
    body_of,
    why_not_json,
)
from pageturner.server.api.base.call import Reader

log = logging.getLogger("pageturner")
T = TypeVar("T")
Fields = dict[str, msgspec.Raw]
_OBJECT = msgspec.json.Decoder(Fields)
_NULL = b"null"


def fields_of(raw: bytes, limits: RequestLimits) -> Fields:
    """The fields of a body that are not null. ClientError where it is no JSON object, or holds too
    much."""
    check_values(raw, limits.values, "the body")
    return fields_within(raw, "the body")


def fields_within(raw: bytes, name: str) -> Fields:
    """The same of an object within it."""
    try:
        found = _OBJECT.decode(raw)
    except NOT_JSON as error:
        said = why_not_json(raw, error)
        raise bad_request("invalid_json", f"{name} must be a JSON object: {said}") from None
    return {key: value for key, value in found.items() if bytes(value) != _NULL}


def value_of(fields: Fields, name: str, kind: type[Any] | Any, default: Any = None) -> Any:
    """Decode the value of one field. Raises ClientError if it is invalid."""
    if name not in fields:
        return default
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except msgspec.ValidationError as error:
        raise bad_request("invalid_type", f"{name}: {error}"[:400], name) from None
    except NOT_JSON as error:
        said = why_not_json(bytes(fields[name]), error)
        raise bad_request("invalid_json", f"{name} is not valid JSON: {said}"[:400], name) from None


def content_of(texts: list[str]) -> Any:
    """The content of a chat message with these texts: parts, which a template joins in its way."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def string_in(block: dict[str, Any], name: str, place: str) -> str:
    """A field of a block of content, which must be a string. place: where the block stands."""
    value = block.get(name)
    if not isinstance(value, str):
        message = f"{place}.{name} must be a string"
        raise bad_request("invalid_type", message, place.partition("[")[0])
    return value


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """One of the `tool_calls` of a chat message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(id: str, text: str, names: Mapping[Any, Any]) -> dict[str, Any]:
    """The chat message of a result. names: of the tools that were called, by the ids of calls."""
    named = {"name": names[id]} if id in names else {}
    return {"role": "tool", "tool_call_id": id, "content": text, **named}


def refuse(
    fields: Fields, neutral: Mapping[str, tuple[Any, ...]], why: str = "is not supported yet"
) -> None:
    """Remove unsupported fields. Raises ClientError 400 if one has a value that is not neutral."""
    for name in neutral.keys() & fields.keys():
        value = value_of(fields, name, Any)
        if not any(value == one and type(value) is type(one) for one in neutral[name]):
            raise bad_request("unsupported_parameter", f"{name} {why}: leave it out", name)
        del fields[name]


class FieldMap(msgspec.Struct, frozen=True):
    """The fields of one dialect.

    taken    fields that the dialect reads itself, or passes over
    same     fields that are ours as they are
    options  what the client calls it -> our field
    passed_over  fields that change no answer, and are named in the log
    names    our field -> what the client calls it in a refusal, where that differs
    neutral  field that is not supported -> values that change nothing and are taken
    why      what a refusal says of such a field
    """

    taken: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    options: dict[str, str] = {}
    passed_over: tuple[str, ...] = ()
    names: dict[str, str] = {}
    neutral: dict[str, tuple[Any, ...]] = {}
    why: str = "is not supported yet"

    @property
    def own(self) -> frozenset[str]:
        """All names that are read or passed over here."""
        return frozenset({*self.taken, *self.options, *self.passed_over})

    def passed_on(self, fields: Fields) -> dict[str, Any]:
        """The fields of ours that need no reading here: options, those of `same`, and extra fields,
        of which `to_openai_request` takes EXTRAS, refuses what would change the answer and is not there, and
        names the rest in the log. ClientError for fields of another shape, which would be passed
        over."""
        refuse(fields, self.neutral, self.why)
        strange = fields.keys() & OURS - EXTRAS - self.own - {*self.same}
        if strange:
            name = min(strange)
            raise bad_request(
                "unsupported_parameter", f"{name} is not a field here: leave it out", name
            )
        same = {name: value for name, value in fields.items() if name not in self.own}
        return same | self.optional(fields)

    def optional(self, fields: Fields) -> dict[str, Any]:
        """The fields of ours that its options are. The log names those that are passed over."""
        if passed := fields.keys() & {*self.passed_over}:
            log.info("ignored options: %s", ", ".join(sorted(passed)))
        return {ours: fields[name] for name, ours in self.options.items() if name in fields}

    def to_openai_request(self, ours: Mapping[str, Any], limits: RequestLimits) -> RequestBody:
        """The request that these fields of ours are."""
        raw = {
            name: bytes(value if isinstance(value, msgspec.Raw) else msgspec.json.encode(value))
            for name, value in ours.items()
        }
        return self.renaming(lambda: body_of(raw, limits))

    def renaming(self, read: Callable[[], T]) -> T:
        """The outcome of `read`; its refusals say the client's names."""
        try:
            return read()
        except ClientError as error:
            theirs = self.names.get(error.param or "")
            if theirs is None:
                raise
            # no part of a word, or of a flag
            ours = rf"(?<![\w-]){re.escape(str(error.param))}(?![\w-])"
            message = re.sub(ours, lambda _: theirs, error.message)
            raise ClientError(error.status, error.code, message, theirs) from None

    def renames(self, read: Reader) -> Reader:
        """A function as `read`, whose refusals say the client's names."""
        return lambda body, served: self.renaming(lambda: read(body, served))


# dialect -> its fields
FIELD_MAPS = msgspec.json.decode(
    Path(__file__).with_name("field_maps.json").read_bytes(), type=dict[str, FieldMap]
)
# fields of ours that every dialect takes as they are, beside its own: they say how tokens are chosen,
# and when
EXTRAS = frozenset(FIELD_MAPS["every dialect"].same)
