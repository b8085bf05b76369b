"""How a prompt begins, as a router without a tokenizer sees it: digests of chunks of its bytes.

Owns which bytes of a request stand in front of a cached prefix. Keeps no text: only keyed digests are
remembered. What does not look like a request has no beginning; a replica will say what is wrong with it.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

CHUNK = 256  # bytes; about four blocks of 16 tokens
MOST_CHUNKS = 1024  # of a prompt: a longer one is told apart by its first 256 KiB

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


_decoder = msgspec.json.Decoder(_Prompt)


def prefix_digests(body: bytes, authorization: bytes) -> tuple[bytes, ...]:
    """A digest for each whole chunk of what stands in a prompt: `system`, then what is asked.
    Bodies that begin alike, of one client, have digests that begin alike.

    authorization  the header of that name, or the key that came in its place: replicas keep the caches of
                   tenants apart, and so does the router
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
    last = min(len(text) // CHUNK, MOST_CHUNKS) * CHUNK
    key = salt.digest()
    return tuple(
        hashlib.blake2b(text[at : at + CHUNK], key=key, digest_size=8).digest()
        for at in range(0, last, CHUNK)
    )
