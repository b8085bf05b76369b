"""The first minutes on an NVIDIA GPU: whether the kernels are right, whether bits hold, how fast they are.

    python bench/gpu/run.py [check] [bits] [ceilings] [products] [decode] [prefill]

Needs numpy, pytest, the package cuda-bindings and the compiled kernels
(`make gpu-kernels ARGS="--architectures 90"`); `products` and `ceilings` also torch. A part takes at
most ten minutes. Weights are random; times are of whole steps, from the upload of a step's integers until
the device is idle. Prints JSON, one line for each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from pageturner.kernels.base import AttentionShape, Batch, KVSpec, Layer, Rope, Stack, Tensor  # noqa: E402
from pageturner.kernels.gpu.arrays import GpuArray  # noqa: E402
from pageturner.kernels.gpu.driver import Driver  # noqa: E402
from pageturner.kernels.gpu.ops import GpuOps  # noqa: E402
from pageturner.kernels.gpu.weights import to_bf16  # noqa: E402

BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """Of a model without a head."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN3_06B = Shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151936)
TINY = Shape("tiny", 2, 64, 96, 4, 2, 16, 128)


def tell(what: str, **figures: Any) -> None:
    print(json.dumps({"part": what, **figures}), flush=True)


def floats(rows: int, columns: int, seed: int) -> Tensor:
    """bf16 of about 1 / sqrt(columns); a block of a million values again and again."""
    some = np.random.default_rng(seed).standard_normal(min(rows * columns, 1 << 20), dtype=np.float32)
    bits = to_bf16(some * np.float32(columns**-0.5))
    return Tensor("w", "BF16", (rows, columns), np.resize(bits, rows * columns).view(np.uint8))


def ones(count: int) -> Tensor:
    return Tensor("v", "F32", (count,), np.ones(count, np.float32).view(np.uint8))


