"""From logits to tokens: noise keyed by position, parameters as arrays, logprobs of the raw logits.

Sampling noise is a pure function of (seed, choice index, absolute position): a token never depends on who
else is in the batch, on preemption or on a restart.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from math import isfinite

import numpy as np

from pageturner.core.types import Failure, Item, Output, PromptLogprob, SamplingParams, Sequence
from pageturner.kernels.base import F32, I32, Allowed, Array, Draw, Ops
from pageturner.models.decoder import Decoder
from pageturner.runtime import processors
from pageturner.runtime.grammar import NO_MASKS, Masks, allowed

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
LOGPROB_FLOOR = -9999.0  # JSON has no infinity; the field's clients expect this value
NOT_A_NUMBER = Failure("numerical_error", "the model produced logits that are not numbers for this request")
NOTHING_ALLOWED = Failure(
    "nothing_allowed",
    "structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token to choose",
)


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=4096)
def _stream(seed: int, index: int) -> int:
    return _mix(_mix((seed + _GOLDEN) & _MASK) ^ (index + 1) * _GOLDEN & _MASK)


def uniform(seed: int, index: int, position: int) -> float:
    """Noise in [0, 1), 24 bits, from a counter-based generator: hash(seed, index, position), no running
    state. Plain integers: a handful of numpy's operations would cost as much as a hundred rows of these."""
    key = _mix(_stream(seed & _MASK, index) ^ (position + 1) * _GOLDEN & _MASK)
    return (key >> 40) * 2.0**-24


def rows_of(item: Item) -> list[Sequence]:
    """What stands before each token that the item's logits are of: the sequence, then with one more draft
    token each."""
    sequence = item.sequence
    return [sequence] + [
        Sequence(
            sequence.request, index=sequence.index, tokens=[*sequence.tokens, *sequence.draft[: count + 1]]
        )
        for count in range(item.drafted)
    ]


def accept(outputs: list[Output], draft: list[int]) -> Output:
    """One output of those of an item's rows: tokens up to the first that is not the drafted one, which is the
    one that decoding without drafts would have chosen there. A failure counts where no draft hides it."""
    if len(outputs) == 1:  # what nearly every item has
        return outputs[0]
    whole = Output(failure=outputs[0].failure)
    for output, drafted in zip(outputs, [*draft, None], strict=False):
        if output.failure is not None:
            break
        whole.tokens += output.tokens
        whole.logprobs += output.logprobs
        if output.tokens[-1] != drafted:
            break
    return whole


class Wish(Enum):
    """What a request wants of its logits."""

    TOKEN = "a token"  # `draw`
    LOGITS = "more than a token, or something done to them first"  # `choose`
    CANDIDATES = "what a search goes on with"  # `search`


def wish(params: SamplingParams) -> Wish:
    if params.beam_width:
        return Wish.CANDIDATES
    return Wish.LOGITS if params.logprobs is not None or processors.reshapes(params) else Wish.TOKEN


def draw(
    decoder: Decoder, hidden: Array, sequences: list[Sequence], grammars: Masks = NO_MASKS
) -> list[Output]:
    """What `choose` gives for the logits of hidden [R, d], if the sequences want nothing but tokens."""
    vocabulary = decoder.spec.vocab
    follows = allowed(grammars, sequences, vocabulary)
    ids, logits = decoder.choose(hidden, draws(sequences), follows)
    outputs = []
    for row, (token, logit) in enumerate(zip(ids.tolist(), logits.tolist(), strict=True)):
        if isfinite(logit):
            outputs.append(Output([token]))
        elif follows is not None and not _any_token(follows[row], vocabulary):
            outputs.append(Output(failure=NOTHING_ALLOWED))
        else:
            outputs.append(Output(failure=NOT_A_NUMBER))
    return outputs


def _any_token(bits: Allowed, vocabulary: int) -> bool:
    return bool(np.unpackbits(bits.view(np.uint8), count=vocabulary, bitorder="little").any())


def choose(ops: Ops, logits: F32, sequences: list[Sequence], grammars: Masks = NO_MASKS) -> list[Output]:
    """One Output for each row of logits [R, V]; row r belongs to sequences[r]. May write into logits.
    `grammars`: the masks of those that have a grammar.

    Logprobs are of the raw logits: before any mask, bias, penalty or temperature.
    """
    params = [sequence.request.params for sequence in sequences]
    wanted = [row for row, p in enumerate(params) if p.logprobs is not None]
    likely = _likely(ops, logits, params, wanted) if wanted else {}
    raw = {row: logits[row].copy() for row in wanted if processors.changes(params[row])}
    empty = processors.apply(logits, sequences, grammars)
    ids = ops.sample(logits, *draws(sequences))
    chosen = logits[np.arange(len(sequences)), ids].tolist()
    outputs = []
    for row, token in enumerate(ids.tolist()):
        if row in empty:
            outputs.append(Output(failure=NOTHING_ALLOWED))
        elif not isfinite(chosen[row]):
            outputs.append(Output(failure=NOT_A_NUMBER))
        elif row in likely:
            lse, top = likely[row]
            value = (raw[row] if row in raw else logits[row])[token]
            outputs.append(Output([token], [(max(float(value - lse), LOGPROB_FLOOR), top)]))
        else:
            outputs.append(Output([token]))
    return outputs


