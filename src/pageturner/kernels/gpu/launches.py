"""The operations of the backend as launches: which kernel, how many programs, which arguments.

Owns the grids. Arrays go in and out; where a step's lie is the arena's. Must not know the Ops
protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
    Groups,
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
        wide = heads * spec.stored_head * KV_TYPES[spec.dtype]
        every = (
            (self.keys, wide, self.layer_bytes),
            (self.values, wide, self.layer_bytes),
            (self.k_scales, 4 * heads, self.layer_scales),
            (self.v_scales, 4 * heads, self.layer_scales),
        )
        return [
            Rows(base + block * nbytes, nbytes, spec.layers, pitch)
            for base, nbytes, pitch in every
            if base
        ]


@dataclass(slots=True)
class Tables:
    """Rotary tables on the device."""

    cos: int
    sin: int
    half: int
    interleaved: bool


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


class Launches:
    """Every operation on arrays of a device."""

    def __init__(self, driver: Driver, arena: Arena) -> None:
        self.driver = driver
        self.arena = arena
        self.chosen = (
            0  # address of the tokens that were chosen last: a token -1 - i is the one at i
        )
        self._ropes: dict[int, tuple[Rope, Tables]] = {}
        self._constants: dict[tuple[float, ...], int] = {}
        self.vectors: dict[int, tuple[F32, int]] = {}  # by id, those of layers that were prepared

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
            self.driver.launch("take_columns", grid, (x.address, w.order, out.address, w.columns))
        return x.ordered[w.ordered_by]

    def gemm(
        self, x: GpuArray, w: Matrix, bias: Vector | None = None, residual: GpuArray | None = None
    ) -> GpuArray:
        """residual + (x w^T + bias): fp32 [M, N]."""
        x = self._input(x, w)
        rows = len(x)
        if isinstance(w, FloatMatrix):
            ring = persistent_ring(self.driver.architecture, w.kind, rows, w.rows)
            if ring is not None:
                return self._persistent_gemm(x, w, ring, bias, residual)
            chunk, parts = parts_of(w.rows, w.columns, block_k(w.kind))
            tiles_by_height = tiles_of(self.driver.architecture, w.kind)
            height = height_of(rows, w.rows, M16 in tiles_by_height)
            tile, name, whole = tiles_by_height[height], f"dense.{w.kind}.{height}", 0
        else:
            chunk, parts = group_parts_of(w.rows, w.columns, w.sort)
            height = group_height_of(rows, w.columns)
            tile, name = (
                groups_tile(self.driver.architecture, height, w.sort),
                f"groups.{w.sort}.{height}",
            )
            whole = WHOLE_TILES if rows <= SOME_ROWS else 0
        tiles = _tiles(w.rows, tile.n) * _tiles(rows, tile.m)
        apart = parts > 1 and (height != MANY or tiles < whole)
        out = self.arena.take((rows, w.rows))
        partial = self.arena.take((parts, rows, w.rows)).address if apart else 0
        given = (
            bias.address if bias else 0,
            residual.address if residual else 0,
            out.address,
            partial,
            self.arena.counters,
        )
        flags = (int(bias is not None), int(residual is not None))
        shape = (rows, w.rows, w.columns, chunk, parts)
        if isinstance(w, FloatMatrix):
            arguments: tuple[int, ...] = (x.address, w.address, *given, *flags, *shape)
        else:
            arguments = (*self._operands(x, w), *given, int(w.low != 0), w.zero, *flags, *shape)
        assert not apart or tiles <= MAX_SPLIT_TILES  # each has a counter
        self.driver.launch(name, (tiles, parts if apart else 1), arguments)
        return out

    def _persistent_gemm(
        self,
        x: GpuArray,
        w: FloatMatrix,
        ring: Ring,
        bias: Vector | None,
        residual: GpuArray | None,
    ) -> GpuArray:
        rows, out = len(x), self.arena.take((len(x), w.rows))
        self.driver.launch(
            f"persistent.{w.kind}.{ring.name}",
            self._programs(ring, rows, w.rows),
            (
                Plane(x.address, rows, w.columns),
                Plane(w.address, w.rows, w.columns),
                bias.address if bias else 0,
                residual.address if residual else 0,
                out.address,
                int(bias is not None),
                int(residual is not None),
                rows,
                w.rows,
                w.columns,
                *parts_of(w.rows, w.columns, block_k(w.kind)),
            ),
        )
        return out

    def _programs(self, ring: Ring, rows: int, outputs: int) -> tuple[int]:
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
        return self._gated_dense(x, w) if isinstance(w, FloatMatrix) else self._gated_groups(x, w)

    def _gated_dense(self, x: GpuArray, w: FloatMatrix) -> GpuArray:
        rows, outputs = len(x), w.rows // 2
        out = self.arena.take((rows, outputs), w.kind)
        ring = persistent_ring(self.driver.architecture, w.kind, rows, w.rows)
        if ring is not None:
            planes = (
                Plane(x.address, rows, w.columns),
                Plane(w.address, w.rows, w.columns),
                Plane(out.address, rows, outputs),
            )
            self.driver.launch(
                f"gated_persistent.{w.kind}.{ring.name}",
                self._programs(ring, rows, w.rows),
                (*planes, rows, outputs, w.columns),
            )
            return out
        tiles = tiles_of(self.driver.architecture, w.kind)
        height = gated_height(height_of(rows, w.rows, M16 in tiles))
        tile = gated_tile(tiles, height)
        self.driver.launch(
            f"gated_dense.{w.kind}.{height}",
            (_tiles(outputs, gated_outputs(tile)) * _tiles(rows, tile.m),),
            (x.address, w.address, out.address, rows, outputs, w.columns),
        )
        return out

    def group_sums(self, x: GpuArray, columns: int, group: int) -> int:
        """Return the address of the sums of the groups of x, whose rows have so many columns."""
        rows, wide = (
            x.shape[0] * x.shape[1] // columns,
            _tiles(columns, BLOCK_COLUMNS) * BLOCK_COLUMNS,
        )
        sums = self.arena.take((rows, wide // group))
        grid = (_tiles(rows, 16), wide // SUMS_SPAN)
        self.driver.launch(f"group_sums.{group}", grid, (x.address, sums.address, rows, columns))
        return sums.address

    def _gated_groups(self, x: GpuArray, w: Groups) -> GpuArray:
        rows, outputs = len(x), w.rows // 2
        tile = groups_tile(self.driver.architecture, MANY, w.sort)
        out = self.arena.take((rows, outputs), w.compute)
        self.driver.launch(
            f"gated_groups.{w.sort}.{MANY}",
            (_tiles(outputs, tile.n) * _tiles(rows, tile.m),),
            (*self._operands(x, w), out.address, int(w.low != 0), w.zero, rows, outputs, w.columns),
        )
        return out

    def _operands(self, x: GpuArray, w: Groups) -> tuple[int, ...]:
        """Addresses of both operands, the last one of the sums of the groups of x: where there are
        lows and more rows than a kernel that computes them itself takes."""
        height = group_height_of(len(x), w.columns)
        sums = self.group_sums(x, w.columns, w.group) if w.low and height == MANY else 0
        if height == M16:
            x = self._in_order(x, w.columns)
        return x.address, w.q, w.high, w.scale, w.low, sums

    def _in_order(self, x: GpuArray, columns: int) -> GpuArray:
        """Return x in the order of the matrix unit, computed once."""
        if b"" not in x.ordered:
            wide = _tiles(columns, BLOCK_COLUMNS)
            x.ordered[b""] = out = self.arena.take((FEW_ROWS, wide * BLOCK_COLUMNS), x.kind)
            grid = (wide, FEW_ROWS // 8)
            self.driver.launch("in_order", grid, (x.address, out.address, len(x), columns))
        return x.ordered[b""]

    # -- rows --------------------------------------------------------------------------------------
    def embed(self, table: Matrix, tokens: GpuArray, first: int = 0) -> GpuArray:
        """Rows of a table that begins with token `first`; zeros for tokens that it has not."""
        out = self.arena.take((len(tokens), table.columns))
        grid = (len(tokens), _tiles(table.columns, GROUP_ROWS))
        if isinstance(table, FloatMatrix):
            arguments: tuple[int, ...] = (
                table.address,
                tokens.address,
                self.chosen,
                out.address,
                first,
                table.rows,
                table.columns,
            )
            self.driver.launch(f"embed.{table.kind}", grid, arguments)
            return out
        arguments = (
            table.q,
            table.high,
            table.scale,
            table.low,
            tokens.address,
            self.chosen,
            out.address,
            int(table.low != 0),
            table.zero,
            first,
            table.rows,
            table.columns,
        )
        self.driver.launch(f"embed_groups.{table.sort}", grid, arguments)
        return out

    def rms_norm(
        self, x: GpuArray, weight: Vector, eps: float, kind: str = "fp32", dim: int = 0
    ) -> GpuArray:
        """Norm each row, or each head of `dim` elements."""
        columns = x.shape[1]
        dim = dim or columns
        heads = columns // dim
        out = self.arena.take((len(x), columns), kind)
        arguments = (x.address, weight.address, out.address, eps, dim, heads, x.row)
        short = dim <= HEAD_SIZES[-1] or dim % 16 or x.row % 16
        name = "head_norm" if short else "rms_norm"
        self.driver.launch(f"{name}.{kind}", (len(x) * heads,), arguments)
        return out

    def layer_norm(
        self, x: GpuArray, weight: Vector, bias: Vector, eps: float, kind: str
    ) -> GpuArray:
        out = self.arena.take(x.shape, kind)
        arguments = (x.address, weight.address, bias.address, out.address, eps, x.shape[1])
        self.driver.launch(f"layer_norm.{kind}", (len(x),), arguments)
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
            arguments = (x.address, y.address if y else 0, out.address, factor, count)
            self.driver.launch(f"elementwise.{op}.{kind}", (_tiles(count, GROUP_ROWS),), arguments)
        return out

    def gated(self, x: GpuArray, kind: str, act: str = "silu") -> GpuArray:
        """An activation of the first half of each row times the second."""
        d = x.shape[1] // 2
        out = self.arena.take((len(x), d), kind)
        self.driver.launch(
            f"gated.{act}.{kind}", (len(x), _tiles(d, GROUP_ROWS)), (x.address, out.address, d)
        )
        return out

    def take_rows(self, x: GpuArray, rows: GpuArray, factors: int = 0) -> GpuArray:
        """Rows of x, or with factors row i times factors[rows[i]]."""
        out = self.arena.take((len(rows), x.shape[1]))
        if len(rows):
            grid = (len(rows), _tiles(x.shape[1], GROUP_ROWS))
            arguments = (
                x.address,
                rows.address,
                factors,
                out.address,
                x.shape[1],
                int(factors != 0),
            )
            self.driver.launch("take_rows", grid, arguments)
        return out

    def tables(self, rope: Rope) -> Tables:
        """Rotary tables, put on the device once."""
        if id(rope) not in self._ropes:
            cos, sin = (self.driver.alloc(max(table.nbytes, 4)) for table in (rope.cos, rope.sin))
            for address, table in ((cos, rope.cos), (sin, rope.sin)):
                if table.size:
                    self.driver.upload(address, np.ascontiguousarray(table))
            self._ropes[id(rope)] = rope, Tables(cos, sin, rope.cos.shape[1], rope.interleaved)
        return self._ropes[id(rope)][1]

    def constants(self, values: tuple[float, ...]) -> int:
        """A small vector of the model, put on the device once."""
        if values not in self._constants:
            array = np.array(values, np.float32)
            self._constants[values] = self.driver.alloc(array.nbytes)
            self.driver.upload(self._constants[values], array)
        return self._constants[values]

    def prepare(self, layer: Layer) -> None:
        """Put on the device what a layer needs beside its weights, which no recording may do."""
        self.tables(layer.rope)
        for values in (layer.shape.slopes, layer.shape.sinks):
            if values:
                self.constants(values)
        if layer.attn_temperature is not None and id(layer.attn_temperature) not in self.vectors:
            address = self.driver.alloc(layer.attn_temperature.nbytes)
            self.driver.upload(address, np.ascontiguousarray(layer.attn_temperature))
            self.vectors[id(layer.attn_temperature)] = layer.attn_temperature, address

    def rotate(self, x: GpuArray, positions: GpuArray, rope: Rope, dim: int) -> GpuArray:
        tables, heads = self.tables(rope), x.shape[1] // dim
        out = self.arena.take(x.shape)
        arguments = (
            x.address,
            tables.cos,
            tables.sin,
            positions.address,
            out.address,
            x.row,
            heads,
            dim,
            tables.half,
            int(tables.interleaved),
        )
        self.driver.launch("rotate", (len(x), heads), arguments)
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
        spec, heads = kv.spec, latent.heads
        plain = self.arena.take((len(wide), heads * latent.plain), latent.kind)
        q = self.arena.take((len(wide), heads * spec.stored_head))
        tables = self.tables(latent.rope) if latent.rope is not None else Tables(0, 0, 0, False)
        keys, _, scales, _ = kv.at(index)
        norm = latent.norm.address if latent.norm is not None else 0
        arguments = (
            wide.address,
            plain.address,
            q.address,
            norm,
            keys,
            scales,
            slots.address,
            tables.cos,
            tables.sin,
            positions.address,
            int(norm != 0),
            eps,
            wide.row,
            heads,
            latent.plain,
            latent.rank,
            latent.rotary,
            spec.stored_head,
            tables.half,
            int(tables.interleaved),
        )
        self.driver.launch(
            f"latent_kv_write.{spec.dtype}.{latent.kind}", (len(wide), heads + 1), arguments
        )
        return plain, q

    def join_heads(self, x: GpuArray, y: GpuArray, heads: int) -> GpuArray:
        """Join, for each head, its columns of x and its columns of y."""
        first, second = x.shape[1] // heads, y.shape[1] // heads
        out = self.arena.take((len(x), heads * (first + second)))
        grid = (len(x) * heads, _tiles(first + second, GROUP_ROWS))
        self.driver.launch("join_heads", grid, (x.address, y.address, out.address, first, second))
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
        tables = self.tables(rope) if rope is not None else Tables(0, 0, 0, False)
        arguments = (
            k.address,
            v.address,
            *kv.at(layer),
            slots.address,
            tables.cos,
            tables.sin,
            positions.address,
            k.row,
            v.row,
            spec.kv_heads,
            spec.head_dim,
            spec.stored_head,
            tables.half,
            int(tables.interleaved),
        )
        self.driver.launch(f"kv_write.{spec.dtype}", (len(k), spec.kv_heads), arguments)

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
        spec, dim, tables = kv.spec, kv.spec.head_dim, self.tables(rope)
        q = self.arena.take((len(wide), heads * spec.stored_head))
        q_norm, k_norm = (one.address for one in norms) if norms else (0, 0)
        arguments = (
            wide.address,
            q.address,
            q_norm,
            k_norm,
            *kv.at(index),
            step.slots.address,
            tables.cos,
            tables.sin,
            step.positions.address,
            int(norms is not None),
            eps,
            wide.row,
            heads,
            spec.kv_heads,
            dim,
            spec.stored_head,
            tables.half,
            int(tables.interleaved),
        )
        size = next(one for one in HEAD_SIZES if one >= dim)
        self.driver.launch(
            f"qk_norm_rope_kv_write.{spec.dtype}.{size}",
            (len(wide), heads + spec.kv_heads),
            arguments,
        )
        return q

    def fit_heads(self, x: GpuArray, heads: int, room: int) -> GpuArray:
        """Heads with room for so many elements: padded with zeros, or cut off."""
        dim = x.shape[1] // heads
        if dim == room:
            return x
        out = self.arena.take((len(x), heads * room), x.kind)
        arguments = (x.address, out.address, x.row, heads, dim, room)
        self.driver.launch(f"fit_heads.{x.kind}", (len(x), heads), arguments)
        return out

    # -- attention ---------------------------------------------------------------------------------
    def attention(
        self, q: GpuArray, kv: GpuKV, layer: int, step: Step, shape: AttentionShape, kind: str
    ) -> GpuArray:
        """Return the output of the heads: [T, heads * dim], or with a latent KV [T, heads *
        latent]. q: of heads as they are, or padded as those of the KV."""
        view, dim = view_of(shape), kv.spec.stored_head
        q = self.fit_heads(q, shape.heads, dim)
        works = step.works[view]
        columns = shape.heads * (shape.latent or dim)
        out = self.arena.take((len(q), columns), kind if kind in MIXED else "fp32")
        attend = partial(self._attend, q, kv, layer, step, shape, out)
        if len(works.many):
            attend(MANY, works.many, (0, 0, 0))
        if len(works.few):
            vectors = works.partials * view.kv_heads
            maxes_sums, accs = self.arena.take((vectors, 2)), self.arena.take((vectors, view.size))
            begin = 0
            for (
                count
            ) in works.rounds:  # each merges its partials before the next one writes its own
                mine = works.few.rows(slice(begin, begin + count))
                attend(FEW, mine, (maxes_sums.address, accs.address, works.arrived.address))
                begin += count
        out = self.fit_heads(out, shape.heads, shape.latent or shape.head_dim)
        return self.cast(out, kind)

    def _attend(
        self,
        q: GpuArray,
        kv: GpuKV,
        layer: int,
        step: Step,
        shape: AttentionShape,
        out: GpuArray,
        height: Height,
        works: GpuArray,
        partials: tuple[int, int, int],
    ) -> None:
        """partials: addresses of the partials (m and l; acc) and of counters."""
        spec, dim, view = kv.spec, kv.spec.stored_head, view_of(shape)
        slopes = self.constants(shape.slopes) if shape.slopes else 0
        sinks = self.constants(shape.sinks) if shape.sinks else 0
        part = heads_of_tile(view.group, attention_rows(height, view.size))
        arguments = (
            q.address,
            *kv.at(layer),
            step.blocks.address,
            step.positions.address,
            works.address,
            slopes,
            sinks,
            out.address,
            *partials,
            q.row,
            int(slopes != 0),
            int(sinks != 0),
            shape.heads,
            spec.kv_heads,
            dim,
            shape.latent or dim,
            part,
            spec.block_size,
            *inverse_of(spec.block_size),
            shape.window,
            int(shape.chunked),
            shape.scale,
            shape.soft_cap,
        )
        name = f"attend.{spec.dtype}.{view.size}.{height}.{out.kind}"
        self.driver.launch(name, (spec.kv_heads * len(works),), arguments)
