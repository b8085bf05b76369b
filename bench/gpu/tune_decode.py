"""Tiles, operands and requests ahead that products of a decode step might have, timed on a device.

    python bench/gpu/tune_decode.py --build [--out build/gpu/tune_decode]   compiles; needs no device
    python bench/gpu/tune_decode.py --run [--out build/gpu/tune_decode] > told.jsonl   on a device, about 50 s

Products of the shapes of two models stand behind each other in a recording, so that each may begin beside the
one in front, and weights come from memory. K is summed in one order by all: a candidate whose bits are not
those of today's tile is told, and never the best. Last comes a table of the best by shape and rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run_common as common  # noqa: E402
import tune  # noqa: E402

from pageturner.kernels.gpu import catalogue  # noqa: E402
from pageturner.kernels.gpu.catalogue import FEW, Kernel, Tile  # noqa: E402

ROWS = (1, 16, 64, 128, 256)
TILES = {
    64: [
        Tile(64, 32, 128, 4, 5),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 32, 128, 4, 4),
        Tile(64, 16, 256, 4, 4),
        Tile(64, 64, 128, 4, 3),
        Tile(64, 128, 64, 4, 4),
        Tile(16, 64, 128, 4, 6, True),
        Tile(16, 64, 128, 4, 8, True),
        Tile(16, 64, 256, 4, 4, True),
        Tile(16, 128, 128, 4, 5, True),
        Tile(16, 128, 64, 4, 8, True),
        Tile(32, 64, 128, 4, 6, True),
        Tile(64, 64, 128, 4, 5, True),
        Tile(64, 64, 64, 4, 6, True),
        Tile(64, 128, 64, 4, 6, True),
        Tile(64, 128, 64, 8, 6, True),
        Tile(64, 128, 64, 8, 4, True),
    ],
    256: [
        Tile(64, 128, 64, 4, 4),
        Tile(128, 128, 64, 8, 4),
        Tile(64, 64, 64, 4, 6),
        Tile(64, 64, 128, 4, 4),
        Tile(64, 64, 128, 4, 5),
        Tile(128, 64, 64, 4, 5),
        Tile(128, 64, 128, 4, 3),
        Tile(128, 32, 128, 4, 4),
        Tile(256, 64, 64, 8, 4),
        Tile(128, 256, 64, 8, 3),
        Tile(64, 32, 128, 4, 5),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 64, 4, 6, True),
        Tile(64, 64, 128, 4, 5, True),
        Tile(128, 64, 64, 4, 6, True),
        Tile(64, 128, 64, 4, 6, True),
        Tile(128, 128, 64, 8, 4, True),
        Tile(256, 64, 64, 8, 4, True),
    ],
}
# Bytes that a program asks for ahead, and of a request; the first is the catalogue's
AHEAD = (
    (16384, 64),
    (0, 64),
    (8192, 64),
    (32768, 64),
    (65536, 64),
    (16384, 32),
    (16384, 128),
    (16384, 0),
)
# Of a layer together: the tile of q, k, v, o and down, that of gate and up, and requests ahead. How
# much shared memory a kernel has decides whether the next one can begin beside it
SLIMS = (
    Tile(64, 32, 128, 4, 5),
    Tile(64, 32, 128, 4, 4),
    Tile(64, 32, 128, 4, 3),
    Tile(64, 32, 64, 4, 6),
)
TOGETHER = [
    *((slim, Tile(64, 64, 64, 4, 3), AHEAD[0]) for slim in SLIMS),
    *((SLIMS[0], Tile(64, 64, 64, 4, 3), ahead) for ahead in AHEAD[1:]),
    *((SLIMS[1], Tile(64, 64, 64, 4, 3), ahead) for ahead in AHEAD[1:]),
    *((SLIMS[1], Tile(64, 64, 64, 4, n), AHEAD[0]) for n in (2, 4, 6)),
    *(
        (Tile(16, 64, 128, 4, stages, True), Tile(16, 64, 64, 4, stages, True), AHEAD[0])
        for stages in (4, 5, 6, 8)
    ),
    *(
        (Tile(64, 64, 64, 4, stages, True), Tile(64, 64, 64, 4, stages, True), AHEAD[0])
        for stages in (3, 4, 6)
    ),
    *((Tile(64, 64, 64, 4, stages, True), Tile(64, 64, 64, 4, 3), AHEAD[0]) for stages in (4, 6)),
]
DENSE = ("dense", "gated_dense", "persistent", "gated_persistent")
BUDGET = 0.015  # seconds of replays of a candidate


class Asked(NamedTuple):
    """A product: of gate and up it is the gated one."""

    model: str
    name: str
    n: int
    k: int
    rows: int

    @property
    def gated(self) -> bool:
        return self.name == "gate_up"


def named(gated: bool, tile: Tile, ahead: tuple[int, int]) -> str:
    side = "weights" if tile.swap else "rows"
    return f"{'gated' if gated else 'dense'}.{side}." + ".".join(map(str, (*tile[:5], *ahead)))


def kernel_of(gated: bool, tile: Tile, ahead: tuple[int, int] = AHEAD[0]) -> Kernel:
    make = catalogue.gated_dense if gated else catalogue.dense
    kernel = make("", "bf16", FEW, tile)
    constants = dict(kernel.constants) | {"AHEAD": ahead[0], "LINE": ahead[1]}
    return dataclasses.replace(
        kernel, name=named(gated, tile, ahead), constants=tuple(constants.items())
    )


def present(asked: Asked) -> Tile:
    """Today's tile, of more than 64 rows that which it was before persistent products."""
    tiles = catalogue.tiles_of(tune.ARCHITECTURE, "bf16")
    height = catalogue.height_of(asked.rows, asked.n, True)
    if asked.gated:
        return catalogue.gated_tile(tiles, catalogue.gated_height(height))
    return tiles[height]


