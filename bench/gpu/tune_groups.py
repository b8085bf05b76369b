"""Tiles, parts and requests ahead that products with weights in groups might have, timed on a device.

    python bench/gpu/tune_groups.py --build [--out build/gpu/tune_groups]   compiles; needs no device
    python bench/gpu/tune_groups.py --run [--out build/gpu/tune_groups] > told.jsonl   on a device, about 40 s

As `tune_decode.py`: weights come from memory, products stand behind each other in a recording. Candidates of
equally many parts must have equal bits; those that have others are told, and never the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run_common as common  # noqa: E402
import tune  # noqa: E402
from run_forms import copied, empty  # noqa: E402

from pageturner.kernels.gpu import catalogue  # noqa: E402
from pageturner.kernels.gpu.catalogue import FEW, GROUPS_K, MANY, SLIM, Kernel, Tile  # noqa: E402
from pageturner.kernels.gpu.launches import group_height_of  # noqa: E402

ROWS = (1, 16, 64, 256)
FORMS = {"4.32.fp16": True, "4.128": True, "fp8": False}  # whether with lows
TILES = {
    SLIM: [Tile(8, 32, 128, 2, 6), Tile(8, 32, 128, 2, 3), Tile(8, 32, 128, 1, 4)],
    FEW: [Tile(16, 32, 128, 2, 4), Tile(16, 32, 128, 1, 4), Tile(16, 64, 128, 2, 4)],
    MANY: [Tile(64, 128, 128, 8, 3), Tile(64, 64, 128, 2, 3), Tile(64, 64, 128, 4, 3)],
}
AHEAD = (0, 8192, 65536)
PARTS = (1, 2, 3, 4, 6, 8)
BUDGET = 0.015  # seconds of replays of a candidate


def named(form: str, rows: str, tile: Tile, ahead: int) -> str:
    return f"groups.{form}.{rows}." + ".".join(map(str, (*tile[:5], ahead)))


def present(form: str, rows: str) -> Tile:
    return catalogue.groups_tile(tune.ARCHITECTURE, rows, form)


def candidates() -> dict[str, Kernel]:
    """By name; today's tile with other requests ahead too."""
    found = {}
    for form in FORMS:
        for rows, tiles in TILES.items():
            today = present(form, rows)
            for tile in (today, *tiles):
                kernel = catalogue.groups(form, rows, tile)
                own = dict(kernel.constants)["AHEAD"]
                assert isinstance(own, int)
                for ahead in (own, *AHEAD) if tile == today else (own,):
                    name = named(form, rows, tile, ahead)
                    constants = tuple((dict(kernel.constants) | {"AHEAD": ahead}).items())
                    found[name] = dataclasses.replace(kernel, name=name, constants=constants)
    return found


