"""KV blocks that travel: what a block is outside of its pool, and how it leaves one and comes into
another.

Owns the form of a travelling block, the keys of a request's blocks, and the way into the prefix
cache: a block that comes in is as one that was computed here and released. Must not know where it
comes from or goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageturner.block_keys import block_key, chain_keys, root_key, salted_key
from pageturner.kernels.base import KV, KVSpec, Ops
from pageturner.kv.kv_block_file import sum_of
from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool

Bytes = NDArray[np.uint8]


class BadBlock(ValueError):
    """A block that is not what was sent, or is for another engine."""


@dataclass(frozen=True, slots=True)
class KVStorage:
    """The storage in which the KV of a model lies. spec: the form of one block of all layers;
    states: of recurrent layers [slots, bytes], None where there are none."""

    ops: Ops
    kv: KV
    spec: KVSpec
    states: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One block on its way. key: 16 bytes that name model, build, adapter, salt and all tokens up
    to its end. checksum: XXH64 of the bytes, begun with the key."""

    key: bytes
    layers: int
    dtype: str
    data: Bytes
    checksum: int


class KVTransfer:
    """Moves blocks between the pool of an engine, its KV storage and the outside.

    model   names the weights, as in the keys of the pool
    nbytes  bytes of one block
    """

    def __init__(self, storage: KVStorage, pool: BlockPool, model: str) -> None:
        self._ops, self._kv, self.pool, self.model = storage.ops, storage.kv, pool, model
        self._store = pool.full
        self.layers, self._dtype = storage.spec.layers, storage.spec.dtype
        self.nbytes = self._ops.block_bytes(self._kv)

    def request_keys(self, request: Request) -> Iterator[bytes]:
        """Yield the keys of the blocks with which a request may begin."""
        return request_keys(self.pool, self.model, request)

    def read(self, block: int, out: Bytes) -> None:
        """The bytes of a block."""
        self._ops.read_blocks(self._kv, np.array([block], np.int32), out[None])

    def export(self, key: bytes) -> KVBlock | None:
        """A copy of the block with this key; None where it is not there."""
        block = self._store.index.get(key)
        if block is None:
            return None
        data = np.empty(self.nbytes, np.uint8)
        self.read(block, data)
        return KVBlock(key, self.layers, self._dtype, data, sum_of(data, key))

    def block_of(self, key: bytes, data: Bytes, checksum: int) -> KVBlock:
        """A block of this form, made of what was sent; `adopt` looks at it."""
        return KVBlock(key, self.layers, self._dtype, data, checksum)

    def adopt(self, block: KVBlock) -> int | None:
        """Make a block findable that came from elsewhere. Returns its number; None where no block
        can be taken now. BadBlock."""
        mine, its = (
            (self.layers, self._dtype, self.nbytes),
            (block.layers, block.dtype, block.data.size),
        )
        if mine != its:
            raise BadBlock(f"a block of {its} for an engine of {mine} (layers, type, bytes)")
        if sum_of(block.data, block.key) != block.checksum:
            raise BadBlock("a block whose bytes are not what was sent")
        return self.place(block.key, block.data)

    def place(self, key: bytes, data: Bytes) -> int | None:
        """The same of bytes that were looked at already."""
        store = self._store
        if (there := store.index.get(key)) is not None:
            return there
        if not store.available:
            return None
        table: list[int] = []
        store.write(table, 0, 1)
        block = table[0]
        self._ops.write_blocks(self._kv, np.array([block], np.int32), data[None])
        store.publish(table, 0, key)
        store.truncate(table, 0)
        return block


def known_tokens(request: Request) -> list[int]:
    """The tokens that are known when a request comes."""
    return [*request.prompt, *(request.resume[0].tokens if len(request.resume) == 1 else ())]


def request_keys(pool: BlockPool, model: str, request: Request) -> Iterator[bytes]:
    """The keys of the blocks with which a request may begin, each made when it is asked for."""
    tokens = known_tokens(request)
    last, start, size = len(tokens) - 1, request.logits_from, pool.block_size
    count = max(0, (last if start is None else min(last, start)) // size)
    tokens = tokens[: count * size]
    if not request.salt:
        yield from chain_keys(root_key(model, request.adapter), tokens, size, [])
        return
    before, place = root_key(model, request.adapter, request.salt), 0
    if pool.public:
        for key in chain_keys(root_key(model, request.adapter), tokens, size, []):
            if pool.full.index.get(key) not in pool.public:
                break
            yield key
            before, place = salted_key(key, request.salt), place + 1
    for first in range(place * size, count * size, size):
        before = block_key(before, tokens[first : first + size])
        yield before
