"""The same comparison without a clock: the scheduler's own plans, each step taking what it costs.

Owns the engine that stands for a measured one, and the long prompts among running answers that show
what a batching policy does to whoever is being answered. Must not know what is advised, nor how it
is drawn. What else a machine does changes nothing here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pageturner.errors import EngineFault
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.compare.comparison import FAKE_VOCAB, Contender, predicted_engine
from pageturner.lab.simulation.calibration import (
    QUIETER,
    KeptCosts,
    costs_file,
    fit_runs,
    keep,
    pace_of,
)
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.simulation.step_cost import CalibratedCost, StepCost, work_of_step
from pageturner.lab.traffic.traffic import OpenLoop, TrafficRequest
from pageturner.request import Request
from pageturner.telemetry.work import MachineLimits, StepWork, work_of_spans

STALLS = 24  # requests, of which every fourth has a long prompt
LONG, SHORT = (1000, 16), (24, 96)  # tokens of prompt and answer
LOAD = 0.7  # of what the machine can do


@dataclass(frozen=True, slots=True)
class Reckoned:
    """Runs that were reckoned. same: of the requests that were measured; stalls, stalled: long
    prompts among running answers, none where the model's context is too short for them. words:
    where costs come from."""

    same: dict[Contender, RecordedRun]
    stalls: list[Request]
    stalled: dict[Contender, RecordedRun]
    words: str


def standing_for(bench: EngineBench, cost: StepCost, pace: MachineLimits | None) -> EngineBench:
    """A measured engine with its settings and memory, whose steps take what `cost` says. pace:
    limits by which it sizes steps where doctor measured none."""
    built = bench.built
    return predicted_engine(
        replace(built, pace=built.pace if built.limits else pace),
        bench.config,
        cost,
        built.max_model_len,
    )


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances in which runs were measured. others: share of the machine that other
    programs took; own: seconds of processors that the runs took; when: in words."""

    others: float
    own: float
    when: str


def costs_of(
    bench: EngineBench, runs: Sequence[RecordedRun], about: Circumstances
) -> tuple[KeptCosts, str] | None:
    """Return what steps cost here, and where that is from: kept, or fitted to these runs and kept
    from now on. None if too little was run to tell."""
    try:
        cost = fit_runs(*runs)
    except EngineFault:
        return None
    if about.others > QUIETER:
        cost = _undisturbed(
            cost, runs, about.own, bench.config.threads or len(os.sched_getaffinity(0))
        )
    mine = KeptCosts(cost, about.others, about.when, pace_of(bench.built))
    real = bench.config.backend not in ("fake", "null")
    known = keep(costs_file(bench.built, bench.config), mine) if real else mine
    busy = (
        f", while others took {known.others:.0%} of the machine" if known.others > QUIETER else ""
    )
    return known, f"measured {known.when}{busy}"


def _undisturbed(
    cost: CalibratedCost, runs: Sequence[RecordedRun], own: float, threads: int
) -> CalibratedCost:
    """Costs that add up to the seconds of processors that the steps took: others make a step
    longer, and no more work."""
    told = sum(cost.seconds(work_of_step(step)) for run in runs for step in run.steps if step.items)
    share = min(own / threads / max(told, 1e-9), 1.0)
    return msgspec.structs.replace(cost.times(share), gap=share * cost.gap)


def reckon(
    bench: EngineBench,
    each: Sequence[Contender],
    requests: list[Request],
    cost: StepCost,
    words: str,
) -> Reckoned:
    """Run all contenders once, on an engine without a clock of its own, and once more among long
    prompts."""
    stalls = stall_requests(cost, bench.built.max_model_len)
    return Reckoned(_run(bench, each, requests), stalls, _run(bench, each, stalls), words)


def _run(
    bench: EngineBench, each: Sequence[Contender], requests: list[Request]
) -> dict[Contender, RecordedRun]:
    if not requests:
        return {}
    return {contender: bench.run(requests, contender.settings(bench.config)) for contender in each}


def stall_requests(cost: StepCost, context: int) -> list[Request]:
    """Three short ones at a time, and one with a long prompt when a quarter of their answers is
    there; they come at LOAD of what this machine can do."""
    long = min(LONG[0], context - LONG[1] - 8)
    if long < 4 * SHORT[0]:
        return []
    dice, found = random.Random(0), []
    apart, behind = _times(cost, long)
    for number in range(STALLS):
        last = number % 4 == 3
        prompt, answer = (long, LONG[1]) if last else SHORT
        answer = min(answer, context - prompt - 8)
        tokens = tuple(dice.randrange(1, FAKE_VOCAB) for _ in range(prompt))
        at = apart * (number // 4) + behind * last
        found.append(TrafficRequest(tokens, answer, max_tokens=answer, arrival=at))
    return OpenLoop(found).engine_requests()


def _times(cost: StepCost, long: int) -> tuple[float, float]:
    """Seconds between two groups of four, and from the beginning of one to its long prompt."""
    prompts, answers = long + 3 * SHORT[0], LONG[1] + 3 * SHORT[1]
    chunk = cost.seconds(work_of_spans([(long // 2, 128)], 0)) / 128
    context = 3 * (SHORT[0] + SHORT[1] // 2)
    step = cost.seconds(StepWork(3, 3, 3, context, context))
    return (prompts * chunk + answers * step / 3) / LOAD, SHORT[1] / 4 * step
