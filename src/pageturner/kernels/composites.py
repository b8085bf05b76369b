"""Default bodies of the composites of `Ops`, made of its primitives: what every fused kernel must equal.

Owns the order of the operations in a decoder. Must not know any model family, request or policy, nor look
inside an array.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.base import (
    F32,
    I32,
    KV,
    Array,
    Batch,
    Draw,
    Experts,
    Head,
    Layer,
    Logprobs,
    LogprobsWanted,
    Ops,
    SamplerOutput,
    Stack,
    Weight,
)
from pageturner.kernels.edits import Allowed, Edits, apply_edits


class Composites:
    """Default bodies of the composites. A test holds every override against these.

    A backend whose native composites serve only some layers falls back on these bodies for the others. Until
    it has a primitive marked [feature], the bodies below refuse in its place.
    """

    @property
    def features(self) -> frozenset[str]:
        """None: a backend says what it has."""
        return frozenset()

    def prepare_layer(self: Any, layer: Layer) -> None:
        return None

    def prepare_stack(self: Any, stack: Stack) -> None:
        return None

    def hidden(self: Any, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None) -> Array:
        x = _embedded(self, stack, batch)
        last = len(stack.layers) - 1
        counts = [0, 0]  # layers so far that see everything, and that have a window
        for i, layer in enumerate(stack.layers):
            mine = sliding is not None and layer.shape.window > 0
            pages, storage = sliding if sliding is not None and mine else (batch, kv)
            x = self.attention_block(x, layer, storage, counts[mine], pages)
            counts[mine] += 1
            if i == last:  # behind the last K and V only the wanted rows matter
                x = self.take_rows(x, batch.logit_rows)
            if len(batch.logit_rows) or i < last:
                x = self.mlp_block(x, layer)
        return x

    def attention_block(self: Any, x: Array, layer: Layer, kv: KV, index: int, batch: Batch) -> Array:
        h = _normed(self, x, layer.attn_norm, layer.attn_norm_bias, layer.eps)
        q = self.linear(h, layer.q, layer.q_bias)
        k = self.linear(h, layer.k, layer.k_bias)
        v = self.linear(h, layer.v, layer.v_bias)
        dim = layer.shape.head_dim
        if layer.q_norm is not None:
            q = self.head_norm(q, layer.q_norm, layer.eps, dim)
            k = self.head_norm(k, layer.k_norm, layer.eps, dim)
        if layer.rope.cos.shape[1]:
            q = self.rope(q, batch.positions, layer.rope, dim)
            k = self.rope(k, batch.positions, layer.rope, dim)
        self.kv_write(kv, index, k, v, batch.slots)
        o = self.linear(self.attention(q, kv, index, batch, layer.shape), layer.o, layer.o_bias)
        if layer.attn_post_norm is not None:
            o = self.norm(o, layer.attn_post_norm, layer.eps)
        return self.add(x, o)

    def mlp_block(self: Any, x: Array, layer: Layer) -> Array:
        h = _normed(self, x, layer.mlp_norm, layer.mlp_norm_bias, layer.eps)
        if layer.experts is not None:
            return _add_experts(self, x, h, layer.experts, layer.act)
        up = self.linear(h, layer.up, layer.up_bias)
        if layer.gate is None:
            h = self.activate(up, layer.act)
        else:
            h = _gated(self, self.linear(h, layer.gate), up, layer.act)
        h = self.linear(h, layer.down, layer.down_bias)
        if layer.mlp_post_norm is not None:
            h = self.norm(h, layer.mlp_post_norm, layer.eps)
        return self.add(x, h)

    def logits(self: Any, x: Array, head: Head) -> F32:
        normed = _normed(self, x, head.norm, head.norm_bias, head.eps)
        out: F32 = self.to_numpy(self.linear(normed, head.weight))
        return self.soft_cap(out, head.soft_cap) if head.soft_cap else out

    def choose(
        self: Any,
        x: Array,
        head: Head,
        draw: Draw,
        allowed: Allowed | None = None,
        edits: Edits | None = None,
        wanted: LogprobsWanted | None = None,
    ) -> SamplerOutput:
        logits = self.logits(x, head)
        raw, found = logits, None
        if wanted is not None:
            raw = logits.copy()
            found = _top_logprobs(self, raw, wanted)
            searching = wanted.candidates > 0
            logits[searching] -= found.lse[searching, None]
        apply_edits(logits, allowed, edits)
        ids = _sample(self, logits, draw)
        rows = np.arange(len(ids))
        if found is not None:
            _add_candidates(self, logits, found, ids, searching)
            found.chosen[:] = raw[rows, ids] - found.lse
        return SamplerOutput(ids, logits[rows, ids], found)

    def layer_norm(self: Any, x: Array, weight: Weight, bias: Weight, eps: float) -> Array:
        return _lacking(self, "layer_norm")

    def activate(self: Any, x: Array, act: str) -> Array:
        return _lacking(self, "activation")

    def mul(self: Any, x: Array, y: Array) -> Array:
        return _lacking(self, "activation")

    def scale(self: Any, x: Array, factor: float) -> Array:
        return _lacking(self, "scale")

    def soft_cap(self: Any, x: F32, cap: float) -> F32:
        return _lacking(self, "soft_cap")

    def route(self: Any, logits: Array, top_k: int, normalise: bool) -> tuple[I32, F32]:
        return _lacking(self, "experts")

    def add_rows(self: Any, x: Array, y: Array, rows: I32, weights: F32) -> Array:
        return _lacking(self, "experts")


def _embedded(ops: Ops, stack: Stack, batch: Batch) -> Array:
    x = ops.embed(stack.embed, batch.tokens)
    if stack.embed_scale != 1:
        x = ops.scale(x, stack.embed_scale)
    if stack.positions is not None:
        x = ops.add(x, ops.embed(stack.positions, batch.positions))
    if stack.embed_norm is not None:
        x = _normed(ops, x, stack.embed_norm, stack.embed_norm_bias, stack.eps)
    return x


def _normed(ops: Ops, x: Array, weight: Weight, bias: Weight | None, eps: float) -> Array:
    """RMSNorm of x, or LayerNorm where there is a bias."""
    return ops.norm(x, weight, eps) if bias is None else ops.layer_norm(x, weight, bias, eps)


def _gated(ops: Ops, gate: Array, up: Array, act: str) -> Array:
    """act(gate) * up."""
    return ops.act_mul(gate, up) if act == "silu" else ops.mul(ops.activate(gate, act), up)


def _add_experts(ops: Ops, x: Array, h: Array, experts: Experts, act: str) -> Array:
    """x plus what its experts make of each row of h, one product per expert for all the rows that chose it.
    A row meets its experts in ascending order, whoever else is in the batch."""
    ids, weights = ops.route(ops.linear(h, experts.router), experts.top_k, experts.normalise)
    for expert in np.unique(ids):
        chosen, column = np.nonzero(ids == expert)
        rows = chosen.astype(np.int32)
        mine = ops.take_rows(h, rows)
        gate, up = ops.linear(mine, experts.gate[expert]), ops.linear(mine, experts.up[expert])
        y = ops.linear(_gated(ops, gate, up, act), experts.down[expert])
        x = ops.add_rows(x, y, rows, weights[chosen, column])
    return x


def _lacking(ops: Any, feature: str) -> NoReturn:
    message = f"the {ops.name} backend does not compute {feature!r} yet; use the reference backend"
    raise EngineFault("model_unsupported", message)


def _top_logprobs(ops: Ops, raw: F32, wanted: LogprobsWanted) -> Logprobs:
    found = Logprobs.room_for(wanted)
    ids, values = found.top
    found.lse[:], ids[:], _ = ops.top_logprobs(raw, ids.shape[1])
    # the same subtraction as for the chosen token, so that it is told with one value, not two
    values[:] = np.take_along_axis(raw, ids, 1) - found.lse[:, None]
    return found


def _sample(ops: Ops, logits: F32, draw: Draw) -> I32:
    """A token for each row. A row where nothing may be chosen is drawn from as if it were zeros."""
    nothing = np.isneginf(logits.max(axis=1))
    if nothing.any():
        logits = np.where(nothing[:, None], np.float32(0), logits)
    return ops.sample(logits, *draw)


def _add_candidates(ops: Ops, logits: F32, found: Logprobs, ids: I32, searching: NDArray[np.bool_]) -> None:
    """The candidates of rows that search, and the first of them as the token."""
    if searching.any():
        best, values = found.candidates
        with np.errstate(invalid="ignore"):  # rows of minus infinity, where nothing may be chosen
            best[searching] = ops.top_logprobs(logits[searching], best.shape[1])[1]
        values[:] = np.take_along_axis(logits, best, 1)
        ids[searching] = best[searching, 0]
