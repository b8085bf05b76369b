"""The sampler: noise keyed by position, masks, logprobs of raw logits, bad numbers."""

from typing import Any

import numpy as np
import pytest

from pageturner.executor.async_runner import Crowd
from pageturner.executor.sampler import NOTHING_ALLOWED, draws, uniform
from pageturner.kernels.reference import ReferenceOps
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.scheduler.types import Sequence
from support.decoding import backend
from support.logits import SameLogits, choose

OPS = ReferenceOps()


def sequence(tokens: int = 5, prompt: int = 3, **params) -> Sequence:
    request = Request(1, tuple(range(prompt)), SamplingParams(**params))
    return Sequence(request, tokens=list(range(tokens)))


def test_noise_is_a_function_of_seed_index_and_position():
    assert uniform(7, 0, 12) == uniform(7, 0, 12) == uniform(7 - 2**64, 0, 12)
    assert len({uniform(*key) for key in ((1, 0, 12), (7, 0, 12), (7, 1, 12), (7, 0, 13))}) == 4
    # as it was drawn by the first release: a seed gives the same answer for ever
    assert [uniform(7, 0, 12), uniform(0, 3, 0), uniform(2**64 - 1, 1, 99)] == [
        0.32863736152648926,
        0.5337235927581787,
        0.22739821672439575,
    ]


def test_noise_is_uniform_and_uncorrelated_between_neighbours():
    n = 50_000
    u = np.array([uniform(42, 0, i) for i in range(n)])
    assert ((u >= 0) & (u < 1)).all()
    assert (u == u.astype(np.float32)).all()
    counts = np.histogram(u, 64, (0, 1))[0]
    assert (
        (counts - n / 64) ** 2 / (n / 64)
    ).sum() < 120  # chi-square, 63 degrees of freedom: p < 1e-5
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    other = np.array([uniform(43, 0, i) for i in range(n)])
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.02


def test_sampled_frequencies_match_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    n = 4000
    sequences = [sequence(tokens=3 + i, temperature=1.0, seed=11) for i in range(n)]
    outputs = choose(OPS, np.tile(logits, (n, 1)), sequences)
    counts = np.bincount([o.tokens[0] for o in outputs], minlength=4)
    expected = n * np.array([0.5, 0.3, 0.15, 0.05])
    assert ((counts - expected) ** 2 / expected).sum() < 21.1  # 3 degrees of freedom: p = 1e-4


def test_a_row_does_not_depend_on_its_neighbours():
    dice = np.random.default_rng(0)
    logits = dice.normal(size=(8, 50)).astype(np.float32) * 3
    sequences = [
        sequence(temperature=t, seed=s, top_k=k)
        for s, (t, k) in enumerate([(0.0, 0), (1.0, 5)] * 4)
    ]
    together = [o.tokens for o in choose(OPS, logits.copy(), sequences)]
    alone = [choose(OPS, logits[i : i + 1].copy(), [s])[0].tokens for i, s in enumerate(sequences)]
    assert together == alone


def test_greedy_takes_the_smallest_id_among_equals():
    logits = np.array([[0, 3, 3, 1]], np.float32)
    assert choose(OPS, logits, [sequence(temperature=0.0)])[0].tokens == [1]


def test_stop_ids_wait_for_min_tokens():
    logits = np.array([[0, 1, 9, 2]], np.float32)
    params = {"temperature": 0.0, "stop_ids": (2,), "min_tokens": 3, "logprobs": 1}
    early = choose(OPS, logits.copy(), [sequence(tokens=5, **params)])[0]
    late = choose(OPS, logits.copy(), [sequence(tokens=6, **params)])[0]
    assert early.tokens == [3]
    assert late.tokens == [2]
    # what is reported is of the raw logits: the masked token is still the most likely one
    assert early.logprobs[0][1][0][0] == 2


def test_logprobs_are_of_the_raw_logits():
    logits = np.array([[1.0, 2.0, 0.5, -1.0]], np.float32)
    truth = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    output = choose(OPS, logits.copy(), [sequence(temperature=0.3, seed=1, top_k=1, logprobs=3)])[0]
    assert output.tokens == [1]
    value, top = output.logprobs[0]
    assert value == pytest.approx(truth[1], abs=1e-6)
    assert [token for token, _ in top] == [1, 0, 2]
    assert [p for _, p in top] == pytest.approx([truth[1], truth[0], truth[2]], abs=1e-6)


def test_the_chosen_token_has_one_logprob_not_two():
    logits = np.random.default_rng(1).normal(size=(40, 300)).astype(np.float32) * 9
    for output in choose(OPS, logits, [sequence(temperature=0.0, logprobs=2) for _ in range(40)]):
        value, top = output.logprobs[0]
        assert top[0] == (output.tokens[0], value)


def test_only_rows_that_ask_get_logprobs():
    logits = np.zeros((3, 4), np.float32)
    rows = [
        sequence(temperature=0.0),
        sequence(temperature=0.0, logprobs=0),
        sequence(temperature=0.0, logprobs=2),
    ]
    outputs = choose(OPS, logits, rows)
    assert outputs[0].logprobs == []
    assert outputs[1].logprobs[0][1] == ()
    assert len(outputs[2].logprobs[0][1]) == 2


