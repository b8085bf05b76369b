"""Recurrent layers on CPUs: bits, errors, and the time of a token of a gated delta net beside the plain
recurrence, which is compiled here for that purpose.

    python bench/accept/hybrid_linear.py [--linear-rounds N]
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Line, NotRun

from pageturner.kernels.base import Batch, StateTables
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.recurrent import (
    CHUNK,
    Place,
    RecurrentCache,
    RecurrentSpec,
    StateRule,
    alloc,
)

MOST_TIME = 1.15  # of the plain recurrence's
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128  # Qwen3.6-35B-A3B, Qwen3.5-4B
LAYERS, SEQUENCES = 10, 4  # 80 MiB of states are read for a token of all
RECURRENCE = r"""
#include <cstring>
#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float V __attribute__((vector_size(W * 4)));
constexpr int D = 128, N = 32 / W;
static inline V ld(const float* p) { V v; memcpy(&v, p, sizeof v); return v; }
static inline void st(float* p, V v) { memcpy(p, &v, sizeof v); }
// S lies in blocks of 32 columns; decays and betas are of each head.
extern "C" void plain(float* S, int heads, int rep, const float* q, const float* k, const float* v,
                      const float* decay, const float* beta, float* out) {
  for (int h = 0; h < heads; h++, S += D * D) {
    const float *key = k + h / rep * D, *query = q + h / rep * D;
    for (int c = 0; c < D; c += 32) {
      float* s = S + c * D;
      V m[N] = {}, o[N] = {}, u[N];
      for (int d = 0; d < D; d++) {
        __builtin_prefetch(s + D * 32 + d * 32, 1, 2);
        __builtin_prefetch(s + D * 32 + d * 32 + 16, 1, 2);
        for (int i = 0; i < N; i++) m[i] += ld(s + d * 32 + i * W) * key[d];
      }
      for (int i = 0; i < N; i++) u[i] = (ld(v + h * D + c + i * W) - m[i] * decay[h]) * beta[h];
      for (int d = 0; d < D; d++)
        for (int i = 0; i < N; i++) {
          const V x = ld(s + d * 32 + i * W) * decay[h] + u[i] * key[d];
          st(s + d * 32 + i * W, x), o[i] += x * query[d];
        }
      for (int i = 0; i < N; i++) st(out + h * D + c + i * W, o[i]);
    }
  }
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    parser.add_argument("--linear-rounds", type=int, default=7)


def compiled() -> Any:
    """The plain recurrence, for this processor."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NotRun("no C++ compiler for the plain recurrence")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "plain.cpp"), Path(folder, "plain.so")
        source.write_text(RECURRENCE)
        flags = ["-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def normed(random: np.random.Generator, rows: int) -> Any:
    """Keys or queries of some rows."""
    x = random.standard_normal((rows, KEY_HEADS, DIM), dtype=np.float32)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).reshape(rows, -1)


class Ours:
    """A chunk of tokens of all sequences and layers by the native kernels."""

    def __init__(self, dtype: str, rows: dict[str, Any]) -> None:
        channels = (2 * KEY_HEADS + VALUE_HEADS) * DIM
        spec = RecurrentSpec(LAYERS, channels, 4, KEY_HEADS, VALUE_HEADS, DIM, DIM, dtype)
        self.cache: RecurrentCache = alloc(spec, 2 * SEQUENCES, SEQUENCES)
        self.cache.states[:] = 0
        self.cache.tail[:] = 0
        self.ops, self.rows, self.rule = NativeOps(1), rows, StateRule(True)
        self.places = [self._places(at) for at in range(CHUNK)]

    def _places(self, at: int) -> list[Place]:
        count = np.arange(SEQUENCES, dtype=np.int32)
        writes = np.zeros((0, 3), np.int32)
        if at == CHUNK - 1:
            writes = np.stack([count, count * 0 + 2, count + SEQUENCES], axis=1)
        table = np.stack([count, count * 0 - 1], axis=1)
        tables = StateTables(count, writes, table)
        start = np.arange(SEQUENCES + 1, dtype=np.int32)
        empty = np.zeros((SEQUENCES, 1), np.int32)
        positions = np.full(SEQUENCES, CHUNK + at, np.int32)
        batch = Batch(
            positions, positions, start, positions, empty, positions, positions, None, tables
        )
        return [Place(self.cache, layer, batch) for layer in range(LAYERS)]

    def __call__(self) -> None:
        rows = self.rows
        for places in self.places:
            for place in places:
                qkv, gates = (rows["q"], rows["k"], rows["v"]), (rows["g"], rows["beta"])
                self.ops.linear_rows(qkv, gates, self.rule, place)


class Plain:
    """The same tokens by the recurrence, which writes each state for each token."""

    def __init__(self, rows: dict[str, Any]) -> None:
        self.call = compiled().plain
        size = LAYERS * SEQUENCES * VALUE_HEADS * DIM * DIM
        memory = np.zeros(size + DIM * DIM, np.float32)
        memory[:] = 0.01
        self.states = memory[-memory.ctypes.data % 64 // 4 :][:size].reshape(LAYERS, SEQUENCES, -1)
        self.out = np.zeros(VALUE_HEADS * DIM, np.float32)
        names = ("q", "k", "v", "decay", "beta")
        self.rows = [
            [rows[name][s : s + 1].ctypes.data for name in names] for s in range(SEQUENCES)
        ]
        self.kept = rows

    def __call__(self) -> None:
        out = ctypes.c_void_p(self.out.ctypes.data)
        for _ in range(CHUNK):
            for layer in self.states:
                for state, rows in zip(layer, self.rows, strict=True):
                    at = ctypes.c_void_p(state.ctypes.data)
                    pointers = map(ctypes.c_void_p, rows)
                    self.call(at, VALUE_HEADS, VALUE_HEADS // KEY_HEADS, *pointers, out)


def microseconds(run: Callable[[], None]) -> float:
    """The time of a head and token."""
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return seconds / (CHUNK * LAYERS * SEQUENCES * VALUE_HEADS) * 1e6


def times(rounds: int) -> Iterator[Line]:
    """Decode beside the plain recurrence, in pairs."""
    random = np.random.default_rng(0)
    g = -random.uniform(0.001, 0.2, (SEQUENCES, VALUE_HEADS)).astype(np.float32)
    rows = {
        "q": normed(random, SEQUENCES) * np.float32(DIM**-0.5),
        "k": normed(random, SEQUENCES),
        "v": random.standard_normal((SEQUENCES, VALUE_HEADS * DIM), dtype=np.float32),
        "g": g,
        "decay": np.exp(g),
        "beta": random.uniform(0.2, 0.9, g.shape).astype(np.float32),
    }
    plain = Plain(rows)
    for dtype in ("float16", "bfloat16", "float32"):
        ours = Ours(dtype, rows)
        ours(), plain()
        pairs = [(microseconds(ours), microseconds(plain)) for _ in range(rounds)]
        mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        yield Line(
            f"decode of a gated delta net, one thread, tails in {dtype}: at most {MOST_TIME} of the"
            " recurrence's time",
            f"{ratio:.2f} ({mine:.2f} and {theirs:.2f} us a head and token, {ours.ops.isa})",
            ratio <= MOST_TIME,
        )


def tested() -> Iterator[Line]:
    """Bits and errors, which tests hold: of the kernels, and of heads that predict a second token."""
    command = [sys.executable, *["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]]
    for name in ("kernels/test_recurrent", "engine/test_mtp"):
        done = harness.ran(*command, f"tests/{name}.py")
        last = done.stdout.strip().splitlines()[-1]
        yield Line(f"{name}: bits, errors", last.strip("= "), not done.returncode)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """The lines of this part."""
    yield from tested()
    if not available_isas():
        raise NotRun("the native kernels are not built")
    yield from times(options.linear_rounds)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
