"""LoRA adapters on a device: whether a row has its bits in any mix of them, and what they cost a step.

Owns how adapters with random values are made for a shape. The parts `bits` and `kinds` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from run_common import (
    TINY,
    Room,
    Shape,
    floor_seconds,
    greedy,
    kv_spec,
    make_stack,
    normal_bits,
    seconds_of,
    steps_of,
    tell,
)
from run_speed import fill

from pageturner.kernels.adapters import INPUTS, AdapterWeights, LowRank
from pageturner.kernels.choosing import ChooseArgs
from pageturner.kernels.gpu.ops import GpuOps

FIELDS = tuple(name for names in INPUTS for name in names)
MIX = (16, 64, 8, 256)  # ranks of adapters in one step
COUNT, RANK, BATCH, CONTEXT = 32, 16, 32, 1024


def adapter(shape: Shape, rank: int, seed: int, fields: tuple[str, ...] = FIELDS) -> AdapterWeights:
    """In bf16; the same values in every layer."""

    def pair(outputs: int, inputs: int, seed: int) -> LowRank:
        a, b = normal_bits(rank, inputs, seed), normal_bits(outputs, rank, seed + 1)
        return LowRank(a.reshape(rank, inputs), b.reshape(outputs, rank), 0.5)

    pairs = {
        name: pair(*shape.projections[name], 100 * seed + 2 * i) for i, name in enumerate(fields)
    }
    return AdapterWeights("BF16", (pairs,) * shape.layers)


def crowds_of(longest: int, crowds: Iterable[int]) -> list[list[tuple[int, int]]]:
    """The last row of the longest sequence first, beside rows of shorter ones; by the size of the crowd."""
    return [[(longest - 1, 1), *((3 + 13 * i % longest, 1) for i in range(n - 1))] for n in crowds]


def companies(
    ops: GpuOps,
    step: Callable[[list[tuple[int, int]], str], Any],
    whole: Any,
    chunks: Iterable[int],
    crowds: Iterable[list[tuple[int, int]]],
    tiny: bool,
) -> tuple[int, int]:
    """Rows that were compared and that differ: of a sequence in chunks, and its last one in each crowd, where
    it comes first, recorded and not. step: hidden rows of these runs, "all" or the "last" of each. whole: of
    the sequence in one step."""
    longest, compared, differ = len(whole), 0, 0
    for chunk in chunks:
        # single tokens only at the end, behind what is there
        begin = longest - 20 if chunk == 1 else 0
        for at in range(begin, longest, chunk):
            count = min(chunk, longest - at)
            differ += int((step([(at, count)], "all") != whole[at : at + count]).any(axis=1).sum())
            compared += count
    recorded = ops.graphs_of()
    for runs in crowds:
        for graphs in (None, recorded, recorded, recorded)[: 3 if tiny else None]:
            ops.graphs = graphs
            differ += int((step(runs, "last")[0] != whole[-1]).any())
            compared += 1
    return compared, differ


def rows_of_adapters(room: Room) -> None:
    """A sequence with an adapter whole, in chunks, and its last row among others with other adapters and
    without, recorded and not; and one without an adapter beside those with, and in a step of the model as it
    is."""
    shape = TINY if room.tiny else Shape("adapters", 2, 4096, 14336, 32, 8, 128, 1024)
    longest, crowds, chunks = (
        (12, (3,), (7,)) if room.tiny else (300, (5, 40, 255), (1, 7, 64, 256))
    )
    ranks = MIX[:2] if room.tiny else MIX
    ops = room.ops(8, graphs=False)
    stack, _ = make_stack(ops, shape)
    fields = (FIELDS, ("q", "v"), ("o", "gate", "down"), FIELDS)
    mix = [
        *(
            ops.pack_adapter(adapter(shape, rank, i, fields[i]), stack)
            for i, rank in enumerate(ranks)
        ),
        None,
    ]
    every = crowds_of(longest, crowds)
    kv = ops.alloc_kv(kv_spec(shape, max(every, key=len), "float16"))

    def step(runs: list[tuple[int, int]], wanted: str, first: int) -> Any:
        """Sequence s has the adapter first + s, in turns."""
        batch = steps_of(runs, wanted)
        batch.adapters = [mix[(first + s) % len(mix)] for s in range(len(runs))]
        return ops.to_numpy(ops.hidden(stack, batch, kv, None))

    differ = compared = 0
    for first, one in enumerate(mix):
        ops.graphs = None
        whole = step([(0, longest)], "all", first)
        if one is None:
            plain = ops.to_numpy(ops.hidden(stack, steps_of([(0, longest)], "all"), kv, None))
            differ += int((plain != whole).any(axis=1).sum())
        mine = partial(step, first=first)
        found = companies(ops, mine, whole, chunks, every, room.tiny)
        compared, differ = compared + found[0], differ + found[1]
    tell(
        "bits",
        what="adapters",
        ranks=list(ranks),
        crowds=list(crowds),
        compared=compared,
        differ=differ,
    )
    del mix[:]
    room.driver.release()


def adapters(room: Room) -> None:
    """A step to its tokens without adapters, with one for all rows, and with one for each row; beside each
    the error of what adapters add."""
    error = distance_of_adapters(room)
    shape = room.llama_8b
    count, batch, context = (2, 2, 20) if room.tiny else (COUNT, BATCH, CONTEXT)
    ops = room.ops(6)
    stack, head = make_stack(ops, shape)
    hot = [ops.pack_adapter(adapter(shape, RANK, i), stack) for i in range(count)]
    runs = [(context - 1, 1)] * batch
    kv, step, draw = ops.alloc_kv(kv_spec(shape, runs, "float16")), steps_of(runs), greedy(batch)
    fill(ops, kv)
    base = 0.0
    for present in (0, 1, count):
        step.adapters = [hot[s % present] for s in range(batch)] if present else None
        took = seconds_of(
            room.driver,
            lambda: ops.choose(ops.hidden(stack, step, kv, None), head, ChooseArgs(draw)),
            1.0,
            room.tiny,
        )
        base = base or took
        nbytes = (
            2.0 * shape.weights
            + kv.spec.bytes_per_token * context * batch
            + present * hot[0].nbytes
        )
        tell(
            "kinds",
            what="adapters",
            adapters=present,
            rank=RANK,
            batch=batch,
            context=context,
            ms=1e3 * took,
            tok_s=batch / took,
            pace=base / took,
            error=error if present else 0.0,
            **floor_seconds(room, nbytes, 2.0 * shape.weights * batch),
        )
    del hot[:]
    step.adapters = None
    room.driver.release()


def distance_of_adapters(room: Room) -> float:
    """What adapters add to one product, beside the product of the values: the error of the largest rank."""
    one = replace(room.llama_8b, layers=1, vocabulary=64)
    ops = room.ops(2, graphs=False)
    stack, _ = make_stack(ops, one)
    weights = adapter(one, MIX[-1], 0, ("down",))
    packed = ops.pack_adapter(weights, stack)
    x = np.random.default_rng(3).standard_normal((4, one.inner), dtype=np.float32)
    zeros = ops.on_device(np.zeros((4, one.hidden), np.float32))
    ops.launches.cast(rows := ops.on_device(x), "bf16")
    got = ops.to_numpy(ops.adapt(zeros, rows, [packed] * 4, 0, "down"))
    pair = weights.layers[0]["down"]
    a, b = (
        (one.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        for one in (pair.a, pair.b)
    )
    truth = pair.scale * (x @ a.T) @ b.T
    error = float(np.abs(got - truth).max() / np.abs(truth).max())
    del packed
    room.driver.release()
    return error
