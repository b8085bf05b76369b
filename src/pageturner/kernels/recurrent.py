"""Recurrent layers (gated delta net, Mamba2, short convolutions): their storage, tables and numbers.

Owns these types and the layout of the bytes, which all backends share. Must not know any model
family, nor how a backend computes.

A sequence lies on a fixed grid of chunks of CHUNK tokens from position 0. A state slot holds the
state before a chunk and is never changed once it is written; a tail block holds the rows of one
unfinished chunk. A row is computed from the state before its chunk and the rows of the chunk up to
itself, so its bits are the same in a prompt, in decode and in any crowd:

    r[p,j] = exp(g[p] + .. + g[j+1]), d[p] = exp(g[p] + .. + g[first])    added from p downwards
    u[p]   = beta[p] * (v[p] - (d[p] * (k[p] S) + sum_{j<p} (k[p] . k[j]) r[p,j] u[j]))
    o[p]   = d[p] * (q[p] S) + sum_{j<=p} (q[p] . k[j]) r[p,j] u[j]
    S'     = d[last] * S + sum_j (r[last,j] k[j]) u[j]

Every sum is one chain in ascending order. k, u and the inputs of the convolution are rounded to the
type of the tail before anything reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.base import F32, Batch, StateTables

CHUNK = 32
COLUMNS = 16  # of a state that lie together
STORED = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}

Part = tuple[int, Any, tuple[int, ...]]  # where it begins in a row of bytes, its type, its shape


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The storage of all recurrent layers of a model, which have one shape.

    channels    of the convolution, over `kernel` positions
    key_heads   groups of Mamba2; 0: there is no state beside the inputs of the convolution
    value_dim   a multiple of COLUMNS
    dtype       of tails and of the inputs of the convolution: one of STORED; states are fp32
    """

    layers: int
    channels: int
    kernel: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: str = "float16"
    parts: dict[str, Part] = field(init=False, repr=False, compare=False)
    state_bytes: int = field(init=False)  # of a slot, all layers
    tail_bytes: int = field(init=False)  # of a block, all layers

    def __post_init__(self) -> None:
        stored = STORED[self.dtype]
        blocks = (self.value_heads, self.value_dim // COLUMNS)
        states = {
            "state": (np.float32, (*blocks, self.key_dim, COLUMNS)),
            "past": (stored, (self.kernel - 1, self.channels)),
        }
        tail = {
            "g": (np.float32, (self.value_heads, CHUNK)),
            "k": (stored, (self.key_heads, self.key_dim, CHUNK)),
            "u": (stored, (*blocks, CHUNK, COLUMNS)),
            "x": (stored, (CHUNK, self.channels)),
        }
        parts: dict[str, Part] = {}
        for name, rows in (("state_bytes", states), ("tail_bytes", tail)):
            size = 0
            for part, (kind, shape) in rows.items():
                parts[part] = (size, kind, shape)
                size += -(-math.prod(shape) * np.dtype(kind).itemsize // 64) * 64
            object.__setattr__(self, name, size * self.layers)
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """State slots [slots, spec.state_bytes] and tail blocks [blocks, spec.tail_bytes]. A slot or a
    block is a row of bytes, which may be copied, written to a file or sent as it is."""

    spec: RecurrentSpec
    states: NDArray[np.uint8]
    tail: NDArray[np.uint8]

    def part(self, name: str, layer: int) -> NDArray[Any]:
        """A view of one part of a layer (see RecurrentSpec): [slots or blocks, its shape]."""
        memory = self.tail
        if name in ("state", "past"):
            memory = self.states
        begin, kind, shape = self.spec.parts[name]
        begin += memory.shape[1] // self.spec.layers * layer
        end = begin + math.prod(shape) * np.dtype(kind).itemsize
        return memory[:, begin:end].view(kind).reshape(len(memory), *shape)


def alloc(spec: RecurrentSpec, slots: int, blocks: int) -> RecurrentCache:
    """Zeroed storage. EngineFault('kv_memory') when the memory is not there."""

    def rows(count: int, size: int) -> NDArray[np.uint8]:
        memory = np.zeros(count * size + 64, np.uint8)
        begin = -memory.ctypes.data % 64
        return memory[begin : begin + count * size].reshape(count, size)

    try:
        return RecurrentCache(spec, rows(slots, spec.state_bytes), rows(blocks, spec.tail_bytes))
    except (MemoryError, ValueError) as error:
        size = slots * spec.state_bytes + blocks * spec.tail_bytes
        raise EngineFault(
            "kv_memory", f"no memory for {size:,} bytes of recurrent state; lower kv_cache_memory"
        ) from error


@dataclass(frozen=True, slots=True)
class Place:
    """One layer of a cache, numbered among the recurrent ones, and the batch whose tables say what
    is read and written there."""

    cache: RecurrentCache
    layer: int
    batch: Batch

    @property
    def tables(self) -> StateTables:
        """The tables of the batch. ValueError where it has none."""
        if self.batch.recurrent is None:
            raise ValueError("a recurrent layer needs Batch.recurrent")
        return self.batch.recurrent


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence in one chunk: `count` from `row` of the batch on, whose first is at
    `offset` of the chunk. block: where the tail of the chunk lies, or -1."""

    sequence: int
    chunk: int
    row: int
    count: int
    offset: int
    block: int


def pieces(place: Place) -> Iterator[Piece]:
    """The rows of a step, chunk by chunk."""
    batch = place.batch
    tail_table = place.tables.tail_table
    for s in range(len(batch.query_start) - 1):
        row = int(batch.query_start[s])
        end = int(batch.query_start[s + 1])
        if row == end:
            continue
        first = int(batch.positions[row]) // CHUNK
        last = int(batch.positions[end - 1]) // CHUNK
        while row < end:
            chunk, offset = divmod(int(batch.positions[row]), CHUNK)
            count = min(end - row, CHUNK - offset)
            block = {last: tail_table[s, 1], first: tail_table[s, 0]}.get(chunk, -1)
            yield Piece(s, chunk, row, count, offset, int(block))
            row += count


@dataclass(frozen=True, slots=True)
class Conv:
    """A causal convolution of each channel: weight [kernel, channels], the oldest position first,
    bias [channels] or None, and SiLU of the result or not."""

    weight: F32
    bias: F32 | None = None
    silu: bool = True


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates at which value heads forget: decay [heads] is -exp(A_log); a time step lies in low
    .. high."""

    decay: F32
    dt_bias: F32
    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class StateRule:
    """The rule by which a state changes.

    delta  a value is corrected by what the state holds for its key already (gated delta net);
           without it the value is beta * v (Mamba2)
    tiled  value head h reads key head h % key_heads, and not h // (value_heads / key_heads)
    skip   [value heads], times v, is added to each output (Mamba2's D), or None
    """

    delta: bool
    tiled: bool = False
    skip: F32 | None = None


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm of every `group` columns with a gate: before the norm or behind it."""

    eps: float
    group: int
    gate_first: bool
    act: str = "silu"  # of the gate, or "sigmoid"
