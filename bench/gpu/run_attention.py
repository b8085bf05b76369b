"""Attention of a layer with the heads of Llama-3.1-8B: microseconds beside the floor of its bytes, whether
its bits are the same each time (programs end in any order), and whether a row has them alone too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from run_common import (
    Room,
    floor_seconds,
    kv_spec,
    recorded_seconds,
    steps_of,
    tell,
)
from run_speed import fill

from pageturner.kernels.base import AttentionShape, Batch
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.steps import view_of

Runs = list[tuple[int, int]]
DECODES: dict[str, Runs] = {
    "64 x 1k": [(1087, 1)] * 64,
    "256 x 250": [(249, 1)] * 256,
    "256 x 500": [(511, 1)] * 256,
    "1 x 8k": [(8191, 1)],
    "1 x 32k": [(32767, 1)],
    "1 x 128k": [(131071, 1)],
    "33k beside 255 x 200": [(32999, 1), *[(199, 1)] * 255],
}
PROMPTS: dict[str, Runs] = {"1 x 8k": [(0, 8192)], "16 x 512 of 8k": [(7680, 512)] * 16}
WINDOW = 1024
TIMES = 50  # replays whose bits are compared
SPREAD = 256 << 20  # bytes of KV at least, in several layers, so that none is still in a cache


def attention(room: Room) -> None:
    shape = replace(room.llama_8b, layers=1)
    decodes = {"tiny": [(300, 1), (20, 1)]} if room.tiny else DECODES
    prompts = {"tiny": [(0, 20)]} if room.tiny else PROMPTS
    for dtype in ("bfloat16", "fp8_e4m3", "int8"):
        for name, runs in decodes.items():
            _one(room, shape, name, runs, dtype)
        for name, runs in prompts.items():
            _one(room, shape, f"prompts {name}", runs, dtype)
    for name, runs in decodes.items():
        _one(room, shape, f"window {name}", runs, "bfloat16", WINDOW)


def _one(room: Room, shape: Any, name: str, runs: Runs, dtype: str, window: int = 0) -> None:
    spec = kv_spec(shape, runs, dtype)
    layers = 1 if room.tiny else max(1, min(8, -(-SPREAD // spec.nbytes)))
    ops = room.ops(4, graphs=False)
    kv = ops.alloc_kv(replace(spec, layers=layers))
    fill(ops, kv)
    heads = replace(shape.attention, window=window)
    batch = steps_of(runs)
    step = ops.step(batch, {view_of(heads)}, kv)
    width = shape.heads * shape.head_dim
    values = np.random.default_rng(6).standard_normal((len(batch.tokens), width), dtype=np.float32)
    q, mark = ops.on_device(values), ops.arena.mark

    def work(layer: int) -> Any:
        ops.arena.reset(mark)
        return ops.launches.attention(q, kv, layer, step, heads, "fp32")

    took = recorded_seconds(
        room.driver, [partial(work, layer) for layer in range(layers)], room.tiny
    )
    truth = ops.to_numpy(work(0))
    stable = all((ops.to_numpy(work(0)) == truth).all() for _ in range(2 if room.tiny else TIMES))
    alone = _alone(ops, kv, batch, values, heads)
    seen = sum(min(done + n, window or done + n) for done, n in runs)
    bytes_seen = spec.nbytes * seen / (spec.blocks * spec.block_size)
    scores = sum(n * (done + n / 2) for done, n in runs) if not window else 0.0
    floors = floor_seconds(room, bytes_seen, 4.0 * scores * width)
    tell(
        "attention",
        size=name,
        kv=dtype,
        us=1e6 * took,
        gb_s=1e-9 * bytes_seen / took,
        stable=stable,
        alone=bool((alone == truth[-1]).all()),
        **floors,
    )
    room.driver.release()


def _alone(ops: GpuOps, kv: Any, batch: Batch, values: Any, heads: AttentionShape) -> Any:
    """The last row of the last sequence without any other."""
    ones = np.arange(2, dtype=np.int32)
    one = Batch(
        batch.tokens[-1:],
        batch.positions[-1:],
        ones,
        batch.context_len[-1:],
        batch.block_table[-1:],
        batch.slots[-1:],
        ones[:1],
    )
    ops.begin()
    q = ops.on_device(values[-1:])
    return ops.to_numpy(ops.attention(q, kv, 0, one, heads))[0]
