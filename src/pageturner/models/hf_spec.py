"""Reads a spec from the config.json of a Hugging Face folder.

Owns the keys of config.json, family by family: what each adds to Llama, or says otherwise. Every
key must be used, or be known to say nothing about the computation, or be null or false: anything
else is refused by name, since a setting silently ignored gives wrong answers. Sources: the
configuration and model classes of Transformers 5.23, and published configurations. Must not know
weights or backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.kernels.base import GATED
from pageturner.models.hf_keys import MODEL_TYPES, PICTURES, QUANTISED
from pageturner.models.hf_llama import (
    activation,
    experts_of,
    llama_like,
    no_rope_layers,
    rope_section,
)
from pageturner.models.hf_recurrent import RECURRENT, multiplied
from pageturner.models.hf_values import HFConfig, Json
from pageturner.models.rope import yarn_amplitude
from pageturner.models.spec import (
    LONGEST,
    ExpertSpec,
    LatentSpec,
    ModelSpec,
    Temper,
    check_spec,
    unsupported,
)


def read_hf_spec(values: Json, where: str, name: str, has_head: bool) -> ModelSpec:
    """The spec of a config.json.

    where     the file, for messages
    has_head  whether the weights have an output head: decides where the file does not say if it is
              tied
    EngineFault 'model_unsupported' names what is not understood, 'config_invalid' what is missing
    or of the
    wrong type, 'model_invalid' what makes no sense.
    """
    arch = HFConfig(values, where).get("model_type", str)
    if arch in _TEXT_PARTS:
        values, where = _text_part(values, where), f"{where}, text_config"
        arch = HFConfig(values, where).get("model_type", str, _TEXT_PARTS[arch])
    if arch not in MODEL_TYPES:
        raise unsupported(f"model type {arch!r} is not supported; known: {', '.join(MODEL_TYPES)}")
    ours = arch.removesuffix("_text").removesuffix("_unified") if "gemma" in arch else arch
    row = MODEL_TYPES[arch]
    config = HFConfig(row.get("defaults", {}) | values, where, ours, name)
    config.ignore(QUANTISED)  # how weights lie in their files
    config.ignore(row.get("silent", ""))
    for key, wanted in row.get("expected", {}).items():
        config.expect(key, wanted)
    spec = _READERS.get(arch, llama_like)(config)
    if row.get("interleaved"):
        spec = replace(spec, rope=replace(spec.rope, interleaved=True))
    if "qk_norm" in row:
        key, norm, usual = row["qk_norm"]
        norm = norm if config.get(key, bool, usual) else ""
        spec = replace(spec, family=replace(spec.family, qk_norm=norm))
    if row.get("experts"):
        spec = replace(spec, experts=experts_of(config, spec.layers))
    tied = config.get("tie_word_embeddings", bool, not has_head)
    spec = replace(spec, tied=tied)
    config.done(spec)
    return check_spec(spec)


_TEXT_PARTS = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
}


def _text_part(values: Json, where: str) -> Json:
    """The object that describes the text part of a model with a vision tower. The file may say
    outside of it whether the head is tied."""
    outer = HFConfig(values, where)
    text = outer.raw("text_config")
    if not isinstance(text, dict):
        raise EngineFault(
            "config_invalid", f"{where}: text_config should be an object, not {text!r}"
        )
    outer.ignore(f"{PICTURES} {QUANTISED}")
    tied = outer.raw("tie_word_embeddings")
    outer.done()
    return ({} if tied is None else {"tie_word_embeddings": tied}) | text


# -- Llama and those who follow it -----------------------------------------------------------------


def _gemma(config: HFConfig) -> ModelSpec:
    config.expect("sliding_window_size", config.raw("sliding_window"))  # said twice in some files
    config.raw("hidden_act")  # says "gelu" in old files, and is not what decides
    spec = llama_like(config)
    act = activation(config.get("hidden_activation", str, "gelu_pytorch_tanh"))
    return replace(
        spec,
        family=replace(spec.family, act=act),
        attention_scale=config.size("query_pre_attn_scalar", spec.head_dim) ** -0.5,
        soft_cap=config.get("attn_logit_softcapping", float, 0.0),
        logit_soft_cap=config.get("final_logit_softcapping", float, 0.0),
        embed_scale=spec.dim**0.5,
    )


def _gemma4(config: HFConfig) -> ModelSpec:
    if config.raw("use_bidirectional_attention") == "all":
        raise unsupported("use_bidirectional_attention = 'all' is not supported: text is causal")
    heads, layers = config.size("num_attention_heads"), config.size("num_hidden_layers")
    local = config.size("num_key_value_heads", heads), config.size("head_dim")
    config.ignore("global_head_dim num_global_key_value_heads per_layer_config num_experts top_k_*")
    same = config.get("attention_k_eq_v", bool, False)
    kv_heads, head_dim = _global_heads(config, local, same)
    spec = _gemma(config)
    said = llama_like(config, head_dim=head_dim)
    if said.local_rope is None or said.local_rope.dim != head_dim:
        raise unsupported("gemma4 without rope_parameters of both kinds of layers is not supported")
    windowed = spec.windowed - {layers - 1}
    sharing = config.get("num_kv_shared_layers", int, 0)
    per_layer = config.get("hidden_size_per_layer_input", int, 0)
    if per_layer:
        config.expect("vocab_size_per_layer_input", spec.vocab)
    config.ignore("vocab_size_per_layer_input")
    wide = config.get("use_double_wide_mlp", bool, False)
    experts = None
    if config.get("enable_moe_block", bool, False):
        experts = ExpertSpec(
            config.size("num_experts"),
            config.size("top_k_experts"),
            config.size("moe_intermediate_size"),
            True,
            frozenset(range(layers)),
            shared=spec.ffn,
            normed=True,
        )
    return replace(
        spec,
        attention_scale=1.0,
        head_dim=head_dim,
        kv_heads=kv_heads,
        rope=said.rope,
        local_rope=replace(said.local_rope, dim=local[1]),
        windowed=windowed,
        local_heads=local if windowed and local != (kv_heads, head_dim) else None,
        sharing=sharing,
        sharing_ffn=2 * spec.ffn if wide and sharing else 0,
        k_as_v=same,
        per_layer=per_layer,
        experts=experts,
    )


def _global_heads(config: HFConfig, local: tuple[int, int], same: bool) -> tuple[int, int]:
    """KV heads and head size of the layers without a window: by two keys, or by newer files one of
    these layers at a time."""
    listed = config.section("per_layer_config")
    if listed is None:
        kv_heads = config.size("num_global_key_value_heads", local[0]) if same else local[0]
        return kv_heads, config.size("global_head_dim", 512)
    kinds, found = config.raw("layer_types"), set[tuple[int, int]]()
    for i, kind in enumerate(kinds if isinstance(kinds, list) else ()):
        one = listed.section(str(i)) or HFConfig({}, "")
        heads = one.size("num_key_value_heads", local[0]), one.size("head_dim", local[1])
        one.done()
        if kind == "full_attention":
            found.add(heads)
        elif heads != local:
            found |= {local, heads}
    listed.done()
    if len(found) != 1:
        raise unsupported(
            "per_layer_config with other heads in layers of one kind is not supported"
        )
    return found.pop()


def _minimax_m2(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    return replace(spec, rope=replace(spec.rope, dim=config.size("rotary_dim", spec.rope.dim)))


def _global_without_rope(config: HFConfig) -> ModelSpec:
    """EXAONE 4: where some layers have a window, the others have no rotary embedding."""
    spec = llama_like(config)
    others = frozenset(range(spec.layers)) - spec.windowed
    return replace(spec, no_rope=others if spec.window else frozenset())


def _cohere2(config: HFConfig) -> ModelSpec:
    return replace(_global_without_rope(config), logit_scale=config.get("logit_scale", float))


def _ministral3(config: HFConfig) -> ModelSpec:
    """Llama whose queries grow by position, counted from 0."""
    spec = llama_like(config)
    scaling = rope_section(config)
    if scaling is None or scaling.raw("llama_4_scaling_beta") is None:
        return spec
    beta = scaling.get("llama_4_scaling_beta", float)
    floor = scaling.size("original_max_position_embeddings")
    return replace(spec, attn_temperature=Temper(floor, beta, first=0))


def _stablelm(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    parallel = config.get("use_parallel_residual", bool, False)
    return replace(spec, family=replace(spec.family, parallel=parallel))


def _smollm3(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    return replace(spec, no_rope=no_rope_layers(config, spec.layers))


def _chatglm(config: HFConfig) -> ModelSpec:
    """ChatGLM 2 and 3, and GLM-4 before Transformers had it."""
    spec = llama_like(config)
    base = spec.rope.base * config.get("rope_ratio", float, 1.0)
    return replace(spec, rope=replace(spec.rope, base=base))


def _baichuan(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    if config.raw("rotary_positions") is None:  # of 13B
        return spec.with_alibi()
    return spec


def _gpt_oss(config: HFConfig) -> ModelSpec:
    # said twice in some files
    config.expect("experts_per_token", config.raw("num_experts_per_tok"))
    config.raw("initial_context_length")  # before it was stretched, which rope_scaling says
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        raise EngineFault(
            "config_invalid", "gpt-oss needs rope_scaling, which says how it was stretched"
        )
    spec = llama_like(config)
    return replace(spec, family=replace(spec.family, act=GATED))


def _llama4(config: HFConfig) -> ModelSpec:
    spec = llama_like(config, ffn="intermediate_size_mlp")
    config.raw("for_llm_compressor")
    step, listed = config.size("interleave_moe_layer_step", 1), config.raw("moe_layers")
    layers = list(range(step - 1, spec.layers, step)) if listed is None else listed
    if not isinstance(layers, list) or any(
        type(i) is not int or not 0 <= i < spec.layers for i in layers
    ):
        raise EngineFault("model_invalid", f"moe_layers should be numbers of {spec.layers} layers")
    inner, without = config.size("intermediate_size"), no_rope_layers(config, spec.layers)
    experts = ExpertSpec(
        config.size("num_local_experts", 16),
        config.size("num_experts_per_tok", 1),
        inner,
        False,
        frozenset(layers),
        shared=inner,
        scoring="sigmoid",
        weigh_input=True,
    )
    tuned = config.raw("attn_temperature_tuning")
    scale, floor = config.get("attn_scale", float, 0.1), config.size("floor_scale", 8192)
    return replace(
        spec,
        experts=experts if layers else None,
        chunked=True,
        no_rope=without,
        attn_temperature=Temper(floor, scale) if without and (tuned or tuned is None) else None,
        context=min(spec.context, LONGEST),  # ten million tokens are said
    )


def _latent(config: HFConfig) -> ModelSpec:
    """DeepSeek V2, V3, R1 and V3.1, and GLM-4.7-Flash."""
    latent = LatentSpec(
        config.size("kv_lora_rank"),
        config.size("qk_rope_head_dim"),
        config.size("qk_nope_head_dim"),
        config.size("v_head_dim"),
        config.get("q_lora_rank", int, 0),
    )
    spec = llama_like(config, head_dim=latent.rotary)
    if spec.family.o_bias:
        raise unsupported("a latent KV with attention_bias is not supported")
    if config.get("rope_interleave", bool, True):
        spec = replace(spec, rope=replace(spec.rope, interleaved=True))
    scale = (latent.nope + latent.rotary) ** -0.5 * _of_scores(config, spec) ** 2
    return replace(
        spec,
        latent=latent,
        kv_heads=1,
        head_dim=latent.rank + latent.rotary,
        attention_scale=scale,
    )


def _of_scores(config: HFConfig, spec: ModelSpec) -> float:
    """The factor by which YaRN changes attention scores, by mscale_all_dim."""
    scaling = rope_section(config)
    weight = scaling.get("mscale_all_dim", float, 0.0) if scaling is not None else 0.0
    return yarn_amplitude(spec.rope.factor, weight) if spec.rope.kind == "yarn" and weight else 1.0


def _opt(config: HFConfig) -> ModelSpec:
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if not config.get(key, bool, True):  # OPT-350m, and the Galactica models
            raise unsupported(f"OPT with {key} = false is not supported")
    config.expect("word_embed_proj_dim", config.size("hidden_size"))
    config.expect("_remove_final_layer_norm", False)
    return llama_like(config)


# Model types that say more than Llama, or otherwise.
_READERS: dict[str, Callable[[HFConfig], ModelSpec]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _gemma),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _gemma4),
    "opt": _opt,
    "smollm3": _smollm3,
    "granite": lambda config: multiplied(config, llama_like(config)),
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _latent),
    "minimax_m2": _minimax_m2,
    "exaone4": _global_without_rope,
    "cohere2": _cohere2,
    "ministral3": _ministral3,
    "baichuan": _baichuan,
    "chatglm": _chatglm,
    "stablelm": _stablelm,
    **RECURRENT,
}
