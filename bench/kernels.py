"""Speed of the native kernels on SmolLM2's shapes: products, attention, sampling.

    python bench/kernels.py [--threads N] [--isa NAME] [--only gemm|attention|sample|layer]

One operation is one multiply or one add. GB/s counts weights (or KV) once. Each figure is the best of many.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from pageturner.files import ggml
from pageturner.kernels.base import AttentionShape, Batch, KVSpec, Layer, Rope, Tensor
from pageturner.kernels.native import NativeOps

CLOCKS = [time.perf_counter]
RNG = np.random.default_rng(0)
SHAPE = AttentionShape(9, 3, 64, 0.125)
HIDDEN, INNER, VOCABULARY = 576, 1536, 49152


def best(f: Callable[[], object], budget: float = 0.25) -> float:
    """Seconds of one call: the least over rounds of about 1 ms, which other processes seldom interrupt."""
    clock = CLOCKS[0]
    f()
    start = clock()
    f()
    n = max(1, int(0.001 / max(clock() - start, 1e-7)))
    least, end = 1e9, time.perf_counter() + budget
    while time.perf_counter() < end:
        start = clock()
        for _ in range(n):
            f()
        least = min(least, (clock() - start) / n)
    return least


def weight(ops: NativeOps, kind: str, n: int, k: int) -> object:
    if kind == "F32":
        data = RNG.standard_normal(n * k, np.float32).view(np.uint8)
    else:
        blocks = RNG.integers(0, 256, (n * k // 32, ggml.BY_NAME[kind].nbytes), dtype=np.uint8)
        blocks[:, 1:4:2] = 0x1C  # fp16 scales of about 0.004
        data = blocks.reshape(-1)
    return ops.pack_weight(Tensor("w", kind, (n, k), data))


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def gemm(ops: NativeOps) -> None:
    rows = (1, 4, 8, 16, 64, 512)
    print("GEMM: GOP/s (GB/s of weights)".ljust(34) + "".join(f"M={m}".rjust(14) for m in rows))
    for kind in ("Q4_1", "Q8_0", "F32"):
        for n, k in ((3072, 576), (960, 576), (576, 576), (576, 1536), (VOCABULARY, 576)):
            w, line = weight(ops, kind, n, k), f"{kind} N={n} K={k}".ljust(34)
            for m in rows:
                if n == VOCABULARY and m > 64:
                    continue
                x, out = normal(m, k), np.empty((m, n), np.float32)
                t = best(lambda x=x, w=w, out=out: ops._engine.linear(x, w, None, out))
                line += f"{2e-9 * m * n * k / t:8.0f} ({1e-9 * w.nbytes / t:3.0f})"
            print(line)


def decode_batch(sequences: int, context: int, rows: int, block_size: int) -> tuple[Batch, int]:
    width = -(-context // block_size)
    blocks = sequences * width
    table = RNG.permutation(blocks).reshape(sequences, width).astype(np.int32)
    positions = np.tile(np.arange(context - rows, context), sequences).astype(np.int32)
    at = positions.reshape(sequences, rows)
    slots = np.take_along_axis(table, at // block_size, axis=1) * block_size + at % block_size
    start = np.arange(sequences + 1, dtype=np.int32) * rows
    contexts = np.full(sequences, context, np.int32)
    b = Batch(
        positions * 0, positions, start, contexts, table, slots.reshape(-1).astype(np.int32), start[1:] - 1
    )
    return b, blocks


def attention(ops: NativeOps) -> None:
    cases = [(s, c, 1) for s in (1, 16, 64) for c in (128, 512, 2048)] + [(1, 512, 512), (1, 2048, 512)]
    print("attention, GFLOP/s (GB/s of KV)".ljust(34) + "".join(d.rjust(20) for d in ("float16", "float32")))
    for sequences, context, rows in cases:
        line = f"{sequences} x context {context}, {rows} rows".ljust(34)
        for dtype in ("float16", "float32"):
            b, blocks = decode_batch(sequences, context, rows, 16)
            kv = ops.alloc_kv(KVSpec(1, blocks, 16, 3, 64, dtype))
            every = normal(blocks * 16, 192)
            ops.kv_write(kv, 0, every, every, np.arange(blocks * 16, dtype=np.int32))
            q = normal(sequences * rows, 576)
            seen = float(np.sum(b.positions.astype(np.int64) + 1))
            t = best(lambda q=q, kv=kv, b=b: ops.attention(q, kv, 0, b, SHAPE))
            line += f"{1e-9 * 4 * seen * 576 / t:12.0f} ({1e-9 * kv.nbytes / t:4.0f})"
        print(line)


def layer(ops: NativeOps) -> None:
    print("whole layer (Q4_1, fp16 KV, context 250): us per composite; tok/s of 30 layers + head")
    d, i, q, kv_n = HIDDEN, INNER, 576, 192
    sizes = {"q": (q, d), "k": (kv_n, d), "v": (kv_n, d), "o": (d, q)}
    sizes |= {"gate": (i, d), "up": (i, d), "down": (d, i)}
    layers = []
    cos = np.cos(np.outer(np.arange(2048), 1e4 ** (-np.arange(32) / 32))).astype(np.float32)
    one = np.ones(d, np.float32)
    for _ in range(30):
        parts = {name: weight(ops, "Q4_1", *size) for name, size in sizes.items()}
        made = Layer(
            attn_norm=one, mlp_norm=one, shape=SHAPE, rope=Rope(cos, cos, False), eps=1e-5, **parts
        )  # fmt: skip
        ops.prepare_layer(made)
        layers.append(made)
    head = weight(ops, "Q8_0", VOCABULARY, d)
    for sequences, context, rows in ((1, 250, 1), (8, 250, 1), (16, 250, 1), (64, 250, 1), (1, 512, 512)):
        b, blocks = decode_batch(sequences, context, rows, 16)
        kv = ops.alloc_kv(KVSpec(30, blocks, 16, 3, 64, "float16"))
        x, last = normal(sequences * rows, d), normal(sequences, d)

        def attend(x: np.ndarray = x, kv: object = kv, b: Batch = b) -> None:
            for n, made in enumerate(layers):
                x[:] = 1.0
                ops.attention_block(x, made, kv, n, b)

        def mlp(x: np.ndarray = x) -> None:
            for made in layers:
                x[:] = 1.0
                ops.mlp_block(x, made)

        t = [best(f, 0.5) for f in (attend, mlp, lambda last=last: ops.logits(last, one, 1e-5, head))]
        print(
            f"{sequences * rows} rows".ljust(12)
            + f"{1e6 * t[0] / 30:9.0f}{1e6 * t[1] / 30:9.0f}{1e6 * t[2]:9.0f}"
            + f"{sequences * rows / sum(t):9.0f} tok/s"
        )


def sample(ops: NativeOps) -> None:
    rows = 64
    logits = normal(rows, VOCABULARY) * 3
    cases = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "top-k 40": (1.0, 40, 1.0, 0.0),
        "top-p 0.9": (1.0, 0, 0.9, 0.0),
        "top-k 50, top-p 0.9, min-p": (0.8, 50, 0.9, 0.05),
    }
    print(f"sampling, ms for {rows} rows x {VOCABULARY}")
    uniform = RNG.random(rows, np.float32)
    for name, (temperature, k, p, m) in cases.items():
        t, top, low = (np.full(rows, v, np.float32) for v in (temperature, p, m))
        kk = np.full(rows, k, np.int32)
        seconds = best(lambda t=t, kk=kk, top=top, low=low: ops.sample(logits, t, kk, top, low, uniform))
        print(f"{name:34}{1e3 * seconds:8.2f}")
    print(f"{'top_logprobs, 5':34}{1e3 * best(lambda: ops.top_logprobs(logits, 5)):8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa")
    parser.add_argument("--only", choices=("gemm", "attention", "layer", "sample"))
    args = parser.parse_args()
    ops = NativeOps(args.threads, args.isa)
    if ops.threads == 1:  # the time this process was given: other processes do not count
        CLOCKS[:] = [time.process_time]
    print(f"{ops.fingerprint}, {ops.threads} threads")
    parts = {"gemm": gemm, "attention": attention, "layer": layer, "sample": sample}
    for name, part in parts.items():
        if args.only in (None, name):
            part(ops)


if __name__ == "__main__":
    main()
