"""`pageturner tune`: the settings for some traffic and its targets, with the evidence, as a file
for `serve`.

Owns the flags, the table and the file. What is tried is in lab/planning/settings_search.py; traffic
and engine are described as for `pageturner simulate`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags
from pageturner.config.settings import EngineConfig
from pageturner.errors import bad_setting
from pageturner.lab.commands import simulate
from pageturner.lab.commands.flag_values import names, numbers
from pageturner.lab.commands.simulated_engines import SIMULATED_SETTINGS
from pageturner.lab.reporting.output import write_figures, write_text

if TYPE_CHECKING:
    from pageturner.lab.planning.settings_search import Trial
    from pageturner.lab.simulation.scenario import Scenario

POLICIES = "chunked,adaptive_chunk,prefill_first,served_ratio,orca"
SHORT = (
    96,
    32,
    45,
)  # mean tokens of prompt and answer, and requests, of the calibration that is made first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command: those of simulate, and what is searched."""
    simulate.add_arguments(parser)
    parser.set_defaults(policies=POLICIES)
    add_flags(parser, "tune")


def main(arguments: argparse.Namespace) -> int:
    """Search, measure, print, write."""
    from pageturner.lab.planning import settings_search

    _check(arguments)
    space = settings_search.SearchSpace(
        tuple(names(arguments.policies)), tuple(names(arguments.orders))
    )
    scenario, notes = _scenario(arguments)
    base = _base(scenario, arguments)
    traffic, measured = scenario.traffic(scenario.rate), arguments.finalists > 0
    share = arguments.budget / 2 / (arguments.finalists + 1)
    load = settings_search.first_seconds(traffic, share) if measured else None
    trials = settings_search.search_settings(
        scenario, space, arguments.budget / (2 if measured else 1)
    )
    settings_search.check_possible(trials[0], scenario.targets)
    shown = trials[: arguments.finalists or 5]
    start = next(
        one for one in trials if one.candidate == settings_search.Candidate.of(scenario.config)
    )
    shown += [start] if start not in shown else []
    best = shown[0]
    if load is not None:
        settings_search.measure_trials(shown, base, load, scenario.targets)
        best = min(shown, key=lambda one: settings_search.score(one.measured, scenario.targets))
        notes.append(f"measured: the first {load.total:,} requests, in real time, on this machine")
    written = best.candidate.settings(base)
    settings_search.mark_tied(trials, best, scenario.targets)
    print(render(shown, best, start, notes, len(trials)))
    write_text(arguments.write, as_toml(written, f"tuned: {len(trials)} settings simulated"))
    if arguments.output:
        figures = {"trials": [asdict(one) for one in trials], "notes": notes}
        write_figures(arguments.output, figures | {"best": asdict(best.candidate)})
    print(f"written to {arguments.write}: pageturner serve --config {arguments.write}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.ttft_ms is None and arguments.tpot_ms is None:
        raise bad_setting(
            "which targets? give --ttft-ms (time to first token), --tpot-ms (time per token) or both"
        )
    if not 0 < arguments.budget < float("inf") or arguments.finalists < 0:
        raise bad_setting("--budget is more than 0 seconds, --finalists 0 or more")
    if arguments.gpu and arguments.finalists:
        raise bad_setting("what is simulated for a GPU cannot be measured here: say --finalists 0")
    if arguments.search or arguments.replicas != 1:
        raise bad_setting(
            "one engine is tuned: --search and --replicas belong to pageturner simulate"
        )
    below = arguments.kv_file_gb or configuration.from_flags(arguments)["engine"].get(
        "kv_host_memory"
    )
    if (arguments.roles or below) and not arguments.gpu:
        raise bad_setting("--roles, --kv-file-gb and --kv-host-memory are tuned with --gpu")


def _scenario(arguments: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """The scenario as for simulate; where nothing says how long a step takes, that is measured
    first."""
    rates = numbers("--rate-scale", arguments.rate_scale)
    if len(rates) != 1:
        raise bad_setting("--rate-scale is one number here")
    if arguments.gpu or arguments.log or arguments.calibration:
        scenario, notes = simulate.make_scenario(arguments)
        return replace(scenario, rate=rates[0]), notes
    from pageturner.lab.bench.engine_bench import EngineBench
    from pageturner.lab.simulation import calibration

    with tempfile.TemporaryDirectory() as folder:
        arguments.calibration = Path(folder) / "calibration.json"
        flags = configuration.from_flags(arguments)
        simulate.check(arguments)  # before the engine is loaded for nothing
        flags["engine"]["model"] = arguments.served or "smollm2"
        bench = EngineBench.load(configuration.load(arguments.config, flags).engine)
        cost, _ = calibration.calibrate(bench, SHORT, arguments.seed, check=False)
        del bench
        cost.save(arguments.calibration)
        scenario, notes = simulate.make_scenario(arguments)
    return replace(scenario, rate=rates[0]), ["calibrated just now, shortly", *notes]


def _base(scenario: Scenario, arguments: argparse.Namespace) -> EngineConfig:
    """The whole engine: what was calibrated, with the settings of the scheduler that are
    simulated."""
    from pageturner.lab.simulation.calibration import engine_of
    from pageturner.lab.simulation.step_cost import CalibratedCost

    if not isinstance(scenario.cost, CalibratedCost):
        return replace(scenario.config, model=arguments.served or arguments.model)
    known = engine_of(scenario.cost)[0]
    taken = {name: getattr(scenario.config, name) for name in SIMULATED_SETTINGS}
    return replace(known, **taken, model=arguments.served or known.model)


def as_toml(config: EngineConfig, about: str) -> str:
    """A file for `serve --config`: what is not as by default, and all that was tuned."""
    from pageturner.lab.planning.settings_search import TUNED_SETTINGS

    lines = [f"# {about}", "[engine]"]
    for one in fields(EngineConfig):
        value = getattr(config, one.name)
        if one.name in TUNED_SETTINGS or value != one.default:
            lines.append(f"{one.name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, ""])


def render(shown: list[Trial], best: Trial, start: Trial, notes: list[str], tried: int) -> str:
    """A row for each that was shown: simulated, then measured if it was."""
    from pageturner.lab.reporting.summary import COLUMNS, table

    columns = COLUMNS["tune"]
    settings = ["policy", "order", "tokens", "seqs", "block"]
    head = settings + [column.head for column in columns]

    def rows(figures: Callable[[Trial], dict[str, Any]]) -> list[list[object]]:
        found: list[list[object]] = []
        for one in shown:
            mark = "* " if one is best else "= " * one.tied or "  "
            name = mark + one.candidate.policy
            name += " (as given)" if one is start else ""
            cells = [column.form.format(column.of(figures(one))) for column in columns]
            found.append([name, *list(asdict(one.candidate).values())[1:], *cells])
        return found

    lines = [
        f"{tried} settings were simulated; the best, and what was given (times in ms; * is written,",
        "= is as good, as far as these requests tell; at least: of all such requests, 95 % sure):",
    ]
    lines += [table(rows(lambda one: one.simulated), head), ""]
    if best.measured:
        lines += [
            "the same, measured on the engine:",
            table(rows(lambda one: one.measured), head),
            "",
        ]
    wrapped = (textwrap.fill(f"note: {note}", 100, subsequent_indent="      ") for note in notes)
    return "\n".join([*lines, *wrapped])
