"""One simulation: an engine with its settings, a number of replicas, a placement, and traffic.

Owns how an engine's settings become a simulated one, and the sweep over loads. Must not know flags
or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import scheduler_of
from pageturner.errors import bad_setting
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import CertainMisses, LatencyTargets
from pageturner.lab.simulation.fleet import Roles, SimulatedTiers, TierSizes, fleets
from pageturner.lab.simulation.replica_changes import (
    Autoscaling,
    Changes,
    FailingReplicas,
    Failures,
    ScaledReplicas,
    StreamMoves,
)
from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import StepCost
from pageturner.lab.traffic.block_names import BlockNames, known_by_pieces
from pageturner.lab.traffic.traffic import Traffic
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.router.load_balancer import PLACEMENTS, PrefixMap
from pageturner.scheduler.blocks import BlockPool

MAX_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """Replicas of one engine and the traffic that comes to them.

    cost     seconds of a step
    traffic  makes the traffic of a run; its argument multiplies the recorded rate
    rate     that argument
    tiers    slower memory for KV of each replica
    roles    which of the replicas compute prompts for the others
    failures what goes wrong with replicas; scaling: how their number follows the load. One of them
    at most
    loads    what placement counts a replica's load in: predicted tokens, or requests
    """

    config: EngineConfig
    sizes: KVSizes
    max_model_len: int
    cost: StepCost
    traffic: Callable[[float], Traffic]
    targets: LatencyTargets
    replicas: int = 1
    placement: str = "prefix_aware"
    loads: str = "requests"
    rate: float = 1.0
    tiers: TierSizes | None = None
    roles: Roles | None = None
    failures: Failures | None = None
    scaling: Autoscaling | None = None

    def run(
        self,
        *,
        progress: bool | None = None,
        give_up: bool = False,
        cancelled: Callable[[], bool] | None = None,
        traffic: Traffic | None = None,
    ) -> dict[str, Any]:
        """Simulate it. EngineFault('bad_setting') for names and sizes that do not exist.

        give_up    end the run when too many requests miss the targets, whatever comes: then
                   `given_up` is the share of the traffic that had been seen, and goodput_share the
                   most it can become
        cancelled  ends it too, as if nothing had been seen
        traffic    what `self.traffic` made before; None: made now
        """
        self.check()
        traffic = traffic or self.traffic(self.rate)
        names = self._block_names(traffic)
        listeners = (names.listener,) if names else ()
        simulator = Simulator(
            lambda: (
                scheduler_of(
                    self.config, self.sizes, self.max_model_len, listeners=listeners
                ).scheduler
            ),
            self.cost,
            num_blocks=self.sizes.blocks,
            fleets=fleets(
                self.replicas, self.roles, PLACEMENTS[self.placement], self._prefixes, self.loads
            ),
            roles=self.roles,
            speculation=self.config.speculation,
            leaps=self.loads == "requests",  # else replicas report what lies in the middle of one
            tiers=self._tiers if self.tiers else None,
            changes=self._changes(),
            cancelled=cancelled,
            names=names,
        )
        if self.failures:
            simulator.moves = StreamMoves(self.failures.move, self.failures.delay)
        if give_up:
            simulator.misses = CertainMisses(self.targets, traffic.total)
        simulator.run(traffic, progress=progress)
        about = {
            "replicas": self.replicas,
            "placement": self.placement,
            "rate": self.rate,
            "policy": self.config.policy,
            "order": self.config.order,
            "roles": self._roles(),
        }
        found = about | simulator.metrics.figures(self.targets) | {"engines": simulator.figures()}
        if simulator.changes is not None:
            turnover = simulator.changes.figures(simulator.metrics.begin, simulator.metrics.end)
            found["turnover"] = turnover | simulator.moves.figures()
        if simulator.misses.hopeless:
            found["given_up"] = simulator.seen / traffic.total
            found["goodput_share"] = simulator.misses.share
        return found

    def _block_names(self, traffic: Traffic) -> BlockNames | None:
        named = self.config.enable_prefix_caching and known_by_pieces(traffic)
        return BlockNames(self.config.block_size) if named else None

    def _changes(self) -> Changes | None:
        if self.scaling is not None:
            return ScaledReplicas(self.scaling, self.targets, self.check().scheduler.slots)
        return FailingReplicas(self.failures, self.replicas) if self.failures else None

    def _roles(self) -> str:
        """The roles as the flag writes them; "" where every replica does everything."""
        apart = self.roles.prefill if self.roles else 0
        return f"prefill={apart},decode={self.replicas - apart}" if apart else ""

    def _prefixes(self) -> PrefixMap | None:
        return PrefixMap() if self.placement == "prefix_aware" else None

    def _tiers(self, pool: BlockPool) -> SimulatedTiers:
        assert self.tiers is not None
        return SimulatedTiers(pool.full, self.tiers, pool.block_size)

    def check(self) -> SchedulerStack:
        """The scheduler of one of its replicas. EngineFault('bad_setting') for names and sizes that
        do not exist."""
        if self.placement not in PLACEMENTS:
            raise bad_setting(
                f"unknown placement {self.placement!r}: one of {', '.join(PLACEMENTS)}"
            )
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise bad_setting(f"replicas are 1 to {MAX_REPLICAS:,}, not {self.replicas:,}")
        if self.loads == "tokens" and (self.roles or self.failures or self.scaling):
            message = (
                "loads are counted in requests where replicas have roles, or come and go: leave"
            )
            raise bad_setting(f"{message} --loads tokens out")
        try:
            return scheduler_of(self.config, self.sizes, self.max_model_len)
        except ValueError as error:
            raise bad_setting(str(error)) from error


def sweep(
    scenario: Scenario, rates: list[float], *, progress: bool | None = None
) -> list[dict[str, Any]]:
    """A run at each of these rates: how goodput falls as the load grows."""
    return [replace(scenario, rate=rate).run(progress=progress) for rate in rates]
