"""Penalties, bias, bad words, allowed tokens, min_tokens: each against its definition, token by token."""

import random

import numpy as np
import pytest

from pageturner.executor.processors import edits_of
from pageturner.executor.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, score
from pageturner.executor.thinking_budget import defer_end_of_thinking
from pageturner.kernels.edits import may_be_chosen
from pageturner.kernels.reference import ReferenceOps
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.scheduler.types import Sequence
from support.logits import choose, edited

OPS = ReferenceOps()
VOCAB = 30


def sequence(prompt: list[int], output: list[int], **params) -> Sequence:
    return Sequence(Request(1, tuple(prompt), SamplingParams(**params)), tokens=[*prompt, *output])


def brute_force(
    row: np.ndarray, prompt: list[int], output: list[int], p: SamplingParams
) -> list[float]:
    """vLLM's definition, in its order, one token at a time."""
    result = []
    for token in range(len(row)):
        x = np.float32(row[token])
        forbidden = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        for word in p.bad_words_token_ids:
            *before, last = word
            if last == token and (not before or output[-len(before) :] == before):
                forbidden = True
        if len(output) < p.min_tokens and token in p.stop_ids:
            forbidden = True
        if forbidden:
            result.append(-np.inf)
            continue
        x += np.float32((p.logit_bias or {}).get(token, 0.0))
        if token in prompt or token in output:
            x = (
                x / np.float32(p.repetition_penalty)
                if x > 0
                else x * np.float32(p.repetition_penalty)
            )
        x -= np.float32(p.frequency_penalty) * np.float32(output.count(token))
        x -= np.float32(p.presence_penalty if token in output else 0)
        result.append(x)
    return result


def random_params(dice: random.Random) -> dict:
    some = lambda n: tuple(dice.sample(range(VOCAB), n))  # noqa: E731
    return {
        "repetition_penalty": dice.choice([1.0, 1.3, 0.7]),
        "presence_penalty": dice.choice([0.0, 1.5, -2.0]),
        "frequency_penalty": dice.choice([0.0, 0.3, -0.4]),
        "logit_bias": dice.choice([None, {3: 2.5, 7: -100.0}, {1: 100.0}]),
        "bad_words_token_ids": dice.choice(
            [(), ((4,), (5, 6)), tuple(zip(some(9), some(9), strict=True))]
        ),
        "allowed_token_ids": dice.choice([None, some(6), some(25)]),
        "min_tokens": dice.choice([0, 2, 5]),
        "stop_ids": some(2),
    }


def test_all_together_against_the_definition():
    dice = random.Random(3)
    noise = np.random.default_rng(3)
    for _ in range(300):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 12))]
        output = [dice.randrange(VOCAB) for _ in range(dice.randint(0, 12))]
        one = sequence(prompt, output, **random_params(dice))
        logits = (noise.normal(size=(1, VOCAB)) * 4).astype(np.float32)
        expected = brute_force(logits[0], prompt, output, one.request.params)
        assert edited(logits, [one])[0].tolist() == [float(x) for x in expected]


@pytest.mark.parametrize(
    ("params", "prompt", "output", "expected"),
    [
        (
            {"repetition_penalty": 2.0},
            [0],
            [1, 1],
            [2.0, -2.0, 4.0, -1.0],
        ),  # counts once, prompt included
        ({"presence_penalty": 0.5}, [0], [2, 2], [4.0, -1.0, 3.5, -1.0]),  # output only, once
        ({"frequency_penalty": 0.5}, [0], [2, 2], [4.0, -1.0, 3.0, -1.0]),  # output only, each time
        (
            {"logit_bias": {3: 5.0}, "repetition_penalty": 2.0},
            [3],
            [],
            [4.0, -1.0, 4.0, 2.0],
        ),  # bias first
    ],
)
def test_by_hand(params, prompt, output, expected):
    logits = np.array([[4.0, -1.0, 4.0, -1.0]], np.float32)
    assert edited(logits, [sequence(prompt, output, **params)])[0].tolist() == expected


def test_a_bad_word_is_forbidden_only_behind_its_beginning():
    def forbidden(
        output: list[int], word: tuple[int, ...], prompt: tuple[int, ...] = (8, 9)
    ) -> list[int]:
        one = sequence(list(prompt), output, bad_words_token_ids=(word,))
        return np.flatnonzero(np.isneginf(edited(np.zeros((1, 10), np.float32), [one])[0])).tolist()

    assert forbidden([], (5,)) == [5]
    assert forbidden([1, 2], (1, 2, 3)) == [3]
    assert forbidden([2, 1], (1, 2, 3)) == []
    assert forbidden([2], (1, 2, 3)) == []
    assert forbidden([], (8, 9, 3)) == [], "the prompt is not part of what was written"
    assert forbidden([9], (8, 9, 3)) == []


