"""Small recurrent layers, and a driver that cuts sequences into steps as a scheduler would.

Owns no assertion. Slots and blocks that nobody owns are full of NaNs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from grid import i32, normal, rng

from pageturner.kernels.base import F32, Batch, StateTables
from pageturner.kernels.recurrent import (
    CHUNK,
    Conv,
    Place,
    Rates,
    RecurrentCache,
    RecurrentSpec,
    StateRule,
    alloc,
)

KEYS = {"delta": (2, 4, 32, 48), "mamba": (1, 4, 40, 32), "conv": (0, 0, 0, 0)}


@dataclass
class Mixer:
    """A gated delta net ("delta"), a Mamba2 mixer ("mamba") or a short convolution ("conv")."""

    kind: str
    dtype: str = "float32"
    tiled: bool = False
    sizes: tuple[int, int, int, int] | None = None
    strong: bool = False
    layers: int = 2

    def __post_init__(self) -> None:
        sizes = KEYS[self.kind] if self.sizes is None else self.sizes
        self.key = sizes[0] * sizes[2]
        self.channels = 2 * self.key + sizes[1] * sizes[3] or 24
        kernel = 3 if self.kind == "conv" else 4
        self.spec = RecurrentSpec(self.layers, self.channels, kernel, *sizes, self.dtype)
        weight = normal(kernel, self.channels, seed=1) * np.float32(0.5)
        bias = normal(self.channels, seed=2) * np.float32(0.1) if self.kind == "mamba" else None
        self.conv = Conv(weight, bias, self.kind != "conv")
        heads = sizes[1]
        speed = rng(3).uniform(0.01, 16, heads)
        if self.strong:
            speed[:] = np.resize([16, 8, 0.02, 4], heads)
        self.rates = Rates(-speed.astype(np.float32), normal(heads, seed=4) + np.float32(0.5))
        skip = normal(heads, seed=5) if self.kind == "mamba" else None
        self.rule = StateRule(self.kind == "delta", self.tiled, skip)

    def inputs(self, count: int, seed: int = 0) -> tuple[F32, F32, F32]:
        heads = self.spec.value_heads
        a = normal(count, heads, seed=seed + 2) * np.float32(4 if self.strong else 2)
        a += np.float32(2 if self.strong else -4)
        return normal(count, self.channels, seed=seed), a, normal(count, heads, seed=seed + 1)

    def run(self, ops: Any, x: F32, a: F32, b: F32, place: Place) -> F32:
        """What the layer makes of these rows, as a decoder would call it."""
        y = ops.conv_rows(x, self.conv, place)
        if self.kind == "conv":
            return np.asarray(y)
        if self.kind == "delta":
            dim = self.spec.key_dim
            q = ops.l2norm(y[:, : self.key], dim, 1e-6, dim**-0.5)
            k = ops.l2norm(y[:, self.key : 2 * self.key], dim, 1e-6, 1.0)
            qkv = q, k, y[:, 2 * self.key :]
            return np.asarray(
                ops.linear_rows(qkv, ops.linear_gates(a, b, self.rates), self.rule, place)
            )
        value = self.channels - 2 * self.key
        qkv = y[:, value + self.key :], y[:, value : value + self.key], y[:, :value]
        gates = ops.linear_gates(a, None, self.rates)
        return np.asarray(ops.linear_rows(qkv, gates, self.rule, place))


@dataclass
class Sequence:
    inputs: tuple[F32, F32, F32]
    computed: int = 0
    slots: dict[int, int] = field(default_factory=dict)  # by chunk
    tail: dict[int, int] = field(default_factory=dict)
    outputs: list[F32] = field(default_factory=list)

    @property
    def result(self) -> F32:
        return np.concatenate(self.outputs)


class Driver:
    """Runs one layer of a cache for many sequences. Every boundary gets a slot of its own."""

    def __init__(self, ops: Any, mixer: Mixer, slots: int = 64, blocks: int = 32) -> None:
        self.ops, self.mixer, self.layer = ops, mixer, mixer.layers - 1
        self.cache: RecurrentCache = alloc(mixer.spec, slots, blocks)
        self.cache.states[:] = 255
        self.cache.tail[:] = 255
        self.slots, self.blocks = list(range(slots)), list(range(blocks))

    def batch(self, rows: list[tuple[Sequence, int]]) -> Batch:
        read, writes, table, positions, start = [], [], [], [], [0]
        for s, (seq, count) in enumerate(rows):
            first, end = seq.computed, seq.computed + count
            for chunk in range(first // CHUNK + 1, end // CHUNK + 1):
                if chunk not in seq.slots:
                    seq.slots[chunk] = self.slots.pop()
                writes.append((s, chunk, seq.slots[chunk]))
            ends = first // CHUNK, (end - 1) // CHUNK
            for chunk in ends:
                if chunk not in seq.tail:
                    seq.tail[chunk] = self.blocks.pop()
            read.append(seq.slots[ends[0]] if ends[0] else -1)
            table.append((seq.tail[ends[0]], seq.tail[ends[1]] if ends[1] > ends[0] else -1))
            positions.append(np.arange(first, end))
            start.append(start[-1] + count)
        tables = StateTables(
            i32(read), i32(np.reshape(writes, (-1, 3))), i32(np.reshape(table, (-1, 2)))
        )
        at = i32(np.concatenate(positions))
        empty = i32(np.zeros((len(rows), 1)))
        return Batch(at * 0, at, i32(start), empty[:, 0], empty, at * 0 - 1, at[:0], None, tables)

    def step(
        self,
        rows: list[tuple[Sequence, int]],
        accepted: dict[int, int] | None = None,
        runs: int = 1,
    ) -> None:
        """One step over so many rows of each sequence. accepted: of those by number that are not
        all right, so many are; the inputs of the others are drafts. runs: times it is computed."""
        wrong = accepted or {}
        place = Place(self.cache, self.layer, self.batch(rows))
        parts = []
        for s, (seq, count) in enumerate(rows):
            part = [x[seq.computed : seq.computed + count].copy() for x in seq.inputs]
            for x in part:
                x[wrong.get(s, count) :] += 1
            parts.append(part)
        x, a, b = (np.concatenate(each) for each in zip(*parts, strict=True))
        for _ in range(runs):
            out = self.mixer.run(self.ops, x, a, b, place)
        for s, (seq, count) in enumerate(rows):
            right = wrong.get(s, count)
            seq.outputs.append(out[place.batch.query_start[s] :][:right])
            seq.computed += right
            self.trim(seq)

    def trim(self, seq: Sequence) -> None:
        """Give back tails of chunks that are whole, and states behind what is computed."""
        now = seq.computed // CHUNK
        for chunk in [c for c in seq.tail if c != now]:
            self.free(self.cache.tail, self.blocks, seq.tail.pop(chunk))
        for chunk in [c for c in seq.slots if c > now or c < now - 1]:
            self.free(self.cache.states, self.slots, seq.slots.pop(chunk))

    def drop(self, seq: Sequence) -> None:
        """Preempt a sequence, which keeps its newest state."""
        seq.computed = seq.computed // CHUNK * CHUNK
        for chunk in list(seq.tail):
            self.free(self.cache.tail, self.blocks, seq.tail.pop(chunk))
        kept = sum(len(out) for out in seq.outputs) - seq.computed
        whole = seq.result[: len(seq.result) - kept] if seq.outputs else None
        seq.outputs = [] if whole is None else [whole]

    def free(self, memory: Any, free: list[int], number: int) -> None:
        memory[number] = 255
        free.append(number)


def alone(ops: Any, mixer: Mixer, inputs: tuple[F32, F32, F32]) -> F32:
    """The outputs of a sequence in one step."""
    seq = Sequence(inputs)
    Driver(ops, mixer).step([(seq, len(inputs[0]))])
    return seq.result


def recurrence(mixer: Mixer, inputs: tuple[F32, F32, F32], kind: Any = np.float64) -> Any:
    """The same token by token: the definition of the layer, in fp64 or fp32."""
    spec, rule, kernel = mixer.spec, mixer.rule, mixer.spec.kernel
    x, a, b = (each.astype(kind) for each in inputs)
    padded = np.concatenate([np.zeros((kernel - 1, mixer.channels), kind), x])
    y = sum(padded[t : t + len(x)] * mixer.conv.weight[t].astype(kind) for t in range(kernel))
    if mixer.conv.bias is not None:
        y = y + mixer.conv.bias.astype(kind)
    if not mixer.conv.silu:
        return y
    y = y / (1 + np.exp(-y))
    value = spec.value_heads * spec.value_dim
    if rule.delta:
        q, k, v = np.split(y, [mixer.key, 2 * mixer.key], axis=1)
    else:
        v, k, q = np.split(y, [value, value + mixer.key], axis=1)
    heads = np.arange(spec.value_heads)
    of = heads % spec.key_heads if rule.tiled else heads * spec.key_heads // spec.value_heads
    q, k = (part.reshape(len(x), spec.key_heads, -1)[:, of] for part in (q, k))
    v = v.reshape(len(x), spec.value_heads, -1)
    dt = np.log1p(np.exp(a + mixer.rates.dt_bias.astype(kind)))
    beta = dt
    if rule.delta:
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * kind(spec.key_dim**-0.5)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        beta = 1 / (1 + np.exp(-b))
    state = np.zeros((spec.value_heads, spec.key_dim, spec.value_dim), kind)
    out = np.zeros_like(v)
    for t in range(len(x)):
        state = state * np.exp(mixer.rates.decay.astype(kind) * dt[t])[:, None, None]
        held = np.einsum("hk,hkv->hv", k[t], state) if rule.delta else 0
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - held))[:, None]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    if rule.skip is not None:
        out = out + rule.skip.astype(kind)[:, None] * v
    return out.reshape(len(x), -1)
