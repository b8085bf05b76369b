"""FP8 and int4 weights beside bf16, fp8 KV beside fp16, adapters beside none: time of a whole step, and error
of a product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from run_adapters import adapters
from run_common import (
    Room,
    Shape,
    floats,
    floor_seconds,
    greedy,
    kv_spec,
    make_stack,
    seconds_of,
    steps_of,
    tell,
)
from run_right import distance
from run_speed import fill

from pageturner.formats import float8, ggml
from pageturner.kernels.base import Tensor
from pageturner.kernels.choosing import ChooseArgs
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.models.quantise import quantise

BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "int4": 20 / 32,
}  # of a weight; int4: scale and lowest value of 32, fp16


def as_fp8(tensor: Tensor) -> Tensor:
    """e4m3 with one scale for each row, as checkpoints with a scale for each channel have."""
    rows, columns = tensor.shape
    values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data).reshape(rows, columns)
    scale = np.abs(values).max(axis=1, keepdims=True) / 448
    finite = np.flatnonzero(np.isfinite(float8.VALUES))
    order = finite[np.argsort(float8.VALUES[finite], kind="stable")]
    table = float8.VALUES[order].astype(np.float32)
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, values / scale)
    blocks = np.empty((rows, columns // 32, 36), np.uint8)
    blocks[..., :4] = scale.astype(np.float32).view(np.uint8).reshape(rows, 1, 4)
    blocks[..., 4:] = order.astype(np.uint8)[nearest].reshape(rows, columns // 32, 32)
    return Tensor(tensor.name, "F8_W", tensor.shape, blocks.reshape(-1))


KINDS = {
    "bf16": lambda tensor: tensor,
    "fp8": as_fp8,
    "int4": lambda tensor: quantise(tensor, "int4"),
}


def kinds(room: Room) -> None:
    room.ceilings()
    weights(room)
    stored(room)
    adapters(room)


def weights(room: Room) -> None:
    """Products of the same values in three kinds, and steps of 64 x 1k (the head stays in bf16)."""
    shape = room.llama_8b
    n, k = shape.matrices["down"]
    x = np.random.default_rng(8).standard_normal((4, k), dtype=np.float32)
    truth = x.astype(np.float64) @ _values(floats(n, k, 20)).T.astype(np.float64)
    for name, of in KINDS.items():
        ops = room.ops(6)
        got = ops.to_numpy(ops.linear(ops.on_device(x), ops.pack_weight(of(floats(n, k, 20)))))
        error = distance(got, truth)
        stack, head = make_stack(ops, shape, of)
        for batch in (2,) if room.tiny else (1, 64):
            context = 20 if room.tiny else 1024
            took, nbytes = _step(room, ops, stack, head, shape, batch, context, "float16")
            layers = shape.weights - shape.vocabulary * shape.hidden
            nbytes += BYTES[name] * layers + 2.0 * shape.vocabulary * shape.hidden
            tell(
                "kinds",
                what="weights",
                kind=name,
                batch=batch,
                context=context,
                ms=1e3 * took,
                tok_s=batch / took,
                error=error,
                **floor_seconds(room, nbytes, 2.0 * shape.weights * batch),
            )
        room.driver.release()


def _values(tensor: Tensor) -> Any:
    return ggml.dequantise(tensor.kind, tensor.shape, tensor.data).reshape(tensor.shape)


def _step(
    room: Room,
    ops: GpuOps,
    stack: Any,
    head: Any,
    shape: Shape,
    batch: int,
    context: int,
    dtype: str,
) -> tuple[float, float]:
    """Seconds of a step to its tokens, and the bytes of KV that it reads."""
    runs = [(context - 1, 1)] * batch
    kv, step = ops.alloc_kv(kv_spec(shape, runs, dtype)), steps_of(runs)
    fill(ops, kv)
    draw = greedy(batch)
    took = seconds_of(
        room.driver,
        lambda: ops.choose(ops.hidden(stack, step, kv, None), head, ChooseArgs(draw)),
        1.0,
        room.tiny,
    )
    if ops.graphs is not None:
        ops.graphs = ops.graphs_of()  # recordings hold the addresses of this KV
    ops.free_kv(kv)
    return took, float(kv.spec.bytes_per_token * context * batch)


def stored(room: Room) -> None:
    """KV in fp16 and fp8: steps of 64 x 1k and 16 x 8k, and attention's error over the same keys."""
    shape = room.llama_8b
    ops = room.ops(6)
    stack, head = make_stack(ops, shape)
    truth = _attended(ops, shape, "float32", room.tiny)
    for dtype in ("float16", "fp8_e4m3"):
        error = distance(_attended(ops, shape, dtype, room.tiny), truth)
        for batch, context in ((2, 20),) if room.tiny else ((64, 1024), (16, 8192)):
            took, nbytes = _step(room, ops, stack, head, shape, batch, context, dtype)
            floors = floor_seconds(room, nbytes + 2.0 * shape.weights, 2.0 * shape.weights * batch)
            tell(
                "kinds",
                what="kv",
                kind=dtype,
                batch=batch,
                context=context,
                ms=1e3 * took,
                tok_s=batch / took,
                error=error,
                **floors,
            )
    room.driver.release()


def _attended(ops: GpuOps, shape: Shape, dtype: str, tiny: bool) -> Any:
    """What one layer's attention mixes of random keys in a KV of this type."""
    context, batch = (20, 1) if tiny else (1024, 8)
    one = replace(shape, layers=1)
    runs = [(context - 1, 1)] * batch
    kv = ops.alloc_kv(kv_spec(one, runs, dtype))
    fill(ops, kv)
    q = np.random.default_rng(9).standard_normal(
        (batch, shape.heads * shape.head_dim), dtype=np.float32
    )
    return ops.to_numpy(ops.attention(ops.on_device(q), kv, 0, steps_of(runs), shape.attention))
