"""Parts of a decoder layer that only some families have: a mixture of experts, and what makes a
latent KV.

Owns these types. Must not know any model family, nor how a backend computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Weight = Any

SCORINGS = ("softmax", "sigmoid")  # how the logits of a router become weights


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated MLPs; index e of each tuple is expert e.

    router       [experts, d]; its logits choose for each row
    top_k        experts per row
    normalise    the weights of the chosen ones are scaled to a sum of 1
    scoring      one of SCORINGS
    scale        of the weights, at last
    weigh_input  what goes into an expert is multiplied by its weight, not what comes out (Llama 4)
    router_bias  [experts]; gate_bias, up_bias, down_bias: one vector for each expert, or ()
                 (gpt-oss)
    choice       makes the ids of the chosen ones, ascending, and their weights, both [T, top_k],
                 of the scores of all [T, experts]; None: the largest scores are chosen
    shared_switch  [1, d]; the MLP beside the experts is multiplied by the sigmoid of its product
    norm         of x, for the experts, beside an MLP that sees another: router_norm is the router's,
                 inner_norm and post_norm are of what MLP and experts make, before their sum is
                 normed and added as that of any MLP (Gemma 4)
    out_scales   [experts]; the weight of each expert is multiplied by its own, at last
    """

    router: Weight
    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    top_k: int
    normalise: bool
    scoring: str = "softmax"
    scale: float = 1.0
    weigh_input: bool = False
    router_bias: Weight | None = None
    gate_bias: tuple[Weight, ...] = ()
    up_bias: tuple[Weight, ...] = ()
    down_bias: tuple[Weight, ...] = ()
    choice: Callable[[Any], tuple[Any, Any]] | None = None
    shared_switch: Weight | None = None
    norm: Weight | None = None
    router_norm: Weight | None = None
    inner_norm: Weight | None = None
    post_norm: Weight | None = None
    out_scales: Any = None

    @property
    def needs(self) -> frozenset[str]:
        """The features (kernels.base.FEATURES) that a backend must have to compute them."""
        found = {
            "experts": True,
            "scoring": self.scoring != "softmax" or self.scale != 1 or self.weigh_input,
            "expert_bias": self.router_bias is not None
            or bool(self.gate_bias or self.up_bias or self.down_bias),
            "expert_choice": self.choice is not None,
            "shared_switch": self.shared_switch is not None,
            "expert_norms": self.norm is not None or self.out_scales is not None,
        }
        return frozenset(name for name, needed in found.items() if needed)


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The embedding that a layer has of each token, and how it is added behind the MLP (Gemma 4):
    x + post_norm(out (act(gate x) * (norm(project e) + rows))), e being the embedding of the token.

    rows         gives those of tokens [T, p], in fp32, from where the table lies
    project      [p, d]; norm, with an epsilon of its own, and rows are made so that their sum needs
                 no further scale
    gate, out    [p, d] and [d, p]
    """

    rows: Callable[[Any], Any]
    project: Weight
    norm: Weight
    eps: float
    gate: Weight
    out: Weight
    post_norm: Weight


@dataclass(frozen=True, slots=True)
class Latent:
    """The parts of attention over a latent KV beside `Layer.q` [heads * n, d] and `Layer.k` [rank,
    d]; there is no `Layer.v` (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1, with the matrices
    absorbed).

    The latent is norm(k x); behind it, in the KV, stands the rotary part of the key, which heads
    share. A query is k_up q x of each head, and its rotary part behind it; v_up makes what a head
    mixed its output.

    q_rope  [heads * r, d] and k_rope [r, d]: their products are rotated
    norm    [rank], RMSNorm
    k_up    of each head [rank, n]
    v_up    of each head [v, rank]
    q_down  [n, d], or None: q and q_rope see q_norm(q_down x) in place of x
    """

    q_rope: Weight
    k_rope: Weight
    norm: Weight
    k_up: tuple[Weight, ...]
    v_up: tuple[Weight, ...]
    q_down: Weight | None = None
    q_norm: Weight | None = None


@dataclass(frozen=True, slots=True)
class Linear:
    """The parts of a gated delta net (arXiv 2412.06464), of Mamba2 (arXiv 2405.21060), which has no
    b, or of a short convolution, which has gates alone. It stands in the place of attention, and
    `Layer.o` is its last product; or beside attention, with an `o` of its own.

    qkv        [2 * keys + values, d], or several matrices whose products stand side by side; Mamba2
               has its values first, then keys and queries
    z          [values, d], the gate of the outputs; its product is multiplied by z_factor
    number     among the recurrent layers
    a, b       [value heads, d], of which the gates of the recurrence are made
    out_norm   the norm of each head's outputs, or of each group's; None: there is a gate alone
    conv, rates, rule, norm  Conv, Rates, StateRule and GatedNorm of kernels.recurrent
    keys       columns of all queries, and of all keys; key_dim: of a head's
    gate_in    [channels, d], the gate of what a short convolution sees
    """

    qkv: tuple[Weight, ...]
    z: Weight
    conv: Any
    number: int
    a: Weight | None = None
    b: Weight | None = None
    out_norm: Weight | None = None
    rates: Any = None
    rule: Any = None
    norm: Any = None
    keys: int = 0
    key_dim: int = 0
    gate_in: Weight | None = None
    z_factor: float = 1.0
    o: Weight | None = None
