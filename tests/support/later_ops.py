"""Backends whose steps are collected later, as on a device: with a model, and without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pageturner.engine.fake import FakeExecutor
from pageturner.kernels.base import Batch, Stack
from pageturner.kernels.choosing import ChooseArgs, Draw, Head, SamplerOutput
from pageturner.kernels.reference import ReferenceOps
from pageturner.request import Request
from pageturner.scheduler.types import Output, Plan, Result, Sequence


class LaterOps(ReferenceOps):
    """The reference, which keeps what it chose until it is asked. `waiting`: what was not collected yet."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = np.empty(0, np.int32)
        self.waiting = 0

    @property
    def later(self) -> LaterOps:
        return self

    def launch_step(
        self, stack: Stack, batch: Batch, kv: Any, sliding: Any, head: Head, draw: Draw
    ) -> SamplerOutput:
        unknown = batch.tokens < 0
        if unknown.any():
            tokens = batch.tokens.copy()
            tokens[unknown] = self.chosen[-1 - tokens[unknown]]
            batch = replace(batch, tokens=tokens)
        hidden, adapters = self.hidden(stack, batch, kv, sliding), None
        if batch.adapters is not None:
            of_row = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
            adapters = [batch.adapters[sequence] for sequence in of_row.tolist()]
        found = SamplerOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        if len(batch.logit_rows):
            found = self.choose(hidden, head, ChooseArgs(draw, adapters=adapters))
        self.chosen, self.waiting = found.ids, self.waiting + 1
        assert self.waiting <= 2, "more than two steps under way"
        return found

    def collect(self, chosen: SamplerOutput) -> SamplerOutput:
        self.waiting -= 1
        return chosen


class LaterExecutor(FakeExecutor):
    """The fake executor in two halves. poison: a request in whose steps something raises, and where: in
    "launch" or in "collect"; whoever runs it in the plain way meets it too."""

    holds = False

    def __init__(self, vocab_size: int, poison: int = 0, where: str = "collect") -> None:
        super().__init__(vocab_size)
        self._poison, self._where = poison, where
        self.launched = self.run_plainly = 0

    def can_run_async(self, request: Request) -> bool:
        return request.params.logprobs is None and not request.params.beam_width

    def run(self, plan: Plan) -> Result:
        self.run_plainly += 1
        assert all(item.sequence.blocks for item in plan.items), "computed without blocks"
        self._meet([item.sequence for item in plan.items])
        return super().run(plan)

    def launch(self, plan: Plan, before: dict[Sequence, Output] | None) -> dict[Sequence, Output]:
        self.launched += 1
        if self._where == "launch":
            self._meet([item.sequence for item in plan.items])
        outputs = {}
        for item in plan.items:
            seq = item.sequence
            unknown = [] if item.start < len(seq.tokens) else (before or {})[seq].tokens or [0]
            then = Sequence(seq.request, seq.index, [*seq.tokens, *unknown])
            outputs[seq] = self._output(then) if item.wants_logits else Output()
        return outputs

    def collect(self, launched: dict[Sequence, Output]) -> Result:
        if self._where == "collect":
            self._meet(list(launched))
        return Result(list(launched.values()))

    def _meet(self, sequences: list[Sequence]) -> None:
        if any(seq.request.id == self._poison and seq.generated >= 3 for seq in sequences):
            raise ArithmeticError("poison")
