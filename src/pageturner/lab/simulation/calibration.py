"""Calibration: the real engine under a short made-up load, its steps fitted, and the fit held
against others.

Owns the loads, the order in which fits and checks take turns, and what is called an error. Must not
know flags.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, scheduler_of
from pageturner.engine.fingerprint import model_mark
from pageturner.engine.machine_limits import processor
from pageturner.errors import EngineFault
from pageturner.executor.kv_memory import KVSizes
from pageturner.formats import hub
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.bench.request_metrics import LatencyTargets, RequestMetrics
from pageturner.lab.reporting.summary import figure_at
from pageturner.lab.simulation import recorded_runs
from pageturner.lab.simulation.recorded_runs import RecordedRun, recorded_config
from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost, fit, work_of_step
from pageturner.lab.traffic.traffic import OpenLoop
from pageturner.lab.traffic.traffic_generators import TokenPrompts, burst_times
from pageturner.private_files import write_json
from pageturner.telemetry.work import MachineLimits

QUIETER = 0.1  # a share of the machine less taken by others is worth more than what is kept


def fit_runs(*runs: RecordedRun) -> CalibratedCost:
    """Fit the cost of a step to recorded runs; the result also says how to simulate their
    engine."""
    header = runs[0].header
    engine = {
        "config": header.config,
        "blocks": header.num_blocks,
        "window": header.window,
        "recent": header.sliding,
        "states": header.states,
        "tails": header.tails,
        "max_model_len": header.max_model_len,
        "model": header.model,
        "fingerprint": header.fingerprint,
        "needs": msgspec.to_builtins(header.needs),
        "limits": msgspec.to_builtins(header.limits),
    }
    return fit((step for run in runs for step in run.steps), engine)


def engine_of(cost: CalibratedCost) -> tuple[EngineConfig, KVSizes, int]:
    """The engine that was calibrated: its settings, blocks and longest sequence."""
    about = cost.engine
    try:
        states = about.get("states", 0), about.get("tails", 0)  # older files are of none
        sizes = KVSizes(about["blocks"], about["window"], about["recent"], *states)
        return recorded_config(about["config"]), sizes, int(about["max_model_len"])
    except (KeyError, TypeError) as error:
        raise EngineFault(
            "calibration", f"the calibration does not say what engine it is of: {error}"
        ) from error


def predicted(run: RecordedRun, cost: CalibratedCost) -> RequestMetrics:
    """Simulate the run's traffic: lengths and arrivals as recorded, step times by the cost."""
    sizes = run.sizes
    simulator = Simulator(
        lambda: scheduler_of(run.config, sizes, run.header.max_model_len).scheduler,
        cost,
        num_blocks=sizes.blocks,
        leaps=False,
    )
    simulator.run(recorded_runs.recorded_traffic([run]), progress=False)
    return simulator.metrics