def timed(driver: Any, compiled: set[str]) -> Iterator[dict[str, Any]]:
    every = candidates()
    for form, low in FORMS.items():
        for shape, (n, k) in common.LLAMA_8B.matrices.items():
            ops = common.GpuOps(driver, 1 << 30, graphs=False)
            first = empty(ops, form, low, n, k)
            weights = [first, *(copied(ops, first) for _ in range(max(1, tune.L2 // first.nbytes)))]
            for rows in ROWS:
                told = {"form": form, "shape": shape, "rows": rows}
                for one in _of_size(driver, ops, weights, rows, every, compiled):
                    yield told | one
            driver.release()


def _of_size(
    driver: Any,
    ops: Any,
    weights: list[Any],
    rows: int,
    every: dict[str, Kernel],
    compiled: set[str],
) -> Iterator[dict[str, Any]]:
    """Today's first, then other tiles, then other parts."""
    w = weights[0]
    height = group_height_of(rows)
    mine = [
        name for name in every if name.startswith(f"groups.{w.sort}.{height}.") and name in compiled
    ]
    chunk, parts = catalogue.group_parts_of(w.rows, w.columns)
    sizes = [(name, chunk, parts) for name in mine]
    for wanted in PARTS:
        other = catalogue.cut(w.columns, wanted, GROUPS_K)
        if other[1] != parts and w.columns // wanted >= 512:
            sizes.append((mine[0], *other))
    ops.begin()
    values = np.random.default_rng(rows).standard_normal((rows, w.columns), dtype=np.float32)
    x = ops.launches.rounded(ops.on_device(values), "bf16")
    wanted = w.low and height == MANY
    sums = ops.launches.group_sums(x, w.columns, w.group) if wanted else 0
    mark, truth = ops.arena.mark, {}
    for name, chunk, parts in sizes:
        ops.arena.reset(mark)
        work, out = work_of(
            driver, ops, every[name], (x, sums), (rows, w.rows, w.columns, chunk, parts)
        )
        took = common.recorded_seconds(
            driver, [partial(work, one) for one in weights], False, BUDGET
        )
        bits = ops.to_numpy(out).view(np.int32)
        same = bool((bits == truth.setdefault(parts, bits)).all())
        yield {"candidate": name, "parts": parts, "us": 1e6 * took, "same_bits": same}


def work_of(
    driver: Any, ops: Any, kernel: Kernel, operands: tuple[Any, int], sizes: tuple[int, ...]
) -> tuple[Callable[[Any], None], Any]:
    """A launch of a candidate for a weight, and where the result lies. sizes: M, N, K, chunk, parts."""
    x, sums = operands
    m, n, _, _, parts = sizes
    constants = dict(kernel.constants)
    programs = -(-m // constants["BLOCK_M"]) * -(-n // constants["BLOCK_N"])  # type: ignore[operator]
    out = ops.arena.take((m, n))
    split = parts if not constants["WHOLE"] or programs < catalogue.WHOLE_TILES else 1
    apart = ops.arena.take((parts, m, n)).address if split > 1 else 0

    def work(w: Any) -> None:
        given = (
            x.address,
            w.q,
            w.high,
            w.scale,
            w.low,
            sums,
            0,
            0,
            out.address,
            apart,
            ops.arena.counters,
        )
        driver.launch(
            kernel.name, (programs, split), (*given, int(w.low != 0), w.zero, 0, 0, *sizes)
        )

    return work, out


def table(told: list[dict[str, Any]]) -> Iterator[str]:
    """The best by form, shape and rows, beside today's."""
    for form in FORMS:
        for rows in ROWS:
            total = [0.0, 0.0]
            for shape in common.LLAMA_8B.matrices:
                mine = [
                    one
                    for one in told
                    if (one["form"], one["shape"], one["rows"]) == (form, shape, rows)
                ]
                if not mine:
                    continue
                best = min((one for one in mine if one["same_bits"]), key=lambda one: one["us"])
                total = [total[0] + mine[0]["us"], total[1] + best["us"]]
                wrong = [one["candidate"] for one in mine if not one["same_bits"]]
                yield (
                    f"{form:10} {shape:8} {rows:4} rows: today {mine[0]['us']:7.1f} best {best['us']:7.1f}"
                    f" {best['candidate']} in {best['parts']} parts; other bits: {wrong}"
                )
            yield f"{form:10} a layer  {rows:4} rows: today {total[0]:7.1f} best {total[1]:7.1f}"


def run(out: Path) -> None:
    from run_watch import Watched

    from pageturner.kernels.gpu.cuda_driver import CudaDriver
    from pageturner.kernels.gpu.manifest import Manifest

    driver = tune.Renaming(Watched(CudaDriver(Manifest(out))))
    told = []
    for one in timed(driver, set(driver.inner.inner._compiled)):
        told.append(one)
        print(json.dumps(one), flush=True)
    for line in table(told):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--out", type=Path, default=common.ROOT / "build" / "gpu" / "tune_groups")
    options = parser.parse_args()
    if options.build:
        today = catalogue.kernels_of(tune.ARCHITECTURE)
        beside = [
            one
            for name, one in today.items()
            if name.startswith(("group_sums", "elementwise.cast.bf16"))
        ]
        tune.build(options.out, candidates(), beside)
    if options.run:
        run(options.out)


if __name__ == "__main__":
    main()
