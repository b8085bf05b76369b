"""Where the time of a step goes: the device's time of each kernel, launched alone behind events.

Not recorded, so a step is longer than it is served; events cost some microseconds each: shares count.
"""

from __future__ import annotations

from typing import Any

from run_common import LLAMA_8B, QWEN3_06B, TINY, Room, greedy, kv_spec, make_stack, steps_of, tell
from run_speed import fill

from pageturner.errors import EngineFault
from pageturner.kernels.choosing import ChooseArgs
from pageturner.kernels.gpu.ops import GpuOps

SIZES = ((1, 1, 1024), (64, 1, 1024), (256, 1, 1024), (16, 1, 8192), (1, 4096, 4096))


def profile(room: Room) -> None:
    """Milliseconds and launches by kernel, of (sequences, rows, context) each."""
    for shape in (TINY,) if room.tiny else (LLAMA_8B, QWEN3_06B):
        ops = room.ops(8, graphs=False)
        stack, head = make_stack(ops, shape)
        for size in ((2, 1, 20),) if room.tiny else SIZES:
            one(room, ops, (stack, head), shape, size)
        room.driver.release()


def one(room: Room, ops: GpuOps, model: Any, shape: Any, size: tuple[int, int, int]) -> None:
    (stack, head), (batch, rows, context) = model, size
    runs = [(context - rows, rows)] * batch
    step, draw = steps_of(runs), greedy(batch)
    try:
        kv = ops.alloc_kv(kv_spec(shape, runs))
    except EngineFault as fault:
        tell("profile", shape=shape.name, size=size, run=False, why=fault.message)
        return
    fill(ops, kv)
    for _ in range(2):
        ops.choose(ops.hidden(stack, step, kv, None), head, ChooseArgs(draw))
    room.driver.watch()
    ops.choose(ops.hidden(stack, step, kv, None), head, ChooseArgs(draw))
    ms = room.driver.by_name()
    whole = sum(one for one, _ in ms.values())
    listed = {
        name: [round(found, 4), count]
        for name, (found, count) in sorted(ms.items(), key=lambda one: -one[1][0])
    }
    tell(
        "profile",
        shape=shape.name,
        batch=batch,
        rows=rows,
        context=context,
        ms=whole,
        kernels=listed,
    )
    ops.free_kv(kv)
