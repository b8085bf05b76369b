"""Whether a row has its bits in every company: in products and steps, and in the engine as it serves.

Everything here counts rows or answers that differ in at least one bit. The engine's answers are compared with
those of each request alone, tokens and logprobs, sampled at temperature 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from run_adapters import companies, crowds_of, rows_of_adapters
from run_common import (
    LLAMA_8B,
    QWEN3_CUT,
    ROOT,
    TINY,
    Room,
    Shape,
    floats,
    kv_spec,
    make_stack,
    steps_of,
    tell,
)
from run_models import engine_of, request, run_all, write_folder

from pageturner.kernels.gpu.arrays import GpuArray

CROWDS = (2, 7, 33, 64, 100, 257, 1000, 2048)
CHUNKS = (1, 7, 64, 300, 1024)
PROBES = 8


def bits(room: Room) -> None:
    rows_of_products(room)
    rows_of_steps(room)
    rows_of_adapters(room)
    if room.tiny:
        answers(room, ROOT / "tests" / "goldens" / "tiny_llama.gguf")
    else:
        answers(room, write_folder(room, QWEN3_CUT))


def rows_of_products(room: Room) -> None:
    """A row alone and at several places among others, in each shape of product of a layer."""
    shape, crowds = (TINY, (2, 20)) if room.tiny else (LLAMA_8B, CROWDS)
    ops = room.ops(8, graphs=False)
    differ = compared = 0
    for n, k in sorted(set(shape.matrices.values()))[: 1 if room.tiny else None]:
        weight = ops.pack_weight(floats(n, k, 11))
        x = np.random.default_rng(n + k).standard_normal((max(crowds), k), dtype=np.float32)
        ops.begin()
        alone = ops.to_numpy(ops.linear(ops.on_device(x[:1]), weight))[0]
        for rows in crowds:
            for place in sorted({0, rows // 2, rows - 1}):
                crowd = x[:rows].copy()
                crowd[[0, place]] = crowd[[place, 0]]
                ops.begin()
                out = ops.linear(ops.on_device(crowd), weight)
                mine = GpuArray(out.address + 4 * n * place, (1, n))
                differ += int((ops.to_numpy(mine)[0] != alone).any())
                compared += 1
    tell("bits", what="products", crowds=list(crowds), compared=compared, differ=differ)
    room.driver.release()


def rows_of_steps(room: Room) -> None:
    """A sequence whole, in chunks of several sizes, and its last row in a crowd, recorded and not."""
    shape = TINY if room.tiny else Shape("bits", 2, 4096, 14336, 32, 8, 128, 1024)
    longest, crowds = (20, (3,)) if room.tiny else (1500, (1, 5, 40, 255))
    ops = room.ops(12, graphs=False)
    stack, _ = make_stack(ops, shape)
    every = crowds_of(longest, crowds)
    kv = ops.alloc_kv(kv_spec(shape, max(every, key=len), "float16"))

    def step(runs: list[tuple[int, int]], wanted: str) -> Any:
        return ops.to_numpy(ops.hidden(stack, steps_of(runs, wanted), kv, None))

    chunks = CHUNKS[1:2] if room.tiny else CHUNKS
    whole = step([(0, longest)], "all")
    compared, differ = companies(ops, step, whole, chunks, every, room.tiny)
    tell(
        "bits",
        what="steps",
        chunks=list(CHUNKS),
        crowds=list(crowds),
        compared=compared,
        differ=differ,
    )
    room.driver.release()


@dataclass
class Case:
    """One way to serve the same requests. crowd: others beside them; twice: asked again, so that prefixes
    are found."""

    name: str
    crowd: int = 0
    graphs: bool = True
    ahead: bool = True
    twice: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def cases(tiny: bool) -> list[Case]:
    """The product's most telling points, not all of it."""
    if tiny:
        return [
            Case("prefixes in chunks of 8", twice=True, settings={"max_num_batched_tokens": 8}),
            Case("no recordings", graphs=False),
        ]
    return [
        Case("together"),
        *(Case(f"among {n} others", crowd=n) for n in (24, 248, 1000)),
        *(
            Case(
                f"chunks of {n}",
                crowd=24,
                settings={"max_num_batched_tokens": n, "max_num_seqs": 16},
            )
            for n in (16, 77, 300)
        ),
        Case("prefixes", crowd=24, twice=True),
        Case("no prefix cache", crowd=24, settings={"enable_prefix_caching": False}),
        Case("preempted", crowd=24, settings={"kv_cache_memory": 1024 * 4 * 4096}),
        Case("no recordings", crowd=24, graphs=False),
        Case("not ahead", crowd=24, ahead=False),
        Case("not ahead, preempted", 24, True, False, False, {"kv_cache_memory": 1024 * 4 * 4096}),
    ]


Answer = tuple[tuple[int, ...], tuple[Any, ...]]


def _answers_of(engine: Any, requests: list[Any]) -> dict[int, Answer]:
    found = {}
    for id, events in run_all(engine, requests).items():
        tokens = tuple(token for event in events for token in event.tokens)
        found[id] = tokens, tuple(one for event in events for one in event.logprobs)
    return found


def answers(room: Room, model: Path) -> None:
    """Whole answers of the engine."""
    probes, length, output = (2, 20, 2) if room.tiny else (PROBES, 400, 48)
    memory = {"kv_cache_memory": 6 << 30, "max_num_seqs": 1024, "max_num_batched_tokens": 1024}
    memory = {} if room.tiny else memory
    params = {"temperature": 0.8, "top_p": 0.95, "logprobs": 2}

    def asked(first: int, count: int, vocabulary: int) -> list[Any]:
        """Requests of several lengths; those from 1000 on are the others."""
        return [
            request(first + i, max(4, length - 37 * (i % 8)), output, vocabulary, **params)
            for i in range(count)
        ]

    with engine_of(room, model, **memory) as one:
        vocabulary = one.built.vocab_size
        truth: dict[int, Answer] = {}
        for probe in asked(1, probes, vocabulary):
            truth |= _answers_of(one.engine, [probe])
            one.engine.forget_prefixes()
    for case in cases(room.tiny):
        with engine_of(
            room, model, graphs=case.graphs, ahead=case.ahead, **(memory | case.settings)
        ) as here:
            probes_here = asked(1, probes, vocabulary)
            others = asked(1000, case.crowd, vocabulary)
            got = [_answers_of(here.engine, [*others[::2], *probes_here, *others[1::2]])]
            if case.twice:
                got.append(_answers_of(here.engine, probes_here))
            differ = sum(answer[id] != truth[id] for answer in got for id in truth)
            stats = here.engine.stats()
            tell(
                "bits",
                what="answers",
                case=case.name,
                compared=len(got) * len(truth),
                differ=differ,
                preempted=next((v for k, v in stats.items() if "preempt" in k), None),
            )
