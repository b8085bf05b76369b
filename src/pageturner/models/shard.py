"""Tensor parallel: which slice of each weight a rank has, and which weights outside of layers a
stage of pipeline parallel (stages.py) has. A table of rules by the role of the weight.

Outputs of q, k, v, gate and up are divided among ranks, and inputs of o and down, so that a layer
needs two sums over ranks and no other exchange (Shoeybi et al., Megatron-LM, arXiv 1909.08053,
section 3); embedding and head are divided by tokens. Each expert of a mixture is divided as an MLP
is, and every rank has the whole router, so that all choose alike; what experts and the MLP beside
them add is in one sum. Of an adapter that is cut which stands beside what is cut. All else is whole
at each rank. Query heads go where their KV head is; with fewer KV heads than ranks several ranks
have the same one. Parts need not be of equal size: who has more heads has fewer neurons, since all
wait for the slowest at each sum.

Owns the table, how sizes are divided, and the cutting. Must not know processes, backends or file
formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pageturner.errors import EngineFault
from pageturner.formats.ggml import GROUP
from pageturner.formats.ggml_types import BY_NAME
from pageturner.kernels.adapters import AdapterWeights, LowRank
from pageturner.kernels.base import AttentionShape, Tensor
from pageturner.models.names import Layout, Part, named
from pageturner.models.quantise import quantisable, quantization_of
from pageturner.models.spec import ModelSpec, unsupported

MAX_RANKS = 64
POSITIONS = 256  # that a token looks back on, where heads are weighed against neurons: what usual chats have
FIRST, LAST = 0, -1  # stages


class Rule(NamedTuple):
    """The rule by which a weight is divided.

    axis   0: its outputs, 1: its inputs
    by     what is counted, see `Shard.ranges`
    stage  of a weight in no layer the only stage that has it, FIRST or LAST
    """

    axis: int
    by: str
    stage: int | None = None


COLUMN = {
    "q": "heads",
    "k": "kv_heads",
    "v": "kv_heads",
    "gate": "inner",
    "up": "inner",
    "gates": "expert",
    "ups": "expert",
    "shared_gate": "shared",
    "shared_up": "shared",
}
BIASES = {
    "q_bias": "q",
    "k_bias": "k",
    "v_bias": "v",
    "gate_bias": "gate",
    "up_bias": "up",
    "gate_biases": "gates",
    "up_biases": "ups",
}
DOWN = {"down": "inner", "downs": "expert", "shared_down": "shared"}
RULES = {
    **{field: Rule(0, by) for field, by in COLUMN.items()},
    **{bias: Rule(0, COLUMN[field]) for bias, field in BIASES.items()},
    **{field: Rule(1, by) for field, by in DOWN.items()},
    "o": Rule(1, "heads"),
    "embed": Rule(0, "tokens", FIRST),
    "head": Rule(0, "tokens", LAST),
}
ONCE = (
    "o_bias",
    "down_bias",
    "down_biases",
)  # are in the sum over ranks once: rank 0 has them, others zeros
Ranges = tuple[tuple[int, int], ...]  # of each rank, first and end


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of `rank` among `size` ranks.

    ranges    of each rank, by what a rule counts: "heads" and "kv_heads" (in heads), "tokens", and
              the neurons of an MLP ("inner"), of an expert ("expert") and of the MLP beside experts
              ("shared")
    head_dim  rows of a head
    """

    rank: int
    size: int
    ranges: dict[str, Ranges]
    head_dim: int

    @property
    def first_token(self) -> int:
        """The token of the first row of this rank's embedding."""
        return self.ranges["tokens"][self.rank][0]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each rank, and behind them the end."""
        tokens = self.ranges["tokens"]
        return (*(first for first, _ in tokens), tokens[-1][1])

    @property
    def kv_heads(self) -> int:
        """KV heads of all ranks together: more than the model has where several ranks have the
        same."""
        return sum(end - first for first, end in self.ranges["kv_heads"])

    @property
    def identity(self) -> str:
        """A text that is the same for all ranks of one model."""
        return repr(sorted(self.ranges.items()))

    @staticmethod
    def has_layer(layer: int) -> bool:
        """Return whether this rank has a part of the layer."""
        return True

    def of(self, field: str, tensor: Tensor) -> Tensor:
        """The slice of the weight of this name (see `models.names.named`)."""
        if field in ONCE and self.rank:
            return replace(tensor, data=np.zeros_like(tensor.data))
        rule = RULES.get(field)
        if rule is None:
            return tensor
        first, end = self._range(rule)
        block = BY_NAME[tensor.kind]
        if rule.axis == 0:
            data = tensor.data.reshape(tensor.shape[0], -1)[first:end]
            shape = (end - first, *tensor.shape[1:])
        else:
            rows, columns = tensor.shape
            blocks = tensor.data.reshape(rows, columns // block.values, block.nbytes)
            data = blocks[:, first // block.values : end // block.values]
            shape = (rows, end - first)
        return replace(tensor, shape=shape, data=np.ascontiguousarray(data).reshape(-1))

    def adapter(self, whole: AdapterWeights) -> AdapterWeights:
        """The slice of an adapter: of B where the outputs of its product are divided, of A where
        the inputs are. What it adds to the embedding is whole, for it is added behind the sum."""

        def cut(field: str, pair: LowRank) -> LowRank:
            rule = RULES.get(field)
            if rule is None:
                return pair
            first, end = self._range(rule)
            if rule.axis == 0:
                return replace(pair, b=pair.b[first:end])
            return replace(pair, a=pair.a[:, first:end])

        layers = tuple(
            {field: cut(field, pair) for field, pair in one.items()} for one in whole.layers
        )
        return replace(whole, layers=layers, head=whole.head and cut("head", whole.head))

    def cuts_columns(self, field: str) -> bool:
        """Return whether ranks have different inputs of the weight of this name."""
        return field in RULES and RULES[field].axis == 1

    def attention(self, shape: AttentionShape) -> AttentionShape:
        """The heads of this rank."""
        first, end = self.ranges["heads"][self.rank]
        kv_first, kv_end = self.ranges["kv_heads"][self.rank]
        slopes, sinks = shape.slopes[first:end], shape.sinks[first:end]
        return replace(
            shape, heads=end - first, kv_heads=kv_end - kv_first, slopes=slopes, sinks=sinks
        )

    def times(self, field: str) -> float:
        """The whole weight is so many times what this rank has of it."""
        rule = RULES.get(field)
        if rule is None:
            return 1.0
        first, end = self.ranges[rule.by][self.rank]
        return max(e for _, e in self.ranges[rule.by]) / (end - first)

    def _range(self, rule: Rule) -> tuple[int, int]:
        """The range of this rank in rows or columns."""
        first, end = self.ranges[rule.by][self.rank]
        unit = self.head_dim if rule.by in ("heads", "kv_heads") else 1
        return first * unit, end * unit


@dataclass(frozen=True, slots=True)
class Divisible:
    """A model that is to be divided among ranks.

    kinds         of tensors as they are cut, by name; those of a model that is dequantised first
                  are all "F32"
    quantization  what matrices of floats become when they are loaded
    """

    spec: ModelSpec
    layout: Layout
    kinds: dict[str, str]
    quantization: str = "none"

    def problem(self, size: int) -> str:
        """The reason why so many ranks are not possible; "": they are."""
        spec = self.spec
        if size > spec.heads:
            return f"{spec.heads} query heads cannot be divided among {size} ranks"
        heads, _ = _heads(spec.heads, spec.kv_heads, size)
        if any(first == end for first, end in heads):
            groups = f"{spec.kv_heads} KV heads of {spec.heads // spec.kv_heads} query heads"
            return f"{groups} cannot be divided among {size} ranks"
        for part, values in self.groups("o"):
            if any(end * spec.head_dim % values for _, end in heads):
                columns = (
                    f"{part.shape[-1]} columns in groups of {values} and heads of {spec.head_dim}"
                )
                return f"tensor {part.name!r}, of {columns}, cannot be divided among {size} ranks"
        for field, count in self.inner().items():
            unit = self.unit(field, size)
            if count < unit * size:
                part, _ = next(self.groups(field))
                columns = f"{count} columns in groups of {unit}"
                return f"tensor {part.name!r}, of {columns}, cannot be divided among {size} ranks"
        return ""

    def inner(self) -> dict[str, int]:
        """The number of neurons before each of DOWN that the model has."""
        spec = self.spec
        found = {
            named(spec, i, "down") for i, one in enumerate(self.layout.layers) if "down" in one
        }
        sizes = {"down": spec.ffn}
        if spec.experts is not None:
            found.add("downs")
            sizes |= {"downs": spec.experts.ffn, "shared_down": spec.experts.shared}
        return {field: count for field, count in sizes.items() if field in found}

    def groups(self, field: str) -> Iterator[tuple[Part, int]]:
        """The weights of this name in all layers, and how many of their columns belong together."""
        quantised = quantization_of(field, self.quantization) != "none"
        for layer, one in enumerate(self.layout.layers):
            several = self.layout.several[layer]
            alone = [part for f, part in one.items() if named(self.spec, layer, f) == field]
            for part in several.get(field, []) + alone:
                kind = self.kinds[part.name]
                columns = part.shape[-2 if part.transposed or part.turned else -1]
                made = quantised and quantisable(kind, (1, columns))
                yield part, GROUP if made else BY_NAME[kind].values

    def unit(self, field: str, size: int) -> int:
        """The number of neurons before one of DOWN that belong together in each layer; for floats
        the number that kernels like."""
        widest = max(values for _, values in self.groups(field))
        if widest > 1:
            return widest
        count = self.inner()[field]
        return next((n for n in (GROUP, 8) if count % n == 0 and count >= n * size), 1)


def shard_of(model: Divisible, rank: int, size: int) -> Shard:
    """The share of a rank.

    EngineFault: 'model_unsupported' for what is not divided yet; 'tensor_parallel', naming a tensor
    and the sizes that work, where a cut would go through a group of quantised weights, or a rank
    would have nothing.
    """
    spec = model.spec
    _refuse(spec)
    if problem := model.problem(size):
        sizes = range(1, min(MAX_RANKS, spec.heads) + 1)
        work = ", ".join(str(n) for n in sizes if not model.problem(n))
        raise EngineFault("tensor_parallel", f"{problem}: --tensor-parallel-size may be {work}")
    heads, kv_heads = _heads(spec.heads, spec.kv_heads, size)
    tokens = _divided(spec.vocab, GROUP if spec.vocab >= GROUP * size else 1, size)
    ranges = {"heads": heads, "kv_heads": kv_heads, "tokens": tokens}
    for field, count in model.inner().items():
        unit = model.unit(field, size)
        if field == "shared_down":
            ranges[DOWN[field]] = _divided(count, unit, size)
        else:
            work_besides = _attention_work(spec, heads, kv_heads)
            ranges[DOWN[field]] = _balanced(count, unit, work_besides, _mlp_work(spec, field))
    return Shard(rank, size, ranges, spec.head_dim)


def _refuse(spec: ModelSpec) -> None:
    found = {
        "a latent KV": spec.latent is not None,
        "biases of an MLP beside experts": bool(
            spec.experts and spec.experts.shared and spec.family.mlp_bias
        ),
        "norms over all heads together": spec.family.qk_norm == "wide",
    }
    for what, there in found.items():
        if there:
            raise unsupported(
                f"this model has {what}, which is not divided among ranks yet"
                ": use --tensor-parallel-size 1"
            )


def _divided(count: int, unit: int, size: int) -> Ranges:
    """Divide as evenly as whole units allow; the last rank gets what is no whole unit."""
    borders = [unit * (count // unit * r // size) for r in range(size)] + [count]
    return tuple(itertools.pairwise(borders))


def _balanced(count: int, unit: int, besides: list[int], work: int) -> Ranges:
    """Whole units so that each rank has as even a share of all work as they allow, and one unit at
    least.

    besides  what each rank does apart from this; `work`: of all `count` together, in the same unit
    """
    size, units = len(besides), count // unit
    wanted = [max(sum(besides) + work - size * one, 0) for one in besides]
    borders = [0]
    for rank, before in enumerate(itertools.accumulate(wanted[:-1]), 1):
        at = units * before // max(sum(wanted), 1)
        borders.append(min(max(at, borders[-1] + 1), units - (size - rank)))
    return tuple(itertools.pairwise([*(unit * border for border in borders), count]))


def _attention_work(spec: ModelSpec, heads: Ranges, kv_heads: Ranges) -> list[int]:
    """Products for a token in a layer's attention, by rank: q and o, k and v, and what is looked
    back on."""
    each, pair = 2 * spec.head_dim * (spec.dim + POSITIONS), 2 * spec.head_dim * spec.dim
    counts = zip(heads, kv_heads, strict=True)
    return [
        (end - first) * each + (kv_end - kv_first) * pair
        for (first, end), (kv_first, kv_end) in counts
    ]


def _mlp_work(spec: ModelSpec, field: str) -> int:
    """The same in an MLP, or in the experts that a token goes through and the MLP beside them."""
    matrices = 3 if spec.family.gated else 2
    if field == "downs":
        assert spec.experts is not None
        return matrices * spec.dim * (spec.experts.top_k * spec.experts.ffn + spec.experts.shared)
    return matrices * spec.dim * spec.ffn


def _heads(heads: int, kv_heads: int, size: int) -> tuple[Ranges, Ranges]:
    """Query heads and KV heads of each rank: whole groups that share a KV head; or a part of one
    group, where there are more ranks than KV heads."""
    group = heads // kv_heads
    if size <= kv_heads:
        kv = _divided(kv_heads, 1, size)
        return tuple((first * group, end * group) for first, end in kv), kv
    owners = [rank * kv_heads // size for rank in range(size)]
    queries: list[tuple[int, int]] = []
    for head in range(kv_heads):
        parts = _divided(group, 1, owners.count(head))
        queries += [(head * group + first, head * group + end) for first, end in parts]
    return tuple(queries), tuple((head, head + 1) for head in owners)
