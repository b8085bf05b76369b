"""Tiles, warps and stages that the catalogue might have, timed on a device beside those it has.

    python bench/gpu/tune.py KIND --build                       compiles the candidates; needs no device
    python bench/gpu/tune.py KIND --run [--skip NAME,NAME] > found.jsonl                     on a device

KIND is dense, persistent or groups; --out names the folder of the compiled candidates. Weights and keys
come from memory, and the launches of one candidate stand behind each other in a recording. Each line tells a
candidate, its size, microseconds, and whether its bits are those of the kernel of today, which is the first
of each size. A candidate whose bits differ is never the best. A candidate that hangs ends the process: run it
again with --skip. Last come the best of each size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run_common as common  # noqa: E402
from run_forms import copied, empty  # noqa: E402

from pageturner.kernels.gpu import catalogue, launches  # noqa: E402
from pageturner.kernels.gpu.catalogue import M64_WIDE, MANY, Kernel, Ring, Tile  # noqa: E402
from pageturner.kernels.gpu.driver import Plane  # noqa: E402

ARCHITECTURE = 90
BUDGET_S = 0.02  # of replays of a candidate
SILENT_S = 20.0  # a candidate that takes longer hangs
L2 = 128 << 20  # bytes of weights that are gone through between two uses of one
ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
# Rows up to which these tiles of dense products are tried; a swapped one has the weight as first operand
DENSE = {
    64: [
        Tile(64, 32, 128, 4, 5),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 128, 4, 3),
        Tile(64, 128, 64, 4, 4),
        Tile(16, 64, 128, 4, 6, True),
        Tile(16, 128, 128, 4, 5, True),
        Tile(32, 64, 128, 4, 6, True),
        Tile(64, 64, 64, 4, 6, True),
        Tile(64, 128, 64, 4, 6, True),
    ],
    8192: [
        Tile(64, 128, 64, 4, 4),
        Tile(128, 128, 64, 8, 4),
        Tile(128, 64, 64, 4, 5),
        Tile(256, 64, 64, 8, 4),
        Tile(128, 256, 64, 8, 3),
        Tile(128, 128, 64, 8, 4, True),
    ],
}
RINGS = [*catalogue.PERSISTENT, Ring(256, 128, 64, 4), Ring(256, 64, 64, 6)]
FORMS = {"4.32.fp16": True, "4.128": True, "fp8": False}  # whether with lows
GROUPS = {
    MANY: [Tile(64, 128, 128, 8, 3), Tile(64, 64, 128, 2, 3), Tile(64, 64, 128, 4, 3)],
}


class Trial(NamedTuple):
    """The candidates of one size: names, and for each the works that are timed and the array of results."""

    size: dict[str, Any]
    names: list[str]
    start: Callable[[str], tuple[list[Callable[[], Any]], Callable[[], Any]]]


def dense_candidates() -> list[Kernel]:
    made = []
    for tile in {tile: None for tiles in DENSE.values() for tile in tiles}:
        for name, make in (("dense", catalogue.dense), ("gated_dense", catalogue.gated_dense)):
            sides = ".".join(map(str, tile[:5]))
            made.append(make(f"{name}.try.{sides}{'.swap' * tile.swap}", "bf16", M64_WIDE, tile))
    return made


def persistent_candidates() -> list[Kernel]:
    return [
        catalogue.persistent(f"{'gated_' * gated}persistent.try.{ring.name}", "bf16", ring, gated)
        for ring in RINGS
        for gated in (False, True)
    ]


def group_candidates() -> list[Kernel]:
    made = []
    for form in FORMS:
        for height, tiles in GROUPS.items():
            for tile in tiles:
                kernel = catalogue.groups(form, height, tile)
                sides = ".".join(map(str, tile[:5]))
                made.append(dataclasses.replace(kernel, name=f"{kernel.name}.try.{sides}"))
    return made


CANDIDATES = {
    "dense": dense_candidates,
    "persistent": persistent_candidates,
    "groups": group_candidates,
}


def compiled(kernel: Kernel) -> dict[str, Any]:
    """Compile a kernel, or tell why it cannot be."""
    import compile_kernels

    try:
        return compile_kernels.compile_one(ARCHITECTURE, kernel)
    except Exception as error:
        return {"name": kernel.name, "error": f"{type(error).__name__}: {error}"[-300:]}


def build(kind: str, out: Path) -> None:
    """Compile the candidates, and the kernels of today."""
    import compile_kernels

    wanted = [*CANDIDATES[kind](), *catalogue.kernels_of(ARCHITECTURE).values()]
    good = {}
    with ProcessPoolExecutor() as pool:
        for one in pool.map(compiled, wanted):
            if "error" in one:
                print("NOT BUILT", one["name"], one["error"])
            elif one["shared"] <= catalogue.SHARED[ARCHITECTURE]:
                good[one["name"]] = one
                if ".try." in one["name"]:
                    print(one["name"], one["registers"], "registers", one["spills"], "spilled")
    compile_kernels.write(out, {ARCHITECTURE: good})


# -- on the device -------------------------------------------------------------------------------------------
def launch_of(ops: Any, kernel: Kernel, x: Any, rows: int) -> tuple[Callable[[Any], None], Any]:
    """Return a launch of a product for a weight, and the array of its results."""
    gated, sides = "gated" in kernel.function, kernel.constants
    persistent = kernel.function.startswith("persistent")

    def sizes(w: Any) -> tuple[int, int]:
        return (w.rows // 2, w.columns) if gated else (w.rows, w.columns)

    n = x.weight_shape[0]
    out = ops.arena.take((rows, n // 2 if gated else n), "bf16" if gated else "fp32")
    outputs = n // 2 if gated else n
    tiles = -(-outputs // sides["BLOCK_N"]) * -(-rows // sides["BLOCK_M"])
    chunk, parts = x.parts
    split = parts
    if sides.get("WHOLE") or (
        kernel.function == "groups.groups" and tiles >= catalogue.WHOLE_TILES
    ):
        split = 1
    partial_sums = ops.arena.take((parts, rows, n)).address if split > 1 and not gated else 0
    beside = (0, 0, out.address, partial_sums, ops.arena.counters)

    def launch(w: Any) -> None:
        here, wide = sizes(w)
        shape = (rows, here, wide)
        if persistent:
            planes = [Plane(x.address, rows, wide), Plane(w.address, w.rows, wide)]
            rest = (0, 0, out.address, 0, 0, *shape, chunk, parts)
            if gated:
                planes.append(Plane(out.address, rows, here))
                rest = shape
            grid: tuple[int, ...] = (min(tiles, ops.driver.multiprocessors),)
            arguments: tuple[Any, ...] = (*planes, *rest)
        elif gated:
            grid, arguments = (tiles,), (x.address, w.address, out.address, *shape)
        elif kernel.function == "groups.groups":
            operands = (x.address, w.q, w.high, w.scale, w.low, x.sums)
            flags = (int(w.low != 0), w.zero, 0, 0)
            grid, arguments = (tiles, split), (*operands, *beside, *flags, *shape, chunk, parts)
        else:
            arguments = (x.address, w.address, *beside, 0, 0, *shape, chunk, parts)
            grid = (tiles, split)
        ops.driver.launch(kernel.name, grid, arguments)

    return launch, out


@dataclasses.dataclass
class Operand:
    """x of a product, with what the launches of every candidate take of it and of the weight."""

    address: int
    weight_shape: tuple[int, int]
    parts: tuple[int, int]
    sums: int = 0


def product_trial(
    ops: Any, weights: list[Any], size: dict[str, Any], kernels: list[Kernel]
) -> Trial:
    """Return the trial of these kernels; the first is of today."""
    w, rows = weights[0], size["rows"]
    ops.begin()
    values = np.random.default_rng(rows).standard_normal((rows, w.columns), dtype=np.float32)
    x = ops.launches.cast(ops.on_device(values), "bf16")
    if hasattr(w, "q"):
        sums = ops.launches.group_sums(x, w.columns, w.group) if w.low else 0
        parts = catalogue.group_parts_of(w.rows, w.columns, w.sort)
    else:
        sums, parts = 0, catalogue.parts_of(w.rows, w.columns, catalogue.block_k("bf16"))
    operand = Operand(x.address, (w.rows, w.columns), parts, sums)
    mark, by_name = ops.arena.mark, {kernel.name: kernel for kernel in kernels}

    def start(name: str) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
        ops.arena.reset(mark)
        launch, out = launch_of(ops, by_name[name], operand, rows)
        return [partial(launch, one) for one in weights], lambda: _bits(ops, out)

    return Trial(size, list(by_name), start)


def _bits(ops: Any, out: Any) -> Any:
    found = np.empty(out.nbytes, np.uint8)
    ops.driver.download(found, out.address)
    return found


def dense(driver: Any, kind: str) -> Iterator[Trial]:
    """Yield the dense or the persistent products of a layer of Llama-3.1-8B, gated ones for gate and up."""
    every = catalogue.kernels_of(ARCHITECTURE)
    for shape, (n, k) in common.LLAMA_8B.matrices.items():
        ops = common.GpuOps(driver, 2 << 30, graphs=False)
        host = common.floats(n, k, 1)
        weights = [ops.pack_weight(host) for _ in range(max(2, -(-L2 // len(host.data))))]
        gated = "gated_" * (shape == "gate_up")
        for rows in ROWS:
            height = catalogue.height_of(rows, n, True)
            if gated:
                height = catalogue.gated_height(height)
            today = every[f"{gated}dense.bf16.{height}"]
            if kind == "persistent":
                mine = [
                    one
                    for one in persistent_candidates()
                    if one.name.startswith(f"{gated}persistent")
                ]
            else:
                names = [".".join(map(str, tile[:5])) for tile in DENSE[64 if rows <= 64 else 8192]]
                mine = [
                    one
                    for one in dense_candidates()
                    if one.name.startswith(f"{gated}dense")
                    and one.name.partition(".try.")[2].removesuffix(".swap") in names
                ]
            if rows > 64 or kind == "dense":
                yield product_trial(ops, weights, {"shape": shape, "rows": rows}, [today, *mine])
        driver.release()


def groups(driver: Any, kind: str) -> Iterator[Trial]:
    """Yield the products of a layer of Llama-3.1-8B with weights in groups."""
    every = catalogue.kernels_of(ARCHITECTURE)
    for form, low in FORMS.items():
        for shape, (n, k) in common.LLAMA_8B.matrices.items():
            ops = common.GpuOps(driver, 1 << 30, graphs=False)
            first = empty(ops, form, low, n, k)
            weights = [first, *(copied(ops, first) for _ in range(max(1, L2 // first.nbytes)))]
            for rows in (64, 256):
                today = every[f"groups.{form}.{launches.group_height_of(rows, k)}"]
                mine = [
                    one for one in group_candidates() if one.name.startswith(f"{today.name}.try.")
                ]
                size = {"form": form, "shape": shape, "rows": rows}
                yield product_trial(ops, weights, size, [today, *mine])
            driver.release()


TRIALS = {"dense": dense, "persistent": dense, "groups": groups}


def hung(name: str) -> None:
    print(f"HUNG {name}: run again with --skip", file=sys.stderr, flush=True)
    os._exit(1)


def run(kind: str, out: Path, skip: set[str]) -> None:
    """Time every candidate on the device."""
    from run_watch import Watched

    from pageturner.kernels.gpu.cuda_driver import CudaDriver
    from pageturner.kernels.gpu.manifest import Manifest

    manifest = Manifest(out)
    driver = Watched(CudaDriver(manifest))
    built = set(manifest.kernels(ARCHITECTURE)) - skip
    best: list[str] = []
    for trial in TRIALS[kind](driver, kind):
        truth, found = None, []
        for name in trial.names:
            if name not in built:
                continue
            guard = threading.Timer(SILENT_S, hung, [name])
            guard.start()
            works, bits_of = trial.start(name)
            took = common.recorded_seconds(driver, works, False, BUDGET_S)
            bits = bits_of()
            guard.cancel()
            truth = bits if truth is None else truth
            same = bool((bits == truth).all())
            line = {
                "kind": kind,
                **trial.size,
                "candidate": name,
                "us": 1e6 * took,
                "same_bits": same,
            }
            print(json.dumps(line), flush=True)
            if same:
                found.append((1e6 * took, name))
        today = found[0][0]
        us, name = min(found)
        best.append(f"{trial.size!s:60} today {today:8.1f} us, best {us:8.1f} us: {name}")
    print("\n".join(best), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=TRIALS)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--skip", default="", help="candidates that hang")
    parser.add_argument("--out", type=Path, default=common.ROOT / "build" / "gpu" / "tune")
    options = parser.parse_args()
    out = options.out / options.kind
    if options.build:
        build(options.kind, out)
    if options.run:
        run(options.kind, out, set(options.skip.split(",")))


if __name__ == "__main__":
    main()
