"""Where each weight of a model lies in its file: tensor names, their shapes, and how fused ones are cut.

Owns the names of GGUF and of Hugging Face folders, as tables. Must not know backends or what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pageturner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A weight, or some rows of one. A row is one output; of a vector, one element.

    name, shape  the tensor in the file
    cut          (start, count, stride): rows start..start+count-1 of every `stride` rows; None: all
    transposed   the file has inputs first (GPT-2's Conv1D); turned before it is cut
    plus         added to every element (Gemma's norms are stored as what they add to 1)
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[int, int, int] | None = None
    transposed: bool = False
    plus: float = 0.0


Parts = dict[str, Part]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a model: those outside of the layers by name, those of each layer by field of
    `kernels.base.Layer` (and "router", "gates", "ups", "downs" of experts, by field and expert).

    ignored  endings of names that carry no weight
    foreign  beginnings of names of what is no part of the decoder
    """

    top: Parts
    layers: list[Parts]
    experts: list[dict[str, list[Part]]] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def all(self) -> list[Part]:
        """Every part."""
        several = [part for each in self.experts for parts in each.values() for part in parts]
        return [*self.top.values(), *(part for layer in self.layers for part in layer.values()), *several]


def _shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Field of `Layer` -> shape with the outputs first, of everything that this layer has."""
    f, dim = spec.family, spec.dim
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    vector, head = (dim,), (spec.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": vector, "q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q), "mlp_norm": vector,
    }  # fmt: skip
    if f.layer_norm:
        shapes |= {"attn_norm_bias": vector, "mlp_norm_bias": vector}
    if f.qk_norm:
        shapes |= {"q_norm": head, "k_norm": head}
    if f.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if f.o_bias:
        shapes["o_bias"] = vector
    if f.post_norms:
        shapes |= {"attn_post_norm": vector, "mlp_post_norm": vector}
    if spec.sparse(layer):
        return shapes
    if f.gated:
        shapes["gate"] = (spec.ffn, dim)
    shapes |= {"up": (spec.ffn, dim), "down": (dim, spec.ffn)}
    if f.mlp_bias:
        shapes |= {"up_bias": (spec.ffn,), "down_bias": vector}
    return shapes


def _top_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, spec.dim), "norm": (spec.dim,)}
    if spec.family.layer_norm:
        shapes["norm_bias"] = (spec.dim,)
    if spec.family.embed_norm:
        shapes |= {"embed_norm": (spec.dim,), "embed_norm_bias": (spec.dim,)}
    if spec.family.positions == "learned":
        shapes["positions"] = (spec.context, spec.dim)
    if not spec.tied:
        shapes["head"] = (spec.vocab, spec.dim)
    return shapes


def _fuse(parts: Parts, fields: tuple[str, ...], name: str) -> Parts:
    """The parts with those fields that are there as consecutive rows of one tensor."""
    rows = [parts[f].shape[0] for f in fields]
    shape = (sum(rows), *parts[fields[0]].shape[1:])
    starts = [sum(rows[:i]) for i in range(len(rows))]
    fused = {
        f: Part(name, shape, (start, count, sum(rows)))
        for f, start, count in zip(fields, starts, rows, strict=True)
    }
    return parts | fused


# -- GGUF ----------------------------------------------------------------------------------------------------

_GGUF = {
    "attn_norm": "attn_norm.weight", "attn_norm_bias": "attn_norm.bias",
    "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight",
    "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias", "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight", "mlp_norm_bias": "ffn_norm.bias",
    "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "up_bias": "ffn_up.bias", "down_bias": "ffn_down.bias",
    "attn_post_norm": "post_attention_norm.weight", "mlp_post_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gates": "ffn_gate_exps.weight", "ups": "ffn_up_exps.weight", "downs": "ffn_down_exps.weight",
}  # fmt: skip
_GGUF_TOP = {
    "embed": "token_embd.weight", "positions": "position_embd.weight", "norm": "output_norm.weight",
    "norm_bias": "output_norm.bias", "embed_norm": "token_embd_norm.weight",
    "embed_norm_bias": "token_embd_norm.bias", "head": "output.weight",
}  # fmt: skip


def gguf_layout(spec: ModelSpec) -> Layout:
    """Where llama.cpp's converter puts the weights."""
    top = {f: Part(_GGUF_TOP[f], shape) for f, shape in _top_shapes(spec).items()}
    layers, experts = [], []
    for i in range(spec.layers):
        parts = {f: Part(f"blk.{i}.{_GGUF[f]}", shape) for f, shape in _shapes(spec, i).items()}
        if spec.arch in ("gpt2", "bloom", "phi3"):
            parts = _fuse(parts, ("q", "k", "v"), f"blk.{i}.attn_qkv.weight")
        if spec.arch in ("gpt2", "bloom"):
            parts = _fuse(parts, ("q_bias", "k_bias", "v_bias"), f"blk.{i}.attn_qkv.bias")
        if spec.arch == "phi3":
            parts = _fuse(parts, ("gate", "up"), f"blk.{i}.ffn_up.weight")
        layers.append(parts)
        experts.append(_gguf_experts(spec, i))
    return Layout(top, layers, experts)


