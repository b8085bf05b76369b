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

    agent: int
    turn: int
    tenant: str
    prompt: int
    cached: int
    shared: int | None
    ttft: float = 0.0
    block: int = BLOCK

    @property
    def found(self) -> bool | None:
        """Whether all whole blocks of it were there; but one: the last token before is computed again."""
        if self.shared is None:
            return None
        return self.cached >= (self.shared // self.block - 1) * self.block


@dataclass(slots=True)
class Outcome:
    """All turns, in the order in which they began; seconds until the last one had ended; blocks in use or
    wanted again, by time."""

    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def share(self, tenants: tuple[str, ...] = ()) -> float:
        """Of the turns behind a first one, how many found what had been computed for them."""
        asked = [
            turn
            for turn in self.turns
            if turn.found is not None and (not tenants or turn.tenant in tenants)
        ]
        return sum(bool(turn.found) for turn in asked) / max(1, len(asked))

    def ttft(self, tenants: tuple[str, ...] = (), first: bool | None = None) -> list[float]:
        chosen = [
            turn.ttft
            for turn in self.turns
            if (not tenants or turn.tenant in tenants)
            and (first is None or first == (turn.shared is None))
        ]
        return chosen or [0.0]

    @property
    def computed(self) -> int:
        """Prompt tokens that no cache gave."""
        return sum(turn.prompt - turn.cached for turn in self.turns)


@dataclass(slots=True)
class Watcher:
    """Listens to a scheduler."""

    traffic: AgentTraffic
    outcome: Outcome = field(default_factory=Outcome)
    _of: dict[Sequence, Turn] = field(default_factory=dict)

    @property
    def listener(self) -> Listener:
        return Listener(attached=self.attached, served=self.served)

    def attached(self, seq: Sequence, fresh: int) -> None:
        if seq in self._of:  # behind a preemption
            return
        number, turn = divmod((seq.request.prompt[-1] - OWN) // 2, MAX_TURNS)
        shared = self.traffic.shared(number, turn)
        tenant = seq.request.tenant
        self._of[seq] = one = Turn(number, turn, tenant, seq.prompt_len, fresh, shared)
        self.outcome.turns.append(one)

    def served(self, seq: Sequence, n: int, now: float) -> None:
        if not seq.generated and seq.computed + n >= len(seq.tokens) and seq in self._of:
            self._of[seq].ttft = now - seq.request.arrival
        self.outcome.seconds = now


def run(agents: list[Agent], blocks: int, *, hints: bool, **settings: object) -> Outcome:
    """What becomes of these agents with so much memory."""
    traffic = AgentTraffic(agents, hints=hints)
    watcher, stacks = Watcher(traffic), list[SchedulerStack]()
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, **settings)  # type: ignore[arg-type]

    def scheduler() -> object:
        stack = make_scheduler(
            config, num_blocks=blocks, max_model_len=8192, listeners=(watcher.listener,)
        )
        stacks.append(stack)
        return stack.scheduler

    simulator = Simulator(scheduler, COST, num_blocks=blocks)  # type: ignore[arg-type]
    simulator.run(traffic, progress=False)
    watcher.outcome.stats = stacks[0].scheduler.stats()
    return watcher.outcome


def demand(agents: list[Agent], block: int = BLOCK) -> tuple[float, int]:
    """Blocks of all conversations under way, each from its first turn to its last, where memory is boundless:
    mean over the time in which all lanes are at work, and most."""
    traffic = AgentTraffic(agents, hints=True)
    used: list[tuple[float, float]] = []
    config = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=256, max_session_share=1.0, block_size=block
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
    busy = [live for at, live in used if 0.2 * end < at < 0.6 * end]
    return statistics.mean(busy), int(max(live for _, live in used))
