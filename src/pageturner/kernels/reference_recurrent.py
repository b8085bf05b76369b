"""Recurrent layers in numpy: the executable specification of their kernels (see recurrent.py).

Every sum is a chain of products and sums of whole arrays, in ascending order, so that the bits of
a row cannot depend on how many rows are computed with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels import recurrent
from pageturner.kernels.base import F32, StateTables
from pageturner.kernels.recurrent import (
    CHUNK,
    COLUMNS,
    Conv,
    GatedNorm,
    Piece,
    Place,
    Rates,
    RecurrentSpec,
    StateRule,
)
from pageturner.kernels.reference_arrays import ROUNDINGS

_ONE = np.float32(1)


def _exp(x: NDArray[np.floating]) -> F32:
    """exp in fp64, rounded once."""
    with np.errstate(over="ignore"):
        return np.exp(x.astype(np.float64)).astype(np.float32)


def _sigmoid(x: F32) -> F32:
    return np.asarray(_ONE / (_ONE + _exp(-x)))


def _silu(x: F32) -> F32:
    return np.asarray(x * _sigmoid(x))


_GATES = {"sigmoid": _sigmoid, "silu": _silu}


def _chain(a: F32, b: F32) -> F32:
    """The sum of a * b over the last axis, from the first to the last."""
    total = np.zeros(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]), np.float32)
    for i in range(a.shape[-1]):
        total = total + a[..., i] * b[..., i]
    return total


def _squares(x: F32) -> NDArray[np.float64]:
    """The sum of squares over the last axis, kept as one column."""
    total = np.zeros(x.shape[:-1], np.float64)
    for i in range(x.shape[-1]):
        total = total + np.square(x[..., i], dtype=np.float64)
    return total[..., None]


def _stored(x: F32, dtype: str) -> NDArray[np.generic]:
    """x as a tail holds it."""
    if dtype == "bfloat16":
        return (ROUNDINGS[dtype](x).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return x.astype(recurrent.STORED[dtype])


def _wide(x: NDArray[np.generic], dtype: str) -> F32:
    """The fp32 of what a tail holds."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _slots(tables: StateTables) -> dict[tuple[int, int], int]:
    """The slot of each state that is wanted, by sequence and chunk."""
    return {(int(s), int(chunk)): int(slot) for s, chunk, slot in tables.state_writes}


