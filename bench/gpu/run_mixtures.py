"""Mixtures of experts, attention over a latent KV and blocks that travel, on a device: against the reference
on the host, the bits of a row in every batch, and times beside the floor of bytes and operations.

Owns no bound of time. What is wrong is told: `worst` in parts of `bound`, `same_bits` false.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from run_common import Room, floats, floor_seconds, recorded_seconds, tell
from tests.kernels import grid

from pageturner.formats import ggml
from pageturner.kernels.base import GATED, AttentionShape, KVSpec, Tensor
from pageturner.kernels.gpu import experts as module
from pageturner.kernels.gpu.catalogue import LATENT_KINDS
from pageturner.kernels.gpu.experts import GpuExperts
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.steps import view_of
from pageturner.kernels.layer_parts import Experts
from pageturner.kernels.reference import ReferenceOps

HOST = ReferenceOps()
# experts, chosen, width, neurons of an expert: Qwen3-30B-A3B, gpt-oss-20b
SIZES = {"128": (128, 8, 2048, 768), "32": (32, 4, 2880, 2880)}
TINY_SIZE = (4, 2, 64, 96)
BYTES = {"BF16": 2.0, "Q4_0": 18 / 32, "MXFP4": 17 / 32, "Q8_0": 34 / 32, "F8_W": 1.0}
SMALL = (6, 2, 1024, 256)  # of what is compared with the host
BOUND = 2e-2  # of the largest element: rows are rounded to bf16 twice
LATENT = (512, 64)  # rank and rotary key of DeepSeek-V2-Lite


def mixtures(room: Room) -> None:
    for kind in ("BF16", "Q4_0") if room.tiny else BYTES:
        for act, biased in (("silu", False), (GATED, True)):
            _right(room, kind, act, biased)
    for name, kind in (("128", "BF16"), ("128", "Q4_0"), ("32", "MXFP4"))[
        : 1 if room.tiny else None
    ]:
        _timed(room, name, kind)
    for kind in LATENT_KINDS[:1] if room.tiny else LATENT_KINDS:
        _latent_right(room, kind)
    _latent_timed(room)
    _blocks(room)


# -- experts -------------------------------------------------------------------------------------------------
def _weight(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    if kind == "BF16":
        return floats(rows, columns, seed)
    if kind == "F8_W":
        codes = grid.rng(seed).integers(0, 127, (rows, columns), dtype=np.uint8)
        return grid.fp8(codes, grid.rng(5).uniform(0.5, 2, rows) / columns**0.5 / 16)
    return grid.weight(kind, rows, columns, seed)


def _mixture(
    own: Any, size: tuple[int, int, int, int], kind: str, biased: bool, same: bool
) -> Experts:
    """same: all experts have the same values, in memory of their own."""
    count, top_k, wide, inner = size

    def packed(tensor: Tensor) -> Any:
        if own is HOST:
            values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
            tensor = Tensor("w", "F32", tensor.shape, values.reshape(-1).view(np.uint8))
        return own.pack_weight(tensor)

    parts, biases = {}, {}
    for part, (name, shape) in enumerate(
        {"gate": (inner, wide), "up": (inner, wide), "down": (wide, inner)}.items()
    ):
        tensors = [_weight(kind, *shape, seed=10 * part + e) for e in range(1 if same else count)]
        parts[name] = tuple(packed(tensors[e % len(tensors)]) for e in range(count))
        if biased:
            every = [grid.vector(shape[0], seed=100 * part + e) for e in range(count)]
            biases[f"{name}_bias"] = tuple(map(own.pack_weight, every))
    router = own.pack_weight(grid.weight("F32", count, wide, seed=77))
    return Experts(router, **parts, top_k=top_k, normalise=True, **biases)


def _right(room: Room, kind: str, act: str, biased: bool) -> None:
    """Few rows against the host; one row alone, among others, and in tiles of both heights."""
    ops = room.ops(1, graphs=False)
    size = TINY_SIZE if room.tiny else SMALL
    mine, theirs = (_mixture(own, size, kind, biased, False) for own in (ops, HOST))
    tables, run = GpuExperts.tables(ops.driver, mine), GpuExperts(ops.launches)
    x = np.random.default_rng(3).standard_normal((9, size[2]), dtype=np.float32)

    def added(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        ops.begin()
        here = ops.on_device(rows)
        return ops.to_numpy(run.add(here, here, mine, tables, act))

    layer = type("Layer", (), {"experts": theirs, "act": act})
    expected = HOST.add_experts(x, x, layer) - x  # type: ignore[arg-type]
    got = added(x)
    worst = float(np.abs(got - x - expected).max() / (BOUND * np.abs(expected).max()))
    alone, same = added(x[4:5])[0], True
    copies = 4 if room.tiny else 300
    for many_rows in (1, 1 << 20):
        module.MANY_ROWS, before = many_rows, module.MANY_ROWS
        crowd = added(np.concatenate([x[:4], np.repeat(x[4:5], copies, axis=0), x[5:]]))
        module.MANY_ROWS = before
        same &= bool((crowd[4 : 4 + copies] == alone).all())
    same &= bool((got[4] == alone).all())
    tell("mixtures", what="experts", kind=kind, act=act, worst=worst, same_bits=same)
    room.driver.release()


def _timed(room: Room, name: str, kind: str) -> None:
    """Microseconds of the experts of a layer, whose weights no cache holds, beside the floor of reading those
    that are chosen at most."""
    size = TINY_SIZE if room.tiny else SIZES[name]
    count, top_k, wide, inner = size
    ops = room.ops(4, graphs=False)
    mixture = _mixture(ops, size, kind, False, True)
    tables, run = GpuExperts.tables(ops.driver, mixture), GpuExperts(ops.launches)
    for rows in (2,) if room.tiny else (1, 16, 64, 256, 2048):
        ops.begin()
        inputs = [ops.on_device(grid.normal(rows, wide, seed=seed)) for seed in range(4)]
        mark = ops.arena.mark

        def work(x: Any, mark: int = mark) -> None:
            ops.arena.reset(mark)
            run.add(x, x, mixture, tables, "silu")

        took = recorded_seconds(room.driver, [partial(work, x) for x in inputs], room.tiny)
        nbytes = BYTES[kind] * 3 * wide * inner * min(rows * top_k, count)
        tell(
            "mixtures",
            what="time",
            experts=name,
            kind=kind,
            rows=rows,
            us=1e6 * took,
            **floor_seconds(room, nbytes, 6.0 * rows * top_k * wide * inner),
        )
    room.driver.release()


# -- latent KV -----------------------------------------------------------------------------------------------
def _latent_right(room: Room, dtype: str) -> None:
    """Attention of sequences in several segments against the host; single rows alone and among others."""
    rank, rotary = (48, 8) if room.tiny else LATENT
    runs = [(20, 1), (0, 5)] if room.tiny else [(700, 1), (0, 80), (511, 2), (1500, 1)]
    heads, blocks = 16, 2 + sum(-(-(c + n) // 16) for c, n in runs)
    spec = KVSpec(1, blocks, 16, 1, rank + rotary, dtype, latent=True, scaled=dtype == "fp8_e4m3")
    shape = AttentionShape(heads, 1, rank + rotary, (rank + rotary) ** -0.5, latent=rank)
    ops = room.ops(1, graphs=False)
    kv, theirs = ops.alloc_kv(spec), HOST.alloc_kv(spec)
    batch, whole = grid.batch(runs, 16, blocks), grid.batch(grid.history(runs), 16, blocks)
    k = grid.normal(len(whole.slots), rank + rotary, seed=3)
    HOST.kv_write(theirs, 0, k, None, whole.slots)
    ops.kv_write(kv, 0, ops.on_device(k), None, whole.slots)
    q = grid.normal(len(batch.positions), heads * (rank + rotary), seed=9)
    expected = HOST.attention(q, theirs, 0, batch, shape)
    got = ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, batch, shape))
    worst = float(np.abs(got - expected).max() / (BOUND * np.abs(expected).max()))
    same = True
    for row in (0, len(q) - 1):
        one = grid.row_of(batch, row)
        ops.begin()
        alone = ops.to_numpy(ops.attention(ops.on_device(q[row : row + 1]), kv, 0, one, shape))
        same &= bool((alone[0] == got[row]).all())
    tell("mixtures", what="latent", kind=dtype, worst=worst, same_bits=same)
    room.driver.release()


def _latent_timed(room: Room) -> None:
    """Microseconds of attention of a layer of DeepSeek-V2-Lite in bf16."""
    rank, rotary = (48, 8) if room.tiny else LATENT
    shape = AttentionShape(16, 1, rank + rotary, 0.1, latent=rank)
    ops = room.ops(4, graphs=False)
    sizes = ((2, 1, 20),) if room.tiny else ((1, 1, 32768), (64, 1, 4096), (1, 2048, 2048))
    for sequences, rows, context in sizes:
        runs = [(context - rows, rows)] * sequences
        blocks = 2 + sum(-(-(c + n) // 16) for c, n in runs)
        kv = ops.alloc_kv(KVSpec(1, blocks, 16, 1, rank + rotary, "bfloat16", latent=True))
        ops.begin()
        step = ops.step(grid.batch(runs, 16, blocks), {view_of(shape)}, kv)
        q = ops.on_device(grid.normal(sequences * rows, 16 * (rank + rotary), seed=4))
        mark = ops.arena.mark

        def work(q: Any = q, kv: Any = kv, step: Any = step, mark: int = mark) -> None:
            ops.arena.reset(mark)
            ops.launches.attention(q, kv, 0, step, shape, "bf16")

        took = recorded_seconds(room.driver, [work, work], room.tiny)
        nbytes = 2 * sequences * context * (rank + rotary)
        tell(
            "mixtures",
            what="latent_time",
            sequences=sequences,
            rows=rows,
            context=context,
            us=1e6 * took,
            **floor_seconds(room, nbytes, 4.0 * 16 * sequences * rows * context * rank),
        )
        ops.free_kv(kv)
    room.driver.release()


# -- blocks --------------------------------------------------------------------------------------------------
def _blocks(room: Room) -> None:
    """Blocks of an 8B model to the host and back: whether they are the same, and GB/s of one at a time and of
    thirty-two."""
    layers, blocks = (2, 4) if room.tiny else (32, 256)
    ops = GpuOps(room.driver, 64 << 20, graphs=False)
    kv = ops.alloc_kv(KVSpec(layers, blocks, 16, 8, 128, "float16"))
    for many in (1, 2) if room.tiny else (1, 32):
        given = np.random.default_rng(5).integers(
            0, 256, (many, ops.block_bytes(kv)), dtype=np.uint8
        )
        found, numbers = np.empty_like(given), np.arange(many, dtype=np.int32)
        ops.write_blocks(kv, numbers, given)
        ops.read_blocks(kv, numbers, found)
        same, seconds = bool((found == given).all()), {}
        for name, move in (("down", ops.read_blocks), ("up", ops.write_blocks)):
            begin, times = time.perf_counter(), 1 if room.tiny else 10
            for _ in range(times):
                move(kv, numbers, found)
            room.driver.synchronise()
            seconds[name] = (time.perf_counter() - begin) / times
        tell(
            "mixtures",
            what="blocks",
            blocks=many,
            bytes=given.nbytes,
            same_bits=same,
            **{f"{name}_gb_s": given.nbytes / took / 1e9 for name, took in seconds.items()},
        )
    room.driver.release()
