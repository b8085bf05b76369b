"""JSON that others have sent, as a type of ours.

Owns what counts as unreadable: no JSON, no text, nested too deeply, or of another type. Must not
know any field. Imports little: the simulator reads prompts with it, too.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pageturner.errors import ClientError

T = TypeVar("T")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decoded(raw: bytes | msgspec.Raw, kind: type[T]) -> T | None:
    """Return the value; None where it cannot be read as this type."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE:
        return None


def decode_body(raw: bytes, kind: type[T], wanted: str) -> T:
    """Return the value of a body. ClientError 400 says what is wanted where it is something
    else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        raise ClientError(400, "invalid_json", f"{wanted}: {error}") from error
