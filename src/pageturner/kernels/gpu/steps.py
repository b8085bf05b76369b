"""A step as kernels want it: its integers in one upload, and the works that attention consists of.

Owns the arithmetic of tiles, segments and their partials, and the padding of steps that are
recorded. Must not know weights or operations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pageturner.kernels.base import I32, AttentionShape, Batch, Stack
from pageturner.kernels.choosing import Draw
from pageturner.kernels.gpu.adapter_rows import AdaptedRows
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import FEW, MANY, SEGMENT, attention_rows, attention_size

_FIELDS = ("tokens", "positions", "slots", "logit_rows")
PARTIAL_BYTES = 128 << 20  # of partials at once, and at most a sixteenth of the arena
WORK = 8  # integers of a work


class AttentionView(NamedTuple):
    """The facts that the works of a layer's attention depend on: its heads, and which positions a
    row sees."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    chunked: bool
    latent: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        """The size that heads of V are padded to."""
        return attention_size(self.head_dim, self.latent)

    @property
    def partial_bytes(self) -> int:
        """The bytes of a partial of each KV head."""
        return 4 * self.kv_heads * (2 + self.size)


def view_of(shape: AttentionShape) -> AttentionView:
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return AttentionView(*heads, shape.window, shape.chunked, shape.latent)


def views_of(stack: Stack, tables: int) -> list[set[AttentionView]]:
    """The views of the layers that read each of so many block tables: where there are two, the
    second one is that of layers with a window."""
    found: list[set[AttentionView]] = [set() for _ in range(tables)]
    for layer in stack.layers:
        found[-1 if layer.shape.window else 0].add(view_of(layer.shape))
    return found


