"""The native backend: `Ops` by the C++ kernels in `native/`, by the instruction set of this CPU.

Owns the binding between the Ops protocol and the compiled module: output arrays, error names, the
choice of the instruction set. Must not know any model family, request or policy. Activations are
C-contiguous fp32 numpy arrays. Every number is computed in C++; each call, also a composite such as
`hidden`, enters the thread pool once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner import memory
from pageturner.errors import EngineFault
from pageturner.kernels.adapters import Adapter, Adapters, AdapterWeights
from pageturner.kernels.base import (
    ACTIVATIONS,
    COMPOSED,
    F32,
    FEATURES,
    I32,
    KV,
    KV_TYPES,
    AttentionShape,
    Batch,
    KVSpec,
    Layer,
    Rope,
    Stack,
    Tensor,
    Weight,
)
from pageturner.kernels.choosing import (
    ChooseArgs,
    Head,
    Logprobs,
    SamplerOutput,
)
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu import native_views as views
from pageturner.kernels.cpu.native_module import choose_isa, module
from pageturner.kernels.cpu.native_views import attention_options, first_of_heads
from pageturner.kernels.recurrent import Conv, GatedNorm, Place, Rates, StateRule

_SOURCES = [  # in the order of pt::Source
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_NL",
    "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", "Q4_W", "Q8_W", "T4_W", "F8_W",
]  # fmt: skip
_EIGHT_BITS = frozenset({"Q8_0", "Q8_W", "Q3_K"})  # of which int8 weights are made, Q8 and Q8Half
_WIDENED = ("avx2", "portable")  # where these become int16: kInt16 in micro_*.h
_VECTORS: dict[str, Any] = {"F32": np.float32, "F16": np.float16}


class NativeOps(Composites):
    """`Ops` by compiled kernels. Calls from several threads are allowed and run one after the
    other.

    threads  0: one for each core that this process may use
    isa      one of available_isas(); None: $PAGETURNER_ISA, else the best one
    """

    def __init__(self, threads: int = 0, isa: str | None = None) -> None:
        self.name = "native"
        self.isa = choose_isa(isa)
        self.threads = threads or len(os.sched_getaffinity(0))
        self.fingerprint = f"native-{self.isa}-{module().build}"
        self._engine = module().Engine(self.threads, self.isa)
        self._logits: F32 = np.empty((0, 0), np.float32)

    @property
    def features(self) -> frozenset[str]:
        """All of them."""
        return FEATURES | COMPOSED

    def default_activation_bits(self, kind: str) -> int:
        """12 where whole bytes of weights are multiplied, and summed in 32 bits; 15 of weights of 8
        bits that are multiplied as 16, as activations may then be."""
        if self.isa in ("avx512vnni", "amx"):
            return 12
        return 15 if self.isa in _WIDENED and kind in _EIGHT_BITS else 8

    # -- storage -----------------------------------------------------------------------------------
    def pack_weight(self, tensor: Tensor) -> Weight:
        """A packed matrix (also for `embed`), or an fp32 vector. EngineFault: an unknown kind."""
        if len(tensor.shape) == 1 and tensor.kind in _VECTORS:
            values = np.array(tensor.data).view(_VECTORS[tensor.kind])
            return values.astype(np.float32).reshape(tensor.shape)
        if tensor.kind not in _SOURCES or len(tensor.shape) != 2:
            raise EngineFault(
                "unsupported_weight",
                f"{tensor.name}: {tensor.kind} of shape {tensor.shape} has no native kernel;"
                f" there are kernels for matrices of {', '.join(_SOURCES)}",
            )
        try:
            data = np.ascontiguousarray(tensor.data).reshape(-1)
            return self._engine.pack(
                _SOURCES.index(tensor.kind), data, *tensor.shape, tensor.bits, tensor.order
            )
        except ValueError as e:
            raise EngineFault(
                "bad_weight", f"{tensor.name} ({tensor.kind}, {tensor.shape}): {e}"
            ) from e
        except MemoryError as e:
            raise EngineFault(
                "weight_memory", f"{tensor.name}: not enough memory for the packed weight"
            ) from e

    def alloc_kv(self, spec: KVSpec) -> KV:
        """Zeroed KV storage. EngineFault('kv_memory') when the memory is not there."""
        if spec.dtype not in KV_TYPES or spec.head_dim % 8:
            raise EngineFault(
                "kv_dtype", f"no native KV storage of {spec.dtype} with head_dim {spec.head_dim}"
            )
        free = memory.available()
        wanted = f"the KV cache needs {spec.nbytes / 1e6:.0f} MB"
        if free is not None and spec.nbytes > free:
            raise EngineFault(
                "kv_memory", f"{wanted}, of which {free / 1e6:.0f} MB are free: ask for less of it"
            )
        try:
            return module().alloc_kv(
                spec.layers,
                spec.blocks,
                spec.block_size,
                spec.kv_heads,
                spec.head_dim,
                list(KV_TYPES).index(spec.dtype),
                latent=spec.latent,
            )
        except MemoryError as e:
            raise EngineFault(
                "kv_memory", f"{wanted}, which the system refuses: ask for less of it"
            ) from e

    def copy_blocks(self, kv: KV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer, in the order of the list."""
        if pairs:
            self._engine.copy_blocks(kv, pairs)

    def block_bytes(self, kv: KV) -> int:
        """Bytes of one block, all layers."""
        return int(kv.memory.shape[1])

    def read_blocks(self, kv: KV, blocks: I32, out: NDArray[np.uint8]) -> None:
        """Copy the bytes of whole blocks to `out` [blocks, block_bytes]."""
        for block, row in zip(blocks.tolist(), out, strict=True):
            row[:] = kv.memory[block]

    def write_blocks(self, kv: KV, blocks: I32, data: NDArray[np.uint8]) -> None:
        """Give blocks the bytes that read_blocks found in others."""
        kv.memory[blocks] = data

    def store_weight(self, weight: Weight, fd: int, offset: int) -> tuple[list[Any], int]:
        """Write a packed matrix to a file: what `fetch_weight` needs, and a checksum. OSError."""
        try:
            checksum = self._engine.store(weight, fd, offset)
        except RuntimeError as e:
            raise OSError(None, str(e)) from e
        return [weight.kind, weight.bits, *weight.shape, weight.ordered], checksum

    def fetch_weight(self, about: list[Any], fd: int, offset: int) -> tuple[Weight, int]:
        """A matrix that `store_weight` wrote, and its checksum. OSError, ValueError."""
        kind, bits, n, k, ordered = about
        try:
            weight, checksum = self._engine.fetch(kind, bits, n, k, ordered, fd, offset)
        except RuntimeError as e:
            raise OSError(None, str(e)) from e
        return weight, checksum

    # -- threads and ranks -------------------------------------------------------------------------
    def pin_threads(self, cores: list[int] | None = None) -> None:
        """Keep each helping thread on one of these cores, or of those of this process."""
        self._engine.pin_threads(cores or sorted(os.sched_getaffinity(0)))

    def join(self, ranks: Any) -> None:
        """Make layers slices from here on, whose sums are over `ranks` (kernels/comm.py)."""
        self._engine.join(ranks)

    def join_stages(self, ranks: Any) -> None:
        """Make layers those of one stage from here on, of the others in `ranks`."""
        self._engine.join_stages(ranks)

    # -- primitives --------------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: I32) -> F32:
        """Rows of the table, dequantised: [T, d]. ValueError for an id outside of the table."""
        out = np.empty((len(tokens), table.shape[1]), np.float32)
        self._engine.embed(table, tokens, out)
        return out

    def norm(self, x: F32, weight: Weight, eps: float) -> F32:
        """RMSNorm over the last axis of x [T, d]."""
        out = np.empty_like(x)
        self._engine.norm(x, weight, eps, out)
        return out

    def layer_norm(self, x: F32, weight: Weight, bias: Weight, eps: float) -> F32:
        """LayerNorm over the last axis of x [T, d]."""
        out = np.empty_like(x)
        self._engine.layer_norm(x, weight, bias, eps, out)
        return out

    def head_norm(self, x: F32, weight: Weight, eps: float, head_dim: int) -> F32:
        """RMSNorm over each head of x [T, heads * head_dim]."""
        return self.norm(x.reshape(-1, head_dim), weight, eps).reshape(x.shape)

    def linear(self, x: F32, weight: Weight, bias: Weight | None = None) -> F32:
        """x [T, K] times weight [N, K] transposed, plus bias: [T, N]."""
        out = np.empty((len(x), weight.shape[0]), np.float32)
        self._engine.linear(x, weight, bias, out)
        return out

    def rope(self, x: F32, positions: I32, rope: Rope, head_dim: int) -> F32:
        """Rotary embedding of every head of x [T, heads * head_dim]."""
        out = x.copy()
        self._engine.rope(out, positions, rope.cos, rope.sin, rope.interleaved, head_dim)
        return out

    def kv_write(self, kv: KV, layer: int, k: F32, v: F32 | None, slots: I32) -> None:
        """Round k and v [T, kv_heads * head_dim] to the KV type and store them at their slots."""
        self._engine.kv_write(kv, layer, k, v, slots)

    def attention(self, q: F32, kv: KV, layer: int, batch: Batch, shape: AttentionShape) -> F32:
        """Causal attention of q [T, heads * head_dim] over the paged KV."""
        out = np.empty_like(q)
        self._engine.attention(
            q, kv, layer, views.batch_view(batch), *attention_options(shape), out
        )
        return first_of_heads(out, shape)

    def act_mul(self, gate: F32, up: F32) -> F32:
        """SiLU(gate) * up."""
        out = np.empty_like(gate)
        self._engine.act_mul(gate, up, out)
        return out

    def clamped_swiglu(self, gate: F32, up: F32) -> F32:
        """gpt-oss's gated activation."""
        out = np.empty_like(gate)
        self._engine.clamped_swiglu(gate, up, out)
        return out

    def scale_rows(self, x: F32, factors: F32, rows: I32) -> F32:
        """Row i of x times factors[rows[i]], written into x."""
        return np.multiply(x, factors[rows][:, None], out=x)

    def head_linear(self, x: F32, weights: tuple[Weight, ...]) -> F32:
        """Multiply the columns of each head of x [T, heads * K] by its own matrix."""
        out = np.empty((len(x), len(weights) * weights[0].shape[0]), np.float32)
        self._engine.head_linear(x, weights, out)
        return out

    def join_heads(self, x: F32, y: F32, heads: int) -> F32:
        """Join, for each head, its columns of x and its columns of y."""
        parts = [a.reshape(len(a), heads, -1) for a in (x, y)]
        return np.concatenate(parts, axis=2).reshape(len(x), -1)

    def activate(self, x: F32, act: str) -> F32:
        """An activation of each element, written into x."""
        self._engine.activate(x, ACTIVATIONS.index(act), x)
        return x

    def mul(self, x: F32, y: F32) -> F32:
        """x * y, written into x."""
        self._engine.mul(x, y, x)
        return x

    def scale(self, x: F32, factor: float) -> F32:
        """x * factor, written into x."""
        return np.multiply(x, np.float32(factor), out=x)

    def soft_cap(self, x: F32, cap: float) -> F32:
        """cap * tanh(x / cap), written into x."""
        self._engine.soft_cap(x, cap, x)
        return x

    def route(
        self, logits: F32, top_k: int, normalise: bool, scoring: str = "softmax"
    ) -> tuple[I32, F32]:
        """Ids of the top_k experts of each row, ascending, and their weights: both [T, top_k]."""
        ids = np.empty((len(logits), top_k), np.int32)
        weights = np.empty(ids.shape, np.float32)
        self._engine.route(logits, normalise, scoring == "sigmoid", ids, weights)
        return ids, weights

    def add_rows(self, x: F32, y: F32, rows: I32, weights: F32) -> F32:
        """x with weights[i] * y[i] added to row rows[i], written into x. The rows are distinct."""
        self._engine.add_rows(x, y, rows, weights)
        return x

    def add(self, x: F32, y: F32) -> F32:
        """x + y, written into x."""
        self._engine.add(x, y, x)
        return x

    def conv_rows(self, x: F32, conv: Conv, place: Place) -> F32:
        """The convolution of each row with the rows before it."""
        out = np.empty(x.shape, np.float32)
        plan = views.recurrent_plan(place)
        module().conv_rows(self._engine, plan, x, conv.weight, conv.bias, conv.silu, out)
        return out

    def l2norm(self, x: F32, head_dim: int, eps: float, scale: float) -> F32:
        """scale * x / sqrt(sum(x^2) + eps) of each head."""
        out = np.empty(x.shape, np.float32)
        module().l2norm(self._engine, x, head_dim, eps, scale, out)
        return out

    def linear_gates(self, a: F32, b: F32 | None, rates: Rates) -> tuple[F32, F32]:
        """g and beta of each row and value head."""
        g, beta = np.empty(a.shape, np.float32), np.empty(a.shape, np.float32)
        limits = (rates.low, rates.high)
        module().linear_gates(self._engine, a, b, rates.decay, rates.dt_bias, *limits, g, beta)
        return g, beta

    def linear_rows(
        self, qkv: tuple[F32, F32, F32], gates: tuple[F32, F32], rule: StateRule, place: Place
    ) -> F32:
        """Outputs of the recurrence, and its tails and states."""
        out = np.empty(qkv[2].shape, np.float32)
        about = (rule.delta, rule.tiled, rule.skip)
        plan = views.recurrent_plan(place)
        module().linear_rows(self._engine, plan, *qkv, *gates, *about, out)
        return out

    def gated_norm(self, x: F32, gate: F32, weight: Weight, norm: GatedNorm) -> F32:
        """RMSNorm of groups of columns with a gate before or behind."""
        out = np.empty(x.shape, np.float32)
        about = (norm.eps, norm.group, norm.gate_first, norm.act == "silu")
        module().gated_norm(self._engine, x, gate, weight, *about, out)
        return out

    def gate_mul(self, x: F32, gate: F32) -> F32:
        """x * sigmoid(gate)."""
        out = np.empty(x.shape, np.float32)
        module().gate_mul(self._engine, x, gate, out)
        return out

    def take_rows(self, x: F32, rows: I32) -> F32:
        """The rows of x: [R, d]."""
        return x[rows]

    def to_numpy(self, x: F32) -> F32:
        """x itself."""
        return x

    def top_logprobs(self, logits: F32, k: int) -> tuple[F32, I32, F32]:
        """Log-sum-exp [R], and ids and logprobs [R, k] of the k most likely tokens of each row."""
        k = min(k, logits.shape[1])
        rows = len(logits)
        lse = np.empty(rows, np.float32)
        ids = np.empty((rows, k), np.int32)
        logprobs = np.empty((rows, k), np.float32)
        self._engine.top_logprobs(logits, lse, ids, logprobs)
        return lse, ids, logprobs

    def sample(
        self, logits: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, uniform: F32
    ) -> I32:
        """One token id per row of logits [R, V], as `Ops.sample` defines it."""
        out = np.empty(len(logits), np.int32)
        self._engine.sample(logits, temperature, top_k, top_p, min_p, uniform, out)
        return out

    # -- composites --------------------------------------------------------------------------------
    def prepare_layer(self, layer: Layer) -> None:
        """Attach the C++ views of the layer, which borrow its weights."""
        views.attach_views(layer)

    def prepare_stack(self, stack: Stack) -> None:
        """Attach the C++ view of the whole, which borrows what `stack` and its layers hold."""
        if all(layer.native for layer in stack.layers):
            stack.native = views.stack_view(stack)
        else:
            memory.keep_freed()  # a prompt took 9 % less time

    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> Adapter:
        """Panels for `hidden`, `choose` and `logits`, without the thread pool."""
        return views.pack_adapter(weights, stack)

    def hidden(self, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None) -> F32:
        """A whole step below the head: the wanted rows [R, d]. One native call, if C++ can."""
        if stack.native is None:
            composed: F32 = super().hidden(stack, batch, kv, sliding)
            return composed
        out = np.empty((len(batch.logit_rows), stack.embed.shape[1]), np.float32)
        pages = (kv, views.batch_view(batch))
        window = (None, None) if sliding is None else (sliding[1], views.batch_view(sliding[0]))
        rows = (batch.tokens, batch.logit_rows)
        self._engine.hidden(stack.native, *rows, *pages, *window, out, batch.adapters)
        return out

    def attention_block(self, x: F32, layer: Layer, kv: KV, index: int, batch: Batch) -> F32:
        """x + post_norm(o(attention(...))), written into x [T, d]: one native call."""
        if layer.native is None:
            x = super().attention_block(x, layer, kv, index, batch)
        else:
            self._engine.attention_block(x, layer.native, kv, index, views.batch_view(batch))
        return x

    def mlp_block(self, x: F32, layer: Layer) -> F32:
        """x + what MLP and experts make of norm(x), written into x [T, d]: one native call."""
        if layer.native_mlp is None:
            x = super().mlp_block(x, layer)
        else:
            self._engine.mlp_block(x, layer.native_mlp)
        return x

    def add_experts(self, x: F32, h: F32, layer: Layer) -> F32:
        """x plus what its experts make of h, written into x: one native call, if C++ chooses."""
        e = layer.experts
        if e is None or e.choice or e.norm is not None or e.out_scales is not None:
            x = super().add_experts(x, h, layer)
        else:
            self._engine.add_experts(x, h, layer.native_experts, None, None)
        return x

    def mix_experts(self, x: F32, h: F32, layer: Layer, chosen: tuple[I32, F32]) -> F32:
        """x plus what experts chosen before make of h, written into x: one native call."""
        self._engine.add_experts(x, h, layer.native_experts, *chosen)
        return x

    def logits(self, x: F32, head: Head, adapters: Adapters | None = None) -> F32:
        """Logits of hidden rows x [R, d]: [R, V], valid until the next call of `logits`."""
        if head.bias is not None:
            return super().logits(x, head, adapters)
        rows, vocabulary = len(x), head.weight.shape[0]
        if rows > len(self._logits) or vocabulary != self._logits.shape[1]:
            self._logits = np.empty((rows, vocabulary), np.float32)
        out = self._logits[:rows]
        self._engine.logits(x, views.head_parts(head), out, adapters)
        return out

    def choose(self, x: F32, head: Head, args: ChooseArgs) -> SamplerOutput:
        """Tokens for x [R, d], as `Ops.choose` defines them: one native call. Logits are not
        written where a row needs no more than their largest, nor all computed where few tokens may
        be chosen."""
        if head.bias is not None:
            return super().choose(x, head, args)
        ids, logits = np.empty(len(x), np.int32), np.empty(len(x), np.float32)
        found = asked = None
        wanted = args.wanted
        if wanted is not None:
            found = Logprobs.room_for(wanted)
            asked = (
                wanted.top,
                wanted.candidates,
                found.lse,
                found.chosen,
                *found.top,
                *found.candidates,
            )
        self._engine.choose(
            x,
            views.head_parts(head),
            *args.draw,
            ids,
            logits,
            args.allowed,
            args.edits,
            asked,
            args.adapters,
        )
        return SamplerOutput(ids, logits, found)
