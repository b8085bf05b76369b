"""The views that C++ has of layers, stacks, batches, heads and adapters: their parts by name and
place.

Owns the order and the names that native/bind.cpp and native/bind_adapters.cpp expect. What is made
here borrows the arrays that it is made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pageturner.kernels.adapters import INPUTS, KINDS, Adapter, AdapterWeights, LowRank
from pageturner.kernels.base import (
    ACTIVATIONS,
    COMPOSED,
    F32,
    GATED,
    KV_TYPES,
    SQUARED,
    AttentionShape,
    Batch,
    Layer,
    Stack,
)
from pageturner.kernels.choosing import Head
from pageturner.kernels.cpu.native_module import module
from pageturner.kernels.recurrent import Place

_ACTS = (*ACTIVATIONS, GATED, SQUARED)  # in the order of pt::Act
_COMPOSED_MLPS = frozenset(
    {"parallel", "expert_choice", "expert_norms", "shared_switch", "one_part", "factors"}
)
_HEAD, _EMBED = -1, -2  # in place of a layer's number
_LAYER_PARTS = (
    "attn_norm",
    "q",
    "k",
    "v",
    "o",
    "mlp_norm",
    "gate",
    "up",
    "down",
    "q_norm",
    "k_norm",
    "q_bias",
    "k_bias",
    "v_bias",
    "o_bias",
    "up_bias",
    "down_bias",
    "attn_norm_bias",
    "mlp_norm_bias",
    "attn_post_norm",
    "mlp_post_norm",
    "residual",
    "eps",
)


def vector(values: tuple[float, ...]) -> F32 | None:
    """None for no values."""
    return np.array(values, np.float32) if values else None


def attention_options(shape: AttentionShape) -> tuple[Any, ...]:
    """Return the arguments of C++'s `attention` behind the batch."""
    slopes, sinks = vector(shape.slopes), vector(shape.sinks)
    return shape.heads, shape.scale, shape.window, shape.soft_cap, slopes, shape.chunked, sinks


def recurrent_plan(place: Place) -> Any:
    """Return where the rows of a step lie in the tail and the states of a layer, checked."""
    spec, tables, batch = place.cache.spec, place.tables, place.batch
    sizes = (
        spec.layers,
        spec.channels,
        spec.kernel,
        spec.key_heads,
        spec.value_heads,
        spec.key_dim,
        spec.value_dim,
        list(KV_TYPES).index(spec.dtype),
    )
    memory = (place.cache.states, place.cache.tail)
    reads = (tables.state_read, tables.state_writes, tables.tail_table)
    rows = (batch.positions, batch.query_start)
    return module().recurrent_plan(*memory, sizes, place.layer, *rows, *reads)


def first_of_heads(x: F32, shape: AttentionShape) -> F32:
    """Return, with a latent KV, the columns [T, heads * latent] of x [T, heads * head_dim] that are
    values; else x."""
    if not shape.latent:
        return x
    heads = x.reshape(len(x), shape.heads, shape.head_dim)[:, :, : shape.latent]
    return np.ascontiguousarray(heads).reshape(len(x), -1)


def attach_views(layer: Layer) -> None:
    """Attach the C++ view of the layer, which borrows its weights, or of what C++ computes of
    it."""
    layer.native = layer.native_mlp = layer.native_experts = None
    if layer.experts is not None:
        layer.native_experts = _experts_view(layer)
    if not layer.needs & COMPOSED:
        layer.native = layer.native_mlp = _layer_view(layer)
    elif not layer.needs & _COMPOSED_MLPS:
        layer.native_mlp = _mlp_view(layer)


def _layer_view(layer: Layer) -> Any:
    """The C++ view of a layer."""
    s, m = layer.shape, layer.latent
    parts = {n: getattr(layer, n) for n in _LAYER_PARTS} | {"temper": layer.attn_temperature}
    numbers = {"heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "scale": s.scale}
    options = {"window": s.window, "chunked": s.chunked, "soft_cap": s.soft_cap}
    options |= {"act": _ACTS.index(layer.act), "wide_norm": layer.wide_qk_norm}
    tables = {"cos": layer.rope.cos, "sin": layer.rope.sin, "interleaved": layer.rope.interleaved}
    latent = m and (m.q_rope, m.k_rope, m.norm, m.k_up, m.v_up)
    own = {
        "slopes": vector(s.slopes),
        "sinks": vector(s.sinks),
        "experts": layer.native_experts,
        "latent": latent,
    }
    return module().make_layer({**parts, **numbers, **options, **tables, **own})


def _experts_view(layer: Layer) -> Any:
    """The C++ view of the experts of a layer."""
    e = layer.experts
    assert e is not None
    matrices = (e.router, e.gate, e.up, e.down)
    numbers = (e.top_k, e.normalise, e.scoring == "sigmoid", e.scale, e.weigh_input)
    biases = (e.router_bias, e.gate_bias, e.up_bias, e.down_bias)
    return module().make_experts((*matrices, *numbers, *biases, _ACTS.index(layer.act)))


def _mlp_view(layer: Layer) -> Any:
    """The C++ view of a layer of which C++ computes the MLP and the experts. Matrices that fit
    stand in the place of attention's."""
    e = layer.experts
    up, down = (layer.up, layer.down) if e is None else (e.up[0], e.down[0])
    shape = AttentionShape(heads=1, kv_heads=1, head_dim=up.shape[0], scale=1.0)
    absent = ("q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "attn_temperature", "latent")
    parts: dict[str, Any] = dict.fromkeys(absent)
    return _layer_view(replace(layer, q=up, k=up, v=up, o=down, shape=shape, **parts))


def stack_view(stack: Stack) -> Any:
    """The C++ view of a stack, whose layers have theirs."""
    layers = [layer.native for layer in stack.layers]
    norm = (stack.embed_norm, stack.embed_norm_bias)
    numbers = (stack.embed_scale, stack.eps)
    tokens = (stack.first_token, stack.vocabulary or stack.embed.shape[0])
    return module().make_stack((stack.embed, stack.positions, *norm, *numbers, layers, *tokens))


def batch_view(batch: Batch) -> Any:
    """The batch as C++ sees it: pointers into the same arrays."""
    return module().Batch(
        batch.positions, batch.query_start, batch.context_len, batch.block_table, batch.slots
    )


def head_parts(head: Head) -> tuple[Any, ...]:
    """The parts of a head."""
    return head.norm, head.norm_bias, head.eps, head.weight, head.soft_cap


def pack_adapter(weights: AdapterWeights, stack: Stack) -> Adapter:
    """The adapter in C++, a copy. ValueError where it does not fit the stack; MemoryError."""

    def triple(pair: LowRank | None) -> tuple[Any, Any, float] | None:
        if pair is None:
            return None
        return np.ascontiguousarray(pair.a), np.ascontiguousarray(pair.b), pair.scale

    parts = []
    for number, layer in enumerate(weights.layers):
        for place, fields in enumerate(INPUTS):
            pairs = tuple(triple(layer.get(field)) for field in fields)
            if any(pairs):
                parts.append((number, place, pairs))
    for number, pair in ((_HEAD, weights.head), (_EMBED, weights.embed)):
        if pair is not None:
            parts.append((number, 0, (triple(pair),)))
    return module().make_adapter(stack.native, list(KINDS).index(weights.kind), parts)
