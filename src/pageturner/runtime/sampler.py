"""From logits to tokens: noise keyed by position, parameters as arrays, logprobs of the raw logits.

Sampling noise is a pure function of (seed, choice index, absolute position): a token never depends on who
else is in the batch, on preemption or on a restart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pageturner.core.types import Failure, Output, PromptLogprob, SamplingParams, Sequence
from pageturner.kernels.base import F32, I32, Array, Draw, Ops
from pageturner.models.decoder import Decoder
from pageturner.runtime import processors

_U64 = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOGPROB_FLOOR = -9999.0  # JSON has no infinity; the field's clients expect this value
NOT_A_NUMBER = Failure("numerical_error", "the model produced logits that are not numbers for this request")
NOTHING_ALLOWED = Failure(
    "nothing_allowed",
    "allowed_token_ids, bad_words and min_tokens together leave no token that may be chosen",
)


def _mix(z: _U64) -> _U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: _U64, index: _U64, position: _U64) -> F32:
    """Noise in [0, 1), 24 bits, from a counter-based generator: hash(seed, index, position), no running
    state.
    """
    key = _mix(seed + _GOLDEN)
    key = _mix(key ^ (index + np.uint64(1)) * _GOLDEN)
    key = _mix(key ^ (position + np.uint64(1)) * _GOLDEN)
    return (key >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def sees_logits(params: SamplingParams) -> bool:
    """Whether a request wants more of its logits than a token, or has something done to them first."""
    return params.logprobs is not None or processors.changes(params)


def draw(decoder: Decoder, hidden: Array, sequences: list[Sequence]) -> list[Output]:
    """What `choose` gives for the logits of hidden [R, d], if none of the sequences `sees_logits`."""
    ids, logits = decoder.choose(hidden, draws(sequences))
    sound = np.isfinite(logits).tolist()
    return [
        Output([token]) if ok else Output(failure=NOT_A_NUMBER)
        for token, ok in zip(ids.tolist(), sound, strict=True)
    ]


def choose(ops: Ops, logits: F32, sequences: list[Sequence]) -> list[Output]:
    """One Output for each row of logits [R, V]; row r belongs to sequences[r]. May write into logits.

    Logprobs are of the raw logits: before any mask, bias, penalty or temperature.
    """
    params = [sequence.request.params for sequence in sequences]
    wanted = [row for row, p in enumerate(params) if p.logprobs is not None]
    likely = _likely(ops, logits, params, wanted) if wanted else {}
    raw = {row: logits[row].copy() for row in wanted if processors.changes(params[row])}
    empty = processors.apply(logits, sequences)
    ids = ops.sample(logits, *draws(sequences))
    chosen = logits[np.arange(len(sequences)), ids]
    outputs = []
    for row, token in enumerate(ids.tolist()):
        if row in empty:
            outputs.append(Output(failure=NOTHING_ALLOWED))
        elif not np.isfinite(chosen[row]):
            outputs.append(Output(failure=NOT_A_NUMBER))
        elif row in likely:
            lse, top = likely[row]
            value = raw[row][token] if row in raw else chosen[row]
            outputs.append(Output([token], [(max(float(value - lse), LOGPROB_FLOOR), top)]))
        else:
            outputs.append(Output([token]))
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
    temperature = np.array([p.temperature for p in params], np.float32)
    rows = len(params)
    if not temperature.any():
        zeros = np.zeros(rows, np.float32)
        return temperature, np.zeros(rows, np.int32), np.ones(rows, np.float32), zeros, zeros
    mask = 2**64 - 1
    noise = uniform(
        np.array([(p.seed or 0) & mask for p in params], np.uint64),
        np.array([sequence.index for sequence in sequences], np.uint64),
        np.array([len(sequence.tokens) for sequence in sequences], np.uint64),
    )
    return (
        temperature,
        np.array([max(p.top_k, 0) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        noise,
    )


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
