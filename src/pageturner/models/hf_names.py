"""Where Transformers puts each weight of a model: the tensor names of Hugging Face folders.

Owns these names, as tables, and how fused tensors are cut. Must not know backends or what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pageturner.formats.ggml_types import BY_NAME
from pageturner.formats.gguf import TensorInfo
from pageturner.models.names import (
    Layout,
    Part,
    Parts,
    cut_queries,
    fuse,
    fused_heads,
    named,
    scaled_logits,
    shapes_of,
    top_shapes,
    without_weights,
)
from pageturner.models.spec import ModelSpec

_LLAMA = {
    "embed": "embed_tokens.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "gates": "mlp.experts.{}.gate_proj.weight",
    "ups": "mlp.experts.{}.up_proj.weight",
    "downs": "mlp.experts.{}.down_proj.weight",
}
_GEMMA = _LLAMA | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_OLMO2 = _LLAMA | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_GLM4 = _LLAMA | {
    "attn_post_norm": "post_self_attn_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
}
_STARCODER2 = _LLAMA | {
    "norm_bias": "norm.bias",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "up": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
}
_GRANITE_HYBRID = _LLAMA | {"down": "shared_mlp.output_linear.weight"}
_GPT_OSS = _LLAMA | {
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "gates": "mlp.experts.gate_up_proj",
    "ups": "mlp.experts.gate_up_proj",
    "downs": "mlp.experts.down_proj",
    "gate_biases": "mlp.experts.gate_up_proj_bias",
    "up_biases": "mlp.experts.gate_up_proj_bias",
    "down_biases": "mlp.experts.down_proj_bias",
}
_LLAMA4 = (
    _LLAMA
    | {f: f"feed_forward.{f}_proj.weight" for f in ("gate", "up", "down")}
    | {
        "router": "feed_forward.router.weight",
        "gates": "feed_forward.experts.gate_up_proj",
        "ups": "feed_forward.experts.gate_up_proj",
        "downs": "feed_forward.experts.down_proj",
        "shared_gate": "feed_forward.shared_expert.gate_proj.weight",
        "shared_up": "feed_forward.shared_expert.up_proj.weight",
        "shared_down": "feed_forward.shared_expert.down_proj.weight",
    }
)
_DEEPSEEK = _LLAMA | {
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
_MIXTRAL = _LLAMA | {
    "router": "block_sparse_moe.gate.weight",
    "gates": "block_sparse_moe.experts.{}.w1.weight",
    "ups": "block_sparse_moe.experts.{}.w3.weight",
    "downs": "block_sparse_moe.experts.{}.w2.weight",
}
_GPT2 = {
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "norm": "ln_f.weight",
    "norm_bias": "ln_f.bias",
    "attn_norm": "ln_1.weight",
    "attn_norm_bias": "ln_1.bias",
    "q": "attn.c_attn.weight",
    "q_bias": "attn.c_attn.bias",
    "o": "attn.c_proj.weight",
    "o_bias": "attn.c_proj.bias",
    "mlp_norm": "ln_2.weight",
    "mlp_norm_bias": "ln_2.bias",
    "up": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
    "head": "lm_head.weight",
}
_OPT = _LLAMA | {
    "positions": "embed_positions.weight",
    "norm": "final_layer_norm.weight",
    "norm_bias": "final_layer_norm.bias",
    "attn_norm": "self_attn_layer_norm.weight",
    "attn_norm_bias": "self_attn_layer_norm.bias",
    "o": "self_attn.out_proj.weight",
    "o_bias": "self_attn.out_proj.bias",
    "mlp_norm": "final_layer_norm.weight",
    "mlp_norm_bias": "final_layer_norm.bias",
    "up": "fc1.weight",
    "up_bias": "fc1.bias",
    "down": "fc2.weight",
    "down_bias": "fc2.bias",
}
_BLOOM = {
    "embed": "word_embeddings.weight",
    "embed_norm": "word_embeddings_layernorm.weight",
    "embed_norm_bias": "word_embeddings_layernorm.bias",
    "norm": "ln_f.weight",
    "norm_bias": "ln_f.bias",
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    "q": "self_attention.query_key_value.weight",
    "q_bias": "self_attention.query_key_value.bias",
    "o": "self_attention.dense.weight",
    "o_bias": "self_attention.dense.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    "up": "mlp.dense_h_to_4h.weight",
    "up_bias": "mlp.dense_h_to_4h.bias",
    "down": "mlp.dense_4h_to_h.weight",
    "down_bias": "mlp.dense_4h_to_h.bias",
    "head": "lm_head.weight",
}


def _gpt2_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V side by side, and every matrix with its inputs first."""
    parts = fuse(parts, ("q", "k", "v"), prefix + "attn.c_attn.weight")
    parts = fuse(parts, ("q_bias", "k_bias", "v_bias"), prefix + "attn.c_attn.bias")
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
    parts = fuse(parts, ("q", "k", "v"), prefix + "self_attn.qkv_proj.weight")
    return fuse(parts, ("gate", "up"), prefix + "mlp.gate_up_proj.weight")


def _glm_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    return fuse(parts, ("gate", "up"), prefix + "mlp.gate_up_proj.weight")


def _granite_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    return fuse(parts, ("gate", "up"), prefix + "shared_mlp.input_linear.weight")


