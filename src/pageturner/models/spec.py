"""Specs: a model as data, whatever file it came from.

Owns the families, the sizes, and what makes no sense. Must not know files, weights or backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.base import (
    ACTIVATIONS,
    F32,
    GATED,
    GPU_HEAD_MULTIPLE,
    SQUARED,
    AttentionShape,
    KVSpec,
)
from pageturner.kernels.layer_parts import SCORINGS
from pageturner.kernels.recurrent import CHUNK, COLUMNS, STORED, RecurrentSpec
from pageturner.models.rope import HUGE, RopeSpec, rope_problems
from pageturner.models.tables import table

LARGEST = 1 << 31  # a size beyond this is a broken file, and would not fit the kernels' int32
# Far more than any model has; what is listed or computed for each of them takes no memory worth
# mentioning.
MAX_LAYERS, MAX_HEADS, MAX_EXPERTS = 1 << 12, 1 << 14, 1 << 17  # the last of all layers together
# A number in a setting with one of these in its name changes nothing if it is 1, in any other if it
# is 0.
_FACTORS = ("scal", "multiplier", "factor")
LONGEST = 1 << 22  # tokens; more than any model here was made for, and its rotary tables still fit


@dataclass(frozen=True, slots=True)
class Family:
    """The parts that the layers of a model are made of.

    act          one of kernels.base.ACTIVATIONS, or GATED
    gated        the MLP is down(act(gate) * up), not down(act(up))
    layer_norm   LayerNorm with biases instead of RMSNorm
    pre_norms    norms before attention and MLP
    post_norms   norms of what attention and MLP add
    norm_bias    LayerNorms have their biases in the file; otherwise these are zeros
    parallel     MLP and experts see what attention sees
    qk_norm      norms of queries and keys: "head" (each head), "late" (each head, behind the rotary
                 embedding), "wide" (all heads together), "unit" (each head, without weights, in
                 layers with rotary embedding), "own" (LayerNorms without biases, of each head with
                 weights of its own), or ""
    qkv_bias, o_bias, mlp_bias, head_bias   which products have one
    positions    "rotary", "learned" (a table added to the embedding) or "alibi"
    embed_norm   a norm behind the embedding
    sinks        attention sinks
    expert_bias  experts and their router have biases
    attn_gate    what heads give is multiplied by the sigmoid of a product of its own
    v_norm       norms of values, of each head and without weights
    out_scale    what comes out of a layer is multiplied by a number in the file
    """

    act: str = "silu"
    gated: bool = True
    layer_norm: bool = False
    norm_bias: bool = True
    parallel: bool = False
    pre_norms: bool = True
    qk_norm: str = ""
    post_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: str = "rotary"
    embed_norm: bool = False
    sinks: bool = False
    expert_bias: bool = False
    v_norm: bool = False
    attn_gate: bool = False
    out_scale: bool = False


FAMILIES = {name: Family(**row) for name, row in table("families").items()}


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of `count` experts of inner size `ffn`, `top_k` for each token; `layers` have it.

    shared       inner size of the MLP that all tokens go through beside it; 0: none
    normalise, scoring, scale, weigh_input   see kernels.layer_parts.Experts
    switched     the shared MLP is weighed by the sigmoid of a product of its own
    biased, groups, kept, best, extra   see models.expert_choice; biased: there is a bias
    normed       the shared MLP is one of its own beside them: see kernels.layer_parts.Experts.norm
    """

    count: int
    top_k: int
    ffn: int
    normalise: bool
    layers: frozenset[int]
    shared: int = 0
    scoring: str = "softmax"
    scale: float = 1.0
    weigh_input: bool = False
    switched: bool = False
    biased: bool = False
    groups: int = 1
    kept: int = 1
    best: int = 1
    normed: bool = False
    extra: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """A latent KV (MLA): of each token `rank` numbers, and a rotary key of `rotary` dimensions.
    Each head has queries of `nope` dimensions beside the rotary ones, and makes `value` numbers.
    Queries are made of `query` numbers of each token; 0: of the token itself."""

    rank: int
    rotary: int
    nope: int
    value: int
    query: int = 0


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Recurrent layers, which `layers` are in the place of attention.

    kernel     positions that the convolution sees
    tiled      value head h goes with key head h % key_heads, not with h // (value_heads /
               key_heads)
    log_decay  the file has the logarithms of the rates of decay, and not the rates
    act        of the gate of the outputs: "silu" or "sigmoid"
    kind       "delta" (gated delta nets), "mamba" (Mamba2: its groups are the key heads), or "conv"
               (short convolutions, which have no heads)
    width      channels of short convolutions
    conv_bias  the convolution has a bias
    limits     of time steps (Mamba2)
    norm       of the outputs of Mamba2, each of whose groups is normed: "behind" their gate,
               "before" it, or "" (none)
    beside     attention stands beside each of them, not in another layer
    factors    of what goes into Mamba2: the gate, x, B, C, and the time steps
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tiled: bool = False
    log_decay: bool = False
    act: str = "silu"
    kind: str = "delta"
    width: int = 0
    conv_bias: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    norm: str = "behind"
    beside: bool = False
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns that go through the convolution: queries, keys, values."""
        return self.width or 2 * self.keys + self.values

    @property
    def weights(self) -> int:
        """Weights of the products of a layer, for each number that goes in."""
        if self.kind == "conv":
            return 4 * self.width
        gates = 2 if self.kind == "delta" else 1
        return self.channels + 2 * self.values + gates * self.value_heads

    def storage(self, dtype: str) -> RecurrentSpec:
        """The storage of their states; tails are of the KV type, or fp16 where that is none of
        theirs."""
        heads = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        kind = dtype if dtype in STORED else "float16"
        return RecurrentSpec(len(self.layers), self.channels, self.kernel, *heads, kind)


@dataclass(frozen=True, slots=True)
class Temper:
    """The query at position p is multiplied by 1 + scale * ln(1 + floor((p + first) / floor))
    (Llama 4; arXiv 2501.19399)."""

    floor: int
    scale: float
    first: int = 1

    def factors(self, positions: int) -> F32:
        """The factors of the positions 0 .. positions - 1, computed in fp64 and rounded once."""
        steps = np.arange(self.first, positions + self.first, dtype=np.int64) // self.floor
        return np.asarray(1 + self.scale * np.log1p(steps.astype(np.float64)), np.float32)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder model. Sizes in elements, `context` in tokens.

    tied          the output head is the embedding table
    window        tokens that a windowed layer sees, itself included; 0: no layer is windowed
    windowed      the layers that have the window
    chunked       the window is one of chunks (kernels.base.AttentionShape)
    no_rope       layers without rotary embedding
    attn_temperature        of the queries of these; where there are none, of all layers
    latent        attention over a latent KV: then kv_heads is 1, and head_dim what the KV of a
                  token takes
    local_rope    rotary embedding of the windowed layers, where it is another one
    soft_cap      of attention scores; `logit_soft_cap` of the logits; 0: none
    embed_scale   the embedding is multiplied by it; `residual` what attention and MLP add,
                  `logit_scale` the logits
    local_heads   KV heads and head size of the windowed layers, where these have others: the KV of
                  such a model lies in two stores whatever the length of sequences
    sharing       the last so many layers have no K and V: each reads those of the last layer before
                  them that is of its kind (windowed or not)
    sharing_ffn   inner size of the MLP in these; 0: `ffn`
    k_as_v        layers without a window have no matrix of values: the product of K is taken
    linear        the layers that are recurrent
    feeds         the layers that are an MLP or experts alone, where all others are without one;
                  None: each layer has both parts
    mlp_factors   of the products of gate and down; mixer_factors of what attention adds, and of
                  what a recurrent layer beside it does
    per_layer     size of the embedding of each token in each layer; 0: there is none
    """

    arch: str
    name: str
    family: Family
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
    attention_scale: float
    window: int = 0
    windowed: frozenset[int] = frozenset()
    local_rope: RopeSpec | None = None
    soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embed_scale: float = 1.0
    experts: ExpertSpec | None = None
    chunked: bool = False
    no_rope: frozenset[int] = frozenset()
    attn_temperature: Temper | None = None
    latent: LatentSpec | None = None
    residual: float = 1.0
    logit_scale: float = 1.0
    local_heads: tuple[int, int] | None = None
    sharing: int = 0
    sharing_ffn: int = 0
    k_as_v: bool = False
    per_layer: int = 0
    linear: LinearSpec | None = None
    feeds: frozenset[int] | None = None
    mlp_factors: tuple[float, float] = (1.0, 1.0)
    mixer_factors: tuple[float, float] = (1.0, 1.0)

    @property
    def active(self) -> int:
        """Weights of the layers that one token is multiplied with: of experts those that it is sent
        to."""
        products, moe = (3 if self.family.gated else 2) * self.dim, self.experts
        total = self.layers * 3 * self.dim * self.per_layer
        for layer in range(self.layers):
            inner = self.inner(layer)
            if moe is not None and self.sparse(layer):
                inner += moe.top_k * moe.ffn
                total += self.dim * moe.count
            total += self.attention_weights(layer) + products * inner
        return total

    def inner(self, layer: int) -> int:
        """The inner size of the MLP that all tokens go through; 0 where there is none."""
        if self.experts is not None and layer in self.experts.layers:
            return self.experts.shared
        if self.feeds is not None and layer not in self.feeds:
            return 0
        return self.sharing_ffn or self.ffn if self.shares(layer) else self.ffn

    def shares(self, layer: int) -> bool:
        """Return whether the layer reads the K and V of another."""
        return layer >= self.layers - self.sharing

    def attention_weights(self, layer: int) -> int:
        """Weights of the attention of one layer."""
        latent, linear, recurrent = self.latent, self.linear, 0
        if self.feeds is not None and layer in self.feeds:
            return 0
        if linear is not None and layer in linear.layers:
            recurrent = self.dim * linear.weights
            if not linear.beside:
                return recurrent
        if latent is None:
            shape = self.attention(layer, self.context)
            of_kv = 1 if self.k_as_v and layer not in self.windowed else 2
            of_kv = 0 if self.shares(layer) else of_kv
            of_heads = (3 if self.family.attn_gate else 2) * shape.heads
            of_heads += of_kv * shape.kv_heads
            return recurrent + self.dim * shape.head_dim * of_heads
        head = latent.nope + latent.rotary + latent.value
        inner = self.heads * latent.rank * (latent.nope + latent.value)
        if latent.query:
            inner += latent.query * (self.dim + self.heads * (latent.nope + latent.rotary))
            head = latent.value
        return self.dim * (self.heads * head + latent.rank + latent.rotary) + inner

    @property
    def composed(self) -> str:
        """The parts that only CPUs compute, and no ranks together (kernels.base.COMPOSED)."""
        experts = self.experts
        found = {
            "attention and MLP side by side": self.family.parallel,
            "a head with a bias": self.family.head_bias,
            "norms behind the rotary embedding": self.family.qk_norm == "late",
            "norms of each head's own": self.family.qk_norm == "own",
            "queries of low rank": self.latent is not None and self.latent.query > 0,
            "experts chosen by bias or group": experts is not None
            and (experts.biased or experts.groups > 1),
            "a shared expert with a weight": experts is not None and experts.switched,
            "experts with norms of their own": experts is not None and experts.normed,
            "KV heads of two sizes": self.local_heads is not None,
            "layers that share KV": self.sharing > 0,
            "values that are normed": self.family.v_norm or self.k_as_v,
            "embeddings for each layer": self.per_layer > 0,
            "recurrent layers": self.linear is not None,
            "attention with a gate": self.family.attn_gate,
        }
        return ", ".join(name for name, there in found.items() if there)

    @property
    def mtp(self) -> ModelSpec:
        """The model of one layer that a head of multi-token prediction is."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=frozenset({0}))
        none: frozenset[int] = frozenset()
        return replace(
            self, layers=1, linear=None, experts=experts, windowed=none, window=0, no_rope=none
        )

    @property
    def routed(self) -> int:
        """Weights of all experts."""
        moe = self.experts
        if moe is None:
            return 0
        return len(moe.layers) * moe.count * (3 if self.family.gated else 2) * self.dim * moe.ffn

    def with_alibi(self) -> ModelSpec:
        """The same model with ALiBi in place of a rotary embedding."""
        family = replace(self.family, positions="alibi")
        return replace(self, family=family, rope=RopeSpec(self.rope.base, 0))

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of one layer."""
        if layer in self.no_rope:
            return RopeSpec(self.rope.base, 0)
        return (
            self.local_rope if self.local_rope is not None and layer in self.windowed else self.rope
        )

    def attention(self, layer: int, positions: int) -> AttentionShape:
        """The attention of one layer, for sequences of at most `positions` tokens: a window that
        holds them all hides nothing, and is left out, but where it tells two stores apart."""
        window, heads = 0, (self.kv_heads, self.head_dim)
        if layer in self.windowed and (self.window < positions or self.local_heads is not None):
            window, heads = self.window, self.local_heads or heads
        slopes = alibi_slopes(self.heads) if self.family.positions == "alibi" else ()
        return AttentionShape(
            self.heads,
            *heads,
            self.attention_scale,
            window,
            self.soft_cap,
            slopes,
            self.chunked and window > 0,
            latent=self.latent.rank if self.latent else 0,
        )

    def kv_spec(self, blocks: int, block_size: int, dtype: str, gpu_kv: bool = False) -> KVSpec:
        """The KV storage of all layers; gpu_kv: as GPUs store it."""
        layers = self.kv_layers
        one = KVSpec(
            layers,
            blocks,
            block_size,
            self.kv_heads,
            self.head_dim,
            dtype,
            latent=self.latent is not None,
            scaled=gpu_kv and dtype == "fp8_e4m3",
            head_multiple=GPU_HEAD_MULTIPLE if gpu_kv else 1,
        )
        if self.local_heads is None:
            return one
        kv_heads, head_dim = self.local_heads
        windowed = self.hiding(self.context)
        local = replace(one, layers=windowed, kv_heads=kv_heads, head_dim=head_dim)
        return replace(one, layers=layers - windowed, beside=local)

    def recurrent_spec(self, dtype: str) -> RecurrentSpec | None:
        """The storage of the states of recurrent layers; None: there are none."""
        return None if self.linear is None else self.linear.storage(dtype)

    def hiding(self, positions: int) -> int:
        """The number of layers with KV that hide a part of sequences of so many positions."""
        layers = range(self.layers - self.sharing)
        return sum(self.attention(layer, positions).window > 0 for layer in layers)

    @property
    def kv_layers(self) -> int:
        """The number of layers that have KV of their own."""
        without = self.sharing + len(self.feeds or ())
        if self.linear is not None and not self.linear.beside:
            without += len(self.linear.layers)
        return self.layers - without

    def attends(self, layer: int) -> bool:
        """Return whether the layer has attention."""
        if self.feeds is not None and layer in self.feeds:
            return False
        linear = self.linear
        return linear is None or linear.beside or layer not in linear.layers

    def sparse(self, layer: int) -> bool:
        """Return whether the layer has experts in place of one MLP."""
        return self.experts is not None and layer in self.experts.layers


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Press et al., arXiv 2108.12409: a geometric series from 2^(-8/n) for n heads, a power of 2;
    further heads take every other one of the series for 2n."""
    n = 1 << (heads.bit_length() - 1)
    series = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    return tuple((series + between)[:heads])


def unsupported(message: str) -> EngineFault:
    """The fault for a model that this engine does not compute."""
    return EngineFault("model_unsupported", message)


def turns_nothing_on(key: str, value: object) -> bool:
    """Return whether any setting with such a name is off by this value."""
    if type(value) in (int, float) and any(part in key for part in _FACTORS):
        return value == 1
    return value is None or value in (False, 0, "", [], {})


def check_spec(spec: ModelSpec) -> ModelSpec:
    """The spec itself. EngineFault('model_invalid') if it lacks what the kernels take for
    granted."""
    names = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    sizes = {name: getattr(spec, name) for name in names}
    problems = {f"{name} is {value}": not 0 < value < LARGEST for name, value in sizes.items()}
    problems[f"context of {spec.context} tokens"] = not 1 < spec.context <= LONGEST
    problems[f"{spec.layers} layers"] = spec.layers > MAX_LAYERS
    problems[f"{spec.heads} heads"] = spec.heads > MAX_HEADS
    _refuse(problems)
    problems = {
        f"{spec.heads} heads do not share {spec.kv_heads} KV heads evenly": bool(
            spec.heads % spec.kv_heads
        ),
        f"norm epsilon {spec.eps}": not 0 <= spec.eps < 1,
        f"attention scale {spec.attention_scale}": not 0 < spec.attention_scale < math.inf,
        f"activation {spec.family.act!r}": spec.family.act not in (*ACTIVATIONS, GATED, SQUARED),
        f"a window of {spec.window} tokens": not 0 <= spec.window < LARGEST,
        f"soft caps {spec.soft_cap}, {spec.logit_soft_cap}": not (
            0 <= spec.soft_cap < math.inf and 0 <= spec.logit_soft_cap < math.inf
        ),
        f"embedding scale {spec.embed_scale}": not 0 < spec.embed_scale < math.inf,
        f"multiplier of the residual {spec.residual}": not 1 / HUGE < spec.residual < HUGE,
        f"multiplier of the logits {spec.logit_scale}": not 1 / HUGE < spec.logit_scale < HUGE,
    }
    problems |= rope_problems(spec.rope, spec.latent.rotary if spec.latent else spec.head_dim)
    if spec.local_rope is not None:
        problems |= rope_problems(spec.local_rope, (spec.local_heads or (0, spec.head_dim))[1])
    problems |= _layer_problems(spec)
    if spec.linear is not None:
        problems |= _linear_problems(spec, spec.linear)
    if spec.attn_temperature is not None:
        t = spec.attn_temperature
        problems[f"temperature of queries {t}"] = not (
            0 < t.floor < LARGEST and 0 <= t.scale < HUGE
        )
    if spec.latent is not None:
        problems |= _latent_problems(spec, spec.latent)
    if spec.experts is not None:
        e = spec.experts
        problems[f"a scoring of experts by {e.scoring!r}"] = e.scoring not in SCORINGS
        problems[f"a scale of experts of {e.scale}"] = not 1 / HUGE < e.scale < HUGE
        problems[f"a shared expert of size {e.shared}"] = not 0 <= e.shared < LARGEST
        problems[f"{e.top_k} of {e.count} experts"] = not 0 < e.top_k <= e.count < LARGEST
        problems[f"{e.kept} of {e.groups} groups of {e.count} experts"] = not (
            0 < e.kept <= e.groups <= e.count
            and e.count % e.groups == 0
            and e.top_k <= e.count // e.groups * e.kept
        )
        problems[f"experts of size {e.ffn}"] = not 0 < e.ffn < LARGEST
        problems[f"{e.count} experts in each of {len(e.layers)} layers"] = (
            e.count * len(e.layers) > MAX_EXPERTS
        )
    _refuse(problems)
    return spec


def _layer_problems(spec: ModelSpec) -> dict[str, bool]:
    """Every way in which layers that differ can make no sense, and whether these do."""
    own = frozenset(range(spec.layers - spec.sharing))
    kinds = [bool(own & spec.windowed), bool(own - spec.windowed)]
    local = spec.local_heads or (1, 1)
    orphans = {layer in spec.windowed for layer in range(spec.layers) if layer not in own}
    return {
        f"{spec.heads} heads and {local} KV heads and their size": not all(
            0 < size < LARGEST for size in local
        )
        or spec.heads % local[0] != 0,
        f"{spec.sharing} of {spec.layers} layers that share the KV of others": not own
        or any(not kinds[not windowed] for windowed in orphans),
        "KV heads of two sizes, and all layers of one kind": spec.local_heads is not None
        and not all(kinds),
        f"embeddings of {spec.per_layer} in each layer": not 0 <= spec.per_layer < LARGEST,
        f"an MLP of {spec.sharing_ffn} in layers that share": not 0 <= spec.sharing_ffn < LARGEST,
    }


def _linear_problems(spec: ModelSpec, linear: LinearSpec) -> dict[str, bool]:
    sizes = (linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim)
    if linear.value_dim % COLUMNS or not 1 < linear.kernel <= CHUNK:
        raise unsupported(
            f"a recurrent layer with heads of {linear.value_dim} and a convolution over"
            f" {linear.kernel} positions is not supported: heads are multiples of {COLUMNS}"
        )
    low, high = linear.limits
    found = {
        f"{len(linear.layers)} of {spec.layers} layers that are recurrent": not linear.layers
        or spec.kv_layers < 1,
        f"a gate by {linear.act!r}": linear.act not in ("silu", "sigmoid"),
        f"time steps of {low} to {high}": not 0 <= low < high,
        f"multipliers of {linear.factors}": not all(1 / HUGE < f < HUGE for f in linear.factors),
    }
    if linear.kind == "conv":
        return found | {f"{linear.width} channels": not 0 < linear.width < LARGEST}
    return found | {
        f"a recurrent layer of sizes {sizes}": not all(0 < size < LARGEST for size in sizes),
        f"{linear.value_heads} value heads for {linear.key_heads} key heads": linear.key_heads < 1
        or linear.value_heads % linear.key_heads != 0,
    }


def _latent_problems(spec: ModelSpec, latent: LatentSpec) -> dict[str, bool]:
    sizes = (latent.rank, latent.rotary, latent.nope, latent.value)
    return {
        f"queries of rank {latent.query}": not 0 <= latent.query < LARGEST,
        f"a latent KV of sizes {sizes}": not all(0 < size < LARGEST for size in sizes),
        f"heads of {spec.head_dim} and {spec.kv_heads} KV heads with a latent KV": spec.kv_heads
        != 1
        or spec.head_dim != latent.rank + latent.rotary,
        f"a rotary key of {latent.rotary} dimensions, of which {spec.rope.dim} turn": spec.rope.dim
        != latent.rotary,
    }


def _refuse(problems: dict[str, bool]) -> None:
    for problem, found in problems.items():
        if found:
            raise EngineFault("model_invalid", f"the model file makes no sense: {problem}")
