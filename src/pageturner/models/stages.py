"""Pipeline parallel: each rank has a range of whole layers, as even in bytes as can be.

The embedding goes to the first stage and the head to the last, by the table of shard.py; of one
that belongs to another stage a rank keeps one row, which says how wide rows are. A matrix that is
both (tied) is at both. What is not in the table and in no layer (final norm, norms and positions of
the embedding) is small, and whole at every stage. No matrix is cut and no sum divided: stages have
the bits of one process.

Rank 1 is the first stage and rank 0, which has the engine, the last: hidden rows end where tokens
are chosen.

Owns the ranges. Must not know processes, backends or file formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import AdapterWeights
from pageturner.kernels.base import AttentionShape, Tensor
from pageturner.models.names import Layout
from pageturner.models.shard import FIRST, RULES
from pageturner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """The share of one stage.

    number    from 0, in the order of layers
    borders   the first layer of each stage, and the end
    tied      the head is the embedding
    kv_heads  of the model, as its KV storage has them
    """

    number: int
    borders: tuple[int, ...]
    tied: bool
    kv_heads: int

    first_token = 0  # of the vocabulary, which no stage shares
    starts = ()

    @property
    def size(self) -> int:
        """The number of stages."""
        return len(self.borders) - 1

    @property
    def identity(self) -> str:
        """A text that is the same for all stages of one model."""
        return repr(self.borders)

    def has_layer(self, layer: int) -> bool:
        """Return whether this stage has the layer."""
        return self.borders[self.number] <= layer < self.borders[self.number + 1]

    def of(self, field: str, tensor: Tensor) -> Tensor:
        """The weight of this name, or one row of it where it is another stage's."""
        if self._has(field):
            return tensor
        row = np.ascontiguousarray(tensor.data.reshape(tensor.shape[0], -1)[0])
        return replace(tensor, shape=(1, *tensor.shape[1:]), data=row)

    def _has(self, field: str) -> bool:
        rule = RULES.get(field)
        if rule is None or rule.stage is None:
            return True
        return self.number == rule.stage % self.size or (self.tied and self.number == self.size - 1)

    def times(self, field: str) -> float:
        """The factor by which a weight of this stage counts in the whole: 0 where another stage's
        is counted."""
        if field == "embed" and self.tied:
            return float(self.number == self.size - 1)
        return float(self._has(field) and (field != "positions" or self.number == FIRST))

    def adapter(self, whole: AdapterWeights) -> AdapterWeights:
        """The part of an adapter for this stage's layers, the embedding or the head."""
        layers = whole.layers[self.borders[self.number] : self.borders[self.number + 1]]
        embed = whole.embed if self.number == FIRST else None
        return replace(
            whole, layers=layers, embed=embed, head=whole.head if self._has("head") else None
        )

    @staticmethod
    def cuts_columns(field: str) -> bool:
        """No matrix is cut."""
        return False

    @staticmethod
    def attention(shape: AttentionShape) -> AttentionShape:
        """All heads."""
        return shape


def stage_of(
    spec: ModelSpec, layout: Layout, nbytes: Mapping[str, int], rank: int, size: int
) -> Stage:
    """The stage of a rank, one of `size`.

    nbytes  of tensors as they are loaded, by name
    EngineFault('pipeline_parallel') for more stages than layers.
    """
    if size > spec.layers:
        raise EngineFault(
            "pipeline_parallel",
            f"{spec.layers} layers cannot be divided among {size} stages"
            f": --pipeline-parallel-size may be 1 to {spec.layers}",
        )
    each = []
    for parts, several in zip(layout.layers, layout.several, strict=True):
        every = itertools.chain(parts.values(), *several.values())
        names = {part.name for part in every}
        each.append(sum(nbytes.get(name, 0) for name in names))
    embed = nbytes[layout.top["embed"].name]
    head = nbytes[layout.top["head"].name] if "head" in layout.top else embed
    kv_heads = spec.kv_spec(1, 1, "float16").kv_heads
    borders = balanced(each, embed, head, size)
    return Stage((rank - 1) % size, borders, "head" not in layout.top, kv_heads)


def balanced(each: Sequence[int], first: int, last: int, size: int) -> tuple[int, ...]:
    """The first layer of each stage, and the end, so that the largest stage is as small as it can
    be.

    each         bytes of the layers, at least one for each stage
    first, last  further bytes of the first and of the last stage
    """
    low, high = 0, sum(each) + first + last
    while low < high:
        most = (low + high) // 2
        low, high = (low, most) if _filled(each, first, last, size, most) else (most + 1, high)
    borders = _filled(each, first, last, size, low)
    assert borders is not None
    return borders


def _filled(
    each: Sequence[int], first: int, last: int, size: int, most: int
) -> tuple[int, ...] | None:
    """Borders of stages of at most so many bytes, each as full as it can be; None: there are
    none."""
    borders = [0]
    for stage in range(size):
        end, total = borders[-1], (first if stage == 0 else 0) + (last if stage == size - 1 else 0)
        room = len(each) - (size - 1 - stage)  # those behind have a layer at least
        while end < room and (end == borders[-1] or total + each[end] <= most):
            total, end = total + each[end], end + 1
        if total > most:
            return None
        borders.append(end)
    return tuple(borders) if borders[-1] == len(each) else None
