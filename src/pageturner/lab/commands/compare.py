"""`pageturner compare`: the same requests under several policies and orders, as a page with
pictures.

Owns the flags, the choice of the traffic and the files that are written. Runs are in
lab/compare/comparison.py; all
of the lab is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags, check_range
from pageturner.engine import machine
from pageturner.errors import bad_setting
from pageturner.interrupt import leaving_at_once
from pageturner.lab.commands.flag_values import command_again, names
from pageturner.lab.reporting.output import make_folder, write_figures, write_text
from pageturner.progress import Still

if TYPE_CHECKING:
    from pageturner.config.settings import EngineConfig
    from pageturner.lab.bench.engine_bench import EngineBench
    from pageturner.lab.compare.comparison import Contender, Encode
    from pageturner.lab.compare.comparison_results import ComparisonResults, Disturbance
    from pageturner.lab.compare.simulated_comparison import Circumstances, Reckoned
    from pageturner.lab.simulation.recorded_runs import RecordedRun
    from pageturner.lab.traffic.traffic import TrafficRequest
    from pageturner.request import Request

NOT_TAKEN = (
    "model",
    "policy",
    "order",
    "step_log",
    "step_log_tokens",
    "speculation",
    "draft_model",
    "tpot_ms",
)
MIXED = 24  # requests of a mix: two rounds of the default policies in about a minute on two cores
# As many places for all as static has; and all requests may wait.
SETTINGS = {"max_num_seqs": 16, "max_queue": 1 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "compare")
    configuration.add_flags(parser, "engine", leave_out=NOT_TAKEN)


def main(arguments: argparse.Namespace) -> int:
    """Run all, write the page and the figures, print a table."""
    if arguments.simulate is None:
        print(f"loading {arguments.model}, and its first steps", file=sys.stderr, flush=True)
    from pageturner.lab.bench.request_metrics import LatencyTargets
    from pageturner.lab.compare import comparison
    from pageturner.lab.compare.comparison_results import About, Disturbance, find
    from pageturner.lab.compare.simulated_comparison import Circumstances
    from pageturner.lab.reporting import comparison_page

    _check(arguments)
    if arguments.output.suffix == ".json":
        raise bad_setting("--output is the page; the figures go beside it as .json: use .html")
    each = comparison.contenders(names(arguments.policies), names(arguments.orders))
    traffic, workload = _traffic(arguments)
    make_folder(arguments.output.parent)  # now, and not after all the runs
    with Still(lambda: f"loading {arguments.model}, and its first steps"):
        bench, encode = _engine(arguments, traffic)
    context = bench.built.max_model_len
    traffic, told = _fitting(arguments, traffic, context)
    requests = comparison.make_requests(traffic, arguments.cap, context, encode)
    meter, begin = machine.LoadMeter(), (time.monotonic(), time.process_time())
    with ExitStack() as stack:
        folder = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(leaving_at_once([] if arguments.logs else [folder]))
        make_folder(folder)
        rounds = arguments.rounds or (1 if arguments.simulate else 0)
        runs = comparison.run_contenders(bench, each, requests, rounds, folder)
    disturbance, own = Disturbance(*meter.read()), time.process_time() - begin[1]
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    around = Circumstances(disturbance.others, own, when)
    with Still(lambda: "reckoning the same without noise"):
        reckoned = _reckoned(arguments, bench, requests, runs, around)
    about = About(
        workload=f"{workload}{told}; nobody is told how long an answer will be (max_tokens {arguments.cap})",
        engine=_about_engine(bench.config, _times(arguments) or bench.built.fingerprint, runs),
        command=command_again("compare", add_arguments, arguments, "model"),
        machine=_machine(disturbance),
        real=arguments.simulate is None,
        rounds=0,
        targets=LatencyTargets(arguments.ttft_ms / 1e3, arguments.tpot_ms / 1e3),
        when=when,
        disturbance=disturbance,
        seconds=time.monotonic() - begin[0],
        cpu_seconds=time.process_time() - begin[1],
    )
    found = find(runs, requests, about, reckoned, _texts(arguments, bench.config, requests, runs))
    write_text(arguments.output, comparison_page.page(found))
    figures = arguments.output.with_suffix(".json")
    write_figures(figures, found.as_json())
    if arguments.pictures:
        write_pictures(arguments.pictures, found)
    print(comparison_page.terminal(found))
    print(f"written: {arguments.output}, {figures}")
    return 0


def _reckoned(
    arguments: argparse.Namespace,
    bench: EngineBench,
    requests: list[Request],
    runs: dict[Contender, list[RecordedRun]],
    about: Circumstances,
) -> Reckoned | None:
    """The same without noise; None where too little was run to know what a step costs."""
    from pageturner.lab.compare import simulated_comparison
    from pageturner.lab.simulation.step_cost import load_calibration

    each = list(runs)
    if arguments.simulate:
        cost = load_calibration(arguments.simulate)  # the requests themselves are simulated anyway
        return simulated_comparison.reckon(bench, each, [], cost, _times(arguments))
    found = simulated_comparison.costs_of(
        bench, [run for mine in runs.values() for run in mine], about
    )
    if found is None:
        return None
    known, words = found
    stands = simulated_comparison.standing_for(bench, known.cost, known.limits())
    return simulated_comparison.reckon(stands, each, requests, known.cost, words)


def _texts(
    arguments: argparse.Namespace,
    config: EngineConfig,
    requests: list[Request],
    runs: dict[Contender, list[RecordedRun]],
) -> dict[int, tuple[str, str]]:
    """Return the beginnings of prompts and answers; nothing if no model produced them."""
    from pageturner.lab.compare import comparison

    if arguments.simulate or config.backend in ("fake", "null"):
        return {}
    return comparison.texts_of(
        config, requests, comparison.answers_of(next(iter(runs.values()))[0])
    )


def write_pictures(folder: Path, found: ComparisonResults) -> None:
    """Write the pictures of the report, each to a file of its own, and the text that belongs to
    them."""
    from pageturner.lab.reporting import charts, comparison_page
    from pageturner.lab.reporting import comparison_pictures as pictures

    make_folder(folder)
    drawn = {
        "gantt": pictures.gantt(found),
        "batch": pictures.over_time("batch", found),
        "memory": pictures.over_time("memory", found),
    }
    if found.tenants:
        drawn["service"] = pictures.services(found)
    for name, svg in drawn.items():
        write_text(folder / f"{name}.svg", charts.standalone(svg))
    about, verdicts = found.about, ""
    for claim in found.claims:
        why = f" ({claim.why})" if claim.why else ""
        verdicts += f"{claim.verdict}: {claim.text}: {claim.measured}{why}\n"
    head = f"{about.command}\n{about.workload}\n{about.engine}\n{about.machine}; {about.when}; runs of each: "
    told = comparison_page.terminal(found, every=True)
    write_text(folder / "figures.txt", f"{head}{about.rounds}\n\n{told}\n\n{verdicts}")


# -- what is asked ---------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> None:
    if arguments.trace and arguments.workload:
        raise bad_setting("give --trace or --workload, not both")
    if arguments.length_scale != 1.0 and not arguments.trace:
        raise bad_setting("--length-scale goes with --trace")
    check_range(arguments, "more than 0", "rate_scale", "length_scale", "cap", "ttft_ms", "tpot_ms")
    check_range(arguments, "0 or more", "rate", "num_prompts", "rounds")


def _engine(
    arguments: argparse.Namespace, traffic: list[TrafficRequest]
) -> tuple[EngineBench, Encode]:
    """The engine, loaded, or what stands for it; and what makes tokens of text."""
    from pageturner.lab.compare import comparison
    from pageturner.lab.simulation.step_cost import load_calibration

    flags = configuration.from_flags(arguments)
    settings: dict[str, Any] = SETTINGS | {
        "tpot_ms": arguments.tpot_ms
    }  # what adaptive_chunk aims at is what is wanted
    if traffic[-1].arrival == 0:
        settings["static_patience"] = 0.1  # all are there: a batch that stays short is the last one
    if arguments.simulate is None:
        given = {**settings, "model": arguments.model, **flags["engine"]}
        return comparison.real_engine(
            configuration.load(arguments.config, flags | {"engine": given}).engine
        )

    def changed(known: EngineConfig) -> EngineConfig:
        names = {field.name: getattr(known, field.name) for field in fields(known)}
        given = names | settings | flags["engine"]
        return configuration.load(arguments.config, flags | {"engine": given}).engine

    return comparison.simulated_engine(load_calibration(arguments.simulate), changed)


def _traffic(arguments: argparse.Namespace) -> tuple[list[TrafficRequest], str]:
    """Return the requests that are sent, and a description of them. Prompts of traces are made up;
    requests that are too long for the context are still among them."""
    from pageturner.lab.traffic.traffic import OpenLoop
    from pageturner.lab.traffic.traffic_files import read_workload
    from pageturner.lab.traffic.traffic_generators import MIXES, poisson

    count = arguments.num_prompts
    if arguments.trace:
        return _trace(arguments)
    if arguments.workload:
        each = read_workload(arguments.workload)[: count or None]
        about = f"workload {arguments.workload.name}, {len(each)} requests"
    else:
        if arguments.mix not in MIXES:
            raise bad_setting(f"unknown --mix {arguments.mix!r}: one of {', '.join(MIXES)}")
        mix = MIXES[arguments.mix]
        each = mix.make(count or MIXED, arguments.seed)
        about = f"{len(each)} requests of the mix {arguments.mix}: {mix.about}"
    if arguments.rate:
        each = poisson(each, arguments.rate, arguments.seed)
    return OpenLoop(each).faster(arguments.rate_scale).requests, about + _when(arguments)


def _trace(arguments: argparse.Namespace) -> tuple[list[TrafficRequest], str]:
    """Times begin with the first request."""
    from pageturner.lab.traffic import traffic_files
    from pageturner.lab.traffic.prompt_text import PromptWriter
    from pageturner.lab.traffic.traffic_generators import at_times, with_times

    path, seed = arguments.trace, arguments.seed
    rows = traffic_files.read_trace(path, arguments.num_prompts or 64, sessions=False)
    name = traffic_files.trace_name(path)
    if arguments.rate:
        rows = with_times(rows, arguments.rate, 1.0, seed)
    traffic_files.check_times(rows, name)
    scaling = traffic_files.TraceScaling(length=arguments.length_scale, cap=arguments.cap)
    each = PromptWriter(seed=seed).written(traffic_files.trace_requests(rows, scaling))
    first = rows[0].arrival_s or 0.0
    each = at_times(each, [(one.arrival - first) / arguments.rate_scale for one in each])
    about = f"trace {name}, its first {len(each)} requests, lengths x {arguments.length_scale:g}"
    cut = sum(map(scaling.cuts, rows))
    return each, f"{about}, {cut} answers cut at {arguments.cap} tokens{_when(arguments)}"


def _when(arguments: argparse.Namespace) -> str:
    if arguments.rate:
        return f", Poisson arrivals at {arguments.rate:g} a second"
    return f", recorded times / {arguments.rate_scale:g}" if arguments.rate_scale != 1.0 else ""


def _fitting(
    arguments: argparse.Namespace, each: list[TrafficRequest], context: int
) -> tuple[list[TrafficRequest], str]:
    """A trace is of another model: what is too long for this one is left out, and said."""
    if not arguments.trace:
        return each, ""
    kept = [one for one in each if len(one.text.split()) + arguments.cap < context]
    out = len(each) - len(kept)
    if not kept:
        raise bad_setting(
            f"no request of the trace fits {context} tokens: lower --length-scale or --cap"
        )
    return kept, f", {out} left out as longer than {context} tokens" if out else ""


# -- what is said and written ----------------------------------------------------------------------


def _times(arguments: argparse.Namespace) -> str:
    """Describe where step times come from if nothing is measured."""
    return f"step times of {arguments.simulate.name}" if arguments.simulate else ""


def _about_engine(config: EngineConfig, what: str, runs: dict[Contender, list[RecordedRun]]) -> str:
    tokens = min(mine[0].config.token_budget for mine in runs.values())  # as the machine sized it
    budget = f"{tokens} tokens a step" if tokens else "no budget"
    return (
        f"{Path(config.model).name}, {what}, at most {config.max_num_seqs} sequences, {budget},"
        f" blocks of {config.block_size}, static batches of {config.static_batch}"
    )


def _machine(disturbance: Disturbance) -> str:
    here = machine.inspect()
    return (
        f"{here.cpu}, {len(here.usable)} cores, load {here.load:.1f} at the end; other programs took"
        f" {disturbance.others:.0%} of their time, other machines {disturbance.stolen:.0%}"
    )
