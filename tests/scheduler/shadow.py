"""A shadow of the KV memory: for each slot, which token prefix wrote it. Reading anything else fails.

A prefix is known by a 64-bit chain value, mixed token by token from (adapter, salt); so a slot that holds
the right token behind the wrong prefix, or another tenant's, is wrong. In the blocks that are everybody's
(`Sequence.public`) it is that of no salt; the machine sees to it that nothing else is claimed to be.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from dataclasses import replace

from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import GONE
from pageturner.scheduler.types import Sequence
from support.schedulers import unowned

MASK = (1 << 64) - 1


def root(request: Request) -> int:
    return zlib.crc32(f"{request.adapter}/{request.salt}".encode()) + 1


def mix(chain: int, token: int) -> int:
    chain = (chain ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    chain = (chain ^ chain >> 29) * 0x94D049BB133111EB & MASK
    return chain ^ chain >> 32


def chains(request: Request, tokens: Iterable[int]) -> list[int]:
    """The chain value behind each token."""
    chain, out = root(request), []
    for token in tokens:
        chain = mix(chain, token)
        out.append(chain)
    return out


def tables(pool: BlockPool, seq: Sequence) -> list[list[int]]:
    return [kind.table(seq) for kind in pool.kinds]


class Shadow:
    """Slots of a pool, of its recent blocks too. Copies are made in any order, all before the writes, as a
    backend may."""

    def __init__(self, pool: BlockPool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self._stores = [
            (kind, [[0] * kind.size for _ in range(kind.store.num_blocks)]) for kind in pool.kinds
        ]

    def copy(self, *copies: list[tuple[int, int]]) -> None:
        """What a plan wants copied among its whole, and among its recent blocks."""
        for (_, slots), pairs in zip(self._stores, copies, strict=False):
            for source, destination in self._rng.sample(pairs, len(pairs)):
                slots[destination] = list(slots[source])

    def _expected(self, request: Request, tokens: list[int], public: int) -> list[int]:
        public *= self._pool.block_size
        return [
            *chains(replace(request, salt=""), tokens)[:public],
            *chains(request, tokens)[public:],
        ]

    def write(self, seq: Sequence, n: int) -> None:
        known = [*seq.tokens, *seq.draft][: seq.computed + n]
        self.write_at(seq.request, seq.computed, known, tables(self._pool, seq), seq.public)

    def write_at(
        self,
        request: Request,
        begin: int,
        tokens: list[int],
        tables: Iterable[list[int]],
        public: int,
    ) -> None:
        """The KV of these tokens from position `begin` on, into these tables."""
        known = self._expected(request, tokens, public)
        for (kind, slots), table in zip(self._stores, tables, strict=False):
            size = kind.size
            if kind.before:  # what a state is of: the token before it
                for place in range(begin // size + 1, len(tokens) // size + 1):
                    if table[place] != GONE:
                        slots[table[place]] = [known[place * size - 1]]
                continue
            for position in range(begin, len(tokens)):
                if not kind.sparse or table[position // size] != GONE:
                    slots[table[position // size]][position % size] = known[position]

    def read(self, seq: Sequence, n: int) -> list[int]:
        known = [*seq.tokens, *seq.draft][: seq.computed + n]
        return self.read_at(seq.request, seq.computed, known, tables(self._pool, seq), seq.public)

    def read_at(
        self,
        request: Request,
        begin: int,
        tokens: list[int],
        tables: Iterable[list[int]],
        public: int,
    ) -> list[int]:
        """The chain values that the positions from `begin` on end up with, after everything they attend to
        was verified: all before them, and in recent blocks what the first of them still sees."""
        known = self._expected(request, tokens, public)
        for (kind, slots), table in zip(self._stores, tables, strict=False):
            size, place = kind.size, begin // kind.size
            if kind.before:
                assert place == 0 or slots[table[place]] == [known[place * size - 1]], (
                    f"the state before chunk {place} is that of another prefix"
                )
                continue
            first, end = begin + 1 - (kind.window or begin + 1), len(tokens)
            if kind.sparse:  # the rows of its chunk that are there
                first, end = place * size, begin
            for position in range(max(0, first), end):
                block = table[position // size]
                assert block != GONE, f"position {position} of {len(tokens)} was given back"
                found = slots[block][position % size]
                assert found == known[position], (
                    f"position {position} of {len(tokens)} holds the KV of another prefix"
                )
        return known[begin:]

    def poison(self) -> None:
        """Make blocks that nobody owns and nobody can find unreadable."""
        for kind, slots in self._stores:
            for block in unowned(kind.store):
                slots[block] = [-1] * kind.size
