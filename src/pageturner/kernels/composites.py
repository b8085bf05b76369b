"""Default bodies of the composites of `Ops`, made of its primitives: what every fused kernel must
equal.

Owns the order of the operations in a decoder. Must not know any model family, request or policy,
nor look inside an array.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import Adapters, of_rows
from pageturner.kernels.base import (
    F32,
    GATED,
    I32,
    KV,
    SQUARED,
    Array,
    Batch,
    Layer,
    Ops,
    Stack,
    Weight,
)
from pageturner.kernels.choosing import (
    ChooseArgs,
    Draw,
    Head,
    Logprobs,
    SamplerOutput,
)
from pageturner.kernels.edits import apply_edits
from pageturner.kernels.layer_parts import Linear
from pageturner.kernels.recurrent import Place

L2_EPS = 1e-6  # of the norms of queries and keys of a gated delta net
Adapted = tuple[Adapters, int]  # of the rows of a layer, and its number


class Composites:
    """Default bodies of the composites. A test holds every override against these.

    A backend whose native composites serve only some layers falls back on these bodies for the
    others. Until it computes adapters, the bodies below refuse in its place.
    """

    gpu_kv = False

    @property
    def divided(self) -> bool:
        """False: this backend has the whole of each layer."""
        return False

    def default_activation_bits(self, kind: str) -> int:
        """8: nothing more is cheap."""
        return 8

    def prepare_layer(self: Any, layer: Layer) -> None:
        return None

    def prepare_stack(self: Any, stack: Stack) -> None:
        return None

    def summed(self: Any, x: Array, residual: Array | None = None) -> Array:
        """x itself: nobody has another part of it."""
        return x if residual is None else self.add(residual, x)

    def embed_tokens(self: Any, stack: Stack, tokens: I32) -> Array:
        """The embedding of tokens, of which every rank may have a part."""
        return self.embed(stack.embed, tokens)

    def hidden(
        self: Any, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None
    ) -> Array:
        adapters, of_wanted = self.row_adapters(batch)
        x = embedded = _embedded(self, stack, batch, adapters)
        if any(layer.per_layer is not None for layer in stack.layers):
            embedded = _copy(self, x, len(batch.tokens))  # what is added to x may go into it
        last = max((i for i, layer in enumerate(stack.layers) if layer.writes), default=-1)
        counts = [0, 0]  # layers so far with K and V that see everything, and that have a window
        for i, layer in enumerate(stack.layers):
            mine = sliding is not None and layer.shape.window > 0
            pages, storage = sliding if sliding is not None and mine else (batch, kv)
            counts[mine] += layer.k is not None
            attend = (
                self.attention_block
                if adapters is None
                else partial(self.adapted_attention, (adapters, i))
            )
            x = attend(x, layer, storage, counts[mine] - 1, pages)
            if i == last:  # behind the last K and V only the wanted rows matter
                x = self.take_rows(x, batch.logit_rows)
                adapters = of_wanted
                if not len(batch.logit_rows):
                    break
                if i + 1 < len(stack.layers) or layer.per_layer is not None:
                    embedded = self.take_rows(embedded, batch.logit_rows)
                    batch, sliding = _wanted(batch), sliding and (_wanted(sliding[0]), sliding[1])
            feed = self.mlp_block if adapters is None else partial(self.adapted_mlp, (adapters, i))
            x = feed(x, layer)
            if layer.per_layer is not None:
                x = _add_per_layer(self, x, embedded, layer, batch.tokens)
            if layer.out_scale != 1:
                x = self.scale(x, layer.out_scale)
        return x

    def attention_block(
        self: Any, x: Array, layer: Layer, kv: KV, index: int, batch: Batch
    ) -> Array:
        found: Array = self.adapted_attention(None, x, layer, kv, index, batch)
        return found

    def mlp_block(self: Any, x: Array, layer: Layer) -> Array:
        found: Array = self.adapted_mlp(None, x, layer)
        return found

    def row_adapters(self: Any, batch: Batch) -> tuple[Adapters | None, Adapters | None]:
        """Return the adapters of all rows of a step, and of its wanted rows, as `adapt` takes
        them."""
        every = of_rows(batch.adapters, batch.query_start)
        return every, every and [every[row] for row in batch.logit_rows]

    def adapted_attention(
        self: Any, adapted: Adapted | None, x: Array, layer: Layer, kv: KV, index: int, batch: Batch
    ) -> Array:
        """`attention_block` with what adapters add."""
        if layer.o is None:  # an MLP alone
            return x
        h = _normed(self, x, layer.attn_norm, layer.attn_norm_bias, layer.eps)
        if layer.linear is not None and layer.k is None:
            mixed = _mix_linear(self, h, layer.linear, batch)
        elif layer.latent is None:
            mixed = _mix_heads(self, adapted, h, layer, kv, index, batch)
        else:
            mixed = _mix_latent(self, h, layer, kv, index, batch)
        o = _linear(self, adapted, "o", mixed, layer.o, layer.o_bias)
        if layer.linear is not None and layer.k is not None:
            own, others = layer.mixer_factors
            beside = self.linear(_mix_linear(self, h, layer.linear, batch), layer.linear.o)
            o = self.add(self.scale(beside, others), self.scale(o, own))
        x = _add_part(self, x, o, layer.attn_post_norm, layer)
        return _add_mlp(self, adapted, x, h, layer) if layer.parallel else x

    def adapted_mlp(self: Any, adapted: Adapted | None, x: Array, layer: Layer) -> Array:
        """`mlp_block` with what adapters add."""
        if layer.parallel:  # attention has added it, since it has what both see
            return x
        h = _normed(self, x, layer.mlp_norm, layer.mlp_norm_bias, layer.eps)
        return _add_mlp(self, adapted, x, h, layer)

    def add_experts(self: Any, x: Array, h: Array, layer: Layer) -> Array:
        """x plus what the experts that were chosen make of each row of h."""
        e = layer.experts
        assert e is not None
        chosen = _chosen(self, h, layer)
        if e.norm is None:
            return self.mix_experts(x, h, layer, chosen)
        h = self.norm(h, e.norm, layer.eps)
        x = self.scale(_copy(self, h, len(chosen[0])), 0.0)
        return self.norm(self.mix_experts(x, h, layer, chosen), e.post_norm, layer.eps)

    def mix_experts(self: Any, x: Array, h: Array, layer: Layer, chosen: tuple[I32, F32]) -> Array:
        """x plus what the experts make of each row of h, one product per expert for all the rows
        that chose it. A row meets its experts in ascending order, whoever else is in the batch.
        chosen: ids, which ascend in a row, and weights, both [T, top_k]."""
        e = layer.experts
        assert e is not None
        ids, weights = chosen
        for expert in np.unique(ids):
            found, column = np.nonzero(ids == expert)
            rows = found.astype(np.int32)
            mine, weight = self.take_rows(h, rows), weights[found, column]
            if e.weigh_input:
                mine = self.scale_rows(mine, weight, np.arange(len(rows), dtype=np.int32))
                weight = np.ones_like(weight)
            inner = self.linear(mine, e.up[expert], _of(e.up_bias, expert))
            if e.gate:
                gate = self.linear(mine, e.gate[expert], _of(e.gate_bias, expert))
                inner = _gated(self, gate, inner, layer.act)
            else:
                inner = _activated(self, inner, layer.act)
            y = self.linear(inner, e.down[expert], _of(e.down_bias, expert))
            x = self.add_rows(x, y, rows, weight)
        return x

    def logits(self: Any, x: Array, head: Head, adapters: Adapters | None = None) -> F32:
        normed = _normed(self, x, head.norm, head.norm_bias, head.eps)
        y = self.linear(normed, head.weight, head.bias)
        out: F32 = self.to_numpy(
            y if adapters is None else self.adapt(y, normed, adapters, -1, "head")
        )
        return self.soft_cap(out, head.soft_cap) if head.soft_cap else out

    def choose(self: Any, x: Array, head: Head, args: ChooseArgs) -> SamplerOutput:
        logits = self.logits(x, head, args.adapters)
        raw, found, wanted = logits, None, args.wanted
        if wanted is not None:
            raw = logits.copy()
            found = Logprobs.room_for(wanted)
            add_top_logprobs(self, raw, found, slice(None))
            searching = wanted.candidates > 0
            logits[searching] -= found.lse[searching, None]
        apply_edits(logits, args.allowed, args.edits)
        ids = _sample(self, logits, args.draw)
        rows = np.arange(len(ids))
        if found is not None:
            if searching.any():
                add_candidates(self, logits[searching], found, searching)
                ids[searching] = found.candidates[0][searching, 0]
            found.chosen[:] = raw[rows, ids] - found.lse
        return SamplerOutput(ids, logits[rows, ids], found)

    def adapt(self: Any, y: Array, x: Array, adapters: Adapters, layer: int, field: str) -> Array:
        return _lacking(self, "adapters")

    def adapt_embedded(self: Any, x: Array, tokens: I32, adapters: Adapters) -> Array:
        return _lacking(self, "adapters")


def _add_mlp(ops: Ops, adapted: Adapted | None, x: Array, h: Array, layer: Layer) -> Array:
    """x plus what MLP and experts make of h."""
    if layer.up is not None:
        up = _linear(ops, adapted, "up", h, layer.up, layer.up_bias)
        if layer.gate is None:
            y = _activated(ops, up, layer.act)
        else:
            gate = _scaled(ops, _linear(ops, adapted, "gate", h, layer.gate), layer.mlp_factors[0])
            y = _gated(ops, gate, up, layer.act)
        y = _linear(ops, adapted, "down", y, layer.down, layer.down_bias)
        y = _scaled(ops, y, layer.mlp_factors[1])
        switch = layer.experts and layer.experts.shared_switch
        if switch is not None:
            scores = ops.route(ops.linear(h, switch), 1, False, "sigmoid")[1]
            y = ops.scale_rows(y, scores[:, 0], np.arange(len(scores), dtype=np.int32))
            return _add_part(ops, ops.add_experts(x, h, layer), y, layer.mlp_post_norm, layer)
        if layer.experts is not None and layer.experts.norm is not None:
            y = ops.norm(y, layer.experts.inner_norm, layer.eps)
            y = ops.add(y, ops.add_experts(x, x, layer))
            return _add_part(ops, x, y, layer.mlp_post_norm, layer)
        x = _add_part(ops, x, y, layer.mlp_post_norm, layer)
    if layer.experts is None:
        return x
    if not ops.divided:
        return ops.add_experts(x, h, layer)
    return ops.summed(ops.add_experts(ops.scale(x, 0.0), h, layer), x)


def _chosen(ops: Ops, h: Array, layer: Layer) -> tuple[I32, F32]:
    """The ids of the experts of each row, ascending, and their weights: [T, top_k]."""
    e = layer.experts
    assert e is not None
    if e.router_norm is not None:
        h = ops.norm(h, e.router_norm, layer.eps)
    logits = ops.linear(h, e.router, e.router_bias)
    if e.choice is None:
        ids, weights = ops.route(logits, e.top_k, e.normalise, e.scoring)
    else:
        scores = ops.route(logits, len(e.up), False, e.scoring)[1]  # of all, by id
        ids, weights = e.choice(scores)
    if e.scale != 1:
        weights = weights * np.float32(e.scale)
    return ids, weights if e.out_scales is None else weights * e.out_scales[ids]


def _add_per_layer(ops: Ops, x: Array, embedded: Array, layer: Layer, tokens: I32) -> Array:
    """x with the embedding added that the layer has of each token (see PerLayer)."""
    p = layer.per_layer
    assert p is not None
    own = ops.add(ops.norm(ops.linear(embedded, p.project), p.norm, p.eps), p.rows(tokens))
    y = ops.mul(ops.activate(ops.linear(x, p.gate), layer.act), own)
    return ops.add(x, ops.norm(ops.linear(y, p.out), p.post_norm, layer.eps))


def _copy(ops: Ops, x: Array, rows: int) -> Array:
    return ops.take_rows(x, np.arange(rows, dtype=np.int32))


def _wanted(batch: Batch) -> Batch:
    """The rows of a batch whose logits are wanted, each as a sequence of its own."""
    rows = batch.logit_rows
    owner = np.searchsorted(batch.query_start, rows, side="right") - 1
    return replace(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        context_len=batch.context_len[owner],
        block_table=np.ascontiguousarray(batch.block_table[owner]),
        slots=np.full(len(rows), -1, np.int32),
        logit_rows=np.arange(len(rows), dtype=np.int32),
    )


def _linear(
    ops: Ops,
    adapted: Adapted | None,
    field: str,
    x: Array,
    weight: Weight,
    bias: Weight | None = None,
) -> Array:
    """The product of a field of a layer, with what adapters add to it."""
    y = ops.linear(x, weight, bias)
    return y if adapted is None else ops.adapt(y, x, adapted[0], adapted[1], field)


def _embedded(ops: Ops, stack: Stack, batch: Batch, adapters: Adapters | None) -> Array:
    x = ops.embed_tokens(stack, batch.tokens)
    if adapters is not None:
        x = ops.adapt_embedded(x, batch.tokens, adapters)
    if stack.embed_scale != 1:
        x = ops.scale(x, stack.embed_scale)
    if stack.positions is not None:
        x = ops.add(x, ops.embed(stack.positions, batch.positions))
    if stack.embed_norm is not None:
        x = _normed(ops, x, stack.embed_norm, stack.embed_norm_bias, stack.eps)
    return x


def _normed(ops: Ops, x: Array, weight: Weight | None, bias: Weight | None, eps: float) -> Array:
    """RMSNorm of x, or LayerNorm where there is a bias, or x itself where there is no norm."""
    if weight is None:
        return x
    return ops.norm(x, weight, eps) if bias is None else ops.layer_norm(x, weight, bias, eps)


def _add_part(ops: Ops, x: Array, y: Array, post_norm: Weight | None, layer: Layer) -> Array:
    """x + residual * post_norm(y), y being the sum of what all ranks have."""
    y = ops.summed(y)
    if post_norm is not None:
        y = ops.norm(y, post_norm, layer.eps)
    if layer.residual != 1:
        y = ops.scale(y, layer.residual)
    return ops.add(x, y)


def _mix_heads(
    ops: Any, adapted: Adapted | None, h: Array, layer: Layer, kv: KV, index: int, batch: Batch
) -> Array:
    """Return the output of the heads: [T, heads * head_dim]."""
    q = _linear(ops, adapted, "q", h, layer.q, layer.q_bias)
    k = v = _linear(ops, adapted, "k", h, layer.k, layer.k_bias) if layer.k is not None else None
    if layer.head_norms is not None:
        q, k = layer.head_norms(q, k)
    q = _turned(ops, q, layer.q_norm, layer, batch)
    if layer.attn_temperature is not None:
        q = ops.scale_rows(q, layer.attn_temperature, batch.positions)
    if layer.k is not None:
        if layer.v is not None:
            v = _linear(ops, adapted, "v", h, layer.v, layer.v_bias)
        if layer.v_norm is not None:
            v = ops.head_norm(v, layer.v_norm, layer.eps, layer.shape.head_dim)
        ops.kv_write(kv, index, _turned(ops, k, layer.k_norm, layer, batch), v, batch.slots)
    mixed = ops.attention(q, kv, index, batch, layer.shape)
    if layer.attn_gate is None:
        return mixed
    return ops.gate_mul(mixed, ops.linear(h, layer.attn_gate))


def _mix_linear(ops: Any, h: Array, part: Linear, batch: Batch) -> Array:
    """Return the outputs of a recurrent layer before its last product: [T, values]."""
    tables = batch.recurrent
    assert tables is not None
    assert tables.cache is not None
    place = Place(tables.cache, part.number, batch)
    qkv = ops.linear(h, part.qkv[0])
    for weight in part.qkv[1:]:
        qkv = ops.join_heads(qkv, ops.linear(h, weight), 1)
    if part.gate_in is not None:
        y = ops.conv_rows(ops.mul(qkv, ops.linear(h, part.gate_in)), part.conv, place)
        return ops.mul(y, ops.linear(h, part.z))
    y = ops.conv_rows(qkv, part.conv, place)
    z = _scaled(ops, ops.linear(h, part.z), part.z_factor)
    if part.b is None:
        return _mix_mamba(ops, y, z, ops.linear(h, part.a), part, place)
    q, k, v = y[:, : part.keys], y[:, part.keys : 2 * part.keys], y[:, 2 * part.keys :]
    q = ops.l2norm(q, part.key_dim, L2_EPS, part.key_dim**-0.5)
    k = ops.l2norm(k, part.key_dim, L2_EPS, 1.0)
    gates = ops.linear_gates(ops.linear(h, part.a), ops.linear(h, part.b), part.rates)
    mixed = ops.linear_rows((q, k, v), gates, part.rule, place)
    return ops.gated_norm(mixed, z, part.out_norm, part.norm)


def _mix_mamba(ops: Any, y: Array, z: Array, dt: Array, part: Linear, place: Place) -> Array:
    """Return the same of Mamba2, of what its convolution made."""
    values = y.shape[1] - 2 * part.keys
    k, q = y[:, values : values + part.keys], y[:, values + part.keys :]
    gates = ops.linear_gates(dt, None, part.rates)
    mixed = ops.linear_rows((q, k, y[:, :values]), gates, part.rule, place)
    if part.norm is None:
        return ops.act_mul(z, mixed)
    return ops.gated_norm(mixed, z, part.out_norm, part.norm)


def _turned(ops: Ops, x: Array, norm: Weight | None, layer: Layer, batch: Batch) -> Array:
    """Queries or keys with their norm and their rotary embedding."""
    dim, late = layer.shape.head_dim, layer.late_qk_norm
    turns = layer.rope.cos.shape[1] > 0
    if turns and late:
        x = ops.rope(x, batch.positions, layer.rope, dim)
    if norm is not None and layer.wide_qk_norm:
        x = ops.norm(x, norm, layer.eps)
    elif norm is not None:
        x = ops.head_norm(x, norm, layer.eps, dim)
    return ops.rope(x, batch.positions, layer.rope, dim) if turns and not late else x


def _mix_latent(ops: Ops, h: Array, layer: Layer, kv: KV, index: int, batch: Batch) -> Array:
    """The same over a latent KV (see kernels.layer_parts.Latent): [T, heads * v]."""
    latent, heads, turned = layer.latent, layer.shape.heads, 2 * layer.rope.cos.shape[1]
    assert latent is not None
    seen = h
    if latent.q_down is not None:
        seen = ops.norm(ops.linear(h, latent.q_down), latent.q_norm, layer.eps)
    q = ops.head_linear(ops.linear(seen, layer.q), latent.k_up)
    k = ops.norm(ops.linear(h, layer.k), latent.norm, layer.eps)
    q_rope = ops.rope(ops.linear(seen, latent.q_rope), batch.positions, layer.rope, turned)
    k_rope = ops.rope(ops.linear(h, latent.k_rope), batch.positions, layer.rope, turned)
    ops.kv_write(kv, index, ops.join_heads(k, k_rope, 1), None, batch.slots)
    mixed = ops.attention(ops.join_heads(q, q_rope, heads), kv, index, batch, layer.shape)
    return ops.head_linear(mixed, latent.v_up)


def _gated(ops: Ops, gate: Array, up: Array, act: str) -> Array:
    """act(gate) * up, or what stands for it."""
    if act == GATED:
        return ops.clamped_swiglu(gate, up)
    return ops.act_mul(gate, up) if act == "silu" else ops.mul(ops.activate(gate, act), up)


def _activated(ops: Ops, x: Array, act: str) -> Array:
    """The activation of an MLP without a gate."""
    if act != SQUARED:
        return ops.activate(x, act)
    x = ops.activate(x, "relu")
    return ops.mul(x, x)


def _scaled(ops: Ops, x: Array, factor: float) -> Array:
    return x if factor == 1 else ops.scale(x, factor)


def _of(weights: tuple[Weight, ...], expert: int) -> Weight | None:
    """The one of this expert, where they have any."""
    return weights[expert] if weights else None


def _lacking(ops: Any, feature: str) -> NoReturn:
    message = f"the {ops.name} backend does not compute {feature!r} yet; use the reference backend"
    raise EngineFault("model_unsupported", message)


def add_top_logprobs(ops: Ops, raw: F32, found: Logprobs, rows: Any) -> None:
    """The likeliest tokens of these rows, whose raw logits are given."""
    ids, values = found.top
    found.lse[rows], ids[rows], _ = ops.top_logprobs(raw, ids.shape[1])
    # the same subtraction as for the chosen token, so that it is told with one value, not two
    values[rows] = np.take_along_axis(raw, ids[rows], 1) - found.lse[rows][:, None]


def _sample(ops: Ops, logits: F32, draw: Draw) -> I32:
    """A token for each row. A row where nothing may be chosen is drawn from as if it were zeros."""
    nothing = np.isneginf(logits.max(axis=1))
    if nothing.any():
        logits = np.where(nothing[:, None], np.float32(0), logits)
    return ops.sample(logits, *draw)


def add_candidates(ops: Ops, logits: F32, found: Logprobs, rows: Any) -> None:
    """The candidates of these rows, whose edited logprobs are given."""
    best, values = found.candidates
    with np.errstate(invalid="ignore"):  # rows of minus infinity, where nothing may be chosen
        best[rows] = ops.top_logprobs(logits, best.shape[1])[1]
    values[rows] = np.take_along_axis(logits, best[rows], 1)
