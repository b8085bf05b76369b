"""The Ops protocol: what a backend must be able to do. Primitives, and composites of them.

Owns the types that cross from models and runtime into a backend. Must not know any model family,
request or policy. Arrays are opaque to callers: `models/` passes on what a backend returned and
never looks inside.

Batch invariance is part of the contract: every output row depends only on its own inputs, bit for
bit, whatever the number of rows, their order, the split of a sequence into steps, the block size or
the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.adapters import Adapter, Adapters, AdapterWeights
from pageturner.kernels.choosing import ChooseArgs, Head, SamplerOutput
from pageturner.kernels.layer_parts import Experts, Latent, Linear, PerLayer

Array = Any  # an fp32 activation matrix of the backend: [rows, columns]
Weight = Any  # a packed weight of the backend; a product with it reads its `nbytes`
KV = Any  # the paged KV storage of the backend

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
SQUARED = "relu2"  # stands for the square of relu, in an MLP without a gate
GATED = "clamped_swiglu"  # stands for an activation in a gated MLP, and is none of one number alone

# What a backend may lack. Loading refuses a model that needs something which its backend does not
# declare.
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
        "scale",  # Ops.scale, and Layer.residual
        "no_norm",  # layers without norms before attention and MLP
        "wide_norm",  # Layer.wide_qk_norm
        "chunks",  # AttentionShape.chunked
        "sinks",  # AttentionShape.sinks
        "attn_temperature",  # Layer.attn_temperature
        "latent",  # AttentionShape.latent and Layer.latent
        "shared_expert",  # experts beside a dense MLP
        "scoring",  # Experts.scoring, scale and weigh_input
        "expert_bias",  # biases of experts and their router
        "ordered",  # Tensor.order; without it such a matrix is rounded to int8 when it is loaded
    }
)

# What only the default bodies of the composites compute, out of primitives.
COMPOSED = frozenset(
    {
        "parallel",  # Layer.parallel
        "head_bias",  # Head.bias
        "late_norm",  # Layer.late_qk_norm
        "head_norms",  # Layer.head_norms
        "low_rank_queries",  # Latent.q_down
        "expert_choice",  # Experts.choice
        "shared_switch",  # Experts.shared_switch
        "recurrent",  # the operations of RecurrentReference, and Layer.linear
        "attn_gate",  # Layer.attn_gate
        "expert_norms",  # Experts.norm, and those beside it
        "shared_kv",  # layers without k
        "value_norm",  # Layer.v_norm, and values made of k
        "one_part",  # layers without attention, or without an MLP
        "factors",  # Layer.mlp_factors
        "per_layer",  # Layer.per_layer
        "out_scale",  # Layer.out_scale
    }
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight as it lies in its file.

    kind   "F32", "F16", "BF16", "Q8_0", "Q4_1", ... (GGML names; shape in elements)
    shape  (rows = outputs, columns = inputs), or (n,) for a vector
    data   uint8 view of the raw bytes, row-major, quantised blocks along the columns
    bits   for quantised kinds: what activations are rounded to in products with it. 8: one int8
           term; 15: two, the second one of what the first left, and the product is the sum of the
           two products; 12: one with half a second one (`reference_arrays.quantise_rows`), or 15
           where nothing is cheaper
    order  int32 [columns] of a quantised matrix whose columns lie in another order than its inputs,
           so that those of a group are neighbours: column i multiplies input order[i]. None: input
           i
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    bits: int = 8
    order: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables: cos and sin are fp32 [max_positions, rotary_dim / 2].

    interleaved  True: pairs are (2i, 2i+1) (GGUF `llama`); False: pairs are (i, i + rotary_dim/2)
                 (NeoX)

    Dimensions of a head behind rotary_dim pass through; the tables hold all scaling (Llama 3.1,
    YaRN).
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
    chunked   only j >= p - p % window are seen: chunks of `window` positions keep to themselves
              (Llama 4)
    sinks     one per query head, or (): the score of one more key, whose value is zero (gpt-oss)
    latent    > 0: there is no V of its own; that of a key is the first `latent` of its elements
              (MLA)
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    chunked: bool = False
    sinks: tuple[float, ...] = ()
    latent: int = 0


@dataclass(slots=True)
class Layer:
    """The packed weights of one decoder layer, and the numbers its composites need. Absent parts
    are None.

    A norm with a bias is a LayerNorm, without one an RMSNorm; without one before attention or MLP
    these see x itself. Without `gate` the MLP is down(act(up(x))). With `experts`, `gate`, `up` and
    `down` are the MLP of all rows beside them, whose product is added first, or None. Without `k`
    attention reads the K and V of the last layer before it of its kind (with or without a window);
    without `v` alone, and no `latent`, the product of k is the value, before its norm. Without `o`
    there is an MLP alone, without `up` and `experts` attention alone.
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
    act: str = "silu"  # one of ACTIVATIONS, or GATED, or SQUARED
    experts: Experts | None = None
    latent: Latent | None = None
    wide_qk_norm: bool = (
        False  # q_norm and k_norm are over all heads together, each with a vector (OLMo 2)
    )
    attn_temperature: F32 | None = (
        None  # [positions]: what the query of each position is multiplied by (Llama 4)
    )
    residual: float = 1.0  # what attention and MLP add is multiplied by it (Granite)
    parallel: bool = False  # MLP and experts see what attention sees (Cohere 2)
    late_qk_norm: bool = False  # q_norm and k_norm follow the rotary embedding (Hunyuan)
    head_norms: Callable[[Any, Any], tuple[Any, Any]] | None = None  # of q and k, by models/
    v_norm: Weight | None = None  # RMSNorm of the values of each head, one vector for all
    attn_gate: Weight | None = None  # its product's sigmoid is multiplied before `o` (Qwen3.5)
    linear: Linear | None = None  # in the place of attention, or beside it
    mlp_factors: tuple[float, float] = (1.0, 1.0)  # of the products of gate and down
    mixer_factors: tuple[float, float] = (1.0, 1.0)  # of attention, and of `linear` beside it
    per_layer: PerLayer | None = None
    out_scale: float = 1.0  # what comes out of the layer is multiplied by it
    native: Any = field(default=None, repr=False)  # what a backend attaches to it in prepare_layer
    native_mlp: Any = field(default=None, repr=False)  # the same for its MLP and experts
    native_experts: Any = field(default=None, repr=False)  # the same for its experts alone

    @property
    def writes(self) -> bool:
        """True if the layer keeps something of each row: K and V, or a state."""
        return self.k is not None or self.linear is not None

    @property
    def has_values(self) -> bool:
        return self.latent is None and self.k is not None

    @property
    def needs(self) -> frozenset[str]:
        """The features (see FEATURES) that a backend must have to compute this layer."""
        found = {
            "bias": self.o_bias is not None
            or self.up_bias is not None
            or self.down_bias is not None,
            "layer_norm": self.attn_norm_bias is not None or self.mlp_norm_bias is not None,
            "post_norm": self.attn_post_norm is not None or self.mlp_post_norm is not None,
            "activation": self.act != "silu" or (self.gate is None and self.experts is None),
            "window": self.shape.window > 0,
            "soft_cap": self.shape.soft_cap > 0,
            "alibi": bool(self.shape.slopes),
            "no_rotary": not self.rope.cos.shape[1],
            "scale": self.residual != 1,
            "no_norm": self.attn_norm is None or self.mlp_norm is None,
            "wide_norm": self.wide_qk_norm,
            "chunks": self.shape.chunked and self.shape.window > 0,
            "sinks": bool(self.shape.sinks),
            "attn_temperature": self.attn_temperature is not None,
            "latent": self.latent is not None,
            "low_rank_queries": self.latent is not None and self.latent.q_down is not None,
            "parallel": self.parallel,
            "late_norm": self.late_qk_norm,
            "head_norms": self.head_norms is not None,
            "shared_kv": not self.writes and self.o is not None,
            "value_norm": self.v_norm is not None or (self.v is None and self.has_values),
            "recurrent": self.linear is not None,
            "attn_gate": self.attn_gate is not None,
            "one_part": self.o is None or (self.up is None and self.experts is None),
            "factors": self.mlp_factors != (1, 1),
            "per_layer": self.per_layer is not None,
            "out_scale": self.out_scale != 1,
            "shared_expert": self.experts is not None and self.up is not None,
        }
        own = frozenset(name for name, needed in found.items() if needed)
        return own if self.experts is None else own | self.experts.needs


