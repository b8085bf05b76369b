"""What the parts of run.py share: the device, shapes with random weights, steps, times, and the two ceilings.

Owns how a figure is told: as one line of JSON. Must not know what is measured, nor which figure is enough.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from pageturner.errors import EngineFault  # noqa: E402
from pageturner.kernels.base import AttentionShape, Batch, KVSpec, Layer, Rope, Stack, Tensor  # noqa: E402
from pageturner.kernels.choosing import Head  # noqa: E402
from pageturner.kernels.gpu.ops import GpuOps  # noqa: E402
from pageturner.kernels.reference_arrays import to_bf16  # noqa: E402

BLOCK = 16
# How many parts of `run.py --together` share the device; 0: none. Its memory and the models are cut then.
TOGETHER = int(os.environ.get("PAGETURNER_GPU_TOGETHER", "0"))
COLD = 256 << 20  # bytes of weights that repeated products go through, so that no cache holds them


@dataclass(frozen=True)
class Shape:
    """Of a model. family: of config.json."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    family: str = "llama"
    tied: bool = False

    @property
    def attention(self) -> AttentionShape:
        """The heads of a layer."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the weights of a layer, as files hold them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.hidden),
            "k": (kv, self.hidden),
            "v": (kv, self.hidden),
            "o": (self.hidden, q),
            "gate": (self.inner, self.hidden),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices of a layer, as products are launched."""
        wide = (self.heads + 2 * self.kv_heads) * self.head_dim
        found = self.projections
        return {
            "qkv": (wide, self.hidden),
            "o": found["o"],
            "gate_up": (2 * self.inner, self.hidden),
            "down": found["down"],
        }

    @property
    def weights(self) -> int:
        """Weights that a step reads: all but the embedding, of which it reads some rows."""
        layer = sum(rows * columns for rows, columns in self.matrices.values())
        return self.layers * layer + self.vocabulary * self.hidden


LLAMA_8B = Shape("Llama-3.1-8B", 4 if TOGETHER else 32, 4096, 14336, 32, 8, 128, 128256)
QWEN3_06B = Shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151936, "qwen3", True)
LLAMA_CUT = Shape("two layers of Llama-3.1-8B", 2, 4096, 14336, 32, 8, 128, 8192)
QWEN3_CUT = Shape("four layers of Qwen3-0.6B", 4, 1024, 3072, 16, 8, 128, 8192, "qwen3", True)
TINY = Shape("tiny", 1, 64, 96, 4, 2, 16, 128)
TINY_QWEN3 = Shape("tiny qwen3", 1, 32, 48, 2, 1, 16, 64, "qwen3", True)


def tell(part: str, **figures: Any) -> None:
    """One line, on stdout and behind the file that PAGETURNER_GPU_OUT names."""
    line = json.dumps({"part": part, **figures})
    print(line, flush=True)
    if path := os.environ.get("PAGETURNER_GPU_OUT"):
        with open(path, "a") as out:
            out.write(line + "\n")


@dataclass
class Room:
    """Where a part runs.

    tiny    on the tests' fake device, with shapes and counts that its interpreter can do
    folder  for models that are written, and found again by a later part of the same call
    """

    driver: Any
    tiny: bool
    folder: Path
    floors: dict[str, Any] = field(default_factory=dict)

    def ceilings(self) -> dict[str, Any]:
        """The two ceilings, measured once in this process."""
        if not self.floors:
            self.floors = ceilings(self.driver, self.tiny)
        return self.floors

    @property
    def llama_8b(self) -> Shape:
        return TINY if self.tiny else LLAMA_8B

    @property
    def qwen3_06b(self) -> Shape:
        return TINY_QWEN3 if self.tiny else QWEN3_06B

    def ops(self, gib: int, graphs: bool = True) -> GpuOps:
        """A backend with so much memory for a step; with 64 MiB on the fake device."""
        return GpuOps(self.driver, 64 << 20 if self.tiny else gib << 30, graphs=graphs)


