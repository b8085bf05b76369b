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
from pageturner.models.hf_keys import DEFAULTS, PICTURES, QUANTISED
from pageturner.models.hf_llama import activation, llama_like, no_rope_layers, rope_section
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
    if arch in ("gemma3", "llama4"):
        arch, values, where = f"{arch}_text", _text_part(values, where), f"{where}, text_config"
    reader = _READERS.get(arch)
    if reader is None:
        raise unsupported(f"model type {arch!r} is not supported; known: {', '.join(_READERS)}")
    ours = arch.replace("gemma3_text", "gemma3")
    config = HFConfig(DEFAULTS.get(arch, {}) | values, where, ours, name)
    config.ignore(QUANTISED)  # how weights lie in their files
    spec = reader(config)
    tied = config.get("tie_word_embeddings", bool, not has_head)
    spec = replace(spec, tied=tied)
    config.done(spec)
    return check_spec(spec)


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


def _phi3(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    for key, wanted in (("attention_bias", False), ("full_attn_mod", 1), ("interpolate_factor", 1)):
        config.expect(key, wanted)  # the last two: of Phi-4-mini
    return spec


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


def _mixtral(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    every = frozenset(range(spec.layers))
    return replace(spec, experts=ExpertSpec(count, top_k, spec.ffn, True, every))


def _qwen3_moe(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    step, dense = config.size("decoder_sparse_step", 1), config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise EngineFault(
            "config_invalid", f"mlp_only_layers should be numbers of layers, not {dense!r}"
        )
    dense = frozenset(dense)
    experts = ExpertSpec(
        config.size("num_local_experts" if config.raw("num_experts") is None else "num_experts"),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        config.get("norm_topk_prob", bool, False),
        frozenset(i for i in range(spec.layers) if i not in dense and (i + 1) % step == 0),
    )
    return replace(spec, experts=experts)


def _smollm3(config: HFConfig) -> ModelSpec:
    spec = llama_like(config)
    return replace(spec, no_rope=no_rope_layers(config, spec.layers))


def _granite(config: HFConfig) -> ModelSpec:
    """Granite 3, and what is dense of Granite 4."""
    return _multiplied(config, llama_like(config))


def _multiplied(config: HFConfig, spec: ModelSpec) -> ModelSpec:
    divisor = config.get("logits_scaling", float, 1.0)
    return replace(
        spec,
        attention_scale=config.get("attention_multiplier", float, 1.0),
        embed_scale=config.get("embedding_multiplier", float, 1.0),
        residual=config.get("residual_multiplier", float, 1.0),
        logit_scale=1 / divisor if divisor else 0.0,
    )


def _granite_hybrid(config: HFConfig) -> ModelSpec:
    """Granite 4 where all layers have attention and none has experts."""
    kinds = config.take("layer_types")
    if not isinstance(kinds, list) or any(
        kind not in ("attention", "full_attention") for kind in kinds
    ):
        raise unsupported(
            "Granite 4 with Mamba layers is not supported; its dense models are, such as micro"
        )
    if config.get("num_local_experts", int, 8):
        raise unsupported(
            "Granite 4 with experts is not supported; its dense models are, such as micro"
        )
    config.ignore("num_experts_per_tok intermediate_size init_method time_step_* mamba_*")
    config.expect("normalization_function", "rmsnorm")
    spec = _multiplied(config, llama_like(config, ffn="shared_intermediate_size"))
    if len(kinds) != spec.layers:
        raise EngineFault(
            "model_invalid", f"layer_types names {len(kinds)} of {spec.layers} layers"
        )
    positions = config.raw("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise unsupported(
            f"position_embedding_type {positions!r} is not supported; known: rope, nope"
        )
    return spec if positions == "rope" else replace(spec, no_rope=frozenset(range(spec.layers)))


def _interleaved(spec: ModelSpec) -> ModelSpec:
    return replace(spec, rope=replace(spec.rope, interleaved=True))


def _glm(config: HFConfig) -> ModelSpec:
    spec = _interleaved(llama_like(config))
    biased = config.get("attention_bias", bool)
    return replace(spec, family=replace(spec.family, qkv_bias=biased, o_bias=False))


def _starcoder2(config: HFConfig) -> ModelSpec:
    config.expect("use_bias", True)
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    return llama_like(config)


def _gpt_oss(config: HFConfig) -> ModelSpec:
    config.expect("swiglu_limit", 7.0)
    config.expect("swiglu_alpha", 1.702)
    # said twice in some files
    config.expect("experts_per_token", config.raw("num_experts_per_tok"))
    config.raw("initial_context_length")  # before it was stretched, which rope_scaling says
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        raise EngineFault(
            "config_invalid", "gpt-oss needs rope_scaling, which says how it was stretched"
        )
    spec = llama_like(config)
    every = frozenset(range(spec.layers))
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    experts = ExpertSpec(count, top_k, spec.ffn, True, every)
    return replace(spec, family=replace(spec.family, act=GATED), experts=experts)


def _llama4(config: HFConfig) -> ModelSpec:
    spec = _interleaved(llama_like(config, ffn="intermediate_size_mlp"))
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
    unit = "unit" if config.get("use_qk_norm", bool, True) else ""
    return replace(
        spec,
        family=replace(spec.family, qk_norm=unit),
        experts=experts if layers else None,
        chunked=True,
        no_rope=without,
        attn_temperature=Temper(floor, scale) if tuned or tuned is None else None,
        context=min(spec.context, LONGEST),  # ten million tokens are said
    )


def _deepseek_v2(config: HFConfig) -> ModelSpec:
    """V2-Lite. The larger ones route within groups and compress queries too."""
    if config.raw("q_lora_rank") is not None:
        raise unsupported("DeepSeek-V2 with q_lora_rank is not supported; DeepSeek-V2-Lite is")
    for key, wanted in (
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
        ("norm_topk_prob", False),
        ("moe_layer_freq", 1),
    ):
        config.expect(key, wanted)
    config.ignore("qk_head_dim aux_loss_alpha seq_aux n_group topk_group ep_size")
    latent = LatentSpec(
        config.size("kv_lora_rank"),
        config.size("qk_rope_head_dim"),
        config.size("qk_nope_head_dim"),
        config.size("v_head_dim"),
    )
    spec = _interleaved(llama_like(config, head_dim=latent.rotary))
    if spec.family.o_bias:
        raise unsupported("DeepSeek-V2 with attention_bias is not supported")
    dense = config.get("first_k_dense_replace", int, 0)
    inner = config.size("moe_intermediate_size")
    experts = ExpertSpec(
        config.size("n_routed_experts"),
        config.size("num_experts_per_tok"),
        inner,
        False,
        frozenset(range(max(dense, 0), spec.layers)),
        shared=inner * config.size("n_shared_experts", most=1 << 16),
        scale=config.get("routed_scaling_factor", float, 1.0),
    )
    scale = (latent.nope + latent.rotary) ** -0.5 * _of_scores(config, spec) ** 2
    return replace(
        spec,
        latent=latent,
        kv_heads=1,
        head_dim=latent.rank + latent.rotary,
        attention_scale=scale,
        experts=experts if experts.layers else None,
    )


def _of_scores(config: HFConfig, spec: ModelSpec) -> float:
    """The factor by which YaRN changes attention scores, by mscale_all_dim."""
    scaling = rope_section(config)
    weight = scaling.get("mscale_all_dim", float, 0.0) if scaling is not None else 0.0
    return yarn_amplitude(spec.rope.factor, weight) if spec.rope.kind == "yarn" and weight else 1.0


def _gpt2(config: HFConfig) -> ModelSpec:
    return llama_like(config)


def _opt(config: HFConfig) -> ModelSpec:
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if not config.get(key, bool, True):  # OPT-350m, and the Galactica models
            raise unsupported(f"OPT with {key} = false is not supported")
    config.expect("word_embed_proj_dim", config.size("hidden_size"))
    config.expect("_remove_final_layer_norm", False)
    return llama_like(config)


def _bloom(config: HFConfig) -> ModelSpec:
    """ALiBi knows no longest context; the training length is taken where the file names it."""
    config.raw("offset_alibi")  # a shift of all scores, which changes nothing
    return llama_like(config)


_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3")
_READERS: dict[str, Callable[[HFConfig], ModelSpec]] = {
    **dict.fromkeys(_PLAIN, llama_like),
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "glm": _glm,
    "glm4": _glm,
    "starcoder2": _starcoder2,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek_v2,
}
