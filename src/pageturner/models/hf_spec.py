"""From the config.json of a Hugging Face folder to a spec.

Owns the keys of config.json, family by family. Every key must be used, or be known to say nothing about the
computation, or be null or false: anything else is refused by name, since a setting silently ignored gives
wrong answers. Must not know weights or backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, overload

from pageturner.errors import EngineFault
from pageturner.models.hf_keys import DEFAULTS, DROPOUT, HARMLESS, PICTURES
from pageturner.models.rope import KINDS, RopeSpec, yarn_amplitude
from pageturner.models.spec import (
    FAMILIES,
    LARGEST,
    MOST_LAYERS,
    ExpertSpec,
    Family,
    ModelSpec,
    check_spec,
    unsupported,
)

Value = TypeVar("Value", int, float, bool, str)
Json = dict[str, Any]

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


class HFConfig:
    """config.json, which remembers what was asked of it."""

    def __init__(self, values: Json, where: str) -> None:
        self._values, self._where = values, where
        self._used: set[str] = set()

    def raw(self, key: str) -> Any:
        """Any value, None if absent."""
        self._used.add(key)
        return self._values.get(key)

    @overload
    def get(self, key: str, kind: type[Value]) -> Value: ...
    @overload
    def get(self, key: str, kind: type[Value], default: Value) -> Value: ...
    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """A scalar; null is absent. EngineFault('config_invalid') if it is missing or of another type."""
        value = self.raw(key)
        value = default if value is None else value
        if value is None:
            raise EngineFault("config_invalid", f"{self._where} lacks {key!r}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            message = f"{self._where}: {key} should be of type {kind.__name__}, not {value!r}"
            raise EngineFault("config_invalid", message)
        return value

    def size(self, key: str, default: int | None = None, most: int = LARGEST - 1) -> int:
        """A positive int of at most `most`."""
        value = self.get(key, int) if default is None else self.get(key, int, default)
        if not 0 < value <= most:
            raise EngineFault("model_invalid", f"{self._where}: {key} is {value}: it should be 1 to {most:,}")
        return value

    def share(self, key: str, default: float) -> float:
        """A part of a whole: 0 to 1."""
        value = self.get(key, float, default)
        if not 0 <= value <= 1:
            raise EngineFault("model_invalid", f"{self._where}: {key} is {value}")
        return value

    def section(self, key: str) -> HFConfig | None:
        """An object within, None if absent or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise EngineFault("config_invalid", f"{self._where}: {key} should be an object, not {value!r}")
        return HFConfig(value, f"{self._where}, {key}")

    def expect(self, key: str, wanted: object) -> None:
        """EngineFault('model_unsupported') if the key is there with another value."""
        value = self.raw(key)
        if value is not None and value != wanted:
            raise unsupported(f"{self._where} sets {key} = {value!r}; only {wanted!r} is supported")

    def done(self) -> None:
        """EngineFault('model_unsupported') if something was set that nobody asked for."""
        for key, value in self._values.items():
            ignored = key in self._used or key in HARMLESS or key.startswith("_") or key.endswith(DROPOUT)
            if not ignored and value is not None and value is not False:
                raise unsupported(f"{self._where} sets {key} = {value!r}, which is not supported")


def read_hf_spec(values: Json, where: str, name: str, has_head: bool) -> ModelSpec:
    """The spec of a config.json.

    where     the file, for messages
    has_head  whether the weights have an output head: decides where the file does not say if it is tied
    EngineFault 'model_unsupported' names what is not understood, 'config_invalid' what is missing or of the
    wrong type, 'model_invalid' what makes no sense.
    """
    arch = HFConfig(values, where).get("model_type", str)
    if arch == "gemma3":
        arch, values, where = "gemma3_text", _text_part(values, where), f"{where}, text_config"
    reader = _READERS.get(arch)
    if reader is None:
        raise unsupported(f"model type {arch!r} is not supported; known: {', '.join(_READERS)}")
    _refuse_quantised(values, where)
    config = HFConfig(DEFAULTS.get(arch, {}) | values, where)
    spec = reader(config, arch, name)
    tied = config.get("tie_word_embeddings", bool, not has_head)
    config.done()
    return check_spec(replace(spec, tied=tied))


def _refuse_quantised(values: Json, where: str) -> None:
    said = values.get("quantization_config")
    if said:
        method = said.get("quant_method") if isinstance(said, dict) else None
        raise unsupported(
            f"{where} has a quantization_config: weights quantised by {method or 'an unknown method'} are not"
            " supported; use the unquantised model, with --quantization int8 or int4, or a GGUF"
            " file of it"
        )


