"""Tiles, warps and stages that the catalogue might have, timed on a device beside what it has.

    python bench/gpu/tune.py --build [--out build/gpu/tune]   compiles the candidates; needs no device
    python bench/gpu/tune.py --run [--out build/gpu/tune] [--only attend|dense] > told.jsonl   on a device

Every line: the candidate, the size, microseconds (median of replays, weights and keys from memory), and
whether its bits are those of the first candidate of its size. Last come the best of each size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run_common as common  # noqa: E402
from run_speed import fill  # noqa: E402

from pageturner.kernels.base import AttentionShape  # noqa: E402
from pageturner.kernels.gpu import catalogue, steps  # noqa: E402
from pageturner.kernels.gpu.catalogue import FEW, MANY, SOME, Kernel, Tile  # noqa: E402

ARCHITECTURE = 90
SIZE = ("what", "shape", "rows", "batch", "context")
BUDGET = 0.02  # seconds of replays of a candidate
L2 = 128 << 20  # bytes of weights that are gone through between two uses of one
# rows -> tiles
DENSE = {
    FEW: [
        Tile(64, 64, 64, 4, 4),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 64, 4, 6),
        Tile(64, 32, 128, 4, 4),
        Tile(64, 64, 128, 4, 3),
        Tile(64, 64, 128, 4, 4),
        Tile(64, 128, 64, 4, 4),
        Tile(64, 128, 64, 8, 4),
        Tile(64, 32, 64, 4, 6),
        Tile(64, 32, 128, 4, 5),
        Tile(64, 16, 256, 4, 4),
    ],
    SOME: [
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 64, 8, 4),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 64, 64, 4, 4),
        Tile(64, 128, 64, 4, 4),
        Tile(64, 256, 64, 4, 3),
        Tile(256, 64, 64, 8, 4),
        Tile(256, 128, 64, 8, 3),
        Tile(128, 64, 128, 8, 3),
    ],
    MANY: [
        Tile(128, 256, 64, 8, 3),
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 256, 64, 8, 4),
        Tile(256, 128, 64, 8, 3),
        Tile(128, 128, 64, 8, 4),
        Tile(64, 256, 64, 4, 3),
    ],
}
DENSE_ROWS = {FEW: (1, 16, 64), SOME: (128, 256), MANY: (512, 2048, 8192)}
PARTS = {FEW: (1, 2, 4, 8), SOME: (1, 2, 4), MANY: (1, 4)}
# rows -> (R, BLOCK_T, warps, stages)
ATTEND = {
    FEW: [
        (16, 64, 2, 3),
        (16, 64, 2, 2),
        (16, 64, 2, 4),
        (16, 64, 4, 3),
        (16, 32, 2, 4),
        (16, 128, 4, 3),
        (16, 64, 2, 5),
        (16, 64, 1, 3),
    ],
    MANY: [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (64, 128, 4, 2),
        (64, 32, 4, 4),
    ],
}
ATTEND_SIZES = {
    FEW: [(64, 1, 1024), (256, 1, 1024), (16, 1, 8192), (1, 1, 8192), (8, 1, 250)],
    MANY: [(1, 2048, 8192), (1, 8192, 8192)],
}
ATTENDS = {FEW: "attend.bfloat16.128.few.fp32", MANY: "attend.bfloat16.128.many.fp32"}
LLAMA, QWEN = AttentionShape(32, 8, 128, 128**-0.5), AttentionShape(16, 8, 128, 128**-0.5)


def named(what: str, rows: str, numbers: tuple[int, ...]) -> str:
    return f"{what}.{rows}." + ".".join(map(str, numbers))


def candidates() -> dict[str, Kernel]:
    """By name."""
    found = {}
    for rows, tiles in DENSE.items():
        for tile in tiles:
            name = named("dense-bf16", rows, tile)
            found[name] = catalogue.dense(name, "bf16", rows, tile)
    base = catalogue.kernels_of(ARCHITECTURE)
    for rows, several in ATTEND.items():
        for numbers in several:
            height, block, warps, stages = numbers
            kernel = base[ATTENDS[rows]]
            constants = dict(kernel.constants) | {"R": height, "BLOCK_T": block}
            name = named("attend", rows, numbers)
            found[name] = dataclasses.replace(
                kernel, name=name, constants=tuple(constants.items()), warps=warps, stages=stages
            )
    return found


def work(kernel: Kernel) -> dict[str, Any]:
    """Compiled, or why not."""
    import compile_kernels

    try:
        return compile_kernels.compile_one(ARCHITECTURE, kernel)
    except Exception as error:
        return {"name": kernel.name, "error": f"{type(error).__name__}: {error}"[-300:]}


def build(out: Path, every: dict[str, Kernel], as_they_are: list[Kernel]) -> None:
    """Candidates by name, and kernels of the catalogue."""
    import compile_kernels

    with ProcessPoolExecutor(2) as pool:
        compiled = list(pool.map(work, [*every.values(), *as_they_are]))
    for one in compiled:
        if "error" in one:
            print("NOT BUILT", one["name"], one["error"])
        elif one["name"] in every:
            print(one["name"], *(f"{key} {one[key]}" for key in ("registers", "spills", "shared")))
    good = {
        one["name"]: one
        for one in compiled
        if "error" not in one and one["shared"] <= catalogue.SHARED[ARCHITECTURE]
    }
    compile_kernels.write(out, {ARCHITECTURE: good})


class Renaming:
    """A driver that launches a candidate where a kernel is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.names: dict[str, str] = {}

    def launch(self, kernel: str, grid: Any, arguments: Any) -> None:
        self.inner.launch(self.names.get(kernel, kernel), grid, arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def product_of(
    driver: Renaming,
    candidate: str,
    grid: tuple[int, int],
    x: Any,
    out: Any,
    beside: tuple[int, int],
    sizes: tuple[int, ...],
) -> Callable[[Any], None]:
    """A product with a weight. beside: addresses of the parts and of their counters; sizes: M, N, K, chunk,
    parts."""

    def work(w: Any) -> None:
        given = (x.address, w.address, 0, 0, out.address, *beside, 0, 0, *sizes)
        driver.launch(candidate, grid, given)

    return work


def dense(driver: Renaming, compiled: set[str]) -> Iterator[dict[str, Any]]:
    """Every shape of a layer of Llama-3.1-8B and its head."""
    for name, (n, k) in (dict(common.LLAMA_8B.matrices) | {"head": (128256, 4096)}).items():
        ops = common.GpuOps(driver, 3 << 30, graphs=False)
        host = common.floats(n, k, 1)
        weights = [ops.pack_weight(host) for _ in range(max(1, -(-L2 // len(host.data))))]
        for rows, heights in DENSE_ROWS.items():
            for m in heights if name != "head" or rows != MANY else ():
                values = np.random.default_rng(m).standard_normal((m, k), dtype=np.float32)
                for wanted in PARTS[rows]:
                    if 4 * m * n * wanted <= 1 << 30:
                        told = {"what": "dense-bf16", "shape": name, "rows": m}
                        for one in _sizes(
                            driver, ops, compiled, weights, values, (rows, n, wanted)
                        ):
                            yield told | one
        driver.release()


def _sizes(
    driver: Renaming,
    ops: Any,
    compiled: set[str],
    weights: list[Any],
    values: Any,
    asked: tuple[str, int, int],
) -> Iterator[dict[str, Any]]:
    """One size in every tile. asked: height, N, parts."""
    rows, n, wanted = asked
    m, k = values.shape
    ops.begin()
    x = ops.launches.rounded(ops.on_device(values), "bf16")
    chunk, parts = catalogue.cut(k, wanted, 256)
    out = ops.arena.take((m, n))
    apart = ops.arena.take((parts, m, n)).address if parts > 1 and rows != MANY else 0
    beside = (apart, ops.arena.counters)
    truth = None
    for tile in DENSE[rows]:
        candidate = named("dense-bf16", rows, tile)
        if candidate in compiled and chunk % tile.k == 0:
            grid = (-(-n // tile.n) * -(-m // tile.m), 1 if rows == MANY else parts)
            work = product_of(driver, candidate, grid, x, out, beside, (m, n, k, chunk, parts))
            took = common.recorded_seconds(
                driver, [partial(work, w) for w in weights], False, BUDGET
            )
            bits = ops.to_numpy(out) if m * n < 1 << 24 else np.zeros(1)
            truth = bits if truth is None else truth
            same = bool((bits == truth).all())
            yield {"parts": parts, "candidate": candidate, "us": 1e6 * took, "same_bits": same}


def attend(driver: Renaming, compiled: set[str]) -> Iterator[dict[str, Any]]:
    """One layer's attention, KV from memory."""
    for model, heads in (("8B", LLAMA), ("0.6B", QWEN)):
        shape = common.Shape(model, 2, 4096, 1, heads.heads, heads.kv_heads, heads.head_dim, 1)
        for rows, sizes in ATTEND_SIZES.items():
            for size in sizes:
                told = {"what": "attend", "shape": model} | dict(
                    zip(("batch", "rows", "context"), size, strict=True)
                )
                for one in _attentions(driver, compiled, shape, heads, rows, size):
                    yield told | one


def _attentions(
    driver: Renaming,
    compiled: set[str],
    shape: Any,
    heads: AttentionShape,
    rows: str,
    size: tuple[int, int, int],
) -> Iterator[dict[str, Any]]:
    """One size (sequences, rows of each, context) in every tile."""
    batch, mine, context = size
    runs, truth, fixed = [(context - mine, mine)] * batch, None, steps.attention_rows
    ops = common.GpuOps(driver, 6 << 30, graphs=False)
    kv = ops.alloc_kv(common.kv_spec(shape, runs))
    fill(ops, kv, shape, kv.spec.blocks * 16)
    width = heads.heads * heads.head_dim
    values = np.random.default_rng(6).standard_normal((batch * mine, width), dtype=np.float32)
    for numbers in ATTEND[rows]:
        candidate = named("attend", rows, numbers)
        if candidate not in compiled:
            continue
        steps.attention_rows = lambda a, r, size, high=numbers[0]: (
            high if r == rows else fixed(a, r, size)
        )  # type: ignore[misc]
        driver.names = {ATTENDS[rows]: candidate}
        ops.begin()
        step = ops.step(common.steps_of(runs), {steps.view_of(heads)}, kv)
        q = ops.on_device(values)
        work = partial(_attention, ops, ops.arena.mark, q, kv, step, heads)
        took = common.recorded_seconds(
            driver, [partial(work, at) for at in (0, 1, 0, 1)], False, BUDGET
        )
        bits = ops.to_numpy(work(0)) if mine * batch <= 8192 else np.zeros(1)
        truth = bits if truth is None else truth
        same, error = bool((bits == truth).all()), float(np.abs(bits - truth).max())
        yield {"candidate": candidate, "us": 1e6 * took, "same_bits": same, "error": error}
    steps.attention_rows, driver.names = fixed, {}
    driver.release()


def _attention(
    ops: Any, mark: int, q: Any, kv: Any, step: Any, heads: AttentionShape, layer: int
) -> Any:
    ops.arena.reset(mark)
    return ops.launches.attention(q, kv, layer, step, heads, "fp32")


def run(out: Path, only: str) -> None:
    """On the device."""
    from run_watch import Watched

    from pageturner.kernels.gpu.cuda_driver import CudaDriver
    from pageturner.kernels.gpu.manifest import Manifest

    driver = Renaming(Watched(CudaDriver(Manifest(out))))
    compiled = set(driver.inner.inner._compiled)
    best: dict[str, tuple[float, str]] = {}
    parts: dict[str, Iterator[dict[str, Any]]] = {
        "attend": attend(driver, compiled),
        "dense": dense(driver, compiled),
    }
    for name, told in parts.items():
        for one in told if only in name else ():
            print(json.dumps(one), flush=True)
            size = " ".join(
                f"{key} {one[key]}"
                for key in ("what", "shape", "rows", "batch", "context")
                if key in one
            )
            mine = one["us"], f"{one['candidate']} parts {one.get('parts', '')}"
            best[size] = min(best.get(size, (1e9, "")), mine)
    for size, (us, candidate) in best.items():
        print(f"{size:40} {us:9.1f} us {candidate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--only", default="", help="attend or dense")
    parser.add_argument("--out", type=Path, default=common.ROOT / "build" / "gpu" / "tune")
    options = parser.parse_args()
    if options.build:
        build(options.out, candidates(), list(catalogue.kernels_of(ARCHITECTURE).values()))
    if options.run:
        run(options.out, options.only)


if __name__ == "__main__":
    main()
