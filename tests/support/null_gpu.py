"""A device that computes nothing, and models of real shapes on it: which memory steps ask for, in no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pageturner.kernels.base import AttentionShape, Layer, Rope, Stack
from pageturner.kernels.choosing import Head
from pageturner.kernels.gpu.weights import FloatMatrix, Vector


class NullDriver:
    """`Driver` of 80 GB. launched: (kernel, grid, arguments) of what was launched or recorded."""

    name, architecture, fingerprint, version = "null", 90, "", ""
    multiprocessors = 132

    def __init__(self) -> None:
        self.at = 1 << 20
        self.launched: list[tuple[str, Sequence[int], Sequence[float]]] = []

    def memory(self) -> tuple[int, int]:
        return 70 << 30, 80 << 30

    def alloc(self, nbytes: int) -> int:
        self.at += -(-nbytes // 256) * 256
        return self.at

    def launch(self, kernel: str, grid: Sequence[int], arguments: Sequence[float]) -> None:
        assert max((*grid, 1, 1)[1:3]) <= 65535, (kernel, grid)
        self.launched.append((kernel, grid, arguments))

    def end_recording(self) -> Any:
        return object()

    def nothing(self, *_: Any) -> None:
        """Of every other call."""

    free = clear = upload = copy = begin_recording = replay = forget = synchronise = nothing


def model(
    layers: int, hidden: int, inner: int, shape: AttentionShape, vocabulary: int
) -> tuple[Stack, Head]:
    """Weights in bf16 that lie nowhere; all layers are alike."""

    def matrix(rows: int, columns: int) -> FloatMatrix:
        return FloatMatrix(1 << 22, "bf16", rows, columns)

    def vector() -> Vector:
        return Vector(1 << 22, (hidden,))

    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tables = np.zeros((8, shape.head_dim // 2), np.float32)
    layer = Layer(
        vector(),
        matrix(wide, hidden),
        matrix(narrow, hidden),
        matrix(narrow, hidden),
        matrix(hidden, wide),
        vector(),
        matrix(inner, hidden),
        matrix(inner, hidden),
        matrix(hidden, inner),
        shape,
        Rope(tables, tables, False),
        1e-5,
        native={"qkv": matrix(wide + 2 * narrow, hidden), "gate_up": matrix(2 * inner, hidden)},
    )
    stack = Stack(matrix(vocabulary, hidden), [layer] * layers, 1e-5, vocabulary=vocabulary)
    return stack, Head(vector(), 1e-5, matrix(vocabulary, hidden))
