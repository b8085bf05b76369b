"""KV blocks and recurrent states that travel: what they are outside of their pool, and how they
leave one and come into another.

Owns the form of a travelling block, the keys of a request's blocks, and the way into the prefix
cache: what comes in is as if it was computed here and released. Must not know where it
comes from or goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pageturner.kernels.base import KV, KVSpec, Ops
from pageturner.kv.kv_block_file import Bytes, sum_of
from pageturner.kv.store_hooks import bring_up
from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import Store
from pageturner.scheduler.types import Sequence


class BadBlock(ValueError):
    """A block that is not what was sent, or is for another engine."""


@dataclass(frozen=True, slots=True)
class KVStorage:
    """The storage in which the KV of a model lies. spec: the form of one block of all layers;
    states: of recurrent layers [slots, bytes], None where there are none."""

    ops: Ops
    kv: KV
    spec: KVSpec
    states: Bytes | None = None


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One block on its way. key: 16 bytes that name model, build, adapter, salt and all tokens up
    to its end. form: what lies in its bytes. checksum: XXH64 of them, begun with the key."""

    key: bytes
    form: str
    data: Bytes
    checksum: int


class Transfer(ABC):
    """Moves what lies in one store of a pool between its storage and the outside.

    name     of its figures
    form     what lies in the bytes of a block
    nbytes   bytes of one block
    every    so many full blocks end where one of these may stand
    chained  a block is of use only behind all those before it
    """

    name: str
    every = 1
    chained = True

    def __init__(self, pool: BlockPool, store: Store, model: str, form: str, nbytes: int) -> None:
        self.pool = pool
        self.store = store
        self.model = model
        self.form = f"{form} of {nbytes} bytes"
        self.nbytes = nbytes

    def request_keys(self, request: Request) -> Iterator[bytes]:
        """Yield the keys of the blocks with which a request may begin."""
        keys = self.pool.keys(sequence_of(request))
        return islice(keys, self.every - 1, None, self.every)

    @abstractmethod
    def read(self, block: int, out: Bytes) -> None:
        """The bytes of a block."""

    @abstractmethod
    def write(self, block: int, data: Bytes) -> None:
        """Put them there."""

    def export(self, key: bytes) -> KVBlock | None:
        """A copy of the block with this key; None where it is not there."""
        block = self.store.index.get(key)
        if block is None:
            return None
        data = np.empty(self.nbytes, np.uint8)
        self.read(block, data)
        return KVBlock(key, self.form, data, sum_of(data, key))

    def adopt(self, block: KVBlock) -> int | None:
        """Make a block findable that came from elsewhere. Returns its number; None where no block
        can be taken now. BadBlock."""
        if (block.form, block.data.size) != (self.form, self.nbytes):
            raise BadBlock(f"a block of {block.form} for an engine with {self.form}")
        if sum_of(block.data, block.key) != block.checksum:
            raise BadBlock("a block whose bytes are not what was sent")
        return self.place(block.key, block.data)

    def place(self, key: bytes, data: Bytes) -> int | None:
        """Make a block findable whose bytes are known to be right. Returns its number; None where
        no block can be taken now."""
        if (there := self.store.index.get(key)) is not None:
            return there
        return bring_up(self.store, key, lambda block: self.write(block, data))


class StateTransfer(Transfer):
    """Moves recurrent states [slots, bytes]. A sequence begins at one of them, and needs none that
    stands before it."""

    name, chained = "state", False

    def __init__(self, states: Bytes, pool: BlockPool, model: str) -> None:
        super().__init__(pool, pool.states, model, "states", states.shape[1])
        self._states, self.every = states, pool.grain // pool.block_size

    def read(self, block: int, out: Bytes) -> None:
        out[:] = self._states[block]

    def write(self, block: int, data: Bytes) -> None:
        self._states[block] = data


class KVTransfer(Transfer):
    """Moves blocks of KV. model: names the weights, as in the keys of the pool."""

    name = "kv"

    def __init__(self, storage: KVStorage, pool: BlockPool, model: str) -> None:
        self._ops, self._kv = storage.ops, storage.kv
        form = f"{storage.spec.layers} layers of {storage.spec.dtype}"
        super().__init__(pool, pool.full, model, form, self._ops.block_bytes(self._kv))

    def read(self, block: int, out: Bytes) -> None:
        self._ops.read_blocks(self._kv, np.array([block], np.int32), out[None])

    def write(self, block: int, data: Bytes) -> None:
        self._ops.write_blocks(self._kv, np.array([block], np.int32), data[None])


def sequence_of(request: Request) -> Sequence:
    """The sequence that a request begins with, with all tokens that are known when it comes."""
    resumed = request.resume[0].tokens if len(request.resume) == 1 else ()
    return Sequence(request, tokens=[*request.prompt, *resumed])
