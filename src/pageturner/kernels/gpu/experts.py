"""Mixtures of experts on a device: rows grouped by expert, one launch for a product of all experts.

Owns tables of weights that are multiplied with by expert, or by head. Must not know the Ops
protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.catalogue import (
    FEW,
    GROUP_ROWS,
    GROUPED,
    MANY,
    ROUTED,
    block_k,
    experts_tile,
    group_parts_of,
    parts_of,
)
from pageturner.kernels.gpu.driver import Driver
from pageturner.kernels.gpu.launches import Launches
from pageturner.kernels.gpu.weights import FloatMatrix, Matrix, Vector
from pageturner.kernels.layer_parts import Experts

FIELDS = 8  # of a weight in a table: as source/experts.py reads them
MANY_ROWS = 64  # tiles are higher where an expert has more rows on average


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Weights [rows, columns] of experts, `halves` of each, as addresses on the device: what
    `product` takes.

    sorts    (sort, address of int64 [experts, halves, FIELDS], whether any has lows) of each sort
             of weights among them; weights of other sorts are zeros there
    compute  what rows are rounded to for each of these
    """

    sorts: tuple[tuple[str, int, bool], ...]
    compute: tuple[str, ...]
    experts: int
    halves: int
    rows: int
    columns: int

    @property
    def kind(self) -> str:
        """The type that rows for all of them are rounded to; fp32 where weights have several
        types."""
        return self.compute[0] if len(set(self.compute)) == 1 else "fp32"


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """The weights of a mixture: of gate and up, one behind the other, and of down."""

    gate_up: WeightTable
    down: WeightTable


@dataclass(frozen=True, slots=True)
class Grouping:
    """The rows of each expert. by_head: rows, where every expert is a head of each of them; else
    `order` and `bounds` are what the kernel `group_rows` writes. shared: rows of the output for one
    of x."""

    rows: int
    shared: int = 1
    order: int = 0
    bounds: int = 0
    by_head: int = 0


def table_of(
    driver: Driver, weights: Sequence[Sequence[Matrix]], biases: Sequence[Sequence[Vector]] = ()
) -> WeightTable:
    """weights, biases: of gate and of up, or of one alone; each of every expert. No biases: ()."""
    first, halves, count = weights[0][0], len(weights), len(weights[0])
    values: dict[str, np.ndarray] = {}
    lows: dict[str, bool] = {}
    compute: dict[str, str] = {}
    for half, each in enumerate(weights):
        for expert, weight in enumerate(each):
            entries = values.setdefault(weight.sort, np.zeros((count, halves, FIELDS), np.int64))
            bias = biases[half][expert].address if biases and biases[half] else 0
            entries[expert, half, :6] = _entry(weight, bias)
            lows[weight.sort] = lows.get(weight.sort, False) or bool(entries[expert, half, 3])
            compute[weight.sort] = weight.compute
    sorts = []
    for sort, entries in values.items():
        address = driver.alloc(entries.nbytes)
        driver.upload(address, entries)
        sorts.append((sort, address, lows[sort]))
    return WeightTable(
        tuple(sorts),
        tuple(compute[sort] for sort in values),
        count,
        halves,
        first.rows,
        first.columns,
    )


def _entry(weight: Matrix, bias: int) -> tuple[int, ...]:
    if isinstance(weight, FloatMatrix):
        return weight.address, 0, 0, 0, bias, 0
    assert not weight.order  # nothing gathers what experts see: models/gptq_awq.py
    return weight.q, weight.high, weight.scale, weight.low, bias, weight.zero


