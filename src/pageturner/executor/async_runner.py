"""Steps that are launched and collected later, on a backend that chooses tokens without waiting.

Owns which requests can be part of such steps, and which rows of a step take their tokens from the
one before it. The KV and everything else are the Runner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np

from pageturner.executor import sampler
from pageturner.executor.batch import NO_ROWS
from pageturner.executor.processors import edits_nothing
from pageturner.executor.runner import Runner
from pageturner.kernels.choosing import ChoosesLater, Draw, SamplerOutput
from pageturner.models.decoder import Decoder
from pageturner.policies.drafts import PricedDrafts
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Plan, Result, Sequence


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """rows: of the sequences whose next token is chosen; chosen: what the backend gave for them;
    ahead: whether it was launched before the step in front of it was collected."""

    items: list[Item]
    ahead: bool
    places: list[int]
    rows: dict[Sequence, int]
    chosen: Any


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


class AsyncRunner:
    """Runs steps of a Runner's in two halves. drafts: the Runner's drafter; steps with drafts are
    its alone."""

    def __init__(
        self,
        runner: Runner,
        decoder: Decoder,
        later: ChoosesLater,
        drafts: PricedDrafts | None = None,
    ) -> None:
        self._runner, self._decoder, self._later = runner, decoder, later
        self._crowd = Crowd([])
        self._drafts = drafts
        self._newest: LaunchedStep | None = None
        self.holds = False
        if drafts is not None:
            drafts.steps_ahead(self.can_run_async)

    def can_run_async(self, request: Request) -> bool:
        """Nothing of it looks at tokens: no grammar, penalty or other edit of logits, no search.
        Nor does it want logprobs, whose logits would have to leave the device."""
        params = request.params
        asked = (
            params.beam_width
            or params.structured_outputs is not None
            or params.logprobs is not None
        )
        plain = not asked and request.logits_from is None and not params.pooling
        return plain and edits_nothing(params)

    def launch(self, plan: Plan, before: LaunchedStep | None) -> LaunchedStep:
        batch, sliding = self._runner.pack(plan, before.rows if before else NO_ROWS)
        places = [i for i, item in enumerate(plan.items) if item.wants_logits]
        items = [plan.items[place] for place in places]
        sequences = [item.sequence for item in items]
        if self._crowd.sequences != sequences:
            self._crowd = Crowd(sequences)
        draw = self._crowd.draws([item.start + item.n for item in items])
        chosen = self._later.launch_step(
            self._decoder.stack, batch, self._runner.storage[0], sliding, self._decoder.head, draw
        )
        rows = {seq: row for row, seq in enumerate(sequences)}
        self._newest = LaunchedStep(plan.items, before is not None, places, rows, chosen)
        return self._newest

    def collect(self, launched: LaunchedStep) -> Result:
        begin = perf_counter()
        found = self._later.collect(launched.chosen)
        waited = perf_counter() - begin
        outputs = self._outputs(launched, found)
        self.holds = False
        if self._drafts is not None:
            last = launched is self._newest
            self.holds = self._drafts.follow(
                launched.items, outputs, ahead=launched.ahead, spare=waited, last=last
            )
        return Result(outputs)

    def _outputs(self, launched: LaunchedStep, found: SamplerOutput) -> list[Output]:
        outputs = [Output() for _ in launched.items]
        for place, token, logit in zip(
            launched.places, found.ids.tolist(), found.logits.tolist(), strict=True
        ):
            outputs[place] = (
                Output([token]) if isfinite(logit) else Output(failure=sampler.NOT_A_NUMBER)
            )
        return outputs
