"""Facts of a step that the next one, which mostly has the same sequences, uses again."""

from __future__ import annotations

from array import array

import numpy as np

from pageturner.executor import sampler
from pageturner.kernels.base import I32
from pageturner.kernels.choosing import Draw
from pageturner.scheduler.types import Plan, Sequence


def i32(values: list[int]) -> I32:
    """Several times as fast as numpy's own conversion, and it touches little: a step finds cold
    caches."""
    return np.frombuffer(array("i", values), np.int32) if values else np.empty(0, np.int32)


class BlockRows:
    """The block ids of sequences as bytes of int32: few of them change from one plan to the next,
    and making them anew takes longer than all else of a step."""

    def __init__(self) -> None:
        self._kept: dict[Sequence, tuple[list[int], bytes]] = {}

    def of(self, plan: Plan) -> list[bytes]:
        before = self._kept
        self._kept = {}
        for item in plan.items:
            blocks = item.sequence.blocks
            found = before.get(item.sequence)
            if found is None or found[0] != blocks:
                found = list(blocks), i32(blocks).tobytes()
            self._kept[item.sequence] = found
        return [row for _, row in self._kept.values()]


class Crowd:
    """Sequences that are drawn for in many steps: all but the noise is made once."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        streams = [sampler.stream(one.request.params.seed or 0, one.index) for one in sequences]
        self._streams = np.array(streams, np.uint64)
        self._draws = sampler.draws(sequences)

    def draws(self, lengths: list[int]) -> Draw:
        """The arrays of `sampler.draws`. lengths: how many tokens each will have had by then."""
        if not self._draws[0].any():
            return self._draws
        noise = sampler.noise(self._streams, np.array(lengths, np.uint64))
        return *self._draws[:4], noise.astype(np.float32)