class GpuExperts:
    """The parts of a mixture as launches."""

    def __init__(self, launches: Launches) -> None:
        self._run = launches

    @staticmethod
    def tables(driver: Driver, experts: Experts) -> ExpertTables:
        """EngineFault('gpu_model') where the router has more outputs than the kernels know."""
        if len(experts.gate) > ROUTED[-1]:
            message = f"{len(experts.gate)} experts: a GPU chooses among at most {ROUTED[-1]}"
            raise EngineFault("gpu_model", f"{message}; use --device cpu")
        e = experts
        return ExpertTables(
            table_of(driver, (e.gate, e.up), (e.gate_bias, e.up_bias)),
            table_of(driver, (e.down,), (e.down_bias,)),
        )

    def route(
        self, logits: GpuArray, top_k: int, normalise: bool, scoring: str, factor: float = 1.0
    ) -> tuple[GpuArray, GpuArray]:
        """Ids, ascending, and weights [T, top_k]."""
        rows, experts = logits.shape
        ids = self._run.arena.take((rows, top_k), "i32")
        weights = self._run.arena.take((rows, top_k))
        name = f"route.{scoring}.{next(one for one in ROUTED if one >= experts)}"
        self._run.launch(name, (rows,), logits, ids, weights, experts, top_k, normalise, factor)
        return ids, weights

    def add_rows(self, x: GpuArray, y: GpuArray, rows: GpuArray, weights: GpuArray) -> GpuArray:
        """x with weights[i] * y[i] added to row rows[i]."""
        out = self._run.arena.take(x.shape)
        self._run.driver.copy(out.address, x.address, x.nbytes)
        grid = (len(rows), _tiles(x.shape[1], GROUP_ROWS))
        self._run.launch("add_rows", grid, out, y, rows, weights, x.shape[1])
        return out

    def add(
        self, x: GpuArray, h: GpuArray, experts: Experts, tables: ExpertTables, act: str
    ) -> GpuArray:
        """x plus what the experts of each row make of h."""
        run, count, top_k = self._run, len(experts.gate), experts.top_k
        logits = run.gemm(h, experts.router, experts.router_bias)
        factor = float(np.float32(experts.scale))
        ids, weights = self.route(logits, top_k, experts.normalise, experts.scoring, factor)
        pairs = len(h) * top_k
        order, bounds = run.arena.take((pairs,), "i32"), run.arena.take((count + 1,), "i32")
        run.launch("group_rows", (count,), ids, order, bounds, pairs, count)
        shared, weighed = top_k, experts.weigh_input
        if weighed:
            h, shared = self._weighed(h, weights, tables.gate_up), 1
        both = self.gemm(h, tables.gate_up, Grouping(pairs, shared, order.address, bounds.address))
        inner = run.gated(both, tables.down.kind, act)
        y = self.gemm(inner, tables.down, Grouping(pairs, 1, order.address, bounds.address))
        out = run.arena.take(x.shape)
        grid = (len(x), _tiles(x.shape[1], GROUP_ROWS))
        run.launch("add_experts", grid, x, y, weights, out, weighed, x.shape[1], top_k)
        return out

    def _weighed(self, h: GpuArray, weights: GpuArray, table: WeightTable) -> GpuArray:
        """A row for each expert of each row of h, times the expert's weight."""
        rows, top_k = weights.shape
        kind, columns = table.kind, h.shape[1]
        out = self._run.arena.take((rows * top_k, columns), kind)
        grid = (len(out), _tiles(columns, GROUP_ROWS))
        self._run.launch(f"weigh_rows.{kind}", grid, h, weights, out, columns, top_k)
        return out

    def by_head(self, x: GpuArray, table: WeightTable, out: GpuArray | None = None) -> GpuArray:
        """The columns of each head of x times its own weight: [T, heads * N]; or written into
        `out`, where the heads of a row begin as far from each other as `out` has room for them."""
        heads, rows = table.experts, len(x)
        found = self.gemm(x, table, Grouping(rows * heads, by_head=rows), out)
        return GpuArray(found.address, (rows, found.shape[0] * found.shape[1] // rows))

    def gemm(
        self, x: GpuArray, table: WeightTable, grouping: Grouping, out: GpuArray | None = None
    ) -> GpuArray:
        """Rows of x times the weights of their experts, halves beside each other: fp32 [rows,
        halves * N]. out: where they go, in rows that may have room for more."""
        run, n, k = self._run, table.rows, table.columns
        if out is None:
            out = run.arena.take((grouping.rows, table.halves * n))
        stride = out.shape[0] * out.shape[1] // grouping.rows
        rows = len(x) * x.shape[1] // k  # of heads several lie in one
        for (sort, address, has_low), compute in zip(table.sorts, table.compute, strict=True):
            mine = run.cast(x, compute)
            grouped = sort in GROUPED
            chunk, parts = group_parts_of(n, k) if grouped else parts_of(n, k, block_k(sort))
            many = grouping.rows > MANY_ROWS * table.experts and sort != "fp32"
            height = MANY if many else FEW
            tile = experts_tile(run.driver.architecture, height, sort)
            sums = [run.group_sums(mine, k, GROUPED[sort][1]) if has_low else 0] if grouped else []
            given = mine, address, grouping.order, grouping.bounds, *sums, out, grouping.shared
            sizes = n, k, chunk, parts, rows, table.experts, table.halves, grouping.by_head, stride
            places = min(grouping.rows, grouping.rows // tile.m + table.experts)
            grid = (table.halves * _tiles(n, tile.n), places)
            run.launch(f"experts.{sort}.{height}", grid, *given, *sizes)
        return out
