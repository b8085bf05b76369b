"""Logits processors: what sampling parameters do to logits before a token is chosen: edits, which
`Ops.choose` carries out where the logits are.

Owns the order of the edits, which is vLLM's: allowed tokens, bad words, min_tokens, bias, then the
penalties, of which repetition is over prompt and output, frequency and presence over the output
only. Grammars come before all of these (`grammar.allowed`). A processor is a function of parameters
and tokens so far and keeps no state: preemption, crash recovery and forking rely on every row being
recomputable. It never sees logits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from operator import attrgetter
from typing import NamedTuple

from pageturner.executor.fault_injection import inject
from pageturner.executor.thinking_budget import end_thoughts
from pageturner.kernels.edits import Edit, Edits, Operation
from pageturner.params import SamplingParams
from pageturner.scheduler.types import Sequence


class Processor(NamedTuple):
    """fields  of SamplingParams; the processor runs for a request in which one of them is not at
               its default
    edits   of the logits of the token behind this sequence, in order
    """

    fields: tuple[str, ...]
    edits: Callable[[SamplingParams, Sequence], list[Edit]]


def _allowed_tokens(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    return [Edit(Operation.ALLOW, params.allowed_token_ids or ())]


def _bad_words(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    """The last token of each word, where the others of it are the last ones of the output."""
    tokens, generated = sequence.tokens, sequence.generated
    ends = [
        word[-1]
        for word in params.bad_words_token_ids
        if (before := len(word) - 1) <= generated
        and tuple(tokens[len(tokens) - before :]) == word[:-1]
    ]
    return [Edit(Operation.FORBID, ends)] if ends else []


def _min_tokens(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    early = params.min_tokens > sequence.generated and params.stop_ids
    return [Edit(Operation.FORBID, params.stop_ids)] if early else []


def _logit_bias(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    bias = params.logit_bias or {}
    return [Edit(Operation.ADD, list(bias), list(bias.values()))] if bias else []


def _repetition(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    return [Edit(Operation.REPETITION, sequence.tokens, params.repetition_penalty)]


def _frequency_and_presence(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    output = sequence.tokens[sequence.prompt_len :]
    return [
        Edit(Operation.FREQUENCY, output, params.frequency_penalty),
        Edit(Operation.PRESENCE, output, params.presence_penalty),
    ]


def _forced_end(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    """Nothing but the end, or anything but an end: how the replay of a trace ends where the trace
    did."""
    if params.forced_end is None or not params.stop_ids:
        return []
    if sequence.generated + 1 >= params.forced_end:
        return [Edit(Operation.FORCE, params.stop_ids[:1])]
    return [Edit(Operation.FORBID, params.stop_ids)]


def _forced_beginning(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    now = params.force_ids[sequence.generated :][:1]
    return [Edit(Operation.ALLOW, now)] if now else []


def _injected_fault(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    return [Edit(Operation.FORCE, (0,), nan)] if inject(sequence) else []


# In this order. A new processor is a function and a line here.
PROCESSORS = (
    Processor(("allowed_token_ids",), _allowed_tokens),
    Processor(("bad_words_token_ids",), _bad_words),
    Processor(("min_tokens",), _min_tokens),
    Processor(("logit_bias",), _logit_bias),
    Processor(("repetition_penalty",), _repetition),
    Processor(("frequency_penalty", "presence_penalty"), _frequency_and_presence),
    Processor(("max_thinking_tokens",), end_thoughts),
    Processor(("forced_end",), _forced_end),
    Processor(("force_ids",), _forced_beginning),
    Processor(("inject_fault",), _injected_fault),
)
_OF = [processor.edits for processor in PROCESSORS for _ in processor.fields]
_ASKED = attrgetter(*[field for processor in PROCESSORS for field in processor.fields])
_NOTHING = _ASKED(SamplingParams())


def edits_nothing(params: SamplingParams) -> bool:
    """Return whether nothing is asked for that edits logits."""
    return bool(_ASKED(params) == _NOTHING)


def edits_of(sequences: list[Sequence]) -> Edits | None:
    """The edits of each row, row r belonging to sequences[r]; None if nobody asks for any. They
    hold the sequences' own lists of tokens: use them before anything is added to these."""
    rows = [_edits(sequence) for sequence in sequences]
    return rows if any(rows) else None


def _edits(sequence: Sequence) -> list[Edit]:
    params = sequence.request.params
    asked = _ASKED(params)
    if asked == _NOTHING:  # what most requests have, at every token
        return []
    wanted = [
        edits for edits, mine, default in zip(_OF, asked, _NOTHING, strict=True) if mine != default
    ]
    return [edit for edits in dict.fromkeys(wanted) for edit in edits(params, sequence)]
