"""The tensor names of Hugging Face folders: where Transformers puts each weight of a model.

Owns these names, as tables, and how fused tensors are cut. Must not know backends or what layers
compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pageturner.formats.ggml_types import BY_NAME
from pageturner.formats.mapped import TensorInfo
from pageturner.models.names import (
    Layout,
    Names,
    Part,
    Parts,
    by_key_head,
    layout_of,
    modules,
    second_token_layers,
)
from pageturner.models.spec import ModelSpec

_LLAMA = modules("""
    embed      embed_tokens
    norm       norm
    head       lm_head
    attn_norm  input_layernorm
    mlp_norm   post_attention_layernorm
    q          self_attn.q_proj
    k          self_attn.k_proj
    v          self_attn.v_proj
    o          self_attn.o_proj
    q_norm     self_attn.q_norm
    k_norm     self_attn.k_norm
    q_norms    self_attn.q_layernorm.norms.{}
    k_norms    self_attn.k_layernorm.norms.{}
    sinks      self_attn.sinks
    gate       mlp.gate_proj
    up         mlp.up_proj
    down       mlp.down_proj
    router     mlp.gate
    gates      mlp.experts.{}.gate_proj
    ups        mlp.experts.{}.up_proj
    downs      mlp.experts.{}.down_proj
    choice       mlp.gate.e_score_correction_bias
    shared_gate  mlp.shared_experts.gate_proj
    shared_up    mlp.shared_experts.up_proj
    shared_down  mlp.shared_experts.down_proj
""")
_OLMO2 = _LLAMA | modules("""
    attn_post_norm  post_attention_layernorm
    mlp_post_norm   post_feedforward_layernorm
""")
_GEMMA = _OLMO2 | {"mlp_norm": "pre_feedforward_layernorm"}
_GEMMA4 = _GEMMA | modules("""
    out_scale          layer_scalar
    layer_table        embed_tokens_per_layer
    layer_project      per_layer_model_projection
    layer_norm         per_layer_projection_norm
    layer_gate         per_layer_input_gate
    layer_out          per_layer_projection
    layer_post_norm    post_per_layer_input_norm
    router             router.proj
    router_scale       router.scale
    router_norm        none
    v_norm             self_attn.v_norm
    out_scales         router.per_expert_scale
    gates              experts.gate_up_proj
    ups                experts.gate_up_proj
    downs              experts.down_proj
    experts_norm       pre_feedforward_layernorm_2
    inner_norm         post_feedforward_layernorm_1
    experts_post_norm  post_feedforward_layernorm_2
    shared_gate        mlp.gate_proj
    shared_up          mlp.up_proj
    shared_down        mlp.down_proj
""")
_GLM4 = _LLAMA | modules("""
    attn_post_norm  post_self_attn_layernorm
    mlp_post_norm   post_mlp_layernorm
""")
_PHI = _LLAMA | modules("""
    norm  final_layernorm
    o     self_attn.dense
    up    mlp.fc1
    down  mlp.fc2
""")
_STARCODER2 = _LLAMA | {"up": "mlp.c_fc", "down": "mlp.c_proj"}
_MAMBA = _LLAMA | modules("""
    z           mamba.in_proj
    qkv         mamba.in_proj
    a           mamba.in_proj
    conv        mamba.conv1d
    decay       mamba.A_log
    dt          mamba.dt_bias
    skip        mamba.D
    head_scale  mamba.norm
    linear_o    mamba.out_proj
""")
_GRANITE_HYBRID = _MAMBA | modules("""
    down         shared_mlp.output_linear
    shared_down  shared_mlp.output_linear
    router       block_sparse_moe.router.layer
    gates        block_sparse_moe.input_linear.weight
    ups          block_sparse_moe.input_linear.weight
    downs        block_sparse_moe.output_linear.weight
""")
_FALCON_H1 = _MAMBA | modules("""
    norm      final_layernorm
    mlp_norm  pre_ff_layernorm
    gate      feed_forward.gate_proj
    up        feed_forward.up_proj
    down      feed_forward.down_proj
