"""Tensor parallel: ranks against one rank, their bits, a rank that is killed, and what two ranks of one
thread reach beside one rank of two. Pipeline parallel: stages against one process, and their pace.

Tokens, bits and ends are those of the tests, run here; beside them the tokens of 1, 2 and 4 ranks of the
model `--ranks-model`, and of 2 and 4 stages. Speeds are taken in pairs, one after the other, and the median
of their ratios counts: what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator

from harness import Line, NotRun

from pageturner import LLM, SamplingParams
from pageturner.errors import EngineFault
from pageturner.formats import hub

LEAST = 0.9  # of the speed of one rank of two threads
SIZES = (1, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--ranks-model", default="smollm2", help="for speeds and logprobs")
    parser.add_argument("--ranks-pairs", type=int, default=15)


def model_of(arguments: argparse.Namespace) -> str:
    try:
        return str(hub.resolve(arguments.ranks_model, offline=True).path)
    except EngineFault as fault:
        raise NotRun(f"the model is not here: {fault.message}") from fault


def engine(model: str, ranks: int, threads: int, stages: int = 1, **settings: str) -> LLM:
    return LLM(
        model,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        threads=threads,
        kv_cache_memory=256 << 20,
        enable_prefix_caching=False,
        **settings,
    )


# -- speed ---------------------------------------------------------------------------------------------------
def speed(llm: LLM, requests: int, prompt: int, tokens: int) -> float:
    """Tokens a second: those made, or the prompts' where one is made of each."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([[5 + n] * prompt for n in range(requests)], params)
    return requests * (tokens if tokens > 1 else prompt) / (time.perf_counter() - begin)


def speed_lines(model: str, pairs: int) -> Iterator[Line]:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise NotRun("there is one core")
    one, two = engine(model, 1, 2), engine(model, 2, 2)
    yield from compared(one, two, pairs, "two ranks of one thread against one of two")
    for stages in SIZES[1:]:
        many = engine(model, 1, 2, stages)
        yield from compared(one, many, pairs, f"{stages} stages against one process")


def compared(one: LLM, two: LLM, pairs: int, who: str) -> Iterator[Line]:
    """The pace of the second beside the first's."""
    cores = len(os.sched_getaffinity(0))
    for requests, prompt, tokens in ((1, 16, 24), (8, 16, 16), (32, 16, 16), (1, 512, 1)):
        for llm in (one, two):
            speed(llm, requests, prompt, tokens)
        found = []
        for n in range(pairs):  # whoever is second in a pair is first in the next
            first, second = (one, two) if n % 2 else (two, one)
            told = {llm is two: speed(llm, requests, prompt, tokens) for llm in (first, second)}
            found.append((told[False], told[True]))
        ratio = statistics.median(b / a for a, b in found)
        a, b = (statistics.median(side) for side in zip(*found, strict=True))
        best = max(b for _, b in found) / max(a for a, _ in found)
        figure = (
            f"{ratio:.2f} (median of {pairs} pairs; medians {b:.1f} and {a:.1f} tokens/s; best against best"
            f" {best:.2f}; load average {os.getloadavg()[0]:.1f} on {cores} cores)"
        )
        what = f"{requests} sequences" if tokens > 1 else f"prefill of {prompt}"
        yield Line(f"{who}, {what}: at least {LEAST}", figure, ratio >= LEAST)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    model = model_of(arguments)
    yield from speed_lines(model, arguments.ranks_pairs)
