"""Beam search beside Transformers' own, the memory it takes, and all decoding methods in one batch.

Owns the comparisons of `make accept NAME=decoding` that need more than one method. The recordings are made by
tests/tools/record_smollm2.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from harness import ROOT, Line, NotRun

from pageturner import LLM, SamplingParams, StructuredOutputsParams
from pageturner.executor.draft import Costs, PromptLookup
from pageturner.llm import RequestOutput

GOLDENS = ROOT / "tests" / "goldens"
NEAR_TIE = 1e-3  # scores closer than this: either answer is right
Prompt = tuple[int, ...]


def equal_to_transformers(allowed: int = 2) -> Iterator[Line]:
    """Every recorded search in fp32, all prompts of a setting in one crowd."""
    path = GOLDENS / "smollm2_beams.npz"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    golden, greedy = np.load(path), np.load(GOLDENS / "smollm2_greedy.npz")
    every = [
        greedy["prompt_ids"][a:b].tolist() for a, b in itertools.pairwise(greedy["prompt_starts"])
    ]
    llm = LLM("smollm2", dtype="float32", kv_cache_dtype="float32")
    _, _, width, steps = golden["tokens"].shape
    for column, (penalty, early) in enumerate(golden["settings"].tolist()):
        rows = np.flatnonzero((golden["tokens"][:, column, 0] >= 0).any(1))
        params = SamplingParams(
            max_tokens=steps,
            length_penalty=float(penalty),
            early_stopping="never" if early == "never" else early == "True",
        )
        prompts = [every[golden["prompts"][row]] for row in rows]
        outputs = llm.beam_search(prompts, width, params)
        told = [
            _differences(output, golden, row, column)
            for row, output in zip(rows, outputs, strict=True)
        ]
        differ = sum(one is not None for one in told)
        worst = max((one for one in told if one is not None), default=0.0)
        what = (
            f"beams of {width}, length penalty {penalty}, early stopping {early}: as Transformers"
        )
        figure = f"{len(rows)} prompts x {steps} tokens, {differ} differ, by {worst:.1e} in score at most"
        yield Line(what, figure, differ <= allowed and worst < NEAR_TIE)


def _differences(output: RequestOutput, golden: Any, row: int, column: int) -> float | None:
    """None if all answers are the same in the same order; else the largest difference of their scores."""
    same, worst = True, 0.0
    for rank, answer in enumerate(output.outputs):
        expected = [token for token in golden["tokens"][row, column, rank].tolist() if token >= 0]
        same = same and answer.token_ids == expected
        worst = max(worst, abs((answer.score or 0.0) - float(golden["scores"][row, column, rank])))
    return None if same else worst


def memory(llm: LLM, prompts: Sequence[Prompt]) -> Line:
    """Four beams of each prompt, 128 tokens: the most blocks at any moment, and what they would be if each
    beam had its own."""
    engine, size = llm.built.engine, llm.built.block_size
    shared = apart = 0
    plan = engine.scheduler.plan

    def watched(now: float) -> Any:
        nonlocal shared, apart
        made = plan(now)
        tables = [item.sequence.blocks for item in made.items]
        shared = max(shared, len({block for table in tables for block in table}) * size)
        apart = max(apart, sum(map(len, tables)) * size)
        return made

    engine.scheduler.plan = watched  # type: ignore[method-assign]
    llm.beam_search(list(prompts), 4, SamplingParams(max_tokens=128, ignore_eos=True))
    figure = (
        f"{1 - shared / apart:.1%} less: at most {shared:,} tokens reserved, {apart:,} unshared"
    )
    return Line("beams of 4: at least 55 % less KV than unshared", figure, shared <= 0.45 * apart)


def mixed(prompts: Sequence[Prompt], schema: dict[str, Any]) -> Iterator[Line]:
    """64 requests at once, a quarter each: greedy, three samples, beams of 4, a JSON schema with drafts."""
    llm = LLM("smollm2", speculation="ngram")
    # In such a crowd no draft pays, and none would be made: here every row counts as free.
    llm.built.engine.executor._drafter = PromptLookup(costs=Costs(0.0, math.inf))  # type: ignore[attr-defined]
    base = SamplingParams(max_tokens=48, logprobs=0, seed=11)
    ways = (
        replace(base, temperature=0.0),
        replace(base, temperature=0.9, n=3),
        replace(base, beam_width=4, n=4),
        replace(base, temperature=0.0, structured_outputs=StructuredOutputsParams(json=schema)),
    )
    each = [ways[i % len(ways)] for i in range(len(prompts))]
    crowd = llm.generate(list(prompts), each)
    drafted = llm.built.engine.stats()["draft_tokens"]
    wrong = sum(
        _told(together) != _told(llm.generate([prompt], params)[0])
        for together, prompt, params in zip(crowd, prompts, each, strict=True)
    )
    figure = (
        f"{len(prompts)} requests, {sum(len(one.outputs) for one in crowd)} answers, {wrong} differ"
    )
    what = "64 at once, four methods mixed: tokens and logprobs equal each solo run"
    yield Line(what, f"{figure}; {drafted:.0f} tokens were drafted", wrong == 0 and drafted > 0)


def _told(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    return [
        (answer.token_ids, [value for value, _ in answer.logprobs]) for answer in output.outputs
    ]