def test_thoughts_end_where_their_budget_does():
    def forced(output: list[int], most: int, begin: tuple[int, ...] = ()) -> list[int]:
        """What alone can be chosen, if anything is forced."""
        limits = {"max_thinking_tokens": most, "thinking_begin": begin, "thinking_end": (7, 8)}
        row = edited(np.zeros((1, 10), np.float32), [sequence([1], output, **limits)])[0]
        found = np.flatnonzero(~np.isneginf(row)).tolist()
        return [] if len(found) == 10 else found

    assert forced([], 0) == [7]
    assert forced([7], 0) == [8]
    assert forced([7, 8], 0) == []
    assert forced([2], 2) == []
    assert forced([2, 2], 2) == [7]
    assert forced([2, 7], 2) == [7], "half of an end is none"
    assert forced([2, 2, 7], 2) == [8]
    assert forced([7, 8, 2], 3) == forced([2, 7, 8], 3) == [], "they have ended"
    assert forced([5, 6, 2], 1, (5, 6)) == [7], "the mark of the beginning does not count"
    assert forced([1, 1, 1, 5, 6, 2], 1, (5, 6)) == [7], "white space in front of it does not count"
    assert forced([1, 1, 1, 1, 1, 5, 6, 2], 1, (5, 6)) == [], "what comes later is no beginning"
    assert forced([5, 6], 1, (5, 6)) == forced([6, 5, 2], 1, (5, 6)) == [], "there are none"


def test_the_end_of_thoughts_waits_until_the_grammar_takes_it():
    """A budget that is used up within a character, whose other bytes must come first."""

    def left(output: list[int], allows: list[int]) -> list[int]:
        limits = {"max_thinking_tokens": 2, "thinking_end": (7, 8)}
        rows = [sequence([1], output, structured_outputs="a grammar", **limits)]
        mask = np.zeros((1, 1), np.uint64)
        for token in allows:
            mask[0, 0] |= np.uint64(1 << token)
        edits = defer_end_of_thinking(rows, mask, edits_of(rows))
        return np.flatnonzero(may_be_chosen(10, mask, edits[0] if edits else [])).tolist()

    assert left([2, 3], [7, 4]) == [7]
    assert left([2, 3], [4, 5]) == [4, 5], "it would leave nothing"
    assert left([2, 3, 4], [7, 4]) == [7], "a token later"
    assert left([2, 3, 4, 7], [8]) == [8]
    assert left([2, 3, 4, 7, 8], [1, 2, 7]) == [1, 2, 7], "they have ended"
    assert left([2, 3, 4, 4, 4, 4, 4, 4], [7, 4]) == [4, 7], "a grammar that never takes it"


def test_a_row_without_features_has_no_edits():
    plain = sequence([1, 2], [3], stop_ids=(1,), top_k=3, logprobs=2)
    assert edits_of([plain] * 3) is None
    biased = edits_of([plain, sequence([1, 2], [3], logit_bias={4: 1.0})])
    assert biased is not None
    assert [len(row) for row in biased] == [0, 1]


def test_edits_of_a_sequence_are_those_of_its_tokens_alone():
    """Made anew from the same tokens, or asked twice: the same edits."""
    params = random_params(random.Random(8)) | {"repetition_penalty": 1.3, "presence_penalty": 1.0}
    one, same = (sequence([1, 2, 2], [3, 3], **params) for _ in range(2))
    assert edits_of([one]) == edits_of([same]) == edits_of([one])


SETTINGS = [
    ({"repetition_penalty": 1.7}, [0, 1], [3]),
    ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, [0], [1, 1, 2]),
    ({"logit_bias": {0: 1.0, 3: -2.0}}, [0], []),
    ({"allowed_token_ids": (1, 3, 4)}, [0], []),
    ({"bad_words_token_ids": ((0,), (2, 1))}, [0], [2]),
    ({"logit_bias": {4: 2.0}, "temperature": 0.6, "top_k": 3}, [0], []),
    ({"repetition_penalty": 1.5, "temperature": 1.4, "top_p": 0.8}, [0, 2], []),
    ({"frequency_penalty": -1.0, "min_p": 0.1}, [0], [3, 3]),
]


