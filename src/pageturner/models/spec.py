"""What a model is, as data, whatever file it came from.

Owns the families, the sizes, and what makes no sense. Must not know files, weights or backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageturner.errors import EngineFault
from pageturner.kernels.base import ACTIVATIONS, AttentionShape
from pageturner.models.rope import RopeSpec

LARGEST = 1 << 31  # a size beyond this is a broken file, and would not fit the kernels' int32
# Far more than any model has; what is listed or computed for each of them takes no memory worth mentioning.
MOST_LAYERS, MOST_HEADS, MOST_EXPERTS = 1 << 12, 1 << 14, 1 << 17  # the last of all layers together
_HUGE = 1e12  # rotary settings beyond it, or below its inverse, are none that anybody computed with
LONGEST = 1 << 22  # tokens; more than any model here was made for, and its rotary tables still fit


@dataclass(frozen=True, slots=True)
class Family:
    """What the layers of a model are made of.

    act          one of kernels.base.ACTIVATIONS
    gated        the MLP is down(act(gate) * up), not down(act(up))
    layer_norm   LayerNorm with biases instead of RMSNorm
    post_norms   norms of what attention and MLP add
    qkv_bias, o_bias, mlp_bias   which products have one
    positions    "rotary", "learned" (a table added to the embedding) or "alibi"
    embed_norm   a norm behind the embedding
    """

    act: str = "silu"
    gated: bool = True
    layer_norm: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    positions: str = "rotary"
    embed_norm: bool = False


_GPT = {"gated": False, "layer_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True),
    "gemma2": Family(act="gelu_tanh", post_norms=True),
    "gemma3": Family(act="gelu_tanh", post_norms=True, qk_norm=True),
    "gpt2": Family(act="gelu_tanh", positions="learned", **_GPT),
    "opt": Family(act="relu", positions="learned", **_GPT),
    "bloom": Family(act="gelu_tanh", positions="alibi", embed_norm=True, **_GPT),
}


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of `count` experts of inner size `ffn`, `top_k` for each token; `layers` have it."""

    count: int
    top_k: int
    ffn: int
    normalise: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder model. Sizes in elements, `context` in tokens.

    tied          the output head is the embedding table
    window        tokens that a windowed layer sees, itself included; 0: no layer is windowed
    windowed      the layers that have the window
    local_rope    rotary embedding of the windowed layers, where it is another one
    soft_cap      of attention scores; `logit_soft_cap` of the logits; 0: none
    embed_scale   the embedding is multiplied by it
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

    @property
    def active(self) -> int:
        """Weights of the layers that one token is multiplied with: of experts those that it is sent to."""
        attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        products, moe = (3 if self.family.gated else 2) * self.dim, self.experts
        if moe is None:
            return self.layers * (attention + products * self.ffn)
        routed = self.dim * moe.count + products * moe.top_k * moe.ffn
        dense = self.layers - len(moe.layers)
        return self.layers * attention + dense * products * self.ffn + len(moe.layers) * routed

    @property
    def routed(self) -> int:
        """Weights of all experts."""
        moe = self.experts
        if moe is None:
            return 0
        return len(moe.layers) * moe.count * (3 if self.family.gated else 2) * self.dim * moe.ffn

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of one layer."""
        return self.local_rope if self.local_rope is not None and layer in self.windowed else self.rope

    def attention(self, layer: int, positions: int) -> AttentionShape:
        """The attention of one layer, for sequences of at most `positions` tokens: a window that holds them
        all hides nothing, and is left out."""
        window = self.window if layer in self.windowed and self.window < positions else 0
        slopes = alibi_slopes(self.heads) if self.family.positions == "alibi" else ()
        return AttentionShape(
            self.heads, self.kv_heads, self.head_dim, self.attention_scale, window, self.soft_cap, slopes
        )

    def hiding(self, positions: int) -> int:
        """How many layers hide something of sequences of so many positions."""
        return sum(self.attention(layer, positions).window > 0 for layer in range(self.layers))

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts in place of one MLP."""
        return self.experts is not None and layer in self.experts.layers


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Press et al., arXiv 2108.12409: a geometric series from 2^(-8/n) for n heads, a power of 2; further
    heads take every other one of the series for 2n."""
    n = 1 << (heads.bit_length() - 1)
    series = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    return tuple((series + between)[:heads])


def unsupported(message: str) -> EngineFault:
    """What this engine does not compute."""
    return EngineFault("model_unsupported", message)


def check_spec(spec: ModelSpec) -> ModelSpec:
    """The spec itself. EngineFault('model_invalid') if it lacks what the kernels take for granted."""
    names = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    sizes = {name: getattr(spec, name) for name in names}
    problems = {f"{name} is {value}": not 0 < value < LARGEST for name, value in sizes.items()}
    problems[f"context of {spec.context} tokens"] = not 1 < spec.context <= LONGEST
    problems[f"{spec.layers} layers"] = spec.layers > MOST_LAYERS
    problems[f"{spec.heads} heads"] = spec.heads > MOST_HEADS
    _refuse(problems)
    problems = {
        f"{spec.heads} heads do not share {spec.kv_heads} KV heads evenly": bool(spec.heads % spec.kv_heads),
        f"norm epsilon {spec.eps}": not 0 <= spec.eps < 1,
        f"attention scale {spec.attention_scale}": not 0 < spec.attention_scale < math.inf,
        f"activation {spec.family.act!r}": spec.family.act not in ACTIVATIONS,
        f"a window of {spec.window} tokens": not 0 <= spec.window < LARGEST,
        f"soft caps {spec.soft_cap}, {spec.logit_soft_cap}": not (
            0 <= spec.soft_cap < math.inf and 0 <= spec.logit_soft_cap < math.inf
        ),
        f"embedding scale {spec.embed_scale}": not 0 < spec.embed_scale < math.inf,
    }
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            problems |= _rope_problems(rope, spec.head_dim)
    if spec.experts is not None:
        e = spec.experts
        problems[f"{e.top_k} of {e.count} experts"] = not 0 < e.top_k <= e.count < LARGEST
        problems[f"experts of size {e.ffn}"] = not 0 < e.ffn < LARGEST
        problems[f"{e.count} experts in each of {len(e.layers)} layers"] = (
            e.count * len(e.layers) > MOST_EXPERTS
        )
    _refuse(problems)
    return spec


def _rope_problems(rope: RopeSpec, head_dim: int) -> dict[str, bool]:
    stretched = rope.kind in ("llama3", "yarn")
    turns = f"rotary frequencies between {rope.low} and {rope.high} turns of {rope.original} tokens"
    return {
        f"rotary dimension {rope.dim} of {head_dim}": rope.dim % 2 != 0 or not 0 <= rope.dim <= head_dim,
        f"rotary base {rope.base}": not 1 < rope.base < _HUGE,
        f"rotary factor {rope.factor}": not 1 / _HUGE < rope.factor < _HUGE,
        f"rotary amplitude {rope.amplitude}": not 1 / _HUGE < rope.amplitude < _HUGE,
        turns: stretched and not (1 / _HUGE < rope.low < rope.high < _HUGE and 0 < rope.original < LARGEST),
    }


def _refuse(problems: dict[str, bool]) -> None:
    for problem, found in problems.items():
        if found:
            raise EngineFault("model_invalid", f"the model file makes no sense: {problem}")
