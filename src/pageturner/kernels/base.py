"""The Ops protocol: what a backend must be able to do. Primitives, and composites of them.

Owns the types that cross from models and runtime into a backend. Must not know any model family, request or
policy. Arrays are opaque to callers: `models/` passes on what a backend returned and never looks inside.

Batch invariance is part of the contract: every output row depends only on its own inputs, bit for bit,
whatever the number of rows, their order, the split of a sequence into steps, the block size or the number of
threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.edits import Allowed, Edits

Array = Any  # an fp32 activation matrix of the backend: [rows, columns]
Weight = Any  # a packed weight of the backend; a product with it reads its `nbytes`
KV = Any  # the paged KV storage of the backend

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Draw = tuple[F32, I32, F32, F32, F32]  # temperature, top_k, top_p, min_p, uniform: see Ops.sample

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

# What a backend may lack. Loading refuses a model that needs something which its backend does not declare.
FEATURES = frozenset(
    {
        "bias",  # of the output projection and in the MLP
        "layer_norm",  # norms with a mean and a bias
        "post_norm",  # norms behind attention and MLP
        "activation",  # another one than gated SiLU
        "experts",  # mixtures of experts
        "window",  # AttentionShape.window
        "soft_cap",  # AttentionShape.soft_cap and Ops.soft_cap
        "alibi",  # AttentionShape.slopes
        "no_rotary",  # rotary tables of no columns
        "scale",  # Ops.scale
    }
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight as it lies in its file.

    kind   "F32", "F16", "BF16", "Q8_0", "Q4_1", ... (GGML names; shape in elements)
    shape  (rows = outputs, columns = inputs), or (n,) for a vector
    data   uint8 view of the raw bytes, row-major, quantised blocks along the columns
    fine   for quantised kinds: activations are rounded to two int8 terms (about 15 bits), the second one of
           what the first left, and the product is the sum of the two products; else to one
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    fine: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables: cos and sin are fp32 [max_positions, rotary_dim / 2].

    interleaved  True: pairs are (2i, 2i+1) (GGUF `llama`); False: pairs are (i, i + rotary_dim/2) (NeoX)

    Dimensions of a head behind rotary_dim pass through; tables of no columns rotate nothing. Scaling of
    frequencies and amplitudes (Llama 3.1, YaRN) is in the tables.
    """

    cos: F32
    sin: F32
    interleaved: bool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer: `heads` query heads share `kv_heads` KV heads.

    The score of the query at position p and the key at position j <= p, in this order:

    scale     s = scale * (q . k)
    soft_cap  > 0: s = soft_cap * tanh(s / soft_cap)           (Gemma 2)
    slopes    one per query head, or (): s = s + slope * (j - p)  (ALiBi)
    window    > 0: only j > p - window are seen, as if the others were not there
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated MLPs in place of one; index e of each tuple is expert e.

    router     [experts, d]; its logits choose for each row
    top_k      experts per row
    normalise  the weights of the chosen ones are scaled to a sum of 1
    """

    router: Weight
    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    top_k: int
    normalise: bool


@dataclass(slots=True)
class Layer:
    """The packed weights of one decoder layer, and the numbers its composites need. Absent parts are None.

    A norm with a bias is a LayerNorm, without one an RMSNorm. Without `gate` the MLP is down(act(up(x))).
    With `experts`, `gate`, `up` and `down` are None.
    """

    attn_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    mlp_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    shape: AttentionShape
    rope: Rope
    eps: float
    q_norm: Weight | None = None  # RMSNorm over head_dim, one vector for all heads (Qwen3)
    k_norm: Weight | None = None
    q_bias: Weight | None = None
    k_bias: Weight | None = None
    v_bias: Weight | None = None
    o_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None
    attn_norm_bias: Weight | None = None
    mlp_norm_bias: Weight | None = None
    attn_post_norm: Weight | None = None  # RMSNorm of what attention adds to x (Gemma 2, 3)
    mlp_post_norm: Weight | None = None
    act: str = "silu"  # one of ACTIVATIONS
    experts: Experts | None = None
    native: Any = field(default=None, repr=False)  # what a backend attaches to it in prepare_layer

    @property
    def needs(self) -> frozenset[str]:
        """The features (see FEATURES) that a backend must have to compute this layer."""
        found = {
            "bias": self.o_bias is not None or self.up_bias is not None or self.down_bias is not None,
            "layer_norm": self.attn_norm_bias is not None or self.mlp_norm_bias is not None,
            "post_norm": self.attn_post_norm is not None or self.mlp_post_norm is not None,
            "activation": self.act != "silu" or (self.gate is None and self.experts is None),
            "experts": self.experts is not None,
            "window": self.shape.window > 0,
            "soft_cap": self.shape.soft_cap > 0,
            "alibi": bool(self.shape.slopes),
            "no_rotary": not self.rope.cos.shape[1],
        }
        return frozenset(name for name, needed in found.items() if needed)


@dataclass(slots=True)
class Stack:
    """A decoder below its head: from tokens to hidden rows. Absent parts are None.

    embed        [V, d]; its rows times embed_scale, plus those of `positions` [P, d], then a norm, go in
    eps          of that norm
    """

    embed: Weight
    layers: list[Layer]
    eps: float
    embed_scale: float = 1.0
    positions: Weight | None = None
    embed_norm: Weight | None = None
    embed_norm_bias: Weight | None = None
    native: Any = field(default=None, repr=False)  # what a backend attaches to it in prepare_stack


@dataclass(slots=True)
class Batch:
    """One ragged step, all arrays int32. T rows (tokens), S sequences, R rows whose logits are wanted.

    tokens       [T]
    positions    [T] absolute, from 0
    query_start  [S+1] rows of sequence s are query_start[s] .. query_start[s+1]-1
    context_len  [S] positions of the sequence that have KV once this step has written its own
    block_table  [S, B] block ids, padded with any valid id
    slots        [T] block * block_size + offset where the row's K and V go; -1: written nowhere
    logit_rows   [R] rows whose logits are wanted
    """

    tokens: I32
    positions: I32
    query_start: I32
    context_len: I32
    block_table: I32
    slots: I32
    logit_rows: I32


# Bytes of one element. int8 has a scale for the K, and one for the V, of each token and head: max|x| / 127.
KV_TYPES = {"int8": 1, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Paged KV storage: `blocks` blocks of `block_size` tokens in each of `layers` layers."""

    layers: int
    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str  # one of KV_TYPES

    @property
    def bytes_per_token(self) -> int:
        head = self.head_dim * KV_TYPES[self.dtype] + (4 if self.dtype == "int8" else 0)  # and its scale
        return 2 * self.layers * self.kv_heads * head

    @property
    def nbytes(self) -> int:
        return self.bytes_per_token * self.block_size * self.blocks