@pytest.mark.parametrize(("params", "prompt", "output"), SETTINGS)
def test_sampled_frequencies_match_the_definition(params, prompt, output):
    """Chi-square against the softmax of the brute-force logits, cut as the parameters say."""
    row, n = np.array([1.0, 0.3, -0.2, 0.8, -1.0], np.float32), 4000
    p = SamplingParams(**params)
    x = np.array(brute_force(row, prompt, output, p), np.float64) / p.temperature
    weights = np.exp(x - x.max())
    weights[weights < p.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if p.top_k:
        weights[order[p.top_k :]] = 0
    if p.top_p < 1:
        running = np.cumsum(weights[order])
        weights[order[int(np.searchsorted(running, p.top_p * running[-1])) + 1 :]] = 0
    expected = weights / weights.sum() * n
    sequences = [sequence(prompt, output, **params, seed=seed) for seed in range(n)]
    tokens = [o.tokens[0] for o in choose(OPS, np.tile(row, (n, 1)), sequences)]
    counts = np.bincount(tokens, minlength=5)
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi < 23.5  # at most 4 degrees of freedom: p = 1e-4
    assert len(set(tokens)) == possible.sum() > 1


def test_logprobs_stay_those_of_the_raw_logits():
    logits = np.array([[1.0, 3.0, 0.5, -1.0]], np.float32)
    truth = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    params = {"temperature": 0.0, "logit_bias": {3: 50.0}, "repetition_penalty": 1.5, "logprobs": 2}
    output = choose(OPS, logits.copy(), [sequence([3], [], **params)])[0]
    assert output.tokens == [3]
    value, top = output.logprobs[0]
    assert value == pytest.approx(truth[3], abs=1e-6)
    assert [token for token, _ in top] == [1, 0]
    assert [p for _, p in top] == pytest.approx([truth[1], truth[0]], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_may_be_chosen_only_that_request_fails(temperature):
    params = {
        "allowed_token_ids": (2,),
        "bad_words_token_ids": ((2,),),
        "temperature": temperature,
        "seed": 1,
    }
    outputs = choose(
        OPS, np.zeros((2, 5), np.float32), [sequence([1], [], **params), sequence([1], [])]
    )
    assert outputs[0].failure is not None
    assert outputs[0].failure.code == "nothing_allowed"
    assert len(outputs[1].tokens) == 1


def test_scores_against_the_definition():
    logits = np.random.default_rng(5).normal(size=(20, VOCAB)).astype(np.float32) * 3
    logits[3, 4] = -np.inf
    tokens = [(7 * i) % VOCAB for i in range(20)]
    tokens[3] = 4
    for i, found in enumerate(score(OPS, logits, tokens, [i % 4 for i in range(20)])):
        assert found is not None
        value, rank, top = found
        row = logits[i].astype(np.float64)
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert value == pytest.approx(max(logprobs[tokens[i]], -9999.0), abs=1e-5)
        best = sorted(range(VOCAB), key=lambda t: -row[t])
        assert rank == best.index(tokens[i]) + 1
        assert [t for t, _ in top] == best[: i % 4]
        assert [p for _, p in top] == pytest.approx(logprobs[best[: i % 4]], abs=1e-5)
    assert score(OPS, np.full((1, 5), np.nan, np.float32), [0], [0]) == [None]


@pytest.mark.parametrize("size", [3, 8, 16, 21])
def test_a_grammar_leaves_what_its_mask_allows(size: int):
    """Rows are longer than masks where a model has more rows than its tokenizer tokens, and shorter too."""
    logits = np.arange(1, size + 1, dtype=np.float32)[None]
    one = sequence([1], [], structured_outputs="a grammar")
    mask = np.packbits([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], bitorder="little")
    allowed = {0, 2, 3, 9} & set(range(size))
    found = edited(logits, [one], {one: mask})[0].tolist()
    assert found == [t + 1.0 if t in allowed else -np.inf for t in range(size)]
    assert choose(OPS, logits, [one], {one: mask})[0].failure is None
    assert choose(OPS, logits, [one], {one: np.zeros(1, np.uint8)})[0].failure == NOTHING_ALLOWED


def test_why_a_row_has_no_token():
    """Bits behind the vocabulary allow nothing; a sequence without a grammar may have any token."""
    held, free = {"structured_outputs": "a grammar"}, {}
    rows = [sequence([1], [], temperature=0.0, **kind) for kind in (held, held, held, free, free)]
    logits = np.tile(np.arange(VOCAB, dtype=np.float32), (5, 1))
    logits[2] = logits[4] = np.nan
    beyond = np.packbits([*[0] * VOCAB, 1], bitorder="little")
    some = np.packbits([0, 1, 1], bitorder="little")
    outputs = choose(OPS, logits, rows, {rows[0]: some, rows[1]: beyond, rows[2]: some})
    assert [out.tokens for out in outputs] == [[2], [], [], [VOCAB - 1], []]
    assert [out.failure for out in outputs] == [
        None,
        NOTHING_ALLOWED,
        NOT_A_NUMBER,
        None,
        NOT_A_NUMBER,
    ]


def test_a_grammar_and_edits_that_leave_nothing_together():
    """The grammar allows 1 and 2, the request 2 and 3, and 2 is a bad word."""
    params = {"structured_outputs": "a grammar", "allowed_token_ids": (2, 3), "temperature": 0.0}
    rows = [sequence([1], [], **params, bad_words_token_ids=words) for words in ((), ((2,),))]
    mask = np.packbits([0, 1, 1], bitorder="little")
    outputs = choose(OPS, np.ones((2, VOCAB), np.float32), rows, dict.fromkeys(rows, mask))
    assert outputs[0].tokens == [2]
    assert outputs[1].failure == NOTHING_ALLOWED
