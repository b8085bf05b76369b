"""The end of thoughts that have become too long: `SamplingParams.max_thinking_tokens`.

Owns when the tokens that end thoughts are chosen, whatever the model says. As all edits
(processors.py), it is a function of parameters and tokens so far, and of what a grammar allows
behind them. Must not know how thoughts look in text.
"""

from __future__ import annotations

import numpy as np

from pageturner.kernels.edits import Allowed, Edit, Edits, Operation
from pageturner.params import SamplingParams
from pageturner.scheduler.types import Sequence

BEFORE = 4  # tokens of white space that may stand in front of thoughts
WAIT = 4  # tokens by which thoughts may be longer where the grammar wants a character ended first


def end_thoughts(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    """The next token of `thinking_end`, where the budget is used up and the thoughts have not
    ended."""
    begin, end = params.thinking_begin, params.thinking_end
    answer = sequence.tokens[sequence.prompt_len : sequence.prompt_len + BEFORE + len(begin)]
    at = _place(answer, begin)
    if at is None:
        return []
    most = at + len(begin) + (params.max_thinking_tokens or 0)
    if not 0 <= sequence.generated - most < WAIT + len(end):
        return []
    if _place(sequence.tokens[sequence.prompt_len + at :], end) is not None:
        return []
    behind = tuple(sequence.tokens[sequence.prompt_len + most :])
    said = next(k for k in range(len(end) - 1, -1, -1) if behind[len(behind) - k :] == end[:k])
    return [Edit(Operation.FORCE, end[said : said + 1])]


def defer_end_of_thinking(
    sequences: list[Sequence], masks: Allowed | None, edits: Edits | None
) -> Edits | None:
    """The edits of rows [R] without ends of thoughts that the row's grammar cannot take yet: a
    budget may be used up within a character, whose other bytes come first."""
    if masks is None or edits is None:
        return edits
    bits = masks.view(np.uint8)
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.max_thinking_tokens is None or params.structured_outputs is None:
            continue
        for edit in end_thoughts(params, sequence):
            if not bits[row, edit.ids[0] >> 3] >> (edit.ids[0] & 7) & 1:
                edits[row] = [one for one in edits[row] if one != edit]
    return edits


def _place(tokens: list[int], part: tuple[int, ...]) -> int | None:
    """Return where these tokens stand among the others, side by side; None: nowhere. No tokens
    stand at 0."""
    last = len(tokens) - len(part)
    return next((at for at in range(last + 1) if tuple(tokens[at : at + len(part)]) == part), None)
