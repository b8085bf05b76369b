"""What a model is, as data, read from the metadata of its file.

Owns which architectures, rotary kinds and settings are understood. Everything else is refused by name: a
setting silently ignored gives wrong answers. Must not know weights or backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageturner.errors import EngineFault
from pageturner.files.gguf import Array, GGUFFile
from pageturner.kernels.base import F32, AttentionShape, Rope


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes for all its models. `interleaved` as in kernels.base.Rope."""

    interleaved: bool
    qk_norm: bool
    qkv_bias: bool


FAMILIES = {
    "llama": Family(interleaved=True, qk_norm=False, qkv_bias=False),
    "qwen2": Family(interleaved=False, qk_norm=False, qkv_bias=True),
    "qwen3": Family(interleaved=False, qk_norm=True, qkv_bias=False),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dim` dimensions of a head, at position / factor (linear)."""

    base: float
    dim: int
    factor: float
    interleaved: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder model. Sizes in elements, `context` in tokens.

    tied  the output head is the embedding table
    """

    arch: str
    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    eps: float
    rope: RopeSpec
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    attention_scale: float

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.attention_scale)


# Keys behind "<arch>." whose value is used, or says nothing about the computation.
_UNDERSTOOD = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
}
# Settings nobody here computes, by the value that turns them off.
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "rope.scale_linear": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
_LARGEST = 1 << 31  # a size beyond this is a broken file, and would not fit the kernels' int32
_LONGEST = 1 << 22  # tokens; more than any model here was made for, and its rotary tables still fit


def read_spec(file: GGUFFile) -> ModelSpec:
    """The spec of the model in a file. EngineFault 'model_unsupported' names what is not understood,
    'model_invalid' what makes no sense, 'gguf_metadata' what is missing."""
    arch = file.get("general.architecture", str)
    if arch not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise EngineFault(
            "model_unsupported", f"model architecture {arch!r} is not supported; known: {known}"
        )
    family = FAMILIES[arch]
    _refuse_unknown(file, arch)

    def size(key: str, default: int | None = None) -> int:
        value = file.get(f"{arch}.{key}", int) if default is None else file.get(f"{arch}.{key}", int, default)
        if not 0 < value < _LARGEST:
            raise EngineFault("model_invalid", f"{arch}.{key} is {value}")
        return value

    dim, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", max(1, dim // heads))
    spec = ModelSpec(
        arch=arch,
        name=file.get("general.name", str, ""),
        layers=size("block_count"),
        dim=dim,
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=size("feed_forward_length"),
        vocab=_vocab(file),
        context=size("context_length"),
        eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope=_rope(file, arch, size("rope.dimension_count", head_dim), family),
        tied="output.weight" not in file.tensors,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        attention_scale=file.get(f"{arch}.attention.scale", float, head_dim**-0.5),
    )
    _check(spec, size("attention.value_length", head_dim))
    return spec


def _refuse_unknown(file: GGUFFile, arch: str) -> None:
    for full, value in file.metadata.items():
        prefix, _, key = full.partition(".")
        if prefix != arch or key in _UNDERSTOOD:
            continue
        if isinstance(value, Array) or key not in _NEUTRAL or value != _NEUTRAL[key]:
            shown = "an array" if isinstance(value, Array) else repr(value)
            raise EngineFault(
                "model_unsupported", f"the model needs {full} = {shown}, which is not supported"
            )


def _vocab(file: GGUFFile) -> int:
    """Rows of the embedding table, which are all the ids there are logits for."""
    info = file.tensors.get("token_embd.weight")
    if info is None:
        raise EngineFault("tensor_missing", f"{file.path} lacks the tensor 'token_embd.weight'")
    return info.shape[0]


def _rope(file: GGUFFile, arch: str, dim: int, family: Family) -> RopeSpec:
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        message = f"rotary scaling {kind!r} is not supported; known: none, linear"
        raise EngineFault("model_unsupported", message)
    factor = file.get(f"{arch}.rope.scaling.factor", float, 1.0) if kind == "linear" else 1.0
    return RopeSpec(file.get(f"{arch}.rope.freq_base", float, 10_000.0), dim, factor, family.interleaved)


def _check(spec: ModelSpec, value_length: int) -> None:
    """What the kernels take for granted."""
    rope = spec.rope
    problems = {
        f"{spec.heads} heads do not share {spec.kv_heads} KV heads evenly": spec.heads % spec.kv_heads,
        f"keys of {spec.head_dim} and values of {value_length} dimensions": value_length != spec.head_dim,
        f"rotary dimension {rope.dim} of {spec.head_dim}": rope.dim % 2 or rope.dim > spec.head_dim,
        f"rotary base {rope.base}": not 0 < rope.base < float("inf"),
        f"rotary factor {rope.factor}": not 0 < rope.factor < float("inf"),
        f"norm epsilon {spec.eps}": not 0 <= spec.eps < 1,
        f"context of {spec.context} tokens": spec.context > _LONGEST,
        f"attention scale {spec.attention_scale}": not 0 < spec.attention_scale < float("inf"),
    }
    for problem, found in problems.items():
        if found:
            raise EngineFault("model_invalid", f"the model file makes no sense: {problem}")


def rope_tables(spec: RopeSpec, positions: int, divisors: F32 | None = None) -> Rope:
    """cos and sin of position * base^(-2i/dim) / factor / divisors[i], computed in fp64 and rounded once.

    divisors  [dim/2], from the tensor `rope_freqs.weight` of Llama 3.1 and later
    """
    inverse = spec.base ** -(np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim) / spec.factor
    if divisors is not None:
        inverse = inverse / divisors
    angles = np.outer(np.arange(positions, dtype=np.float64), inverse)
    return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), spec.interleaved)
