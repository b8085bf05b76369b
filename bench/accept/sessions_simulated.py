"""Agents on a simulated engine: what they ask finds its KV, or does not.

Owns what is measured of them, and how large the memory is that they overcommit. The scheduler, its blocks and
the policy of sessions are the product's own; only the time of a step is made up.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from agent_traffic import MAX_TURNS, Agent, AgentTraffic

from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import OWN
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import SchedulerStack, make_scheduler
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.types import Sequence

BLOCK = 16
# Seconds of a step: once, for each of the first 8 rows, each row, sequence, logit, position read, pair
COST = CalibratedCost([4e-3, 1e-4, 6e-4, 2e-4, 6e-4, 2e-8, 2e-8], (0.0, 0.0), 0, {}, 2e-4, {})
BOUNDLESS = 1 << 16  # blocks


@dataclass(slots=True)
class Turn:
    """One that ran. cached: prompt tokens that it found; shared: that its conversation had computed before,
    None for the first turn of all."""

    cached: int
    shared: int | None

    @property
    def found(self) -> bool | None:
        """Whether all whole blocks of it were there; but one: the last token before is computed again."""
        if self.shared is None:
            return None
        return self.cached >= (self.shared // BLOCK - 1) * BLOCK


@dataclass(slots=True)
class Outcome:
    """All turns, in the order in which they began; seconds until the last one had ended."""

    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0

    def share(self) -> float:
        """Of the turns behind a first one, how many found what had been computed for them."""
        asked = [turn for turn in self.turns if turn.found is not None]
        return sum(bool(turn.found) for turn in asked) / max(1, len(asked))


@dataclass(slots=True)
class Watcher:
    """Listens to a scheduler."""

    traffic: AgentTraffic
    outcome: Outcome = field(default_factory=Outcome)
    _begun: set[Sequence] = field(default_factory=set)

    @property
    def listener(self) -> Listener:
        return Listener(attached=self.attached, served=self.served)

    def attached(self, seq: Sequence, fresh: int) -> None:
        if seq in self._begun:  # behind a preemption
            return
        number, turn = divmod((seq.request.prompt[-1] - OWN) // 2, MAX_TURNS)
        shared = self.traffic.shared(number, turn)
        self._begun.add(seq)
        self.outcome.turns.append(Turn(fresh, shared))

    def served(self, seq: Sequence, n: int, now: float) -> None:
        self.outcome.seconds = now


def run(agents: list[Agent], blocks: int, *, hints: bool) -> Outcome:
    """What becomes of these agents with so much memory."""
    traffic = AgentTraffic(agents, hints=hints)
    watcher = Watcher(traffic)
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256)

    def scheduler() -> object:
        listeners = (watcher.listener,)
        made = make_scheduler(config, num_blocks=blocks, max_model_len=8192, listeners=listeners)
        return made.scheduler

    simulator = Simulator(scheduler, COST, num_blocks=blocks)  # type: ignore[arg-type]
    simulator.run(traffic, progress=False)
    return watcher.outcome


def demand(agents: list[Agent]) -> float:
    """Blocks of all conversations under way, each from its first turn to its last, where memory is boundless:
    the mean over the time in which all lanes are at work."""
    traffic = AgentTraffic(agents, hints=True)
    used: list[tuple[float, float]] = []
    config = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=256, max_session_share=1.0, block_size=BLOCK
    )
    stacks: list[SchedulerStack] = []

    def scheduler() -> object:
        stacks.append(make_scheduler(config, num_blocks=BOUNDLESS, max_model_len=8192))
        return stacks[0].scheduler

    def watch(replica: int, begin: float, end: float, plan: object) -> None:
        live = sum(one.pays for one in stacks[0].sessions if one.open or one.keys)
        used.append((end, live))

    simulator = Simulator(scheduler, COST, num_blocks=BOUNDLESS, watch=watch, leaps=False)  # type: ignore[arg-type]
    simulator.run(traffic, progress=False)
    end = used[-1][0]
    return statistics.mean(live for at, live in used if 0.2 * end < at < 0.6 * end)
