"""The real executor: a plan in, its result out. Owns the KV storage of one model.

Must not know policies or queues. Running the same plan twice before its commit gives the same result.
"""

from __future__ import annotations

from typing import Protocol

from pageturner.core.types import Output, Plan, Result
from pageturner.kernels.base import KV, Ops
from pageturner.models.decoder import Decoder
from pageturner.runtime import sampler
from pageturner.runtime.batch import pack


class Executor(Protocol):
    """Whoever turns plans into results: the Runner, or one of the fakes."""

    def run(self, plan: Plan) -> Result:
        """Compute one step. Raises only for what kills the engine; else it is one sequence's Failure."""


class Runner:
    """Runs plans on a model. `kv` holds `num_blocks` blocks and one more, scratch, that ballast reads."""

    def __init__(self, decoder: Decoder, ops: Ops, kv: KV, *, num_blocks: int, block_size: int) -> None:
        self._decoder = decoder
        self._ops = ops
        self._kv = kv
        self._block_size = block_size
        self._scratch = num_blocks

    def run(self, plan: Plan) -> Result:
        if plan.copies:
            self._ops.copy_blocks(self._kv, plan.copies)
        batch = pack(plan, self._block_size, self._scratch)
        logits = self._decoder.forward(batch, self._kv)
        ending = [item.sequence for item in plan.items if item.wants_logits]
        chosen = iter(sampler.choose(self._ops, logits, ending) if ending else ())
        return Result([next(chosen) if item.wants_logits else Output() for item in plan.items])
