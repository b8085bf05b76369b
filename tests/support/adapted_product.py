"""One product of a model on a device, its embedding and its head, and adapters for them. For tests only."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.kernels import grid

from pageturner.kernels.adapters import AdapterWeights, LowRank
from pageturner.kernels.base import Stack
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.ops import GpuOps
from support.adapters import as_kind

OUTPUTS, INPUTS, VOCABULARY = 140, 80, 11


class Products:
    """Adapters of a stack that has one product, an embedding and a head."""

    def __init__(self, driver: Any, inputs: int = INPUTS) -> None:
        self.ops = GpuOps(driver, 64 << 20, graphs=False)
        layer: Any = type("Layer", (), {})()
        layer.o = self.ops.pack_weight(grid.weight("F32", OUTPUTS, inputs))
        table = self.ops.pack_weight(grid.weight("F32", VOCABULARY, inputs))
        self.stack = Stack(table, [layer], 1e-5)
        self.inputs = inputs

    def weights(self, kind: str, rank: int, seed: int = 0) -> AdapterWeights:
        def pair(inputs: int, outputs: int, turned: bool = False) -> LowRank:
            a = as_kind(grid.normal(rank, inputs, seed=seed) * np.float32(inputs**-0.5), kind)
            b = as_kind(grid.normal(outputs, rank, seed=seed + 1) * np.float32(rank**-0.5), kind)
            return LowRank(np.ascontiguousarray(a.T) if turned else a, b, 1.5)

        embed, head = pair(VOCABULARY, self.inputs, True), pair(self.inputs, VOCABULARY)
        return AdapterWeights(kind, ({"o": pair(self.inputs, OUTPUTS)},), embed, head)

    def adapt(self, x: np.ndarray, adapters: list[Any], kind: str = "fp32") -> np.ndarray:
        """What is added to rows of ones."""
        self.ops.begin()
        y = self.ops.on_device(np.ones((len(x), OUTPUTS), np.float32))
        rows = self.ops.launches.cast(self.ops.on_device(x), kind)
        # as a norm leaves them, in this kind alone
        rows = GpuArray(rows.address, rows.shape, rows.kind)
        return self.ops.to_numpy(self.ops.adapt(y, rows, adapters, 0, "o"))