""")
_NEMOTRON_H = {
    field: name.replace("mamba.", "mixer.")
    .replace("self_attn.", "mixer.")
    .replace("mlp.", "mixer.")
    for field, name in _MAMBA.items()
} | modules("""
    embed      embeddings
    norm       norm_f
    attn_norm  norm
    mlp_norm   norm
""")
_LFM2 = _LLAMA | modules("""
    norm      embedding_norm
    attn_norm operator_norm
    mlp_norm  ffn_norm
    o         self_attn.out_proj
    q_norm    self_attn.q_layernorm
    k_norm    self_attn.k_layernorm
    gate      feed_forward.w1
    up        feed_forward.w3
    down      feed_forward.w2
    router    feed_forward.gate
    choice    feed_forward.expert_bias
    gates     feed_forward.experts.{}.w1
    ups       feed_forward.experts.{}.w3
    downs     feed_forward.experts.{}.w2
    gate_in   conv.in_proj
    z         conv.in_proj
    qkv       conv.in_proj
    conv      conv.conv
    linear_o  conv.out_proj
""")
_LFM2_FUSED = {"gate_in z qkv": "conv.in_proj"}
_GPT_OSS = _LLAMA | modules("""
    router  mlp.router
    gates   mlp.experts.gate_up_proj
    ups     mlp.experts.gate_up_proj
    downs   mlp.experts.down_proj
""")
_LLAMA4 = _LLAMA | modules("""
    gate         feed_forward.gate_proj
    up           feed_forward.up_proj
    down         feed_forward.down_proj
    router       feed_forward.router
    gates        feed_forward.experts.gate_up_proj
    ups          feed_forward.experts.gate_up_proj
    downs        feed_forward.experts.down_proj
    shared_gate  feed_forward.shared_expert.gate_proj
    shared_up    feed_forward.shared_expert.up_proj
    shared_down  feed_forward.shared_expert.down_proj
""")
_DEEPSEEK = _LLAMA | modules("""
    k            self_attn.kv_a_proj_with_mqa
    q_rope       self_attn.q_proj
    k_rope       self_attn.kv_a_proj_with_mqa
    kv_up        self_attn.kv_b_proj
    latent_norm  self_attn.kv_a_layernorm
    q_down       self_attn.q_a_proj
    query_norm   self_attn.q_a_layernorm
    q_up         self_attn.q_b_proj
""")
_QWEN2_MOE = _LLAMA | modules("""
    shared_gate    mlp.shared_expert.gate_proj
    shared_up      mlp.shared_expert.up_proj
    shared_down    mlp.shared_expert.down_proj
    shared_switch  mlp.shared_expert_gate
""")
_DELTA_NET = _QWEN2_MOE | modules("""
    qkv         linear_attn.in_proj_qkv
    z           linear_attn.in_proj_z
    b           linear_attn.in_proj_b
    a           linear_attn.in_proj_a
    conv        linear_attn.conv1d
    decay       linear_attn.A_log
    dt          linear_attn.dt_bias
    head_scale  linear_attn.norm
    linear_o    linear_attn.out_proj
""")
_HUNYUAN = _LLAMA | modules("""
    q_norm  self_attn.query_layernorm
    k_norm  self_attn.key_layernorm
""")
_MIXTRAL = _LLAMA | modules("""
    router  block_sparse_moe.gate
    gates   block_sparse_moe.experts.{}.w1
    ups     block_sparse_moe.experts.{}.w3
    downs   block_sparse_moe.experts.{}.w2
    choice  block_sparse_moe.e_score_correction_bias
""")
_GPT2 = _LLAMA | modules("""
    embed      wte
    positions  wpe
    norm       ln_f
    attn_norm  ln_1
    o          attn.c_proj
    mlp_norm   ln_2
    up         mlp.c_fc
    down       mlp.c_proj
""")
_OPT = _LLAMA | modules("""
    positions  embed_positions
    norm       final_layer_norm
    attn_norm  self_attn_layer_norm
    o          self_attn.out_proj
    mlp_norm   final_layer_norm
    up         fc1
    down       fc2
""")
_BLOOM = _LLAMA | modules("""
    embed       word_embeddings
    embed_norm  word_embeddings_layernorm
    norm        ln_f
    o           self_attention.dense
    up          mlp.dense_h_to_4h
    down        mlp.dense_4h_to_h
