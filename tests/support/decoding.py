"""Runs a decoder by hand: several sequences, any chunks, scattered blocks. For tests below the runtime."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.kernels.base import Batch, Ops, StateTables
from pageturner.kernels.cpu import native_module
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.recurrent import CHUNK, alloc
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from support.poison import poison_blocks


def backend(name: str) -> Ops:
    """A backend by name; skips the test where the native one cannot run."""
    if name == "reference":
        return ReferenceOps()
    usable, why = native_module.supported()
    if not usable:
        pytest.skip(f"native kernels: {why}")
    return NativeOps(threads=2)


class Decoding:
    """KV storage and the block tables of sequences, which are called by any name."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        *,
        blocks: int = 64,
        block_size: int = 16,
        dtype: str = "float32",
        adapters: dict[str, str] | None = None,
    ) -> None:
        """adapters: those of sequences, by name of a sequence."""
        self._decoder = decoder
        self._adapters = adapters or {}
        self._size = block_size
        specs = [decoder.kv_spec(blocks, block_size, dtype)]
        if specs[0].beside is not None:  # of two shapes: windowed layers have a store of their own
            specs = [*decoder.kv_specs(blocks, blocks, block_size, dtype)]
        self._kv = [ops.alloc_kv(spec) for spec in specs]
        for kv in self._kv:  # a read of what was never written becomes NaN
            poison_blocks(kv, list(range(blocks)))
        self._blocks = range(blocks)
        spec = decoder.spec.recurrent_spec(dtype)
        self._cache = spec and alloc(spec, blocks, blocks)
        if self._cache is not None:
            self._cache.states[:] = self._cache.tail[:] = 0xFF  # NaN
        self._states: dict[tuple[str, int], int] = {}
        self._tails: dict[tuple[str, int], int] = {}
        self._free = list(range(blocks))
        random.Random(0).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._done: dict[str, int] = {}

    def step(self, chunks: list[tuple[str, list[int]]]) -> list[np.ndarray]:
        """Compute the next tokens of each sequence in one batch; the logits [n, vocab] after each of them."""
        ends = np.cumsum([len(tokens) for _, tokens in chunks])
        return np.split(self._forward(chunks, np.arange(ends[-1])), ends[:-1])

    def last(self, chunks: list[tuple[str, list[int]]]) -> np.ndarray:
        """The same, but the logits [sequences, vocab] after the last token of each sequence only."""
        return self._forward(chunks, np.cumsum([len(tokens) for _, tokens in chunks]) - 1)

    def _forward(self, chunks: list[tuple[str, list[int]]], wanted: np.ndarray) -> np.ndarray:
        positions, slots = [], []
        for name, tokens in chunks:
            table, done = self._tables.setdefault(name, []), self._done.get(name, 0)
            while len(table) * self._size < done + len(tokens):
                table.append(self._free.pop())
            here = range(done, done + len(tokens))
            positions += here
            slots += [table[p // self._size] * self._size + p % self._size for p in here]
            self._done[name] = done + len(tokens)
        recurrent = self._recurrent(chunks)
        tables = [self._tables[name] for name, _ in chunks]
        widest = max(map(len, tables))
        starts = np.cumsum([0] + [len(tokens) for _, tokens in chunks])
        batch = Batch(
            tokens=np.array([t for _, tokens in chunks for t in tokens], np.int32),
            positions=np.array(positions, np.int32),
            query_start=starts.astype(np.int32),
            context_len=np.array([self._done[name] for name, _ in chunks], np.int32),
            block_table=np.array(
                [table + [0] * (widest - len(table)) for table in tables], np.int32
            ),
            slots=np.array(slots, np.int32),
            logit_rows=wanted.astype(np.int32),
            adapters=self._decoder.adapters_of(
                [self._adapters.get(name, "") for name, _ in chunks]
            ),
            recurrent=recurrent,
        )
        if len(self._kv) == 1:
            return self._decoder.forward(batch, self._kv[0]).copy()  # memory may be used again
        windowed = self._of_windowed(batch)
        hidden = self._decoder.hidden(batch, self._kv[0], (windowed, self._kv[1]))
        return self._decoder.logits(hidden).copy()

    def _of_windowed(self, batch: Batch) -> Batch:
        """The same step in the other store, whose blocks lie in the opposite order."""
        most, size = max(self._blocks), self._size
        slots = (most - batch.slots // size) * size + batch.slots % size
        return replace(batch, block_table=most - batch.block_table, slots=slots)

    def _recurrent(self, chunks: list[tuple[str, list[int]]]) -> StateTables | None:
        """A slot for every boundary, and a block for every chunk that is left unfinished."""
        if self._cache is None:
            return None
        reads, writes, tails = [], [], []
        for s, (name, tokens) in enumerate(chunks):
            end = self._done[name]
            first, last = (end - len(tokens)) // CHUNK, (end - 1) // CHUNK
            reads.append(self._states.get((name, first), -1))
            for chunk in range(first + 1, end // CHUNK + 1):
                slot = self._states.setdefault((name, chunk), len(self._states))
                writes.append((s, chunk, slot))
            tails.append([-1, -1])
            for column, chunk in enumerate(sorted({first, last})):
                block = self._tails.setdefault((name, chunk), len(self._tails))
                tails[-1][column] = block
        of_writes = np.array(writes, np.int32).reshape(-1, 3)
        return StateTables(
            np.array(reads, np.int32), of_writes, np.array(tails, np.int32), self._cache
        )

    def greedy(self, name: str, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Prefill in one go, then one token a step: the tokens and their logprobs."""
        tokens, logprobs = self.greedy_together({name: prompt}, count)
        return tokens[0].tolist(), logprobs[0].tolist()

    def greedy_together(
        self, prompts: dict[str, list[int]], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each prompt in one go, then a token of each at every step: tokens and logprobs [prompts, count]."""
        rows = np.concatenate([self.last([prompt]) for prompt in prompts.items()])
        tokens, logprobs = [], []
        while True:
            tokens.append(rows.argmax(axis=1))
            logprobs.append(
                [float(x.max() - np.logaddexp.reduce(x)) for x in rows.astype(np.float64)]
            )
            if len(tokens) == count:
                return np.stack(tokens, 1), np.array(logprobs).T
            rows = self.last(
                [(name, [int(t)]) for name, t in zip(prompts, tokens[-1], strict=True)]
            )


def logits(path: Path, prompt: list[int], ops: Ops | None = None, **load: Any) -> np.ndarray:
    """All logits of a prompt, by a model that is loaded for it; by the reference where no backend is given."""
    ops = ops or ReferenceOps()
    return Decoding(load_model(path, ops, **load), ops).step([("p", prompt)])[0]


def beside(runs: Decoding, truth: dict[str, np.ndarray]) -> tuple[float, int, int]:
    """The largest error of a logit of both recorded prompts, of the largest logit; and how many of their greedy
    tokens are equal, and of how many."""
    worst, equal, tokens = 0.0, 0, 0
    for i in range(2):
        prompt, expected = truth[f"prompt_{i}"].tolist(), truth[f"logits_{i}"]
        logits = runs.step([(f"l{i}", prompt)])[0][-len(expected) :]
        worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
        wanted = truth[f"greedy_{i}"].tolist()
        found, _ = runs.greedy(f"g{i}", prompt, len(wanted))
        equal += sum(a == b for a, b in zip(found, wanted, strict=True))
        tokens += len(wanted)
    return worst, equal, tokens


def in_chunks(runs: Decoding, sequences: dict[str, list[int]], chunk: int) -> dict[str, np.ndarray]:
    """The logits of sequences that are computed together, so many tokens of each at a time."""
    got: dict[str, list[np.ndarray]] = {key: [] for key in sequences}
    for start in range(0, max(map(len, sequences.values())), chunk):
        parts = [(key, tokens[start : start + chunk]) for key, tokens in sequences.items()]
        parts = [(key, part) for key, part in parts if part]
        for (key, _), logits in zip(parts, runs.step(parts), strict=True):
            got[key].append(logits)
    return {key: np.concatenate(rows) for key, rows in got.items()}


def assert_logits(runs: Decoding, truth: dict[str, np.ndarray]) -> None:
    """The logits of both recorded prompts, within 1e-4 of their largest."""
    for i in range(2):
        expected = truth[f"logits_{i}"]
        logits = runs.step([(f"p{i}", truth[f"prompt_{i}"].tolist())])[0][-len(expected) :]
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def assert_greedy(runs: Decoding, truth: dict[str, np.ndarray]) -> None:
    """The greedy tokens of both recorded prompts, and their logprobs."""
    for i in range(2):
        expected = truth[f"greedy_{i}"].tolist()
        tokens, logprobs = runs.greedy(f"p{i}", truth[f"prompt_{i}"].tolist(), len(expected))
        assert tokens == expected
        np.testing.assert_allclose(logprobs, truth[f"logprobs_{i}"], atol=3e-4)
