"""The form of an answer that clients ask for: OpenAI's `response_format`, vLLM's
`structured_outputs`.

Owns those two fields, and which of them were checked already. Must not know how a grammar is
written (text/structured_outputs.py) or followed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from pageturner.errors import ClientError
from pageturner.text.structured_outputs import StructuredOutputsParams

SHAPE = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field, as far as it is understood; None: not given."""

    json: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class KnownGrammars:
    """The grammars of what was asked for and found good, by a name for what that was: they need no
    second check. Bounded in number and in characters; what was used last stays."""

    MOST = 256
    MAX_CHARACTERS = 4 * 1024 * 1024

    def __init__(self) -> None:
        self._made: OrderedDict[bytes, str] = OrderedDict()
        self._characters = 0

    def get(self, asked: bytes) -> str | None:
        made = self._made.get(asked)
        if made is not None:
            self._made.move_to_end(asked)
        return made

    def put(self, asked: bytes, made: str) -> None:
        self._characters += len(made) - len(self._made.pop(asked, ""))
        self._made[asked] = made
        while len(self._made) > self.MOST or self._characters > self.MAX_CHARACTERS:
            self._characters -= len(self._made.popitem(last=False)[1])


def asks(response_format: dict[str, Any] | None, structured: dict[str, Any] | None) -> bool:
    """Return whether the two fields ask for a grammar."""
    return bool(structured) or bool(response_format and response_format.get("type") != "text")


def grammar_of(
    response_format: dict[str, Any] | None, structured: dict[str, Any] | None
) -> str | None:
    """The grammar that the two fields ask for, or None. ClientError for what is wrong with them."""
    try:
        asked = _of_response_format(response_format) if response_format else None
    except ClientError as error:
        message = error.message.replace("structured_outputs", "response_format", 1)
        raise ClientError(400, error.code, message, "response_format") from None
    if not structured:
        return asked
    if asked is not None:
        message = (
            "response_format and structured_outputs both say what the answer must match: send one"
        )
        raise _bad("invalid_value", message, "structured_outputs")
    try:
        fields = msgspec.convert(structured, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise _bad("invalid_value", f"structured_outputs: {error}", "structured_outputs") from None
    return StructuredOutputsParams(**msgspec.structs.asdict(fields))


def _of_response_format(format: dict[str, Any]) -> str | None:
    kind = format.get("type")
    if kind == "text":
        return None
    named = format if kind == "json_object" else format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "json_object" and schema is None:
        return StructuredOutputsParams(json_object=True)
    if kind not in ("json_object", "json_schema"):
        message = (
            f"response_format: type is text, json_object or json_schema, not {str(kind)[:40]!r}"
        )
        raise _bad("unsupported_parameter", message, "response_format")
    if not isinstance(named, dict) or not isinstance(schema, dict | bool):
        raise _bad(
            "invalid_schema", f"response_format has no schema: send {SHAPE}", "response_format"
        )
    return StructuredOutputsParams(json=schema, strict=named.get("strict") is True)


def _bad(code: str, message: str, param: str) -> ClientError:
    return ClientError(400, code, message, param)
