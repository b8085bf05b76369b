"""Reads a spec from the metadata of a GGUF file.

Owns the keys of GGUF. Everything not understood is refused by name: a setting silently ignored
gives wrong answers. Must not know weights or backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pageturner.errors import EngineFault
from pageturner.formats.gguf import Array, GGUFFile
from pageturner.kernels.layer_parts import SCORINGS
from pageturner.models.rope import LONG_DIVISORS, SHORT_DIVISORS, RopeSpec, yarn_amplitude
from pageturner.models.spec import (
    FAMILIES,
    LARGEST,
    LONGEST,
    MAX_LAYERS,
    ExpertSpec,
    Family,
    LatentSpec,
    LinearSpec,
    ModelSpec,
    Temper,
    check_spec,
    turns_nothing_on,
    unsupported,
)
from pageturner.models.tables import table


@dataclass(frozen=True, slots=True)
class _Arch:
    """An architecture of llama.cpp: our family, the order of rotary pairs, and which layers are
    windowed: those whose index + 1 is no multiple of `every`; 0: all of them if the file has a
    window. Those whose index + 1 is a multiple of `plain` have no rotary embedding; 0: all have
    it; -1: those without a window have none, where others have one.

    experts  there may be some, whose weights are "normalised" or "raw" if the file does not say
    scoring  of the experts, if the file does not say
    recurrent  the kind of the layers that are recurrent (LinearSpec.kind)
    keys     behind "<arch>." that are understood beside _UNDERSTOOD; Granite's dense models are
             written as if they had Mamba layers and experts
    """

    family: str
    interleaved: bool = False
    every: int = 0
    plain: int = 0
    experts: str = ""
    scoring: str = "softmax"
    recurrent: str = ""
    keys: str = ""


_ARCHES = {arch: _Arch(**row) for arch, row in table("gguf_arches").items()}
# Keys behind "<arch>." whose value is used, or says nothing about the computation.
_UNDERSTOOD = """
        block_count context_length embedding_length feed_forward_length vocab_size
        attention.head_count attention.head_count_kv attention.key_length attention.value_length
        attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.scale
        rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
        rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.yarn_beta_fast
        rope.scaling.yarn_beta_slow rope.scaling.yarn_attn_factor expert_count expert_used_count
        pooling_type tensor_data_layout
"""
_EXPERTS = """
        expert_feed_forward_length expert_shared_count expert_shared_feed_forward_length
        expert_weights_scale expert_weights_norm expert_gating_func expert_group_count
        expert_group_used_count leading_dense_block_count interleave_moe_layer_step
        nextn_predict_layers