def make_stack(ops: GpuOps, shape: Shape) -> Stack:
    """Random weights; those of all layers are equal, in memory of their own."""
    s = shape
    angle = np.outer(np.arange(16384), 5e5 ** (-np.arange(s.head_dim // 2) / (s.head_dim // 2)))
    rope = Rope(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), False)
    tensors = {
        "q": floats(s.heads * s.head_dim, s.hidden, 1), "k": floats(s.kv_heads * s.head_dim, s.hidden, 2),
        "v": floats(s.kv_heads * s.head_dim, s.hidden, 3), "o": floats(s.hidden, s.heads * s.head_dim, 4),
        "gate": floats(s.inner, s.hidden, 5), "up": floats(s.inner, s.hidden, 6),
        "down": floats(s.hidden, s.inner, 7), "attn_norm": ones(s.hidden), "mlp_norm": ones(s.hidden),
    }  # fmt: skip
    attention = AttentionShape(s.heads, s.kv_heads, s.head_dim, s.head_dim**-0.5)
    layers = []
    for _ in range(s.layers):
        packed = {name: ops.pack_weight(tensor) for name, tensor in tensors.items()}
        layers.append(Layer(**packed, shape=attention, rope=rope, eps=1e-5))
        ops.prepare_layer(layers[-1])
    stack = Stack(ops.pack_weight(floats(s.vocabulary, s.hidden, 8)), layers, 1e-5)
    ops.prepare_stack(stack)
    return stack


def weight_bytes(shape: Shape) -> int:
    """That one step reads, without the embedding."""
    s = shape
    attention = (2 * s.heads + 2 * s.kv_heads) * s.head_dim * s.hidden
    return 2 * s.layers * (attention + 3 * s.hidden * s.inner)


def steps_of(runs: list[tuple[int, int]], wanted: str = "last") -> Batch:
    """Sequences (computed, rows) on blocks of their own."""
    need = [-(-(computed + rows) // BLOCK) for computed, rows in runs]
    table, at = np.zeros((len(runs), max(need)), np.int32), 0
    positions, slots, starts = [], [], [0]
    for s, (computed, rows) in enumerate(runs):
        table[s, : need[s]] = np.arange(at, at + need[s])
        at += need[s]
        here = np.arange(computed, computed + rows)
        positions.append(here)
        slots.append(table[s, here // BLOCK] * BLOCK + here % BLOCK)
        starts.append(starts[-1] + rows)
    rows = np.concatenate(positions).astype(np.int32)
    ends = np.array(starts[1:], np.int32) - 1
    logits = np.arange(len(rows), dtype=np.int32) if wanted == "all" else ends
    tokens = (rows * 7 + 3) % 100
    return Batch(
        tokens.astype(np.int32), rows, np.array(starts, np.int32),
        np.array([computed + n for computed, n in runs], np.int32), table,
        np.concatenate(slots).astype(np.int32), logits,
    )  # fmt: skip


def blocks_of(runs: list[tuple[int, int]]) -> int:
    return sum(-(-(computed + rows) // BLOCK) for computed, rows in runs)


def seconds_of(driver: Driver, work: Callable[[], Any], budget: float = 2.0) -> float:
    """Median of a call, the device idle before and after."""
    for _ in range(3):
        work()
    driver.synchronise()
    took: list[float] = []
    begin = time.perf_counter()
    while len(took) < 5 or (time.perf_counter() - begin < budget and len(took) < 200):
        at = time.perf_counter()
        work()
        driver.synchronise()
        took.append(time.perf_counter() - at)
    return float(np.median(took))


# -- parts ---------------------------------------------------------------------------------------------------
def check(driver: Driver) -> bool:
    """The op grid of the tests, on the device."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "tests/gpu/test_kernels.py"],
        cwd=ROOT, env={**os.environ, "PAGETURNER_TEST_GPU": "cuda", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    tell("check", device=driver.name, passed=done.returncode == 0, told=done.stdout[-1500:])
    return done.returncode == 0


CROWDS = (2, 7, 33, 64, 100, 257, 1000, 2048)


def bits(driver: Driver, shape: Shape = LLAMA_8B, crowds: tuple[int, ...] = CROWDS) -> bool:
    """A row of a product alone and among others; a sequence alone, in chunks, in a crowd, recorded or not."""
    ops = GpuOps(driver, 6 << 30 if shape is not TINY else 64 << 20, graphs=False)
    differ = compared = 0
    for n, k in {(shape.hidden, shape.hidden), (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)}:
        weight = ops.pack_weight(floats(n, k, 11))
        x = np.random.default_rng(n + k).standard_normal((max(crowds), k), dtype=np.float32)
        ops.begin()
        alone = ops.to_numpy(ops.linear(ops.on_device(x[:1]), weight))[0]
        for rows in crowds:
            for place in {0, rows // 2, rows - 1}:
                crowd = x[:rows].copy()
                crowd[place] = x[0]
                ops.begin()
                out = ops.linear(ops.on_device(crowd), weight)
                mine = GpuArray(out.address + 4 * n * place, (1, n))
                differ += int((ops.to_numpy(mine)[0] != alone).any())
                compared += 1
    small = Shape(shape.name, 2, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim, 1024)
    stack = make_stack(ops, small if shape is not TINY else TINY)
    longest = 1500 if shape is not TINY else 40
    blocks = 4096 if shape is not TINY else 64
    kv = ops.alloc_kv(KVSpec(2, blocks, BLOCK, shape.kv_heads, shape.head_dim, "float16"))
    whole = ops.to_numpy(ops.hidden(stack, steps_of([(0, longest)], "all"), kv, None))
    for chunk in (1, 7, 64, 300, 1024):
        if chunk == 1 and shape is not TINY:
            begins = list(range(longest - 20, longest))  # the end token by token, behind what is there
        else:
            begins = list(range(0, longest, chunk))
        for at in begins:
            count = min(chunk, longest - at)
            got = ops.to_numpy(ops.hidden(stack, steps_of([(at, count)], "all"), kv, None))
            differ += int((got != whole[at : at + count]).any(axis=1).sum())
            compared += count
    recorded = ops.graphs_of()
    for crowd in (1, 5, 40) if shape is not TINY else (1, 3):
        runs = [(longest - 1, 1), *((3 + 13 * i % longest, 1) for i in range(crowd - 1))]
        for graphs in (None, recorded, recorded, recorded):
            ops.graphs = graphs
            got = ops.to_numpy(ops.hidden(stack, steps_of(runs), kv, None))
            differ += int((got[0] != whole[longest - 1]).any())
            compared += 1
    tell("bits", shape=shape.name, compared=compared, differ=differ)
    return differ == 0


def ceilings(driver: Driver) -> dict[str, float]:
    """Copy bandwidth by our driver (read and written bytes), bf16 products by torch."""
    nbytes = 4 << 30
    a, b = driver.alloc(nbytes), driver.alloc(nbytes)
    took = seconds_of(driver, lambda: driver.copy(b, a, nbytes))
    driver.free(a)
    driver.free(b)
    found = {"copy_tb_s": 2e-12 * nbytes / took}
    try:
        import torch

        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        y = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

        def product() -> None:
            torch.mm(x, y)
            torch.cuda.synchronize()

        found["bf16_tflop_s"] = 2e-12 * 8192**3 / seconds_of(driver, product)
    except ImportError:
        pass
    tell("ceilings", device=driver.name, **found)
    return found


def products(driver: Driver, shape: Shape = LLAMA_8B) -> None:
    """Our tiles, and cuBLAS through torch, on the same shapes."""
    ops = GpuOps(driver, 4 << 30, graphs=False)
    for n, k in ((6144, 4096), (4096, 4096), (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
        weight = ops.pack_weight(floats(n, k, 12))
        for rows in (1, 16, 64, 256, 2048, 8192):
            x = GpuArray(ops.arena.take((rows, k), "bf16").address, (rows, k), "bf16")
            mark = ops.arena.mark

            def ours(x: GpuArray = x, mark: int = mark, weight: Any = weight) -> None:
                ops.arena.reset(mark)
                ops.launches.product(x, weight)

            took = seconds_of(driver, ours, 0.3)
            found: dict[str, float] = {"us": 1e6 * took, "tflop_s": 2e-12 * rows * n * k / took,
                                       "weight_tb_s": 2e-12 * n * k / took}  # fmt: skip
            try:
                import torch

                a = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
                b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)

                def theirs(a: Any = a, b: Any = b) -> None:
                    torch.mm(a, b.T)
                    torch.cuda.synchronize()

                found["cublas_us"] = 1e6 * seconds_of(driver, theirs, 0.3)
            except ImportError:
                pass
            ops.begin()
            tell("products", rows=rows, n=n, k=k, **found)


def decode(driver: Driver, shape: Shape = LLAMA_8B, kv_type: str = "bfloat16") -> None:
    """Steps of single tokens, recorded, beside the time of their bytes at the copy's rate."""
    copy = ceilings(driver)["copy_tb_s"]
    ops = GpuOps(driver, 4 << 30)
    stack = make_stack(ops, shape)
    for batch in (1, 8, 32, 64, 128, 256):
        for context in (250, 1024, 8192):
            runs = [(context - 1, 1)] * batch
            spec = KVSpec(shape.layers, blocks_of(runs), BLOCK, shape.kv_heads, shape.head_dim, kv_type)
            if spec.nbytes > ops.free_memory() * 0.9:
                tell("decode", batch=batch, context=context, skipped="the KV does not fit")
                continue
            kv = ops.alloc_kv(spec)
            step = steps_of(runs)
            took = seconds_of(driver, lambda: ops.hidden(stack, step, kv, None))  # noqa: B023
            floor = (weight_bytes(shape) + spec.bytes_per_token * context * batch) / (copy * 1e12)
            tell("decode", shape=shape.name, batch=batch, context=context, ms=1e3 * took,
                 tok_s=batch / took, share_of_floor=floor / took)  # fmt: skip
            ops.graphs = ops.graphs_of()  # recordings hold the addresses of this KV
            for address in (kv.keys, kv.values):
                driver.free(address)


def prefill(driver: Driver, shape: Shape = LLAMA_8B, rows: int = 8192) -> None:
    """One chunk of a prompt, beside its products at the measured rate."""
    rate = ceilings(driver).get("bf16_tflop_s", 780.0)
    ops = GpuOps(driver, 24 << 30, graphs=False)
    stack = make_stack(ops, shape)
    spec = KVSpec(shape.layers, rows // BLOCK, BLOCK, shape.kv_heads, shape.head_dim, "bfloat16")
    kv, step = ops.alloc_kv(spec), steps_of([(0, rows)])
    took = seconds_of(driver, lambda: ops.hidden(stack, step, kv, None), 5.0)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * rows * rows
    operations = weight_bytes(shape) * rows + attention
    tell("prefill", shape=shape.name, rows=rows, ms=1e3 * took, tflop_s=1e-12 * operations / took,
         share_of_rate=1e-12 * operations / took / rate)  # fmt: skip


PARTS = {part.__name__: part for part in (check, bits, ceilings, products, decode, prefill)}


def main() -> int:
    parser = argparse.ArgumentParser(description="check and measure the GPU backend on a device")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    options = parser.parse_args()
    from pageturner.kernels.gpu.cuda_driver import CudaDriver

    wrong = 0
    for name in options.parts or list(PARTS):
        begin = time.perf_counter()
        driver = CudaDriver()
        wrong += PARTS[name](driver) is False
        driver.close()
        tell(name, seconds=time.perf_counter() - begin)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
