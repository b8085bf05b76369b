"""A step as kernels want it: its integers in one upload, and the works that attention consists of.

Owns the arithmetic of tiles, segments and their partials, and the padding of steps that are recorded. Must
not know weights or operations.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pageturner.kernels.base import I32, AttentionShape, Batch, Stack
from pageturner.kernels.gpu.adapter_rows import AdaptedRows
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import FEW, HEAD_SIZES, MANY, SEGMENT, attention_rows

_FIELDS = ("tokens", "positions", "slots", "logit_rows")
PARTIAL_BYTES = 128 << 20  # of partials at once, and at most a sixteenth of the arena
WORK = 8  # integers of a work


class AttentionView(NamedTuple):
    """What the works of a layer's attention depend on: its heads, and which positions a row sees."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    chunked: bool

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def partial_bytes(self) -> int:
        """The bytes of a partial of each KV head."""
        return 4 * self.kv_heads * (2 + next(size for size in HEAD_SIZES if size >= self.head_dim))


def view_of(shape: AttentionShape) -> AttentionView:
    return AttentionView(shape.heads, shape.kv_heads, shape.head_dim, shape.window, shape.chunked)


def views_of(stack: Stack, tables: int) -> list[set[AttentionView]]:
    """The views of the layers that read each of so many block tables: where there are two, the second one is
    that of layers with a window."""
    found: list[set[AttentionView]] = [set() for _ in range(tables)]
    for layer in stack.layers:
        found[-1 if layer.shape.window else 0].add(view_of(layer.shape))
    return found


