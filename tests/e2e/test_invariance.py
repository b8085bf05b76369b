"""Batching never changes an answer: the same bits alone and in a crowd, under every configuration.

Tokens and logprobs are compared exactly. KV storage is poisoned with NaN, so a read of a stale or foreign
slot shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pageturner.executor.draft import Costs
from pageturner.executor.draft_model import DraftModel
from pageturner.executor.kv_memory import KVLayout, KVSizes
from pageturner.kernels.cpu import native, native_module
from pageturner.models.lora import read_folder
from pageturner.params import SamplingParams
from pageturner.policies.suffix_drafts import SuffixDrafts
from pageturner.request import Request, Resume
from pageturner.scheduler.types import Item, Output, Plan, Result
from pageturner.text.structured_outputs import StructuredOutputsParams
from support.adapters import ALL, TOP, write_adapter
from support.engines import GOLDENS, Answer, Model, Setup, answers

usable, why = native_module.supported()
pytestmark = pytest.mark.skipif(not usable, reason=f"native kernels: {why}")

POLICIES = (
    "chunked",
    "adaptive_chunk",
    "prefill_first",
    "served_ratio",
    "orca",
    "window",
    "static",
)
ORDERS = (
    "fcfs",
    "priority",
    "sjf",
    "deadline",
    "adaptive",
    "fair",
    "prefix",
    "programs",
    "uniboost",
)
NEVER_PREEMPTING = ("orca", "window", "static")
BUDGETS = (16, 64, 512, 0)
BLOCKS = (1, 16, 64)
CACHE = (True, False)
MEMORY = ("plenty", "scarce")  # so few blocks that sequences are preempted
KV_TOKENS = {"plenty": {1: 16384, 16: 16384, 64: 16384}, "scarce": {1: 384, 16: 512, 64: 320}}
THREADS = (1, 2)
FREE = Costs(step=0.0, rows=1e9)  # drafts always pay
PRODUCT = list(itertools.product(POLICIES, ORDERS, BUDGETS, BLOCKS, CACHE, MEMORY, THREADS))


def pairwise(product: list[tuple], seed: int = 0) -> list[tuple]:
    """A small subset in which every pair of values of two factors occurs, as far as `_pairs` wants it (greedy
    cover)."""
    dice = random.Random(seed)
    pairs = set().union(*map(_pairs, product))
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
    """All but policy with order: those are many, and test_each_policy_with_each_order has them."""
    return {
        (i, row[i], j, row[j])
        for i, j in itertools.combinations(range(len(row)), 2)
        if (i, j) != (0, 1)
    }


# what reshapes logits by the tokens so far, and what is told of the prompt: every eighth request has one
ENDS: dict[str, Any] = {
    "min_tokens": 0,
    "stop_ids": (2,),
}  # a grammar ends with the model's end of sequence
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    {"logit_bias": {5: 4.0, 17: -100.0, 60: 2.5}},
    {"bad_words_token_ids": (*((token,) for token in range(20, 120)), (130, 131), (7, 8, 9))},
    {"allowed_token_ids": tuple(range(3, 300, 4))},
    {"prompt_logprobs": 3},
    {
        "prompt_logprobs": 0,
        "repetition_penalty": 0.8,
        "frequency_penalty": -0.5,
        "logit_bias": {40: 1.0},
    },
    {"structured_outputs": StructuredOutputsParams(regex=r"([a-z ]{3,9}, ?)*\d+!?"), **ENDS},
    {
        "structured_outputs": StructuredOutputsParams(json_object=True),
        "presence_penalty": 0.5,
        **ENDS,
    },
)


def crowd(count: int = 65, vocab: int = 300, longest: int = 60, output: int = 20) -> list[Request]:
    """Greedy and sampled requests with all features; a third shares prefixes; some want logprobs."""
    dice = random.Random(5)
    shared = tuple(dice.randrange(vocab) for _ in range(40))
    requests = []
    for number in range(1, count + 1):
        # outlives what was found free at its admission: preemption needs that
        long = number % 3 == 1
        own = tuple(dice.randrange(vocab) for _ in range(dice.randint(1, longest)))
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 0.7, 1.3]),
            top_k=dice.choice([0, 5, 40]),
            top_p=dice.choice([1.0, 0.9]),
            min_p=dice.choice([0.0, 0.05]),
            max_tokens=6 * output if long else dice.randint(2, output),
            min_tokens=dice.choice([0, 3]),
            stop_ids=() if long else (7, 11),
            logprobs=dice.choice([None, 0, 3]),
            seed=number,
        )
        params = replace(params, **FEATURES[number % len(FEATURES)])
        start = None if params.prompt_logprobs is None else 0
        prompt = (shared + own) if number % 3 == 0 else own
        request = Request(number, prompt, params, priority=-number % 3, logits_from=start)
        if number % 9 == 2:
            request = searching(request)
            more = replace(request, id=300 + number, index=1, parent=number)
            requests.append(more)  # before the other: whose request comes first must not matter
        requests.append(request)
        if number % 9 == 5:  # more choices of its prompt, which share its blocks
            params = replace(params, temperature=1.0)
            for index in (1, 2):
                more = replace(
                    request, id=100 * index + number, index=index, parent=number, params=params
                )
                requests.append(more)
    return requests


def searching(request: Request) -> Request:
    """The request as a beam search: short, since memory must hold all beams at once."""
    params = replace(
        request.params,
        beam_width=3,
        length_penalty=(0.6, 1.0, 1.4)[request.id % 3],
        early_stopping=(False, True, "never")[request.id // 3 % 3],
        max_tokens=min(request.params.max_tokens or 20, 20),
        prompt_logprobs=None,
    )
    return replace(request, prompt=request.prompt[-30:], params=params, logits_from=None)


PLAIN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop_ids",
    "logprobs",
    "seed",
)


class Family:
    """One model at one and two threads, and the truth: every request answered alone."""

    def __init__(self, name: str, dtype: str = "auto", kv_dtype: str = "float16") -> None:
        self.models = {
            threads: Model(
                GOLDENS / name, native.NativeOps(threads=threads), dtype=dtype, kv_dtype=kv_dtype
            )
            for threads in THREADS
        }
        self.requests = crowd()
        self.truth: dict[int, Answer] = {}
        for request in self.requests:
            self.truth |= answers(self.models[1].engine(Setup()), [request])

    def check(
        self,
        policy: str,
        order: str,
        budget: int,
        block: int,
        cache: bool,
        memory: str,
        threads: int,
    ) -> None:
        setup = Setup(policy, budget, block, cache, KV_TOKENS[memory][block], order=order)
        engine = self.models[threads].engine(setup)
        assert answers(engine, self.requests) == self.truth, setup
        stats = engine.scheduler.stats()
        if memory == "scarce" and policy not in NEVER_PREEMPTING:
            assert stats["preemptions"] > 0, "this configuration was meant to preempt"
        assert stats["blocks_used"] == 0


FAMILIES = {
    "llama_quantised": ("tiny_llama_quant.gguf", "auto", "float16"),
    "llama_fp32": ("tiny_llama.gguf", "auto", "float32"),
    "qwen3": ("tiny_qwen3.gguf", "auto", "float16"),
}
MAX_MIXED = "llama_quantised"  # two quantised kinds and fp32 in one file


@pytest.fixture(scope="module")
def quantised() -> Family:
    return Family(*FAMILIES[MAX_MIXED])


@pytest.mark.slow
def test_the_truth_is_worth_comparing(quantised: Family) -> None:
    """Answers differ from each other and are not all cut at once, else equality would say nothing."""
    assert len({answer.tokens for answer in quantised.truth.values()}) > 50
    assert {answer.finish for answer in quantised.truth.values()} == {"stop", "length"}
    assert sum(len(answer.prompt_logprobs) for answer in quantised.truth.values()) > 300


def test_every_feature_changes_an_answer(quantised: Family) -> None:
    """Else its place in the crowd would show nothing."""
    engine = quantised.models[1].engine(Setup())
    changed = set()
    for request in quantised.requests:
        simple = request.index == 0 and not request.params.beam_width
        features = FEATURES[request.id % len(FEATURES)] if simple else {}
        plain = replace(SamplingParams(), **{name: getattr(request.params, name) for name in PLAIN})
        if features:
            answer = answers(engine, [replace(request, params=plain, logits_from=None)])[request.id]
            if answer.tokens != quantised.truth[request.id].tokens:
                changed.add(request.id % len(FEATURES))
    assert changed == {1, 2, 3, 4, 5, 7, 8, 9}


def test_resuming_in_the_middle(quantised: Family) -> None:
    """Another engine goes on from the tokens alone, in the middle of an answer or of a prompt."""
    requests, expected = [], {}
    for request in quantised.requests:
        whole = quantised.truth[request.id]
        half = len(whole.tokens) // 2 if request.id % 2 and not request.params.beam_width else 0
        told = len(whole.prompt_logprobs) if half else len(whole.prompt_logprobs) // 2
        resume = (Resume(0, whole.tokens[:half]),) if half else ()
        start = None if request.logits_from is None else told
        requests.append(replace(request, resume=resume, logits_from=start))
        rest = (
            whole.tokens[half:],
            whole.logprobs[half:],
            whole.finish,
            whole.prompt_logprobs[told:],
        )
        expected[request.id] = Answer(*rest)
    assert answers(quantised.models[2].engine(Setup(token_budget=48)), requests) == expected


class WildGuesses:
    """Drafts that are right now and then: the truth of another engine, spoiled in places."""

    nbytes = 0
    watch = None

    def __init__(self, truth: dict[int, Answer]) -> None:
        self._truth = truth

    def propose(self, items: Sequence[Item], outputs: Sequence[Output]) -> None:
        for item, output in zip(items, outputs, strict=True):
            if not output.tokens:
                continue
            seq = item.sequence
            done = seq.generated + len(output.tokens)
            dice = random.Random(seq.request.id * 1000 + done)
            rest = self._truth[seq.request.id].tokens[done : done + dice.randrange(8)]
            output.draft = [t if dice.random() < 0.8 else dice.randrange(300) for t in rest]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["scarce", pytest.param("plenty", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "block", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 64))]
)
def test_drafts_change_nothing(quantised: Family, block: int, memory: str) -> None:
    model, tokens = quantised.models[2], KV_TOKENS[memory][block]

    def smaller() -> DraftModel:
        """Not smaller at all, but none the wiser: it does not know penalties, biases and grammars."""
        return DraftModel(
            model.decoder, model.ops, KVLayout(KVSizes(tokens // block), block, "float16"), FREE
        )

    for drafter in (
        SuffixDrafts,
        partial(SuffixDrafts, own=True),
        lambda: WildGuesses(quantised.truth),
        smaller,
    ):
        setup = Setup(block_size=block, kv_tokens=tokens, drafter=drafter)
        engine = model.engine(setup)
        assert answers(engine, quantised.requests) == quantised.truth, setup
        stats = engine.scheduler.stats()
        assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
        assert stats["steps"] < stats["generated_tokens"]


@pytest.mark.slow
def test_steps_that_raise_behind_their_work_change_nothing(quantised: Family) -> None:
    """What was written of a step that is run again in halves is written again, what was copied is not."""
    setup = Setup(block_size=16, kv_tokens=KV_TOKENS["scarce"][16], token_budget=48)
    engine = quantised.models[2].engine(setup)
    run, dice, raised = engine.executor.run, random.Random(9), [0, 0]

    def unlucky(plan: Plan) -> Result:
        result = run(plan)
        if len(plan.items) > 1 and dice.random() < 0.4:
            raised[any(plan.copies)] += 1
            raise MemoryError
        return result

    engine.executor.run = unlucky  # type: ignore[method-assign]
    assert answers(engine, quantised.requests) == quantised.truth
    assert min(raised) > 10, "with copies and without"


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))]
)
def test_any_two_settings(quantised: Family, part: int) -> None:
    for row in pairwise(PRODUCT)[part::6]:
        quantised.check(*row)


def test_joining_a_running_crowd(quantised: Family) -> None:
    engine = quantised.models[2].engine(Setup(token_budget=64))
    assert answers(engine, quantised.requests, spread=2) == quantised.truth


class Adapted(Family):
    """A crowd in which three of four requests have an adapter, of three that do different things."""

    def __init__(self, folder: Path) -> None:
        super().__init__(*FAMILIES[MAX_MIXED])
        spec = self.models[1].decoder.spec
        fields = {"a": (*ALL, *TOP), "b": ("q", "v"), "c": ("o", "gate", "down")}
        folders = {
            name: write_adapter(
                folder / name, spec, each, 5 + seed, seed, ("F32", "BF16", "F16")[seed], 1.0
            )
            for seed, (name, each) in enumerate(fields.items())
        }
        digests = ("", *(read_folder(one).digest for one in folders.values()))
        self.requests = [
            replace(one, adapter=digests[(one.parent or one.id) % 4])
            for one in crowd(25)
            if one.parent is None or one.id >= 100
        ]
        plain, self.truth = self.truth, {}
        for model in self.models.values():
            model.adapters = folders
        for request in self.requests:
            self.truth |= answers(self.models[1].engine(Setup()), [request])
        changed = [
            one.id for one in self.requests if self.truth[one.id].tokens != plain[one.id].tokens
        ]
        assert len(changed) > len(self.requests) / 2


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapters"))


@pytest.mark.slow
def test_any_mix_of_adapters(adapted: Adapted) -> None:
    for row in pairwise(PRODUCT)[::12]:
        adapted.check(*row[:5], "plenty", row[6])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_two_settings_with_adapters(adapted: Adapted) -> None:
    for row in pairwise(PRODUCT):
        adapted.check(*row[:5], "plenty", row[6])


@pytest.mark.parametrize("most", [1, 2])
def test_adapters_that_come_and_go(adapted: Adapted, most: int) -> None:
    """With fewer in memory than are asked for, requests wait in turns."""
    engine = adapted.models[2].engine(Setup(token_budget=48, adapters=most))
    assert answers(engine, adapted.requests, spread=2) == adapted.truth
    assert engine.adapters.stats()["adapter_evictions"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != MAX_MIXED])
def test_any_two_settings_of_other_models(name: str) -> None:
    family = Family(*FAMILIES[name])
    for row in pairwise(PRODUCT):
        family.check(*row)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_policy_with_each_order(quantised: Family) -> None:
    for policy, order in itertools.product(POLICIES, ORDERS):
        quantised.check(policy, order, 64, 16, True, "scarce", 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_full_product(quantised: Family, policy: str) -> None:
    for row in PRODUCT:
        if row[:2] == (policy, "fcfs"):
            quantised.check(*row)
