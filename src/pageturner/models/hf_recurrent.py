"""The keys of config.json of models with recurrent layers.

Owns what these keys mean, family by family. Must not know weights or backends.
"""

from __future__ import annotations

from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.models.hf_llama import experts_of, llama_like
from pageturner.models.hf_values import HFConfig
from pageturner.models.spec import ExpertSpec, LinearSpec, ModelSpec, unsupported


def _delta_net(config: HFConfig) -> ModelSpec:
    """Qwen3-Next, and Qwen3.5, 3.6 and 3.8: most layers are gated delta nets."""
    listed = config.take("layer_types")
    every = config.size("full_attention_interval", 4)
    config.ignore("mtp_* mamba_ssm_dtype")
    config.expect("attn_output_gate", True)
    sized = "moe_intermediate_size" if config.arch == "qwen3_5_moe_text" else "intermediate_size"
    spec = llama_like(config, ffn=sized)
    if listed is None:
        listed = [_KINDS[(i + 1) % every == 0] for i in range(spec.layers)]
    kinds = _layers_by_kind(listed, spec.layers, {kind: kind for kind in _KINDS})
    gate = config.get("output_gate_type", str, "silu")
    linear = LinearSpec(
        kinds[_KINDS[0]],
        config.size("linear_num_key_heads", 16),
        config.size("linear_num_value_heads", 32),
        config.size("linear_key_head_dim", 128),
        config.size("linear_value_head_dim", 128),
        config.size("linear_conv_kernel_dim", 4),
        log_decay=True,
        act="silu" if gate == "swish" else gate,
    )
    return replace(spec, linear=linear)


_KINDS = ("linear_attention", "full_attention")


def multiplied(config: HFConfig, spec: ModelSpec) -> ModelSpec:
    divisor = config.get("logits_scaling", float, 1.0)
    return replace(
        spec,
        attention_scale=config.get("attention_multiplier", float, 1.0),
        embed_scale=config.get("embedding_multiplier", float, 1.0),
        residual=config.get("residual_multiplier", float, 1.0),
        logit_scale=1 / divisor if divisor else 0.0,
    )


def _layers_by_kind(
    listed: object, layers: int, names: dict[str, str]
) -> dict[str, frozenset[int]]:
    """The layers of each kind; names: the kind of each name that files have for one."""
    known = " or ".join(names)
    if not isinstance(listed, list) or any(type(name) is not str for name in listed):
        raise unsupported(f"layer_types should be a list of {known}, not {str(listed)[:80]}")
    if {*listed} - {*names}:
        raise unsupported(f"layer_types should name {known} for each of {layers} layers")
    if len(listed) != layers:
        raise EngineFault("model_invalid", f"layer_types names {len(listed)} of {layers} layers")
    return {
        kind: frozenset(i for i, name in enumerate(listed) if names[name] == kind)
        for kind in names.values()
    }


def _lfm2(config: HFConfig) -> ModelSpec:
    """LFM2: most layers are short convolutions."""
    listed = config.take("layer_types")
    attend = config.raw("full_attn_idxs")
    spec = llama_like(config)
    if listed is None and isinstance(attend, list):
        listed = [("conv", "full_attention")[i in attend] for i in range(spec.layers)]
    names = {kind: kind for kind in ("conv", "full_attention")}
    layers = _layers_by_kind(listed, spec.layers, names)["conv"]
    kernel = config.size("conv_L_cache", 3)
    linear = LinearSpec(layers, 0, 0, 0, 0, kernel, kind="conv", width=spec.dim)
    spec = replace(spec, linear=linear if layers else None)
    if config.arch == "lfm2":
        return replace(spec, ffn=_adjusted(config, spec.ffn))
    return spec


