"""Packs the tensors of a file as the weights of a decoder.

Owns the check that a file holds what its spec says, and the cutting of tensors. Must not know file
formats, backends (weights enter through `ops.pack_weight`) or what the layers compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats.ggml import FLOATS, IN_FILES, SUPPORTED, dequantise
from pageturner.formats.ggml_types import BY_NAME
from pageturner.formats.mapped import TensorInfo
from pageturner.kernels.base import F32, AttentionShape, Layer, Ops, Tensor, Weight
from pageturner.kernels.layer_parts import Experts, Latent, PerLayer
from pageturner.models.expert_choice import ExpertChoice
from pageturner.models.head_norms import HeadNorms
from pageturner.models.names import Layout, Part, named
from pageturner.models.packed_cache import PackedCache
from pageturner.models.quantise import (
    in_place,
    not_finite,
    quantise,
    quantization_of,
    rounded,
    widened,
)
from pageturner.models.recurrent_weights import EXACT, MATRICES, NUMBERS, linear_part
from pageturner.models.rope import LONG_DIVISORS, SHORT_DIVISORS, rope_tables
from pageturner.models.shard import Shard
from pageturner.models.spec import ExpertSpec, ModelSpec, unsupported
from pageturner.models.stages import Stage

ROPE_DIVISORS = "rope_freqs.weight"
LAYER_TABLE = "layer_table"
# Bits of activations under "auto" are those of Ops.default_activation_bits: 12, which leave a tenth
# of the error of 8 at half of what 15 cost, or 15 where they are free. Where neither is to be had,
# 15 for whose activations rounding matters most for the work that it takes, 8 for the others
# (docs/adr/0047-*). What the last MLP adds goes to the head as it is.
FINE = frozenset({"k", "v", "embed", "head"})
FINE_LAST = FINE | {"gate", "up", "down", "gates", "ups", "downs"}  # of the last layer
AUTO = "auto4"  # names what "auto" means in fingerprints: another number whenever that changes
TERMS_IN_HALVES = {8: 2, 12: 3, 15: 4}  # int8 products of a weight and an activation, twice
FEW = 1000  # layers, or experts, that are looked for one by one whatever the file holds
# Of matrices: what every row goes through; only those that get a token, behind the last K and V,
# with the head; experts of which a row goes through some; tables of which a step reads a few rows
PLACES = ("layers", "ending", "experts", "last_experts", "tables")


class TensorFile(Protocol):
    """A file of tensors: the interface that GGUF and safetensors share."""

    @property
    def path(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]: ...
    def advise(self, names: Iterable[str], *, needed: bool) -> None: ...


@dataclass(slots=True)
class WeightSize:
    """The size of matrices: values that are multiplied with int8 terms (each as often as there are
    terms; 12 bits are one and a half) and in fp32, and bytes as packed."""

    int8: int = 0
    fp32: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MTPWeights:
    """A head of multi-token prediction: norms of the embedding of a token and of the hidden row
    before it, the product `fc` of both, a layer, and the norm before the model's own head."""

    layer: Layer
    mtp_enorm: Weight
    mtp_hnorm: Weight
    mtp_fc: Weight
    mtp_norm: Weight


@dataclass(slots=True)
class Weights:
    """Everything a decoder computes with. `head` is `embed` where they are tied; absent parts are
    None.

    windows  of all layers of the model, how many positions each sees; 0: all
    inner    of all layers: which of the file's each neuron of the MLP is; None: the same
    sizes    of the matrices, by PLACES; of all ranks that have slices, of one that has a stage
    mtp      the head that predicts a second token, where it was asked for
    shard    which slice of the model this is, or which layers; None: all of it
    """

    embed: Weight
    layers: list[Layer]
    norm: Weight
    head: Weight
    windows: list[int]
    inner: list[NDArray[np.int32] | None]
    norm_bias: Weight | None = None
    head_bias: Weight | None = None
    positions: Weight | None = None
    embed_norm: Weight | None = None
    embed_norm_bias: Weight | None = None
    sizes: dict[str, WeightSize] = field(default_factory=dict)
    shard: Shard | Stage | None = None
    mtp: MTPWeights | None = None


