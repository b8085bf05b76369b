"""What a router reads of a request: which model it names, how it begins, and how much work it may be.

Owns these as one value. Keeps no text. What does not look like a request says nothing; a replica will say
what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

BYTES_PER_TOKEN = 4
MOST_NAME = 256  # characters of a model's name; a longer one names none


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    prefix  digests of the chunks of its prompt (prefix_digest.py)
    model   that it names; "": none
    prompt  tokens of its body, roughly
    most    tokens that its answer may have; 0: it says nothing
    """

    prefix: tuple[bytes, ...] = ()
    model: str = ""
    prompt: int = 0
    most: int = 0


NOTHING_ASKED = Asked()


class _Fields(msgspec.Struct):
    """What names a model and bounds an answer, in all shapes of the API. Of any type: see `_count`."""

    model: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"")
    n_predict: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Fields)


def asked_of(body: bytes, prefix: tuple[bytes, ...]) -> Asked:
    """What this body asks for."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked(prefix)
    limits = (
        fields.max_tokens,
        fields.max_completion_tokens,
        fields.max_output_tokens,
        fields.n_predict,
    )
    most = max(map(_count, limits))
    return Asked(prefix, _name(fields.model), len(body) // BYTES_PER_TOKEN, most)


def _count(raw: msgspec.Raw) -> int:
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) <= 9 else 0


def _name(raw: msgspec.Raw) -> str:
    if not bytes(raw).startswith(b'"'):
        return ""
    try:
        name = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return name if len(name) <= MOST_NAME else ""
