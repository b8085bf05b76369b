"""The planner's answer beside a sweep: each measured point once more in the simulator, where that
can be had.

Owns which servers are simulated with which settings, and what is said where there is nothing to
simulate with. The simulation of a point is in sweep_simulated.py.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from pageturner.config import settings as configuration
from pageturner.config.settings import EngineConfig
from pageturner.engine.fingerprint import model_mark
from pageturner.errors import EngineFault
from pageturner.lab.bench.sweep import LoadSweep, SweepPoint, SweepResults, SweptServer
from pageturner.lab.bench.sweep_load import PointBounds, point_seed
from pageturner.lab.bench.sweep_simulated import Lengths, SimulatedServer
from pageturner.lab.simulation.recorded_runs import SCHEDULER_OPTIONS
from pageturner.lab.simulation.step_cost import CalibratedCost, load_calibration

DEFAULT = Path("calibration.json")  # what `pageturner calibrate` writes unless told otherwise
MAKE = "run `pageturner calibrate {model}`, then give its file here: --calibration calibration.json"


def add_forecasts(found: SweepResults, path: Path | None, model: str, bounds: PointBounds) -> None:
    """Simulate what was measured of our own servers, or of the first server if none was started; or
    say in `found.forecast` how that would be had. path: None: DEFAULT, if it is of this model."""
    how = MAKE.format(model=model or "MODEL")
    if path is None and not (model and DEFAULT.exists()):
        found.forecast = f"Nothing is simulated beside this: {how}"
        return
    try:
        cost = load_calibration(path or DEFAULT)
        if model and model_mark(EngineConfig(model=model)) != cost.engine.get("model"):
            raise EngineFault("calibration", f"{path or DEFAULT} is of another model: {how}")
    except EngineFault as fault:
        found.forecast = f"Nothing is simulated beside this: {fault.message}"
        return
    found.forecast = (
        f"Simulated: our scheduler under a clock of its own, step times from {path or DEFAULT}"
        f" ({cost.steps:,} steps, half of them within {cost.error[0]:.1%}), told the lengths of prompts and"
        " answers alone. HTTP, text and the client, which share the machine, are not in it."
    )
    for server in [one for one in found.servers if one.started is not None] or found.servers[:1]:
        try:
            _add(found, server, cost, bounds)
        except (EngineFault, ValueError) as error:
            found.notes.append(f"{server.name} was not simulated: {error}")


def _add(
    found: SweepResults, server: SweptServer, cost: CalibratedCost, bounds: PointBounds
) -> None:
    engine = SimulatedServer.of(cost, scheduler_settings(server.started or ""))
    lengths: Lengths = []
    for number, sweep in enumerate(found.sweeps):
        points = [
            _point(engine, (number, place), sweep, server.name, bounds, found.targets)
            for place in range(len(sweep.points))
        ]
        if any(point.rounds for point in points):
            found.forecasts[number, server.name] = points
        for point in sweep.points:
            lengths += [pair for one in point.rounds.get(server.name, []) for pair in _lengths(one)]
    if lengths:
        found.forecast += (
            f" The KV memory of {server.name}, {engine.sizes.blocks * engine.config.block_size:,} tokens as"
            f" calibrated, holds about {engine.fitting(lengths):,} of these requests at once."
        )


def _point(
    engine: SimulatedServer,
    place: tuple[int, int],
    sweep: LoadSweep,
    name: str,
    bounds: PointBounds,
    targets: dict[str, float],
) -> SweepPoint:
    """All rounds of one point once more. place: numbers of its sweep and of it."""
    point = sweep.points[place[1]]
    made = SweepPoint(point.at)
    for turn, one in enumerate(point.rounds.get(name, [])):
        lengths = _lengths(one)
        seed = point_seed(*place, turn)
        figures = lengths and engine.point(sweep.over, point.at, lengths, bounds, seed, targets)
        if figures:
            made.rounds.setdefault(name, []).append(figures)
    return made


def _lengths(figures: dict[str, Any]) -> Lengths:
    return [(prompt, answer) for prompt, answer in figures["lengths"]]


def scheduler_settings(flags: str) -> dict[str, Any]:
    """Return the settings of the scheduler that these flags of `pageturner serve` give."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    configuration.add_flags(parser, "engine")
    known, _ = parser.parse_known_args(shlex.split(flags))
    given = configuration.from_flags(known)
    engine = configuration.load(known.config, given).engine
    names = SCHEDULER_OPTIONS if known.config else given["engine"]
    return {name: getattr(engine, name) for name in names if name in SCHEDULER_OPTIONS}
