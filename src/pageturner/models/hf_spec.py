"""From the config.json of a Hugging Face folder to a spec.

Owns the keys of config.json, family by family. Every key must be used, or be known to say nothing about the
computation, or be null or false: anything else is refused by name, since a setting silently ignored gives
wrong answers. Must not know weights or backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pageturner.errors import EngineFault
from pageturner.models import hf_families as newer
from pageturner.models.hf_keys import DEFAULTS, PICTURES, QUANTISED
from pageturner.models.hf_llama import activation, llama_like
from pageturner.models.hf_values import HFConfig, Json
from pageturner.models.rope import RopeSpec
from pageturner.models.spec import (
    FAMILIES,
    MOST_LAYERS,
    ExpertSpec,
    Family,
    ModelSpec,
    check_spec,
    unsupported,
)


def read_hf_spec(values: Json, where: str, name: str, has_head: bool) -> ModelSpec:
    """The spec of a config.json.

    where     the file, for messages
    has_head  whether the weights have an output head: decides where the file does not say if it is tied
    EngineFault 'model_unsupported' names what is not understood, 'config_invalid' what is missing or of the
    wrong type, 'model_invalid' what makes no sense.
    """
    arch = HFConfig(values, where).get("model_type", str)
    if arch in ("gemma3", "llama4"):
        arch, values, where = f"{arch}_text", _text_part(values, where), f"{where}, text_config"
    reader = _READERS.get(arch)
    if reader is None:
        raise unsupported(f"model type {arch!r} is not supported; known: {', '.join(_READERS)}")
    config = HFConfig(DEFAULTS.get(arch, {}) | values, where)
    for key in QUANTISED:  # how weights lie in their files
        config.raw(key)
    spec = reader(config, arch, name)
    tied = config.get("tie_word_embeddings", bool, not has_head)
    config.done()
    return check_spec(replace(spec, tied=tied))


def _text_part(values: Json, where: str) -> Json:
    """What a model with a vision tower does with text: an object within. Whether the head is tied may be said
    outside of it."""
    outer = HFConfig(values, where)
    text = outer.raw("text_config")
    if not isinstance(text, dict):
        raise EngineFault(
            "config_invalid", f"{where}: text_config should be an object, not {text!r}"
        )
    for key in (*PICTURES, *QUANTISED):
        outer.raw(key)
    tied = outer.raw("tie_word_embeddings")
    outer.done()
    return ({} if tied is None else {"tie_word_embeddings": tied}) | text


# -- Llama and those who follow it ---------------------------------------------------------------------------


def _phi3(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = llama_like(config, arch, name)
    for key, wanted in (("attention_bias", False), ("full_attn_mod", 1), ("interpolate_factor", 1)):
        config.expect(key, wanted)  # the last two: of Phi-4-mini
    return spec


def _gemma(config: HFConfig, arch: str, name: str) -> ModelSpec:
    arch = "gemma3" if arch == "gemma3_text" else arch
    config.expect("sliding_window_size", config.raw("sliding_window"))  # said twice in some files
    config.raw("hidden_act")  # says "gelu" in old files, and is not what decides
    spec = llama_like(config, arch, name)
    act = activation(config.get("hidden_activation", str, "gelu_pytorch_tanh"))
    return replace(
        spec,
        family=replace(spec.family, act=act),
        attention_scale=config.size("query_pre_attn_scalar", spec.head_dim) ** -0.5,
        soft_cap=config.get("attn_logit_softcapping", float, 0.0),
        logit_soft_cap=config.get("final_logit_softcapping", float, 0.0),
        embed_scale=spec.dim**0.5,
    )


def _mixtral(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = llama_like(config, arch, name)
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    every = frozenset(range(spec.layers))
    return replace(spec, experts=ExpertSpec(count, top_k, spec.ffn, True, every))


def _qwen3_moe(config: HFConfig, arch: str, name: str) -> ModelSpec:
    spec = llama_like(config, arch, name)
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


# -- GPT-2 and those who follow it ---------------------------------------------------------------------------


def _gpt_like(
    config: HFConfig,
    arch: str,
    name: str,
    sizes: tuple[int, int, int, int],
    context: int,
    eps: float,
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
    act = activation(config.get("activation_function", str, "gelu_new"))
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
    act = activation(config.get("activation_function", str, "relu"))
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
    "llama": llama_like,
    "mistral": llama_like,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": llama_like,
    "qwen3": llama_like,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
} | newer.READERS