def heads_of_tile(group: int, rows: int) -> int:
    """Query heads of a tile of `rows` rows: all of a group, or an even part of it where they do not
    fit."""
    return -(-group // -(-group // rows))


@dataclass(frozen=True, slots=True)
class Works:
    """The works of attention of a step. A tile has rows of one sequence and heads that share a KV
    head.

    few, many  int32 [n, WORK]: where the block ids of the sequence begin; first row; rows, 0 of a
               work that does nothing; first head of the group; segment of the tile; segments of the
               tile; first partial of the tile; its counter. Few: single rows, or so few that they
               fit a tile; each of their segments is a work. Many: a work is a whole tile, and its
               last four integers are 0
    partials   of each KV head at once: a sum over the tiles of more than one segment
    counters   tiles of more than one segment
    rounds     numbers of `few` that are launched together. More than one where all partials at once
               would be too much memory: sequences that share a long prefix can have any number
    """

    few: I32
    many: I32
    partials: int
    counters: int
    rounds: tuple[int, ...]


def works_of(batch: Batch, starts: I32, view: AttentionView, architecture: int, most: int) -> Works:
    """starts [S]: where the block ids of the sequences begin. most: partials of each KV head at
    once, beyond which a tile is alone in its round."""
    rows = batch.query_start[1:] - batch.query_start[:-1]
    is_few = (rows > 0) & (rows <= few_rows(view))
    heights = {height: attention_rows(height, view.size) for height in (FEW, MANY)}
    few = _tiles(batch, starts, is_few.nonzero()[0], view, heights[FEW])
    many = _tiles(batch, starts, ((rows > 0) & ~is_few).nonzero()[0], view, heights[MANY])
    many[:, 4:] = 0
    segments = few[:, 5]
    each = np.where(
        segments > 1, segments * few[:, 2] * np.minimum(few[:, 6], view.group - few[:, 3]), 0
    )
    ends, several = each.cumsum(), segments > 1
    few[:, 6], few[:, 7] = ends - each, several.cumsum() - several
    partials, rounds = int(ends[-1]) if len(ends) else 0, [len(few)]
    if partials > most:
        partials, rounds = _in_rounds(few, each, most)
    works = few
    if several.any():
        begins = segments.cumsum(dtype=np.int32) - segments
        works = few.repeat(segments, axis=0)
        works[:, 4] = np.arange(len(works), dtype=np.int32) - begins.repeat(segments)
    counts = [len(works)]
    if len(rounds) > 1:
        counts = [int(part.sum()) for part in np.split(segments, np.cumsum(rounds)[:-1])]
    return Works(works, many, partials, int(several.sum()), tuple(filter(None, counts)))


def _tiles(batch: Batch, starts: I32, sequences: Any, view: AttentionView, height: int) -> I32:
    """[n, WORK] of all rows of these sequences, as `Works`, with heads of a tile in place of its
    partials."""
    if not len(sequences):
        return np.zeros((0, WORK), np.int32)
    heads = heads_of_tile(view.group, height)
    most = max(height // view.group, 1)
    begins, ends = batch.query_start[sequences], batch.query_start[sequences + 1]
    parts = -(-view.group // heads)
    times = -(-(ends - begins) // most) * parts  # tiles of each sequence
    if times.max() > 1:
        owner = np.arange(len(sequences)).repeat(times)
        within = np.arange(len(owner), dtype=np.int32) - (times.cumsum() - times).repeat(times)
        sequences, ends = sequences[owner], ends[owner]
        begins = begins[owner] + within // parts * most
    tiles = np.zeros((len(begins), WORK), np.int32)
    tiles[:, 0], tiles[:, 1] = starts[sequences], begins
    tiles[:, 2] = np.minimum(most, ends - begins)
    if parts > 1:
        tiles[:, 3] = within % parts * heads
    tiles[:, 5] = batch.positions[begins + tiles[:, 2] - 1] // SEGMENT + 1
    if view.window:
        tiles[:, 5] -= _first_seen(batch.positions[begins], view) // SEGMENT
    tiles[:, 6] = heads
    return tiles


def _first_seen(position: I32, view: AttentionView) -> I32:
    """Do as source/attention.py does."""
    first = position - position % view.window if view.chunked else position - view.window + 1
    return np.maximum(first, 0)


def _in_rounds(few: I32, each: I32, most: int) -> tuple[int, list[int]]:
    """Partials of the largest round, and tiles of each. The first partials of tiles become those
    within their round."""
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
    """`Works` on the device. arrived int32 [counters * kv_heads]: 0 with each upload, so that
    nothing that a step leaves there is ever seen by another one, and 0 again behind each launch."""

    few: GpuArray
    many: GpuArray
    arrived: GpuArray
    partials: int
    rounds: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """A batch on the device: arrays of int32 in place of numpy's, block ids of one sequence behind
    those of another, works of every view, adapters."""

    tokens: GpuArray
    positions: GpuArray
    slots: GpuArray
    logit_rows: GpuArray
    blocks: GpuArray
    works: dict[AttentionView, Placed] = field(default_factory=dict)
    adapted: tuple[AdaptedRows | None, AdaptedRows | None] = (
        None,
        None,
    )  # all rows, and wanted ones
    draw: list[int] = field(default_factory=list)  # addresses of the arrays of a Draw


def most_partials(view: AttentionView, arena: Arena) -> int:
    """Partials of each KV head that may be there at once."""
    return min(PARTIAL_BYTES, arena.size // 16) // view.partial_bytes


class Room(NamedTuple):
    """The room of a recorded step. segments: of all contexts together; tiles: of rows of a prompt;
    rows: of each sequence that is computed with partials."""

    segments: int
    tiles: int = 0
    rows: int = 1


def upload(
    architecture: int,
    arena: Arena,
    pages: Sequence[tuple[Batch, int]],
    views: Sequence[Collection[AttentionView]],
    room: Room | None = None,
    draw: Sequence[Any] = (),
) -> list[Step]:
    """A step, and once more for layers with block tables of their own, in one copy. pages: batches
    and their block sizes; room: of a step that is recorded, whose arrays have places for so many;
    draw: arrays of four bytes an element, which the first one takes along. A step that is not
    recorded takes as much memory as one that is, so that a dry run finds out whether it fits."""
    arrays: list[I32] = []
    found = []
    for (batch, block_size), seen in zip(pages, views, strict=True):
        counts = -(-batch.context_len // block_size)
        ends = np.cumsum(counts, dtype=np.int32)
        segments = room.segments if room else segments_bucket(segments_of(batch))
        blocks = _filled(
            _row_parts(batch.block_table, counts), segments * -(-SEGMENT // block_size)
        )
        arrays += [*(getattr(batch, name) for name in _FIELDS), blocks]
        every = {}
        for view in sorted(seen):
            most = most_partials(view, arena)
            works = works_of(batch, ends - counts, view, architecture, most)
            if room:
                works = _with_room(works, batch, view, architecture, room)
            rounded = segments_bucket(-(-works.partials // view.group)) * view.group
            every[view] = works, min(rounded, max(most, works.partials))
            few = _filled(
                works.few, segments_bucket(len(works.few)) if len(works.few) and not room else 0
            )
            arrays += [few, works.many, np.zeros(works.counters * view.kv_heads, np.int32)]
        found.append(every)
    placed = iter(
        arena.upload([*arrays, *(np.ascontiguousarray(one).view(np.int32) for one in draw)])
    )
    steps = []
    for every in found:
        step = Step(next(placed), next(placed), next(placed), next(placed), next(placed))
        step.works = {
            view: Placed(next(placed), next(placed), next(placed), partials, works.rounds)
            for view, (works, partials) in every.items()
        }
        steps.append(step)
    steps[0].draw = [one.address for one in placed]
    return steps


def _row_parts(table: I32, counts: I32) -> I32:
    """The first so many ids of each row."""
    found: I32 = table[np.arange(table.shape[1], dtype=np.int32) < counts[:, None]]
    return found


def _filled(array: I32, least: int) -> I32:
    """Append zeros, so that it has at least so many rows."""
    if len(array) >= least:
        return array
    return np.concatenate([array, np.zeros((least - len(array), *array.shape[1:]), np.int32)])


def _with_room(
    works: Works, batch: Batch, view: AttentionView, architecture: int, room: Room
) -> Works:
    """The works of a step as they are recorded, for all steps that have this room."""
    rows = len(batch.tokens)
    parts, tall = (
        -(-view.group // heads_of_tile(view.group, attention_rows(height, view.size)))
        for height in (FEW, MANY)
    )
    segments = _most_segments(view, rows, room)
    few, many = _filled(works.few, segments * parts), _filled(works.many, room.tiles * tall)
    return Works(few, many, segments * _heads_of(view, room), rows * parts, (len(few),))


def _most_segments(view: AttentionView, rows: int, room: Room) -> int:
    """Segments that so many rows see at most, of contexts that have room together."""
    if not view.window or room.rows > 1:
        return room.segments
    return min(room.segments, rows * ((view.window + SEGMENT - 2) // SEGMENT + 1))


def _heads_of(view: AttentionView, room: Room) -> int:
    """Partials of each KV head in a segment of a sequence."""
    return view.group * min(room.rows, few_rows(view))


def few_rows(view: AttentionView) -> int:
    """Up to so many rows of a sequence are computed with partials: 16 rows of a tile on every
    architecture, so that the same steps are split everywhere."""
    return max(16 // view.group, 1)


def room_of(batch: Batch, views: Collection[AttentionView], architecture: int, rows: int) -> Room:
    """The room of a step that is padded to so many rows: in sizes, so that many steps have one."""
    each = np.diff(batch.query_start)
    segments = segments_bucket(segments_of(batch) + rows - len(batch.tokens))
    if len(each) == len(batch.tokens):
        return Room(segments)
    least, most = min(map(few_rows, views)), max(map(few_rows, views))
    unit = min(max(attention_rows(MANY, view.size) // view.group, 1) for view in views)
    tiles = int((-(-each[each > least] // unit)).sum())
    several = bool(((each > 1) & (each <= most)).any())
    return Room(segments, mixed_bucket(tiles) if tiles else 0, most if several else 1)


def bucket(count: int) -> int:
    """Rows of the recording for so many: powers of two up to 8, then by eights, from 64 by
    sixteens."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    size = 8 if count <= 64 else 16
    return -(-count // size) * size


def mixed_bucket(count: int) -> int:
    """The same of what varies more: powers of two, from 16 on also one and a half of them, from 128
    on by 64. No size is on the other side of a height of `catalogue.height_of` than what it is
    for."""
    if count > 128:
        return -(-count // 64) * 64
    size = 1 << (count - 1).bit_length()
    return 3 * size // 4 if size >= 32 and count <= 3 * size // 4 else size


def sizes_of(batch: Batch) -> tuple[int, int]:
    """Rows and wanted rows of the recording of a step. Steps that only decode have finer sizes."""
    rows, wanted = len(batch.tokens), len(batch.logit_rows)
    if rows == wanted == len(batch.context_len):
        return bucket(rows), bucket(rows)
    rows = mixed_bucket(rows)
    return rows, min(mixed_bucket(wanted), rows)


def segments_of(batch: Batch) -> int:
    """Segments of all contexts together."""
    return int((-(-batch.context_len // SEGMENT)).sum())


def segments_bucket(count: int) -> int:
    """The places of a recording for so many segments: at most a quarter, or 7, more. Each power of
    two has four sizes: a work that does nothing costs some nanoseconds, a recording some
    milliseconds."""
    size = max(1 << max((count - 1).bit_length() - 3, 0), 8)
    return -(-count // size) * size


def fits_at_once(views: Collection[AttentionView], rows: int, room: Room, arena: Arena) -> bool:
    """Return whether all partials of a recorded step can be there together."""
    return all(
        _most_segments(one, rows, room) * _heads_of(one, room) <= most_partials(one, arena)
        for one in views
    )


def pad(batch: Batch, rows: int, wanted: int) -> Batch:
    """The same with sequences of one row behind it that write nowhere, and so many wanted rows."""
    count, more = len(batch.tokens), rows - len(batch.tokens)
    if not more and wanted == len(batch.logit_rows):
        return batch

    def longer(array: I32, value: int) -> I32:
        return np.concatenate([array, np.full((more, *array.shape[1:]), value, np.int32)])

    asked = np.minimum(np.arange(count, count + wanted - len(batch.logit_rows)), rows - 1)
    return Batch(
        longer(batch.tokens, 0),
        longer(batch.positions, 0),
        np.concatenate([batch.query_start, np.arange(count + 1, rows + 1, dtype=np.int32)]),
        longer(batch.context_len, 1),
        longer(batch.block_table, 0),
        longer(batch.slots, -1),
        np.concatenate([batch.logit_rows, asked.astype(np.int32)]),
        batch.adapters and [*batch.adapters, *[None] * more],
    )


def pad_draw(draw: Draw, rows: int) -> Draw:
    """The same with greedy rows behind it."""
    more = rows - len(draw[0])
    if not more:
        return draw
    values = (0.0, 0, 1.0, 0.0, 0.0)
    pairs = zip(draw, values, strict=True)
    return tuple(np.concatenate([one, np.full(more, value, one.dtype)]) for one, value in pairs)  # type: ignore[return-value]


def inverse_of(block_size: int) -> tuple[int, int]:
    """(m, s) so that position // block_size = (position * m) >> s, of every position below 2^24: a
    division takes some 20 instructions, this two. With 2^(l-1) < block_size <= 2^l, m =
    ceil(2^(24+l) / block_size) exceeds the quotient by less than 2^l / block_size / 2^(24+l), too
    little to reach the next integer."""
    shift = 24 + (block_size - 1).bit_length()
    return -(-(1 << shift) // block_size), shift
