"""The predictor of lengths: what it learns, what it cannot be told, how true it is on recorded traffic."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from pageturner.params import SamplingParams
from pageturner.policies.length_predictor import (
    BUCKETS,
    OWN,
    PRIOR_MEDIAN,
    SHARED,
    TENANTS,
    LengthPredictor,
    quantile,
)
from pageturner.policies.step_time import StepTimeModel
from pageturner.request import Request
from pageturner.scheduler.types import Sequence

TRACES = (
    Path(os.environ.get("PAGETURNER_DATA") or Path(__file__).parents[3] / "shared" / "data")
    / "traces"
)
NAMES = (
    "agentic_swebench",
    "arxiv_summarization_lengths",
    "azure2023_code",
    "azure2023_conv",
    "mooncake_conversation",
    "mooncake_synthetic",
    "servegen_deepseek-r1_1h",
)
CAP = 100_000  # max_tokens of every request of a trace: nobody is told the length


def sequence(
    id: int, answer: int = 0, *, prompt: int = 20, most: int = 4000, **fields: Any
) -> Sequence:
    """With an answer of so many tokens; no two prompts have tokens in common."""
    tokens = tuple(range(id * 10_000, id * 10_000 + prompt))
    request = Request(id, tokens, SamplingParams(max_tokens=most), **fields)
    return Sequence(request, tokens=[*tokens, *(7 for _ in range(answer))], limit=prompt + most)


def taught(answers: list[int], **fields: Any) -> LengthPredictor:
    predictor = LengthPredictor()
    for id, answer in enumerate(answers):
        predictor.learn(sequence(id, answer, **fields))
    return predictor


def test_the_prior_is_sane() -> None:
    predictor = LengthPredictor()
    assert predictor.length(sequence(0)) == pytest.approx(PRIOR_MEDIAN, rel=0.1)
    assert predictor.length(sequence(0), 0.9) > 3 * PRIOR_MEDIAN
    assert predictor.length(sequence(0, most=50), 0.9) == 50, "never more than it may have"


def test_quantiles_of_known_shares() -> None:
    shares = [0.0] * BUCKETS
    shares[8], shares[16] = 0.5, 0.5  # 4 to 4.76, and 16 to 19.03
    assert quantile(shares, 0.25, 0) == pytest.approx(2 ** (8.5 / 4))
    assert quantile(shares, 0.75, 0) == pytest.approx(2 ** (16.5 / 4))
    assert quantile(shares, 0.5, 10) == pytest.approx(2 ** (16.5 / 4)), "nothing between 10 and 16"
    assert quantile(shares, 0.5, 10**9) > 1e5, "beyond all that is known"


def test_it_learns_quantiles() -> None:
    dice = random.Random(1)
    predictor = taught([dice.randint(200, 400) for _ in range(400)])
    assert predictor.length(sequence(9999), 0.1) == pytest.approx(220, rel=0.12)
    assert predictor.length(sequence(9999), 0.5) == pytest.approx(300, rel=0.12)
    assert predictor.length(sequence(9999), 0.9) == pytest.approx(380, rel=0.12)


def test_what_is_generated_counts() -> None:
    predictor = taught([10, 300] * 100)
    assert predictor.length(sequence(9999, 0), 0.4) < 20
    assert predictor.length(sequence(9999, 50), 0.4) == pytest.approx(300, rel=0.2)
    for generated in (1, 10, 299, 3000, 3999):
        assert predictor.length(sequence(9999, generated)) >= generated + 1


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"prompt": 20}, {"prompt": 500}),
        ({"prompt": 20}, {"prompt": 26}),
        ({"most": 64}, {"most": 4000}),
    ],
)
def test_it_tells_kinds_apart(short: dict[str, Any], long: dict[str, Any]) -> None:
    predictor = LengthPredictor()
    for id in range(0, 100, 2):
        predictor.learn(sequence(id, 8, **short))
        predictor.learn(sequence(id + 1, 600, **long))
    assert predictor.length(sequence(9998, **short)) < 20
    assert predictor.length(sequence(9999, **long)) > 400


@pytest.mark.parametrize("place", ["head", "tail"])
def test_it_knows_prompts_by_beginning_and_end(place: str) -> None:
    """Two tasks of one tenant, prompts of one length, told apart by template alone."""
    predictor = LengthPredictor()

    def task(id: int, kind: int, answer: int) -> Sequence:
        own, template = tuple(range(1000 * id, 1000 * id + 40)), (kind,) * 40
        prompt = template + own if place == "head" else own + template
        return Sequence(Request(id, prompt), tokens=[*prompt, *([7] * answer)], limit=4000)

    for id in range(0, 80, 2):
        predictor.learn(task(id, 1, 8))
        predictor.learn(task(id + 1, 2, 600))
    assert predictor.length(task(998, 1, 0)) < 20
    assert predictor.length(task(999, 2, 0)) > 400


def test_answers_cut_at_their_limit_count_for_longer_ones() -> None:
    cut = taught([16] * 50, most=16)
    assert cut.length(sequence(9999, most=4000)) > 100, "16 is not how long they would have been"
    assert cut.length(sequence(9999, most=16)) == 16
    assert cut.stats()["predicted"] == 0, "nobody knows whether it was right"


def test_it_follows_a_changing_load() -> None:
    predictor = taught([20] * 1000)
    for id in range(2000, 2110):
        predictor.learn(sequence(id, 800))
    assert predictor.length(sequence(9999)) == pytest.approx(800, rel=0.2)


def test_others_cannot_move_a_tenant() -> None:
    """Thousands of answers of another tenant, of the very same shape, leave a known tenant where it was."""
    predictor = taught([50] * 40, tenant="known")
    before = predictor.length(sequence(9999, tenant="known"))
    for id in range(10_000, 12_000):
        predictor.learn(sequence(id, 3000, tenant="liar"))
    after = predictor.length(sequence(9999, tenant="known"))
    assert after == pytest.approx(before, rel=0.1)


def test_memory_is_bounded() -> None:
    predictor = LengthPredictor()
    dice = random.Random(5)
    for id in range(3 * max(OWN, SHARED)):
        tenant = f"tenant {id}" if id % 2 else "one"
        predictor.learn(
            sequence(
                id, 5, prompt=dice.randint(1, 40), most=2 ** dice.randrange(3, 99), tenant=tenant
            )
        )
    assert len(predictor._tenants) == TENANTS
    assert [len(table) for table in predictor._tenants["one"]] == [OWN, OWN]
    assert len(predictor._shared) <= SHARED
    assert predictor.length(sequence(10**6, tenant="new")) < 20, "what all have in common is kept"


def test_it_reports_its_calibration() -> None:
    dice = random.Random(2)
    stats = taught([round(dice.lognormvariate(5, 0.8)) + 1 for _ in range(2000)]).stats()
    assert stats["predicted"] == 2000
    assert stats["predicted_below_50"] == pytest.approx(0.5, abs=0.04)
    assert stats["predicted_below_90"] == pytest.approx(0.9, abs=0.03)
    assert stats["predicted_log_error"] == pytest.approx(0.8 * math.sqrt(2 / math.pi), rel=0.06)


def replayed(name: str, most: int) -> tuple[dict[str, float], float]:
    """The report after the first rows of a trace, and the error of the constant that is best in hindsight."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(most), strict=False)]
    predictor = LengthPredictor()
    for id, row in enumerate(rows):
        first = (row.get("hash_ids") or [id])[0]
        prompt = (
            *(first,) * min(row["prompt_tokens"] - 1, 512),
            *(id,) * max(1, row["prompt_tokens"] - 512),
        )
        tenant = str(row.get("client_id", row.get("session_id", "")))
        request = Request(id, prompt, SamplingParams(max_tokens=CAP), tenant=tenant)
        tokens = [0] * (len(prompt) + row["output_tokens"])
        predictor.learn(Sequence(request, tokens=tokens, limit=len(prompt) + CAP))
    lengths = [row["output_tokens"] for row in rows]
    constant = median(lengths)
    return predictor.stats(), mean(abs(math.log(length / constant)) for length in lengths)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="recorded traces are not there")