@dataclass(slots=True)
class Stack:
    """A decoder below its head: from tokens to hidden rows. Absent parts are None.

    embed        [V, d]; its rows times embed_scale, plus those of `positions` [P, d], then a norm,
                 go in
    eps          of that norm
    first_token  that of the first row of `embed`, which has not all of the `vocabulary` where ranks
                 share it; vocabulary 0: as many as it has rows
    """

    embed: Weight
    layers: list[Layer]
    eps: float
    embed_scale: float = 1.0
    positions: Weight | None = None
    embed_norm: Weight | None = None
    embed_norm_bias: Weight | None = None
    first_token: int = 0
    vocabulary: int = 0
    native: Any = field(default=None, repr=False)  # what a backend attaches to it in prepare_stack


@dataclass(frozen=True, slots=True)
class StateTables:
    """The slots and blocks that recurrent layers read and write in a step; all int32.

    state_read    [S] slot of the state before the chunk of the sequence's first row; -1: zeros
    state_writes  [W, 3] (sequence, chunk, slot): the state before that chunk goes to the slot. The
                  step computes the last row before it. Ordered by sequence, then chunk
    tail_table    [S, 2] block of the chunk of the first row, and of the last row if that is another
                  chunk; -1: its rows are not kept, and none of them are there already
    cache         the RecurrentCache that they are of
    """

    state_read: I32
    state_writes: I32
    tail_table: I32
    cache: Any = None


