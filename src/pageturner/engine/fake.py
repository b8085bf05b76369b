"""Executors without a model: they make every test of server, supervisor and scheduler run in
seconds.

The fake one computes tokens that depend on every token before them, as a real model's do; the null
one answers the same token always and costs nothing, which leaves only the engine's own overhead to
measure.
"""

from __future__ import annotations

import time
import zlib
from array import array

from pageturner.executor.fault_injection import inject
from pageturner.executor.sampler import NOT_A_NUMBER
from pageturner.request import Logprob, PromptLogprob
from pageturner.scheduler.types import Item, Output, Plan, Result, Sequence


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The truth of the fake model: a hash of all tokens so far."""
    return zlib.crc32(array("i", tokens).tobytes()) % vocab_size


class FakeExecutor:
    """Deterministic tokens; a step takes `seconds_per_step` plus `seconds_per_token` for each
    row."""

    def __init__(
        self, vocab_size: int, seconds_per_step: float = 0.0, seconds_per_token: float = 0.0
    ) -> None:
        self._vocab_size = vocab_size
        self._per_step = seconds_per_step
        self._per_token = seconds_per_token

    def run(self, plan: Plan) -> Result:
        pause = self._per_step + self._per_token * plan.tokens
        if pause > 0:
            time.sleep(pause)
        outputs = [self._output(i.sequence) if i.wants_logits else Output() for i in plan.items]
        for item, output in zip(plan.items, outputs, strict=True):
            if item.sequence.request.params.pooling:
                output.pooled = _pooled(item)
            else:
                output.prompt_logprobs = [
                    self._score(item.sequence, position) for position in item.scored
                ]
        return Result(outputs)

    def _score(self, sequence: Sequence, position: int) -> PromptLogprob:
        token, count = sequence.tokens[position + 1], sequence.request.params.prompt_logprobs or 0
        top = tuple(((token + k) % self._vocab_size, -0.25 - k) for k in range(count))
        return (-0.25, 1, top)

    def _output(self, sequence: Sequence) -> Output:
        token = next_token(sequence.tokens, self._vocab_size)
        params = sequence.request.params
        if inject(sequence):
            return Output(failure=NOT_A_NUMBER)
        if params.beam_width:
            count = (1 + max(1, len(params.stop_ids))) * params.beam_width
            return Output(
                candidates=[((token + k) % self._vocab_size, -0.5 - k) for k in range(count)]
            )
        early = params.forced_end is not None or sequence.generated < params.min_tokens
        if params.forced_end is not None and sequence.generated + 1 >= params.forced_end:
            token = params.stop_ids[0]
        elif early and token in params.stop_ids:
            token = next(t for t in range(self._vocab_size) if t not in params.stop_ids)
        if params.logprobs is None:
            return Output([token])
        top = tuple(((token + k) % self._vocab_size, -0.5 - k) for k in range(params.logprobs))
        logprob: Logprob = (-0.5, top)
        return Output([token], [logprob])


def _pooled(item: Item) -> tuple[int, bytes] | None:
    """Return the sums over positions of their tokens and of 1."""
    positions = [*item.scored, *([item.sequence.prompt_len - 1] if item.wants_logits else [])]
    values = [item.sequence.tokens[position] for position in positions]
    return (len(positions), array("q", [sum(values), len(values)]).tobytes()) if positions else None


class NullExecutor:
    """Token 0 for whoever wants one."""

    def run(self, plan: Plan) -> Result:
        outputs = [Output([0]) if item.wants_logits else Output() for item in plan.items]
        for item, output in zip(plan.items, outputs, strict=True):
            params, start = item.sequence.request.params, item.sequence.request.logits_from
            if start is not None and not params.pooling:
                output.prompt_logprobs = [(0.0, 1, ())] * len(item.scored)
        return Result(outputs)
