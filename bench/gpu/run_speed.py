"""Steps of Llama-3.1-8B's shape beside both floors, and what invariance costs beside the best free choice.

A step is timed as a caller sees it: from the upload of its integers until the tokens are on the host. The
cost of invariance is that of the products and of attention, each recorded and replayed, weights from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from run_common import (
    COLD,
    LLAMA_8B,
    TINY,
    Room,
    Shape,
    fits,
    floats,
    floor_seconds,
    greedy,
    kv_spec,
    make_stack,
    recorded_seconds,
    seconds_of,
    steps_of,
    tell,
    torch_here,
    torch_seconds,
)

from pageturner.errors import EngineFault
from pageturner.kernels.choosing import ChooseArgs
from pageturner.kernels.gpu import launches
from pageturner.kernels.gpu.catalogue import MANY, MAX_SPLIT_TILES, Height, cut, tiles_of
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.steps import view_of

BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (250, 1024, 8192)
OURS = "our own tiles"
FREE_PARTS = (1, 2, 4, 8, 16)  # of K, from which a free choice takes the best


def ceilings(room: Room) -> None:
    tell("ceilings", **room.ceilings())


def decode(room: Room) -> None:
    """Steps of single tokens, recorded, to their tokens."""
    shape = room.llama_8b
    room.ceilings()
    most = min(16 << 30, room.driver.memory()[0] // 6)  # 256 sequences of 8k need half of it
    ops = GpuOps(room.driver, 64 << 20 if room.tiny else most)
    stack, head = make_stack(ops, shape)
    for batch in (2,) if room.tiny else BATCHES:
        for context in (20,) if room.tiny else CONTEXTS:
            try:
                decode_one(room, ops, (stack, head), shape, batch, context)
            except EngineFault as fault:
                if not fits(fault):
                    raise
                tell("decode", batch=batch, context=context, run=False, why=fault.message)


def decode_one(room: Room, ops: GpuOps, model: Any, shape: Shape, batch: int, context: int) -> None:
    """One size. EngineFault where it does not fit into the device."""
    (stack, head), runs = model, [(context - 1, 1)] * batch
    kv, step, draw = ops.alloc_kv(kv_spec(shape, runs)), steps_of(runs), greedy(batch)
    try:
        fill(ops, kv)
        took = seconds_of(
            room.driver,
            lambda: ops.collect(ops.launch_step(stack, step, kv, None, head, draw)),
            1.0,
            room.tiny,
        )
    finally:
        ops.graphs = ops.graphs_of()  # recordings hold the addresses of this KV
        for address in (kv.keys, kv.values):
            room.driver.free(address)
    nbytes = 2.0 * shape.weights + kv.spec.bytes_per_token * context * batch
    scores = 4.0 * shape.layers * shape.heads * shape.head_dim * context * batch
    floors = floor_seconds(room, nbytes, 2.0 * shape.weights * batch + scores)
    tell(
        "decode",
        device=room.driver.name,
        shape=shape.name,
        layers=shape.layers,
        batch=batch,
        context=context,
        ms=1e3 * took,
        tok_s=batch / took,
        **floors,
        share_of_copy=floors["floor_copy_ms"] / (1e3 * took),
    )


def prefill(room: Room) -> None:
    """A prompt of 8k tokens to its first token: whole, or in the largest chunks that the memory for a step
    allows."""
    shape, rows = (TINY, 24) if room.tiny else (LLAMA_8B, 8192)
    room.ceilings()
    room_for = 64 << 20 if room.tiny else int(room.driver.memory()[0] * 0.6)
    ops = GpuOps(room.driver, room_for, graphs=False)
    stack, head = make_stack(ops, shape)
    kv, chunk = ops.alloc_kv(kv_spec(shape, [(0, rows)])), rows
    while True:
        steps = [steps_of([(at, min(chunk, rows - at))]) for at in range(0, rows, chunk)]

        def work(steps: Any = steps) -> None:
            for step in steps:
                x = ops.hidden(stack, step, kv, None)
            ops.choose(x, head, ChooseArgs(greedy(1)))

        try:
            took = seconds_of(room.driver, work, 5.0, room.tiny)
            break
        except EngineFault as fault:
            if not fits(fault) or chunk <= 256:
                raise
            chunk //= 2
    layers = shape.weights - shape.vocabulary * shape.hidden
    operations = (
        2.0 * layers * rows + 2.0 * shape.layers * shape.heads * shape.head_dim * rows * rows
    )
    floors = floor_seconds(room, 2.0 * shape.weights, operations)
    tell(
        "prefill",
        device=room.driver.name,
        shape=shape.name,
        layers=shape.layers,
        rows=rows,
        chunk=chunk,
        ms=1e3 * took,
        tok_s=rows / took,
        tflop_s=1e-12 * operations / took,
        **floors,
        share_of_matrix=floors["floor_matrix_ms"] / (1e3 * took),
    )


# -- the cost of invariance ----------------------------------------------------------------------------------
def invariance(room: Room) -> None:
    """Our fixed tiles beside the best choice for each number of rows: other parts of K and kernels of ours,
    cuBLAS, and FlashAttention by torch."""
    room.ceilings()
    shape = room.llama_8b
    for rows in (2,) if room.tiny else (1, 16, 64, 256, 2048, 8192):
        ours, free, others = 0.0, 0.0, 0
        for name, (n, k) in list(shape.matrices.items())[: 1 if room.tiny else None]:
            found = products(room, n, k, rows)
            by = min(found, key=lambda name: found[name])
            mine, best = found[OURS], found[by]
            floors = floor_seconds(
                room, 2.0 * (n * k + rows * k) + 4.0 * rows * n, 2.0 * rows * n * k
            )
            tell(
                "product",
                name=name,
                n=n,
                k=k,
                rows=rows,
                us=1e6 * mine,
                best_us=1e6 * best,
                by=by,
                **floors,
            )
            ours, free, others = ours + mine, free + best, others + len(found) - 1
        tell(
            "invariance",
            what="products",
            rows=rows,
            us=1e6 * ours,
            best_us=1e6 * free,
            compared=others,
            cost=ours / free - 1 if others else None,
        )
    steps = [(64, 1, 1024), (256, 1, 1024), (16, 1, 8192), (1, 8192, 8192)]
    for batch, rows, context in [(2, 1, 20)] if room.tiny else steps:
        attention(room, shape, batch, rows, context)


def products(room: Room, n: int, k: int, rows: int) -> dict[str, float]:
    """Seconds of our product as it is, and of each free choice."""
    copies = 1 if room.tiny else max(2, -(-COLD // (2 * n * k)))
    room_for = (
        (32 << 20) + 4 * rows * (k + 20 * n) if rows <= 256 else (32 << 20) + 8 * rows * (k + n)
    )
    ops = GpuOps(room.driver, room_for, graphs=False)
    weights = [ops.pack_weight(floats(n, k, 12 + i)) for i in range(copies)]
    host = np.random.default_rng(5).standard_normal((rows, k), dtype=np.float32)
    x = ops.launches.cast(ops.on_device(host), "bf16")
    mark = ops.arena.mark

    def launch(weight: Any) -> Callable[[], None]:
        def work() -> None:
            ops.arena.reset(mark)
            ops.launches.gemm(x, weight)

        return work

    works = [launch(weight) for weight in weights]
    mine = recorded_seconds(room.driver, works, room.tiny)
    found = {OURS: mine}
    fixed = launches.parts_of, launches.height_of
    try:
        for height in Height if rows <= 2048 else ():
            for parts in FREE_PARTS[: 2 if room.tiny else None]:
                tile = tiles_of(room.driver.architecture, "bf16").get(height)
                if tile is None:
                    continue
                tiles = -(-rows // tile.m) * -(-n // tile.n)
                if height != MANY and parts > 1 and tiles > MAX_SPLIT_TILES:
                    continue  # there are not so many counters
                if height != MANY and rows * n * parts > 1 << 27:
                    continue  # partials of more than half a gigabyte
                launches.height_of = lambda *_, height=height: height  # type: ignore[misc]
                launches.parts_of = lambda r, c, step, parts=parts: cut(c, parts, step)  # type: ignore[misc]
                key = f"{height}, {parts} parts"
                try:
                    found[key] = recorded_seconds(room.driver, works, room.tiny)
                except EngineFault as fault:
                    if not fits(fault):
                        raise
    finally:
        launches.parts_of, launches.height_of = fixed
    torch = torch_here(room)
    if torch is not None:
        a = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        theirs = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        found["cuBLAS"] = torch_seconds(torch, [lambda b=b: torch.mm(a, b.T) for b in theirs])
        del a, theirs
        torch.cuda.empty_cache()
    room.driver.release()
    return found


def attention(room: Room, shape: Shape, batch: int, rows: int, context: int) -> None:
    """One layer's attention of sequences of a context, `rows` of each in this step, beside torch's."""
    one = replace(shape, layers=1)
    runs = [(context - rows, rows)] * batch
    q_bytes = 4 * batch * rows * shape.heads * shape.head_dim
    partials = q_bytes * -(-context // 256) if rows == 1 else 0
    ops = GpuOps(room.driver, (64 << 20) + 4 * q_bytes + 2 * partials, graphs=False)
    kv = ops.alloc_kv(kv_spec(one, runs))
    heads = shape.attention
    fill(ops, kv)
    step = ops.step(steps_of(runs), {view_of(heads)}, kv)
    width = shape.heads * shape.head_dim
    q = ops.on_device(
        np.random.default_rng(6).standard_normal((batch * rows, width), dtype=np.float32)
    )
    mark = ops.arena.mark

    def work() -> None:
        ops.arena.reset(mark)
        ops.launches.attention(q, kv, 0, step, heads, "fp32")

    mine = recorded_seconds(room.driver, [work] * (1 if room.tiny else 4), room.tiny)
    theirs = flash_seconds(torch_here(room), shape, batch, rows, context)
    seen = rows * context if rows == 1 else rows * context / 2
    floors = floor_seconds(
        room,
        kv.spec.bytes_per_token * context * batch,
        4.0 * batch * seen * shape.heads * shape.head_dim,
    )
    tell(
        "invariance",
        what="attention",
        batch=batch,
        rows=rows,
        context=context,
        us=1e6 * mine,
        best_us=1e6 * min(theirs or mine, mine),
        flash_us=theirs and 1e6 * theirs,
        cost=mine / min(theirs, mine) - 1 if theirs else None,
        **floors,
    )
    room.driver.release()


def flash_seconds(torch: Any, shape: Shape, batch: int, rows: int, context: int) -> float | None:
    """The same by FlashAttention in torch; None where it is not there."""
    if torch is None:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = (batch, shape.kv_heads, context, shape.head_dim)
    keys, values = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(
        batch, shape.heads, rows, shape.head_dim, device="cuda", dtype=torch.bfloat16
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            calls = [lambda: attend(query, keys, values, is_causal=rows > 1, enable_gqa=True)] * 4
            return torch_seconds(torch, calls)
    except RuntimeError as error:  # no such kernel for these sizes
        tell("flash", run=False, why=str(error)[:300])
        return None


def fill(ops: GpuOps, kv: Any) -> None:
    """Random keys and values in every slot of all layers: zeros would be faster than real data."""
    width, slots = kv.spec.kv_heads * kv.spec.head_dim, kv.spec.blocks * kv.spec.block_size
    count = min(slots, 2048)
    ops.begin()
    some = np.random.default_rng(7).standard_normal((2, count, width), dtype=np.float32)
    k, v = (ops.on_device(one) for one in some)
    mark = ops.arena.mark
    for at in range(0, slots, count):
        ops.arena.reset(mark)
        here = np.arange(at, at + count, dtype=np.int32)
        here[here >= slots] = -1  # writes nowhere
        ops.kv_write(kv, 0, k, v, here)
    for layer in range(1, kv.spec.layers):
        for base in (kv.keys, kv.values):
            ops.driver.copy(base + layer * kv.layer_bytes, base, kv.layer_bytes)
    ops.begin()
