"""How many replicas might be enough: where a search begins, told by queues of whole prompts.

Owns the guess. It decides nothing, so it may be wrong: prompts are computed one after another by the replica
that the placement chose, answers take what a token takes alone, caches forget nothing. Must not know
schedulers, blocks or memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from pageturner.lab.bench.prompt_alone import all_requests, prefill_seconds, prompt_length
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation.step_cost import StepCost
from pageturner.lab.traffic.block_names import BlockNames
from pageturner.lab.traffic.traffic import Pieces, Prompt, Traffic
from pageturner.router.load_balancer import Placement, PrefixMap
from pageturner.telemetry.work import StepWork

CHUNK = 512  # tokens of a prompt that have one name


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A request by its lengths in tokens. names: of each whole chunk of its prompt."""

    arrival: float
    prompt: int
    answer: int
    names: tuple[object, ...]


def named_prompts(traffic: Traffic) -> list[NamedPrompt]:
    """Each request, by the time at which it comes if every one before it is answered at once."""
    made = BlockNames(CHUNK)
    found = [
        NamedPrompt(
            one.arrival,
            prompt_length(one.prompt),
            one.answer_length,
            tuple(_names(one.prompt, made)),
        )
        for one in all_requests(traffic)
    ]
    return sorted(found, key=lambda one: one.arrival)


def _names(prompt: Prompt, made: BlockNames) -> list[object]:
    if isinstance(prompt, Pieces):
        return [*made.keys(prompt.parts)]
    return [prompt[end - CHUNK : end] for end in range(CHUNK, len(prompt) + 1, CHUNK)]


@dataclass(slots=True)
class FirstGuess:
    """budget: tokens of a step, 0: no limit; caching: whether a replica keeps what it has computed."""

    prompts: list[NamedPrompt]
    cost: StepCost
    place: Callable[[], Placement]
    targets: LatencyTargets
    budget: int
    caching: bool

    def replicas(self, most: int) -> int:
        """The least number, at most `most`, that seems enough; 1 where none does."""
        low, high, most = 0, 1, min(most, len(self.prompts))
        while not self.enough(high):
            if high >= most:
                return 1
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.enough(middle) else (middle, high)
        return high

    def enough(self, replicas: int) -> bool:
        """Whether so many seem enough."""
        place, sent, targets = self.place(), PrefixMap(1), self.targets
        loads, free, ends = [0] * replicas, [0.0] * replicas, list[tuple[float, int]]()
        left = (1 - targets.share) * len(self.prompts)
        for one in self.prompts:
            while ends and ends[0][0] <= one.arrival:
                loads[heapq.heappop(ends)[1]] -= 1
            had = {at: CHUNK * count for at, count in sent.hints(one.names).items()}
            chosen = place(loads, had, one.prompt)
            sent.sent(one.names, chosen)
            cached = min(had.get(chosen, 0), one.prompt - 1) if self.caching else 0
            first = max(one.arrival, free[chosen])
            first += prefill_seconds(self.cost, cached, one.prompt, self.budget)
            token = self.cost.seconds(StepWork(1, 1, 1, one.prompt + 1, one.prompt + 1))
            loads[chosen], free[chosen] = loads[chosen] + 1, first
            heapq.heappush(ends, (first + (one.answer - 1) * token, chosen))
            left -= not targets.met(first - one.arrival, token if one.answer > 1 else 0.0)
            if left < 0:
                return False
        return True