def open_room(tiny: bool, folder: Path) -> Room:
    """The device of this machine behind a watch, or a fake one. EngineFault without a device."""
    from run_watch import Watched

    if tiny:
        from support.fake_gpu import FakeDriver

        return Room(Watched(FakeDriver(total=4 << 30)), True, folder)
    from pageturner.kernels.gpu.cuda_driver import CudaDriver

    return Room(Watched(CudaDriver(), share=max(TOGETHER, 1)), False, folder)


def torch_here(room: Room) -> Any:
    """torch with a device, or None: the fake device has none to compare with."""
    if room.tiny:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


# -- weights -------------------------------------------------------------------------------------------------
def normal_bits(rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """bf16 of about 1 / sqrt(columns), flat; a block of a million values again and again."""
    some = np.random.default_rng(seed).standard_normal(
        min(rows * columns, 1 << 20), dtype=np.float32
    )
    return np.resize(to_bf16(some * np.float32(columns**-0.5)), rows * columns)


def floats(rows: int, columns: int, seed: int) -> Tensor:
    """A matrix of bf16."""
    return Tensor("w", "BF16", (rows, columns), normal_bits(rows, columns, seed).view(np.uint8))


def ones(count: int) -> Tensor:
    return Tensor("v", "F32", (count,), np.ones(count, np.float32).view(np.uint8))


def make_stack(
    ops: GpuOps, shape: Shape, of: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[Stack, Head]:
    """Random weights; those of all layers are equal, in memory of their own. of: what a matrix becomes."""
    s = shape
    angle = np.outer(np.arange(16384), 5e5 ** (-np.arange(s.head_dim // 2) / (s.head_dim // 2)))
    rope = Rope(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), False)
    tensors = {
        name: of(floats(*size, seed)) for seed, (name, size) in enumerate(s.projections.items())
    }
    tensors |= {"attn_norm": ones(s.hidden), "mlp_norm": ones(s.hidden)}
    layers = []
    for _ in range(s.layers):
        packed = {name: ops.pack_weight(tensor) for name, tensor in tensors.items()}
        layers.append(Layer(**packed, shape=s.attention, rope=rope, eps=1e-5))
        ops.prepare_layer(layers[-1])
    table = ops.pack_weight(floats(s.vocabulary, s.hidden, 8))
    stack = Stack(table, layers, 1e-5)
    ops.prepare_stack(stack)
    return stack, Head(ops.pack_weight(ones(s.hidden)), 1e-5, table)


# -- steps ---------------------------------------------------------------------------------------------------
def steps_of(runs: list[tuple[int, int]], wanted: str = "last", tokens: Any = None) -> Batch:
    """Sequences (computed, rows) on blocks of their own. wanted: rows whose logits are, "last" or "all"."""
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
    given = (rows * 7 + 3) % 60 if tokens is None else np.asarray(tokens)
    return Batch(
        given.astype(np.int32),
        rows,
        np.array(starts, np.int32),
        np.array([computed + n for computed, n in runs], np.int32),
        table,
        np.concatenate(slots).astype(np.int32),
        logits,
    )


def kv_spec(shape: Shape, runs: list[tuple[int, int]], dtype: str = "bfloat16") -> KVSpec:
    """Room for these sequences."""
    blocks = sum(-(-(computed + rows) // BLOCK) for computed, rows in runs)
    scaled = dtype == "fp8_e4m3"  # as on the device
    return KVSpec(shape.layers, blocks, BLOCK, shape.kv_heads, shape.head_dim, dtype, scaled=scaled)


def greedy(rows: int) -> tuple[Any, ...]:
    """What `Ops.choose` is told to take the likeliest token of each row."""
    zeros, whole = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    return zeros, whole, np.ones(rows, np.float32), zeros, zeros


# -- times ---------------------------------------------------------------------------------------------------
def seconds_of(
    driver: Any, work: Callable[[], Any], budget: float = 1.0, tiny: bool = False
) -> float:
    """Median of a call, the device idle before and after: what a whole step takes, host included."""
    for _ in range(1 if tiny else 4):  # the second may record a graph
        work()
    driver.synchronise()
    took: list[float] = []
    begin = time.perf_counter()
    least = 1 if tiny else 5
    while len(took) < least or (
        not tiny and time.perf_counter() - begin < budget and len(took) < 200
    ):
        at = time.perf_counter()
        work()
        driver.synchronise()
        took.append(time.perf_counter() - at)
    return float(np.median(took))


def recorded_seconds(
    driver: Any, works: list[Callable[[], Any]], tiny: bool, budget: float = 0.3
) -> float:
    """Mean of the works, recorded behind each other and replayed: without the host's part."""
    for work in works:
        work()
    driver.synchronise()
    driver.begin_recording()
    try:
        for work in works:
            work()
    finally:
        graph = driver.end_recording()
    took = seconds_of(driver, lambda: driver.replay(graph), budget, tiny) / len(works)
    driver.forget(graph)
    return took


def torch_seconds(torch: Any, works: list[Callable[[], Any]]) -> float:
    """As `recorded_seconds`, of torch."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            for work in works:
                work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for work in works:
            work()
    took = []
    for _ in range(12):
        torch.cuda.synchronize()
        at = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - at)
    return float(np.median(took[2:])) / len(works)


# -- ceilings ------------------------------------------------------------------------------------------------
def ceilings(driver: Any, tiny: bool) -> dict[str, Any]:
    """Copy bandwidth by our driver (bytes read and written, TB/s); bf16 products of 8192 cubed on random data
    (TFLOP/s), by torch where it is there, else by our own kernel."""
    nbytes = 1 << 20 if tiny else 1 << 30 if TOGETHER else 4 << 30
    a, b = driver.alloc(nbytes), driver.alloc(nbytes)
    took = seconds_of(driver, lambda: driver.copy(b, a, nbytes), tiny=tiny)
    driver.free(a)
    driver.free(b)
    found = {"device": driver.name, "copy_tb_s": 2e-12 * nbytes / took}
    size = 32 if tiny else 8192
    rate, by = _matrix_seconds(driver, size, tiny)
    return found | {"bf16_tflop_s": 2e-12 * size**3 / rate, "matrix_by": by}


def _matrix_seconds(driver: Any, size: int, tiny: bool) -> tuple[float, str]:
    torch = torch_here(Room(driver, tiny, Path()))
    if torch is not None:
        x, y = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        took = torch_seconds(torch, [lambda: torch.mm(x, y)] * 4)
        del x, y
        torch.cuda.empty_cache()
        return took, "cuBLAS"
    ops = GpuOps(driver, 64 * size * size, graphs=False)
    weight = ops.pack_weight(floats(size, size, 1))
    x = ops.on_device(np.random.default_rng(2).standard_normal((size, size), dtype=np.float32))
    ops.launches.cast(x, "bf16")
    mark = ops.arena.mark

    def product() -> None:
        ops.arena.reset(mark)
        ops.launches.gemm(x, weight)

    return recorded_seconds(driver, [product], tiny), "our kernel"


def floor_seconds(room: Room, nbytes: float, operations: float) -> dict[str, float]:
    """Both floors of so many bytes and operations, in milliseconds: by the copy's rate and by the matrix
    products'."""
    found = room.ceilings()
    return {
        "floor_copy_ms": 1e-9 * nbytes / found["copy_tb_s"],
        "floor_matrix_ms": 1e-9 * operations / found["bf16_tflop_s"],
    }


def fits(fault: EngineFault) -> bool:
    """Whether a fault says only that memory is full: whoever asked may ask for less."""
    return fault.code in ("gpu_memory", "kv_memory")
