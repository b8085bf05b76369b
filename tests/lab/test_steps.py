"""bench/steps.py on a tiny model: sizes as asked, taken apart it computes the same, floors by the limits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.peak import READ, Peak
from pageturner.params import SamplingParams
from pageturner.request import Request

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import steps

MODEL = Path(__file__).parents[1] / "goldens" / "tiny_llama_quant.gguf"
pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEPS", 4)
    monkeypatch.setattr(steps, "ROUNDS", 1)


def arguments(**changed: object) -> argparse.Namespace:
    given = {"model": str(MODEL), "threads": 1, "prefill": [8], "batch": [1, 3], "context": 12}
    return argparse.Namespace(**(given | {"sampled": True, "operators": True} | changed))


def test_sizes_are_as_asked_and_every_operator_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Peak("avx2", 1, 100.0, 50.0, dict.fromkeys(READ, 10.0), 5.0)
    monkeypatch.setattr(steps.peak, "measure", lambda isa, threads, seconds: limits)
    figures = steps.measure(arguments())
    assert [run["what"] for run in figures["served"]] == [
        "prefill 8",
        "decode 1 x 12",
        "decode 3 x 12",
    ]
    assert [run["steps"] for run in figures["served"]] == [1, 4, 4]
    assert figures["read_bytes"] <= figures["packed_bytes"]
    for run in figures["apart"]:
        assert {
            "q",
            "k",
            "v",
            "o",
            "gate",
            "up",
            "down",
            "head",
            "attention",
            "norm",
            "sample",
        } <= run["operators"].keys()
        assert run["operators"].keys() == run["floors_us"].keys()
        _counts_like(run, figures["read_bytes"])
    text = steps.render(figures)
    assert "the step as served" in text
    assert "| attention |" in text


def _counts_like(run: dict[str, Any], read: int) -> None:
    """Operator by operator the same operations and bytes as the engine counts for the whole step."""
    needs = steps.engine(str(MODEL), 1, lambda ops: ops).needs
    rows = {"prefill 8": 8, "decode 1 x 12": 1, "decode 3 x 12": 3}[run["what"]]
    logits, operators = 1 if rows == 8 else rows, run["operators"]
    products = [operators[name] for name in ("q", "k", "v", "o", "gate", "up", "down", "head")]
    terms = steps.TERMS[NativeOps(1).default_activation_bits("Q8_0")]  # as all of that layer
    # apart, all rows get a q and an o in the last layer
    beside = terms * 2 * (rows - logits) * 2 * 64 * 64
    assert (
        sum(one["integer"] for one in products) - beside
        == needs.int8 * rows + needs.ending_int8 * logits
    )
    assert needs.weight_bytes(rows, logits) == read
    pairs = operators["attention"]["floats"] / needs.pair
    assert pairs == 8 * 9 / 2 if rows == 8 else rows * 10 < pairs < rows * 15


def test_taken_apart_it_answers_the_same() -> None:
    answers = []
    for wrap in (lambda ops: ops, lambda ops: steps.Apart(ops, steps.Book())):
        built = steps.engine(str(MODEL), 1, wrap)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        built.engine.submit(Request(1, (5, 6, 7, 8, 9), params))
        tokens: list[int] = []
        while built.engine.scheduler.has_work:
            tokens += [token for event in built.engine.step() for token in event.tokens]
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


def test_a_floor_is_what_binds() -> None:
    limits = Peak("x", 1, 100.0, 50.0, {"256K": 40.0, "8M": 20.0, "32M": 10.0, "256M": 5.0}, 5.0)
    costs = {
        "q": {
            "integer": 1e6,
            "floats": 0.0,
            "nbytes": 1e6,
        },  # 10 us of products, 200 of weights
        "o": {"integer": 1e8, "floats": 0.0, "nbytes": 1e6},
        "norm": {"integer": 0.0, "floats": 0.0, "nbytes": 4e4},
        "attention": {"integer": 0.0, "floats": 5e6, "nbytes": 0.0},
    }
    found = steps.floors(costs, limits, weights=1e9)
    assert found == pytest.approx({"q": 200.0, "o": 1000.0, "norm": 1.0, "attention": 100.0})


def test_tables_go_between_the_marks_of_the_page() -> None:
    begin, end = steps.MARKS
    assert steps.inserted(f"a\n{begin}\nold\n{end}\nb", "new") == f"a\n{begin}\nnew\n{end}\nb"
    with pytest.raises(ValueError, match="unpack"):
        steps.inserted("a page without marks", "new")
    page = Path(__file__).parents[2] / "bench" / "STEPS.md"
    assert "| the step as served |" in page.read_text().split(begin)[1].split(end)[0]


def test_a_step_of_another_size_is_an_error() -> None:
    built = SimpleNamespace(
        vocab_size=300,
        engine=SimpleNamespace(
            submit=lambda request: None,
            step=lambda: [
                SimpleNamespace(id=1000, tokens=(1,)),
                SimpleNamespace(id=1001, tokens=()),
            ],
        ),
    )
    with pytest.raises(RuntimeError, match="1 sequences"):
        steps.decode(built, 1, 12, SamplingParams(), broken_after(built, 2))


def broken_after(built: SimpleNamespace, count: int) -> steps.Book:
    """The engine of `built` says nothing any more after some steps."""
    step, left = built.engine.step, iter(range(count))
    built.engine.step = lambda: step() if next(left, None) is not None else []
    return steps.Book()
