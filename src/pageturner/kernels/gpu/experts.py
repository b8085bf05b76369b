"""Mixtures of experts on a device: rows grouped by expert, one launch for a product of all experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.catalogue import GROUP_ROWS, block_k, parts_of
from pageturner.kernels.gpu.driver import Driver
from pageturner.kernels.gpu.launches import Launches
from pageturner.kernels.gpu.weights import FloatMatrix
from pageturner.kernels.layer_parts import Experts

TILE = 64  # rows and columns of a tile of a product


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """Addresses of the weights of each expert: int64 vectors on the device; and what they have in common."""

    gate: int
    up: int
    down: int
    kind: str
    inner: int
    columns: int


class GpuExperts:
    """The parts of a mixture as launches."""

    def __init__(self, launches: Launches) -> None:
        self._run = launches

    @staticmethod
    def tables(driver: Driver, experts: Experts) -> ExpertTables | None:
        """None where the weights are not floats of one kind, or have biases: then each expert has a product
        of its own."""
        every = [*experts.gate, *experts.up, *experts.down]
        if any(not isinstance(one, FloatMatrix) or one.kind in ("fp8",) for one in every):
            return None
        if len({one.kind for one in every}) > 1 or experts.gate_bias or experts.up_bias or experts.down_bias:
            return None
        addresses = []
        for weights in (experts.gate, experts.up, experts.down):
            values = np.array([one.address for one in weights], np.int64)
            addresses.append(driver.alloc(values.nbytes))
            driver.upload(addresses[-1], values)
        gate, up, down = addresses
        return ExpertTables(gate, up, down, every[0].kind, experts.gate[0].rows, experts.gate[0].columns)

    def route(
        self, logits: GpuArray, top_k: int, normalise: bool, scoring: str, factor: float = 1.0
    ) -> tuple[GpuArray, GpuArray]:
        """Ids, ascending, and weights [T, top_k]."""
        rows, experts = logits.shape
        ids, weights = self._run.arena.take((rows, top_k), "i32"), self._run.arena.take((rows, top_k))
        arguments = (
            logits.address, ids.address, weights.address, experts, top_k, int(normalise), factor
        )  # fmt: skip
        self._run.driver.launch(f"route.{scoring}", (rows,), arguments)
        return ids, weights

    def add_rows(self, x: GpuArray, y: GpuArray, rows: GpuArray, weights: GpuArray) -> GpuArray:
        """x with weights[i] * y[i] added to row rows[i]."""
        out = self._run.arena.take(x.shape)
        self._run.driver.copy(out.address, x.address, x.nbytes)
        grid = (len(rows), -(-x.shape[1] // GROUP_ROWS))
        arguments = (out.address, y.address, rows.address, weights.address, x.shape[1])
        self._run.driver.launch("add_rows", grid, arguments)
        return out

    def add(self, x: GpuArray, h: GpuArray, experts: Experts, tables: ExpertTables) -> GpuArray:
        """x plus what the experts of each row make of h."""
        run, count = self._run, len(experts.gate)
        logits = run.product(h, experts.router, experts.router_bias)
        ids, weights = self.route(
            logits, experts.top_k, experts.normalise, experts.scoring, float(np.float32(experts.scale))
        )
        pairs = len(h) * experts.top_k
        order, bounds = run.arena.take((pairs,), "i32"), run.arena.take((count + 1,), "i32")
        run.driver.launch("group_rows", (count,), (ids.address, order.address, bounds.address, pairs, count))
        grouped = (order.address, bounds.address, count, pairs)
        narrow = run.rounded(h, tables.kind)
        gate = self._product(narrow, tables.gate, grouped, experts.top_k, tables.inner, tables)
        up = self._product(narrow, tables.up, grouped, experts.top_k, tables.inner, tables)
        inner = run.elementwise("act_mul", gate, up, kind=tables.kind)
        y = self._product(inner, tables.down, grouped, 1, x.shape[1], tables)
        out = run.arena.take(x.shape)
        grid = (len(x), -(-x.shape[1] // GROUP_ROWS))
        arguments = (x.address, y.address, weights.address, out.address, x.shape[1], experts.top_k)
        run.driver.launch("add_experts", grid, arguments)
        return out

    def _product(
        self, x: GpuArray, weights: int, grouped: tuple[int, int, int, int], shared: int, rows: int,
        tables: ExpertTables,
    ) -> GpuArray:  # fmt: skip
        order, bounds, count, pairs = grouped
        columns = x.shape[1]
        chunk, parts = parts_of(rows, columns, block_k(tables.kind))
        out = self._run.arena.take((pairs, rows))
        most = -(-min(pairs, len(x)) // TILE)  # an expert has each row once at most
        arguments = (
            x.address, weights, order, bounds, out.address, shared, rows, columns, chunk, parts, len(x)
        )  # fmt: skip
        self._run.driver.launch(f"experts.{tables.kind}", (-(-rows // TILE), most, count), arguments)
        return out
