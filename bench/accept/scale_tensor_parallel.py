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
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path += [str(Path(__file__).parent)]
import harness
from harness import Line, NotRun, pytest_line

from pageturner import LLM, SamplingParams
from pageturner.errors import EngineFault
from pageturner.formats import hub

TESTS = "tests/engine/test_tensor_parallel.py"
LOSS, DIVIDED = "tests/engine/test_rank_loss.py", "tests/engine/test_divided_models.py"
STAGES = "tests/engine/test_pipeline_parallel.py"
LEAST = 0.9  # of the speed of one rank of two threads
NEAR = 1e-2  # nats: between the two likeliest tokens, up to which either may come first
SIZES = (1, 2, 4)
PROMPTS = (
    "the old house by the sea",
    "def main(arguments):",
    "Once there was a king who",
    "1, 2, 3, 4,",
)


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


# -- tokens --------------------------------------------------------------------------------------------------
def token_lines(model: str) -> Iterator[Line]:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2)
    told = {}
    for ranks in SIZES:
        llm = engine(model, ranks, 2, dtype="float32", kv_cache_dtype="float32")
        told[ranks] = [output.outputs[0] for output in llm.generate(list(PROMPTS), params)]
    for ranks in SIZES[1:]:
        equal, ties, far, furthest = 0, 0, 0, 0.0
        for one, many in zip(told[1], told[ranks], strict=True):
            for place, (a, b) in enumerate(zip(one.token_ids, many.token_ids, strict=True)):
                if a != b:  # from here on they have different contexts
                    first, second = (row[1] for row in one.logprobs[place][1][:2])
                    ties, far = ties + (first - second <= NEAR), far + (first - second > NEAR)
                    break
                equal += 1
                furthest = max(furthest, abs(one.logprobs[place][0] - many.logprobs[place][0]))
        figure = (
            f"{equal} of {32 * len(PROMPTS)} tokens before {ties} near-ties and {far} others, logprobs at"
            f" most {furthest:.1e} apart, fp32"
        )
        what = f"tokens of {ranks} ranks equal one rank's up to near-ties"
        yield Line(what, figure, far == 0 and furthest < 1e-3)


def stage_token_lines(model: str) -> Iterator[Line]:
    """Tokens and all logprobs told, to the last bit."""
    params = SamplingParams(
        temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5, prompt_logprobs=1
    )
    told = {}
    for stages in SIZES:
        outputs = engine(model, 1, 2, stages).generate(list(PROMPTS), params)
        told[stages] = [
            (one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs)
            for one in outputs
        ]
    for stages in SIZES[1:]:
        pairs = list(zip(told[1], told[stages], strict=True))
        equal = sum(a == b for one, many in pairs for a, b in zip(one[0], many[0], strict=True))
        same = sum(one == many for one, many in pairs)
        figure = f"{equal} of {32 * len(PROMPTS)} tokens; all logprobs equal in {same} of {len(PROMPTS)} answers"
        yield Line(f"bits of {stages} stages are one process's", figure, same == len(PROMPTS))


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
    yield pytest_line(
        "tokens of 2 and 4 ranks, logits within 1e-4", TESTS, "-k", "one_rank or slices"
    )
    yield pytest_line("bits: runs, threads, alone and in a batch", TESTS, "-k", "bits")
    yield pytest_line("ranks killed under streams", TESTS, LOSS, "-m", "slow")
    yield pytest_line("ranks out of step, starts that fail", LOSS)
    yield pytest_line("experts and adapters in slices", DIVIDED)
    yield pytest_line("stages: bits, adapters, engines, refusals", STAGES, "-m", "not slow")
    yield pytest_line("a stage killed under streams", STAGES, "-m", "slow")
    yield pytest_line("cores and memory by node", "tests/engine/test_numa.py")
    yield pytest_line(
        "what does not go with ranks", TESTS, "tests/models/test_shard.py", "-k", "refused"
    )
    model = model_of(arguments)
    yield from token_lines(model)
    yield from stage_token_lines(model)
    yield from speed_lines(model, arguments.ranks_pairs)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
