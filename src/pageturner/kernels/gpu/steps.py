"""A step as kernels want it: its integers in one upload, and the tiles of rows that attention walks.

Owns the arithmetic of tiles and the padding of steps that are recorded. Must not know weights or operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.base import I32, Batch
from pageturner.kernels.gpu.adapter_rows import AdaptedRows
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import FEW, MANY, SEGMENT, attention_rows

_FIELDS = ("tokens", "positions", "slots", "logit_rows", "block_table")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of the rows of a step for heads of which `group` share a KV head.

    few, many  int32 [n, 4]: sequence, first row, rows, first row of partials. Few: single rows, or so few
               that they fit one tile; their segments are computed beside each other
    segments   of the longest context among the few
    kept       rows that have partials
    """

    few: I32
    many: I32
    segments: int
    kept: int


def tiles_of(batch: Batch, group: int, architecture: int) -> Tiles:
    """EngineFault('gpu_model') if more heads share a KV head than a tile has rows."""
    room = {rows: attention_rows(architecture, rows) // group for rows in (FEW, MANY)}
    if not room[MANY]:
        message = f"{group} heads share a KV head, which the kernels for GPUs do not know; use --device cpu"
        raise EngineFault("gpu_model", message)
    # 16 rows on every architecture, so that the same steps are split everywhere
    most = max(16 // group, 1) if room[FEW] else 0
    few, many, kept, longest = [], [], 0, 1
    starts = batch.query_start.tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        if end - begin <= most:
            few.append((s, begin, end - begin, kept))
            kept += end - begin
            longest = max(longest, int(batch.context_len[s]))
        else:
            many += [(s, at, min(room[MANY], end - at), 0) for at in range(begin, end, room[MANY])]
    segments = -(-longest // SEGMENT)
    return Tiles(_quads(few), _quads(many), segments, kept)


def _quads(tiles: list[tuple[int, int, int, int]]) -> I32:
    return np.array(tiles, np.int32).reshape(-1, 4)


@dataclass(slots=True)
class Step:
    """A batch on the device: arrays of int32 in place of numpy's, tiles by group of heads, adapters."""

    tokens: GpuArray
    positions: GpuArray
    slots: GpuArray
    logit_rows: GpuArray
    block_table: GpuArray
    tiles: dict[int, tuple[Tiles, GpuArray, GpuArray]] = field(default_factory=dict)
    adapted: tuple[AdaptedRows | None, AdaptedRows | None] = (None, None)  # all rows, and wanted ones


def upload(architecture: int, arena: Arena, batch: Batch, groups: set[int], segments: int = 0) -> Step:
    """Everything in one copy. segments: at least so many, in a step that is recorded for more than one
    length."""
    every = {group: tiles_of(batch, group, architecture) for group in sorted(groups)}
    if segments:
        every = {g: Tiles(t.few, t.many, max(segments, t.segments), t.kept) for g, t in every.items()}
    arrays = [getattr(batch, name) for name in _FIELDS]
    for tiles in every.values():
        arrays += [tiles.few, tiles.many]
    placed = arena.upload(arrays)
    tokens, positions, slots, logit_rows, block_table = placed[: len(_FIELDS)]
    step = Step(tokens, positions, slots, logit_rows, block_table)
    rest = iter(placed[len(_FIELDS) :])
    step.tiles = {group: (tiles, next(rest), next(rest)) for group, tiles in every.items()}
    return step


def unknown_runs(tokens: I32) -> list[tuple[int, int, int]]:
    """Where tokens stand as -1 - row of the step before: (first place, first row, how many) of each run of
    places and rows side by side. In steps that only decode there are few."""
    places = np.flatnonzero(tokens < 0)
    if not len(places):
        return []
    rows = -1 - tokens[places]
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(rows) != 1)) + 1
    begins = [0, *breaks.tolist()]
    ends = [*begins[1:], len(places)]
    return [(int(places[a]), int(rows[a]), b - a) for a, b in zip(begins, ends, strict=True)]


def bucket(count: int) -> int:
    """Rows of the recording for so many: powers of two up to 8, then by eights, from 64 by sixteens."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    size = 8 if count <= 64 else 16
    return -(-count // size) * size


def recordable(batch: Batch) -> bool:
    """Whether each sequence has one row, whose logits are wanted: a step that only decodes."""
    rows = len(batch.tokens)
    return 0 < rows == len(batch.context_len) == len(batch.logit_rows) and bool(
        (batch.logit_rows == np.arange(rows)).all()
    )


def segments_bucket(batch: Batch) -> int:
    """Segments of the recording for these contexts: a power of two."""
    most = -(-int(batch.context_len.max(initial=1)) // SEGMENT)
    return 1 << (most - 1).bit_length()


def pad(batch: Batch, rows: int, width: int) -> Batch:
    """The same with sequences behind it that write nowhere, and tables of so many columns."""
    more = rows - len(batch.tokens)
    table = np.zeros((rows, width), np.int32)
    columns = min(width, batch.block_table.shape[1])
    table[: len(batch.tokens), :columns] = batch.block_table[:, :columns]

    def longer(array: I32, value: int) -> I32:
        return np.concatenate([array, np.full(more, value, np.int32)])

    starts = np.arange(rows + 1, dtype=np.int32)
    return Batch(
        longer(batch.tokens, 0), longer(batch.positions, 0), starts, longer(batch.context_len, 1), table,
        longer(batch.slots, -1), starts[:-1], batch.adapters and [*batch.adapters, *[None] * more],
    )  # fmt: skip
