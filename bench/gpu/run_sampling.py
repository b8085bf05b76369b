"""What the choice of tokens takes, logits to ids, and whether a row has its token in every crowd."""

from __future__ import annotations

from typing import Any

import numpy as np
from run_common import Room, recorded_seconds, tell

from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.sampling import cuts_off, launch_draw, sample_on_device
from pageturner.kernels.reference import ReferenceOps

ROWS = (1, 16, 64, 256)
VOCABULARY = 151936
DRAWS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.7, 0, 1.0, 0.0),
    "min_p": (0.7, 0, 1.0, 0.05),
    "top_k": (0.7, 50, 1.0, 0.0),
    "top_p": (1.0, 0, 0.95, 0.0),
    "both": (0.6, 20, 0.95, 0.0),
}
SPREADS = {"peaked": 3.0, "flat": 0.3}  # standard deviation of the logits


def sampling(room: Room) -> None:
    """Recorded choices for each number of rows and sort of draw; tokens beside those of numpy."""
    rows = (2, 5) if room.tiny else ROWS
    vocabulary = 5000 if room.tiny else VOCABULARY
    ops = room.ops(1, graphs=False)
    for spread, deviation in SPREADS.items():
        dice = np.random.default_rng(5)
        logits = (deviation * dice.standard_normal((max(rows), vocabulary))).astype(np.float32)
        noise = dice.random(len(logits), np.float32)
        for name, values in DRAWS.items():
            _each(room, ops, logits, noise, rows, (spread, name, values))


def _each(
    room: Room, ops: GpuOps, logits: Any, noise: Any, rows: tuple[int, ...], what: Any
) -> None:
    spread, name, values = what
    every = None
    for count in reversed(rows):  # the largest crowd first
        temperature, top_k, top_p, min_p = (np.full(count, one, np.float32) for one in values)
        draw = temperature, top_k.astype(np.int32), top_p, min_p, noise[:count].copy()
        ops.begin()
        placed = ops.on_device(logits[:count])
        ids = sample_on_device(ops, placed, draw)[0]
        every = ids if every is None else every
        few = min(count, 16)
        expected = ReferenceOps().sample(logits[:few], *(one[:few] for one in draw))  # type: ignore[arg-type]
        integers = [array.view(np.int32) for array in draw]
        parameters = [array.address for array in ops.arena.upload(integers)]
        out = ops.arena.take((2, count), "i32").address
        mark = ops.arena.mark

        def work(
            placed: Any = placed,
            parameters: Any = parameters,
            cuts: bool = cuts_off(draw),
            out: int = out,
            mark: int = mark,
            count: int = count,
        ) -> None:
            ops.arena.reset(mark)
            launch_draw(ops, placed, parameters, cuts, (out, out + 4 * count))

        took = recorded_seconds(room.driver, [work] * (1 if room.tiny else 8), room.tiny, 0.05)
        tell(
            "sampling",
            device=room.driver.name,
            spread=spread,
            draw=name,
            rows=count,
            us=1e6 * took,
            differ=int((ids != every[:count]).sum()),
            unlike_numpy=int((ids[:few] != expected).sum()),
        )
