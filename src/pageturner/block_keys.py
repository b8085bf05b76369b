"""Block keys: 16 bytes that name the content of a KV block, the same in any process and on any
disk.

Owns how they are made: a keyed BLAKE2b digest of a block's tokens, whose key is the key of the
block before it; before the first block stands a root, made of model, adapter and salt. Equal keys
mean equal beginnings. Standard library only: a router, a store on disk and an event may name blocks
as the pool does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b


def root_key(model: str, adapter: str = "", salt: str = "") -> bytes:
    """Return the hash that the key of a sequence's first block is derived from. Each part is
    preceded by its length, so that no text in one of them can pass for another."""
    parts = (part.encode() for part in (model, adapter, salt))
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=16, person=b"root").digest()


def block_key(parent: bytes, tokens: Iterable[int]) -> bytes:
    """The key of a block: of what comes before it (16 bytes), and of its own tokens."""
    return blake2b(array("q", tokens), key=parent, digest_size=16).digest()


def salted_key(parent: bytes, salt: str) -> bytes:
    """Return the parent key for the first block that a sequence with a salt does not share, behind
    blocks that all sequences share. The salt is hashed apart from tokens: a client chooses it, and
    must not be able to spell tokens with it."""
    return blake2b(salt.encode(), key=parent, digest_size=16, person=b"salt").digest()


def chain_keys(root: bytes, tokens: list[int], size: int, known: list[bytes]) -> Iterator[bytes]:
    """The keys of whole blocks of `size` tokens, each made when it is asked for. known: the first
    of them."""
    yield from known
    key = known[-1] if known else root
    for start in range(len(known) * size, len(tokens) - size + 1, size):
        key = block_key(key, tokens[start : start + size])
        yield key