def test_logits_that_are_not_numbers_fail_their_own_sequence_only():
    logits = np.array([[0, 1, 2], [np.nan, np.nan, np.nan], [5, 1, 2]], np.float32)
    outputs = choose(OPS, logits, [sequence(temperature=0.0)] * 3)
    assert outputs[0].tokens == [2]
    assert outputs[2].tokens == [0]
    assert outputs[1].failure is not None
    assert outputs[1].failure.code == "numerical_error"


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_one_logit_that_is_no_number_is_never_covered_by_others(name: str, bad: float) -> None:
    """As one damaged row of the output head makes it: whoever may choose it or is told of it fails."""
    ops, logits = backend(name), np.linspace(0, 3, 200, dtype=np.float32)
    logits[70] = bad
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"beam_width": 2},
        {"temperature": 0.0, "allowed_token_ids": (3, 4, 199), "logprobs": 0},
        {"temperature": 0.0, "allowed_token_ids": (3, 4, 199)},
        {"allowed_token_ids": (3,)},
    ]
    with np.errstate(invalid="ignore"):
        outputs = SameLogits(ops, logits).outputs([sequence(**kind) for kind in kinds])
    assert [output.failure and output.failure.code for output in outputs] == [
        "numerical_error"
    ] * 7 + [None] * 2
    assert [output.tokens for output in outputs[7:]] == [[199], [3]]


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {
        "temperature": 0.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.2,
    },
    {"temperature": 0.7, "logit_bias": {3: 4.0, 9: -5.0}, "logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": (4, 8, 15), "logprobs": 0},
    {"temperature": 0.0, "bad_words_token_ids": ((7,), (4, 11))},
    {"temperature": 0.0, "min_tokens": 9, "stop_ids": (5, 7), "logprobs": 3},
    {"temperature": 0.0, "forced_end": 3, "stop_ids": (6,)},
    {"temperature": 0.0, "forced_end": 30, "stop_ids": (7, 6)},
    {"temperature": 1.0, "force_ids": (1, 2, 3, 4), "logprobs": 1},
    {"temperature": 0.0, "beam_width": 3, "stop_ids": (6,)},
    {
        "temperature": 0.0,
        "beam_width": 2,
        "logprobs": 2,
        "repetition_penalty": 1.3,
        "stop_ids": (6,),
    },
    {"temperature": 0.0, "allowed_token_ids": (4,), "bad_words_token_ids": ((4,),)},
]


@pytest.mark.parametrize("name", ["reference", "native"])
def test_whatever_rows_ask_for_they_share_one_call(name: str, monkeypatch: pytest.MonkeyPatch):
    """And each has what it has alone. The decoder of this test has no `logits` that anybody could ask for."""
    row = np.random.default_rng(6).normal(size=300).astype(np.float32) * 2
    row[7] = 20.0  # what everybody would choose
    decoder = SameLogits(backend(name), row)
    rows = [sequence(tokens=5, prompt=3, seed=s, **kind) for s, kind in enumerate(KINDS)]
    alone = [decoder.outputs([one])[0] for one in rows]
    calls, ask = [], decoder.choose
    monkeypatch.setattr(decoder, "choose", lambda x, *rest: calls.append(len(x)) or ask(x, *rest))
    assert decoder.outputs(rows) == alone
    assert calls == [len(KINDS)]
    tokens = [output.tokens for output in alone]
    assert tokens[0] == tokens[2] == [7]
    assert 7 not in (tokens[4] + tokens[5] + tokens[6] + tokens[8])
    assert tokens[7] == [6]
    assert tokens[9] == [3]
    assert [len(output.candidates) for output in alone[10:12]] == [6, 4]
    assert [len(output.logprobs[0][1]) for output in alone if output.logprobs] == [2, 0, 3, 1, 2]
    assert alone[6].logprobs[0][1][0][0] == 7, "logprobs are of the raw logits"
    assert [output.failure for output in alone[:-1]] == [None] * 12
    assert alone[-1].failure == NOTHING_ALLOWED


def test_a_crowd_draws_with_the_noise_of_each_sequence():
    def of(seed: int | None, temperature: float, index: int) -> Sequence:
        params = SamplingParams(temperature=temperature, seed=seed, top_k=index, top_p=0.9)
        return Sequence(Request(1, (1, 2), params), index=index, tokens=[1] * (index + 2))

    seeds = [None, 0, 5, 2**63 + 9, 2**64 - 1]
    every = [of(seed, 0.5, index) for index, seed in enumerate(seeds)]
    for lengths in ([7, 1, 0, 30, 2**31], [one.prompt_len for one in every]):
        temperature, top_k, top_p, min_p, noise = Crowd(every).draws(lengths)
        assert noise.tolist() == [
            uniform(seed or 0, index, length)
            for index, (seed, length) in enumerate(zip(seeds, lengths, strict=True))
        ]
        assert [temperature[0], *top_k, top_p[0], min_p[0]] == [0.5, *range(5), np.float32(0.9), 0]
    assert draws(every)[4].tolist() == [
        uniform(seed or 0, index, index + 2) for index, seed in enumerate(seeds)
    ]
    assert [one.tolist() for one in draws([of(5, 0.0, 0)])] == [[0], [0], [1], [0], [0]]
