"""From the tensors of a file to the packed weights of a decoder.

Owns the check that a file holds what its spec says, and the cutting of tensors. Must not know file formats,
backends (weights enter through `ops.pack_weight`) or what the layers compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Protocol

import numpy as np

from pageturner.errors import EngineFault
from pageturner.files.ggml import SUPPORTED, dequantise
from pageturner.files.ggml_types import BY_NAME
from pageturner.files.gguf import TensorInfo
from pageturner.kernels.base import F32, Experts, Layer, Ops, Rope, Tensor, Weight
from pageturner.models.names import Layout, Part
from pageturner.models.quantise import quantise, quantization_of
from pageturner.models.rope import RopeSpec, rope_tables
from pageturner.models.spec import ExpertSpec, ModelSpec, unsupported

ROPE_DIVISORS = "rope_freqs.weight"
# Whose activations get two int8 terms under "auto": where rounding changes the likeliest token most for the
# work that it takes (bench/LOG.md). What the last MLP adds goes to the head as it is, and is large.
FINE = frozenset({"k", "v", "embed", "head"})
FINE_LAST = FINE | {"gate", "up", "down", "gates", "ups", "downs"}  # of the last layer
AUTO = "auto2"  # names what "auto" means in fingerprints: another number whenever the two above change
FEW = 1000  # layers, or experts, that are looked for one by one whatever the file holds
# Of matrices: what every row goes through; only those that get a token, behind the last K and V, with the
# head; experts of which a row goes through some; tables of which a step reads a few rows
PLACES = ("layers", "ending", "experts", "last_experts", "tables")


class TensorFile(Protocol):
    """What GGUF and safetensors have in common."""

    @property
    def path(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]: ...


@dataclass(slots=True)
class WeightSize:
    """Of matrices: values that are multiplied with int8 terms (each as often as there are terms) and in fp32,
    and bytes as packed."""

    int8: int = 0
    fp32: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Weights:
    """Everything a decoder computes with. `head` is `embed` where they are tied; absent parts are None.

    sizes  of the matrices, by PLACES
    """

    embed: Weight
    layers: list[Layer]
    norm: Weight
    head: Weight
    norm_bias: Weight | None = None
    positions: Weight | None = None
    embed_norm: Weight | None = None
    embed_norm_bias: Weight | None = None
    sizes: dict[str, WeightSize] = field(default_factory=dict)


def check_counts(file: TensorFile, spec: ModelSpec) -> None:
    """EngineFault('model_invalid') if there are more layers or experts than the file can hold weights of:
    asked before anything is listed for each of them. An expert has a tensor, or a row of one with three
    dimensions. Of few of them the first tensor that is missing says more."""
    infos = file.tensors.values()
    stacked = sum(min(info.shape[0], info.nbytes) for info in infos if len(info.shape) == 3)
    counts = {"layers": spec.layers}
    if spec.experts is not None:
        counts["experts"] = spec.experts.count * len(spec.experts.layers)
    for what, count in counts.items():
        if count > FEW + len(infos) + stacked:
            message = f"{count:,} {what}, and {file.path} holds {len(infos):,} tensors"
            raise EngineFault("model_invalid", f"the model file makes no sense: {message}")


def check_tensors(file: TensorFile, spec: ModelSpec, layout: Layout) -> None:
    """EngineFault 'tensor_missing', 'tensor_unexpected' or 'tensor_shape', naming the first such tensor."""
    expected = {part.name: part.shape for part in layout.all()}
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise EngineFault("tensor_missing", f"{file.path} lacks the tensor {name!r}")
        if info.kind not in SUPPORTED:
            message = f"tensor {name!r} is of type {info.kind}, which is not supported: get the model in, or"
            raise EngineFault("weight_kind", f"{message} convert it to, one of {', '.join(SUPPORTED)}")
        if info.shape != shape:
            raise EngineFault("tensor_shape", f"tensor {name!r} has shape {info.shape}; {shape} was expected")
    for name in file.tensors:
        known = name in expected or name == ROPE_DIVISORS
        if not (known or name.endswith(layout.ignored) or name.startswith(layout.foreign)):
            message = f"{file.path} has the tensor {name!r}, which a {spec.arch} model should not have"
            raise EngineFault("tensor_unexpected", message)


def load_weights(
    file: TensorFile,
    spec: ModelSpec,
    layout: Layout,
    ops: Ops,
    *,
    dtype: str,
    positions: int,
    quantization: str = "none",
    activation_bits: str = "auto",
) -> Weights:
    """Pack every tensor for the backend.

    dtype            "auto": the kinds of the file; "float32": dequantised
    positions        longest sequence, in tokens: the length of the rotary tables
    quantization     what matrices that are floats by then become (see models/quantise.py); not those of
                     routers and positions
    activation_bits  of products with quantised weights: "8", "15", or "auto": 15 for FINE
    """
    if dtype not in ("auto", "float32"):
        raise EngineFault("weight_dtype", f"dtype {dtype!r} is not supported; use auto or float32")
    check_tensors(file, spec, layout)
    divisors = _rope_divisors(file, spec)
    sizes, last = {name: WeightSize() for name in PLACES}, len(layout.layers) - 1

    def pack(field: str, part: Part, layer: int | None = None) -> Weight:
        tensor = read_part(file, part)
        tensor = _as_float32(tensor) if dtype == "float32" else tensor
        tensor = quantise(tensor, quantization_of(field, quantization))
        fine = field in (FINE_LAST if layer == last else FINE)
        two_terms = activation_bits == "15" or (activation_bits == "auto" and fine)
        packed = ops.pack_weight(replace(tensor, fine=two_terms))
        _count(sizes[_place(field, layer == last, layout)], tensor, two_terms, packed)
        return packed

    @cache
    def tables(rope: RopeSpec) -> Rope:
        return rope_tables(rope, positions, divisors)

    _check_features(ops, _model_needs(spec))
    layers = []
    for i, parts in enumerate(layout.layers):
        packed: dict[str, Any] = {"gate": None, "up": None, "down": None}
        packed |= {field: pack(field, part, i) for field, part in parts.items()}
        layer = Layer(
            **packed,
            shape=spec.attention(i, positions),
            rope=tables(spec.rope_of(i)),
            eps=spec.eps,
            act=spec.family.act,
        )
        if spec.experts is not None and layout.experts[i]:
            mixture = layout.experts[i].items()
            routed = {name: tuple(pack(name, part, i) for part in each) for name, each in mixture}
            layer.experts = _experts(spec.experts, routed)
        _check_features(ops, layer.needs)
        ops.prepare_layer(layer)
        layers.append(layer)
    top = {field: pack(field, part) for field, part in layout.top.items()}
    return Weights(**({"head": top["embed"]} | top), layers=layers, sizes=sizes)


def _experts(spec: ExpertSpec, packed: dict[str, tuple[Weight, ...]]) -> Experts:
    (router,) = packed["router"]
    return Experts(router, packed["gates"], packed["ups"], packed["downs"], spec.top_k, spec.normalise)


def _place(field: str, last: bool, layout: Layout) -> str:
    """Which of PLACES a weight counts for."""
    if field in layout.top:
        return "ending" if field == ("head" if "head" in layout.top else "embed") else "tables"
    if field in ("gates", "ups", "downs"):
        return "last_experts" if last else "experts"
    return "ending" if last and field not in ("k", "v") else "layers"


def _count(size: WeightSize, tensor: Tensor, two_terms: bool, packed: Weight) -> None:
    if len(tensor.shape) < 2:
        return
    size.nbytes += packed.nbytes
    if BY_NAME[tensor.kind].values == 1:
        size.fp32 += prod(tensor.shape)
    else:
        size.int8 += prod(tensor.shape) * (2 if two_terms else 1)


def _model_needs(spec: ModelSpec) -> frozenset[str]:
    needed = {
        "scale": spec.embed_scale != 1,
        "soft_cap": spec.logit_soft_cap > 0,
        "layer_norm": spec.family.layer_norm or spec.family.embed_norm,
    }
    return frozenset(name for name, found in needed.items() if found)


def _check_features(ops: Ops, needs: frozenset[str]) -> None:
    lacking = sorted(needs - ops.features)
    if lacking:
        message = f"the {ops.name} backend does not compute {', '.join(lacking)}, which this model needs"
        raise unsupported(f"{message}; use the reference backend")


def read_part(file: TensorFile, part: Part) -> Tensor:
    """The weight that a part describes, with its outputs first. Vectors come in fp32."""
    kind, shape, raw = file.tensor(part.name)
    data = np.frombuffer(raw, np.uint8)
    if len(shape) == 3:  # experts, one behind the other
        shape = (shape[0] * shape[1], shape[2])
    if part.transposed:
        if BY_NAME[kind].values != 1:
            raise EngineFault("weight_kind", f"tensor {part.name!r} of type {kind} cannot be transposed")
        elements = data.reshape(*shape, BY_NAME[kind].nbytes)
        data = np.ascontiguousarray(elements.swapaxes(0, 1)).reshape(-1)
        shape = shape[::-1]
    if part.cut is not None:
        start, count, stride = part.cut
        rows = data.reshape(shape[0] // stride, stride, -1)[:, start : start + count]
        shape = (rows.shape[0] * count, *shape[1:])
        data = np.ascontiguousarray(rows).reshape(-1)
    tensor = Tensor(part.name, kind, shape, data)
    if len(shape) == 1:
        tensor = _as_float32(tensor, part.plus)
    return tensor


def _as_float32(tensor: Tensor, plus: float = 0.0) -> Tensor:
    values = dequantise(tensor.kind, tensor.shape, tensor.data)
    values = np.ascontiguousarray(values + np.float32(plus) if plus else values)
    return Tensor(tensor.name, "F32", tensor.shape, values.reshape(-1).view(np.uint8))


def _rope_divisors(file: TensorFile, spec: ModelSpec) -> F32 | None:
    if ROPE_DIVISORS not in file.tensors:
        return None
    kind, shape, raw = file.tensor(ROPE_DIVISORS)
    if kind not in SUPPORTED:
        raise EngineFault(
            "weight_kind", f"tensor {ROPE_DIVISORS!r} is of type {kind}, which is not supported"
        )
    if 0 in shape or shape != (spec.rope.dim // 2,):
        message = f"tensor {ROPE_DIVISORS!r} has shape {shape}; ({spec.rope.dim // 2},) was expected"
        raise EngineFault("tensor_shape", message)
    divisors = dequantise(kind, shape, np.frombuffer(raw, np.uint8))
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise EngineFault("model_invalid", f"tensor {ROPE_DIVISORS!r} holds values that cannot divide")
    return divisors
