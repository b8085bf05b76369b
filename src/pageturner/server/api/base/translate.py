"""How the fields of another API become ours: other names, and what is done with the rest.

Owns what all such dialects have in common. Must not know any of them. Values stay the bytes they are: what is
wrong with them is said by whoever understands them, by the name that the client knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from pageturner.errors import ClientError
from pageturner.server.admission.limits import RequestLimits, check_values
from pageturner.server.api.base.body import (
    DIALECTS_OWN,
    RequestBody,
    bad_request,
    decode,
    why_not_json,
)

T = TypeVar("T")
# fields of ours that every shape takes as they are, beside its own: they say how tokens are chosen, and when
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
    """The fields of a body that are not null. ClientError where it is no JSON object, or holds too much."""
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
    """What one field says."""
    if name not in fields:
        return default
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except msgspec.ValidationError as error:
        raise bad_request("invalid_type", f"{name}: {error}"[:400], name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = why_not_json(bytes(fields[name]), error)
        raise bad_request("invalid_json", f"{name} is not valid JSON: {said}"[:400], name) from None


def refuse(
    fields: Fields, neutral: Mapping[str, tuple[Any, ...]], why: str = "is not supported yet"
) -> None:
    """Take what is not there yet out of the fields. ClientError 400 where it says more than one of the
    neutral values."""
    for name in neutral.keys() & fields.keys():
        value = value_of(fields, name, Any)
        if not any(value == one and type(value) is type(one) for one in neutral[name]):
            raise bad_request("unsupported_parameter", f"{name} {why}: leave it out", name)
        del fields[name]


def others(fields: Fields, taken: Iterable[str]) -> dict[str, Any]:
    """The fields beside those that were `taken`, for `understood`: it takes EXTRAS, refuses what would change
    the answer and is not there, and names the rest in the log. ClientError for fields of another shape, which
    would be passed over."""
    rest = {name: value for name, value in fields.items() if name not in frozenset(taken)}
    if strange := rest.keys() & _OURS - EXTRAS:
        name = min(strange)
        raise bad_request(
            "unsupported_parameter", f"{name} is not a field here: leave it out", name
        )
    return rest


def understood(
    ours: dict[str, Any], names: Mapping[str, str], limits: RequestLimits
) -> RequestBody:
    """The request that these fields of ours are. names: what the client calls them, where that differs."""
    return renaming(names, lambda: decode(msgspec.json.encode(ours), limits))


def renaming(names: Mapping[str, str], read: Callable[[], T]) -> T:
    """The outcome of `read`; its refusals say the client's names."""
    try:
        return read()
    except ClientError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        message = error.message.replace(str(error.param), theirs)
        raise ClientError(error.status, error.code, message, theirs) from None
