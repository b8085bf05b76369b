"""Calibration: the real engine under a short made-up load, its steps fitted, and the fit held against others.

Owns the loads, the interleaving of fit and check, and what is called an error. Must not know flags.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pageturner.config import EngineConfig
from pageturner.core.types import Request, SamplingParams
from pageturner.errors import EngineFault
from pageturner.lab import history
from pageturner.lab.cost import Calibrated, fit, work_of_step
from pageturner.lab.drive import Clock, WallClock, drive
from pageturner.lab.engine_settings import engine_config
from pageturner.lab.history import Run
from pageturner.lab.outcome import Outcomes, Targets
from pageturner.lab.simulator import Simulator
from pageturner.progress import Progress
from pageturner.runtime.engine_factory import engine_again, make_engine, scheduler_of
from pageturner.runtime.kv_memory import KVSizes

STOP = 0  # the token that ends a made-up answer; most tokenizers have a special one there


def fit_runs(*runs: Run) -> Calibrated:
    """The cost of the steps of recorded runs, with what is needed to simulate their engine."""
    header = runs[0].header
    engine = {"config": header.config, "blocks": header.num_blocks, "window": header.window,
              "recent": header.sliding, "max_model_len": header.max_model_len, "model": header.model,
              "fingerprint": header.fingerprint, "needs": msgspec.to_builtins(header.needs),
              "limits": msgspec.to_builtins(header.limits)}  # fmt: skip
    return fit((step for run in runs for step in run.steps), engine)


def engine_of(cost: Calibrated) -> tuple[EngineConfig, KVSizes, int]:
    """The engine that was calibrated: its settings, blocks and longest sequence."""
    about = cost.engine
    try:
        sizes = KVSizes(about["blocks"], about["window"], about["recent"])
        return engine_config(about["config"]), sizes, int(about["max_model_len"])
    except (KeyError, TypeError) as error:
        raise EngineFault(
            "calibration", f"the calibration does not say what engine it is of: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Load:
    """Made-up requests for a real engine. times: seconds from the start, one a request; long: tokens of the
    first prompt and of every twelfth from there on, 0: they are as the others."""

    name: str
    times: list[float]
    prompt: int
    output: int
    seed: int
    long: int = 0

    def requests(self, vocab: int) -> list[Request]:
        """Prompts of random tokens, answers that end where nobody but the sampler knows; lengths from half to
        one and a half of the means."""
        dice = random.Random(self.seed)
        found = []
        for number, at in enumerate(self.times, 1):
            length, output = (max(1, dice.randint(n // 2, n + n // 2)) for n in (self.prompt, self.output))
            length = self.long if self.long and number % 12 == 1 else length
            prompt = tuple(dice.randrange(1, vocab) for _ in range(length))
            params = SamplingParams(
                temperature=0.0, max_tokens=2 * self.output, stop_ids=(STOP,), forced_end=output
            )
            found.append(Request(number, prompt, params, at))
        return found


def poisson(name: str, count: int, rate: float, prompt: int, output: int, seed: int, burst: int = 1) -> Load:
    """`count` requests at `rate` a second, so many together; 0: all at once."""
    dice, at, times = random.Random(seed), 0.0, []
    for number in range(1, count + 1):
        times.append(at)
        at += dice.expovariate(rate / burst) if rate and number % burst == 0 else 0.0
    return Load(name, times, prompt, output, seed)


class Traffic(Protocol):
    """Requests for an engine with such a vocabulary; arrivals in seconds from the start."""

    @property
    def name(self) -> str: ...

    def requests(self, vocab: int) -> list[Request]: ...


class Bench:
    """A real engine on which loads are run one after another, each in a log of its own."""

    def __init__(self, config: EngineConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or WallClock()
        self.built = make_engine(replace(config, step_log=""))

    def run(self, load: Traffic, *, progress: bool | None = None) -> Run:
        """Send the load in real time; what happened."""
        return self.run_as(self._config, load, progress=progress)

    def run_as(self, config: EngineConfig, load: Traffic, *, progress: bool | None = None) -> Run:
        """The same under other settings of the scheduler, with blocks of the same size."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps"
            engine = engine_again(self.built, replace(config, step_log=str(path)))
            engine.clock = self._clock.now
            requests = load.requests(self.built.vocab_size)
            done = itertools.count(1)
            with Progress(load.name, len(requests), enabled=progress) as line:
                drive(engine, requests, self._clock, lambda: line.update(next(done)))
            engine.close()
            return history.last(path)