def search(ops: Ops, logits: F32, sequences: list[Sequence], grammars: Masks = NO_MASKS) -> list[Output]:
    """The candidates of beam search behind each row of logits [R, V], as `choose` is given them. As in
    Transformers: what reshapes logits elsewhere reshapes log-probabilities here."""
    params = [sequence.request.params for sequence in sequences]
    wanted = [row for row, p in enumerate(params) if p.logprobs is not None]
    likely = _likely(ops, logits, params, wanted) if wanted else {}
    counts = [(1 + max(1, len(p.stop_ids))) * p.beam_width for p in params]
    lse = ops.top_logprobs(logits, 1)[0]
    logits -= lse[:, None]
    empty = {*processors.apply(logits, sequences, grammars)}
    ids = ops.top_logprobs(logits, min(max(counts), logits.shape[1]))[1]
    values = np.take_along_axis(logits, ids, 1)
    outputs = []
    for row, count in enumerate(counts):
        if not isfinite(lse[row]):
            outputs.append(Output(failure=NOT_A_NUMBER))
            continue
        # where fewer are possible than are asked for, one of them stands there more than once
        found = dict(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
        possible = [] if row in empty else [pair for pair in found.items() if isfinite(pair[1])]
        told = [(0.0, likely[row][1])] if row in likely else []
        outputs.append(Output(candidates=possible, logprobs=told))
    return outputs


def score(ops: Ops, logits: F32, tokens: list[int], counts: list[int]) -> list[PromptLogprob | None]:
    """Row r of logits [R, V] stood before tokens[r]: its logprob, its rank (1: nothing is likelier), and the
    counts[r] most likely tokens. None for a row that is not numbers."""
    lse, ids, values = _logprobs(ops, logits, max(counts))
    given = logits[np.arange(len(tokens)), tokens]
    ranks = (np.count_nonzero(logits > given[:, None], axis=1) + 1).tolist()
    logprobs = np.maximum(given - lse, np.float32(LOGPROB_FLOOR)).tolist()
    found: list[PromptLogprob | None] = []
    for row, count in enumerate(counts):
        top = tuple(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
        found.append((logprobs[row], ranks[row], top) if np.isfinite(lse[row]) else None)
    return found


def draws(sequences: list[Sequence]) -> Draw:
    """The arrays of `Ops.sample`, one value for each sequence, whose next token is drawn."""
    params = [sequence.request.params for sequence in sequences]
    if not any(p.temperature for p in params):
        return _greedy(len(params))
    noise = [uniform(p.seed or 0, s.index, len(s.tokens)) for p, s in zip(params, sequences, strict=True)]
    return (
        np.array([p.temperature for p in params], np.float32),
        np.array([max(p.top_k, 0) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array(noise, np.float32),
    )


@lru_cache(maxsize=256)
def _greedy(rows: int) -> Draw:
    zeros = np.zeros(rows, np.float32)
    return zeros, np.zeros(rows, np.int32), np.ones(rows, np.float32), zeros, zeros


def _likely(
    ops: Ops, logits: F32, params: list[SamplingParams], rows: list[int]
) -> dict[int, tuple[np.float32, tuple[tuple[int, float], ...]]]:
    """row -> (log-sum-exp of its raw logits, its most likely tokens), before anything is masked."""
    counts = [params[row].logprobs or 0 for row in rows]
    every = logits if len(rows) == len(logits) else logits[rows]
    lse, ids, values = _logprobs(ops, every, max(counts))
    result = {}
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        top = tuple(zip(ids[i, :count].tolist(), values[i, :count].tolist(), strict=True))
        result[row] = (lse[i], top)
    return result


def _logprobs(ops: Ops, logits: F32, k: int) -> tuple[F32, I32, F32]:
    """Log-sum-exp [R], and the k most likely tokens with their logprobs [R, k]."""
    lse, ids, _ = ops.top_logprobs(logits, k)
    # the same subtraction as for the chosen token, so that it is reported with one value, not two
    values = np.maximum(np.take_along_axis(logits, ids, 1) - lse[:, None], np.float32(LOGPROB_FLOOR))
    return lse, ids, values