def _deepseek_cut(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    attention = prefix + "self_attn."
    return cut_queries(
        parts, spec, attention + "q_proj.weight", attention + "kv_a_proj_with_mqa.weight"
    )


def _gemma_norms(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    return {f: replace(part, plus=1.0) if f.endswith("norm") else part for f, part in parts.items()}


def _as_named(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    return parts


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of one family. `roots`: what may stand in front of all but the head; `layers`: in front of
    a layer's; `adapt`: what is not one tensor for one weight; `stacked`: all experts lie in one tensor with
    its inputs first, gates and ups as "halves" or as "pairs" of its columns."""

    table: dict[str, str]
    roots: tuple[str, ...] = ("model.", "")
    layers: str = "layers."
    adapt: Callable[[Parts, ModelSpec, str], Parts] = _as_named
    stacked: str = ""


_INNER = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "",
)  # of models that see pictures
_HF = {
    "phi3": _Names(_LLAMA, adapt=_phi3_fused),
    "gemma2": _Names(_GEMMA, adapt=_gemma_norms),
    "gemma3": _Names(_GEMMA, _INNER, adapt=_gemma_norms),
    "mixtral": _Names(_MIXTRAL),
    "olmo2": _Names(_OLMO2),
    "olmo3": _Names(_OLMO2),
    "glm": _Names(_LLAMA, adapt=_glm_fused),
    "glm4": _Names(_GLM4, adapt=_glm_fused),
    "starcoder2": _Names(_STARCODER2),
    "granitemoehybrid": _Names(_GRANITE_HYBRID, adapt=_granite_fused),
    "gpt_oss": _Names(_GPT_OSS, stacked="pairs"),
    "llama4_text": _Names(_LLAMA4, _INNER, stacked="halves"),
    "deepseek_v2": _Names(_DEEPSEEK, adapt=_deepseek_cut),
    "gpt2": _Names(_GPT2, ("transformer.", ""), "h.", _gpt2_fused),
    "opt": _Names(_OPT, ("model.decoder.", "decoder.", "")),
    "bloom": _Names(_BLOOM, ("transformer.", ""), "h.", _bloom_fused),
}
# What sees pictures in Gemma 3 and Llama 4; names as of Transformers 4 and 5.
_PICTURES = tuple(
    f"{root}{part}."
    for root in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector")
)
# Buffers that old files carry along: masks and frequencies, which follow from the configuration.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def hf_layout(spec: ModelSpec, present: Callable[[str], bool]) -> Layout:
    """Where Transformers puts the weights. `present` tells whether a tensor is there: some files were saved
    without the outermost module, and their names lack its prefix."""
    names = _HF.get(spec.arch, _Names(_LLAMA))
    root = next((r for r in names.roots if present(r + names.table["embed"])), names.roots[0])
    outer = "language_model." if root == "language_model.model." else ""  # of the head
    top = {
        f: Part((outer if f == "head" else root) + names.table[f], shape)
        for f, shape in top_shapes(spec).items()
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
        shapes = shapes_of(spec, i)
        parts = {
            f: Part(prefix + names.table.get(named(spec, i, f), ""), shape)
            for f, shape in shapes.items()
        }
        layers.append(without_weights(spec, names.adapt(parts, spec, prefix)))
        stacked = _stacked_experts if names.stacked else _hf_experts
        experts.append(stacked(spec, i, prefix, names))
    tied_head = ("lm_head.weight",) if spec.tied else ()
    foreign = _PICTURES if spec.arch in ("gemma3", "llama4_text") else ()
    inner = f"{root}{names.layers}{{}}.self_attn.kv_b_proj.weight"
    heads = [fused_heads(spec, inner.format(i)) for i in range(spec.layers)]
    return Layout(scaled_logits(spec, top), layers, experts, _BUFFERS + tied_head, foreign, heads)


def as_stored(layout: Layout, tensors: Mapping[str, TensorInfo]) -> Layout:
    """The layout, of which stacked experts that are quantised have their outputs first: a block is a piece of
    a row (gpt-oss in MXFP4)."""

    def turned(part: Part) -> Part:
        info = tensors.get(part.name)
        kind = BY_NAME.get(info.kind) if info is not None else None
        if part.index is None or not part.transposed or kind is None or kind.values == 1:
            return part
        count, columns, rows = part.shape
        return replace(part, shape=(count, rows, columns), transposed=False)

    experts = [
        {f: [turned(part) for part in each] for f, each in layer.items()}
        for layer in layout.experts
    ]
    return replace(layout, experts=experts)


def _stacked_experts(
    spec: ModelSpec, layer: int, prefix: str, names: _Names
) -> dict[str, list[Part]]:
    """Expert by expert, inputs first; gates and ups in one tensor."""
    e, table = spec.experts, names.table
    if e is None or not spec.sparse(layer):
        return {}
    first, second = (
        ((0, 1, 2), (1, 1, 2))
        if names.stacked == "pairs"
        else ((0, e.ffn, 2 * e.ffn), (e.ffn, e.ffn, 2 * e.ffn))
    )

    def each(
        field: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None
    ) -> list[Part]:
        name, matrix = prefix + table[field], len(shape) == 2
        return [Part(name, (e.count, *shape), cut, matrix, index=i) for i in range(e.count)]

    parts = {
        "router": [Part(prefix + table["router"], (e.count, spec.dim))],
        "gates": each("gates", (spec.dim, 2 * e.ffn), first),
        "ups": each("ups", (spec.dim, 2 * e.ffn), second),
        "downs": each("downs", (e.ffn, spec.dim)),
    }
    if spec.family.expert_bias:
        parts |= {
            "router_bias": [Part(prefix + table["router_bias"], (e.count,))],
            "gate_biases": each("gate_biases", (2 * e.ffn,), first),
            "up_biases": each("up_biases", (2 * e.ffn,), second),
            "down_biases": each("down_biases", (spec.dim,)),
        }
    return parts


def _hf_experts(spec: ModelSpec, layer: int, prefix: str, names: _Names) -> dict[str, list[Part]]:
    e, table = spec.experts, names.table
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
