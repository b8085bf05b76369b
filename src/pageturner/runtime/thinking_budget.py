"""The end of thoughts that have become too long: `SamplingParams.max_thinking_tokens`.

Owns when the tokens that end thoughts are chosen, whatever the model says. As all edits (processors.py), it
is a function of parameters and tokens so far. Must not know how thoughts look in text.
"""

from __future__ import annotations

from pageturner.core.types import Sequence
from pageturner.kernels.edits import Edit, Operation
from pageturner.params import SamplingParams

BEFORE = 4  # tokens of white space that may stand in front of thoughts


def end_thoughts(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    """The next token of `thinking_end`, where the budget is used up and the thoughts have not ended."""
    begin, end = params.thinking_begin, params.thinking_end
    answer = sequence.tokens[sequence.prompt_len : sequence.prompt_len + BEFORE + len(begin)]
    at = _place(answer, begin)
    if at is None:
        return []
    most = at + len(begin) + (params.max_thinking_tokens or 0)
    past = sequence.generated - most
    if not 0 <= past < len(end):
        return []
    thoughts = sequence.tokens[sequence.prompt_len + at : sequence.prompt_len + most]
    return [] if _place(thoughts, end) is not None else [Edit(Operation.FORCE, end[past : past + 1])]


def _place(tokens: list[int], part: tuple[int, ...]) -> int | None:
    """Where these tokens stand among the others, side by side; None: nowhere. No tokens stand at 0."""
    last = len(tokens) - len(part)
    return next((at for at in range(last + 1) if tuple(tokens[at : at + len(part)]) == part), None)