def _text_part(values: Json, where: str) -> Json:
    """What Gemma 3 with a vision tower does with text: an object within. Whether the head is tied may be said
    outside of it."""
    outer = HFConfig(values, where)
    text = outer.raw("text_config")
    if not isinstance(text, dict):
        raise EngineFault("config_invalid", f"{where}: text_config should be an object, not {text!r}")
    for key in PICTURES:
        outer.raw(key)
    tied = outer.raw("tie_word_embeddings")
    outer.done()
    return ({} if tied is None else {"tie_word_embeddings": tied}) | text


# -- Llama and those who follow it ---------------------------------------------------------------------------


def _llama_like(config: HFConfig, arch: str, name: str) -> ModelSpec:
    """The keys that all of these share; every family adds its own."""
    dim, heads = config.size("hidden_size"), config.size("num_attention_heads")
    layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    head_dim = config.size("head_dim", max(1, dim // heads))
    act = config.get("hidden_act", str, "silu")
    config.expect("mlp_bias", False)
    family = replace(FAMILIES[arch], act=_act(config.get("hidden_activation", str, act)))
    if arch not in ("qwen2", "phi3") and config.get("attention_bias", bool, False):
        family = replace(family, qkv_bias=True, o_bias=True)
    window, windowed = window_layers(config, arch, layers)
    local, rope = _ropes(config, head_dim)
    context = config.size("max_position_embeddings")
    if rope.kind == "yarn" and 0 < rope.factor < LARGEST:  # files name it before or behind the stretching
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
        ffn=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        context=context,
        eps=config.get("rms_norm_eps", float),
        rope=rope,
        tied=False,
        attention_scale=head_dim**-0.5,
        window=window,
        windowed=windowed,
        local_rope=local,
    )


def _act(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise unsupported(f"activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def window_layers(config: HFConfig, arch: str, layers: int) -> tuple[int, frozenset[int]]:
    """The window and the layers that have it: as listed, else by the habit of the family."""
    window = config.get("sliding_window", int, 0)
    if not config.get("use_sliding_window", bool, not arch.startswith("qwen")):
        window = 0
    kinds = config.raw("layer_types")
    if kinds is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise unsupported(f"layer_types should name {' or '.join(known)} for each of {layers} layers")
        windowed = [i for i in range(layers) if kinds[i] == "sliding_attention"]
    elif arch.startswith("gemma"):
        every = config.size("sliding_window_pattern", 2 if arch == "gemma2" else 6)
        windowed = [i for i in range(layers) if (i + 1) % every]
    else:
        first = config.get("max_window_layers", int, 0) if arch.startswith("qwen") else 0
        windowed = list(range(max(first, 0), layers))
    return window, frozenset(windowed) if window else frozenset()


def _ropes(config: HFConfig, head_dim: int) -> tuple[RopeSpec | None, RopeSpec]:
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
        return _rope(local, base, share, head_dim, original), _rope(full, base, share, head_dim, original)
    local_rope = RopeSpec(local_base, int(head_dim * share)) if local_base else None
    return local_rope, _rope(scaling, base, share, head_dim, original)


def _rope(scaling: HFConfig | None, base: float, share: float, head_dim: int, original: int) -> RopeSpec:
    if scaling is None:
        return RopeSpec(base, int(head_dim * share))
    kind = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    plain = kind == "default"
    kind = "linear" if plain else kind  # by a factor of 1
    if kind not in KINDS:
        raise unsupported(f"rotary scaling {kind!r} is not supported; known: {', '.join(KINDS)}")
    base = scaling.get("rope_theta", float, base)
    dim = int(head_dim * scaling.share("partial_rotary_factor", share))
    factor = 1.0 if plain else scaling.get("factor", float)
    rope = RopeSpec(base, dim, factor, kind=kind)
    original = scaling.get("original_max_position_embeddings", int, original)
    if kind == "llama3":
        low, high = scaling.get("low_freq_factor", float), scaling.get("high_freq_factor", float)
        rope = replace(rope, original=original, low=low, high=high)
    elif kind == "yarn":
        rope = replace(
            rope,
            original=original,
            low=scaling.get("beta_slow", float, 1.0),
            high=scaling.get("beta_fast", float, 32.0),
            amplitude=scaling.get("attention_factor", float, yarn_amplitude(factor)),
            truncate=scaling.get("truncate", bool, True),
        )
    scaling.done()
    return rope


def _phi3(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = _llama_like(config, arch, name)
    config.expect("attention_bias", False)
    return spec


def _gemma(config: HFConfig, arch: str, name: str) -> ModelSpec:
    arch = "gemma3" if arch == "gemma3_text" else arch
    config.expect("sliding_window_size", config.raw("sliding_window"))  # said twice in some files
    config.raw("hidden_act")  # says "gelu" in old files, and is not what decides
    spec = _llama_like(config, arch, name)
    act = _act(config.get("hidden_activation", str, "gelu_pytorch_tanh"))
    return replace(
        spec,
        family=replace(spec.family, act=act),
        attention_scale=config.size("query_pre_attn_scalar", spec.head_dim) ** -0.5,
        soft_cap=config.get("attn_logit_softcapping", float, 0.0),
        logit_soft_cap=config.get("final_logit_softcapping", float, 0.0),
        embed_scale=spec.dim**0.5,
    )


def _mixtral(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = _llama_like(config, arch, name)
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    every = frozenset(range(spec.layers))
    return replace(spec, experts=ExpertSpec(count, top_k, spec.ffn, True, every))


def _qwen3_moe(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = _llama_like(config, arch, name)
    step, dense = config.size("decoder_sparse_step", 1), config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise EngineFault("config_invalid", f"mlp_only_layers should be numbers of layers, not {dense!r}")
    dense = frozenset(dense)
    experts = ExpertSpec(
        config.size("num_local_experts" if config.raw("num_experts") is None else "num_experts"),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        config.get("norm_topk_prob", bool, False),
        frozenset(i for i in range(spec.layers) if i not in dense and (i + 1) % step == 0),
    )
    return replace(spec, experts=experts)


# -- GPT-2 and those who follow it ---------------------------------------------------------------------------


def _gpt_like(
    config: HFConfig, arch: str, name: str, sizes: tuple[int, int, int, int], context: int, eps: float
) -> ModelSpec:
    """`sizes`: layers, width, heads, inner width of the MLP."""
    layers, dim, heads, ffn = sizes
    if dim % heads:
        raise EngineFault("model_invalid", f"{heads} heads do not fill a width of {dim}")
    family: Family = FAMILIES[arch]
    head_dim = dim // heads
    return ModelSpec(
        arch=arch,
        name=name,
        family=family,
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=config.size("vocab_size"),
        context=context,
        eps=eps,
        rope=RopeSpec(10_000.0, 0),
        tied=True,
        attention_scale=head_dim**-0.5,
    )


def _gpt2(config: HFConfig, arch: str, name: str) -> ModelSpec:
    dim = config.size("n_embd")
    sizes = (
        config.size("n_layer", most=MOST_LAYERS),
        dim,
        config.size("n_head"),
        config.size("n_inner", 4 * dim),
    )
    config.expect("scale_attn_weights", True)
    eps = config.get("layer_norm_epsilon", float, 1e-5)
    spec = _gpt_like(config, arch, name, sizes, config.size("n_positions"), eps)
    act = _act(config.get("activation_function", str, "gelu_new"))
    return replace(spec, family=replace(spec.family, act=act))


def _opt(config: HFConfig, arch: str, name: str) -> ModelSpec:
    dim = config.size("hidden_size")
    heads, ffn = config.size("num_attention_heads"), config.size("ffn_dim")
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if not config.get(key, bool, True):  # OPT-350m, and the Galactica models
            raise unsupported(f"OPT with {key} = false is not supported")
    config.expect("word_embed_proj_dim", dim)
    config.expect("_remove_final_layer_norm", False)
    sizes = config.size("num_hidden_layers", most=MOST_LAYERS), dim, heads, ffn
    spec = _gpt_like(config, arch, name, sizes, config.size("max_position_embeddings"), 1e-5)
    act = _act(config.get("activation_function", str, "relu"))
    return replace(spec, family=replace(spec.family, act=act))


def _bloom(config: HFConfig, arch: str, name: str) -> ModelSpec:
    """ALiBi knows no longest context; the training length is taken where the file names it."""
    dim = config.size("hidden_size", config.get("n_embed", int, 0) or None)
    layers = config.size("n_layer", config.get("num_hidden_layers", int, 0) or None)
    heads = config.size("n_head", config.get("num_attention_heads", int, 0) or None)
    config.raw("offset_alibi")  # a shift of all scores, which changes nothing
    sizes, eps = (layers, dim, heads, 4 * dim), config.get("layer_norm_epsilon", float, 1e-5)
    return _gpt_like(config, arch, name, sizes, config.size("seq_length", 2048), eps)


_READERS: dict[str, Callable[[HFConfig, str, str], ModelSpec]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
}