class ChunkState:
    """A chunk of one layer in the making: its rows k [CHUNK, key heads, key_dim], u [CHUNK, value
    heads, value_dim] and g [CHUNK, value heads], and the state before it."""

    def __init__(self, spec: RecurrentSpec, rule: StateRule, state: F32) -> None:
        self.spec = spec
        self.rule = rule
        self.state = state  # [value heads, key_dim, value_dim]
        self.k = np.zeros((CHUNK, spec.key_heads, spec.key_dim), np.float32)
        self.u = np.zeros((CHUNK, spec.value_heads, spec.value_dim), np.float32)
        self.g = np.zeros((CHUNK, spec.value_heads), np.float32)

    def load(self, place: Place, block: int) -> None:
        """Take the rows that a tail block holds."""
        dtype = self.spec.dtype
        self.k[:] = _wide(place.cache.part("k", place.layer)[block], dtype).transpose(2, 0, 1)
        self.u[:] = (
            _wide(place.cache.part("u", place.layer)[block], dtype)
            .transpose(2, 0, 1, 3)
            .reshape(self.u.shape)
        )
        self.g[:] = place.cache.part("g", place.layer)[block].T

    def keep(self, place: Place, piece: Piece) -> None:
        """Write the rows of a piece to its tail block."""
        rows = slice(piece.offset, piece.offset + piece.count)
        dtype = self.spec.dtype
        u = self.u[rows].reshape(piece.count, self.spec.value_heads, -1, COLUMNS)
        place.cache.part("k", place.layer)[piece.block, :, :, rows] = _stored(
            self.k[rows].transpose(1, 2, 0), dtype
        )
        place.cache.part("u", place.layer)[piece.block, :, :, rows] = _stored(
            u.transpose(1, 2, 0, 3), dtype
        )
        place.cache.part("g", place.layer)[piece.block, :, rows] = self.g[rows].T

    def of_values(self, x: F32) -> F32:
        """Return rows of key heads [n, key heads, ..] for each value head."""
        heads = np.arange(self.spec.value_heads)
        if self.rule.tiled:
            return np.asarray(x[:, heads % self.spec.key_heads])
        return np.asarray(x[:, heads * self.spec.key_heads // self.spec.value_heads])

    def read(self, rows: F32) -> F32:
        """rows [n, key heads, key_dim] times the state: [n, value heads, value_dim]."""
        wide = self.of_values(rows)
        total = np.zeros((len(rows), *self.u.shape[1:]), np.float32)
        for i in range(self.spec.key_dim):
            total = total + wide[:, :, i, None] * self.state[None, :, i]
        return total

    def decays(self, last: int) -> tuple[F32, F32]:
        """r[last, j] [last + 1, value heads] and d[last] [value heads]."""
        total = np.zeros(self.spec.value_heads, np.float32)
        found = np.zeros((CHUNK, self.spec.value_heads), np.float32)
        for j in range(last, -1, -1):
            found[j] = _exp(total)
            total = total + self.g[j]
        return found, _exp(total)


def linear_rows(chunk: ChunkState, q: F32, v: F32, beta: F32, offset: int) -> F32:
    """Outputs of the rows from `offset` on, whose k and g are in the chunk, and u put there. A
    finished u is added to all rows behind it, so each row's sum runs over ascending tokens."""
    count = len(q)
    k = chunk.k[offset : offset + count]
    decays = [chunk.decays(offset + i) for i in range(count)]
    r = np.stack([each[0] for each in decays])
    d = np.stack([each[1] for each in decays])[:, :, None]
    token = np.arange(offset, offset + count)
    correction, mixed = np.zeros_like(v), np.zeros_like(v)
    before = d * chunk.read(k)
    for j in range(offset + count):
        i = j - offset
        if i >= 0:
            u = beta[i, :, None] * v[i]
            if chunk.rule.delta:
                u = beta[i, :, None] * (v[i] - (before[i] + correction[i]))
            chunk.u[j] = _wide(_stored(u, chunk.spec.dtype), chunk.spec.dtype)
        key = chunk.k[j][None]
        for total, rows, seen in ((correction, k, token > j), (mixed, q, token >= j)):
            score = chunk.of_values(_chain(rows[seen], key)) * r[seen, j]
            total[seen] = total[seen] + score[:, :, None] * chunk.u[j]
    return np.asarray(d * chunk.read(q) + mixed)


def linear_end(chunk: ChunkState) -> F32:
    """The state behind a whole chunk."""
    r, d = chunk.decays(CHUNK - 1)
    state = d[:, None, None] * chunk.state
    for j in range(CHUNK):
        k = r[j][:, None] * chunk.of_values(chunk.k[j][None])[0]
        state = state + k[:, :, None] * chunk.u[j][:, None]
    return state


class RecurrentReference:
    """The operations that a backend with the feature "recurrent" has beside `Ops`, batch-invariant
    as these are."""

    def conv_rows(self, x: F32, conv: Conv, place: Place) -> F32:
        """A causal convolution of each channel of x [T, channels], after x is rounded to the type
        of the tail: products with the oldest position first, zeros before position 0. The rounded
        rows go to the tail, and the last of them before each state that is wanted to its slot."""
        dtype = place.cache.spec.dtype
        kept = place.cache.part("x", place.layer)
        past = place.cache.part("past", place.layer)
        stored = _stored(x, dtype)
        out = np.zeros((len(x), x.shape[1]), np.float32)
        lines = past[0]
        wanted = _slots(place.tables)
        for piece in recurrent.pieces(place):
            rows = slice(piece.row, piece.row + piece.count)
            if piece.row == place.batch.query_start[piece.sequence]:
                slot = place.tables.state_read[piece.sequence]
                lines = np.zeros_like(past[0])
                if slot >= 0:
                    lines = past[slot]
                lines = np.concatenate([lines, kept[piece.block, : piece.offset]])
            lines = np.concatenate([lines[len(lines) - len(past[0]) :], stored[rows]])
            if piece.block >= 0:
                kept[piece.block, piece.offset : piece.offset + piece.count] = stored[rows]
            slot = wanted.get((piece.sequence, piece.chunk + 1), -1)
            if slot >= 0 and piece.offset + piece.count == CHUNK:
                past[slot] = lines[piece.count :]
            wide = _wide(lines, dtype)
            for t, weight in enumerate(conv.weight):
                out[rows] = out[rows] + wide[t : t + piece.count] * weight
        if conv.bias is not None:
            out = out + conv.bias
        if conv.silu:
            out = _silu(out)
        return out

    def l2norm(self, x: F32, head_dim: int, eps: float, scale: float) -> F32:
        """scale * x / sqrt(sum(x^2) + eps) of each head of x [T, heads * head_dim]."""
        heads = x.reshape(len(x), -1, head_dim)
        factor = (scale / np.sqrt(_squares(heads) + eps)).astype(np.float32)
        return (heads * factor).reshape(x.shape)

    def linear_gates(self, a: F32, b: F32 | None, rates: Rates) -> tuple[F32, F32]:
        """Return g = decay * dt and beta = sigmoid(b), or dt where there is no b, with dt =
        clip(softplus(a + dt_bias)); all [T, value heads]."""
        x = (a + rates.dt_bias).astype(np.float64)
        dt = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
        dt = np.clip(dt, rates.low, rates.high).astype(np.float32)
        beta = dt
        if b is not None:
            beta = _sigmoid(b)
        return rates.decay * dt, beta

    def linear_rows(
        self,
        qkv: tuple[F32, F32, F32],
        gates: tuple[F32, F32],
        rule: StateRule,
        place: Place,
    ) -> F32:
        """The recurrence that recurrent.py defines, over q and k [T, key heads * key_dim], v [T,
        value heads * value_dim] and gates g and beta [T, value heads]: outputs as v. k, u and g go
        to the tail, and states that are wanted to their slots."""
        spec = place.cache.spec
        q, k = (x.reshape(len(x), spec.key_heads, spec.key_dim) for x in qkv[:2])
        v = qkv[2].reshape(len(q), spec.value_heads, spec.value_dim)
        g, beta = gates
        out = np.zeros(v.shape, np.float32)
        k = _wide(_stored(k, spec.dtype), spec.dtype)
        states = place.cache.part("state", place.layer)
        blocks = states.shape[1:]
        wanted = _slots(place.tables)
        state = np.zeros((spec.value_heads, spec.key_dim, spec.value_dim), np.float32)
        for piece in recurrent.pieces(place):
            rows = slice(piece.row, piece.row + piece.count)
            if piece.row == place.batch.query_start[piece.sequence]:
                slot = place.tables.state_read[piece.sequence]
                state = np.zeros_like(state)
                if slot >= 0:
                    state = states[slot].swapaxes(1, 2).reshape(state.shape)
            chunk = ChunkState(spec, rule, state)
            if piece.offset:
                chunk.load(place, piece.block)
            end = piece.offset + piece.count
            chunk.k[piece.offset : end] = k[rows]
            chunk.g[piece.offset : end] = g[rows]
            out[rows] = linear_rows(chunk, q[rows], v[rows], beta[rows], piece.offset)
            if piece.block >= 0:
                chunk.keep(place, piece)
            if end == CHUNK:
                state = linear_end(chunk)
                slot = wanted.get((piece.sequence, piece.chunk + 1), -1)
                if slot >= 0:
                    split = state.reshape(blocks[0], spec.key_dim, blocks[1], COLUMNS)
                    states[slot] = split.swapaxes(1, 2)
        if rule.skip is not None:
            out = out + rule.skip[:, None] * v
        return out.reshape(len(out), -1)

    def gated_norm(self, x: F32, gate: F32, weight: F32, norm: GatedNorm) -> F32:
        """RMSNorm of every `group` columns of x [T, n], times weight [group or n]; the activation
        of the gate is multiplied before the norm or behind it."""
        gate = _GATES[norm.act](gate)
        if norm.gate_first:
            x = x * gate
        groups = x.reshape(len(x), -1, norm.group)
        factor = (1 / np.sqrt(_squares(groups) / norm.group + norm.eps)).astype(np.float32)
        normed = (groups * factor).reshape(len(x), -1, len(weight)) * weight
        out = normed.reshape(x.shape)
        return out if norm.gate_first else out * gate

    def gate_mul(self, x: F32, gate: F32) -> F32:
        """x * sigmoid(gate)."""
        return x * _sigmoid(gate)