def heads_of_tile(group: int, rows: int) -> int:
    """Query heads of a tile of `rows` rows: all of a group, or an even part of it where they do not fit."""
    return -(-group // -(-group // rows))


@dataclass(frozen=True, slots=True)
class Works:
    """What attention of a step consists of. A tile has rows of one sequence and heads that share a KV head.

    few, many  int32 [n, WORK]: where the block ids of the sequence begin; first row; rows, 0 of a work that
               does nothing; first head of the group; segment of the tile; segments of the tile; first partial
               of the tile; its counter. Few: single rows, or so few that they fit a tile; each of their
               segments is a work. Many: a work is a whole tile, and its last four integers are 0
    partials   of each KV head at once: a sum over the tiles of more than one segment
    counters   tiles of more than one segment
    rounds     numbers of `few` that are launched together. More than one where all partials at once would be
               too much memory: sequences that share a long prefix can have any number
    """

    few: I32
    many: I32
    partials: int
    counters: int
    rounds: tuple[int, ...]


def works_of(batch: Batch, starts: I32, view: AttentionView, architecture: int, most: int) -> Works:
    """starts [S]: where the block ids of the sequences begin. most: partials of each KV head at once, beyond
    which a tile is alone in its round."""
    rows = np.diff(batch.query_start)
    # 16 rows on every architecture, so that the same steps are split everywhere
    is_few = (rows > 0) & (rows <= max(16 // view.group, 1))
    few = _tiles(batch, starts, np.flatnonzero(is_few), view, attention_rows(architecture, FEW))
    many = _tiles(
        batch, starts, np.flatnonzero((rows > 0) & ~is_few), view, attention_rows(architecture, MANY)
    )
    many[:, 4:] = 0
    segments = few[:, 5]
    each = np.where(segments > 1, segments * few[:, 2] * np.minimum(few[:, 6], view.group - few[:, 3]), 0)
    ends = np.cumsum(each)
    few[:, 6], few[:, 7] = ends - each, np.cumsum(segments > 1) - (segments > 1)
    partials, rounds = int(ends[-1]) if len(ends) else 0, [len(few)]
    if partials > most:
        partials, rounds = _in_rounds(few, each, most)
    works = np.repeat(few, segments, axis=0)
    begins = np.cumsum(segments) - segments
    works[:, 4] = np.arange(len(works), dtype=np.int32) - np.repeat(begins, segments)
    counts = [int(part.sum()) for part in np.split(segments, np.cumsum(rounds)[:-1])]
    return Works(works, many, partials, int((segments > 1).sum()), tuple(filter(None, counts)))


def _tiles(batch: Batch, starts: I32, sequences: Any, view: AttentionView, height: int) -> I32:
    """[n, WORK] of all rows of these sequences, as `Works`, with heads of a tile in place of its partials."""
    heads = heads_of_tile(view.group, height)
    most = max(height // view.group, 1)
    begins, ends = batch.query_start[sequences], batch.query_start[sequences + 1]
    parts = -(-view.group // heads)
    times = -(-(ends - begins) // most) * parts  # tiles of each sequence
    owner = np.repeat(np.arange(len(sequences)), times)
    within = np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(times) - times, times)
    tiles = np.zeros((len(owner), WORK), np.int32)
    tiles[:, 0] = starts[sequences][owner]
    tiles[:, 1] = begins[owner] + within // parts * most
    tiles[:, 2] = np.minimum(most, ends[owner] - tiles[:, 1])
    tiles[:, 3] = within % parts * heads
    if len(tiles):
        first, last = batch.positions[tiles[:, 1]], batch.positions[tiles[:, 1] + tiles[:, 2] - 1]
        tiles[:, 5] = last // SEGMENT - _first_seen(first, view) // SEGMENT + 1
    tiles[:, 6] = heads
    return tiles


def _first_seen(position: I32, view: AttentionView) -> I32:
    """As in source/attention.py."""
    if not view.window:
        return np.zeros_like(position)
    first = position - position % view.window if view.chunked else position - view.window + 1
    return np.maximum(first, 0)


def _in_rounds(few: I32, each: I32, most: int) -> tuple[int, list[int]]:
    """Partials of the largest round, and tiles of each. The first partials of tiles become those within their
    round."""
    ends, rounds, at, largest = np.cumsum(each), [], 0, 0
    while at < len(few):
        before = int(ends[at] - each[at])
        until = max(int(np.searchsorted(ends, before + most, side="right")), at + 1)
        few[at:until, 6] -= before
        largest = max(largest, int(ends[until - 1]) - before)
        rounds.append(until - at)
        at = until
    return largest, rounds


@dataclass(slots=True)
class Placed:
    """`Works` on the device. arrived int32 [counters * kv_heads]: 0 with each upload, so that nothing that a
    step leaves there is ever seen by another one, and 0 again behind each launch."""

    few: GpuArray
    many: GpuArray
    arrived: GpuArray
    partials: int
    rounds: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """A batch on the device: arrays of int32 in place of numpy's, block ids of one sequence behind those of
    another, works of every view, adapters."""

    tokens: GpuArray
    positions: GpuArray
    slots: GpuArray
    logit_rows: GpuArray
    blocks: GpuArray
    works: dict[AttentionView, Placed] = field(default_factory=dict)
    adapted: tuple[AdaptedRows | None, AdaptedRows | None] = (None, None)  # all rows, and wanted ones


def most_partials(view: AttentionView, arena: Arena) -> int:
    """Partials of each KV head that may be there at once."""
    return min(PARTIAL_BYTES, arena.size // 16) // view.partial_bytes


def upload(
    architecture: int,
    arena: Arena,
    batch: Batch,
    views: Collection[AttentionView],
    block_size: int,
    room: int = 0,
) -> Step:
    """Everything in one copy. room: segments that the sequences of a recorded step may have together, one row
    each: all arrays have places for so many. A step that is not recorded takes as much memory as one that is,
    so that a dry run finds out whether it fits."""
    counts = -(-batch.context_len // block_size)
    ends = np.cumsum(counts, dtype=np.int32)
    places = (room or segments_bucket(segments_of(batch))) * -(-SEGMENT // block_size)
    blocks = _filled(_row_parts(batch.block_table, counts), places)
    arrays = [*(getattr(batch, name) for name in _FIELDS), blocks]
    every = {}
    for view in sorted(views):
        most = most_partials(view, arena)
        works = works_of(batch, ends - counts, view, architecture, most)
        if room:
            works = _with_room(works, batch, view, architecture, room)
        rounded = segments_bucket(-(-works.partials // view.group)) * view.group
        every[view] = works, min(rounded, max(most, works.partials))
        few = _filled(works.few, segments_bucket(len(works.few)) if len(works.few) and not room else 0)
        arrays += [few, works.many, np.zeros(works.counters * view.kv_heads, np.int32)]
    placed = arena.upload(arrays)
    tokens, positions, slots, logit_rows, flat = placed[: len(_FIELDS) + 1]
    step = Step(tokens, positions, slots, logit_rows, flat)
    rest = iter(placed[len(_FIELDS) + 1 :])
    step.works = {
        view: Placed(next(rest), next(rest), next(rest), partials, works.rounds)
        for view, (works, partials) in every.items()
    }
    return step


def _row_parts(table: I32, counts: I32) -> I32:
    """The first so many ids of each row."""
    if (counts == table.shape[1]).all():
        return table.reshape(-1)
    return np.concatenate([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])


def _filled(array: I32, least: int) -> I32:
    """With zeros behind it, so that it has at least so many rows."""
    if len(array) >= least:
        return array
    return np.concatenate([array, np.zeros((least - len(array), *array.shape[1:]), np.int32)])


def _with_room(works: Works, batch: Batch, view: AttentionView, architecture: int, room: int) -> Works:
    """The works of a step of single rows as they are recorded, for any contexts that have `room` segments."""
    rows = len(batch.tokens)
    parts = -(-view.group // heads_of_tile(view.group, attention_rows(architecture, FEW)))
    segments = _most_segments(view, rows, room)
    few = _filled(works.few, segments * parts)
    return Works(few, works.many, segments * view.group, rows * parts, (len(few),))


def _most_segments(view: AttentionView, rows: int, room: int) -> int:
    """Segments that so many single rows see at most, of contexts that have `room` segments together."""
    return min(room, rows * ((view.window + SEGMENT - 2) // SEGMENT + 1)) if view.window else room


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


def segments_of(batch: Batch) -> int:
    """Segments of all contexts together."""
    return int((-(-batch.context_len // SEGMENT)).sum())


def segments_bucket(count: int) -> int:
    """The places of a recording for so many segments: at most a quarter, or 7, more. Each power of two has
    four sizes: a work that does nothing costs some nanoseconds, a recording some milliseconds."""
    size = max(1 << max((count - 1).bit_length() - 3, 0), 8)
    return -(-count // size) * size


def fits_at_once(views: Collection[AttentionView], rows: int, room: int, arena: Arena) -> bool:
    """Whether all partials of a recorded step can be there together."""
    return all(_most_segments(one, rows, room) * one.group <= most_partials(one, arena) for one in views)


def pad(batch: Batch, rows: int) -> Batch:
    """The same with sequences behind it that write nowhere."""
    more = rows - len(batch.tokens)

    def longer(array: I32, value: int) -> I32:
        return np.concatenate([array, np.full((more, *array.shape[1:]), value, np.int32)])

    starts = np.arange(rows + 1, dtype=np.int32)
    return Batch(
        longer(batch.tokens, 0), longer(batch.positions, 0), starts, longer(batch.context_len, 1),
        longer(batch.block_table, 0), longer(batch.slots, -1), starts[:-1],
        batch.adapters and [*batch.adapters, *[None] * more],
    )  # fmt: skip


def inverse_of(block_size: int) -> tuple[int, int]:
    """(m, s) so that position // block_size = (position * m) >> s, of every position below 2^24: a division
    takes some 20 instructions, this two. With 2^(l-1) < block_size <= 2^l, m = ceil(2^(24+l) / block_size)
    exceeds the quotient by less than 2^l / block_size / 2^(24+l), too little to reach the next integer."""
    shift = 24 + (block_size - 1).bit_length()
    return -(-(1 << shift) // block_size), shift
