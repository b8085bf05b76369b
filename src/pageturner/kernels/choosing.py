"""The types that cross into a backend and back when tokens are chosen: the output head, and
logprobs.

Owns these types. Must not know how a backend computes, nor who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.adapters import Adapters
from pageturner.kernels.edits import Allowed, Edits

Weight = Any
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Draw = tuple[F32, I32, F32, F32, F32]  # temperature, top_k, top_p, min_p, uniform: see Ops.sample


@dataclass(frozen=True, slots=True)
class Head:
    """The head that makes logits [R, V] of hidden rows [R, d]: a norm (a LayerNorm if it has a
    bias), a product, to which `bias` [V] is added, and where soft_cap > 0 soft_cap *
    tanh(x / soft_cap) of each logit."""

    norm: Weight
    eps: float
    weight: Weight
    norm_bias: Weight | None = None
    soft_cap: float = 0.0
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """The logprobs that `Ops.choose` is asked for, for each of R rows. No count may exceed the
    vocabulary.

    top         [R] -1: nothing; k: the logprob of the token, and the k likeliest tokens. By the raw
                logits
    candidates  [R] n > 0: in place of a token the n best of a beam search. Their edits are done to
                logprobs
    """

    top: I32
    candidates: I32


@dataclass(frozen=True, slots=True)
class ChooseArgs:
    """The arguments of `Ops.choose` for each of R rows.

    draw      parameters of sampling [R] each
    allowed   tokens that each row may have; None: all
    edits     changes of each row's logits; None: none
    wanted    logprobs that are wanted; None: none
    adapters  of each row, or None
    """

    draw: Draw
    allowed: Allowed | None = None
    edits: Edits | None = None
    wanted: LogprobsWanted | None = None
    adapters: Adapters | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprobs that were wanted, row by row; what was not asked for has no meaning.

    lse         [R] log-sum-exp of the raw logits
    chosen      [R] of the chosen token
    top         ids and logprobs [R, most that is wanted], by (logit descending, id ascending)
    candidates  ids and logprobs behind the edits [R, most that is wanted], in the same order. If
                fewer are possible, the others are no finite numbers or are there once more
    """

    lse: F32
    chosen: F32
    top: tuple[I32, F32]
    candidates: tuple[I32, F32]

    @classmethod
    def room_for(cls, wanted: LogprobsWanted) -> Logprobs:
        """Zeros, to be filled in."""
        rows, most = len(wanted.top), int(max(wanted.top.max(initial=0), 0))
        best = int(wanted.candidates.max(initial=0))
        zeros = [np.zeros(shape, np.float32) for shape in (rows, rows, (rows, most), (rows, best))]
        ids = [np.zeros((rows, columns), np.int32) for columns in (most, best)]
        return cls(zeros[0], zeros[1], (ids[0], zeros[2]), (ids[1], zeros[3]))


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """A token for each of R rows, and its logit behind the edits, which is no finite number where
    the row is none or nothing may be chosen. Of a row with candidates it is the first of these."""

    ids: I32
    logits: F32
    logprobs: Logprobs | None = None


class ChoosesLater(Protocol):
    """A backend that need not wait for its tokens. What it chose last, row by row, is what -1 - row
    stands for among the tokens of the next batch."""

    def launch_step(
        self, stack: Any, batch: Any, kv: Any, sliding: Any, head: Head, draw: Any
    ) -> Any:
        """`Ops.hidden`, and `Ops.choose` of its rows without edits and logprobs, begun only.
        Returns what `collect` takes."""

    def collect(self, chosen: Any) -> SamplerOutput:
        """Wait for it. The last two that were begun can be collected."""