def predicted(run: Run, cost: Calibrated) -> Outcomes:
    """The run's traffic, simulated: lengths and arrivals as they were, times by the cost."""
    sizes = run.sizes
    simulator = Simulator(
        lambda: scheduler_of(run.config, sizes, run.header.max_model_len).scheduler,
        cost,
        num_blocks=sizes.blocks,
        replicas=1,
        place=lambda loads, hints, length: 0,
        leaps=False,
    )
    simulator.run(history.traffic([run]), progress=False)
    return simulator.outcomes


CHECKED: dict[str, Callable[[dict[str, Any]], float]] = {
    "throughput": lambda f: f["output_tokens_per_s"],
    "TTFT p50": lambda f: f["ttft_ms"]["p50"],
    "TTFT p99": lambda f: f["ttft_ms"]["p99"],
    "TPOT p50": lambda f: f["tpot_ms"]["p50"],
    "TPOT p99": lambda f: f["tpot_ms"]["p99"],
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


def checked(run: Run, cost: Calibrated, name: str) -> Check:
    """The run beside its simulation."""
    real = history.outcomes(run).figures(Targets())
    measured = {key: of(real) for key, of in CHECKED.items()}
    steps = [step for step in run.steps if step.items]
    took = sum(step.end - step.start for step in steps)
    told = sum(cost.seconds(work_of_step(step)) - cost.gap for step in steps)
    drift = took / told
    drifted = msgspec.structs.replace(cost, weights=[drift * weight for weight in cost.weights])
    return Check(name, measured, _errors(run, cost, measured), drift, _errors(run, drifted, measured))


def _errors(run: Run, cost: Calibrated, measured: dict[str, float]) -> dict[str, float]:
    made = predicted(run, cost).figures(Targets())
    return {key: of(made) / max(measured[key], 1e-12) - 1 for key, of in CHECKED.items()}


def training(capacity: float, prompt: int, output: int, count: int, seed: int, context: int) -> Load:
    """A load with steps of every kind, as wide as any that it is to tell of: an eighth of `count` with nobody
    else there, more at most of its speed, then `count` at once. A few prompts are four times as
    long, or as long as fits the context: of prompts all alike nobody can tell rows from what they look at.
    `capacity`: requests a second at full speed."""
    dice, at, times = random.Random(seed), 0.0, []
    alone, busy = count // 8, count // 2
    for number in range(busy):
        times.append(at)
        at += dice.expovariate((0.2 if number < alone else 0.8) * capacity)
    long = max(prompt, min(4 * prompt, context - 2 * output))
    return Load("calibrating", times + [at] * count, prompt, output, seed, long)


def loads(capacity: float, prompt: int, output: int, count: int, seed: int) -> list[Load]:
    """The five that a calibration is held against; `capacity`: requests a second at full speed."""
    sizes = (prompt, output, seed)
    return [
        poisson("all at once", count, 0.0, *sizes),
        poisson("Poisson 40 %", count, 0.4 * capacity, *sizes),
        poisson("Poisson 70 %", count, 0.7 * capacity, *sizes),
        poisson("Poisson 95 %", count, 0.95 * capacity, *sizes),
        poisson("bursts", count, 0.7 * capacity, *sizes, burst=8),
    ]


def measure(
    bench: Bench, sizes: tuple[int, int, int], seed: int, *, check: bool, progress: bool | None = None
) -> tuple[Calibrated, list[Check]]:
    """A fit; with `check` five loads, each held against a fit of what was run just before and just behind it,
    and the last fit is returned. sizes: mean tokens of prompt and answer, requests of a load."""
    prompt, output, count = sizes
    probe = bench.run(poisson("warming up", max(count // 3, 1), 0.0, prompt, output, seed), progress=progress)
    capacity = history.outcomes(probe).figures(Targets())["requests_per_s"]

    def train(number: int) -> Run:
        context = bench.built.max_model_len
        load = training(capacity, prompt, output, count, seed + 1 + number, context)
        return bench.run(load, progress=progress)

    before, found = train(0), list[Check]()
    cost = fit_runs(before)
    for number, load in enumerate(loads(capacity, prompt, output, count, seed + 100) if check else (), 1):
        run, behind = bench.run(load, progress=progress), train(number)
        cost, before = fit_runs(before, behind), behind
        found.append(checked(run, cost, load.name))
    return cost, found
