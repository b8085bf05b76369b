"""Persistent products on a device: tiles, stages and clusters that the catalogue might have, beside cuBLAS.

    python bench/gpu/tune_persistent.py --build     compiles the candidates to build/gpu/persistent; no device
    python bench/gpu/tune_persistent.py --run [--limit SECONDS] [--out FILE.jsonl]        on a device
    python bench/gpu/tune_persistent.py --run --tiny     interpreted, a few small shapes
    python bench/gpu/tune_persistent.py --fit FILE.jsonl     what `catalogue.PERSISTENT` should be

First every candidate computes small products with odd edges, in a process that is ended when it says nothing
for some seconds: a barrier that is wrong hangs a device. Then all that were right are timed for the matrices
of Llama-3.1-8B. Each product is compared with fp64 at some of its outputs, and some of its rows with
themselves alone by `dense`, bit for bit. Every figure is a line of JSON; tables come last.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run_common as common  # noqa: E402

from pageturner.kernels.gpu import catalogue  # noqa: E402
from pageturner.kernels.gpu.catalogue import Kernel, Ring, height_of, parts_of, tiles_of  # noqa: E402
from pageturner.kernels.gpu.driver import Plane  # noqa: E402

OUT = common.ROOT / "build" / "gpu" / "persistent"
ROWS = (2048, 256, 512, 8192, 128, 1024)  # the first tells the most
MATRICES = common.LLAMA_8B.matrices
TRIED = [
    Ring(128, 256, 64, 4),
    Ring(128, 128, 64, 6),
    Ring(128, 64, 64, 8),
    Ring(256, 128, 64, 4),
    Ring(128, 256, 64, 4, 2, 1),
    Ring(128, 256, 64, 4, 1, 2),
    Ring(256, 128, 64, 4, 1, 2),
    Ring(128, 128, 64, 6, 2, 1),
    Ring(128, 128, 64, 6, 1, 2),
    Ring(128, 64, 64, 8, 2, 1),
    Ring(128, 64, 64, 8, 1, 2),
    Ring(128, 64, 64, 8, 1, 4),
    Ring(128, 256, 64, 4, groups=2),
    Ring(256, 128, 64, 4, groups=2),
    Ring(128, 128, 64, 6, groups=2),
    Ring(128, 256, 64, 4, 2, 1, groups=2),
    Ring(128, 128, 64, 6, groups=2, turns=2),
    Ring(128, 128, 64, 6, 2, 1, groups=2, turns=2),
    Ring(128, 128, 64, 6, 1, 2, groups=2, turns=2),
    Ring(64, 256, 64, 4, groups=2, turns=2),
    Ring(64, 256, 64, 4, 2, 1, groups=2, turns=2),
]
SILENT_S, START_S = (
    6.0,
    40.0,
)  # a process that says nothing for so long hangs; it may take so long to start
COLD = 96 << 20  # bytes of weights between two uses of one: the L2 cache has 50 MB
BUDGET_S = 0.02  # of replays of one candidate
WORK_S = 2e-3  # of one recording, about
PRESENT = ("slim", "few", "half", "some", "many")


def candidates() -> dict[str, Kernel]:
    """By name."""
    found = {}
    for ring in TRIED:
        for gated in (False, True):
            name = "gated." * gated + ring.name
            if ring.n // (2 if gated else 1) // ring.over_m >= 8:
                found[name] = catalogue.persistent(name, "bf16", ring, gated)
    return found


def work(kernel: Kernel) -> dict[str, Any]:
    """Compiled, or why not."""
    import compile_kernels

    try:
        return compile_kernels.compile_one(90, kernel)
    except Exception as error:
        return {"name": kernel.name, "error": f"{type(error).__name__}: {error}"[-400:]}


def build(out: Path) -> None:
    import compile_kernels

    every = candidates()
    kernels = catalogue.kernels_of(90)
    base = [
        one for name, one in kernels.items() if name.startswith(("dense.bf16", "gated_dense.bf16"))
    ]
    with ProcessPoolExecutor(1) as pool:
        compiled = list(pool.map(work, [*every.values(), *base]))
    good = {}
    for one in compiled:
        if "error" in one:
            print("NOT BUILT", one["name"], one["error"])
            continue
        if one["shared"] > catalogue.SHARED[90] or (one["spills"] > 32 and one["name"] in every):
            print("LEFT OUT", end=" ")
        else:
            good[one["name"]] = one
        print(
            one["name"],
            *(f"{key} {one[key]}" for key in ("registers", "spills", "shared", "warps")),
        )
    compile_kernels.write(out, {90: good})


# -- products ----------------------------------------------------------------------------------------------
RESIDENT: dict[str, int] = {}


def resident(driver: Any, name: str, size: int) -> int:
    """Clusters of a kernel that run at once: a group of multiprocessors may be no multiple of their size."""
    if size < 4 or not hasattr(driver, "_function"):
        return 1 << 30
    if name not in RESIDENT:
        function, _, _, config = driver._function(name)
        config.gridDimX, config.gridDimY, config.gridDimZ = 32 * size, 1, 1
        RESIDENT[name] = int(driver._ask(driver._cu.cuOccupancyMaxActiveClusters, function, config))
        say(resident=name, clusters=RESIDENT[name])
    return RESIDENT[name]


class Weight:
    """Copies of a weight on the device, and what they hold."""

    def __init__(self, driver: Any, n: int, k: int, copies: int = 1) -> None:
        self.n, self.k, self.driver = n, k, driver
        self.host = common.normal_bits(n, k, 3).reshape(n, k)
        self.copies = [put(driver, self.host) for _ in range(copies)]

    def free(self) -> None:
        for address in self.copies:
            self.driver.free(address)


def put(driver: Any, data: Any) -> int:
    address = int(driver.alloc(data.nbytes))
    driver.upload_file(address, data.reshape(-1).view(np.uint8))
    return address


class Product:
    """Arrays of one product on the device, and what they hold."""

    def __init__(self, weight: Weight, m: int, residual: bool = False) -> None:
        self.driver, self.weight, self.m, self.residual = weight.driver, weight, m, residual
        self.n, self.k, self.ws, self.host_w = weight.n, weight.k, weight.copies, weight.host
        dice = np.random.default_rng(m)
        some = dice.standard_normal(min(m * self.k, 1 << 20), dtype=np.float32)
        self.host_x = np.resize(common.to_bf16(some), m * self.k).reshape(m, self.k)
        self.before = np.resize(some, m * self.n).reshape(m, self.n) if residual else None
        self.x = put(self.driver, self.host_x)
        self.added = put(self.driver, self.before) if self.before is not None else 0
        self.out, self.one = self.driver.alloc(4 * m * self.n), self.driver.alloc(4 * self.n)

    def free(self) -> None:
        for address in filter(None, (self.x, self.added, self.out, self.one)):
            self.driver.free(address)

    def launch(self, kernel: Kernel, programs: int, w: int) -> None:
        """A candidate. EngineFault for what the device says of it."""
        constants = dict(kernel.constants)
        over_m, over_n = int(constants["OVER_M"]), int(constants["OVER_N"])  # type: ignore[call-overload]
        bm, bn = int(constants["BLOCK_M"]), int(constants["BLOCK_N"])  # type: ignore[call-overload]
        gated = "gated" in kernel.function
        n = self.n // 2 if gated else self.n
        clusters = -(-self.m // (bm * over_m)) * -(-n // (bn * over_n))
        size = over_m * over_n
        grid = (min(clusters, programs // size, resident(self.driver, kernel.name, size)) * size,)
        planes = Plane(self.x, self.m, self.k), Plane(w, self.n, self.k)
        if gated:
            self.driver.launch(
                kernel.name, grid, (*planes, Plane(self.out, self.m, n), self.m, n, self.k)
            )
            return
        rest = (0, self.added, self.out, 0, int(self.residual), self.m, n, self.k, *self.parts)
        self.driver.launch(kernel.name, grid, (*planes, *rest))

    @property
    def parts(self) -> tuple[int, int]:
        return parts_of(self.n, self.k, catalogue.block_k("bf16"))

    def present(self, m: int, row: int, out: int, w: int, gated: bool, height: str = "") -> None:
        """`dense` of some rows as it is, or of a height."""
        n = self.n // 2 if gated else self.n
        height = height or height_of(m, self.n)
        if gated:
            height = {"slim": "few", "half": "some"}.get(height, height)
        chunk, parts = (self.k, 1) if gated else self.parts
        if parts > 1:  # one behind the other
            height = "many"
        tile = tiles_of(90, "bf16")[height]
        grid = (-(-n // (tile.n // (2 if gated else 1))) * -(-m // tile.m), 1)
        name = f"{'gated_' * gated}dense.bf16.{height}"
        values: dict[str, Any] = {
            "x": self.x + 2 * row * self.k,
            "w": w,
            "out": out,
            "M": m,
            "N": n,
            "K": self.k,
            "chunk": chunk,
            "parts": parts,
            "has_residual": int(self.residual),
            "residual": self.added + 4 * row * n if self.residual else 0,
        }
        arguments = catalogue.kernels_of(90)[name].arguments
        self.driver.launch(name, grid, tuple(values.get(one, 0) for one, _ in arguments))

    def read(self, address: int, row: int, gated: bool) -> Any:
        """A row of results, as bits."""
        n, kind = (self.n // 2, np.uint16) if gated else (self.n, np.uint32)
        found = np.empty(n, kind)
        self.driver.download(found, address + found.nbytes * row)
        return found

    def check(self, gated: bool) -> dict[str, Any]:
        """Rows beside themselves alone, by few rows and by more, and some outputs beside fp64."""
        few, same, worst = True, True, 0.0
        for row in sorted({0, self.m // 2 + 1 if self.m > 2 else 0, self.m - 1}):
            mine = self.read(self.out, row, gated)
            self.present(1, row, self.one, self.ws[0], gated)
            few = few and bool((mine == self.read(self.one, 0, gated)).all())
            self.present(1, row, self.one, self.ws[0], gated, "some")
            same = same and bool((mine == self.read(self.one, 0, gated)).all())
            n = len(mine)
            columns = np.unique(np.r_[0, n - 1, np.random.default_rng(row).integers(0, n, 24)])
            a, b = _wide(self.host_x[row]), _wide(self.host_w)
            expected = b(columns) @ a(slice(None))
            scale = np.abs(b(columns)) @ np.abs(a(slice(None)))
            if gated:
                up, size = b(columns + n) @ a(slice(None)), np.abs(expected)
                expected = expected / (1 + np.exp(-expected)) * up
                got = (mine[columns].astype(np.uint32) << 16).view(np.float32)
                error = np.abs(got - expected) / (
                    8e-3 * np.abs(expected) + 1e-4 * scale * (1 + size)
                )
            else:
                got = mine.view(np.float32)[columns].astype(np.float64)
                if self.before is not None:
                    expected = expected + self.before[row, columns]
                error = np.abs(got - expected) / (1e-5 * scale + 1e-6 * np.abs(expected))
            worst = max(worst, float(np.nan_to_num(error, nan=1e9).max()))
        return {
            "bits_of_few": few,
            "bits_of_some": same,
            "error": worst,
            "right": same and worst <= 1,
        }


def _wide(bits: Any) -> Callable[[Any], Any]:
    """bf16 bits as fp64, of some rows."""
    return lambda at: (bits[at].astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# -- what runs on the device -------------------------------------------------------------------------------
def device(out: Path, tiny: bool) -> tuple[Any, int]:
    """A driver, and how many programs are resident."""
    if tiny:
        from support.fake_gpu import FakeDriver

        driver = FakeDriver(total=4 << 30)
        driver.kernels = driver.kernels | candidates()
        return driver, driver.multiprocessors * 4
    from pageturner.kernels.gpu.cuda_driver import CudaDriver
    from pageturner.kernels.gpu.manifest import Manifest

    driver = CudaDriver(Manifest(out))
    return driver, driver.multiprocessors


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


SMALL = [(65, 96, 80), (300, 544, 4096 + 16), (70, 288, 2048 + 64), (1000, 4096, 256)]


def edges(out: Path, tiny: bool, names: list[str]) -> None:
    """Small products with odd edges, of each candidate; of several parts of K too."""
    driver, programs = device(out, tiny)
    say(started=True)
    every = candidates()
    sizes = SMALL[:1] if tiny else SMALL
    products = [Product(Weight(driver, n, k), m, residual=m in (70, 1000)) for m, n, k in sizes]
    for name in names:
        right, told = True, {}
        for product in products:
            say(trying=name, rows=product.m)
            gated = "gated" in name
            for grid in (programs, 8):
                product.launch(every[name], grid, product.ws[0])
                told = product.check(gated)
                if not told["right"]:
                    say(wrong=name, rows=product.m, programs=grid, **told)
                right = right and told["right"]
        say(edges=name, right=right)


def times(out: Path, tiny: bool, names: list[str], done: int = 0) -> None:
    """All candidates, the present kernels and cuBLAS, for every matrix and number of rows but the first
    `done`. "plain": without a residual, which the model adds to the products with o and down."""
    driver, programs = device(out, tiny)
    torch = None if tiny else _torch()
    say(started=True, device=driver.name)
    count = 0
    for matrix, (n, k) in (
        {"tiny": (64, 96)} if tiny else dict(reversed(MATRICES.items()))
    ).items():
        weight: Weight | None = None
        added = matrix in ("o", "down")
        for rows in (66,) if tiny else ROWS:
            for residual in (True, False) if added and rows in (2048, 8192) else (added,):
                count += 1
                if count <= done:
                    continue
                say(trying="cuBLAS", done=count - 1)
                if weight is None:
                    weight = Weight(driver, n, k, 1 if tiny else max(2, -(-COLD // (2 * n * k))))
                product = Product(weight, rows, residual)
                told = {"rows": rows, "matrix": matrix + " plain" * (added and not residual)}
                for name, seconds, right in _times(driver, programs, product, names, torch):
                    say(**told, name=name, us=1e6 * seconds, **right)
                product.free()
        if weight is not None:
            weight.free()


def _torch() -> Any:
    import torch

    return torch if torch.cuda.is_available() else None


def _times(
    driver: Any, programs: int, product: Product, names: list[str], torch: Any
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    every, copies = candidates(), len(product.ws)
    work = product.n * product.k
    about = max(2e-12 * product.m * work / 500, 2e-12 * work / 2)
    repeat = 1 if torch is None else max(copies, min(64, round(WORK_S / about)))
    cublas = _cublas(torch, product, repeat) if torch is not None else None
    if cublas is not None:
        yield "cuBLAS", cublas(), {}
    both = product.n == MATRICES["gate_up"][0] or product.n == 64
    for name in ("present", *(["gated.present"] * both), *names):
        gated = name.startswith("gated")
        if (gated and not both) or (name in every and pointless(every[name], product.m)):
            continue

        def launch(w: int, name: str = name, gated: bool = gated) -> None:
            if name.endswith("present"):
                product.present(product.m, 0, product.out, w, gated)
            else:
                product.launch(every[name], programs, w)

        works = [
            lambda at=at, launch=launch: launch(product.ws[at % copies]) for at in range(repeat)
        ]
        say(trying=name)
        driver.clear(product.out, 4 * product.m * product.n)
        launch(product.ws[0])
        right = product.check(gated)
        yield name, common.recorded_seconds(driver, works, repeat == 1, BUDGET_S), right
    if cublas is not None:
        yield "cuBLAS", cublas(), {}


def pointless(kernel: Kernel, rows: int) -> bool:
    """Whether a cluster has more tiles than there are rows, or tiles are small for so many."""
    told = dict(kernel.constants)
    m, over_m, n = (int(told[one]) for one in ("BLOCK_M", "OVER_M", "BLOCK_N"))  # type: ignore[call-overload]
    n *= 2 if "gated" in kernel.function else 1
    return rows <= m * (over_m - 1) or (rows >= 2048 and m * n <= 128 * 64)


def _cublas(torch: Any, product: Product, repeat: int) -> Callable[[], float]:
    """Recorded once, so that a second time may be measured when the device is as warm as for the others."""
    a = torch.randn(product.m, product.k, device="cuda", dtype=torch.bfloat16)
    few = [
        torch.randn(product.n, product.k, device="cuda", dtype=torch.bfloat16) for _ in product.ws
    ]
    out = torch.empty(product.m, product.n, device="cuda", dtype=torch.bfloat16)
    turns = [few[at % len(few)] for at in range(repeat)]
    works = [lambda b=b: torch.mm(a, b.T, out=out) for b in turns]

    def seconds() -> float:
        return common.torch_seconds(torch, works)

    return seconds


# -- the guard ---------------------------------------------------------------------------------------------
def guarded(
    part: str, names: list[str], options: argparse.Namespace, until: float
) -> list[dict[str, Any]]:
    """What a part says, in processes that are ended when they say nothing for too long. What was tried last
    hangs then, and another process goes on without it."""
    found: list[dict[str, Any]] = []
    done = 0
    while names and time.perf_counter() < until:
        command = [sys.executable, __file__, "--part", part, "--names", ",".join(names)]
        command += ["--folder", options.folder, "--done", str(done), *["--tiny"] * options.tiny]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        trying = ""
        for line in _lines(process, 600.0 if options.tiny else SILENT_S, until):
            told = json.loads(line)
            trying, done = told.get("trying", trying), told.get("done", done)
            if "trying" not in told:
                found.append(told)
                _keep(options.out, line)
        if process.wait() == 0 or trying not in names:
            return found
        print(f"LEFT OUT {trying}: {part} hung or failed", flush=True)
        if part == "edges":  # those before are done
            names = names[names.index(trying) + 1 :]
        else:
            names = [name for name in names if name != trying]
    return found


def _lines(process: Any, silent_s: float, until: float) -> Iterator[str]:
    """Lines of a process, which is ended when it is silent for too long, or when the time is over."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    limit = max(START_S, silent_s)
    while True:
        try:
            line = lines.get(timeout=max(0.1, min(limit, until - time.perf_counter())))
        except queue.Empty:
            process.kill()
            return
        if line is None:
            return
        limit = silent_s
        yield line


