"""What forbids or reshapes logits before a token is chosen. A function of parameters and tokens so far,
nothing else; masks of grammars are one too, and come in from `grammar`.

Must not keep state: preemption, crash recovery and forking rely on every row being recomputable.

The order is vLLM's: grammar, allowed tokens, bad words, min_tokens, bias, then the penalties, of which
repetition is over prompt and output, frequency and presence over the output only. Everything costs in
proportion to the tokens of its own sequence; only a grammar and `allowed_token_ids` walk over a row.
"""

from __future__ import annotations

from array import array

import numpy as np

from pageturner.core.types import SamplingParams, Sequence
from pageturner.kernels.base import F32, forbid
from pageturner.runtime.grammar import NO_MASKS, Masks, allowed


def changes(params: SamplingParams) -> bool:
    """Whether a request asks for any of this; most do not, and pay nothing."""
    return params.structured_outputs is not None or reshapes(params)


def reshapes(params: SamplingParams) -> bool:
    """Whether it asks for more than a grammar, which can be followed without all logits."""
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return bool(penalties) or _masks(params)


def _masks(params: SamplingParams) -> bool:
    """Whether something besides a grammar can leave a row with nothing to choose."""
    return bool(
        params.logit_bias
        or params.bad_words_token_ids
        or params.min_tokens
        or params.allowed_token_ids is not None
        or params.forced_end is not None
        or params.force_ids
    )


def apply(logits: F32, sequences: list[Sequence], grammars: Masks = NO_MASKS) -> list[int]:
    """Write masks, bias and penalties into logits [R, V], row r belonging to sequences[r].

    grammars  the masks of those sequences that have a grammar

    Returns the rows in which nothing was left to choose; they are zeros now, so that sampling them works.
    """
    empty = []
    follows = allowed(grammars, sequences, logits.shape[1])
    if follows is not None:
        forbid(logits, follows)
    for r, sequence in enumerate(sequences):
        params = sequence.request.params
        if not changes(params):
            continue
        _shape(logits[r], sequence)
        masked = params.structured_outputs is not None or _masks(params)
        if masked and np.isneginf(logits[r].max()):
            logits[r] = 0.0
            empty.append(r)
    return empty


def _shape(row: F32, sequence: Sequence) -> None:
    params = sequence.request.params
    if params.allowed_token_ids is not None:
        _allow(row, params.allowed_token_ids)
    if params.bad_words_token_ids:
        _forbid_words(row, params.bad_words_token_ids, sequence)
    if params.min_tokens > sequence.generated and params.stop_ids:
        row[list(params.stop_ids)] = -np.inf
    if params.logit_bias:
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(row, sequence.tokens, np.float32(params.repetition_penalty))
    if (params.frequency_penalty or params.presence_penalty) and sequence.generated:
        _penalise_output(row, sequence.tokens[sequence.prompt_len :], params)
    if params.forced_end is not None and params.stop_ids:
        _end_at(row, params.stop_ids, sequence.generated + 1 >= params.forced_end)
    if sequence.generated < len(params.force_ids):
        _allow(row, params.force_ids[sequence.generated :][:1])


def _allow(row: F32, allowed: tuple[int, ...]) -> None:
    ids = list(allowed)
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _forbid_words(row: F32, words: tuple[tuple[int, ...], ...], sequence: Sequence) -> None:
    """The last token of each word, where the others of it are the last ones of the output."""
    tokens, generated = sequence.tokens, sequence.generated
    for word in words:
        before = len(word) - 1
        if before <= generated and tuple(tokens[len(tokens) - before :]) == word[:-1]:
            row[word[-1]] = -np.inf


def _end_at(row: F32, ends: tuple[int, ...], now: bool) -> None:
    """Nothing but the end, or anything but an end: how the replay of a trace ends where the trace did."""
    if now:
        row.fill(-np.inf)
        row[ends[0]] = 0.0
    else:
        row[list(ends)] = -np.inf


def _penalise_repetition(row: F32, tokens: list[int], penalty: np.float32) -> None:
    """x / penalty for x > 0, else x * penalty; a token that occurs twice is written twice, with one value."""
    ids = np.frombuffer(array("q", tokens), np.int64)  # far faster than numpy's own conversion of a list
    values = row[ids]
    row[ids] = np.where(values > 0, values / penalty, values * penalty)


def _penalise_output(row: F32, output: list[int], params: SamplingParams) -> None:
    ids, counts = np.unique(np.array(output, np.intp), return_counts=True)
    row[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    row[ids] -= np.float32(params.presence_penalty)
