"""The end of thoughts that have become too long: `SamplingParams.max_thinking_tokens`.

Owns when the tokens that end thoughts are chosen, whatever the model says. As all edits (processors.py), it
is a function of parameters and tokens so far. Must not know how thoughts look in text.
"""

from __future__ import annotations

from pageturner.core.types import Sequence
from pageturner.kernels.edits import Edit, Operation
from pageturner.params import SamplingParams


def end_thoughts(params: SamplingParams, sequence: Sequence) -> list[Edit]:
    """The next token of `thinking_end`, where the budget is used up and the thoughts have not ended."""
    begin, end = params.thinking_begin, params.thinking_end
    most = (params.max_thinking_tokens or 0) + len(begin)
    past = sequence.generated - most
    if not 0 <= past < len(end):
        return []
    thoughts = sequence.tokens[sequence.prompt_len : sequence.prompt_len + most]
    if _holds(thoughts, end) or not _holds(thoughts, begin):
        return []
    return [Edit(Operation.FORCE, end[past : past + 1])]


def _holds(tokens: list[int], part: tuple[int, ...]) -> bool:
    """Whether these tokens stand among the others, side by side. Every text holds none at all."""
    at = -1
    while part:
        try:
            at = tokens.index(part[0], at + 1)
        except ValueError:
            return False
        if tuple(tokens[at : at + len(part)]) == part:
            return True
    return True