def _keep(out: Path | None, line: str) -> None:
    print(line, end="", flush=True)
    if out is not None:
        with open(out, "a") as file:
            file.write(line)


def tables(told: list[dict[str, Any]]) -> None:
    """By rows and matrix: cuBLAS, the present kernel, and the best ones, with their share of its time."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for one in told:
        if "us" in one:
            here = found.setdefault((one["rows"], one["matrix"]), {})
            if not one.get("right", True):
                print("WRONG", one)
                continue
            here[one["name"]] = min(one["us"], here.get(one["name"], 1e9))
    sums: dict[int, list[float]] = {}
    for (rows, matrix), here in sorted(found.items()):
        base = here.get("cuBLAS", 1.0)
        for gated in (False, True):
            mine = {
                name: us
                for name, us in here.items()
                if name.startswith("gated") == gated
                and name not in ("cuBLAS", "present", "gated.present")
            }
            if not mine:
                continue
            best = sorted(mine, key=mine.__getitem__)[:4]
            present = here.get("gated.present" if gated else "present", 0.0)
            row = "  ".join(f"{name} {mine[name]:.1f} ({mine[name] / base:.3f})" for name in best)
            what = matrix + " gated" * gated
            print(
                f"{rows:5} {what:14} cuBLAS {base:8.1f}  present {present:8.1f} ({present / base:.3f})  {row}"
            )
            if matrix != "gate_up" or gated:
                all_of = sums.setdefault(rows, [0.0, 0.0, 0.0])
                for i, us in enumerate((base, present, mine[best[0]])):
                    all_of[i] += us
    for rows, (base, present, mine_us) in sorted(sums.items()):
        print(
            f"{rows:5} a layer: cuBLAS {base:.0f} us, present {present / base:.3f}, best {mine_us / base:.3f}"
        )


def fit(path: Path) -> None:
    """Costs of rings as `persistent_ring` uses them, and what its choice costs then beside the best of each
    size. Rings that improve a size by less than 2% are left out, those of more than two programs always."""
    rings = {ring.name: ring for ring in TRIED if ring.cluster <= 2}
    sizes: dict[tuple[int, str], dict[str, float]] = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        name = one.get("name", "").removeprefix("gated.")
        known = "us" in one and "plain" not in one["matrix"] and one.get("right", True)
        if (
            known
            and (one["matrix"] == "gate_up") == one["name"].startswith("gated")
            and name in rings
        ):
            here = sizes.setdefault((one["rows"], one["matrix"]), {})
            here[name] = min(one["us"], here.get(name, 1e9))

    def work(name: str, rows: int, matrix: str) -> float:
        ring, n = rings[name], MATRICES[matrix][0]
        clusters = -(-rows // (ring.m * ring.over_m)) * -(-n // (ring.n * ring.over_n))
        return -(-clusters // (catalogue.MULTIPROCESSORS // ring.cluster)) * ring.m * ring.n

    def lost(costs: dict[str, float]) -> float:
        """The mean share of time beyond the best of each size."""
        found = []
        for (rows, matrix), here in sizes.items():
            there = [name for name in costs if name in here]
            chosen = min(
                there, key=lambda name: work(name, rows, matrix) * costs[name], default=None
            )
            found.append(here[chosen] / min(here.values()) - 1 if chosen else 1.0)
        return float(np.mean(found))

    best = {key: min(here, key=here.__getitem__) for key, here in sizes.items()}
    base = max(set(best.values()), key=list(best.values()).count)
    costs: dict[str, float] = {}
    for name in rings:
        shares = [
            here[name] / here[base] * work(base, *key) / work(name, *key)
            for key, here in sizes.items()
            if name in here and base in here
        ]
        if shares:
            costs[name] = float(np.median(shares))
    kept = {base: costs[base]}
    while True:
        more = {name: lost(kept | {name: costs[name]}) for name in costs if name not in kept}
        name = min(more, key=more.__getitem__, default="")
        if not name or more[name] > lost(kept) - 0.003:
            break
        kept[name] = costs[name]
    for _ in range(3):  # a little more or less of each
        for name in kept:
            tried = {share * kept[name]: 0.0 for share in np.linspace(0.85, 1.15, 31)}
            kept[name] = min(tried, key=lambda cost, name=name: lost(kept | {name: cost}))  # type: ignore[misc]
    for name, cost in kept.items():
        print(f"    {rings[name]}: {cost:.3f},")
    print(f"lost beside the best of each size: {lost(kept):.3f} on average")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", default=str(OUT))
    parser.add_argument("--only", default="", help="candidates whose names have this in them")
    parser.add_argument("--part", choices=["edges", "times"])
    parser.add_argument("--names", default="")
    parser.add_argument("--done", type=int, default=0)
    parser.add_argument("--fit", type=Path)
    options = parser.parse_args()
    if options.fit:
        fit(options.fit)
    if options.build:
        build(Path(options.folder))
    names = [one for one in options.names.split(",") if one]
    if options.part:
        folder = Path(options.folder)
        if options.part == "edges":
            edges(folder, options.tiny, names)
        else:
            times(folder, options.tiny, names, options.done)
    if options.run:
        until = time.perf_counter() + (1e6 if options.tiny else options.limit)
        names = [name for name in candidates() if options.only in name]
        told = guarded("edges", names, options, until)
        right = [one["edges"] for one in told if one.get("right") and "edges" in one]
        print(
            "right:",
            len(right),
            "of",
            len(names),
            "; not:",
            sorted(set(names) - set(right)),
            flush=True,
        )
        tables(guarded("times", right, options, until))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    main()