""")

_INTERNLM2 = _LLAMA | modules("""
    embed      tok_embeddings
    head       output
    attn_norm  attention_norm
    mlp_norm   ffn_norm
    o          attention.wo
    gate       feed_forward.w1
    up         feed_forward.w3
    down       feed_forward.w2
""")
_CHATGLM = _LLAMA | modules("""
    embed  embedding.word_embeddings
    norm   encoder.final_layernorm
    head   transformer.output_layer
    o      self_attention.dense
    down   mlp.dense_4h_to_h
""")
_CHATGLM_FUSED = {"q k v": "self_attention.query_key_value", "gate up": "mlp.dense_h_to_4h"}


def _internlm2_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V are fused KV head by KV head: the queries that share it, its key, its value."""
    d = spec.head_dim
    queries = spec.heads // spec.kv_heads * d
    rows = queries + 2 * d
    cuts = {"q": (0, queries, rows), "k": (queries, d, rows), "v": (queries + d, d, rows)}
    shape = (spec.kv_heads * rows, spec.dim)
    name = f"{prefix}attention.wqkv.weight"
    return parts | {f: Part(name, shape, cut) for f, cut in cuts.items()}


def _bloom_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V are fused head by head."""
    d = spec.head_dim
    for i, f in enumerate(("q", "k", "v")):
        for field, ending in ((f, "weight"), (f"{f}_bias", "bias")):
            name = f"{prefix}self_attention.query_key_value.{ending}"
            shape = (3 * spec.dim, *parts[field].shape[1:])
            parts[field] = Part(name, shape, (i * d, d, 3 * d))
    return parts


def _conv1d(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """The convolution of a gated delta net as torch has it: each channel is a group."""
    if "conv" in parts:
        channels, kernel = parts["conv"].shape
        parts["conv"] = replace(parts["conv"], shape=(channels, 1, kernel))
    if spec.arch == "qwen3_next":
        parts = by_key_head(
            "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", parts, spec, prefix
        )
    return parts


# Roots of models that see pictures.
_INNER = ("model.", "language_model.model.", "model.language_model.", "")
_GPT_ROOTS = ("transformer.", "")
_GATE_UP = {"gate up": "mlp.gate_up_proj"}
_LLAMA_EXPERTS = {field: _LLAMA[field] for field in ("gates", "ups", "downs")}
_STACKED_EXPERTS = modules("""
    gates  mlp.experts.gate_up_proj
    ups    mlp.experts.gate_up_proj
    downs  mlp.experts.down_proj