@dataclass(frozen=True, slots=True)
class Head:
    """What makes logits [R, V] of hidden rows [R, d]: a norm (a LayerNorm if it has a bias), a product, and
    where soft_cap > 0 soft_cap * tanh(x / soft_cap) of each logit."""

    norm: Weight
    eps: float
    weight: Weight
    norm_bias: Weight | None = None
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """Which logprobs `Ops.choose` is asked for, for each of R rows. No count may exceed the vocabulary.

    top         [R] -1: nothing; k: the logprob of the token, and the k likeliest tokens. By the raw logits
    candidates  [R] n > 0: in place of a token the n best of a beam search. Their edits are done to logprobs
    """

    top: I32
    candidates: I32


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprobs that were wanted, row by row; what was not asked for has no meaning.

    lse         [R] log-sum-exp of the raw logits
    chosen      [R] of the chosen token
    top         ids and logprobs [R, most that is wanted], by (logit descending, id ascending)
    candidates  ids and logprobs behind the edits [R, most that is wanted], in the same order. If fewer are
                possible, the others are no finite numbers or are there once more
    """

    lse: F32
    chosen: F32
    top: tuple[I32, F32]
    candidates: tuple[I32, F32]

    @classmethod
    def room_for(cls, wanted: LogprobsWanted) -> Logprobs:
        """Zeros, to be filled in."""
        rows, most = len(wanted.top), int(max(wanted.top.max(initial=0), 0))
        best = int(wanted.candidates.max(initial=0))
        zeros = [np.zeros(shape, np.float32) for shape in (rows, rows, (rows, most), (rows, best))]
        ids = [np.zeros((rows, columns), np.int32) for columns in (most, best)]
        return cls(zeros[0], zeros[1], (ids[0], zeros[2]), (ids[1], zeros[3]))


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """A token for each of R rows, and its logit behind the edits, which is no finite number where the row is
    none or nothing may be chosen. Of a row with candidates it is the first of these."""

    ids: I32
    logits: F32
    logprobs: Logprobs | None = None


class Ops(Protocol):
    """A backend. Row means a row of activations; every primitive treats rows independently.

    name         "reference" | "native"
    fingerprint  what the bits depend on: build, instruction set
    features     those of FEATURES that it computes, in primitives and composites alike; without any it
                 computes layers whose `needs` are empty, and need not have the primitives marked [feature]
    """

    name: str
    fingerprint: str

    @property
    def features(self) -> frozenset[str]: ...

    # -- storage ---------------------------------------------------------------------------------------------
    def pack_weight(self, tensor: Tensor) -> Weight:
        """A matrix in the backend's own layout, or an fp32 vector. EngineFault for an unknown kind."""

    def alloc_kv(self, spec: KVSpec) -> KV:
        """Zeroed KV storage. EngineFault('kv_memory') when the memory is not there."""

    def copy_blocks(self, kv: KV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""

    # -- primitives ------------------------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: I32) -> Array:
        """Rows of the table, dequantised to fp32: [T, d]."""

    def norm(self, x: Array, weight: Weight, eps: float) -> Array:
        """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""

    def layer_norm(self, x: Array, weight: Weight, bias: Weight, eps: float) -> Array:
        """[layer_norm] (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias over the last axis.
        Two passes: the mean first, then the squares of what is left."""

    def head_norm(self, x: Array, weight: Weight, eps: float, head_dim: int) -> Array:
        """RMSNorm over each head of x [T, heads * head_dim] with one weight vector [head_dim]."""

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x [T, K] times weight [N, K] transposed, plus bias: [T, N]. Quantised weights quantise x to int8
        per group of 32 first (scale = max|x| / 127, round half to even)."""

    def rope(self, x: Array, positions: I32, rope: Rope, head_dim: int) -> Array:
        """Rotary embedding of every head of x [T, heads * head_dim]."""

    def kv_write(self, kv: KV, layer: int, k: Array, v: Array, slots: I32) -> None:
        """Round k and v [T, kv_heads * head_dim] to the KV type and store them at their slots."""

    def attention(self, q: Array, kv: KV, layer: int, batch: Batch, shape: AttentionShape) -> Array:
        """Causal attention of q [T, heads * head_dim] over the paged KV, which already holds this step's own
        K and V. The row at position p of its sequence sees positions 0..p, less what `shape.window` hides.
        Softmax partials are per 256-token segment counted from position 0, merged left to right; segments
        of which nothing is seen are left out."""

    def act_mul(self, gate: Array, up: Array) -> Array:
        """SiLU(gate) * up."""

    def activate(self, x: Array, act: str) -> Array:
        """[activation] An activation of each element (may write into x). silu: x / (1 + exp(-x)); gelu:
        x/2 * (1 + erf(x / sqrt(2))); gelu_tanh: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))); relu:
        max(x, 0)."""

    def mul(self, x: Array, y: Array) -> Array:
        """[activation] x * y, element by element (may write into x)."""

    def scale(self, x: Array, factor: float) -> Array:
        """[scale] x * factor, the factor rounded to fp32 (may write into x)."""

    def soft_cap(self, x: F32, cap: float) -> F32:
        """[soft_cap] cap * tanh(x / cap) of each element of logits [R, V] (may write into x)."""

    def route(self, logits: Array, top_k: int, normalise: bool) -> tuple[I32, F32]:
        """[experts] For each row of router logits [T, E]: the ids of the top_k experts by (logit descending,
        id ascending), put in ascending order of id, and their weights, softmax(logits) over all experts;
        normalised: divided by their sum. Both [T, top_k]."""

    def add_rows(self, x: Array, y: Array, rows: I32, weights: F32) -> Array:
        """[experts] x with weights[i] * y[i] added to row rows[i] (may write into x). The product is rounded
        before it is added; rows are distinct."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y (may write into x)."""

    def take_rows(self, x: Array, rows: I32) -> Array:
        """The rows of x: [R, d]."""

    def to_numpy(self, x: Array) -> F32:
        """x as numpy fp32 (a copy or the same memory)."""

    def top_logprobs(self, logits: F32, k: int) -> tuple[F32, I32, F32]:
        """For each row of logits [R, V]: log-sum-exp [R]; ids [R, k] and logprobs [R, k] of the k most likely
        tokens, by (logit descending, id ascending). A row whose largest logit is no finite number, NaN being
        the largest of all, has NaN for both and zeros for ids."""

    def sample(self, logits: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, uniform: F32) -> I32:
        """One token id per row of logits [R, V] (all parameter arrays [R]).

        temperature 0: argmax by (logit descending, id ascending). Otherwise p = softmax(logit / temperature);
        min_p > 0 keeps p >= min_p * max(p); then top_k > 0 keeps the k best by (logit descending, id
        ascending); then top_p < 1 keeps the smallest leading set, in that order, whose probability among what
        is left reaches top_p. The token is the first one, in id order, at which the running sum of what is
        left exceeds uniform * total.

        A row with a NaN gives the first one, and any other row whose largest logit is not finite the first of
        these: its logit tells."""

    # -- composites: default bodies in `Composites`; a backend overrides them with one native call
    def prepare_layer(self, layer: Layer) -> None:
        """Called once per layer after loading; a backend may attach its own form as `layer.native`."""

    def prepare_stack(self, stack: Stack) -> None:
        """Called once, when its layers are prepared; a backend may attach its own form as `stack.native`."""

    def hidden(self, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None) -> Array:
        """A whole step below the head: writes K and V of every row in every layer, returns the wanted rows
        [R, d] before the final norm.

        sliding  of the layers with a window, where these have block tables and storage of their own; layers
                 are numbered within their storage
        """

    def attention_block(self, x: Array, layer: Layer, kv: KV, index: int, batch: Batch) -> Array:
        """x + post_norm(o(attention(rope(q(norm(x))), ...))) (may write into x)."""

    def mlp_block(self, x: Array, layer: Layer) -> Array:
        """x + post_norm(down(act(gate(norm(x))) * up(norm(x)))), or the like without a gate or with experts
        (may write into x)."""

    def logits(self, x: Array, head: Head) -> F32:
        """Logits of hidden rows x [R, d]: fp32 [R, V]."""

    def choose(
        self,
        x: Array,
        head: Head,
        draw: Draw,
        allowed: Allowed | None = None,
        edits: Edits | None = None,
        wanted: LogprobsWanted | None = None,
    ) -> SamplerOutput:
        """`sample` of the `logits` of x [R, d], once `edits` have changed them and what neither `allowed` nor
        `edits` leave is minus infinity. Logits stay where they are: the default body defines
        it, with kernels/edits.py."""
