"""The keys of config.json of families that came after Llama 3: what each adds to Llama, or says otherwise.

Owns these keys. Must not know files, weights or backends. Sources: the configuration and model classes of
Transformers 5.23, and published configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.kernels.base import GATED
from pageturner.models.hf_llama import llama_like, no_rope_layers
from pageturner.models.hf_values import HFConfig
from pageturner.models.rope import yarn_amplitude
from pageturner.models.spec import (
    LONGEST,
    ExpertSpec,
    LatentSpec,
    ModelSpec,
    Temper,
    unsupported,
)


def _smollm3(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = llama_like(config, arch, name)
    return replace(spec, no_rope=no_rope_layers(config, spec.layers))


def _granite(config: HFConfig, arch: str, name: str) -> ModelSpec:
    """Granite 3, and what is dense of Granite 4."""
    return _multiplied(config, llama_like(config, arch, name))


def _multiplied(config: HFConfig, spec: ModelSpec) -> ModelSpec:
    divisor = config.get("logits_scaling", float, 1.0)
    return replace(
        spec,
        attention_scale=config.get("attention_multiplier", float, 1.0),
        embed_scale=config.get("embedding_multiplier", float, 1.0),
        residual=config.get("residual_multiplier", float, 1.0),
        logit_scale=1 / divisor if divisor else 0.0,
    )


def _granite_hybrid(config: HFConfig, arch: str, name: str) -> ModelSpec:
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
    for key in (
        "num_experts_per_tok",
        "intermediate_size",
        "init_method",
        "time_step_limit",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
    ):
        config.raw(key)
    config.ignore("mamba_")
    config.expect("normalization_function", "rmsnorm")
    spec = _multiplied(config, llama_like(config, arch, name, ffn="shared_intermediate_size"))
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


def _glm(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = _interleaved(llama_like(config, arch, name))
    biased = config.get("attention_bias", bool)
    return replace(spec, family=replace(spec.family, qkv_bias=biased, o_bias=False))


def _starcoder2(config: HFConfig, arch: str, name: str) -> ModelSpec:
    config.expect("use_bias", True)
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    return llama_like(config, arch, name, eps="norm_epsilon")


def _gpt_oss(config: HFConfig, arch: str, name: str) -> ModelSpec:
    config.expect("swiglu_limit", 7.0)
    config.expect("swiglu_alpha", 1.702)
    config.expect(
        "experts_per_token", config.raw("num_experts_per_tok")
    )  # said twice in some files
    config.raw("initial_context_length")  # before it was stretched, which rope_scaling says
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        raise EngineFault(
            "config_invalid", "gpt-oss needs rope_scaling, which says how it was stretched"
        )
    spec = llama_like(config, arch, name)
    every = frozenset(range(spec.layers))
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    experts = ExpertSpec(count, top_k, spec.ffn, True, every)
    return replace(spec, family=replace(spec.family, act=GATED), experts=experts)


def _llama4(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = _interleaved(llama_like(config, arch, name, ffn="intermediate_size_mlp"))
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
        temper=Temper(floor, scale) if tuned or tuned is None else None,
        context=min(spec.context, LONGEST),  # ten million tokens are said
    )


def _deepseek_v2(config: HFConfig, arch: str, name: str) -> ModelSpec:
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
    for key in ("qk_head_dim", "aux_loss_alpha", "seq_aux", "n_group", "topk_group", "ep_size"):
        config.raw(key)
    latent = LatentSpec(
        config.size("kv_lora_rank"),
        config.size("qk_rope_head_dim"),
        config.size("qk_nope_head_dim"),
        config.size("v_head_dim"),
    )
    spec = _interleaved(llama_like(config, arch, name, head_dim=latent.rotary))
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
    """What YaRN makes of attention scores, by mscale_all_dim."""
    scaling = config.section("rope_parameters")
    if scaling is None:
        scaling = config.section("rope_scaling")
    weight = scaling.get("mscale_all_dim", float, 0.0) if scaling is not None else 0.0
    return yarn_amplitude(spec.rope.factor, weight) if spec.rope.kind == "yarn" and weight else 1.0


READERS: dict[str, Callable[[HFConfig, str, str], ModelSpec]] = {
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "olmo2": llama_like,
    "olmo3": llama_like,
    "glm": _glm,
    "glm4": _glm,
    "starcoder2": _starcoder2,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek_v2,
}