"""
# Settings nobody here computes, by the value that turns them off where that is not 0 (a factor: 1).
_NEUTRAL = {
    "attention.causal": True,
    "rope.scaling.yarn_log_multiplier": 0,
    "expert_gating_func": 1,  # softmax
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """The spec of the model in a file. EngineFault 'model_unsupported' names what is not
    understood, 'model_invalid' what makes no sense, 'gguf_metadata' what is missing."""
    arch = file.get("general.architecture", str)
    if arch not in _ARCHES:
        raise unsupported(
            f"model architecture {arch!r} is not supported; known: {', '.join(_ARCHES)}"
        )
    _refuse_unknown(file, arch)
    return _KeyReader(file, arch).spec()


def _refuse_unknown(file: GGUFFile, arch: str) -> None:
    understood = f"{_UNDERSTOOD} {_ARCHES[arch].keys}".split()
    if _ARCHES[arch].experts and file.get(f"{arch}.expert_count", int, 0):
        understood += _EXPERTS.split()
    for full, value in file.metadata.items():
        prefix, _, key = full.partition(".")
        if prefix != arch or key in understood:
            continue
        if key in _NEUTRAL and not isinstance(value, Array):
            off = value == _NEUTRAL[key]
        elif isinstance(value, Array):
            off = len(value) <= MAX_LAYERS and not any(value.tolist())
        elif key == "attention.sliding_window":  # that is never left
            off = isinstance(value, int) and not 0 < value < file.get(f"{arch}.context_length", int)
        else:
            off = turns_nothing_on(key, value)
        if not off:
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

    def said(self, key: str) -> Any:
        """Return what the file says, of any type; None: nothing."""
        return self.file.metadata.get(f"{self.arch}.{key}")

    def whole(self, key: str) -> int:
        return self.file.get(f"{self.arch}.{key}", int, 0)

    def number(self, key: str, default: float) -> float:
        return self.file.get(f"{self.arch}.{key}", float, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get(f"{self.arch}.{key}", bool, default)

    def spec(self) -> ModelSpec:
        family = FAMILIES[self.known.family]
        # those behind the last predict a second token
        layers = self.size("block_count", most=MAX_LAYERS) - self.whole("nextn_predict_layers")
        dim, heads = self.size("embedding_length"), self.size("attention.head_count")
        latent = self.latent()
        head_dim = self.size("attention.key_length", max(1, dim // heads))
        value_dim = self.size("attention.value_length", head_dim)
        if value_dim != head_dim and latent is None:
            sizes = f"keys of {head_dim} and values of {value_dim} dimensions"
            raise EngineFault("model_invalid", f"the model file makes no sense: {sizes}")
        window, windowed = self.windows(layers)
        eps = (
            "attention.layer_norm_epsilon"
            if family.layer_norm
            else "attention.layer_norm_rms_epsilon"
        )
        if self.arch.startswith("nemotron") and self.said(eps) is None:
            eps = "attention.layer_norm_epsilon"
        experts = self.experts(layers)
        ffn = self.by_layer("feed_forward_length", layers, experts.ffn if experts else None)
        rope = self.rope(self._rotary(family, latent, head_dim))
        spec = ModelSpec(
            arch=self.arch,
            name=self.file.get("general.name", str, ""),
            family=family,
            layers=layers,
            dim=dim,
            heads=heads,
            kv_heads=self.kv_heads(heads, layers),
            head_dim=head_dim,
            ffn=ffn[0],
            vocab=_vocab(self.file),
            context=self.size("context_length"),
            eps=self.file.get(f"{self.arch}.{eps}", float),
            rope=rope,
            tied="output.weight" not in self.file.tensors,
            attention_scale=self.number(
                "attention.scale", self._scale(layers, dim, heads, head_dim)
            ),
            window=window,
            windowed=windowed,
            local_rope=self.local_rope(rope, head_dim),
            soft_cap=self.number("attn_logit_softcapping", 0.0),
            logit_soft_cap=self.number("final_logit_softcapping", 0.0),
            embed_scale=math.sqrt(dim) if self.arch.startswith("gemma") else 1.0,
            experts=experts,
            no_rope=self.no_rope(layers),
        )
        return check_spec(self.beyond(spec, latent))

    def beyond(self, spec: ModelSpec, latent: LatentSpec | None) -> ModelSpec:
        """The spec with what only some architectures have."""
        if latent is not None:
            factor, log = spec.rope.factor, self.number("rope.scaling.yarn_log_multiplier", 0.0)
            sharper = 1 + log * math.log(factor) if factor > 1 else 1.0
            scale = (latent.nope + latent.rotary) ** -0.5 * sharper**2
            whole = latent.rank + latent.rotary
            return replace(spec, latent=latent, attention_scale=scale, kv_heads=1, head_dim=whole)
        if self.known.recurrent == "delta":
            return replace(spec, linear=self.linear(spec.layers))
        if self.known.recurrent:
            spec = self.hybrid(spec)
        said = self.file.tensors.keys()
        if self.arch == "gemma4":
            return self.gemma4(spec)
        if self.arch == "cohere2":
            return replace(spec, logit_scale=self.number("logit_scale", 1.0))
        if self.arch == "glm4moe" and "blk.0.attn_q_norm.weight" in said:
            return replace(spec, family=replace(spec.family, qk_norm="head"))
        if self.arch == "stablelm":
            family = replace(spec.family, parallel="blk.0.ffn_norm.weight" not in said)
            if "blk.0.attn_q_norm.weight" in said:
                family = replace(family, qk_norm="own")
            return replace(spec, family=family)
        if self.arch == "baichuan" and spec.layers == 40:  # which is how llama.cpp knows it
            return spec.with_alibi()
        scale = self.number("attention.temperature_scale", 0.0)
        if self.arch == "mistral3" and scale:
            return replace(spec, attn_temperature=Temper(spec.rope.original, scale, first=0))
        if self.arch in ("granite", "granitehybrid"):
            divisor = self.number("logit_scale", 1.0)
            rotary = self.flag("rope.scaling.finetuned", True)
            residual = self.number("residual_scale", 1.0)
            return replace(
                spec,
                embed_scale=self.number("embedding_scale", 1.0),
                residual=residual,
                experts=spec.experts and replace(spec.experts, scale=residual),
                logit_scale=1 / divisor if divisor else 0.0,
                no_rope=frozenset() if rotary else frozenset(range(spec.layers)),
            )
        if (
            self.arch == "llama4"
        ):  # llama.cpp has no keys for these: they are those of all such models
            unit = "unit" if spec.experts is None or spec.experts.count != 128 else ""
            family = replace(spec.family, qk_norm=unit)
            context = min(spec.context, LONGEST)  # ten million tokens are said
            return replace(
                spec,
                family=family,
                chunked=True,
                attn_temperature=Temper(8192, 0.1) if spec.no_rope else None,
                context=context,
            )
        return spec

    def gemma4(self, spec: ModelSpec) -> ModelSpec:
        """The spec with the heads of windowed layers, and with what layers share."""
        windowed = spec.windowed - {spec.layers - 1}
        heads = self.by_layer("attention.head_count_kv", spec.layers)
        ffn = self.by_layer("feed_forward_length", spec.layers)
        head_dim = self.size("attention.key_length_swa", spec.head_dim)
        rotary = self.size("rope.dimension_count_swa", head_dim)
        sharing = self.whole("attention.shared_kv_layers")
        last, first = ffn[-1], min(windowed, default=0)
        local = (heads[first], head_dim)
        spec = replace(
            spec,
            windowed=windowed,
            local_rope=RopeSpec(self.number("rope.freq_base_swa", spec.rope.base), rotary),
            local_heads=local if local != (spec.kv_heads, spec.head_dim) and windowed else None,
            sharing=sharing,
            sharing_ffn=last if sharing and last != spec.ffn else 0,
            k_as_v=f"blk.{min(set(range(spec.layers)) - windowed)}.attn_v.weight"
            not in self.file.tensors,
            per_layer=self.whole("embedding_length_per_layer_input"),
        )
        if spec.experts is not None:
            spec = replace(spec, experts=replace(spec.experts, shared=spec.ffn, normed=True))
        each = [spec.attention(i, spec.context).kv_heads for i in range(spec.layers)]
        inner = [spec.inner(i) for i in range(spec.layers)]
        if each != heads or inner != ffn:
            raise unsupported("KV heads or MLPs that differ otherwise are not supported in gemma4")
        return spec

    def by_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """A size for each layer: one for all, or as listed."""
        listed = self.said(key)
        if self.known.recurrent in ("mamba", "conv") and isinstance(listed, Array):
            found = {size for size in self.listed(key, layers) if size > 0}
            if len(found) != 1:
                raise unsupported(f"{self.arch}.{key} of {len(found)} sizes is not supported")
            return [found.pop()] * layers
        if self.arch != "gemma4" or not isinstance(listed, Array):
            return [self.size(key, default)] * layers
        sizes = listed.integers() if len(listed) == layers else []
        if not sizes or not all(0 < size < LARGEST for size in sizes):
            raise EngineFault("model_invalid", f"{self.arch}.{key} should be {layers} sizes")
        return sizes

    def listed(self, key: str, layers: int) -> list[int]:
        """A size for each layer, of which there may be none: as listed, else one for all."""
        listed = self.said(key)
        if not isinstance(listed, Array):
            return [self.size(key)] * layers
        if not layers <= len(listed) <= MAX_LAYERS:
            raise EngineFault(
                "model_invalid", f"{self.arch}.{key} has {len(listed)} entries for {layers} layers"
            )
        return listed.integers()[:layers]

    def feeds(self, layers: int) -> frozenset[int] | None:
        """The layers that are an MLP alone, where there are such."""
        if not self.arch.startswith("nemotron"):
            return None
        return frozenset(
            i for i, size in enumerate(self.listed("feed_forward_length", layers)) if size
        )

    def hybrid(self, spec: ModelSpec) -> ModelSpec:
        """The spec with its short convolutions or its Mamba2 layers, which have no KV heads."""
        kv_heads = self.listed("attention.head_count_kv", spec.layers)
        feeds = self.feeds(spec.layers)
        beside = self.arch == "falcon-h1"
        layers = frozenset(
            i for i in range(spec.layers) if beside or (not kv_heads[i] and i not in (feeds or ()))
        )
        if self.known.recurrent == "conv":
            linear = LinearSpec(
                layers,
                *(0, 0, 0, 0),
                self.size("shortconv.l_cache"),
                kind="conv",
                width=spec.dim,
            )
            return replace(spec, linear=linear)
        first = f"blk.{min(layers, default=0)}."
        heads, inner = self.size("ssm.time_step_rank"), self.size("ssm.inner_size")
        if inner % heads:
            raise EngineFault("model_invalid", f"{heads} heads share {self.arch}.ssm.inner_size")
        linear = LinearSpec(
            layers,
            self.size("ssm.group_count"),
            heads,
            self.size("ssm.state_size"),
            inner // heads,
            self.size("ssm.conv_kernel"),
            kind="mamba",
            conv_bias=f"{first}ssm_conv1d.bias" in self.file.tensors,
            norm="before" if f"{first}ssm_norm.weight" in self.file.tensors else "",
            beside=beside,
        )
        plain = spec.no_rope if feeds is None else frozenset(range(spec.layers))
        return replace(spec, linear=linear, feeds=feeds, no_rope=plain)

    def linear(self, layers: int) -> LinearSpec:
        """The gated delta nets. Those of Qwen3.5 have their value heads in another order."""
        key = f"{self.arch}.attention.recurrent_layers"
        listed = self.file.metadata.get(key)
        every = self.size("full_attention_interval", 4)
        found = [(i + 1) % every != 0 for i in range(layers)]
        if isinstance(listed, Array):
            found = [bool(flag) for flag in listed.tolist()]
            if len(found) < layers:
                raise EngineFault(
                    "model_invalid", f"{key} has {len(found)} entries for {layers} layers"
                )
        heads, size = self.size("ssm.time_step_rank"), self.size("ssm.state_size")
        if self.size("ssm.inner_size") != heads * size:
            raise EngineFault(
                "model_invalid", f"{heads} value heads of {size} are not {self.arch}.ssm.inner_size"
            )
        return LinearSpec(
            frozenset(i for i in range(layers) if found[i]),
            self.size("ssm.group_count"),
            heads,
            size,
            size,
            self.size("ssm.conv_kernel"),
            tiled=self.arch != "qwen3next",
        )

    def _rotary(self, family: Family, latent: LatentSpec | None, head_dim: int) -> int:
        if family.positions != "rotary":
            return 0
        return latent.rotary if latent else head_dim

    def kv_heads(self, heads: int, layers: int) -> int:
        """Granite says it for each layer, of which some models have none with Mamba; Gemma 4 too,
        whose last layer sees everything."""
        if self.arch == "gemma4" or self.known.recurrent in ("mamba", "conv"):
            return self.by_layer("attention.head_count_kv", layers)[-1]
        key = f"{self.arch}.attention.head_count_kv"
        listed = self.file.metadata.get(key)
        if self.arch != "granite" or not isinstance(listed, Array):
            return self.size("attention.head_count_kv", heads)
        found = set(listed.integers()) if len(listed) <= MAX_LAYERS else set()
        if len(found) != 1 or 0 in found:
            raise unsupported(f"{key} differs from layer to layer, which is not supported")
        return found.pop()

    def windows(self, layers: int) -> tuple[int, frozenset[int]]:
        """The window and the layers that have it."""
        key = f"{self.arch}.attention.sliding_window"
        window = 8192 if self.arch == "llama4" else self.file.get(key, int, 0)
        kept = self.arch in ("llama4", "gemma4")  # the kind of a layer says more than its window
        if not window or (not kept and window >= self.size("context_length")):
            return 0, frozenset()
        return window, self.pattern(layers)

    def no_rope(self, layers: int) -> frozenset[int]:
        """The layers without rotary embedding."""
        every = self.known.plain
        if every < 0:
            windows = self.whole("attention.sliding_window") > 0
            return frozenset(range(layers)) - self.pattern(layers) if windows else frozenset()
        return frozenset(i for i in range(layers) if every and (i + 1) % every == 0)

    def pattern(self, layers: int) -> frozenset[int]:
        """The layers with a window, where the file has one."""
        key = f"{self.arch}.attention.sliding_window"
        listed = self.file.metadata.get(f"{key}_pattern")
        if isinstance(listed, Array):
            if len(listed) != layers:
                raise EngineFault(
                    "model_invalid", f"{key}_pattern has {len(listed)} entries for {layers} layers"
                )
            return frozenset(i for i, flag in enumerate(listed.tolist()) if flag)
        every = (
            self.known.every if listed is None else self.size("attention.sliding_window_pattern")
        )
        return frozenset(i for i in range(layers) if not every or (i + 1) % every)

    def latent(self) -> LatentSpec | None:
        """Newer files speak of the latent KV as of one KV head, and of the heads in keys of their
        own."""
        if self.arch != "deepseek2":
            return None
        rank, rotary = self.size("attention.kv_lora_rank"), self.size("rope.dimension_count")
        newer = self.said("attention.key_length_mla") is not None
        ending = "_mla" if newer else ""
        key, value = (self.size(f"attention.{part}_length{ending}") for part in ("key", "value"))
        sizes = self.size("attention.key_length"), self.size("attention.value_length")
        if newer and (sizes != (rank + rotary, rank) or self.size("attention.head_count_kv") != 1):
            message = (
                f"a latent KV of {rank} and {rotary} dimensions, and keys and values of {sizes}"
            )
            raise EngineFault("model_invalid", f"the model file makes no sense: {message}")
        query = self.whole("attention.q_lora_rank")
        return LatentSpec(rank, rotary, max(key - rotary, 0), value, query)

    def _scale(self, layers: int, dim: int, heads: int, head_dim: int) -> float:
        """Gemma's largest models scale by what a head would have if heads filled the model; the
        files do not say so, and llama.cpp knows them by their number of layers."""
        if self.arch == "gemma4":
            return 1.0
        odd = (self.arch, layers) in (("gemma2", 46), ("gemma3", 62))
        return float((dim / heads if odd else head_dim) ** -0.5)

    def rope(self, dim: int) -> RopeSpec:
        kind = self.file.get(f"{self.arch}.rope.scaling.type", str, "none")
        if kind not in ("none", "linear", "yarn", "longrope"):
            known = "none, linear, yarn, longrope"
            raise unsupported(f"rotary scaling {kind!r} is not supported; known: {known}")
        factor = self.number("rope.scaling.factor", 1.0) if kind != "none" else 1.0
        base, interleaved = self.number("rope.freq_base", 10_000.0), self.known.interleaved
        dim = self.size("rope.dimension_count", dim) if dim else 0
        if kind == "yarn":
            usual = yarn_amplitude(factor)
            # there of the scores
            default = 1.0 if self.arch == "deepseek2" else usual
            if self.arch == "mistral3":  # a part of it is that of the scores, which have none
                default /= yarn_amplitude(
                    factor, self.number("rope.scaling.yarn_log_multiplier", 0.0)
                )
            amplitude = self.number("rope.scaling.yarn_attn_factor", default)
            if math.isclose(amplitude * usual, 1, rel_tol=1e-6):  # takes back the usual one
                amplitude = 1.0
            return RopeSpec(
                base,
                dim,
                factor,
                interleaved,
                kind,
                self.size("rope.scaling.original_context_length"),
                self.number("rope.scaling.yarn_beta_slow", 1.0),
                self.number("rope.scaling.yarn_beta_fast", 32.0),
                amplitude,
                truncate=self.arch != "gpt-oss",
            )
        if self.arch == "phi3" and kind != "linear":  # longrope: its factors are tensors
            key = "phi3.rope.scaling.original_context_length"
            chooses = {SHORT_DIVISORS, LONG_DIVISORS} & self.file.tensors.keys()
            original = self.file.get(key, int, 0) if chooses else 0
            amplitude = self.number("rope.scaling.attn_factor", 1.0)
            return RopeSpec(base, dim, 1.0, interleaved, original=original, amplitude=amplitude)
        if kind == "longrope":
            raise unsupported(f"rotary scaling 'longrope' is not supported for {self.arch}")
        return RopeSpec(base, dim, factor, interleaved)

    def local_rope(self, rope: RopeSpec, dim: int) -> RopeSpec | None:
        """The rotary embedding of windowed layers where it differs; Gemma 3 and OLMo 3 do not
        stretch it."""
        if self.arch == "gemma3":
            return RopeSpec(self.number("rope.freq_base_swa", 10_000.0), dim)
        base = self.number("rope.freq_base_swa", rope.base)
        if self.arch == "olmo2" and rope.kind == "yarn":
            return RopeSpec(base, rope.dim)
        return replace(rope, base=base) if base != rope.base else None

    def experts(self, layers: int) -> ExpertSpec | None:
        """The experts, None where no layer has any. Their tensors say what is beside them."""
        count = self.whole("expert_count")
        if not count:
            return None
        if not self.known.experts:
            raise unsupported(f"{self.arch}.expert_count = {count} is not supported")
        inner = self.said("expert_feed_forward_length") is not None
        ffn = self.size("expert_feed_forward_length" if inner else "feed_forward_length")
        step = self.size("interleave_moe_layer_step", 1)
        routed = range(max(self.whole("leading_dense_block_count"), 0), layers)
        sparse = frozenset(i for i in routed if (i + 1) % step == 0)
        feeds = self.feeds(layers)
        if feeds is not None:
            sparse = feeds
        if not sparse:
            return None
        kind = self.whole("expert_gating_func")
        if kind > len(SCORINGS):
            raise unsupported(f"{self.arch}.expert_gating_func = {kind} is not supported")
        first = f"blk.{min(sparse)}."
        beside = self.file.tensors.get(f"{first}ffn_up_shexp.weight")
        biased = f"{first}exp_probs_b.bias" in self.file.tensors
        scoring = self.known.scoring
        if kind > 0:
            scoring = SCORINGS[kind - 1]
        elif self.arch == "deepseek2" and biased:  # the first files of GLM-4.7-Flash do not say
            scoring = "sigmoid"
        return ExpertSpec(
            count,
            self.size("expert_used_count"),
            ffn,
            self.flag("expert_weights_norm", self.known.experts == "normalised"),
            sparse,
            shared=beside.shape[0] if beside else 0,
            scoring=scoring,
            scale=self.number("expert_weights_scale", 1.0) or 1.0,
            weigh_input=self.arch == "llama4",
            switched=self.arch in ("qwen2moe", "qwen35moe", "qwen3next"),
            biased=biased,
            groups=self.size("expert_group_count", 1),
            kept=self.size("expert_group_used_count", 1),
            best=1 + biased,
            extra=1e-6 if self.arch == "lfm2moe" else 0.0,
        )


def _vocab(file: GGUFFile) -> int:
    """Rows of the embedding table, which are all the ids there are logits for."""
    info = file.tensors.get("token_embd.weight")
    if info is None:
        raise EngineFault("tensor_missing", f"{file.path} lacks the tensor 'token_embd.weight'")
    return info.shape[0]