def candidates_of(asked: Asked) -> list[tuple[Tile, tuple[int, int]]]:
    """Today's first."""
    first = present(asked)
    tiles = TILES[64 if asked.rows <= 64 else 256]
    found = [(first, ahead) for ahead in (AHEAD if asked.rows in (1, 64) else AHEAD[:1])]
    for tile in tiles:
        useless = tile.swap and (tile.m > 16 * max(1, asked.rows // 8))
        if tile != first and not useless:
            found.append((tile, AHEAD[0]))
    return found


def shapes() -> Iterator[tuple[str, str, int, int]]:
    for model in (common.LLAMA_8B, common.QWEN3_06B):
        for name, (n, k) in (*model.matrices.items(), ("head", (model.vocabulary, model.hidden))):
            yield model.name, name, n, k


def every() -> list[Asked]:
    return [Asked(*shape, rows) for shape in shapes() for rows in ROWS]


def build(out: Path) -> None:
    kernels = {
        (asked.gated, tile, ahead): kernel_of(asked.gated, tile, ahead)
        for asked in every()
        for tile, ahead in candidates_of(asked)
    }
    for slim, wide, ahead in TOGETHER:
        kernels[False, slim, ahead] = kernel_of(False, slim, ahead)
        kernels[True, wide, ahead] = kernel_of(True, wide, ahead)
    used = [
        one
        for name, one in catalogue.kernels_of(tune.ARCHITECTURE).items()
        if name in ("elementwise.cast.bf16", "rms_norm.bf16")
        or (".bf16." in name and name.partition(".")[0] in DENSE)
    ]
    tune.build(out, {kernel.name: kernel for kernel in kernels.values()}, used)


# -- on the device -------------------------------------------------------------------------------------------
def work_of(
    driver: Any, ops: Any, x: Any, asked: Asked, tile: Tile, name: str
) -> tuple[Callable[[Any], None], Any]:
    """A launch of a candidate for a weight, and where the result lies."""
    outputs, step = (
        (asked.n // 2, catalogue.gated_outputs(tile)) if asked.gated else (asked.n, tile.n)
    )
    programs = -(-outputs // step) * -(-asked.rows // tile.m)
    out = ops.arena.take((asked.rows, outputs), "bf16" if asked.gated else "fp32")

    def gated(w: Any) -> None:
        sizes = (asked.rows, outputs, asked.k)
        driver.launch(name, (programs,), (x.address, w.address, out.address, *sizes))

    if asked.gated:
        return gated, out
    chunk, parts = catalogue.parts_of(asked.n, asked.k, catalogue.block_k("bf16"))
    apart = ops.arena.take((parts, asked.rows, asked.n)).address if parts > 1 else 0
    sizes = (asked.rows, asked.n, asked.k, chunk, parts)
    return tune.product_of(
        driver, name, (programs, parts), x, out, (apart, ops.arena.counters), sizes
    ), out


def as_it_is(ops: Any, x: Any, asked: Asked) -> tuple[Callable[[Any], None], Any]:
    """The same of what a step launches."""
    mark = ops.arena.mark

    def work(w: Any) -> Any:
        ops.arena.reset(mark)
        return (
            ops.launches.gated_product(x, w, "bf16") if asked.gated else ops.launches.product(x, w)
        )

    outputs = asked.n // 2 if asked.gated else asked.n
    out = ops.arena.take((asked.rows, outputs), "bf16" if asked.gated else "fp32")
    return work, out  # the first array that is taken


def bits_of(ops: Any, out: Any) -> Any:
    found = np.empty(out.nbytes, np.uint8)
    ops.driver.download(found, out.address)
    return found


def timed(driver: Any, compiled: set[str]) -> Iterator[dict[str, Any]]:
    """Microseconds of the product as it is, with launches that wait for the end of the one in front and
    without, and of every candidate."""
    cuda = driver.inner.inner
    for model, shape, n, k in shapes():
        ops = common.GpuOps(driver, 2 << 30, graphs=False)
        host = common.floats(n, k, 1)
        copies = max(2 if n * k < 1 << 29 else 1, -(-tune.L2 // len(host.data)))
        weights = [ops.pack_weight(host) for _ in range(copies)]
        for rows in ROWS:
            asked = Asked(model, shape, n, k, rows)
            values = np.random.default_rng(rows).standard_normal((rows, k), dtype=np.float32)
            ops.begin()
            x = ops.launches.rounded(ops.on_device(values), "bf16")
            mark, truth = ops.arena.mark, None
            works = [("alone", None), ("today", None)]
            works += [(named(asked.gated, *one), one) for one in candidates_of(asked)]
            for name, one in works:
                if one is not None and name not in compiled:
                    continue
                ops.arena.reset(mark)
                work, out = (
                    work_of(driver, ops, x, asked, one[0], name) if one else as_it_is(ops, x, asked)
                )
                cuda.dependent_launch = name != "alone"
                took = common.recorded_seconds(
                    driver, [partial(work, w) for w in weights], False, BUDGET
                )
                bits = bits_of(ops, out)
                truth = bits if truth is None else truth
                yield asked._asdict() | {
                    "candidate": name,
                    "us": 1e6 * took,
                    "same_bits": bool((bits == truth).all()),
                    "swap": one is not None and one[0].swap,
                }
        driver.release()


LAYERS = 4  # of a chain


def layers(driver: Any) -> Iterator[dict[str, Any]]:
    """Microseconds of the products and norms of a layer, behind each other as in a step: today's tiles, the
    same with launches that wait for the end of the one in front, and others."""
    for model in (common.LLAMA_8B, common.QWEN3_06B):
        ops = common.GpuOps(driver, 1 << 30, graphs=False)
        tensors = {name: common.floats(n, k, 1) for name, (n, k) in model.matrices.items()}
        weights = [
            {name: ops.pack_weight(one) for name, one in tensors.items()} for _ in range(LAYERS)
        ]
        norm = ops.pack_weight(common.ones(model.hidden))
        for rows in (1, 16, 64):
            truth, dice = None, np.random.default_rng(rows)
            mixed = dice.standard_normal((rows, model.heads * model.head_dim), dtype=np.float32)
            host = dice.standard_normal((rows, model.hidden), dtype=np.float32)
            for tiles, beside in [
                (TOGETHER[0], True),
                (TOGETHER[0], False),
                *((one, True) for one in TOGETHER),
            ]:
                slim, wide, ahead = tiles
                if slim.swap and slim.m < rows:
                    continue
                driver.inner.inner.dependent_launch = beside
                ops.begin()
                first, narrow = (
                    ops.on_device(host),
                    ops.launches.rounded(ops.on_device(mixed), "bf16"),
                )
                found: list[Any] = []
                given = (weights, norm, first, narrow, ops.arena.mark)
                chain = partial(_chain, driver, ops, model, given, tiles, found)
                took = common.recorded_seconds(driver, [chain], False, BUDGET) / LAYERS
                bits = bits_of(ops, found[-1])
                truth = bits if truth is None else truth
                name = f"{slim[:5]} {wide[:5]}{' swapped' * slim.swap}{' gated too' * wide.swap} ahead {ahead}"
                yield {
                    "model": model.name,
                    "rows": rows,
                    "together": name if beside else "alone",
                    "us": 1e6 * took,
                    "same_bits": bool((bits == truth).all()),
                }
            driver.inner.inner.dependent_launch = True
        driver.release()


def _chain(driver: Any, ops: Any, model: Any, given: Any, tiles: Any, found: list[Any]) -> None:
    """given: weights of the layers, that of the norms, x, what attention mixed, and the arena's mark."""
    weights, norm, x, mixed, mark = given
    ops.arena.reset(mark)
    slim, wide, ahead = tiles
    for layer in weights:
        for name, (n, k) in model.matrices.items():
            asked = Asked(model.name, name, n, k, len(x))
            tile = wide if asked.gated else slim
            if name in ("qkv", "gate_up"):
                y = ops.launches.rms_norm(x, norm, 1e-5, "bf16")
            source = mixed if name == "o" else y
            work, out = work_of(driver, ops, source, asked, tile, named(asked.gated, tile, ahead))
            work(layer[name])
            if asked.gated:
                y = out
            elif name != "qkv":
                x = out
    found.append(x)


def table(told: list[dict[str, Any]], copy_tb_s: float) -> Iterator[str]:
    """The best by shape and rows, and what a layer takes with them; us."""
    sums: dict[tuple[str, int], list[float]] = {}
    for model, name, n, k in shapes():
        for rows in ROWS:
            mine = [
                one
                for one in told
                if (one["model"], one["name"], one["rows"]) == (model, name, rows)
            ]
            if not mine:
                continue
            right = [one for one in mine[1:] if one["same_bits"]]
            best = min(right, key=lambda one: one["us"])
            swapped = min((one["us"] for one in right if one["swap"]), default=float("nan"))
            alone, today = mine[0]["us"], mine[1]["us"]
            floor = 2e-6 * n * k / copy_tb_s
            wrong = sum(not one["same_bits"] for one in mine)
            yield (
                f"{model:14} {name:8} {rows:4} rows: floor {floor:7.1f} alone {alone:7.1f}"
                f" today {today:7.1f} best {best['us']:7.1f} {best['candidate']}"
                f" swapped {swapped:7.1f}; other bits {wrong} of {len(mine)}"
            )
            if name != "head":
                column = sums.setdefault((model, rows), [0.0] * 4)
                for i, us in enumerate((floor, alone, today, best["us"])):
                    column[i] += us
    for (model, rows), column in sums.items():
        figures = " ".join(
            f"{what} {us:7.1f}"
            for what, us in zip(("floor", "alone", "today", "best"), column, strict=True)
        )
        yield f"{model:14} a layer  {rows:4} rows: {figures}"


def run(out: Path) -> None:
    from run_watch import Watched

    from pageturner.kernels.gpu.cuda_driver import CudaDriver
    from pageturner.kernels.gpu.manifest import Manifest

    driver = tune.Renaming(Watched(CudaDriver(Manifest(out))))
    copy = common.ceilings(driver, False)["copy_tb_s"]
    told = []
    for one in timed(driver, set(driver.inner.inner._compiled)):
        told.append(one)
        print(json.dumps(one), flush=True)
    chains: dict[tuple[str, int], list[Any]] = {}
    for one in layers(driver):
        print(json.dumps(one), flush=True)
        chains.setdefault((one["model"], one["rows"]), []).append(one)
    for (model, rows), several in chains.items():
        best = sorted(several[2:], key=lambda one: float(one["us"]))[:8]
        for one in [*several[:2], *best]:
            bits = "" if one["same_bits"] else "OTHER BITS"
            print(
                f"{model:14} {rows:3} rows, a layer {one['us']:7.1f} us {one['together']} {bits}",
                flush=True,
            )
    for line in table(told, copy):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--out", type=Path, default=common.ROOT / "build" / "gpu" / "tune_decode")
    options = parser.parse_args()
    if options.build:
        build(options.out)
    if options.run:
        run(options.out)


if __name__ == "__main__":
    main()
