"""LoRA adapters as a backend takes them (Hu et al., arXiv 2106.09685): low-rank additions to
products.

Owns their types, and which rows of a step have which. Must not know files, names of adapters,
requests or how anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
MAX_RANK = 256
KINDS = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}  # how the values lie in numpy's arrays
# The fields of kernels.base.Layer that may be adapted, by what they have in common: their input.
INPUTS: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("o",), ("up", "gate"), ("down",))
FIELDS = tuple(field for fields in INPUTS for field in fields)

Adapter = Any  # an adapter in a backend's own form; has `nbytes`
Adapters = Sequence[Adapter | None]  # of sequences, or of rows


@dataclass(frozen=True, slots=True)
class LowRank:
    """An addition to a product W x: scale * B (A x). Both matrices are of one of KINDS.

    a  [rank, K]; of an embedding the rows by token, [V, rank]
    b  [N, rank]
    """

    a: NDArray[Any]
    b: NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.b.shape[1])


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """All of an adapter. layers: for each layer of the model, by field of `Layer`; kind: of all
    values."""

    kind: str
    layers: tuple[Mapping[str, LowRank], ...]
    embed: LowRank | None = None
    head: LowRank | None = None

    def of_neurons(self, inner: Sequence[NDArray[np.int32] | None]) -> AdapterWeights:
        """The same for layers whose MLPs have their neurons in another order (`Weights.inner`)."""
        if all(order is None for order in inner):
            return self
        layers = zip(self.layers, inner, strict=True)
        return replace(self, layers=tuple(_of_neurons(layer, order) for layer, order in layers))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all values."""
        pairs = [pair for layer in self.layers for pair in layer.values()]
        pairs += [pair for pair in (self.embed, self.head) if pair is not None]
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)


def _of_neurons(
    layer: Mapping[str, LowRank], order: NDArray[np.int32] | None
) -> Mapping[str, LowRank]:
    if order is None:
        return layer
    changed = {
        field: replace(layer[field], b=layer[field].b[order])
        for field in ("up", "gate")
        if field in layer
    }
    if "down" in layer:
        changed["down"] = replace(layer["down"], a=np.ascontiguousarray(layer["down"].a[:, order]))
    return {**layer, **changed}


def of_rows(adapters: Adapters | None, query_start: I32) -> list[Adapter | None] | None:
    """The adapter of each row, from those of the sequences; None where no row has one."""
    if adapters is None or not any(adapter is not None for adapter in adapters):
        return None
    counts = np.diff(query_start).tolist()
    return [one for one, count in zip(adapters, counts, strict=True) for _ in range(count)]


def widened(kind: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """Values of one of KINDS in fp32, exactly."""
    if kind == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
