"""The keys of config.json that say what a mixture of experts is.

Owns what these keys mean. Must not know weights or backends.
"""

from __future__ import annotations

from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.models.hf_values import HFConfig
from pageturner.models.spec import ExpertSpec, unsupported

_SWITCHED = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")  # the shared expert has a weight
_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")  # the last: by scores and a bias


def experts_of(config: HFConfig, layers: int) -> ExpertSpec | None:
    """The experts, None where no layer has any."""
    inner = config.size("moe_intermediate_size")
    method = config.get("topk_method", str, "greedy")
    if method not in _METHODS:
        raise unsupported(f"topk_method {method!r} is not supported; known: {', '.join(_METHODS)}")
    shared = config.get("n_shared_experts", int, 0)
    if shared:
        shared = inner * config.size("n_shared_experts", most=1 << 16)
    if config.arch in (*_SWITCHED, "nemotron_h"):
        shared = config.get("shared_expert_intermediate_size", int)
    experts = ExpertSpec(
        config.size("num_experts"),
        config.size("num_experts_per_tok"),
        inner,
        config.get("norm_topk_prob", bool, False),
        _sparse_layers(config, layers),
        shared=shared,
        scoring=config.get("scoring_func", str, "softmax"),
        scale=config.get("routed_scaling_factor", float, 1.0),
        switched=config.arch in _SWITCHED,
        biased=method == "noaux_tc",
    )
    groups = config.size("n_group", 1)
    kept = config.size("topk_group", 1)
    if method != "greedy":
        best = 2 if experts.biased else 1
        experts = replace(experts, groups=groups, kept=kept, best=best)
    return experts if experts.layers else None


def _sparse_layers(config: HFConfig, layers: int) -> frozenset[int]:
    """The layers with experts: as listed, else every so many from a first to a last."""
    kinds = config.raw("mlp_layer_types")
    dense = config.raw("mlp_only_layers") or []
    first = config.get("first_k_dense_replace", int, 0)
    last = config.get("moe_layer_end_index", int, 0)
    step = config.size("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise EngineFault(
            "config_invalid", f"mlp_only_layers should be numbers of layers, not {dense!r}"
        )
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise EngineFault("config_invalid", f"mlp_layer_types should name {layers} layers")
        return frozenset(i for i in range(layers) if kinds[i] == "sparse")
    end = last + 1 if last > 0 else layers
    wanted = range(max(first, 0), min(end, layers))
    return frozenset(i for i in wanted if i not in dense and (i + 1) % step == 0)
