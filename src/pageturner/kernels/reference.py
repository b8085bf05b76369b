"""The reference backend in numpy: slow, plain, exact. The executable specification of every kernel.

Owns the meaning of each operation of `kernels.base.Ops`. Must not know models, requests or other
backends.

Batch-invariant: numpy's matmul gives other bits for the same row when the number of rows changes,
so anything with a rounded sum is done row by row, with shapes that depend on the row's own position
only. Quantised matrices are safe in any case: their sums are integers below 2^24, exact in fp32 in
any order. Products are einsum's plain loops and not BLAS, whose threads cost more than they give
here and fight with the server's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats import ggml
from pageturner.kernels.adapters import Adapters, AdapterWeights, LowRank, widened
from pageturner.kernels.base import (
    COMPOSED,
    F32,
    FEATURES,
    I32,
    KV_TYPES,
    AttentionShape,
    Batch,
    KVSpec,
    Rope,
    Stack,
    Tensor,
)
from pageturner.kernels.composites import Composites
from pageturner.kernels.reference_arrays import ROUNDINGS, Dense, PagedKV, Quantised, quantise_rows
from pageturner.kernels.reference_recurrent import RecurrentReference

SEGMENT = 256  # tokens of one softmax partial, counted from position 0

_KV_ARRAYS = {"float16": np.float16}  # the others are kept in fp32


def _by_row(function: Callable[..., F32], *arrays: F32) -> F32:
    """`function` of each row on its own, so that its bits cannot depend on the other rows."""
    out = np.empty_like(arrays[0], dtype=np.float32)
    for i in range(len(out)):
        out[i] = function(*(array[i] for array in arrays))
    return out


def _silu_mul(gate: F32, up: F32 | np.float32) -> F32:
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        return np.asarray(gate / (np.float32(1) + np.exp(-gate)) * up)


def _gelu(x: F32) -> F32:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], np.float32)


def _gelu_tanh(x: F32) -> F32:
    wide = x.astype(np.float64)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return np.asarray(0.5 * wide * (1 + np.tanh(inner)), np.float32)


_ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "silu": lambda x: _silu_mul(x, np.float32(1)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
}


def _second(pair: LowRank, inner: F32) -> F32:
    """scale * B times A x, which is `inner`."""
    return np.asarray(np.einsum("nr,r->n", pair.b, inner * np.float32(pair.scale)))


class ReferenceOps(RecurrentReference, Composites):
    """`Ops` in numpy. Holds no state; arrays are numpy fp32."""

    name = "reference"
    fingerprint = f"reference/numpy-{np.__version__}"

    @property
    def features(self) -> frozenset[str]:
        """All of them."""
        return FEATURES | COMPOSED

    def default_activation_bits(self, kind: str) -> int:
        """12, as the fastest kernels; nothing is cheap here."""
        return 12

    # -- storage -----------------------------------------------------------------------------------
    def pack_weight(self, tensor: Tensor) -> F32 | Dense | Quantised:
        """A vector as fp32, matrices of floats in fp32, quantised ones taken apart."""
        if len(tensor.shape) == 1:
            return ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
        if tensor.kind in ggml.FLOATS:
            return Dense(ggml.dequantise(tensor.kind, tensor.shape, tensor.data))
        q, scale, low = ggml.unpack(tensor.kind, tensor.shape, tensor.data)
        return Quantised(
            np.ascontiguousarray(q.transpose(1, 2, 0)),
            np.ascontiguousarray(scale.T),
            None if low is None else np.ascontiguousarray(low.T),
            tensor.bits,
            tensor.order,
        )

    def alloc_kv(self, spec: KVSpec) -> PagedKV:
        """Zeroed KV storage. EngineFault('kv_memory') when the memory is not there."""
        if spec.dtype not in KV_TYPES:
            known = ", ".join(KV_TYPES)
            raise EngineFault(
                "kv_dtype", f"KV type {spec.dtype!r} is not supported; there are {known}"
            )
        shape = (spec.layers, spec.blocks * spec.block_size, spec.kv_heads, spec.head_dim)
        try:
            k = np.zeros(shape, _KV_ARRAYS.get(spec.dtype, np.float32))
            v = k if spec.latent else np.zeros_like(k)
        except (MemoryError, ValueError) as error:
            message = f"no memory for a KV cache of {spec.nbytes:,} bytes; lower kv_cache_memory"
            raise EngineFault("kv_memory", message) from error
        return PagedKV(k, v, spec.block_size, f"scaled {spec.dtype}" if spec.scaled else spec.dtype)

    def copy_blocks(self, kv: PagedKV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer, in order."""
        for array in map(kv.blocks, kv.arrays):
            for source, destination in pairs:
                array[:, destination] = array[:, source]

    def block_bytes(self, kv: PagedKV) -> int:
        """Bytes of one block, all layers."""
        return kv.block_bytes

    def read_blocks(self, kv: PagedKV, blocks: I32, out: NDArray[np.uint8]) -> None:
        """Copy the bytes of whole blocks to `out` [blocks, block_bytes]."""
        out[:] = kv.read_blocks(blocks)

    def write_blocks(self, kv: PagedKV, blocks: I32, data: NDArray[np.uint8]) -> None:
        """Give blocks the bytes that read_blocks found in others."""
        kv.write_blocks(blocks, data)

    # -- primitives --------------------------------------------------------------------------------
    def embed(self, table: Dense | Quantised, tokens: I32) -> F32:
        """Rows of the table, dequantised to fp32: [T, d]."""
        if isinstance(table, Dense):
            return table.values[tokens]
        rows = table.q[:, :, tokens].astype(np.float32) * table.scale[:, None, tokens]
        if table.low is not None:
            rows += table.low[:, None, tokens]
        return np.ascontiguousarray(rows.transpose(2, 0, 1)).reshape(len(tokens), -1)

    def norm(self, x: F32, weight: F32, eps: float) -> F32:
        """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""

        def one(row: F32) -> F32:
            mean = np.mean(np.square(row, dtype=np.float64))
            return row * np.float32(1 / np.sqrt(mean + eps)) * weight

        return _by_row(one, x)

    def layer_norm(self, x: F32, weight: F32, bias: F32, eps: float) -> F32:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last axis."""

        def one(row: F32) -> F32:
            centred = row.astype(np.float64) - np.mean(row, dtype=np.float64)
            scaled = centred / np.sqrt(np.mean(np.square(centred)) + eps)
            return np.asarray(scaled.astype(np.float32) * weight + bias)

        return _by_row(one, x)

    def head_norm(self, x: F32, weight: F32, eps: float, head_dim: int) -> F32:
        """RMSNorm over each head of x [T, heads * head_dim] with one weight vector [head_dim]."""
        return self.norm(x.reshape(-1, head_dim), weight, eps).reshape(x.shape)

    def linear(self, x: F32, weight: Dense | Quantised, bias: F32 | None = None) -> F32:
        """x [T, K] times weight [N, K] transposed, plus bias: [T, N]."""
        match weight:
            case Dense():
                y = self._linear_dense(x, weight)
            case Quantised():
                y = self._linear_quantised(x, weight)
        return y if bias is None else y + bias

    def _linear_dense(self, x: F32, weight: Dense) -> F32:
        out = np.empty((len(x), len(weight.values)), np.float32)
        for row, target in zip(x, out, strict=True):
            np.einsum("nk,k->n", weight.values, row, out=target)
        return out

    def _linear_quantised(self, x: F32, weight: Quantised) -> F32:
        """Integer dot products per group, scaled and summed over the groups from the first to the
        last."""
        groups, size, columns = weight.q.shape
        x = x if weight.order is None else np.ascontiguousarray(x[:, weight.order])
        q, scale = quantise_rows(x, weight.bits)
        q, scale = q.reshape(len(x), groups, size), np.repeat(scale, ggml.GROUP // size, axis=1)
        out = np.zeros((len(x), columns), np.float64)
        for group in range(groups):
            a = q[:, group]
            dots = np.einsum("tk,kn->tn", a, weight.q[group].astype(np.float64))
            out += dots * np.multiply.outer(scale[:, group], weight.scale[group])
            if weight.low is not None:
                out += np.multiply.outer(a.sum(axis=1) * scale[:, group], weight.low[group])
        return out.astype(np.float32)

    def rope(self, x: F32, positions: I32, rope: Rope, head_dim: int) -> F32:
        """Rotary embedding of every head of x [T, heads * head_dim]; those behind the tables pass
        through."""
        out = x.reshape(len(x), -1, head_dim).copy()
        half = rope.cos.shape[1]
        if rope.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        a, b = out[..., first].copy(), out[..., second].copy()
        cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out.reshape(x.shape)

    def kv_write(self, kv: PagedKV, layer: int, k: F32, v: F32 | None, slots: I32) -> None:
        """Round k and v [T, kv_heads * head_dim] to the KV type and store them at their slots."""
        rows = np.flatnonzero(slots >= 0)
        with np.errstate(over="ignore"):  # beyond fp16 is inf, as in hardware
            for array, values in ((kv.k, k), (kv.v, v)):
                if values is None:
                    continue
                heads = values[rows].reshape(-1, *array.shape[2:])
                array[layer, slots[rows]] = ROUNDINGS[kv.dtype](heads)

    def attention(
        self, q: F32, kv: PagedKV, layer: int, batch: Batch, shape: AttentionShape
    ) -> F32:
        """Causal attention of q [T, heads * head_dim] over the paged KV, in segments of 256
        tokens."""
        out = np.empty((len(q), shape.heads * (shape.latent or shape.head_dim)), np.float32)
        for s in range(len(batch.context_len)):
            every = np.arange(batch.context_len[s])
            slots = (
                batch.block_table[s, every // kv.block_size] * kv.block_size + every % kv.block_size
            )
            k, v = (array[layer, slots].astype(np.float32) for array in (kv.k, kv.v))
            for row in range(batch.query_start[s], batch.query_start[s + 1]):
                heads = q[row].reshape(shape.kv_heads, -1, shape.head_dim) * np.float32(shape.scale)
                seen = batch.positions[row] + 1
                mixed = self._attend(heads, k[:seen], v[:seen, :, : shape.latent or None], shape)
                out[row] = mixed.reshape(-1)
        return out

    def _attend(self, q: F32, k: F32, v: F32, shape: AttentionShape) -> F32:
        """The last row of a sequence: q [kv_heads, group, d] over k and v [n, kv_heads, d]. The
        partials (peak, total, mixed) of the segments are merged left to right."""
        first = max(0, len(k) - shape.window) if shape.window else 0
        if shape.chunked and shape.window:
            first = (len(k) - 1) // shape.window * shape.window
        peak = np.full((*q.shape[:2], 1), -np.inf, np.float32)
        total = np.zeros_like(peak)
        mixed = np.zeros((*q.shape[:2], v.shape[2]), np.float32)
        for segment in range(first // SEGMENT * SEGMENT, len(k), SEGMENT):
            seen = slice(max(first, segment), min(segment + SEGMENT, len(k)))
            keys, values = k[seen], v[seen]
            scores = np.einsum("hgd,nhd->hgn", q, keys)
            if shape.soft_cap:
                scores = self.soft_cap(scores, shape.soft_cap)
            if shape.slopes:
                distance = np.arange(seen.start, seen.stop, dtype=np.float32) - np.float32(
                    len(k) - 1
                )
                scores += np.array(shape.slopes, np.float32).reshape(*q.shape[:2], 1) * distance
            part_peak = scores.max(axis=2, keepdims=True)
            weights = np.exp(scores - part_peak)
            new_peak = np.maximum(peak, part_peak)
            old, new = np.exp(peak - new_peak), np.exp(part_peak - new_peak)
            total = total * old + weights.sum(axis=2, keepdims=True) * new
            mixed = mixed * old + np.einsum("hgn,nhd->hgd", weights, values) * new
            peak = new_peak
        if shape.sinks:
            sinks = np.array(shape.sinks, np.float32).reshape(peak.shape)
            new_peak = np.maximum(peak, sinks)
            old = np.exp(peak - new_peak)
            mixed, total = mixed * old, total * old + np.exp(sinks - new_peak)
        return np.asarray(mixed / total)

    def act_mul(self, gate: F32, up: F32) -> F32:
        """SiLU(gate) * up."""
        return _by_row(_silu_mul, gate, up)

    def activate(self, x: F32, act: str) -> F32:
        """An activation of each element."""
        return _by_row(_ACTIVATIONS[act], x)

    def mul(self, x: F32, y: F32) -> F32:
        """x * y."""
        return x * y

    def scale(self, x: F32, factor: float) -> F32:
        """x * factor."""
        return x * np.float32(factor)

    def clamped_swiglu(self, gate: F32, up: F32) -> F32:
        """gpt-oss's gated activation."""
        g, u = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        with np.errstate(over="ignore"):
            return np.asarray(
                g / (np.float32(1) + np.exp(np.float32(-1.702) * g)) * (u + np.float32(1))
            )

    def scale_rows(self, x: F32, factors: F32, rows: I32) -> F32:
        """Row i of x times factors[rows[i]]."""
        return x * factors[rows][:, None]

    def head_linear(self, x: F32, weights: tuple[Dense | Quantised, ...]) -> F32:
        """Multiply the columns of x of each head by the head's own matrix."""
        heads = np.split(x, len(weights), axis=1)
        return np.hstack(
            [self.linear(np.ascontiguousarray(h), w) for h, w in zip(heads, weights, strict=True)]
        )

    def join_heads(self, x: F32, y: F32, heads: int) -> F32:
        """Join, for each head, its columns of x and its columns of y."""
        parts = [a.reshape(len(a), heads, -1) for a in (x, y)]
        return np.concatenate(parts, axis=2).reshape(len(x), -1)

    def soft_cap(self, x: F32, cap: float) -> F32:
        """cap * tanh(x / cap)."""
        return _by_row(lambda row: np.tanh(row / np.float32(cap)) * np.float32(cap), x)

    def route(
        self, logits: F32, top_k: int, normalise: bool, scoring: str = "softmax"
    ) -> tuple[I32, F32]:
        """Ids of the top_k experts of each row, ascending, and their weights."""
        ids = np.empty((len(logits), top_k), np.int32)
        weights = np.empty(ids.shape, np.float32)
        for i, row in enumerate(logits):
            ids[i] = np.sort(_best_first(row)[:top_k])
            wide = row.astype(np.float64)
            every = np.exp(wide - wide.max()) if scoring == "softmax" else 1 / (1 + np.exp(-wide))
            mine, whole = every[ids[i]], every.sum() if scoring == "softmax" else 1.0
            weights[i] = mine / (mine.sum() if normalise else whole)
        return ids, weights

    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> AdapterWeights:
        """The same in fp32."""

        def wide(pair: LowRank | None) -> LowRank | None:
            if pair is None:
                return None
            return LowRank(widened(weights.kind, pair.a), widened(weights.kind, pair.b), pair.scale)

        layers = tuple(
            {field: wide(pair) for field, pair in each.items()} for each in weights.layers
        )
        return AdapterWeights("F32", layers, wide(weights.embed), wide(weights.head))  # type: ignore[arg-type]

    def adapt(self, y: F32, x: F32, adapters: Adapters, layer: int, field: str) -> F32:
        """y with scale * B (A x) added to each row whose adapter has that field."""
        for row, adapter in enumerate(adapters):
            if adapter is None:
                continue
            pair = adapter.head if layer < 0 else adapter.layers[layer].get(field)
            if pair is not None:
                y[row] += _second(pair, np.einsum("rk,k->r", pair.a, x[row]))
        return y

    def adapt_embedded(self, x: F32, tokens: I32, adapters: Adapters) -> F32:
        """x with what adapters add to the rows of these tokens."""
        x = x.copy()
        for row, adapter in enumerate(adapters):
            if adapter is not None and adapter.embed is not None:
                x[row] += _second(adapter.embed, adapter.embed.a[tokens[row]])
        return x

    def add_rows(self, x: F32, y: F32, rows: I32, weights: F32) -> F32:
        """x with weights[i] * y[i] added to row rows[i]."""
        out = x.copy()
        out[rows] += weights[:, None] * y
        return out

    def add(self, x: F32, y: F32) -> F32:
        """x + y."""
        return x + y

    def take_rows(self, x: F32, rows: I32) -> F32:
        """The rows of x: [R, d]."""
        return x[rows]

    def to_numpy(self, x: F32) -> F32:
        """x itself."""
        return x

    # -- choosing tokens ---------------------------------------------------------------------------
    def top_logprobs(self, logits: F32, k: int) -> tuple[F32, I32, F32]:
        """Return for each row of logits [R, V] log-sum-exp [R]; ids and logprobs [R, k] of the k
        most likely."""
        k = min(k, logits.shape[1])
        lse = np.full(len(logits), np.nan, np.float32)
        ids = np.zeros((len(logits), k), np.int32)
        for i in np.flatnonzero(np.isfinite(logits.max(axis=1))):
            row = logits[i]
            lse[i] = row.max() + np.log(np.exp(row - row.max(), dtype=np.float64).sum())
            ids[i] = _best_first(row)[:k]
        return lse, ids, np.take_along_axis(logits, ids, axis=1) - lse[:, None]

    def sample(
        self, logits: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, uniform: F32
    ) -> I32:
        """One token id per row of logits [R, V] (all parameter arrays [R])."""
        rows = zip(logits, temperature, top_k, top_p, min_p, uniform, strict=True)
        return np.array([_sample_row(*row) for row in rows], np.int32)


def _best_first(row: F32) -> NDArray[np.intp]:
    """Ids by (logit descending, id ascending)."""
    return np.argsort(-row, kind="stable")


def _sample_row(
    row: F32,
    temperature: np.float32,
    top_k: np.int32,
    top_p: np.float32,
    min_p: np.float32,
    uniform: np.float32,
) -> int:
    if temperature == 0 or not np.isfinite(
        row.max()
    ):  # NaN is the largest of all, for argmax and max
        return int(np.argmax(row))
    # Only proportions matter until the last line, so the softmax needs no division: its largest
    # weight is 1.
    with np.errstate(over="ignore"):  # a tiny temperature may push the others to -inf: weight 0
        weights = np.exp((row - row.max()) / temperature)
    if min_p > 0:
        weights[weights < min_p] = 0
    if top_k > 0 or top_p < 1:
        order = _best_first(row)
        if top_k > 0:
            weights[order[top_k:]] = 0
        if top_p < 1:
            running = np.cumsum(weights[order], dtype=np.float64)
            size = int(np.searchsorted(running, np.float64(top_p) * running[-1])) + 1
            weights[order[size:]] = 0
    running = np.cumsum(weights, dtype=np.float64)
    chosen = int(np.searchsorted(running, np.float64(uniform) * running[-1], side="right"))
    return chosen if chosen < len(row) else int(np.flatnonzero(weights)[-1])
