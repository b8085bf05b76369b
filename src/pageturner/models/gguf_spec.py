"""From the metadata of a GGUF file to a spec.

Owns the keys of GGUF. Everything not understood is refused by name: a setting silently ignored gives wrong
answers. Must not know weights or backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageturner.errors import EngineFault
from pageturner.files.gguf import Array, GGUFFile
from pageturner.models.rope import RopeSpec, yarn_amplitude
from pageturner.models.spec import (
    FAMILIES,
    LARGEST,
    MOST_LAYERS,
    ExpertSpec,
    ModelSpec,
    check_spec,
    unsupported,
)


@dataclass(frozen=True, slots=True)
class _Arch:
    """An architecture of llama.cpp: our family, the order of rotary pairs, and which layers are windowed:
    those whose index + 1 is no multiple of `every`; 0: all of them if the file has a window."""

    family: str
    interleaved: bool = False
    every: int = 0


_ARCHES = {
    "llama": _Arch("llama", interleaved=True),
    "qwen2": _Arch("qwen2"),
    "qwen3": _Arch("qwen3"),
    "qwen3moe": _Arch("qwen3_moe"),
    "phi3": _Arch("phi3"),
    "gemma2": _Arch("gemma2", every=2),
    "gemma3": _Arch("gemma3", every=6),
    "gpt2": _Arch("gpt2"),
    "bloom": _Arch("bloom"),
}
# Keys behind "<arch>." whose value is used, or says nothing about the computation.
_UNDERSTOOD = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.scale",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "expert_count", "expert_used_count",
}  # fmt: skip
# The same, of some architectures only.
_ALSO = {
    "qwen3moe": {"expert_feed_forward_length"},
    "phi3": {"attention.sliding_window"},
    "gemma2": {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"attention.sliding_window", "rope.freq_base_swa"},
}
# Settings nobody here computes, by the value that turns them off.
_NEUTRAL = {
    "expert_shared_count": 0,
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


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """The spec of the model in a file. EngineFault 'model_unsupported' names what is not understood,
    'model_invalid' what makes no sense, 'gguf_metadata' what is missing."""
    arch = file.get("general.architecture", str)
    if arch not in _ARCHES:
        raise unsupported(f"model architecture {arch!r} is not supported; known: {', '.join(_ARCHES)}")
    _refuse_unknown(file, arch)
    return _KeyReader(file, arch).spec()


def _refuse_unknown(file: GGUFFile, arch: str) -> None:
    for full, value in file.metadata.items():
        prefix, _, key = full.partition(".")
        if prefix != arch or key in _UNDERSTOOD or key in _ALSO.get(arch, ()):
            continue
        if isinstance(value, Array) or key not in _NEUTRAL or value != _NEUTRAL[key]:
            shown = "an array" if isinstance(value, Array) else repr(value)
            raise unsupported(f"the model needs {full} = {shown}, which is not supported")


class _KeyReader:
    """The keys of one architecture."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch, self.known = file, arch, _ARCHES[arch]

    def size(self, key: str, default: int | None = None, most: int = LARGEST - 1) -> int:
        full = f"{self.arch}.{key}"
        value = self.file.get(full, int) if default is None else self.file.get(full, int, default)
        if not 0 < value <= most:
            raise EngineFault("model_invalid", f"{full} is {value}: it should be 1 to {most:,}")
        return value

    def number(self, key: str, default: float) -> float:
        return self.file.get(f"{self.arch}.{key}", float, default)

    def spec(self) -> ModelSpec:
        family = FAMILIES[self.known.family]
        layers = self.size("block_count", most=MOST_LAYERS)
        dim, heads = self.size("embedding_length"), self.size("attention.head_count")
        head_dim = self.size("attention.key_length", max(1, dim // heads))
        value_dim = self.size("attention.value_length", head_dim)
        if value_dim != head_dim:
            sizes = f"keys of {head_dim} and values of {value_dim} dimensions"
            raise EngineFault("model_invalid", f"the model file makes no sense: {sizes}")
        ffn = self.size("feed_forward_length")
        window = self.file.get(f"{self.arch}.attention.sliding_window", int, 0)
        gemma = self.arch.startswith("gemma")
        eps = "attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon"
        return check_spec(
            ModelSpec(
                arch=self.arch,
                name=self.file.get("general.name", str, ""),
                family=family,
                layers=layers,
                dim=dim,
                heads=heads,
                kv_heads=self.size("attention.head_count_kv", heads),
                head_dim=head_dim,
                ffn=ffn,
                vocab=_vocab(self.file),
                context=self.size("context_length"),
                eps=self.file.get(f"{self.arch}.{eps}", float),
                rope=self.rope(head_dim if family.positions == "rotary" else 0),
                tied="output.weight" not in self.file.tensors,
                attention_scale=self.number("attention.scale", self._scale(layers, dim, heads, head_dim)),
                window=window,
                windowed=_windowed(layers, self.known.every) if window else frozenset(),
                local_rope=self.local_rope(head_dim) if self.arch == "gemma3" else None,
                soft_cap=self.number("attn_logit_softcapping", 0.0),
                logit_soft_cap=self.number("final_logit_softcapping", 0.0),
                embed_scale=math.sqrt(dim) if gemma else 1.0,
                experts=self.experts(layers, ffn),
            )
        )

    def _scale(self, layers: int, dim: int, heads: int, head_dim: int) -> float:
        """Gemma's largest models scale by what a head would have if heads filled the model; the files do not
        say so, and llama.cpp knows them by their number of layers."""
        odd = (self.arch, layers) in (("gemma2", 46), ("gemma3", 62))
        return float((dim / heads if odd else head_dim) ** -0.5)

    def rope(self, dim: int) -> RopeSpec:
        kind = self.file.get(f"{self.arch}.rope.scaling.type", str, "none")
        if kind not in ("none", "linear", "yarn"):
            raise unsupported(f"rotary scaling {kind!r} is not supported; known: none, linear, yarn")
        factor = self.number("rope.scaling.factor", 1.0) if kind != "none" else 1.0
        base, interleaved = self.number("rope.freq_base", 10_000.0), self.known.interleaved
        dim = self.size("rope.dimension_count", dim) if dim else 0
        if kind == "yarn":
            original, amplitude = self.size("rope.scaling.original_context_length"), yarn_amplitude(factor)
            return RopeSpec(base, dim, factor, interleaved, kind, original, 1.0, 32.0, amplitude)
        return RopeSpec(base, dim, factor, interleaved)

    def local_rope(self, dim: int) -> RopeSpec:
        """Gemma 3's windowed layers: another base, never stretched."""
        return RopeSpec(self.number("rope.freq_base_swa", 10_000.0), dim)

    def experts(self, layers: int, ffn: int) -> ExpertSpec | None:
        count = self.file.get(f"{self.arch}.expert_count", int, 0)
        if not count:
            return None
        if self.arch not in ("llama", "qwen3moe"):
            raise unsupported(f"{self.arch}.expert_count = {count} is not supported")
        ffn = self.size("expert_feed_forward_length", ffn)
        return ExpertSpec(count, self.size("expert_used_count"), ffn, True, frozenset(range(layers)))


def _windowed(layers: int, every: int) -> frozenset[int]:
    return frozenset(i for i in range(layers) if not every or (i + 1) % every)


def _vocab(file: GGUFFile) -> int:
    """Rows of the embedding table, which are all the ids there are logits for."""
    info = file.tensors.get("token_embd.weight")
    if info is None:
        raise EngineFault("tensor_missing", f"{file.path} lacks the tensor 'token_embd.weight'")
    return info.shape[0]
