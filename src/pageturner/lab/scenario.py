"""One simulation: an engine with its settings, a number of replicas, a placement, and traffic.

Owns how an engine's settings become a simulated one, the search for the fewest replicas, and the sweep over
loads. Must not know flags or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pageturner.config import EngineConfig
from pageturner.errors import EngineFault
from pageturner.lab.request_metrics import LatencyTargets
from pageturner.lab.simulator import Simulator
from pageturner.lab.step_cost import StepCost
from pageturner.lab.traffic import Traffic
from pageturner.router.placement import PLACEMENTS, PrefixMap
from pageturner.runtime.engine_factory import scheduler_of
from pageturner.runtime.kv_memory import KVSizes

MOST_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """Replicas of one engine and the traffic that comes to them.

    cost     seconds of a step
    traffic  makes the traffic of a run; its argument multiplies the recorded rate
    rate     that argument
    """

    config: EngineConfig
    sizes: KVSizes
    max_model_len: int
    cost: StepCost
    traffic: Callable[[float], Traffic]
    targets: LatencyTargets
    replicas: int = 1
    placement: str = "least_loaded"
    rate: float = 1.0

    def run(self, *, progress: bool | None = None) -> dict[str, Any]:
        """Simulate it. EngineFault('bad_setting') for names and sizes that do not exist."""
        if self.placement not in PLACEMENTS:
            message = f"unknown placement {self.placement!r}: one of {', '.join(PLACEMENTS)}"
            raise EngineFault("bad_setting", message)
        if not 1 <= self.replicas <= MOST_REPLICAS:
            message = f"replicas are 1 to {MOST_REPLICAS:,}, not {self.replicas:,}"
            raise EngineFault("bad_setting", message)
        try:
            scheduler_of(self.config, self.sizes, self.max_model_len)
        except ValueError as error:
            raise EngineFault("bad_setting", str(error)) from error
        simulator = Simulator(
            lambda: scheduler_of(self.config, self.sizes, self.max_model_len).scheduler,
            self.cost,
            num_blocks=self.sizes.blocks,
            replicas=self.replicas,
            place=PLACEMENTS[self.placement](),
            prefixes=PrefixMap() if self.placement == "prefix_aware" else None,
        )
        simulator.run(self.traffic(self.rate), progress=progress)
        about = {"replicas": self.replicas, "placement": self.placement, "rate": self.rate,
                 "policy": self.config.policy, "order": self.config.order}  # fmt: skip
        return about | simulator.metrics.figures(self.targets) | {"engines": simulator.figures()}


def fewest_replicas(
    scenario: Scenario, *, progress: bool | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run with the fewest replicas with which enough requests (`targets.share`) meet the targets, and all
    runs that were made to find it. EngineFault('impossible') where more replicas do not help.

    The search takes for granted that more replicas are never worse; the run with one replica less is always
    among those made.
    """
    tried: dict[int, dict[str, Any]] = {}

    def enough(replicas: int) -> bool:
        tried[replicas] = replace(scenario, replicas=replicas).run(progress=progress)
        return bool(tried[replicas]["goodput_share"] >= scenario.targets.share)

    low, high = 0, 1  # low is too few
    while not enough(high):
        if tried[high]["engines"]["most_open"] == 1 or high == MOST_REPLICAS:
            raise _impossible(scenario, tried[high])
        low, high = high, min(2 * high, MOST_REPLICAS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return tried[high], [tried[replicas] for replicas in sorted(tried)]


def _impossible(scenario: Scenario, best: dict[str, Any]) -> EngineFault:
    """Targets that are missed although no replica ever has two requests are missed with any number."""
    return EngineFault(
        "impossible",
        f"no number of replicas meets the targets: with {best['replicas']:,}, where hardly a request meets"
        f" another, {best['goodput_share']:.1%} are within them and {scenario.targets.share:.1%} are wanted"
        f" (TTFT p99 {best['ttft_ms']['p99']:,.0f} ms, TPOT p99 {best['tpot_ms']['p99']:,.1f} ms)",
    )


def sweep(scenario: Scenario, rates: list[float], *, progress: bool | None = None) -> list[dict[str, Any]]:
    """A run at each of these rates: how goodput falls as the load grows."""
    return [replace(scenario, rate=rate).run(progress=progress) for rate in rates]
