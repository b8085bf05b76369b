"""The operations of the backend as launches: which kernel, how many programs, which arguments.

Owns the grids. Arrays go in and out; where a step's lie is the arena's. Must not know the Ops
protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from pageturner.kernels.base import F32, KV_TYPES, AttentionShape, KVSpec, Layer, Rope
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import (
    FEW,
    FEW_ROWS,
    GATED,
    GATED_GROUPS,
    GROUP_ROWS,
    GROUPS_K,
    HEAD_SIZES,
    M8,
    M16,
    MANY,
    MAX_SPLIT_TILES,
    MIXED,
    SUMS_SPAN,
    WHOLE_TILES,
    Height,
    Ring,
    attention_rows,
    block_k,
    gated_height,
    gated_outputs,
    gated_tile,
    group_parts_of,
    groups_tile,
    height_of,
    parts_of,
    persistent_ring,
    tiles_of,
)
from pageturner.kernels.gpu.driver import Driver, Plane, Rows
from pageturner.kernels.gpu.steps import Step, heads_of_tile, inverse_of, view_of
from pageturner.kernels.gpu.weights import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    FloatMatrix,
    Matrix,
    Vector,
)

DIRECT_ROWS = 4  # up to so many rows of x are read as they lie
SOME_ROWS = 256  # up to so many rows parts of K of weights in groups are computed in parallel


@dataclass(slots=True)
class GpuKV:
    """K and V [layers, slots, kv_heads, stored_head]; scales [layers, slots, kv_heads] of int8 and
    fp8."""

    spec: KVSpec
    keys: int
    values: int
    k_scales: int
    v_scales: int
    layer_bytes: int
    layer_scales: int

    def at(self, layer: int) -> tuple[int, int, int, int]:
        """Addresses of a layer's keys, values and their scales."""
        here, scales = layer * self.layer_bytes, layer * self.layer_scales
        return self.keys + here, self.values + here, self.k_scales + scales, self.v_scales + scales

    def places(self, block: int) -> list[Rows]:
        """Return where a block lies, a row for each layer: K and V [block_size, kv_heads,
        stored_head] in the KV's type, then the scales of K and of V [block_size, kv_heads] fp32, as
        far as there are any. A block that travels is these bytes, in this order."""
        spec = self.spec
        heads = spec.block_size * spec.kv_heads
        rows = heads * spec.stored_head * KV_TYPES[spec.dtype], self.layer_bytes
        scales = 4 * heads, self.layer_scales
        return [
            Rows(base + block * nbytes, nbytes, spec.layers, pitch)
            for base, (nbytes, pitch) in zip(self.at(0), (rows, rows, scales, scales), strict=True)
            if base
        ]


@dataclass(frozen=True, slots=True)
class Latents:
    """A row of what goes to a latent KV has `plain` elements of each head, `rotary` ones of each
    head, the latent of `rank` elements, and a rotary key. kind: of the plain elements when they are
    placed. Without a rope and a norm the row is rotated and normed already."""

    heads: int
    plain: int
    rank: int
    rotary: int
    kind: str = "fp32"
    rope: Rope | None = None
    norm: Vector | None = None


def group_height_of(rows: int, columns: int) -> Height:
    """Return the height that weights in groups take for so many rows and columns."""
    if rows <= DIRECT_ROWS and columns % GROUPS_K == 0:
        return M8
    return M16 if rows <= FEW_ROWS else MANY


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


# The values by which a launch takes these; all others are numbers or planes, and go as they are
_VALUES: dict[type, Any] = {
    type(None): lambda _: 0,
    bool: int,
    GpuArray: attrgetter("address"),
    Vector: attrgetter("address"),
}