""")
_HF = {
    "phi": Names(_PHI),
    "phi3": Names(_LLAMA, fused={"q k v": "self_attn.qkv_proj"} | _GATE_UP),
    "gemma": Names(_LLAMA, norm_plus=1.0),
    "gemma2": Names(_GEMMA, norm_plus=1.0),
    "gemma3": Names(_GEMMA, _INNER, norm_plus=1.0),
    "gemma4": Names(_GEMMA4, _INNER, stacked="joined"),
    "mixtral": Names(_MIXTRAL),
    "internlm2": Names(_INTERNLM2, adapt=_internlm2_fused),
    "baichuan": Names(_LLAMA, fused={"q k v": "self_attn.W_pack"}),
    "chatglm": Names(_CHATGLM, ("transformer.",), "encoder.layers.", _CHATGLM_FUSED),
    "minimax_m2": Names(_MIXTRAL),
    "mistral": Names(_LLAMA, _INNER),
    "ministral3": Names(_LLAMA, _INNER),
    "qwen2_moe": Names(_QWEN2_MOE),
    "qwen3_5_text": Names(_DELTA_NET, _INNER, adapt=_conv1d, norm_plus=1.0),
    "qwen3_5_moe_text": Names(
        _DELTA_NET | _STACKED_EXPERTS, _INNER, adapt=_conv1d, norm_plus=1.0, stacked="joined"
    ),
    "qwen3_next": Names(
        _DELTA_NET | _STACKED_EXPERTS, adapt=_conv1d, norm_plus=1.0, stacked="joined"
    ),
    "exaone4": Names(_OLMO2),
    "arcee": Names(_LLAMA | {"gate": "mlp.up_proj"}),  # relu(x) x is its square of relu
    "hunyuan_v1_dense": Names(_HUNYUAN),
    "ernie4_5_moe": Names(_LLAMA | {"choice": "mlp.moe_statics.e_score_correction_bias"}),
    "deepseek_v3": Names(_DEEPSEEK),
    "glm4_moe_lite": Names(_DEEPSEEK),
    "olmo2": Names(_OLMO2),
    "olmo3": Names(_OLMO2),
    "glm": Names(_LLAMA, fused=_GATE_UP),
    "glm4": Names(_GLM4, fused=_GATE_UP),
    "starcoder2": Names(_STARCODER2),
    "granitemoehybrid": Names(
        _GRANITE_HYBRID,
        fused={"gate up": "shared_mlp.input_linear", "z qkv a": "mamba.in_proj"},
        adapt=_conv1d,
        stacked="joined",
    ),
    "falcon_h1": Names(_FALCON_H1, fused={"z qkv a": "mamba.in_proj"}, adapt=_conv1d),
    "nemotron_h": Names(
        _NEMOTRON_H,
        ("backbone.", "model.", ""),
        fused={"z qkv a": "mixer.in_proj"},
        adapt=_conv1d,
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Names(_LFM2, fused=_LFM2_FUSED, adapt=_conv1d)),
    "gpt_oss": Names(_GPT_OSS, stacked="pairs"),
    "llama4_text": Names(_LLAMA4, _INNER, stacked="halves"),
    "deepseek_v2": Names(_DEEPSEEK),
    "gpt2": Names(_GPT2, _GPT_ROOTS, "h.", {"q k v": "attn.c_attn"}, transposed=True),
    "opt": Names(_OPT, ("model.decoder.", "decoder.", ""), unused_positions=2),
    "bloom": Names(_BLOOM, _GPT_ROOTS, "h.", adapt=_bloom_fused),
}
# What sees pictures in Gemma 3 and 4, Llama 4 and Mistral 3, or hears; names as of Transformers 4
# and 5.
_PICTURES = tuple(
    f"{root}{part}."
    for root in ("", "model.")
    for part in (
        *("vision_tower", "vision_model", "multi_modal_projector", "vision_embedder"),
        *("audio_tower", "embed_vision", "embed_audio"),
    )
)
# Buffers that old files carry along: masks and frequencies, which follow from the configuration.
_BUFFERS = ("emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_BAICHUAN_2 = 125_696  # tokens, by which it is known; its head is normalised when it is loaded
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def hf_layout(spec: ModelSpec, present: Callable[[str], bool]) -> Layout:
    """The layout of a Hugging Face folder; `present` as in `layout_of`."""
    names = _HF.get(spec.arch, Names(_LLAMA))
    if names.stacked == "joined" and spec.arch.startswith("qwen"):
        first = names.tensor("gates")  # files have experts together, or each alone
        if not any(present(f"{root}layers.0.{first}") for root in names.roots):
            names = replace(names, modules={**names.modules, **_LLAMA_EXPERTS}, stacked="")
    layout = layout_of(spec, names, present)
    ignored = (*_BUFFERS, "lm_head.weight") if spec.tied else _BUFFERS
    foreign = _PICTURES if names.roots == _INNER else ()
    if (spec.arch, spec.vocab) == ("baichuan", _BAICHUAN_2):
        layout.top["head"] = replace(layout.top["head"], unit=True)
    if spec.experts is not None:
        foreign += second_token_layers("model.layers.", spec)
    if spec.linear is not None:  # what sees pictures, and what predicts a second token
        foreign += ("model.visual.", "visual.", "mtp.")
    return replace(layout, ignored=ignored, foreign=(*layout.foreign, *foreign, "model.mtp"))


def as_stored(layout: Layout, tensors: Mapping[str, TensorInfo]) -> Layout:
    """The layout with the outputs first in stacked experts that are quantised, since a block is a
    piece of a row (gpt-oss in MXFP4)."""

    def turned(part: Part) -> Part:
        info = tensors.get(part.name)
        if info is not None and info.shape == (1, *part.shape):  # Ernie's biases of experts
            return replace(part, shape=info.shape, index=0)
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
