"""Beam search with SmolLM2 in fp32 beside what Transformers' own found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pageturner import LLM, SamplingParams
from support import smollm2
from support.smollm2 import GOLDENS

pytestmark = pytest.mark.model
NEAR_TIE = 1e-3  # of scores


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(smollm2.model_path()), dtype="float32", kv_cache_dtype="float32")


@pytest.mark.parametrize("column", [0, 1, 2, 3, 4])
def test_beams_equal_transformers(llm: LLM, column: int) -> None:
    """Six prompts under each setting, all answers in order, but for near-ties."""
    golden, greedy = np.load(GOLDENS / "smollm2_beams.npz"), np.load(GOLDENS / "smollm2_greedy.npz")
    starts = list(itertools.pairwise(greedy["prompt_starts"].tolist()))
    prompts = [greedy["prompt_ids"][slice(*starts[i])].tolist() for i in golden["prompts"][:6]]
    penalty, early = golden["settings"][column].tolist()
    _, _, width, steps = golden["tokens"].shape
    params = SamplingParams(
        max_tokens=steps,
        length_penalty=float(penalty),
        early_stopping="never" if early == "never" else early == "True",
    )
    for row, output in enumerate(llm.beam_search(prompts, width, params)):
        scores = [answer.score for answer in output.outputs]
        np.testing.assert_allclose(scores, golden["scores"][row, column], atol=NEAR_TIE)
        expected = [
            [token for token in tokens if token >= 0]
            for tokens in golden["tokens"][row, column].tolist()
        ]
        same = [
            answer.token_ids == tokens
            for answer, tokens in zip(output.outputs, expected, strict=True)
        ]
        assert same[0] or abs(scores[0] - golden["scores"][row, column, 1]) < NEAR_TIE
