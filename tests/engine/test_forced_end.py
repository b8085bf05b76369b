"""An answer that ends where a trace says: only what chooses tokens knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pageturner import LLM, SamplingParams
from pageturner.engine.fake import FakeExecutor
from pageturner.request import Request
from pageturner.scheduler.types import Item, Plan, Sequence
from support.logits import edited

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "tiny_llama.gguf"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(GOLDEN), backend="reference")


@pytest.mark.parametrize("end", [1, 2, 7])
def test_the_answer_ends_there_and_not_earlier(llm: LLM, end: int) -> None:
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=20, forced_end=end, repetition_penalty=1.3)
        for t in (0.0, 1.0)
    ]
    for output in llm.generate(["the old house", "a"], params):
        answer = output.outputs[0]
        assert len(answer.token_ids) == end
        assert answer.token_ids[-1] == llm.tokenizer.eos_ids[0]
        assert answer.finish_reason == "stop"


def test_max_tokens_comes_first(llm: LLM) -> None:
    answer = llm.generate("a", SamplingParams(max_tokens=3, forced_end=9))[0].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (3, "length")


def test_the_tokens_before_it_are_the_models_own(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    free = llm.generate("the old house", params)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=9, forced_end=7)
    assert not set(free) & set(llm.tokenizer.eos_ids)
    assert llm.generate("the old house", params)[0].outputs[0].token_ids[:6] == free


def test_a_row_allows_no_end_before_and_nothing_else_there() -> None:
    params = SamplingParams(stop_ids=(2, 5), forced_end=2)
    early = Sequence(Request(1, (7,), params), tokens=[7])
    there = Sequence(Request(2, (7,), params), tokens=[7, 1])
    logits = np.arange(16, dtype=np.float32).reshape(2, 8)
    found = edited(logits, [early, there])
    assert np.flatnonzero(np.isneginf(found[0])).tolist() == [2, 5]
    assert np.flatnonzero(np.isfinite(found[1])).tolist() == [2]


def test_the_fake_executor_obeys_too() -> None:
    params = SamplingParams(stop_ids=tuple(range(8)), forced_end=2)
    sequence = Sequence(Request(1, (3, 4), params), tokens=[3, 4])
    run = FakeExecutor(9).run
    sequence.tokens += run(Plan([Item(sequence, 2, sequence.computed)])).outputs[0].tokens
    assert sequence.tokens[-1] == 8
    sequence.computed = 2
    assert run(Plan([Item(sequence, 1, sequence.computed)])).outputs[0].tokens == [0]


def test_scheduler_and_policies_cannot_see_it() -> None:
    for room in ("scheduler", "policies"):
        for path in (ROOT / "src" / "pageturner" / room).glob("*.py"):
            assert "forced_end" not in path.read_text(), path