def _gguf_experts(spec: ModelSpec, layer: int) -> dict[str, list[Part]]:
    """All experts of a kind lie in one tensor of three dimensions, one behind the other."""
    e = spec.experts
    if e is None or not spec.sparse(layer):
        return {}

    def stacked(field: str, rows: int, columns: int) -> list[Part]:
        name, all_rows = f"blk.{layer}.{_GGUF[field]}", e.count * rows
        shape = (e.count, rows, columns)
        return [Part(name, shape, (rows * i, rows, all_rows)) for i in range(e.count)]

    return {
        "router": [Part(f"blk.{layer}.{_GGUF['router']}", (e.count, spec.dim))],
        "gates": stacked("gates", e.ffn, spec.dim),
        "ups": stacked("ups", e.ffn, spec.dim),
        "downs": stacked("downs", spec.dim, e.ffn),
    }


# -- Hugging Face --------------------------------------------------------------------------------------------

_LLAMA = {
    "embed": "embed_tokens.weight", "norm": "norm.weight", "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight", "gates": "mlp.experts.{}.gate_proj.weight",
    "ups": "mlp.experts.{}.up_proj.weight", "downs": "mlp.experts.{}.down_proj.weight",
}  # fmt: skip
_GEMMA = _LLAMA | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_MIXTRAL = _LLAMA | {
    "router": "block_sparse_moe.gate.weight",
    "gates": "block_sparse_moe.experts.{}.w1.weight",
    "ups": "block_sparse_moe.experts.{}.w3.weight",
    "downs": "block_sparse_moe.experts.{}.w2.weight",
}
_GPT2 = {
    "embed": "wte.weight", "positions": "wpe.weight", "norm": "ln_f.weight", "norm_bias": "ln_f.bias",
    "attn_norm": "ln_1.weight", "attn_norm_bias": "ln_1.bias",
    "q": "attn.c_attn.weight", "q_bias": "attn.c_attn.bias",
    "o": "attn.c_proj.weight", "o_bias": "attn.c_proj.bias",
    "mlp_norm": "ln_2.weight", "mlp_norm_bias": "ln_2.bias",
    "up": "mlp.c_fc.weight", "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight", "down_bias": "mlp.c_proj.bias", "head": "lm_head.weight",
}  # fmt: skip
_OPT = _LLAMA | {
    "positions": "embed_positions.weight", "norm": "final_layer_norm.weight",
    "norm_bias": "final_layer_norm.bias",
    "attn_norm": "self_attn_layer_norm.weight", "attn_norm_bias": "self_attn_layer_norm.bias",
    "o": "self_attn.out_proj.weight", "o_bias": "self_attn.out_proj.bias",
    "mlp_norm": "final_layer_norm.weight", "mlp_norm_bias": "final_layer_norm.bias",
    "up": "fc1.weight", "up_bias": "fc1.bias", "down": "fc2.weight", "down_bias": "fc2.bias",
}  # fmt: skip
_BLOOM = {
    "embed": "word_embeddings.weight", "embed_norm": "word_embeddings_layernorm.weight",
    "embed_norm_bias": "word_embeddings_layernorm.bias", "norm": "ln_f.weight", "norm_bias": "ln_f.bias",
    "attn_norm": "input_layernorm.weight", "attn_norm_bias": "input_layernorm.bias",
    "q": "self_attention.query_key_value.weight", "q_bias": "self_attention.query_key_value.bias",
    "o": "self_attention.dense.weight", "o_bias": "self_attention.dense.bias",
    "mlp_norm": "post_attention_layernorm.weight", "mlp_norm_bias": "post_attention_layernorm.bias",
    "up": "mlp.dense_h_to_4h.weight", "up_bias": "mlp.dense_h_to_4h.bias",
    "down": "mlp.dense_4h_to_h.weight", "down_bias": "mlp.dense_4h_to_h.bias", "head": "lm_head.weight",
}  # fmt: skip


