"""Translate the fields of another API to ours: rename, pass on, or refuse them.

Owns what all such dialects have in common. Must not know any of them. Values stay the bytes they
are: what is wrong with them is said by whoever understands them, by the name that the client knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from pageturner.errors import ClientError
from pageturner.server.admission.limits import RequestLimits, check_values
from pageturner.server.api.base.body import (
    DIALECTS_OWN,
    RequestBody,
    bad_request,
    body_of,
    why_not_json,
)

T = TypeVar("T")
# fields of ours that every shape takes as they are, beside its own: they say how tokens are chosen,
# and when
EXTRAS = frozenset(
    {
        "top_k",
        "min_p",
        "min_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "structured_outputs",
        "skip_special_tokens",
        "parse_special",
        "chat_template_kwargs",
        "speculation",
        "cache_salt",
        "priority",
        "deadline_ms",
        "ttft_target_ms",
        "tpot_target_ms",
        "user",
        "forced_end",
        "force_ids",
        "inject_fault",
        "session",
    }
)
Fields = dict[str, msgspec.Raw]
_OBJECT = msgspec.json.Decoder(Fields)
_NULL = b"null"
_OURS = frozenset(RequestBody.__struct_fields__) - DIALECTS_OWN


def fields_of(raw: bytes, limits: RequestLimits) -> Fields:
    """The fields of a body that are not null. ClientError where it is no JSON object, or holds too
    much."""
    check_values(raw, limits.values, "the body")
    return fields_within(raw, "the body")


def fields_within(raw: bytes, name: str) -> Fields:
    """The same of an object within it."""
    try:
        found = _OBJECT.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = why_not_json(bytes(fields[name]), error)
        raise bad_request("invalid_json", f"{name} is not valid JSON: {said}"[:400], name) from None


def content_of(texts: list[str]) -> Any:
    """The content of a chat message with these texts: parts, which a template joins in its way."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def refuse(
    fields: Fields, neutral: Mapping[str, tuple[Any, ...]], why: str = "is not supported yet"
) -> None:
    """Remove unsupported fields. Raises ClientError 400 if one has a value that is not neutral."""
    for name in neutral.keys() & fields.keys():
        value = value_of(fields, name, Any)
        if not any(value == one and type(value) is type(one) for one in neutral[name]):
            raise bad_request("unsupported_parameter", f"{name} {why}: leave it out", name)
        del fields[name]


@dataclass(frozen=True, slots=True)
class FieldMap:
    """The fields of one dialect.

    taken    fields that the dialect reads itself, or passes over
    same     fields that are ours as they are
    names    our field -> what the client calls it, where that differs
    neutral  field that is not supported -> values that change nothing and are taken
    """

    taken: Collection[str] = ()
    same: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def passed_on(self, fields: Fields) -> dict[str, Any]:
        """The fields of ours that need no translation: those of `same`, and extra fields, of which
        `to_openai_request` takes EXTRAS, refuses what would change the answer and is not there, and
        names the rest in the log. ClientError for fields of another shape, which would be passed
        over."""
        refuse(fields, self.neutral)
        strange = fields.keys() & _OURS - EXTRAS - {*self.taken} - {*self.same}
        if strange:
            name = min(strange)
            raise bad_request(
                "unsupported_parameter", f"{name} is not a field here: leave it out", name
            )
        return {name: value for name, value in fields.items() if name not in self.taken}

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