def check_counts(file: TensorFile, spec: ModelSpec) -> None:
    """EngineFault('model_invalid') if there are more layers or experts than the file can hold
    weights of: asked before anything is listed for each of them. An expert has a tensor, or a row
    of one with three dimensions. Of few of them the first tensor that is missing says more."""
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
    """EngineFault 'tensor_missing', 'tensor_unexpected' or 'tensor_shape', naming the first such
    tensor."""
    expected = {part.name: part.shape for part in layout.all()}
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise EngineFault("tensor_missing", f"{file.path} lacks the tensor {name!r}")
        if info.kind not in SUPPORTED:
            raise EngineFault(
                "weight_kind",
                f"tensor {name!r} is of type {info.kind}, which is not supported: get the model in, or"
                f" convert it to, one of {', '.join(IN_FILES)}",
            )
        if info.shape != shape:
            raise EngineFault(
                "tensor_shape", f"tensor {name!r} has shape {info.shape}; {shape} was expected"
            )
    for name in file.tensors:
        stem, _, ending = name.rpartition(".")
        scaled = file.tensors.get(f"{stem}.weight")
        known = name in expected or name in (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
        if ending in ("scale", "input_scale") and scaled and scaled.kind == "NVFP4":
            known = True
        known = known or name.endswith(layout.ignored) or name.startswith(layout.foreign)
        if not known and (has_tensor(file, name) or not name.endswith(".bias")):
            raise EngineFault(
                "tensor_unexpected",
                f"{file.path} has the tensor {name!r}, which a {spec.arch} model should not have",
            )


def has_tensor(file: TensorFile, name: str) -> bool:
    """Return whether a file has a tensor that says something: biases of zeros, which GPTQ once
    wrote beside every matrix, do not."""
    info = file.tensors.get(name)
    if info is None or not name.endswith(".bias") or info.kind not in FLOATS:
        return info is not None
    return bool(
        dequantise(info.kind, info.shape, np.frombuffer(file.tensor(name)[2], np.uint8)).any()
    )


class OpenModel(NamedTuple):
    """A model whose files are open: its tensors, what it is, and which tensor is what."""

    file: TensorFile
    spec: ModelSpec
    layout: Layout


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Settings for loading a model.

    dtype            "auto": weights as in the file; "float32": dequantised
    max_positions    longest sequence that will be computed, in tokens; 0: the model's context
    quantization     "none", "int8" or "int4": what matrices of floats become (models/quantise.py),
                     but for routers and positions
    activation_bits  of products with quantised weights: "8", "12", "15", or "auto"
                     (Ops.default_activation_bits)
    packed_cache     folder that keeps packed weights for the next load (models/packed_cache.py);
                     "": none
    rank, ranks      of tensor parallel: this rank's slices (models/shard.py)
    stages           of pipeline parallel, in place of `ranks`: this rank's layers
                     (models/stages.py)
    mtp              the head that predicts a second token is loaded too
    load_format      "dummy": random weights of a config.json, from load_seed (models/dummy.py)
    available        bytes that are free where the weights are to lie; None: in the memory of this
                     machine
    """

    dtype: str = "auto"
    max_positions: int = 0
    quantization: str = "none"
    activation_bits: str = "auto"
    packed_cache: str = ""
    rank: int = 0
    ranks: int = 1
    stages: int = 1
    mtp: bool = False
    load_format: str = "auto"
    load_seed: int = 0
    available: Callable[[], int | None] | None = None

    def positions(self, spec: ModelSpec) -> int:
        """The longest sequence that is computed, which is the length of the rotary tables."""
        return min(self.max_positions or spec.context, spec.context)


def load_weights(
    model: OpenModel,
    ops: Ops,
    options: LoadOptions,
    packed_cache: PackedCache | None = None,
    shard: Shard | Stage | None = None,
) -> Weights:
    """Pack every tensor for the backend.

    packed_cache  asked for each matrix before it is packed
    shard         the slice or the stage of a rank; None: all
    """
    file, spec, layout = model
    positions = options.positions(spec)
    check_tensors(file, spec, layout)
    divisors = _rope_divisors(file, spec, positions)
    sizes, last = {name: WeightSize() for name in PLACES}, spec.layers - 1
    ending = last - spec.sharing  # the last layer that writes K and V
    if options.dtype not in ("auto", "float32"):
        message = f"dtype {options.dtype!r} is not supported; use auto or float32"
        raise EngineFault("weight_dtype", message)
    packing = _Packing(file, ops, options.dtype, packed_cache, shard)

    def pack(field: str, part: Part, layer: int | None = None) -> Weight:
        bits_of = partial(_bits, ops, options.activation_bits, field, layer == last)
        name = field if layer is None else named(spec, layer, field)
        quantization = quantization_of(field, options.quantization)
        kind, shape, packed = packing.weight(name, part, quantization, bits_of)
        if len(shape) > 1 and (layer is None or layer <= last):
            times = shard.times(name) if shard else 1.0
            size = sizes[_place(field, layer is not None and layer >= ending, layout)]
            size.nbytes += round(packed.nbytes * times)
            values = round(prod(shape) * times)
            if kind in FLOATS:
                size.fp32 += values
            else:
                size.int8 += values * TERMS_IN_HALVES[bits_of(kind)] // 2
        return packed

    tables = cache(
        lambda rope: rope_tables(rope, positions, divisors if rope == spec.rope else None)
    )
    _check_features(ops, _model_needs(spec))
    table = LayerTable.of(model) if spec.per_layer else None
    layers, tempers = (
        [],
        spec.attn_temperature.factors(positions) if spec.attn_temperature else None,
    )
    every = range(len(layout.layers))  # that of a head, which predicts a second token, is the last
    mine = [i for i in every if shard is None or shard.has_layer(i)]
    for i, following in itertools.zip_longest(mine, mine[1:]):
        packing.ahead(layout.top if following is None else layout.layers[following])
        several = {
            f: tuple(pack(f, part, i) for part in each) for f, each in layout.several[i].items()
        }
        parts = layout.layers[i]
        packed = {f: pack(f, part, i) for f, part in parts.items() if f not in NUMBERS}
        layer = Layer(
            **_fields(packed, several),
            linear=linear_part(spec, packed, partial(_numbers, file, parts), i)
            if "conv" in parts
            else None,
            mlp_factors=spec.mlp_factors,
            mixer_factors=spec.mixer_factors,
            shape=_shape(spec.attention(i, positions), _sinks(file, layout.layers[i]), shard),
            rope=tables(spec.rope_of(i)),
            eps=spec.eps,
            act=spec.family.act,
            experts=_experts(spec.experts, several)
            if spec.experts and "router" in several
            else None,
            per_layer=_per_layer(spec, packed, table.layer(i)) if table is not None else None,
            out_scale=float(packed["out_scale"][0]) if "out_scale" in packed else 1.0,
            wide_qk_norm=spec.family.qk_norm == "wide",
            attn_temperature=tempers if i in spec.no_rope or not spec.no_rope else None,
            residual=spec.residual,
            parallel=spec.family.parallel,
            late_qk_norm=spec.family.qk_norm == "late",
            head_norms=_head_norms(several, spec.eps),
        )
        _check_features(ops, layer.needs)
        ops.prepare_layer(layer)
        layers.append(layer)
    top = {field: pack(field, part) for field, part in layout.top.items() if field != LAYER_TABLE}
    head = {field: top.pop(field) for field in [*top] if field.startswith("mtp_")}
    return Weights(
        **({"head": top["embed"]} | top),
        mtp=MTPWeights(layers.pop(), **head) if head else None,
        layers=layers,
        windows=[spec.attention(i, positions).window for i in range(last + 1)],
        inner=[_inner(file, parts) for parts in layout.layers[: spec.layers]],
        sizes=sizes,
        shard=shard,
    )


def _inner(file: TensorFile, parts: dict[str, Part]) -> NDArray[np.int32] | None:
    return getattr(file.tensors.get(parts["up"].name), "rows", None) if "up" in parts else None


@dataclass(frozen=True, slots=True)
class _Packing:
    """The packing of the weights of a model one after the other, while the next are read ahead."""

    file: TensorFile
    ops: Ops
    dtype: str
    cache: PackedCache | None
    shard: Shard | Stage | None

    def weight(
        self, field: str, part: Part, quantization: str, bits_of: Callable[[str], int]
    ) -> tuple[str, tuple[int, ...], Weight]:
        """The GGML kind that was packed, its shape, the packed weight; bits_of: of activations, by
        kind."""
        name = repr((part, quantization, [bits_of(kind) for kind in ("Q4_0", "Q8_0")]))
        if self.cache is not None and (found := self.cache.take(name)) is not None:
            return found.kind, tuple(found.weight.shape), found.weight
        tensor = read_part(self.file, part)
        if self.dtype == "float32" or field in EXACT:
            tensor = _float32(tensor, _values(tensor))
        cut = self.shard is not None and self.shard.cuts_columns(field)
        if tensor.order is not None and (cut or "ordered" not in self.ops.features):
            tensor = in_place(tensor)
        tensor = self.shard.of(field, tensor) if self.shard else tensor
        tensor = widened(rounded(quantise(tensor, quantization)))
        packed = self.ops.pack_weight(replace(tensor, bits=bits_of(tensor.kind)))
        if self.cache is not None and len(tensor.shape) == 2:
            self.cache.add(name, tensor.kind, packed)
        self.file.advise((part.name,), needed=False)
        return tensor.kind, tensor.shape, packed

    def ahead(self, parts: Mapping[str, Part]) -> None:
        """These come next: they are read from the disk meanwhile. (Not experts.)"""
        if self.cache is None or not self.cache.filled:
            self.file.advise({part.name for part in parts.values()}, needed=True)


def _fields(packed: dict[str, Weight], several: dict[str, tuple[Weight, ...]]) -> dict[str, Any]:
    """The fields of `Layer` that hold weights."""
    absent = ("attn_norm", "mlp_norm", "gate", "up", "down", "q", "k", "v", "o")
    fields = dict.fromkeys(absent) | {
        f: w
        for f, w in packed.items()
        if f not in (*_LATENT, *MATRICES, *_PER_LAYER, "sinks", "out_scale")
    }
    if "k_up" in several:
        q_rope, k_rope, norm, *low = (packed.get(field) for field in _LATENT)
        fields["latent"] = Latent(q_rope, k_rope, norm, several["k_up"], several["v_up"], *low)
    return fields


def _numbers(file: TensorFile, parts: dict[str, Part], field: str) -> F32:
    """The numbers of one field of a recurrent layer: fp32, in the shape of its file."""
    return _values(read_part(file, parts[field]))


_LATENT = ("q_rope", "k_rope", "latent_norm", "q_down", "query_norm")
_PER_LAYER = ("layer_project", "layer_norm", "layer_gate", "layer_out", "layer_post_norm")


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The embeddings of layers, read where they lie in the file, a row for each token: no step
    reads more than a few of them, and as fp32 all of them would take gigabytes.

    data  uint8 [vocabulary, bytes of a row]: of all layers, or of one
    size  values of one layer in a row
    """

    kind: str
    data: NDArray[np.uint8]
    size: int

    @staticmethod
    def of(model: OpenModel) -> LayerTable:
        """The table of all layers. EngineFault('weight_kind') where a block spans two of them."""
        name, size = model.layout.top[LAYER_TABLE].name, model.spec.per_layer
        kind, shape, raw = model.file.tensor(name)
        if size % BY_NAME[kind].values:
            raise EngineFault(
                "weight_kind", f"tensor {name!r} of type {kind} has blocks of more than one layer"
            )
        return LayerTable(kind, np.frombuffer(raw, np.uint8).reshape(shape[0], -1), size)

    def layer(self, number: int) -> LayerTable:
        """The part of one layer."""
        block = BY_NAME[self.kind]
        nbytes = self.size // block.values * block.nbytes
        return replace(self, data=self.data[:, number * nbytes : (number + 1) * nbytes])

    def __call__(self, tokens: NDArray[np.int32]) -> F32:
        """The embeddings of tokens: [T, size], times the root of their size and over that of 2."""
        rows = dequantise(self.kind, (len(tokens), self.size), self.data[tokens].reshape(-1))
        return rows * np.float32((self.size / 2) ** 0.5)


def _per_layer(spec: ModelSpec, packed: dict[str, Weight], table: LayerTable) -> PerLayer:
    """The projection is to be divided by the root of the width: the epsilon of its norm grows
    instead."""
    project, norm, gate, out, post_norm = (packed[field] for field in _PER_LAYER)
    return PerLayer(table, project, norm, spec.eps * spec.dim, gate, out, post_norm)


def _shape(
    shape: AttentionShape, sinks: tuple[float, ...], shard: Shard | Stage | None
) -> AttentionShape:
    """The attention shape with its sinks, and with only the heads of a rank."""
    shape = replace(shape, sinks=sinks)
    return shard.attention(shape) if shard else shape


def _sinks(file: TensorFile, parts: dict[str, Part]) -> tuple[float, ...]:
    """EngineFault('model_invalid') for one that is not finite."""
    if "sinks" not in parts:
        return ()
    sinks = _values(read_part(file, parts["sinks"]))
    if not np.isfinite(sinks).all():
        raise not_finite(parts["sinks"].name)
    return tuple(sinks.tolist())


def _bits(ops: Ops, setting: str, field: str, last: bool, kind: str) -> int:
    if setting != "auto":
        return int(setting)
    if (bits := ops.default_activation_bits(kind)) > 8:
        return bits
    return 15 if field in (FINE_LAST if last else FINE) else 8


def _head_norms(packed: dict[str, tuple[Weight, ...]], eps: float) -> HeadNorms | None:
    if "q_norms" not in packed:
        return None
    return HeadNorms(np.stack(packed["q_norms"]), np.stack(packed["k_norms"]), eps)


def _experts(spec: ExpertSpec, packed: dict[str, tuple[Weight, ...]]) -> Experts:
    def one(field: str) -> Weight | None:
        return packed.get(field, (None,))[0]

    biases: list[Any] = [packed.get(f, ()) for f in ("gate_biases", "up_biases", "down_biases")]
    routing = (spec.top_k, spec.normalise, spec.scoring, spec.scale, spec.weigh_input)
    choice = None
    if spec.biased or spec.groups > 1 or spec.extra:
        sizes = (spec.groups, spec.kept, spec.best, spec.extra)
        choice = ExpertChoice(spec.top_k, spec.normalise, one("choice_bias"), *sizes)
    experts = Experts(
        one("router"),
        packed.get("gates", ()),
        packed["ups"],
        packed["downs"],
        *routing,
        one("router_bias"),
        *biases,
    )
    return replace(
        experts,
        choice=choice,
        shared_switch=one("shared_switch"),
        norm=one("experts_norm"),
        router_norm=one("router_norm"),
        inner_norm=one("inner_norm"),
        post_norm=one("experts_post_norm"),
        out_scales=one("out_scales"),
    )


def _place(field: str, last: bool, layout: Layout) -> str:
    """The one of PLACES for which a weight counts."""
    if field in layout.top:
        return "ending" if field == ("head" if "head" in layout.top else "embed") else "tables"
    if field in ("gates", "ups", "downs"):
        return "last_experts" if last else "experts"
    return "ending" if last and field not in ("k", "v", "k_rope") else "layers"


def _model_needs(spec: ModelSpec) -> frozenset[str]:
    needed = {
        "scale": spec.embed_scale != 1,
        "soft_cap": spec.logit_soft_cap > 0,
        "head_bias": spec.family.head_bias,
        "layer_norm": spec.family.layer_norm or spec.family.embed_norm,
    }
    return frozenset(name for name, found in needed.items() if found)


def _check_features(ops: Ops, needs: frozenset[str]) -> None:
    lacking = sorted(needs - ops.features)
    if lacking:
        raise unsupported(
            f"the {ops.name} backend does not compute {', '.join(lacking)}, which this model needs"
            "; use the reference backend"
        )


def read_part(file: TensorFile, part: Part) -> Tensor:
    """The weight that a part describes, with its outputs first. Vectors come in fp32."""
    if not part.name:
        values = np.full(part.shape, part.times, np.float32)
        return Tensor("constant", "F32", part.shape, values.view(np.uint8))
    kind, shape, raw = file.tensor(part.name)
    data, order = np.frombuffer(raw, np.uint8), file.tensors[part.name].columns
    if part.index is not None:
        data, shape = data.reshape(shape[0], -1)[part.index], shape[1:]
    if len(shape) == 3:  # experts, one behind the other
        shape = (shape[0] * shape[1], shape[2])
    if part.transposed:
        if BY_NAME[kind].values != 1:
            raise EngineFault(
                "weight_kind", f"tensor {part.name!r} of type {kind} cannot be transposed"
            )
        data, shape = _transposed(kind, shape, data)
    if part.cut is not None:
        rows = part.cut_rows(data.reshape(shape[0], -1))
        data = rows.reshape(-1)
        shape = (len(rows), *shape[1:])
    if part.turned and BY_NAME[kind].values != 1:
        whole = Tensor(part.name, kind, shape, data, order=order)
        whole = _float32(whole, _values(whole))
        kind, data, order = whole.kind, whole.data, None
    if part.turned:
        data, shape = _transposed(kind, shape, data)
    tensor = Tensor(part.name, kind, shape, data, order=order)
    if kind == "NVFP4":
        tensor = widened(tensor) if part.bare else _scaled(file, part, tensor)
    if len(shape) == 1 or (part.times != 1 and not part.by):
        values = _values(tensor)
        if part.plus:
            values = values + np.float32(part.plus)
        with np.errstate(invalid="ignore"):  # a damaged file may have any bits
            tensor = _float32(tensor, values * np.float32(part.times))
    if part.unit:
        values = _values(tensor)
        lengths = np.linalg.norm(values, axis=1, keepdims=True).clip(1e-12)
        tensor = _float32(tensor, values / lengths)
    if part.by:
        scales = _values(read_part(file, Part(part.by, shape[1:], times=part.times)))
        tensor = _float32(tensor, _values(tensor) * scales)
    return tensor


def _scaled(file: TensorFile, part: Part, tensor: Tensor) -> Tensor:
    """A matrix of NVFP4 with the scale of all of it, which stands in a tensor of its own."""
    name = part.name.removesuffix("weight") + "scale"
    tensor = widened(tensor)
    if name not in file.tensors:
        return tensor
    kind, shape, raw = file.tensor(name)
    scales = dequantise(kind, shape, np.frombuffer(raw, np.uint8)).reshape(-1)
    blocks = tensor.data.reshape(len(scales) if part.index is None else 1, -1, 40).copy()
    if part.index is not None:
        scales = scales[part.index : part.index + 1]
    blocks[..., :8] = (blocks[..., :8].copy().view("<f4") * scales[:, None, None]).view(np.uint8)
    return replace(tensor, data=blocks.reshape(-1))


def _transposed(
    kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    elements = data.view(f"<u{BY_NAME[kind].nbytes}").reshape(shape)
    return np.ascontiguousarray(elements.T).reshape(-1).view(np.uint8), shape[::-1]


def _values(tensor: Tensor) -> F32:
    """The values of a tensor, its columns in the order of the file."""
    values = dequantise(tensor.kind, tensor.shape, tensor.data)
    return values if tensor.order is None else values[:, np.argsort(tensor.order)]


def _float32(tensor: Tensor, values: F32) -> Tensor:
    """The tensor with these values in place of its own."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return Tensor(tensor.name, "F32", tensor.shape, raw)


def _rope_divisors(file: TensorFile, spec: ModelSpec, positions: int) -> F32 | None:
    """The rotary divisors of a GGUF file: one list, or two, chosen by the length of sequences."""
    name = ROPE_DIVISORS
    if LONG_DIVISORS in file.tensors or SHORT_DIVISORS in file.tensors:
        name = LONG_DIVISORS if spec.rope.is_long(positions) else SHORT_DIVISORS
        if name not in file.tensors:
            raise EngineFault("tensor_missing", f"{file.path} lacks the tensor {name!r}")
    if name not in file.tensors:
        return None
    kind, shape, raw = file.tensor(name)
    if kind not in SUPPORTED:
        raise EngineFault(
            "weight_kind", f"tensor {name!r} is of type {kind}, which is not supported"
        )
    if 0 in shape or shape != (spec.rope.dim // 2,):
        raise EngineFault(
            "tensor_shape",
            f"tensor {name!r} has shape {shape}; ({spec.rope.dim // 2},) was expected",
        )
    divisors = dequantise(kind, shape, np.frombuffer(raw, np.uint8))
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise EngineFault("model_invalid", f"tensor {name!r} holds values that cannot divide")
    return divisors