def _gpt2_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V side by side, and every matrix with its inputs first."""
    parts = _fuse(parts, ("q", "k", "v"), prefix + "attn.c_attn.weight")
    parts = _fuse(parts, ("q_bias", "k_bias", "v_bias"), prefix + "attn.c_attn.bias")
    return {
        f: replace(part, shape=part.shape[::-1], transposed=True) if len(part.shape) == 2 else part
        for f, part in parts.items()
    }


def _bloom_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V head by head."""
    d = spec.head_dim
    for i, f in enumerate(("q", "k", "v")):
        for suffix, ending in (("", "weight"), ("_bias", "bias")):
            name = f"{prefix}self_attention.query_key_value.{ending}"
            shape = (3 * spec.dim, *parts[f + suffix].shape[1:])
            parts = parts | {f + suffix: Part(name, shape, (i * d, d, 3 * d))}
    return parts


def _phi3_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    parts = _fuse(parts, ("q", "k", "v"), prefix + "self_attn.qkv_proj.weight")
    return _fuse(parts, ("gate", "up"), prefix + "mlp.gate_up_proj.weight")


def _gemma_norms(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    return {f: replace(part, plus=1.0) if f.endswith("norm") else part for f, part in parts.items()}


def _as_named(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    return parts


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of one family. `roots`: what may stand in front of all but the head; `layers`: in front of
    a layer's; `adapt`: what is not one tensor for one weight."""

    table: dict[str, str]
    roots: tuple[str, ...] = ("model.", "")
    layers: str = "layers."
    adapt: Callable[[Parts, ModelSpec, str], Parts] = _as_named


_HF = {
    "phi3": _Names(_LLAMA, adapt=_phi3_fused),
    "gemma2": _Names(_GEMMA, adapt=_gemma_norms),
    "gemma3": _Names(
        _GEMMA, ("model.", "language_model.model.", "model.language_model.", ""), adapt=_gemma_norms
    ),
    "mixtral": _Names(_MIXTRAL),
    "gpt2": _Names(_GPT2, ("transformer.", ""), "h.", _gpt2_fused),
    "opt": _Names(_OPT, ("model.decoder.", "decoder.", "")),
    "bloom": _Names(_BLOOM, ("transformer.", ""), "h.", _bloom_fused),
}
# What sees pictures in Gemma 3; names as of Transformers 4 and 5.
_PICTURES = tuple(
    f"{root}{part}." for root in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
# Buffers that old files carry along: masks and frequencies, which follow from the configuration.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def hf_layout(spec: ModelSpec, present: Callable[[str], bool]) -> Layout:
    """Where Transformers puts the weights. `present` tells whether a tensor is there: some files were saved
    without the outermost module, and their names lack its prefix."""
    names = _HF.get(spec.arch, _Names(_LLAMA))
    root = next((r for r in names.roots if present(r + names.table["embed"])), names.roots[0])
    top = {
        f: Part(("" if f == "head" else root) + names.table[f], shape)
        for f, shape in _top_shapes(spec).items()
    }
    if spec.arch.startswith("gemma"):
        top = _gemma_norms(top, spec, root)
    if spec.arch == "opt":  # two rows in front that no position uses
        top["positions"] = Part(
            top["positions"].name, (spec.context + 2, spec.dim), (2, spec.context, spec.context + 2)
        )
    layers, experts = [], []
    for i in range(spec.layers):
        prefix = f"{root}{names.layers}{i}."
        shapes = _shapes(spec, i)
        parts = {f: Part(prefix + names.table.get(f, ""), shape) for f, shape in shapes.items()}
        layers.append(names.adapt(parts, spec, prefix))
        experts.append(_hf_experts(spec, i, prefix, names.table))
    tied_head = ("lm_head.weight",) if spec.tied else ()
    foreign = _PICTURES if spec.arch == "gemma3" else ()
    return Layout(top, layers, experts, _BUFFERS + tied_head, foreign)


def _hf_experts(spec: ModelSpec, layer: int, prefix: str, table: dict[str, str]) -> dict[str, list[Part]]:
    e = spec.experts
    if e is None or not spec.sparse(layer):
        return {}

    def each(field: str, rows: int, columns: int) -> list[Part]:
        return [Part(prefix + table[field].format(i), (rows, columns)) for i in range(e.count)]

    return {
        "router": [Part(prefix + table["router"], (e.count, spec.dim))],
        "gates": each("gates", e.ffn, spec.dim),
        "ups": each("ups", e.ffn, spec.dim),
        "downs": each("downs", spec.dim, e.ffn),
    }
