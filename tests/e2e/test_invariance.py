"""Batching never changes an answer: the same bits alone and in a crowd, under every configuration.

Tokens and logprobs are compared exactly. KV storage is poisoned with NaN, so a read of a stale or foreign
slot shows.
"""

from __future__ import annotations

import itertools
import random

import pytest

from pageturner.core.types import Request, SamplingParams
from pageturner.kernels import native
from support.engines import GOLDENS, Answer, Model, Setup, answers

usable, why = native.supported()
pytestmark = pytest.mark.skipif(not usable, reason=f"native kernels: {why}")

POLICIES = ("chunked", "prefill_first", "static")
BUDGETS = (16, 64, 512, 0)
BLOCKS = (1, 16, 64)
CACHE = (True, False)
MEMORY = (16384, 1280)  # tokens of KV: plenty, and so few that sequences are preempted
THREADS = (1, 2)
PRODUCT = list(itertools.product(POLICIES, BUDGETS, BLOCKS, CACHE, MEMORY, THREADS))


def pairwise(product: list[tuple], seed: int = 0) -> list[tuple]:
    """A small subset in which every pair of values of any two factors occurs (greedy cover)."""
    dice = random.Random(seed)
    pairs = {(i, row[i], j, row[j]) for row in product for i, j in itertools.combinations(range(len(row)), 2)}
    chosen = []
    while pairs:
        sample = dice.sample(product, min(60, len(product)))
        best = max(sample, key=lambda row: len(pairs & _pairs(row)))
        if not pairs & _pairs(best):
            continue
        chosen.append(best)
        pairs -= _pairs(best)
    return chosen


def _pairs(row: tuple) -> set:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def crowd(count: int = 65, vocab: int = 300, longest: int = 60, output: int = 20) -> list[Request]:
    """Greedy and sampled requests; a third shares prefixes; some want logprobs."""
    dice = random.Random(5)
    shared = tuple(dice.randrange(vocab) for _ in range(40))
    requests = []
    for number in range(1, count + 1):
        own = tuple(dice.randrange(vocab) for _ in range(dice.randint(1, longest)))
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 0.7, 1.3]),
            top_k=dice.choice([0, 5, 40]),
            top_p=dice.choice([1.0, 0.9]),
            min_p=dice.choice([0.0, 0.05]),
            max_tokens=dice.randint(2, output),
            min_tokens=dice.choice([0, 3]),
            stop_ids=(7, 11),
            logprobs=dice.choice([None, 0, 3]),
            seed=number,
        )
        requests.append(Request(number, (shared + own) if number % 3 == 0 else own, params))
    return requests


class Family:
    """One model at one and two threads, and the truth: every request answered alone."""

    def __init__(self, name: str, dtype: str = "auto", kv_dtype: str = "float16") -> None:
        self.models = {
            threads: Model(GOLDENS / name, native.NativeOps(threads=threads), dtype=dtype, kv_dtype=kv_dtype)
            for threads in THREADS
        }
        self.requests = crowd()
        self.truth: dict[int, Answer] = {}
        for request in self.requests:
            self.truth |= answers(self.models[1].engine(Setup()), [request])

    def check(self, policy: str, budget: int, block: int, cache: bool, memory: int, threads: int) -> None:
        setup = Setup(policy, budget, block, cache, memory)
        engine = self.models[threads].engine(setup)
        assert answers(engine, self.requests) == self.truth, setup
        stats = engine.scheduler.stats()
        if memory == min(MEMORY) and policy != "static":
            assert stats["preemptions"] > 0, "this configuration was meant to preempt"
        assert stats["blocks_used"] == 0


FAMILIES = {
    "llama_fp32": ("tiny_llama.gguf", "auto", "float32"),
    "llama_quantised": ("tiny_llama_quant.gguf", "auto", "float16"),
    "qwen3": ("tiny_qwen3.gguf", "auto", "float16"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(*FAMILIES[request.param])


def test_the_truth_is_worth_comparing(family: Family) -> None:
    """Answers differ from each other and are not all cut at once, else equality would say nothing."""
    assert len({answer.tokens for answer in family.truth.values()}) > 50
    assert {answer.finish for answer in family.truth.values()} == {"stop", "length"}


def test_any_two_settings(family: Family) -> None:
    for row in pairwise(PRODUCT):
        family.check(*row)


def test_joining_a_running_crowd(family: Family) -> None:
    engine = family.models[2].engine(Setup(token_budget=64))
    assert answers(engine, family.requests, spread=2) == family.truth


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_full_product(family: Family) -> None:
    for row in PRODUCT:
        family.check(*row)
