"""The keys of config.json that Llama and all who follow it share: sizes, windows, rotary embedding.

Owns what these keys mean. Must not know which families there are beyond that, weights or backends.
"""

from __future__ import annotations

from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.models.hf_values import HFConfig
from pageturner.models.rope import KINDS, RopeSpec, longrope_amplitude, yarn_amplitude
from pageturner.models.spec import FAMILIES, LARGEST, MOST_LAYERS, ModelSpec, unsupported

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
_EVERY = {"gemma2": 2, "olmo3": 4, "gpt_oss": 2}
_CHUNKS = ("attention_chunk_size", "chunked_attention")


def llama_like(
    config: HFConfig,
    arch: str,
    name: str,
    *,
    ffn: str = "intermediate_size",
    head_dim: int = 0,
    eps: str = "rms_norm_eps",
) -> ModelSpec:
    """The keys that all of these share; every family adds its own.

    ffn, eps  what two keys are called
    head_dim  of the rotary embedding and the rest; 0: as the file says
    """
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    said = config.size("head_dim", max(1, dim // heads))
    head_dim = head_dim or said
    act = config.get("hidden_act", str, "silu")
    config.expect("mlp_bias", False)
    family = replace(FAMILIES[arch], act=activation(config.get("hidden_activation", str, act)))
    if arch not in ("qwen2", "phi3") and config.get("attention_bias", bool, False):
        family = replace(family, qkv_bias=True, o_bias=True)
    window, windowed = window_layers(config, arch, layers)
    local, rope = _ropes(config, arch, head_dim)
    context = config.size("max_position_embeddings")
    if (
        rope.kind == "yarn" and 0 < rope.factor < LARGEST
    ):  # files name it before or behind the stretching
        context = max(context, int(rope.original * rope.factor))
    return ModelSpec(
        arch=arch,
        name=name,
        family=family,
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=config.size(ffn),
        vocab=config.size("vocab_size"),
        context=context,
        eps=config.get(eps, float),
        rope=rope,
        tied=False,
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
    """The layers without rotary embedding: those that are listed as 0, else every fourth, or as many as the
    file says. EngineFault('model_invalid') for a list of another length, or of other numbers."""
    every, listed = config.size("no_rope_layer_interval", 4), config.raw("no_rope_layers")
    if not listed:
        return frozenset(i for i in range(layers) if (i + 1) % every == 0)
    flags = isinstance(listed, list) and all(
        type(flag) in (int, bool) and flag in (0, 1) for flag in listed
    )
    if not flags or len(listed) != layers:
        message = f"no_rope_layers should have a 0 or a 1 for each of {layers} layers, not {str(listed)[:80]}"
        raise EngineFault("model_invalid", message)
    return frozenset(i for i in range(layers) if not listed[i])


def window_layers(config: HFConfig, arch: str, layers: int) -> tuple[int, frozenset[int]]:
    """The window and the layers that have it: as listed, else by the habit of the family."""
    key, windowed_kind = (
        _CHUNKS if arch == "llama4_text" else ("sliding_window", "sliding_attention")
    )
    window = config.get(key, int, 0)
    if not config.get("use_sliding_window", bool, not arch.startswith("qwen")):
        window = 0
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
        first = config.get("max_window_layers", int, 0) if arch.startswith("qwen") else 0
        windowed = list(range(max(first, 0), layers))
    return window, frozenset(windowed) if window else frozenset()


def _ropes(config: HFConfig, arch: str, head_dim: int) -> tuple[RopeSpec | None, RopeSpec]:
    """The rotary embeddings of the windowed layers, where it is another one, and of all others."""
    base = config.get("rope_theta", float, 10_000.0)
    share = config.share("partial_rotary_factor", 1.0)
    local_base = config.get("rope_local_base_freq", float, 0.0)
    scaling = config.section("rope_parameters")
    if scaling is None:
        scaling = config.section("rope_scaling")
    context = config.size("max_position_embeddings")
    original = config.get("original_max_position_embeddings", int, context)
    if scaling is not None and scaling.raw("full_attention") is not None:
        full, local = scaling.section("full_attention"), scaling.section("sliding_attention")
        sizes = base, share, head_dim, original, context
        return _rope(local, *sizes), _rope(full, *sizes)
    rope = _rope(scaling, base, share, head_dim, original, context)
    if local_base:
        return RopeSpec(local_base, int(head_dim * share)), rope
    plain = RopeSpec(rope.base, rope.dim)  # OLMo 3 stretches the layers without a window only
    return (plain if arch == "olmo3" and rope != plain else None), rope


def _rope(
    scaling: HFConfig | None, base: float, share: float, head_dim: int, original: int, context: int
) -> RopeSpec:
    if scaling is None:
        return RopeSpec(base, int(head_dim * share))
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    plain = kind == "default"
    kind = "linear" if plain else _OLD_KINDS.get(kind, kind)  # plain: by a factor of 1
    if kind not in KINDS:
        raise unsupported(f"rotary scaling {kind!r} is not supported; known: {', '.join(KINDS)}")
    base = scaling.get("rope_theta", float, base)
    dim = int(head_dim * scaling.share("partial_rotary_factor", share))
    original = scaling.get("original_max_position_embeddings", int, original)
    if kind == "longrope":
        rope = _longrope(scaling, RopeSpec(base, dim, kind=kind, original=original), context)
        scaling.done()
        return rope
    factor = 1.0 if plain else scaling.get("factor", float)
    rope = RopeSpec(base, dim, factor, kind=kind)
    if kind == "llama3":
        low, high = scaling.get("low_freq_factor", float), scaling.get("high_freq_factor", float)
        rope = replace(rope, original=original, low=low, high=high)
    elif kind == "yarn":
        rope = replace(
            rope,
            original=original,
            low=scaling.get("beta_slow", float, 1.0),
            high=scaling.get("beta_fast", float, 32.0),
            amplitude=scaling.get("attention_factor", float, _yarn_default(scaling, factor)),
            truncate=scaling.get("truncate", bool, True),
        )
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
            message = (
                f"{key} has {len(values)} numbers for {rope.dim // 2} pairs of rotary dimensions"
            )
            raise EngineFault("model_invalid", message)
        return tuple(float(v) for v in values)

    factor = scaling.get("factor", float, context / rope.original if rope.original > 0 else 1.0)
    amplitude = scaling.get("attention_factor", float, longrope_amplitude(factor, rope.original))
    return replace(
        rope, amplitude=amplitude, short=divisors("short_factor"), long=divisors("long_factor")
    )
