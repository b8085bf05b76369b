"""What sampling parameters do to logits before a token is chosen: edits, which `Ops.choose` carries out where
the logits are.

Owns the order of the edits, which is vLLM's: allowed tokens, bad words, min_tokens, bias, then the penalties,
of which repetition is over prompt and output, frequency and presence over the output only. Grammars come
before all of these (`grammar.allowed`). Must not keep state: preemption, crash recovery and forking rely on
every row being recomputable, so that a processor is a function of parameters and tokens so far. Must not see
logits either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pageturner.core.types import SamplingParams, Sequence
from pageturner.kernels.edits import Edit, Edits, Operation

Processor = Callable[[SamplingParams, Sequence], Iterable[Edit]]


def _allowed_tokens(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    if params.allowed_token_ids is not None:
        return (Edit(Operation.ALLOW, params.allowed_token_ids),)
    return ()


def _bad_words(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    """The last token of each word, where the others of it are the last ones of the output."""
    if not params.bad_words_token_ids:
        return ()
    tokens, generated = sequence.tokens, sequence.generated
    ends = [
        word[-1]
        for word in params.bad_words_token_ids
        if (before := len(word) - 1) <= generated and tuple(tokens[len(tokens) - before :]) == word[:-1]
    ]
    return (Edit(Operation.FORBID, ends),) if ends else ()


def _min_tokens(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    if params.min_tokens > sequence.generated and params.stop_ids:
        return (Edit(Operation.FORBID, params.stop_ids),)
    return ()


def _logit_bias(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    if params.logit_bias:
        return (Edit(Operation.ADD, list(params.logit_bias), list(params.logit_bias.values())),)
    return ()


def _repetition_penalty(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    if params.repetition_penalty != 1.0:
        return (Edit(Operation.REPETITION, sequence.tokens, params.repetition_penalty),)
    return ()


def _output_penalties(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    if not (params.frequency_penalty or params.presence_penalty):
        return ()
    output = sequence.tokens[sequence.prompt_len :]
    return (
        Edit(Operation.FREQUENCY, output, params.frequency_penalty),
        Edit(Operation.PRESENCE, output, params.presence_penalty),
    )


def _forced_end(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    """Nothing but the end, or anything but an end: how the replay of a trace ends where the trace did."""
    if params.forced_end is None or not params.stop_ids:
        return ()
    if sequence.generated + 1 >= params.forced_end:
        return (Edit(Operation.FORCE, params.stop_ids[:1]),)
    return (Edit(Operation.FORBID, params.stop_ids),)


def _forced_beginning(params: SamplingParams, sequence: Sequence) -> Iterable[Edit]:
    if sequence.generated < len(params.force_ids):
        return (Edit(Operation.ALLOW, params.force_ids[sequence.generated :][:1]),)
    return ()


# In this order. A new one is a function and a line here.
PROCESSORS: tuple[Processor, ...] = (
    _allowed_tokens,
    _bad_words,
    _min_tokens,
    _logit_bias,
    _repetition_penalty,
    _output_penalties,
    _forced_end,
    _forced_beginning,
)


def edits_of(sequences: list[Sequence]) -> Edits | None:
    """The edits of each row, row r belonging to sequences[r]; None if there are none at all. They hold the
    sequences' own lists of tokens: use them before anything is added to these."""
    rows = [_edits(sequence) for sequence in sequences]
    return rows if any(rows) else None


def _edits(sequence: Sequence) -> list[Edit]:
    params = sequence.request.params
    return [edit for process in PROCESSORS for edit in process(params, sequence)]
