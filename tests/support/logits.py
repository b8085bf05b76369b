"""The sampler on logits that a test gives, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pageturner.executor import sampler
from pageturner.executor.grammar import NO_MASKS, Masks, allowed
from pageturner.executor.processors import edits_of
from pageturner.kernels.base import F32, Ops, Tensor
from pageturner.kernels.choosing import Head, SamplerOutput
from pageturner.kernels.composites import Composites
from pageturner.kernels.edits import apply_edits
from pageturner.scheduler.types import Output, Sequence


class GivenLogits:
    """A decoder whose hidden rows are their own logits: the default body of `Ops.choose` behind the head."""

    def __init__(self, ops: Ops, vocabulary: int) -> None:
        self.spec = SimpleNamespace(vocab=vocabulary)
        self._ops = ops

    def choose(self, hidden: F32, *rest: Any) -> SamplerOutput:
        behind = SimpleNamespace(
            logits=lambda x, *_: x.copy(),
            sample=self._ops.sample,
            top_logprobs=self._ops.top_logprobs,
        )
        return Composites.choose(behind, hidden, None, *rest)


def choose(
    ops: Ops, logits: F32, sequences: list[Sequence], grammars: Masks = NO_MASKS
) -> list[Output]:
    """An Output for each row of logits [R, V]."""
    decoder: Any = GivenLogits(ops, logits.shape[1])
    return sampler.choose(decoder, logits, sequences, grammars)


class SameLogits:
    """A decoder that has these logits [V], to the bit, for any rows of ones [R, 32]: by the backend's own
    head, whose norm leaves ones as they are and whose matrix has the logits in its first column."""

    def __init__(self, ops: Ops, logits: F32) -> None:
        self.spec = SimpleNamespace(vocab=len(logits))
        self._ops = ops
        matrix = np.zeros((len(logits), 32), np.float32)
        matrix[:, 0] = logits
        weight = Tensor("head", "F32", matrix.shape, matrix.reshape(-1).view(np.uint8))
        self._head = Head(np.ones(32, np.float32), 0.0, ops.pack_weight(weight))

    def choose(self, hidden: F32, *rest: Any) -> SamplerOutput:
        return self._ops.choose(hidden, self._head, *rest)

    def outputs(self, sequences: list[Sequence]) -> list[Output]:
        decoder: Any = self
        return sampler.choose(decoder, np.ones((len(sequences), 32), np.float32), sequences)


def edited(logits: F32, sequences: list[Sequence], grammars: Masks = NO_MASKS) -> F32:
    """Logits [R, V] behind the grammars and processors of their sequences."""
    found = logits.copy()
    bits = allowed(grammars, sequences, logits.shape[1])
    apply_edits(found, bits, edits_of(sequences))
    return found
