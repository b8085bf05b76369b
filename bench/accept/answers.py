"""Our answers beside recorded ones of Transformers in fp32; the path as served beside our own fp32.

Owns the comparison and its bounds. The recordings are made by tests/tools/record_smollm2.py and
record_real_models.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import DATA, ROOT, Line, NotRun

sys.path.insert(0, str(ROOT / "bench"))
import quality
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.params import SamplingParams
from pageturner.progress import Progress
from pageturner.request import Request

GOLDENS = ROOT / "tests" / "goldens"
NEAR_TIE = 1e-3  # top-two logits of the reference closer than this: either token is right
LOGPROBS = 2e-3  # largest difference of the logprobs of equal tokens


def greedy(model: str, recording: Path, allowed: int) -> Line:
    """All recorded prompts in one crowd, fp32: at most `allowed` may leave the recorded way, at near-ties."""
    golden = np.load(recording)
    prompts = [
        golden["prompt_ids"][a:b].tolist() for a, b in itertools.pairwise(golden["prompt_starts"])
    ]
    length = golden["tokens"].shape[1]
    got = _decode(model, prompts, length)
    differing, bad, worst = 0, 0, 0.0
    for number, answer in enumerate(got):
        wrong = np.flatnonzero(np.array([token for token, _ in answer]) != golden["tokens"][number])
        upto = int(wrong[0]) if len(wrong) else length
        values = np.array([value for _, value in answer][:upto])
        if upto:
            worst = max(worst, float(np.abs(values - golden["logprobs"][number][:upto]).max()))
        differing += bool(len(wrong))
        bad += bool(len(wrong)) and bool(golden["gaps"][number][upto] >= NEAR_TIE)
    figure = (
        f"{len(prompts)} prompts x {length} tokens, {differing} differ, {bad} not at a near-tie"
    )
    what = f"greedy fp32 equals Transformers (<= {allowed} differ, at near-ties, logprobs within {LOGPROBS})"
    passed = differing <= allowed and bad == 0 and worst <= LOGPROBS
    return Line(what, f"{figure}; logprobs within {worst:.1e}", passed)


def _decode(model: str, prompts: list[list[int]], length: int) -> list[list[tuple[int, float]]]:
    """(token, logprob) of each prompt's greedy answer, by the engine."""
    built = make_engine(EngineConfig(model=model, dtype="float32", kv_cache_dtype="float32"))
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(prompts):
        built.engine.submit(Request(number, tuple(prompt), params))
    got: list[list[tuple[int, float]]] = [[] for _ in prompts]
    with Progress("greedy", len(prompts) * length) as line:
        while built.engine.scheduler.has_work:
            for event in built.engine.step():
                got[event.id] += zip(
                    event.tokens, (value for value, _ in event.logprobs), strict=True
                )
            line.update(sum(map(len, got)))
    return got


def served(model: Path, tokens: int) -> Iterator[Line]:
    """Perplexity, KL and same top token of the path as served against fp32 weights and KV, English prose."""
    text = DATA / "text" / "en_time_machine.txt"
    if not text.exists():
        raise NotRun(f"{text} is absent")
    windows = quality.read_windows(model, text, tokens)
    exact, ours = (quality.logits_of(model, way, windows) for way in (quality.EXACT, {}))
    loss = quality.loss(exact, ours, windows)
    what = f"as shipped against fp32, {loss.tokens} tokens:"
    change = f"{loss.base:.3f} -> {loss.perplexity:.3f} ({loss.change:+.2%})"
    yield Line(f"{what} perplexity within 1.5 %", change, abs(loss.change) <= 0.015)
    yield Line(f"{what} KL < 0.006", f"{loss.kl:.5f}", loss.kl < 0.006)
    yield Line(f"{what} same top token >= 97 %", f"{loss.same:.2%}", loss.same >= 0.97)
