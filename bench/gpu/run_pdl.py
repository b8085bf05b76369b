"""What a step gains when kernels may begin beside the one in front of them, and whether its bits stay."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from run_common import (
    LLAMA_8B,
    QWEN3_06B,
    TINY,
    Room,
    Shape,
    kv_spec,
    make_stack,
    seconds_of,
    steps_of,
    tell,
)
from run_speed import fill

from pageturner.kernels.gpu.ops import GpuOps

SIZES = ((1, 250), (16, 1024), (64, 1024), (256, 250))  # sequences, context
ROUNDS = 2  # of each way, in turn


def pdl(room: Room) -> None:
    """Recorded steps of single tokens below the head: eight layers of 8B and all of 0.6B."""
    allowed = room.driver.dependent_launch
    few = dataclasses.replace(LLAMA_8B, layers=8, name="eight layers of Llama-3.1-8B")
    for shape in (TINY,) if room.tiny else (few, QWEN3_06B):
        ops = room.ops(4)
        stack, _ = make_stack(ops, shape)
        for batch, context in ((2, 20),) if room.tiny else SIZES:
            _both_ways(room, ops, stack, shape, (batch, context), allowed)
        room.driver.release()


def _both_ways(
    room: Room, ops: GpuOps, stack: Any, shape: Shape, size: tuple[int, int], allowed: bool
) -> None:
    batch, context = size
    runs = [(context - 1, 1)] * batch
    kv, step = ops.alloc_kv(kv_spec(shape, runs)), steps_of(runs)
    fill(ops, kv)
    took: dict[bool, list[float]] = {False: [], True: []}
    rows: dict[bool, Any] = {}
    for beside in (False, True) * ROUNDS:
        room.driver.dependent_launch = beside and allowed
        ops.graphs = ops.graphs_of()
        took[beside].append(
            seconds_of(room.driver, lambda: ops.hidden(stack, step, kv, None), 0.3, room.tiny)
        )
        rows[beside] = ops.to_numpy(ops.hidden(stack, step, kv, None))
    room.driver.dependent_launch = allowed
    ops.graphs = ops.graphs_of()
    ops.free_kv(kv)
    off, on = (1e3 * float(np.median(took[beside])) for beside in (False, True))
    tell(
        "pdl",
        device=room.driver.name,
        shape=shape.name,
        batch=batch,
        context=context,
        allowed=allowed,
        off_ms=off,
        on_ms=on,
        differ=int((rows[True].view(np.int32) != rows[False].view(np.int32)).sum()),
    )