def _adjusted(config: HFConfig, ffn: int) -> int:
    """The inner size of an MLP where the file says that of one without a gate."""
    multiple = config.size("block_multiple_of", 256)
    times = config.get("block_ffn_dim_multiplier", float, 1.0)
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return ffn
    return -(-int(times * int(2 * ffn / 3)) // multiple) * multiple


def _mamba(config: HFConfig, layers: frozenset[int], inner: int) -> LinearSpec:
    """The Mamba2 layers; inner: columns of their values, 0 where heads alone say how many."""
    config.expect("mamba_proj_bias", False)
    config.ignore("mamba_chunk_size time_step_* mamba_expand")
    heads = config.size("mamba_n_heads", 128)
    if config.raw("mamba_d_head") in (None, "auto"):
        size = inner // heads
    else:
        size = config.size("mamba_d_head")
    if inner and size * heads != inner:
        raise EngineFault(
            "model_invalid", f"{heads} heads of {size} are not the {inner} columns of a Mamba layer"
        )
    return LinearSpec(
        layers,
        config.size("mamba_n_groups", 1),
        heads,
        config.size("mamba_d_state", 256),
        size,
        config.size("mamba_d_conv", 4),
        log_decay=True,
        kind="mamba",
        conv_bias=config.get("mamba_conv_bias", bool, True),
        limits=_limits(config.raw("time_step_limit")),
        norm="before",
    )


def _limits(said: object) -> tuple[float, float]:
    """The least and the largest time step."""
    if said is None:
        return 0.0, float("inf")
    ends = said if isinstance(said, list) else []
    found = [each.get("__float__", "") if isinstance(each, dict) else each for each in ends]
    try:
        low, high = (float(each) for each in found)
    except (TypeError, ValueError) as error:
        raise EngineFault(
            "config_invalid", f"time_step_limit should be two numbers, not {str(said)[:80]}"
        ) from error
    return low, high


def _granite_hybrid(config: HFConfig) -> ModelSpec:
    """Granite 4: attention and Mamba2, dense or with experts beside the MLP."""
    listed = config.take("layer_types")
    config.ignore("init_method")
    config.expect("normalization_function", "rmsnorm")
    spec = multiplied(config, llama_like(config, ffn="shared_intermediate_size"))
    layers = _layers_by_kind(listed, spec.layers, _GRANITE)["mamba"]
    experts, count = None, config.get("num_local_experts", int, 8)
    if count:
        experts = ExpertSpec(
            count,
            config.size("num_experts_per_tok", 2),
            config.size("intermediate_size"),
            True,
            frozenset(range(spec.layers)),
            shared=spec.ffn,
            scale=spec.residual,
        )
    config.ignore("num_experts_per_tok intermediate_size")
    inner = config.size("mamba_expand", 2) * spec.dim
    linear = _mamba(config, layers, inner) if layers else None
    config.ignore("mamba_* time_step_*")
    positions = config.raw("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise unsupported(
            f"position_embedding_type {positions!r} is not supported; known: rope, nope"
        )
    spec = replace(spec, experts=experts, linear=linear)
    return spec if positions == "rope" else replace(spec, no_rope=frozenset(range(spec.layers)))


_GRANITE = {
    **dict.fromkeys(("mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("attention", "full_attention"), "attention"),
}
_NEMOTRON = _GRANITE | {"moe": "moe", "mlp": "mlp"}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(config: HFConfig) -> ModelSpec:
    """Nemotron-H and Nemotron 3: each layer is one of attention, Mamba2, an MLP, and experts."""
    pattern, listed = config.raw("hybrid_override_pattern"), config.take("layers_block_type")
    config.ignore("num_hidden_layers")
    if listed is None and isinstance(pattern, str):
        listed = [_PATTERN.get(letter, letter) for letter in pattern]
    count = len(listed or ())
    kinds = _layers_by_kind(listed, count, _NEMOTRON)
    config.put("num_hidden_layers", count)
    spec = llama_like(config)
    experts, sparse = None, kinds["moe"]
    if sparse:
        experts = experts_of(config, spec.layers)
        assert experts is not None
        experts = replace(experts, layers=sparse)
    config.ignore("moe_* n_routed_experts n_shared_experts norm_topk_prob routed_scaling_factor")
    config.ignore("num_experts_per_tok topk_group scoring_func topk_method")
    return replace(
        spec,
        linear=_mamba(config, kinds["mamba"], 0),
        experts=experts,
        feeds=sparse | kinds["mlp"],
        no_rope=frozenset(range(spec.layers)),
    )


def _falcon_h1(config: HFConfig) -> ModelSpec:
    """Falcon-H1: attention and Mamba2 side by side in each layer, and multipliers everywhere."""
    spec = llama_like(config)
    inner = config.get("mamba_d_ssm", int, 0) or config.size("mamba_expand", 2) * spec.dim
    linear = _mamba(config, frozenset(range(spec.layers)), inner)
    behind = config.get("mamba_norm_before_gate", bool, True)
    normed = config.get("mamba_rms_norm", bool, False)
    into = config.get("ssm_in_multiplier", float, 1.0)
    factors = _multipliers(config, "ssm_multipliers", 5)
    linear = replace(
        linear,
        beside=True,
        norm=("before", "behind")[behind] if normed else "",
        factors=tuple(into * factor for factor in factors),
    )
    seen = config.get("attention_in_multiplier", float, 1.0)
    keys = config.get("key_multiplier", float, 1.0)
    out = config.get("attention_out_multiplier", float, 1.0)
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    return replace(
        spec,
        linear=linear,
        attention_scale=spec.attention_scale * seen**2 * keys,
        embed_scale=config.get("embedding_multiplier", float, 1.0),
        logit_scale=config.get("lm_head_multiplier", float, 1.0),
        mlp_factors=(gate, down),
        mixer_factors=(seen * out, config.get("ssm_out_multiplier", float, 1.0)),
    )


def _multipliers(config: HFConfig, key: str, count: int) -> list[float]:
    listed = config.raw(key)
    if listed is None:
        return [1.0] * count
    numbers = isinstance(listed, list) and all(type(each) in (int, float) for each in listed)
    if not numbers or len(listed) != count:
        raise EngineFault("config_invalid", f"{key} should be {count} numbers, not {listed!r}")
    return [float(each) for each in listed]


RECURRENT = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta_net),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
}