def test_it_beats_the_constant_on_recorded_traffic() -> None:
    """Without knowing the future it is as good as the best constant in hindsight where prompts tell nothing,
    and better where they do; calibrated everywhere."""
    gains = {}
    for name in NAMES:
        stats, constant = replayed(name, 600)
        gains[name] = 1 - stats["predicted_log_error"] / constant
        assert stats["predicted_below_50"] == pytest.approx(0.5, abs=0.1), name
        assert stats["predicted_below_90"] == pytest.approx(0.9, abs=0.09), name
    assert min(gains.values()) > -0.08, gains
    assert sum(gain > 0.05 for gain in gains.values()) >= 4, gains
    assert gains["azure2023_conv"] > 0.5, gains


def test_pace_finds_fixed_and_variable_parts() -> None:
    pace, dice = StepTimeModel(), random.Random(3)
    assert (pace.step, pace.each, pace.last) == (0, 0, 0)
    pace.took(10, 0.5)
    assert (pace.step, pace.each) == (0.5, 0.05), "one step: all of it by the token"
    pace.took(10, -1.0)
    pace.took(10, 0.0)
    assert pace.steps == 1, "a clock that stands still, or goes back, says nothing"
    for _ in range(500):
        tokens = dice.randrange(1, 512)
        pace.took(tokens, 0.02 + 0.0003 * tokens)
    assert pace.each == pytest.approx(0.0003, rel=0.02)
    assert pace.step == pytest.approx(0.02 + 0.0003 * 256, rel=0.2)
    for tokens in (5, 500, 5, 500):
        pace.took(tokens, 0.1)
    assert 0 <= pace.each <= pace.step, "never negative"
