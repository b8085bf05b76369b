"""Sampled frequencies are those of the distribution that the parameters name, for every parameter.

The distribution is written down once more here, in float64 and by sorting, from its definition in vLLM's and
Transformers' terms; the sampler never sorts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pageturner.kernels.cpu import native, native_module
from pageturner.kernels.reference import ReferenceOps
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.scheduler.types import Sequence
from support.logits import SameLogits

VOCABULARY, BATCH = 300, 3_000
PROMPT, ANSWER = (3, 5, 5, 8), (5, 9, 9, 11)
LOGITS = (np.random.default_rng(4).normal(size=VOCABULARY) * 2.2).astype(np.float32)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 12},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.08},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.85, "min_p": 0.02},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"logit_bias": {7: 4.0, 9: -6.0}},
    {"allowed_token_ids": (2, 3, 5, 7, 11, 13)},
    {"bad_words_token_ids": ((4,), (9, 11, 6), (1, 2))},
    {"min_tokens": 9, "stop_ids": (0, 5, 10)},
    {
        "repetition_penalty": 0.7,
        "logit_bias": {40: 2.0},
        "temperature": 0.8,
        "top_k": 25,
        "top_p": 0.95,
    },
]


def exact(params: SamplingParams) -> NDArray[np.float64]:
    """The probability of each token."""
    x = LOGITS.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[[i for i in range(VOCABULARY) if i not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words_token_ids:
        if word[:-1] == ANSWER[len(ANSWER) - len(word) + 1 :][: len(word) - 1]:
            x[word[-1]] = -np.inf
    if params.min_tokens > len(ANSWER):
        x[list(params.stop_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*PROMPT, *ANSWER}:
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in set(ANSWER):
        x[token] -= params.presence_penalty + params.frequency_penalty * ANSWER.count(token)
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.lexsort((np.arange(VOCABULARY), -x))
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def chi_square_bound(freedom: int) -> float:
    """What chance exceeds once in a million times (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.75 * spread**0.5) ** 3)


@pytest.mark.parametrize(
    ("backend", "draws"),
    [
        ("native", 2 * BATCH),
        pytest.param("native", 20 * BATCH, marks=pytest.mark.slow),
        pytest.param("reference", 8 * BATCH, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id="+".join(fields) or "plain", marks=() if few else pytest.mark.slow)
        for fields in SETTINGS
        for few in [len(fields) != 1]
    ],
)
def test_frequencies(backend: str, draws: int, fields: dict[str, Any]) -> None:
    if backend == "native" and not native_module.supported()[0]:
        pytest.skip(native_module.supported()[1])
    ops = native.NativeOps(threads=1) if backend == "native" else ReferenceOps()
    decoder = SameLogits(ops, LOGITS)
    params = SamplingParams(**{"temperature": 1.0, **fields})
    counts = np.zeros(VOCABULARY)
    for start in range(0, draws, BATCH):
        sequences = [
            Sequence(
                Request(1, PROMPT, SamplingParams(**{"temperature": 1.0, **fields}, seed=start + i))
            )
            for i in range(BATCH)
        ]
        for sequence in sequences:
            sequence.tokens = [*PROMPT, *ANSWER]
        outputs = decoder.outputs(sequences)
        counts += np.bincount([output.tokens[0] for output in outputs], minlength=VOCABULARY)
    p = exact(params)
    assert counts[p == 0].sum() == 0, "a token that cannot come"
    likely = p * draws >= 5  # the others are counted together, as the test needs it
    seen, expected = counts[likely], p[likely] * draws
    if (rest := float(p[~likely].sum())) > 0:
        seen, expected = np.append(seen, counts[~likely].sum()), np.append(expected, rest * draws)
    if len(seen) == 1:
        assert seen[0] == draws
    else:
        assert ((seen - expected) ** 2 / expected).sum() < chi_square_bound(len(seen) - 1)