# name of a figure -> where it stands in RequestMetrics.figures
CHECKED = {
    "throughput": "output_tokens_per_s",
    "TTFT p50": "ttft_ms.p50",
    "TTFT p99": "ttft_ms.p99",
    "TPOT p50": "tpot_ms.p50",
    "TPOT p99": "tpot_ms.p99",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One load that the fit had not seen.

    errors  predicted over measured, less 1, by name of the figure
    drift   measured over predicted seconds of all its steps: how much slower the machine was
    steady  the errors of the same fit with this drift taken out of it: the model's own share
    """

    load: str
    measured: dict[str, float]
    errors: dict[str, float]
    drift: float
    steady: dict[str, float]


def checked(run: RecordedRun, cost: CalibratedCost, name: str) -> Check:
    """Compare the run with its simulation."""
    real = recorded_runs.request_metrics(run).figures(LatencyTargets())
    measured = {key: figure_at(real, path) for key, path in CHECKED.items()}
    steps = [step for step in run.steps if step.items]
    took = sum(step.end - step.start for step in steps)
    told = sum(cost.seconds(work_of_step(step)) - cost.gap for step in steps)
    drift = took / told
    steady = _errors(run, cost.times(drift), measured)
    return Check(name, measured, _errors(run, cost, measured), drift, steady)


def _errors(run: RecordedRun, cost: CalibratedCost, measured: dict[str, float]) -> dict[str, float]:
    made = predicted(run, cost).figures(LatencyTargets())
    pairs = ((key, figure_at(made, path)) for key, path in CHECKED.items())
    return {key: value / max(measured[key], 1e-12) - 1 for key, value in pairs}


def training(
    capacity: float, prompts: TokenPrompts, count: int, seed: int, context: int
) -> OpenLoop:
    """A load whose steps are of every kind that is to be predicted: an eighth of `count` requests
    that find the engine idle, more of them at 80 % of its speed, then `count` at once. A few
    prompts are four times as long, or as long as fits the context: with prompts that are all alike,
    the cost of a row could not be told from the cost of the context it looks at. capacity: requests
    a second at full speed."""
    dice, at, times = random.Random(seed), 0.0, []
    alone, busy = count // 8, count // 2
    for number in range(busy):
        times.append(at)
        at += dice.expovariate((0.2 if number < alone else 0.8) * capacity)
    long = max(prompts.prompt, min(4 * prompts.prompt, context - 2 * prompts.output))
    return prompts.at(times + [at] * count, seed, name="calibrating", long=long)


def check_loads(capacity: float, prompts: TokenPrompts, count: int, seed: int) -> list[OpenLoop]:
    """The five loads that a calibration is checked with. capacity: requests a second at full
    speed."""
    times = {
        "all at once": burst_times(count, 0.0, seed),
        "Poisson 40 %": burst_times(count, 0.4 * capacity, seed),
        "Poisson 70 %": burst_times(count, 0.7 * capacity, seed),
        "Poisson 95 %": burst_times(count, 0.95 * capacity, seed),
        "bursts": burst_times(count, 0.7 * capacity, seed, burst=8),
    }
    return [prompts.at(each, seed, name=name) for name, each in times.items()]


def calibrate(
    bench: EngineBench,
    sizes: tuple[int, int, int],
    seed: int,
    *,
    check: bool,
    progress: bool | None = None,
) -> tuple[CalibratedCost, list[Check]]:
    """A fit; with `check` five loads, each held against a fit of what was run just before and just
    behind it, and the last fit is returned. sizes: mean tokens of prompt and answer, requests of a
    load."""
    prompt, output, count = sizes
    prompts = TokenPrompts(prompt, output, bench.built.vocab_size)
    warm = prompts.at(burst_times(max(count // 3, 1), 0.0, seed), seed, name="warming up")
    probe = bench.measure(warm, progress=progress)
    capacity = recorded_runs.request_metrics(probe).figures(LatencyTargets())["requests_per_s"]

    def train(number: int) -> RecordedRun:
        context = bench.built.max_model_len
        return bench.measure(
            training(capacity, prompts, count, seed + 1 + number, context), progress=progress
        )

    before, found = train(0), list[Check]()
    cost = fit_runs(before)
    loads = check_loads(capacity, prompts, count, seed + 100) if check else []
    for number, load in enumerate(loads, 1):
        run, behind = bench.measure(load, progress=progress), train(number)
        cost, before = fit_runs(before, behind), behind
        found.append(checked(run, cost, load.name))
    return cost, found


# -- kept ------------------------------------------------------------------------------------------
# Advice that rests on a fit of the latest run changes with whatever else the machine did meanwhile.
# Costs that are kept do not: the same question gets the same answer, until a quieter measurement
# replaces a disturbed one.


class KeptCosts(msgspec.Struct, frozen=True):
    """cost: of a step. others: share of the machine that others took while it was measured. when:
    the day, in words. pace: GOP/s of int8 and fp32 by which steps were sized; None where nothing
    was known."""

    cost: CalibratedCost
    others: float
    when: str
    pace: tuple[float | None, float | None] | None = None

    def limits(self) -> MachineLimits | None:
        """The limits by which steps are sized: reading hides behind computing."""
        return MachineLimits(math.inf, *self.pace) if self.pace else None


def pace_of(built: LoadedEngine) -> tuple[float | None, float | None] | None:
    """The kept part of the limits by which this engine sizes its steps."""
    return (built.pace.int8_gop_s, built.pace.fp32_gop_s) if built.pace else None


def costs_file(built: LoadedEngine, config: EngineConfig) -> Path:
    """The file with the costs, beside the limits of the machine."""
    threads = config.threads or len(os.sched_getaffinity(0))
    key = repr((processor(), threads, model_mark(config), built.fingerprint))
    name = f"{Path(config.model).stem}-{blake2b(key.encode(), digest_size=6).hexdigest()}.json"
    return hub.cache_folder().parent / "steps" / name


def kept_costs(path: Path) -> KeptCosts | None:
    """The costs that are kept; None where nothing is kept that this program understands."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KeptCosts)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.cost.understood else None


def keep(path: Path, mine: KeptCosts) -> KeptCosts:
    """The costs to reckon with from now on: those that are kept, unless these are from a clearly
    quieter machine. Where the file cannot be written nothing is kept."""
    known = kept_costs(path)
    if known is not None and mine.others > known.others - QUIETER:
        return known
    with contextlib.suppress(OSError):
        write_json(path, mine)
    return mine