class Launches:
    """Every operation on arrays of a device."""

    def __init__(self, driver: Driver, arena: Arena) -> None:
        self.driver = driver
        self.arena = arena
        self.chosen = (
            0  # address of the tokens that were chosen last: a token -1 - i is the one at i
        )
        # numbers of the model and their addresses, by value or id
        self.constants: dict[object, tuple[Any, int]] = {}

    def launch(self, kernel: str, grid: Sequence[int], *arguments: Any) -> None:
        """Launch a kernel of the catalogue. An array or a vector stands for its address, None for
        an array that is absent."""
        values = [_VALUES[type(one)](one) if type(one) in _VALUES else one for one in arguments]
        self.driver.launch(kernel, grid, values)

    # -- products ----------------------------------------------------------------------------------
    def cast(self, x: GpuArray, kind: str) -> GpuArray:
        """x in another kind, computed once."""
        if x.kind == kind:
            return x
        if kind not in x.narrow:
            x.narrow[kind] = self.elementwise("cast", x, kind=kind)
        return x.narrow[kind]

    def _input(self, x: GpuArray, w: Matrix) -> GpuArray:
        """x in the kind that is computed with, its columns in the order of those of w; each is made
        once."""
        x = self.cast(x, w.compute)
        if isinstance(w, FloatMatrix) or not w.order:
            return x
        if w.ordered_by not in x.ordered:
            x.ordered[w.ordered_by] = out = self.arena.take(x.shape, x.kind)
            grid = (len(x), _tiles(w.columns, GROUP_ROWS))
            self.launch("take_columns", grid, x, w.order, out, w.columns)
        return x.ordered[w.ordered_by]

    def gemm(
        self, x: GpuArray, w: Matrix, bias: Vector | None = None, residual: GpuArray | None = None
    ) -> GpuArray:
        """residual + (x w^T + bias): fp32 [M, N]."""
        x = self._input(x, w)
        architecture = self.driver.architecture
        rows = len(x)
        out = self.arena.take((rows, w.rows))
        given = bias, residual, out
        flags = bias is not None, residual is not None
        shape = rows, w.rows, w.columns
        if isinstance(w, FloatMatrix):
            chunk, parts = parts_of(w.rows, w.columns, block_k(w.kind))
            ring = persistent_ring(architecture, w.kind, rows, w.rows)
            if ring is not None:
                name = f"persistent.{w.kind}.{ring.name}"
                grid = self._programs(ring, rows, w.rows)
                self.launch(name, grid, *_planes(x, w), *given, *flags, *shape, chunk, parts)
                return out
            tiles_by_height = tiles_of(architecture, w.kind)
            height = height_of(rows, w.rows, M16 in tiles_by_height)
            tile = tiles_by_height[height]
            name = f"dense.{w.kind}.{height}"
            whole = 0
        else:
            chunk, parts = group_parts_of(w.rows, w.columns, w.sort)
            height = group_height_of(rows, w.columns)
            tile = groups_tile(architecture, height, w.sort)
            name = f"groups.{w.sort}.{height}"
            whole = WHOLE_TILES if rows <= SOME_ROWS else 0
        tiles = _tiles(w.rows, tile.n) * _tiles(rows, tile.m)
        apart = parts > 1 and (height != MANY or tiles < whole)
        assert not apart or tiles <= MAX_SPLIT_TILES  # each has a counter
        partial = self.arena.take((parts, rows, w.rows)) if apart else None
        grid = (tiles, parts if apart else 1)
        arrays = *self._operands(x, w), *given, partial, self.arena.counters
        self.launch(name, grid, *arrays, *w.offsets, *flags, *shape, chunk, parts)
        return out

    def _programs(self, ring: Ring, rows: int, outputs: int) -> tuple[int, ...]:
        """Return the grid of a persistent kernel: a program for each tile, or for each
        multiprocessor."""
        return (min(_tiles(rows, ring.m) * _tiles(outputs, ring.n), self.driver.multiprocessors),)

    def gated_gemm(self, x: GpuArray, w: Matrix, kind: str) -> GpuArray:
        """SiLU of the first half of x w^T times the second, in a kind: in one launch where it can
        be."""
        if isinstance(w, FloatMatrix):
            whole = w.kind in GATED and parts_of(w.rows, w.columns, block_k(kind))[1] == 1
        else:
            many = w.sort in GATED_GROUPS and len(x) > SOME_ROWS
            whole = many and group_parts_of(w.rows, w.columns, w.sort)[1] == 1
        if w.compute != kind or not whole or w.rows % (2 * BLOCK_ROWS):
            return self.gated(self.gemm(x, w), kind)
        x = self._input(x, w)
        architecture = self.driver.architecture
        rows = len(x)
        outputs = w.rows // 2
        out = self.arena.take((rows, outputs), kind)
        shape = rows, outputs, w.columns
        if isinstance(w, FloatMatrix):
            ring = persistent_ring(architecture, w.kind, rows, w.rows)
            if ring is not None:
                name = f"gated_persistent.{w.kind}.{ring.name}"
                planes = *_planes(x, w), Plane(out.address, rows, outputs)
                self.launch(name, self._programs(ring, rows, w.rows), *planes, *shape)
                return out
            tiles = tiles_of(architecture, w.kind)
            height = gated_height(height_of(rows, w.rows, M16 in tiles))
            tile = gated_tile(tiles, height)
            name = f"gated_dense.{w.kind}.{height}"
            wide = gated_outputs(tile)
        else:
            tile = groups_tile(architecture, MANY, w.sort)
            name = f"gated_groups.{w.sort}.{MANY}"
            wide = tile.n
        grid = (_tiles(outputs, wide) * _tiles(rows, tile.m),)
        self.launch(name, grid, *self._operands(x, w), out, *w.offsets, *shape)
        return out

    def group_sums(self, x: GpuArray, columns: int, group: int) -> int:
        """Return the address of the sums of the groups of x, whose rows have so many columns."""
        rows = x.shape[0] * x.shape[1] // columns
        wide = _tiles(columns, BLOCK_COLUMNS) * BLOCK_COLUMNS
        sums = self.arena.take((rows, wide // group))
        grid = (_tiles(rows, 16), wide // SUMS_SPAN)
        self.launch(f"group_sums.{group}", grid, x, sums, rows, columns)
        return sums.address

    def _operands(self, x: GpuArray, w: Matrix) -> tuple[Any, ...]:
        """Return both operands; behind weights in groups the sums of the groups of x: where there
        are lows and more rows than a kernel that computes them itself takes."""
        if isinstance(w, FloatMatrix):
            return x, *w.stored
        height = group_height_of(len(x), w.columns)
        sums = self.group_sums(x, w.columns, w.group) if w.low and height == MANY else 0
        if height == M16:
            x = self._in_order(x, w.columns)
        return x, *w.stored, sums

    def _in_order(self, x: GpuArray, columns: int) -> GpuArray:
        """Return x in the order of the matrix unit, computed once."""
        if b"" not in x.ordered:
            wide = _tiles(columns, BLOCK_COLUMNS)
            x.ordered[b""] = out = self.arena.take((FEW_ROWS, wide * BLOCK_COLUMNS), x.kind)
            self.launch("in_order", (wide, FEW_ROWS // 8), x, out, len(x), columns)
        return x.ordered[b""]

    # -- rows --------------------------------------------------------------------------------------
    def embed(self, table: Matrix, tokens: GpuArray, first: int = 0) -> GpuArray:
        """Rows of a table that begins with token `first`; zeros for tokens that it has not."""
        out = self.arena.take((len(tokens), table.columns))
        name = "embed" if isinstance(table, FloatMatrix) else "embed_groups"
        grid = (len(tokens), _tiles(table.columns, GROUP_ROWS))
        shape = first, table.rows, table.columns
        given = *table.stored, tokens, self.chosen, out, *table.offsets
        self.launch(f"{name}.{table.sort}", grid, *given, *shape)
        return out

    def rms_norm(
        self, x: GpuArray, weight: Vector, eps: float, kind: str = "fp32", dim: int = 0
    ) -> GpuArray:
        """Norm each row, or each head of `dim` elements."""
        columns = x.shape[1]
        dim = dim or columns
        heads = columns // dim
        out = self.arena.take((len(x), columns), kind)
        short = dim <= HEAD_SIZES[-1] or dim % 16 or x.row % 16
        name = "head_norm" if short else "rms_norm"
        grid = (len(x) * heads,)
        self.launch(f"{name}.{kind}", grid, x, weight, out, eps, dim, heads, x.row)
        return out

    def layer_norm(
        self, x: GpuArray, weight: Vector, bias: Vector, eps: float, kind: str
    ) -> GpuArray:
        out = self.arena.take(x.shape, kind)
        self.launch(f"layer_norm.{kind}", (len(x),), x, weight, bias, out, eps, x.shape[1])
        return out

    def elementwise(
        self,
        op: str,
        x: GpuArray,
        y: GpuArray | None = None,
        factor: float = 0.0,
        kind: str = "fp32",
    ) -> GpuArray:
        out = self.arena.take(x.shape, kind)
        count = x.shape[0] * x.shape[1]
        if count:
            grid = (_tiles(count, GROUP_ROWS),)
            self.launch(f"elementwise.{op}.{kind}", grid, x, y, out, factor, count)
        return out

    def gated(self, x: GpuArray, kind: str, act: str = "silu") -> GpuArray:
        """An activation of the first half of each row times the second."""
        d = x.shape[1] // 2
        out = self.arena.take((len(x), d), kind)
        self.launch(f"gated.{act}.{kind}", (len(x), _tiles(d, GROUP_ROWS)), x, out, d)
        return out

    def take_rows(self, x: GpuArray, rows: GpuArray, factors: int = 0) -> GpuArray:
        """Rows of x, or with the address of factors row i times factors[rows[i]]."""
        columns = x.shape[1]
        out = self.arena.take((len(rows), columns))
        if len(rows):
            grid = (len(rows), _tiles(columns, GROUP_ROWS))
            self.launch("take_rows", grid, x, rows, factors, out, columns, factors != 0)
        return out

    def constant(self, values: F32 | tuple[float, ...]) -> int:
        """The address of numbers of the model, which are put on the device once; 0 for ()."""
        if isinstance(values, tuple) and not values:
            return 0
        key = values if isinstance(values, tuple) else id(values)
        if key not in self.constants:
            array = np.ascontiguousarray(values, np.float32)
            address = self.driver.alloc(max(array.nbytes, 4))
            if array.size:
                self.driver.upload(address, array)
            self.constants[key] = values, address
        return self.constants[key][1]

    def _turns(self, rope: Rope | None) -> tuple[tuple[int, int], tuple[int, bool]]:
        """The addresses of rotary tables; half of the columns that they turn, and how these lie."""
        if rope is None:
            return (0, 0), (0, False)
        tables = self.constant(rope.cos), self.constant(rope.sin)
        return tables, (rope.cos.shape[1], rope.interleaved)

    def prepare(self, layer: Layer) -> None:
        """Put on the device what a layer needs beside its weights, which no recording may do."""
        self._turns(layer.rope)
        self.constant(layer.shape.slopes)
        self.constant(layer.shape.sinks)
        if layer.attn_temperature is not None:
            self.constant(layer.attn_temperature)

    def rotate(self, x: GpuArray, positions: GpuArray, rope: Rope, dim: int) -> GpuArray:
        heads = x.shape[1] // dim
        tables, layout = self._turns(rope)
        out = self.arena.take(x.shape)
        sizes = x.row, heads, dim, *layout
        self.launch("rotate", (len(x), heads), x, *tables, positions, out, *sizes)
        return out

    def latent_kv_write(
        self,
        wide: GpuArray,
        latent: Latents,
        eps: float,
        kv: GpuKV,
        index: int,
        slots: GpuArray,
        positions: GpuArray,
    ) -> tuple[GpuArray, GpuArray]:
        """The latent and the rotary key of each row go to the KV, normed and rotated. Given are of
        each head its plain elements [T, heads * plain], and the query, of which the rotary elements
        are there already and those that `k_up` makes of the plain ones are not: [T, heads *
        dim]."""
        spec = kv.spec
        heads = latent.heads
        rows = len(wide)
        plain = self.arena.take((rows, heads * latent.plain), latent.kind)
        q = self.arena.take((rows, heads * spec.stored_head))
        tables, layout = self._turns(latent.rope)
        keys, _, scales, _ = kv.at(index)
        given = wide, plain, q, latent.norm, keys, scales, slots, *tables, positions
        sizes = heads, latent.plain, latent.rank, latent.rotary, spec.stored_head
        name = f"latent_kv_write.{spec.dtype}.{latent.kind}"
        has_norm = latent.norm is not None
        self.launch(name, (rows, heads + 1), *given, has_norm, eps, wide.row, *sizes, *layout)
        return plain, q

    def join_heads(self, x: GpuArray, y: GpuArray, heads: int) -> GpuArray:
        """Join, for each head, its columns of x and its columns of y."""
        first, second = x.shape[1] // heads, y.shape[1] // heads
        out = self.arena.take((len(x), heads * (first + second)))
        grid = (len(x) * heads, _tiles(first + second, GROUP_ROWS))
        self.launch("join_heads", grid, x, y, out, first, second)
        return out

    def kv_write(
        self,
        kv: GpuKV,
        layer: int,
        k: GpuArray,
        v: GpuArray,
        slots: GpuArray,
        positions: GpuArray,
        rope: Rope | None,
    ) -> None:
        """K, rotated if there are tables, and V."""
        spec = kv.spec
        tables, layout = self._turns(rope)
        given = k, v, *kv.at(layer), slots, *tables, positions
        sizes = k.row, v.row, spec.kv_heads, spec.head_dim, spec.stored_head
        self.launch(f"kv_write.{spec.dtype}", (len(k), spec.kv_heads), *given, *sizes, *layout)

    def qk_norm_rope_kv_write(
        self,
        wide: GpuArray,
        norms: tuple[Vector, Vector] | None,
        eps: float,
        kv: GpuKV,
        index: int,
        step: Step,
        rope: Rope,
        heads: int,
    ) -> GpuArray:
        """K and V of rows of Q, K and V go to the KV; Q is given, its heads padded as those of the
        KV. Q and K are normed and rotated. norms: of heads."""
        spec = kv.spec
        dim = spec.head_dim
        tables, layout = self._turns(rope)
        q = self.arena.take((len(wide), heads * spec.stored_head))
        given = wide, q, *(norms or (0, 0)), *kv.at(index), step.slots, *tables, step.positions
        sizes = wide.row, heads, spec.kv_heads, dim, spec.stored_head
        size = next(one for one in HEAD_SIZES if one >= dim)
        name = f"qk_norm_rope_kv_write.{spec.dtype}.{size}"
        grid = (len(wide), heads + spec.kv_heads)
        self.launch(name, grid, *given, norms is not None, eps, *sizes, *layout)
        return q

    def fit_heads(self, x: GpuArray, heads: int, room: int) -> GpuArray:
        """Heads with room for so many elements: padded with zeros, or cut off."""
        dim = x.shape[1] // heads
        if dim == room:
            return x
        out = self.arena.take((len(x), heads * room), x.kind)
        self.launch(f"fit_heads.{x.kind}", (len(x), heads), x, out, x.row, heads, dim, room)
        return out

    # -- attention ---------------------------------------------------------------------------------
    def attention(
        self, q: GpuArray, kv: GpuKV, layer: int, step: Step, shape: AttentionShape, kind: str
    ) -> GpuArray:
        """Return the output of the heads: [T, heads * dim], or with a latent KV [T, heads *
        latent]. q: of heads as they are, or padded as those of the KV."""
        spec = kv.spec
        view = view_of(shape)
        dim = spec.stored_head
        q = self.fit_heads(q, shape.heads, dim)
        works = step.works[view]
        mixed = shape.latent or dim
        out = self.arena.take((len(q), shape.heads * mixed), kind if kind in MIXED else "fp32")
        slopes = self.constant(shape.slopes)
        sinks = self.constant(shape.sinks)
        given = q, *kv.at(layer), step.blocks, step.positions
        sizes = slopes != 0, sinks != 0, shape.heads, spec.kv_heads, dim, mixed
        blocks = spec.block_size, *inverse_of(spec.block_size)
        scores = shape.window, shape.chunked, shape.scale, shape.soft_cap

        def attend(height: Height, mine: GpuArray, *partials: Any) -> None:
            """partials: m and l; acc; and counters."""
            part = heads_of_tile(view.group, attention_rows(height, view.size))
            name = f"attend.{spec.dtype}.{view.size}.{height}.{out.kind}"
            arrays = *given, mine, slopes, sinks, out, *partials
            grid = (spec.kv_heads * len(mine),)
            self.launch(name, grid, *arrays, q.row, *sizes, part, *blocks, *scores)

        if len(works.many):
            attend(MANY, works.many, 0, 0, 0)
        if len(works.few):
            vectors = works.partials * view.kv_heads
            maxes_sums = self.arena.take((vectors, 2))
            accs = self.arena.take((vectors, view.size))
            begin = 0
            for count in works.rounds:  # each merges its partials before the next writes its own
                mine = works.few.rows(slice(begin, begin + count))
                attend(FEW, mine, maxes_sums, accs, works.arrived)
                begin += count
        return self.cast(self.fit_heads(out, shape.heads, shape.latent or shape.head_dim), kind)


def _planes(x: GpuArray, w: FloatMatrix) -> tuple[Plane, Plane]:
    return Plane(x.address, len(x), w.columns), Plane(w.address, w.rows, w.columns)
