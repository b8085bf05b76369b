"""The keys of config.json that Llama and all who follow it share: sizes, windows, rotary embedding,
experts.

Owns what these keys mean. Must not know which families there are beyond that, weights or backends.
"""

from __future__ import annotations

from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.models.hf_values import HFConfig
from pageturner.models.rope import KINDS, RopeSpec, longrope_amplitude, yarn_amplitude
from pageturner.models.spec import (
    FAMILIES,
    LARGEST,
    MAX_LAYERS,
    ExpertSpec,
    ModelSpec,
    unsupported,
)

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# Of families that alternate: layers whose number, from 1 on, is no multiple of this have a window.
_EVERY = {"gemma2": 2, "olmo3": 4, "gpt_oss": 2, "cohere2": 4, "exaone4": 4}
_CHUNKS = ("attention_chunk_size", "chunked_attention")
# Families of which Transformers gives the window to every layer; those that have windows in some
# layers only. To all others a window that is set says nothing.
_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe", "ministral3")
_SOMEWHERE = (
    *("qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "olmo3", "gpt_oss", "llama4_text"),
    *("cohere2", "exaone4", "ministral", "gemma4"),
)


def llama_like(config: HFConfig, ffn: str = "intermediate_size", head_dim: int = 0) -> ModelSpec:
    """The keys that all families share; every family adds its own.

    ffn       the key of the inner size of the MLP
    head_dim  dimensions of a head before rotary ones are added; 0: as the file says
    """
    arch = config.arch
    family = FAMILIES[arch]
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if arch not in ("bloom", "arcee", "nemotron_h"):
        act = config.get("hidden_act", str, "silu")
        family = replace(family, act=activation(config.get("hidden_activation", str, act)))
    rotary = family.positions == "rotary"
    spec = ModelSpec(
        arch=arch,
        name=config.name,
        family=family,
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        dim=dim,
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        ffn=config.size(ffn, None if rotary else 4 * dim),
        vocab=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        eps=config.get("rms_norm_eps", float),
        rope=RopeSpec(10_000.0, 0),
        tied=False,
        attention_scale=max(1, dim // heads) ** -0.5,
    )
    if rotary:
        return _with_rope(config, spec, head_dim)
    if dim % heads:
        raise EngineFault("model_invalid", f"{heads} heads do not fill a width of {dim}")
    return spec


def _with_rope(config: HFConfig, spec: ModelSpec, head_dim: int) -> ModelSpec:
    """The spec with what families with a rotary embedding share."""
    said = config.size("head_dim", max(1, spec.head_dim))
    head_dim = head_dim or said
    family = spec.family
    if spec.arch not in ("qwen2", "phi3") and config.get("attention_bias", bool, False):
        out = config.get("attention_out_bias", bool, True)
        family = replace(family, qkv_bias=True, o_bias=out)
    window, windowed = window_layers(config, spec.arch, spec.layers)
    local, rope = _ropes(config, head_dim)
    context = spec.context
    if rope.kind == "yarn" and 0 < rope.factor < LARGEST:
        # files name the context before or after the stretching
        context = max(context, int(rope.original * rope.factor))
    return replace(
        spec,
        family=family,
        kv_heads=config.size("num_key_value_heads", spec.heads),
        head_dim=head_dim,
        context=context,
        rope=rope,
        attention_scale=head_dim**-0.5,
        window=window,
        windowed=windowed,
        local_rope=local,
    )


def activation(name: str) -> str:
    """Our name of one of Transformers'."""
    if name not in _ACTIVATIONS:
        raise unsupported(f"activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def no_rope_layers(config: HFConfig, layers: int) -> frozenset[int]:
    """The layers without rotary embedding: those that are listed as 0, else every fourth, or as
    many as the file says. EngineFault('model_invalid') for a list of another length, or of other
    numbers."""
    every, listed = config.size("no_rope_layer_interval", 4), config.raw("no_rope_layers")
    if not listed:
        return frozenset(i for i in range(layers) if (i + 1) % every == 0)
    flags = isinstance(listed, list) and all(
        type(flag) in (int, bool) and flag in (0, 1) for flag in listed
    )
    if not flags or len(listed) != layers:
        raise EngineFault(
            "model_invalid",
            f"no_rope_layers should have a 0 or a 1 for each of {layers} layers, not {str(listed)[:80]}",
        )
    return frozenset(i for i in range(layers) if not listed[i])


def window_layers(config: HFConfig, arch: str, layers: int) -> tuple[int, frozenset[int]]:
    """The window and the layers that have it, where Transformers applies one: as listed, else by
    the habit of the family."""
    key, windowed_kind = (
        _CHUNKS if arch == "llama4_text" else ("sliding_window", "sliding_attention")
    )
    window = config.get(key, int, 0)
    switched = arch.startswith("qwen") or arch == "smollm3"
    if switched and not config.get("use_sliding_window", bool, False):
        window = 0
    if arch in FAMILIES and arch not in (*_EVERYWHERE, *_SOMEWHERE):
        window = 0
    if arch in _EVERYWHERE:
        return window, frozenset(range(layers)) if window else frozenset()
    kinds = config.raw("layer_types")
    if kinds is not None:
        known = (windowed_kind, "full_attention")
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or any(kind not in known for kind in kinds)
        ):
            raise unsupported(
                f"layer_types should name {' or '.join(known)} for each of {layers} layers"
            )
        windowed = [i for i in range(layers) if kinds[i] == windowed_kind]
    elif arch in _EVERY or arch.startswith("gemma"):
        every = config.size("sliding_window_pattern", _EVERY.get(arch, 6))
        windowed = [i for i in range(layers) if (i + 1) % every]
    elif arch in ("smollm3", "llama4_text"):
        without = no_rope_layers(config, layers)
        windowed = [i for i in range(layers) if (i in without) == (arch == "smollm3")]
    else:
        windowed = list(range(max(config.get("max_window_layers", int, 0), 0), layers))
    return window, frozenset(windowed) if window else frozenset()


def rope_section(config: HFConfig) -> HFConfig | None:
    """The object that says how the rotary embedding is stretched."""
    section = config.section("rope_parameters")
    return config.section("rope_scaling") if section is None else section


def _ropes(config: HFConfig, head_dim: int) -> tuple[RopeSpec | None, RopeSpec]:
    """The rotary embeddings of the windowed layers, where it is another one, and of all others."""
    local_base = config.get("rope_local_base_freq", float, 0.0)
    scaling = rope_section(config)
    if scaling is not None and scaling.raw("full_attention") is not None:
        full, local = scaling.section("full_attention"), scaling.section("sliding_attention")
        return _rope(config, local, head_dim), _rope(config, full, head_dim)
    rope = _rope(config, scaling, head_dim)
    if local_base:
        return RopeSpec(local_base, _rope(config, None, head_dim).dim), rope
    plain = RopeSpec(rope.base, rope.dim)  # OLMo 3 stretches the layers without a window only
    return (plain if config.arch == "olmo3" and rope != plain else None), rope


def _rope(config: HFConfig, scaling: HFConfig | None, head_dim: int) -> RopeSpec:
    base = config.get("rope_theta", float, 10_000.0)
    share = config.share("partial_rotary_factor", 1.0)
    context = config.size("max_position_embeddings")
    original = config.get("original_max_position_embeddings", int, context)
    if scaling is None:
        return RopeSpec(base, int(head_dim * share))
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    plain = kind == "default"
    kind = "linear" if plain else _OLD_KINDS.get(kind, kind)  # plain: by a factor of 1
    if kind not in KINDS:
        raise unsupported(f"rotary scaling {kind!r} is not supported; known: {', '.join(KINDS)}")
    original = scaling.get("original_max_position_embeddings", int, original)
    share = scaling.share("partial_rotary_factor", share)
    rope = RopeSpec(scaling.get("rope_theta", float, base), int(head_dim * share), kind=kind)
    if kind == "proportional":
        turned = 2 * int(share * head_dim / 2)
        factor = scaling.get("factor", float, 1.0)
        rope = replace(rope, dim=head_dim, turned=turned, factor=factor)
    elif kind == "longrope":
        rope = _longrope(scaling, replace(rope, original=original), context)
    elif not plain:
        rope = replace(rope, factor=scaling.get("factor", float))
    if kind == "llama3":
        low, high = scaling.get("low_freq_factor", float), scaling.get("high_freq_factor", float)
        rope = replace(rope, original=original, low=low, high=high)
    elif kind == "yarn":
        # a factor of the usual amplitude, by which DeepSeek's Qwen3 takes it back
        amplitude = _yarn_default(scaling, rope.factor) * scaling.get("attn_factor", float, 1.0)
        rope = replace(
            rope,
            original=original,
            low=scaling.get("beta_slow", float, 1.0),
            high=scaling.get("beta_fast", float, 32.0),
            amplitude=scaling.get("attention_factor", float, amplitude),
            truncate=scaling.get("truncate", bool, True),
        )
    if config.arch == "hunyuan_v1_dense" and kind == "dynamic":  # stretched whatever the length
        stretch = scaling.get("alpha", float, 1.0) ** (rope.dim / max(rope.dim - 2, 1))
        rope = replace(rope, base=rope.base * stretch)
        scaling.ignore("beta_* mscale*")
    if config.arch == "ministral3":
        scaling.ignore("llama_4_scaling_beta max_position_embeddings")
    scaling.ignore("mrope_*")  # positions of pictures: of text they are all the same
    scaling.done()
    return rope


_OLD_KINDS = {"su": "longrope"}  # of the first Phi-3 models


def _yarn_default(scaling: HFConfig, factor: float) -> float:
    """The amplitude where none is said; DeepSeek gives it to the scores, and takes it back here."""
    mscale, of_scores = scaling.get("mscale", float, 0.0), scaling.get("mscale_all_dim", float, 0.0)
    if mscale and of_scores:
        return yarn_amplitude(factor, mscale) / yarn_amplitude(factor, of_scores)
    return yarn_amplitude(factor)


def _longrope(scaling: HFConfig, rope: RopeSpec, context: int) -> RopeSpec:
    """Two lists of divisors, for contexts up to the original one and beyond it."""

    def divisors(key: str) -> tuple[float, ...]:
        values = scaling.raw(key)
        if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
            raise EngineFault(
                "config_invalid", f"rotary scaling 'longrope' needs {key}, a list of numbers"
            )
        if len(values) != rope.dim // 2:
            raise EngineFault(
                "model_invalid",
                f"{key} has {len(values)} numbers for {rope.dim // 2} pairs of rotary dimensions",
            )
        return tuple(float(v) for v in values)

    factor = scaling.get("factor", float, context / rope.original if rope.original > 0 else 1.0)
    amplitude = scaling.get("attention_factor", float, longrope_amplitude(factor, rope.original))
    return replace(
        rope, amplitude=amplitude, short=divisors("short_factor"), long=divisors("long_factor")
    )


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
        extra=1e-6 if config.arch == "lfm2_moe" else 0.0,
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
