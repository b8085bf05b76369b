"""LoRA adapters on a device as kernels read them: one, and the rows of a step that have each.

Owns the tables of rows. Must not know how anything is computed, nor how an adapter lies in its
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pageturner.kernels.adapters import Adapters
from pageturner.kernels.base import I32, Batch
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.catalogue import LORA_ROWS


@dataclass(eq=False)
class GpuAdapter:
    """An adapter on the device; its memory is given back when nobody has it any more.

    kind    of its factors: "fp32", "fp16" or "bf16"
    blocks  int32 [records]: blocks of ranks of each product, 0 where it is not adapted
    """

    address: int
    nbytes: int
    kind: str
    blocks: I32


@dataclass(frozen=True, slots=True)
class RowsOfKind:
    """Rows of a step whose adapters are of one kind, for source/lora.py. blocks: the most of any of
    them."""

    kind: str
    rows: GpuArray
    tiles: GpuArray
    bases: GpuArray
    blocks: I32


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """All rows of a step, or of some logits, that have adapters."""

    parts: tuple[RowsOfKind, ...]


@dataclass(slots=True)
class RowTables:
    """The rows of one kind of adapter on the host, as they grow."""

    rows: list[I32] = field(default_factory=list)
    tiles: list[tuple[int, int, int, int]] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, adapter: GpuAdapter, rows: list[I32]) -> None:
        begin = self.count
        self.count += sum(map(len, rows))
        self.rows += rows
        self.tiles += [
            (len(self.bases), at, min(LORA_ROWS, self.count - at), 0)
            for at in range(begin, self.count, LORA_ROWS)
        ]
        self.bases.append(adapter.address)

    def arrays(self, least: int) -> list[I32]:
        """Rows, tiles and addresses; each of at least so many."""
        tiles = np.zeros((max(least, len(self.tiles)), 4), np.int32)
        tiles[: len(self.tiles)] = self.tiles
        bases = np.zeros(max(least, len(self.bases)), np.int64)
        bases[: len(self.bases)] = self.bases
        rows = np.concatenate([*self.rows, np.zeros(max(least - self.count, 0), np.int32)])
        return [rows, tiles, bases.view(np.int32)]


def of_wanted(batch: Batch) -> Adapters | None:
    """The adapters of the rows whose logits are wanted."""
    if batch.adapters is None:
        return None
    sequences = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
    return [batch.adapters[sequence] for sequence in sequences.tolist()]


def shape_of(adapters: Adapters | None) -> tuple[tuple[str, bytes], ...]:
    """The facts that the launches of a step depend on: kinds, and blocks of ranks in powers of two.
    Steps of one shape can share a recording."""
    return tuple((kind, blocks.tobytes()) for kind, blocks in blocks_of(adapters or ()).items())


def blocks_of(adapters: Adapters) -> dict[str, I32]:
    """Yield them by kind, in order of their names."""
    found: dict[str, list[I32]] = {}
    for adapter in {id(one): one for one in adapters if one is not None}.values():
        found.setdefault(adapter.kind, []).append(adapter.blocks)
    most = {kind: np.maximum.reduce(found[kind]) for kind in sorted(found)}
    return {kind: _power_of_two(blocks) for kind, blocks in most.items()}


def _power_of_two(blocks: I32) -> I32:
    """The next one; 0 stays."""
    return np.where(
        blocks > 0, 1 << np.ceil(np.log2(np.maximum(blocks, 1))).astype(np.int32), 0
    ).astype(np.int32)


def tables_of(adapters: Adapters, starts: I32) -> dict[str, RowTables]:
    """Return them by kind. Adapter s has the rows starts[s] .. starts[s+1] - 1."""
    mine: dict[GpuAdapter, list[I32]] = {}
    for adapter, begin, end in zip(
        adapters, starts[:-1].tolist(), starts[1:].tolist(), strict=True
    ):
        if adapter is not None and begin < end:
            mine.setdefault(adapter, []).append(np.arange(begin, end, dtype=np.int32))
    tables: dict[str, RowTables] = {
        kind: RowTables() for kind in sorted({one.kind for one in mine})
    }
    for adapter, rows in mine.items():
        tables[adapter.kind].add(adapter, rows)
    return tables
