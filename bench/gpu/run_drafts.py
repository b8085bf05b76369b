"""Drafts by suffixes beside steps launched ahead: the pace of `--speculation auto` and `off`.

Weights are random, so answers are put in the model's place: a file once more, the same with an edit
every twenty tokens, and text that repeats nothing.
"""

from __future__ import annotations

import random
import time
from itertools import count
from statistics import median
from typing import Any
from unittest import mock

from run_common import Room, Shape, tell
from run_models import engine_of, write_folder

from pageturner.executor import sampler
from pageturner.executor.async_runner import AsyncRunner
from pageturner.params import SamplingParams
from pageturner.request import Request

SIZES = {1: 192, 8: 96, 64: 64}  # sequences at once, tokens of each answer
FILE, ROUNDS = 600, 3
CHOOSE, OUTPUTS = sampler.choose, AsyncRunner._outputs
KINDS = {"again": 10**9, "edits": 20, "fresh": 1}  # an edit behind so many tokens


def drafts(room: Room) -> None:
    """Pairs of batches for each shape, kind of answer and size."""
    number = count(1)
    for shape in (room.qwen3_06b, room.llama_8b):
        model = write_folder(room, shape)
        sides: dict[str, dict[Any, list[tuple[float, float]]]] = {"off": {}, "auto": {}}
        for speculation, found in sides.items():
            options = {"max_num_seqs": 64, "enable_prefix_caching": False}
            with engine_of(room, model, speculation=speculation, **options) as here:
                for kind, every in KINDS.items():
                    for size, length in ((2, 8),) if room.tiny else SIZES.items():
                        found[kind, size] = [
                            _run(here.engine, _jobs(shape, every, size, length, seed), number)
                            for seed in range(ROUNDS)
                        ]
        for (kind, size), off in sides["off"].items():
            auto = sides["auto"][kind, size]
            tell(
                "drafts",
                shape=shape.name,
                kind=kind,
                size=size,
                ratio=median(mine[0] / other[0] for mine, other in zip(auto, off, strict=True)),
                off=median(one[0] for one in off),
                a_step=median(one[1] for one in auto) / size,
            )


def _jobs(shape: Shape, every: int, size: int, length: int, seed: int) -> Any:
    """Prompts that end with a file, and answers that repeat it."""
    dice = random.Random(f"{every} {size} {seed}")  # nobody else was told the same
    for _ in range(size):
        file = [dice.randrange(5, shape.vocabulary) for _ in range(min(FILE, 4 * length))]
        answer = [
            dice.randrange(5, shape.vocabulary) if i % every == every - 1 else token
            for i, token in enumerate(file[:length])
        ]
        yield file, answer


def _run(engine: Any, jobs: Any, number: Any) -> tuple[float, float]:
    """Tokens a second and tokens a step behind the prompts."""
    answers, found = {}, {}
    for prompt, answer in jobs:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(answer))
        answers[id := next(number)], found[id] = answer, []
        assert not engine.submit(Request(id, tuple(prompt), params))

    def put(output: Any, request: Request, place: int) -> Any:
        answer = answers[request.id]
        output.tokens = [answer[min(place - len(request.prompt), len(answer) - 1)]]
        return output

    def chosen(decoder: Any, hidden: Any, rows: Any, masks: Any) -> Any:
        return [
            put(output, row.request, len(row.tokens))
            for output, row in zip(CHOOSE(decoder, hidden, rows, masks), rows, strict=True)
        ]

    def collected(self: Any, launched: Any, given: Any) -> Any:
        return [
            put(output, item.sequence.request, item.start + item.n) if output.tokens else output
            for output, item in zip(OUTPUTS(self, launched, given), launched.items, strict=True)
        ]

    seconds, tokens, steps = 0.0, 0, 0
    with (
        mock.patch.object(sampler, "choose", chosen),
        mock.patch.object(AsyncRunner, "_outputs", collected),
    ):
        while engine.has_work:
            begun, begin = all(found.values()), time.perf_counter()
            events = engine.step()
            for event in events:
                found[event.id] += event.tokens
            if begun:
                seconds += time.perf_counter() - begin
                steps, tokens = steps + 1, tokens + sum(len(event.tokens) for event in events)
    assert found == answers
    return tokens / seconds, tokens / max(1, steps)
