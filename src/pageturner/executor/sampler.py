"""The sampler, from hidden rows to tokens: noise keyed by position, parameters as arrays, logprobs
of the raw logits. All sampling goes through `choose`; logits stay in the backend. Only those for
prompt logprobs come here.

Sampling noise is a pure function of (seed, chosen index, absolute position): a token never depends
on who else is in the batch, on preemption or on a restart.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite, isnan
from typing import Any

import numpy as np

from pageturner.executor import processors
from pageturner.executor.grammar import NO_MASKS, Masks, allowed
from pageturner.executor.thinking_budget import defer_end_of_thinking
from pageturner.kernels.base import F32, I32, Array, Ops
from pageturner.kernels.choosing import ChooseArgs, Draw, Logprobs, LogprobsWanted
from pageturner.kernels.edits import may_be_chosen
from pageturner.models.decoder import Decoder
from pageturner.params import SamplingParams
from pageturner.request import Failure, PromptLogprob
from pageturner.scheduler.types import Item, Output, Sequence

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
LOGPROB_FLOOR = -9999.0  # JSON has no infinity; the field's clients expect this value
NOT_A_NUMBER = Failure(
    "numerical_error",
    "the model gave no finite numbers to choose a token from: its file is damaged, or it overflows on this"
    " input. Other requests go on",
)
NOTHING_ALLOWED = Failure(
    "nothing_allowed",
    "structured_outputs, allowed_token_ids, bad_words and min_tokens together leave no token to choose",
)


def _mix(z: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), of an integer or an array."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=4096)
def stream(seed: int, index: int) -> int:
    return int(_mix(_mix((seed + _GOLDEN) & _MASK) ^ (index + 1) * _GOLDEN & _MASK))


def uniform(seed: int, index: int, position: int) -> float:
    """Noise in [0, 1), 24 bits, from a counter-based generator: hash(seed, index, position), no
    running state. Plain integers: a handful of numpy's operations would cost as much as a hundred
    rows of these."""
    return float(noise(stream(seed, index), position))


def noise(stream: Any, position: Any) -> Any:
    """The noise of a stream at a position, or of as many as two arrays of uint64 have."""
    return (_mix(stream ^ (position + 1) * _GOLDEN & _MASK) >> 40) * 2.0**-24


def rows_of(item: Item) -> list[Sequence]:
    """The sequences whose next tokens the rows of this item are for: the sequence as it is, then
    the same behind each of the draft tokens that the step verifies."""
    sequence = item.sequence
    return [sequence] + [
        Sequence(
            sequence.request,
            index=sequence.index,
            tokens=[*sequence.tokens, *sequence.draft[: count + 1]],
        )
        for count in range(item.drafted)
    ]


def accept(outputs: list[Output], draft: list[int]) -> Output:
    """Join the outputs of the rows of one item into one. A row's token counts as long as every
    draft token before it is what the model chose itself; the first that differs is the last that
    counts, because that is what decoding without drafts would have chosen there. A failure of a
    later row is not told: the tokens before it are kept, and the next step meets the failure in its
    first row."""
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


def choose(
    decoder: Decoder, hidden: Array, sequences: list[Sequence], grammars: Masks = NO_MASKS
) -> list[Output]:
    """One Output for each row of hidden [R, d]; row r belongs to sequences[r]. A token, or the
    candidates of a beam search. `grammars`: the masks of those sequences that have a grammar.

    Logprobs are of the raw logits: before any mask, bias, penalty or temperature.
    """
    vocabulary = decoder.spec.vocab
    masks = allowed(grammars, sequences, vocabulary)
    edits = defer_end_of_thinking(sequences, masks, processors.edits_of(sequences))
    wanted = _logprobs_wanted([sequence.request.params for sequence in sequences], vocabulary)
    names = [sequence.request.adapter for sequence in sequences]
    adapters = decoder.adapters_of(names) if any(names) else None
    args = ChooseArgs(draws(sequences), masks, edits, wanted, adapters)
    chosen = decoder.choose(hidden, args)
    outputs, told = [], chosen.logprobs
    for row, (token, logit) in enumerate(
        zip(chosen.ids.tolist(), chosen.logits.tolist(), strict=True)
    ):
        params = sequences[row].request.params
        if told is not None and params.beam_width:
            outputs.append(_candidates(told, row, params))
        elif isfinite(logit) and (
            told is None or params.logprobs is None or isfinite(told.lse[row])
        ):
            outputs.append(Output([token]))
        else:
            bits = None if masks is None else masks[row : row + 1]
            left = may_be_chosen(vocabulary, bits, edits[row] if edits else [])
            outputs.append(Output(failure=NOT_A_NUMBER if left.any() else NOTHING_ALLOWED))
    if told is not None:
        _add_logprobs(outputs, told, sequences)
    return outputs


def _logprobs_wanted(params: list[SamplingParams], vocabulary: int) -> LogprobsWanted | None:
    """Return what to ask of each row beside its token; None: nothing of any."""
    if all(p.logprobs is None and not p.beam_width for p in params):
        return None
    top = [-1 if p.logprobs is None else min(p.logprobs, vocabulary) for p in params]
    # enough that beam_width candidates go on even if all that can end an answer are among the best
    candidates = [min((1 + max(1, len(p.stop_ids))) * p.beam_width, vocabulary) for p in params]
    return LogprobsWanted(np.array(top, np.int32), np.array(candidates, np.int32))


def _add_logprobs(outputs: list[Output], logprobs: Logprobs, sequences: list[Sequence]) -> None:
    chosen = logprobs.chosen.tolist()
    ids, values = (
        logprobs.top[0].tolist(),
        np.maximum(logprobs.top[1], np.float32(LOGPROB_FLOOR)).tolist(),
    )
    for row, (output, sequence) in enumerate(zip(outputs, sequences, strict=True)):
        params = sequence.request.params
        if params.logprobs is None or output.failure is not None:
            continue
        top = tuple(zip(ids[row][: params.logprobs], values[row][: params.logprobs], strict=True))
        value = 0.0 if params.beam_width else max(chosen[row], LOGPROB_FLOOR)
        output.logprobs = [(value, top)]


def _candidates(logprobs: Logprobs, row: int, params: SamplingParams) -> Output:
    """Draw beams as Transformers does: what reshapes logits elsewhere reshapes log-probabilities in
    a beam search."""
    count = (1 + max(1, len(params.stop_ids))) * params.beam_width
    ids, values = (each[row, :count].tolist() for each in logprobs.candidates)
    if not isfinite(logprobs.lse[row]) or isnan(values[0]):
        return Output(failure=NOT_A_NUMBER)
    # where fewer are possible than are asked for, one of them stands there more than once
    found = dict(zip(ids, values, strict=True))
    return Output(candidates=[pair for pair in found.items() if isfinite(pair[1])])


def score(
    ops: Ops, logits: F32, tokens: list[int], counts: list[int]
) -> list[PromptLogprob | None]:
    """Row r of logits [R, V] stood before tokens[r]: its logprob, its rank (1: nothing is
    likelier), and the counts[r] most likely tokens. None for a row that is not numbers."""
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
        return greedy(len(params))
    noises = [
        uniform(p.seed or 0, s.index, len(s.tokens)) for p, s in zip(params, sequences, strict=True)
    ]
    return (
        np.array([p.temperature for p in params], np.float32),
        np.array([max(p.top_k, 0) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array(noises, np.float32),
    )


@lru_cache(maxsize=256)
def greedy(rows: int) -> Draw:
    """The likeliest token of each of so many rows."""
    zeros = np.zeros(rows, np.float32)
    return zeros, np.zeros(rows, np.int32), np.ones(rows, np.float32), zeros, zeros


def _logprobs(ops: Ops, logits: F32, k: int) -> tuple[F32, I32, F32]:
    """Log-sum-exp [R], and the k most likely tokens with their logprobs [R, k]."""
    lse, ids, _ = ops.top_logprobs(logits, k)
    # the same subtraction as for the chosen token, so that it is reported with one value, not two
    values = np.maximum(
        np.take_along_axis(logits, ids, 1) - lse[:, None], np.float32(LOGPROB_FLOOR)
    )
    return lse, ids, values
