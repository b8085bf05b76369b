"""The Ops protocol: what a backend must be able to do. Primitives, and composites made of them.

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

Array = Any  # an fp32 activation matrix of the backend: [rows, columns]
Weight = Any  # a packed weight of the backend
KV = Any  # the paged KV storage of the backend

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight as it lies in its file.

    kind   "F32", "F16", "BF16", "Q8_0", "Q4_1", ... (GGML names; shape in elements)
    shape  (rows = outputs, columns = inputs), or (n,) for a vector
    data   uint8 view of the raw bytes, row-major, quantised blocks along the columns
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables: cos and sin are fp32 [max_positions, rotary_dim / 2].

    interleaved  True: pairs are (2i, 2i+1) (GGUF `llama`); False: pairs are (i, i + rotary_dim/2) (NeoX)
    """

    cos: F32
    sin: F32
    interleaved: bool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer: `heads` query heads share `kv_heads` KV heads; scores are scaled by `scale`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(slots=True)
class Layer:
    """The packed weights of one decoder layer, and the numbers its composites need. Absent parts are None."""

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
    native: Any = field(default=None, repr=False)  # what a backend attaches to it in prepare_layer


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


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Paged KV storage: `blocks` blocks of `block_size` tokens in each of `layers` layers."""

    layers: int
    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str  # "float16" | "float32"

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * (2 if self.dtype == "float16" else 4)

    @property
    def nbytes(self) -> int:
        return self.bytes_per_token * self.block_size * self.blocks


class Ops(Protocol):
    """A backend. Row means a row of activations; every primitive treats rows independently.

    name         "reference" | "native"
    fingerprint  what the bits depend on: build, instruction set
    """

    name: str
    fingerprint: str

    # -- storage ---------------------------------------------------------------------------------------------
    def pack_weight(self, tensor: Tensor) -> Weight:
        """A matrix in the backend's own layout, or an fp32 vector. EngineFault for an unknown kind."""

    def alloc_kv(self, spec: KVSpec) -> KV:
        """Zeroed KV storage. EngineFault('kv_memory') when the memory is not there."""

    def copy_blocks(self, kv: KV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""

    def poison_blocks(self, kv: KV, blocks: list[int]) -> None:
        """Fill blocks with NaN in every layer, so that a test sees any read of a stale block."""

    # -- primitives ------------------------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: I32) -> Array:
        """Rows of the table, dequantised to fp32: [T, d]."""

    def norm(self, x: Array, weight: Weight, eps: float) -> Array:
        """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""

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
        K and V. The row at position p of its sequence sees positions 0..p. Softmax partials are per 256-token
        segment counted from position 0, merged left to right."""

    def act_mul(self, gate: Array, up: Array) -> Array:
        """SiLU(gate) * up."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y (may write into x)."""

    def take_rows(self, x: Array, rows: I32) -> Array:
        """The rows of x: [R, d]."""

    def to_numpy(self, x: Array) -> F32:
        """x as numpy fp32 (a copy or the same memory)."""

    def top_logprobs(self, logits: F32, k: int) -> tuple[F32, I32, F32]:
        """For each row of logits [R, V]: log-sum-exp [R]; ids [R, k] and logprobs [R, k] of the k most likely
        tokens, by (logit descending, id ascending)."""

    def sample(self, logits: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, uniform: F32) -> I32:
        """One token id per row of logits [R, V] (all parameter arrays [R]).

        temperature 0: argmax by (logit descending, id ascending). Otherwise p = softmax(logit / temperature);
        min_p > 0 keeps p >= min_p * max(p); then top_k > 0 keeps the k best by (logit descending, id
        ascending); then top_p < 1 keeps the smallest leading set, in that order, whose probability among what
        is left reaches top_p. The token is the first one, in id order, at which the running sum of what is
        left exceeds uniform * total."""

    # -- composites: default bodies in `Composites`; a backend overrides them with one native call
    def prepare_layer(self, layer: Layer) -> None:
        """Called once per layer after loading; a backend may attach its own form as `layer.native`."""

    def attention_block(self, x: Array, layer: Layer, kv: KV, index: int, batch: Batch) -> Array:
        """x + o(attention(rope(q(norm(x))), ...)) (may write into x)."""

    def mlp_block(self, x: Array, layer: Layer) -> Array:
        """x + down(SiLU(gate(norm(x))) * up(norm(x))) (may write into x)."""

    def logits(self, x: Array, norm: Weight, eps: float, head: Weight) -> F32:
        """Final norm and output head of the wanted rows x [R, d]: fp32 [R, V]."""


class Composites:
    """Default bodies of the composites, made of primitives. A test holds every override against these."""

    def prepare_layer(self: Any, layer: Layer) -> None:
        return None

    def attention_block(self: Any, x: Array, layer: Layer, kv: KV, index: int, batch: Batch) -> Array:
        h = self.norm(x, layer.attn_norm, layer.eps)
        q = self.linear(h, layer.q, layer.q_bias)
        k = self.linear(h, layer.k, layer.k_bias)
        v = self.linear(h, layer.v, layer.v_bias)
        dim = layer.shape.head_dim
        if layer.q_norm is not None:
            q = self.head_norm(q, layer.q_norm, layer.eps, dim)
            k = self.head_norm(k, layer.k_norm, layer.eps, dim)
        q = self.rope(q, batch.positions, layer.rope, dim)
        k = self.rope(k, batch.positions, layer.rope, dim)
        self.kv_write(kv, index, k, v, batch.slots)
        o = self.attention(q, kv, index, batch, layer.shape)
        return self.add(x, self.linear(o, layer.o))

    def mlp_block(self: Any, x: Array, layer: Layer) -> Array:
        h = self.norm(x, layer.mlp_norm, layer.eps)
        h = self.act_mul(self.linear(h, layer.gate), self.linear(h, layer.up))
        return self.add(x, self.linear(h, layer.down))

    def logits(self: Any, x: Array, norm: Weight, eps: float, head: Weight) -> F32:
        out: F32 = self.to_numpy(self.linear(self.norm(x, norm, eps), head))
        return out
