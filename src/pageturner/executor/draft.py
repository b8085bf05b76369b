"""Drafts by a model or a head: how long one is, so that it gains most.

Owns the formula, and what a proposer offers to the executor. Must not know how a draft is made.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from pageturner.kernels.base import Array
from pageturner.policies.drafts import ROWS
from pageturner.scheduler.types import Item, Output

LEAST_GAIN = 1.03  # below this speed a draft is not worth its risk
FADING = 0.9  # what the outcome of a draft weighs, one draft later
GUESS = (3.0, 4.0)  # how a sequence begins: so many of so many drafted tokens were right


class Drafter(Protocol):
    """A proposer of drafts.

    nbytes  memory that it keeps for all sequences together
    watch   called in each step, before `propose`, with the hidden rows of all its tokens; None:
            only those that logits are made of need to be computed
    """

    nbytes: int

    @property
    def watch(self) -> Callable[[Array], None] | None: ...

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        """Write the next draft of every sequence that is at its end into its output."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of drafting.

    step  of the draft model over one of the target, in time
    rows  of a step whose products take as long as reading the weights: n rows take 1 + n / rows
    """

    step: float
    rows: float = ROWS

    def gain(self, chance: float, sequences: int, length: int) -> float:
        """Tokens with drafts over tokens without, in the same time, if each drafted token is right
        with `chance`. Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, for several sequences
        at once and rows that are not free."""
        expected = sum(chance**i for i in range(length + 1))
        alone = 1 + sequences / self.rows
        return expected * alone / (alone + length * (sequences / self.rows + self.step * alone))


@lru_cache(maxsize=4096)
def best_length(costs: Costs, percent: int, sequences: int, most: int) -> tuple[int, float]:
    """The length of a draft that gains most, if so many of a hundred tokens are right, and the
    gain; 0 and 1 where none is worth it."""
    gains = [
        (costs.gain(percent / 100, sequences, length), length) for length in range(1, most + 1)
    ]
    best, length = max(gains, default=(0.0, 0))
    return (length, best) if best >= LEAST_GAIN else (0, 1.0)
