"""The hints that a router reads of a request to place it: which model it names, how it begins, how
much work it may be.

Owns these hints, and which bytes of a request stand in front of a cached prefix. A router has no
tokenizer: it sees a prompt as keyed digests of chunks of its bytes, and keeps no text. A body that
is no request gives no hints; a replica will say what is wrong with it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pageturner.http.decoding import decoded

BYTES_PER_TOKEN = 4
MAX_NAME = 256  # characters of a model's name; a longer one names none


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The part of one request that placement looks at.

    prefix  digests of the chunks of its prompt, or its token ids
    model   the model that it names; "": none
    prompt  tokens of its prompt, roughly; 0: it has none, as requests for pages
    max_tokens  that its answer may have; 0: it says nothing
    """

    prefix: Sequence[Any] = ()
    model: str = ""
    prompt: int = 0
    max_tokens: int = 0


NO_HINTS = RequestHints()


class _Fields(msgspec.Struct):
    """The fields that name a model and bound an answer, in all shapes of the API. Of any type: see
    `_count`."""

    model: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"")
    n_predict: msgspec.Raw = msgspec.Raw(b"")


def hints_of(body: bytes, prefix: tuple[bytes, ...]) -> RequestHints:
    """Return the hints in this body."""
    fields = decoded(body, _Fields)
    if fields is None:
        return RequestHints(prefix)
    limits = (
        fields.max_tokens,
        fields.max_completion_tokens,
        fields.max_output_tokens,
        fields.n_predict,
    )
    most = max(map(_count, limits))
    return RequestHints(prefix, _name(fields.model), len(body) // BYTES_PER_TOKEN, most)


def _count(raw: msgspec.Raw) -> int:
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) <= 9 else 0


def _name(raw: msgspec.Raw) -> str:
    name = decoded(raw, str) or ""
    return name if len(name) <= MAX_NAME else ""


# -- prefixes --------------------------------------------------------------------------------------
CHUNK = 256  # bytes; about four blocks of 16 tokens
CHUNK_TOKENS = CHUNK // BYTES_PER_TOKEN
MAX_CHUNKS = 1024  # of a prompt: a longer one is told apart by its first 256 KiB

_KEY = secrets.token_bytes(32)
_NOTHING = msgspec.Raw(b"")


class _Prompt(msgspec.Struct):
    """The fields that decide which KV an answer begins with, as the client wrote them."""

    model: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING


def prefix_digests(body: bytes, authorization: bytes) -> tuple[bytes, ...]:
    """A digest for each whole chunk of what stands in a prompt: `system`, then what is asked.
    Bodies that begin alike, of one client, have digests that begin alike.

    authorization  the header of that name, or the key that came in its place: replicas keep the
                   caches of tenants apart, and so does the router
    """
    fields = decoded(body, _Prompt)
    if fields is None:
        return ()
    kind = (
        authorization,
        fields.model,
        fields.cache_salt,
        fields.tools,
        fields.chat_template_kwargs,
    )
    salt = hashlib.blake2b(key=_KEY, digest_size=16)
    for part in kind:
        salt.update(len(bytes(part)).to_bytes(8, "little") + bytes(part))
    said = bytes(fields.prompt) or bytes(fields.messages) or bytes(fields.input)
    text = memoryview(bytes(fields.system) + bytes(fields.instructions) + said)
    last = min(len(text) // CHUNK, MAX_CHUNKS) * CHUNK
    key = salt.digest()
    return tuple(
        hashlib.blake2b(text[at : at + CHUNK], key=key, digest_size=8).digest()
        for at in range(0, last, CHUNK)
    )


DigestPrefix = Callable[[bytes, bytes], tuple[bytes, ...]]  # (body, key): digests of its beginning


def no_prefix(body: bytes, authorization: bytes) -> tuple[bytes, ...]:
    """Return no digests: for requests whose prompts are not told apart by their beginnings."""
    return ()