@dataclass(slots=True)
class Batch:
    """One ragged step, all arrays int32. T rows (tokens), S sequences, R rows whose logits are
    wanted.

    tokens       [T]
    positions    [T] absolute, from 0
    query_start  [S+1] rows of sequence s are query_start[s] .. query_start[s+1]-1
    context_len  [S] positions of the sequence that have KV once this step has written its own
    block_table  [S, B] block ids, padded with any valid id
    slots        [T] block * block_size + offset where the row's K and V go; -1: written nowhere
    logit_rows   [R] rows whose logits are wanted
    adapters     that of each sequence, or None; None: no sequence has one
    recurrent    where recurrent layers read and write; None: there are none
    """

    tokens: I32
    positions: I32
    query_start: I32
    context_len: I32
    block_table: I32
    slots: I32
    logit_rows: I32
    adapters: Adapters | None = None
    recurrent: StateTables | None = None


# Bytes of one element. int8 has a scale for the K, and one for the V, of each token and head:
# max|x| / 127. fp8_e4m3 has none unless KVSpec.scaled: what is beyond 448 becomes that. Kernels
# number them in this order.
KV_TYPES = {"int8": 1, "float16": 2, "float32": 4, "bfloat16": 2, "fp8_e4m3": 1}
GPU_HEAD_MULTIPLE = 16  # kernels of GPUs read 16 elements of a head of KV at once


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Paged KV storage: `blocks` blocks of `block_size` tokens in each of `layers` layers.

    latent  there is no V: it is a part of K (AttentionShape.latent)
    scaled  of fp8_e4m3: the K and the V of each token and head have a scale, a power of two
            (`float8.scale`)
    head_multiple  each stored head is padded with zeros to a multiple of so many elements
    beside  more layers, whose heads have another size: no one storage holds both
    """

    layers: int
    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str  # one of KV_TYPES
    latent: bool = False
    scaled: bool = False
    head_multiple: int = 1
    beside: KVSpec | None = None

    @property
    def stored_head(self) -> int:
        """Elements of a head as it is stored."""
        return -(-self.head_dim // self.head_multiple) * self.head_multiple

    @property
    def bytes_per_token(self) -> int:
        head = self.stored_head * KV_TYPES[self.dtype] + 4 * (
            self.dtype == "int8" or self.scaled
        )  # its scale
        own = (1 if self.latent else 2) * self.layers * self.kv_heads * head
        return own + (self.beside.bytes_per_token if self.beside is not None else 0)

    @property
    def nbytes(self) -> int:
        return self.bytes_per_token * self.block_size * self.blocks

    def split(self, windowed: int) -> tuple[KVSpec, KVSpec]:
        """The same in two, the second of the `windowed` layers."""
        if self.beside is not None:
            return replace(self, beside=None), self.beside
        return replace(self, layers=self.layers - windowed), replace(self, layers=windowed)


class Ops(Protocol):
    """A backend. Row means a row of activations; every primitive treats rows independently.

    name         "reference" | "native"
    fingerprint  what the bits depend on: build, instruction set
    features     those of FEATURES that it computes, in primitives and composites alike; without any
                 it computes layers whose `needs` are empty, and need not have the primitives marked
                 [feature]
    """

    name: str
    fingerprint: str
    gpu_kv: bool  # its KV is as GPUs store it: KVSpec.scaled, and heads of GPU_HEAD_MULTIPLE

    def default_activation_bits(self, kind: str) -> int:
        """Return the bits of activations (see Tensor) that products with weights of this GGML kind
        have where nobody says how many. 8 where more cost as much again."""

    @property
    def features(self) -> frozenset[str]: ...

    @property
    def divided(self) -> bool:
        """True if each of several ranks has a part of every layer, and the composites below ask for
        sums."""

    # -- storage -----------------------------------------------------------------------------------
    def pack_weight(self, tensor: Tensor) -> Weight:
        """A matrix in the backend's own layout, or an fp32 vector. EngineFault for an unknown
        kind."""

    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> Adapter:
        """[adapters] For `stack` alone; any thread may call it. MemoryError when there is none."""

    def alloc_kv(self, spec: KVSpec) -> KV:
        """Zeroed KV storage. EngineFault('kv_memory') when the memory is not there."""

    def copy_blocks(self, kv: KV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""

    def block_bytes(self, kv: KV) -> int:
        """Bytes of one block, all layers."""

    def read_blocks(self, kv: KV, blocks: I32, out: NDArray[np.uint8]) -> None:
        """Copy the bytes of whole blocks, all layers, to `out` [blocks, block_bytes]. What they
        mean is the backend's own: they are for write_blocks of the same fingerprint, layers and KV
        type."""

    def write_blocks(self, kv: KV, blocks: I32, data: NDArray[np.uint8]) -> None:
        """Give blocks the bytes that read_blocks found in others."""

    # -- primitives --------------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: I32) -> Array:
        """Rows of the table, dequantised to fp32: [T, d]."""

    def norm(self, x: Array, weight: Weight, eps: float) -> Array:
        """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""

    def layer_norm(self, x: Array, weight: Weight, bias: Weight, eps: float) -> Array:
        """[layer_norm] (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias over the
        last axis. Two passes: the mean first, then the squares of what is left."""

    def head_norm(self, x: Array, weight: Weight, eps: float, head_dim: int) -> Array:
        """RMSNorm over each head of x [T, heads * head_dim] with one weight vector [head_dim]."""

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x [T, K] times weight [N, K] transposed, plus bias: [T, N]. Quantised weights quantise x
        to int8 per group of 32 first (scale = max|x| / 127, round half to even)."""

    def rope(self, x: Array, positions: I32, rope: Rope, head_dim: int) -> Array:
        """Rotary embedding of every head of x [T, heads * head_dim]."""

    def kv_write(self, kv: KV, layer: int, k: Array, v: Array | None, slots: I32) -> None:
        """Round k and v [T, kv_heads * head_dim] to the KV type and store at their slots. Latent: v
        None."""

    def attention(self, q: Array, kv: KV, layer: int, batch: Batch, shape: AttentionShape) -> Array:
        """Causal attention of q [T, heads * head_dim] over the paged KV, which already holds this
        step's own K and V. The row at position p of its sequence sees positions 0..p, less what
        `shape.window` hides. Softmax partials are per 256-token segment counted from position 0,
        merged left to right; segments of which nothing is seen are left out, and sinks come last.
        With `shape.latent` the outputs are [T, heads * latent]."""

    def act_mul(self, gate: Array, up: Array) -> Array:
        """SiLU(gate) * up."""

    def clamped_swiglu(self, gate: Array, up: Array) -> Array:
        """[activation] With g = min(gate, 7) and u = min(max(up, -7), 7): g / (1 + exp(-1.702 g)) *
        (u + 1) (may write into both)."""

    def scale_rows(self, x: Array, factors: F32, rows: I32) -> Array:
        """[attn_temperature] Row i of x times factors[rows[i]] (may write into x)."""

    def head_linear(self, x: Array, weights: tuple[Weight, ...]) -> Array:
        """[latent] The columns of head h of x [T, heads * K] times weights[h] [N, K] transposed:
        [T, heads * N]."""

    def join_heads(self, x: Array, y: Array, heads: int) -> Array:
        """[latent] Of each head its columns of x [T, heads * A] and behind them those of y [T,
        heads * B]: [T, heads * (A + B)]."""

    def activate(self, x: Array, act: str) -> Array:
        """[activation] An activation of each element (may write into x). silu: x / (1 + exp(-x));
        gelu: x/2 * (1 + erf(x / sqrt(2))); gelu_tanh: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715
        x^3))); relu: max(x, 0)."""

    def mul(self, x: Array, y: Array) -> Array:
        """[activation] x * y, element by element (may write into x)."""

    def scale(self, x: Array, factor: float) -> Array:
        """[scale] x * factor, the factor rounded to fp32 (may write into x)."""

    def soft_cap(self, x: F32, cap: float) -> F32:
        """[soft_cap] cap * tanh(x / cap) of each element of logits [R, V] (may write into x)."""

    def route(
        self, logits: Array, top_k: int, normalise: bool, scoring: str = "softmax"
    ) -> tuple[I32, F32]:
        """[experts] For each row of router logits [T, E]: the ids of the top_k experts by (logit
        descending, id ascending), put in ascending order of id, and their weights, softmax(logits)
        over all experts, or [scoring] 1 / (1 + exp(-logit)); normalised: divided by their sum. Both
        [T, top_k]."""

    def add_rows(self, x: Array, y: Array, rows: I32, weights: F32) -> Array:
        """[experts] x with weights[i] * y[i] added to row rows[i] (may write into x). The product
        is rounded before it is added; rows are distinct."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y (may write into x)."""

    def adapt(self, y: Array, x: Array, adapters: Adapters, layer: int, field: str) -> Array:
        """[adapters] y [T, N] plus scale * B (A x) of each row's adapter for this field of a layer,
        or for "head" with layer -1 (may write into y)."""

    def adapt_embedded(self, x: Array, tokens: I32, adapters: Adapters) -> Array:
        """[adapters] The same for rows of the embedding (may write into x)."""

    def take_rows(self, x: Array, rows: I32) -> Array:
        """The rows of x: [R, d]."""

    def to_numpy(self, x: Array) -> F32:
        """x as numpy fp32 (a copy or the same memory)."""

    def top_logprobs(self, logits: F32, k: int) -> tuple[F32, I32, F32]:
        """Return for each row of logits [R, V] log-sum-exp [R]; ids [R, k] and logprobs [R, k] of
        the k most likely tokens, by (logit descending, id ascending). A row whose largest logit is
        no finite number, NaN being the largest of all, has NaN for both and zeros for ids."""

    def sample(
        self, logits: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, uniform: F32
    ) -> I32:
        """One token id per row of logits [R, V] (all parameter arrays [R]). temperature 0: argmax
        by (logit descending, id ascending). Otherwise p = softmax(logit / temperature); min_p > 0
        keeps p >= min_p * max(p); then top_k > 0 keeps the k best by (logit descending, id
        ascending); then top_p < 1 keeps the smallest leading set, in that order, whose probability
        among what is left reaches top_p. The token is the first one, in id order, at which the
        running sum of what is left exceeds uniform * total. A row with a NaN gives the first one,
        and any other row whose largest logit is not finite the first of these: its logit tells."""

    # -- composites: default bodies in `Composites`; a backend overrides them with one native call
    def prepare_layer(self, layer: Layer) -> None:
        """Called once per layer after loading; a backend may attach its own form as
        `layer.native`."""

    def prepare_stack(self, stack: Stack) -> None:
        """Called once, when its layers are prepared; a backend may attach its own form as
        `stack.native`."""

    def hidden(self, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None) -> Array:
        """A whole step below the head: writes K and V of every row in every layer, returns the
        wanted rows [R, d] before the final norm.

        sliding  of the layers with a window, where these have block tables and storage of their
                 own; layers are numbered within their storage
        """

    def summed(self, x: Array, residual: Array | None = None) -> Array:
        """residual + the sum of x over all ranks, from rank 0 to the last; x itself where there is
        one."""

    def embed_tokens(self, stack: Stack, tokens: I32) -> Array:
        """`embed` with the table of the stack, of which each rank may have a slice: [T, d]."""

    def attention_block(self, x: Array, layer: Layer, kv: KV, index: int, batch: Batch) -> Array:
        """x + residual * post_norm(o(attention(rope(q(norm(x))), ...))) (may write into x)."""

    def mlp_block(self, x: Array, layer: Layer) -> Array:
        """x + residual * post_norm(down(act(gate(norm(x))) * up(norm(x)))), or the like without a
        gate, or with experts (may write into x)."""

    def add_experts(self, x: Array, h: Array, layer: Layer) -> Array:
        """[experts] x plus what the experts of a layer make of each row of h, from the first one to
        the last (may write into x)."""

    def logits(self, x: Array, head: Head, adapters: Adapters | None = None) -> F32:
        """Logits of hidden rows x [R, d]: fp32 [R, V]. adapters: that of each row, or None."""

    def choose(self, x: Array, head: Head, args: ChooseArgs) -> SamplerOutput:
        """`sample` of the `logits` of x [R, d], once the edits have changed them and tokens that
        neither `allowed` nor the edits leave are minus infinity. Logits stay where they are. The
        default body defines it."""
