"""`make accept NAME=decoding`: every line that the decoding methods must show.

    python bench/accept/decoding.py [--only memory samples draft prefix]

Speeds are of the engine alone, in this process, in pairs: one way, the other way, again and again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import harness
from drafts import pair
from harness import DATA, Line, NotRun

from pageturner import LLM
from pageturner.lab.traffic.traffic_files import read_workload
from pageturner.params import SamplingParams
from pageturner.request import Request

ROUNDS = 5
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)


def _text(name: str) -> str:
    path = DATA / "text" / name
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    return path.read_text()


def _run(llm: LLM, requests: list[Request]) -> tuple[float, float, int]:
    """Seconds, the most KV reserved at any moment (tokens), and tokens generated."""
    engine, most, tokens, seconds = llm.built.engine, 0.0, 0, 0.0
    for request in requests:
        refused = engine.submit(request)
        assert not refused, refused
    while engine.has_work:
        begin = time.perf_counter()
        events = engine.step()
        seconds += time.perf_counter() - begin
        tokens += sum(len(event.tokens) for event in events)
        most = max(most, engine.scheduler.stats()["kv_reserved"])
    return seconds, most, tokens


def _choices(
    first_id: int, prompt: tuple[int, ...], params: SamplingParams, n: int
) -> list[Request]:
    """n requests for choices of one prompt, which share its blocks."""
    return [
        Request(first_id + i, prompt, params, index=i, parent=first_id if i else None)
        for i in range(n)
    ]


def _separate(
    first_id: int, prompt: tuple[int, ...], params: SamplingParams, n: int
) -> list[Request]:
    return [Request(first_id + i, prompt, params, index=i) for i in range(n)]


def _pairs(
    one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS
) -> list[float]:
    """How many times as long `other` takes, pair by pair."""
    ratios = []
    for _ in range(rounds):
        mine = one()
        ratios.append(other() / mine)
    return ratios


def _prompts(llm: LLM, count: int, length: int) -> list[tuple[int, ...]]:
    ids = llm.tokenizer.encode(
        _text("en_sherlock_holmes.txt"), add_special=False, parse_special=False
    )
    return [tuple(ids[i * length : (i + 1) * length]) for i in range(count)]


def _beams(llm: LLM, prompts: list[tuple[int, ...]]) -> Line:
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
    llm.beam_search(prompts, 4, SamplingParams(max_tokens=128, ignore_eos=True))
    figure = (
        f"{1 - shared / apart:.1%} less: at most {shared:,} tokens reserved, {apart:,} unshared"
    )
    return Line("beams of 4: at least 55 % less KV than unshared", figure, shared <= 0.45 * apart)


def memory() -> Iterator[Line]:
    """Four samples of prompts of 512 tokens, 128 tokens each."""
    shared, apart = LLM("smollm2"), LLM("smollm2", enable_prefix_caching=False)
    params = replace(GREEDY, temperature=1.0, max_tokens=128)
    prompts = _prompts(shared, 8, 512)
    ids = iter(range(1, 10**6, 4))
    mine = [r for prompt in prompts for r in _choices(next(ids), prompt, params, 4)]
    theirs = [r for prompt in prompts for r in _separate(next(ids), prompt, params, 4)]
    _, with_sharing, _ = _run(shared, mine)
    _, without, _ = _run(apart, theirs)
    figure = f"{1 - with_sharing / without:.1%} less: at most {with_sharing:,.0f} tokens reserved, {without:,.0f}"
    yield Line("n = 4: at least 55 % less KV than unshared", figure, with_sharing <= 0.45 * without)
    yield _beams(LLM("smollm2"), prompts)


def samples() -> Iterator[Line]:
    """n = 4 beside four requests with the cache off."""
    shared, apart = LLM("smollm2"), LLM("smollm2", enable_prefix_caching=False)
    params = replace(GREEDY, temperature=1.0, max_tokens=128)
    prompts = _prompts(shared, 2 * ROUNDS + 2, 512)
    numbers = iter(range(1, 10**6, 4))
    fresh = iter(prompts)

    def time_of(llm: LLM, make: Callable[..., list[Request]]) -> float:
        return _run(llm, make(next(numbers), next(fresh), params, 4))[0]

    time_of(shared, _choices), time_of(apart, _separate)
    ratios = _pairs(lambda: time_of(shared, _choices), lambda: time_of(apart, _separate))
    figure = f"{statistics.median(ratios):.2f}x ({len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f})"
    yield Line("n = 4 at least 2x four requests, cache off", figure, statistics.median(ratios) >= 2)


def prefix() -> Iterator[Line]:
    """Workload `prefix` with the cache and without."""
    path = DATA / "workloads" / "prefix.jsonl"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    jobs = read_workload(path)
    settings = ({}, {"enable_prefix_caching": False})
    numbers = iter(range(1, 10**6))

    def time_of(**options: Any) -> float:
        llm = LLM("smollm2", speculation="off", **options)
        encode = llm.tokenizer.encode
        prompts = [tuple(encode(job.text, add_special=True, parse_special=False)) for job in jobs]
        _run(llm, [Request(next(numbers), (5, 6, 7), replace(GREEDY, max_tokens=4))])
        requests = [
            Request(next(numbers), prompt, replace(GREEDY, max_tokens=job.max_tokens))
            for prompt, job in zip(prompts, jobs, strict=True)
        ]
        return _run(llm, requests)[0]

    ratios = _pairs(lambda: time_of(**settings[0]), lambda: time_of(**settings[1]))
    figure = f"{statistics.median(ratios):.2f}x ({len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f})"
    yield Line(
        "prefix: at least 4x the same run with the cache off",
        figure,
        statistics.median(ratios) >= 4,
    )


if __name__ == "__main__":
    checks = {
        "memory": memory,
        "samples": samples,
        "draft": pair,
        "prefix": prefix,
    }
    sys.exit(harness.run("decoding", checks))
