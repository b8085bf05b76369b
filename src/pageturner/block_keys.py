"""Block keys: 16 bytes that name the content of a KV block, the same in any process and on any disk.

Owns how they are made: a keyed BLAKE2b digest of a block's tokens, whose key is the key of the block before
it; before the first block stands a root, made of model, adapter and salt. Equal keys mean equal beginnings.
Standard library only: a router, a store on disk and an event may name blocks as the pool does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=4096)
def root_key(model: str, adapter: str = "", salt: str = "") -> bytes:
    """What the key of a first block is derived from."""
    return blake2b("\0".join((model, adapter, salt)).encode(), digest_size=16).digest()


def block_key(parent: bytes, tokens: Iterable[int]) -> bytes:
    """The key of a block: of what comes before it (16 bytes), and of its own tokens."""
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


def salted_key(parent: bytes, salt: str) -> bytes:
    """What stands before the first own block of a sequence with a salt behind blocks that are everybody's."""
    return blake2b(salt.encode(), key=parent, digest_size=16).digest()


def chain_keys(root: bytes, tokens: list[int], size: int, blocks: int) -> list[bytes]:
    """The keys of the first so many blocks, of `size` tokens each."""
    keys = []
    for start in range(0, blocks * size, size):
        root = block_key(root, tokens[start : start + size])
        keys.append(root)
    return keys
