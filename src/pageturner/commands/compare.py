"""`pageturner compare`: the same requests under several policies and orders, as a page with pictures.

Owns the flags, the choice of the traffic and the files that are written. Runs are in lab/comparison.py; all
of the lab is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner import config as configuration
from pageturner.commands import machine
from pageturner.errors import EngineFault

if TYPE_CHECKING:
    from pageturner.config import EngineConfig
    from pageturner.lab.comparison import Encode
    from pageturner.lab.comparison_results import ComparisonResults
    from pageturner.lab.engine_bench import EngineBench
    from pageturner.lab.traffic import TrafficRequest

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
# As many places for all as static has; and all requests may wait.
SETTINGS = {"max_num_seqs": 16, "max_queue": 1 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    # fmt: off
    parser.add_argument("model", nargs="?", default="smollm2",
                        help="a GGUF file, a Hugging Face folder, its id on the hub, or an alias")
    parser.add_argument("--policies", metavar="P,P", default="static,orca,prefill_first,chunked",
                        help="batching policies to compare; unbatched runs one request at a time (default: "
                             "%(default)s)")
    parser.add_argument("--orders", metavar="O,O", default="fcfs",
                        help="queue orders to compare; each policy runs with each of them (default: fcfs)")
    parser.add_argument("--mix", default="mixed",
                        help="built-in traffic to send: mixed, uniform, bursts, stalls or tenants (default: "
                             "mixed)")
    parser.add_argument("--workload", metavar="FILE", type=Path,
                        help="send the requests of this file instead: JSONL of prompt, max_tokens, "
                             "arrival_s, tenant")
    parser.add_argument("--trace", metavar="FILE", type=Path,
                        help="send prompts with the lengths and times of this trace instead (JSONL, plain "
                             "or gzip)")
    parser.add_argument("--num-prompts", type=int, default=0,
                        help="most requests to send; 0: 32 of a mix, all of a workload, 64 of a trace")
    parser.add_argument("--rate", type=float, default=0.0,
                        help="requests a second with Poisson arrivals, in place of the traffic's own times")
    parser.add_argument("--rate-scale", type=float, default=1.0, help="divide recorded arrival times by this")
    parser.add_argument("--length-scale", type=float, default=1.0, help="multiply lengths of a trace by this")
    parser.add_argument("--cap", type=int, default=512,
                        help="max_tokens that every request is sent with; the engine knows nothing else of "
                             "lengths")
    parser.add_argument("--seed", type=int, default=0, help="seed of made-up prompts, lengths and times")
    parser.add_argument("--rounds", type=int, default=1,
                        help="run all policies this often, in turn, and report the median run of each")
    parser.add_argument("--simulate", metavar="CALIBRATION", type=Path,
                        help="run no engine, and take step times from this file of pageturner calibrate")
    parser.add_argument("--ttft-ms", type=float, default=2000.0,
                        help="target of the time to first token (TTFT) in milliseconds, for goodput "
                             "(default: 2000)")
    parser.add_argument("--tpot-ms", type=float, default=200.0,
                        help="target of the mean time per output token (TPOT) in milliseconds (default: 200)")
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("compare.html"),
                        help="file to write the report to; figures go beside it as .json (default: "
                             "compare.html)")
    parser.add_argument("--logs", metavar="FOLDER", type=Path,
                        help="keep the step log of each run in this folder")
    parser.add_argument("--pictures", metavar="FOLDER", type=Path,
                        help="folder to write each picture to as SVG, with the figures")
    parser.add_argument("--config", metavar="FILE",
                        help="TOML file with engine settings in its table [engine]")
    # fmt: on
    configuration.add_flags(parser, "engine", leave_out=NOT_TAKEN)


def main(arguments: argparse.Namespace) -> int:
    """Run all, write the page and the figures, print a table."""
    from pageturner.lab import comparison, report, report_html
    from pageturner.lab.comparison_results import About, find
    from pageturner.lab.request_metrics import LatencyTargets

    _check(arguments)
    each = comparison.contenders(_names(arguments.policies), _names(arguments.orders))
    traffic, workload = _traffic(arguments)
    _make(arguments.output.parent)  # now, and not after all the runs
    bench, encode = _engine(arguments, traffic)
    context = bench.built.max_model_len
    traffic, told = _fitting(arguments, traffic, context)
    requests = comparison.make_requests(traffic, arguments.cap, context, encode)
    before = machine.ticks()
    with ExitStack() as stack:
        folder = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _make(folder)
        runs = comparison.run_contenders(bench, each, requests, arguments.rounds, folder)
    about = About(
        workload=f"{workload}{told}; nobody is told how long an answer will be (max_tokens {arguments.cap})",
        engine=_about_engine(bench.config, _times(arguments) or bench.built.fingerprint),
        command=_command(arguments),
        machine=_machine(before),
        real=arguments.simulate is None,
        rounds=arguments.rounds,
        targets=LatencyTargets(arguments.ttft_ms / 1e3, arguments.tpot_ms / 1e3),
    )
    found = find(runs, requests, about)
    _write(arguments.output, report_html.page(found))
    figures = arguments.output.with_suffix(".json")
    try:
        report.write_json(figures, found.as_json())
    except OSError as error:
        raise _unwritable(figures, error) from error
    if arguments.pictures:
        write_pictures(arguments.pictures, found)
    print(render(found))
    print(f"written: {arguments.output}, {figures}")
    return 0


def render(found: ComparisonResults) -> str:
    """A row for each contender."""
    from pageturner.lab import report

    head = ["", "tokens/s", "TTFT p50", "p99 ms", "TPOT p50", "longest gap ms", "e2e p50", "p99 s", "padding",
            "arithmetic", "bandwidth"]  # fmt: skip
    rows = [
        [
            c.name,
            f["output_tokens_per_s"],
            f"{f['ttft_ms']['p50']:,.0f}",
            f"{f['ttft_ms']['p99']:,.0f}",
            f"{f['tpot_ms']['p50']:,.1f}",
            f"{f['itl_ms']['max']:,.0f}",
            f["e2e_s"]["p50"],
            f["e2e_s"]["p99"],
            f"{f['padding_share']:.0%}",
            *(_share(f["machine"].get(name)) for name in ("compute_share", "read_share")),
        ]
        for c, f in ((c, c.figures) for c in found.contests)
    ]
    same = f"answers the same in all runs: {found.same} of {found.requests}"
    return "\n".join([report.table(rows, head), same])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def write_pictures(folder: Path, found: ComparisonResults) -> None:
    """Those of the report, each a file of its own, and what must be said beside them."""
    from pageturner.lab import report_html, svg_charts

    _make(folder)
    drawn = {"gantt": report_html.gantt(found), "batch": report_html.batch(found),
             "memory": report_html.memory(found)}  # fmt: skip
    if any("tenants" in contest.figures for contest in found.contests):
        drawn["service"] = report_html.services(found)
    for name, svg in drawn.items():
        _write(folder / f"{name}.svg", svg_charts.standalone(svg))
    about, verdicts = found.about, ""
    for claim in found.claims:
        why = f" ({claim.why})" if claim.why else ""
        verdicts += f"{claim.verdict}: {claim.text}: {claim.measured}{why}\n"
    head = f"{about.command}\n{about.workload}\n{about.engine}\n{about.machine}; runs of each: {about.rounds}"
    _write(folder / "figures.txt", f"{head}\n\n{render(found)}\n\n{verdicts}")


# -- what is asked -------------------------------------------------------------------------------------------


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _check(arguments: argparse.Namespace) -> None:
    if arguments.trace and arguments.workload:
        raise _bad("give --trace or --workload, not both")
    if arguments.length_scale != 1.0 and not arguments.trace:
        raise _bad("--length-scale goes with --trace")
    for name in ("rate_scale", "length_scale", "cap", "rounds", "ttft_ms", "tpot_ms"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise _bad(f"--{name.replace('_', '-')} is more than 0, not {getattr(arguments, name)}")
    for name in ("rate", "num_prompts"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise _bad(f"--{name.replace('_', '-')} is 0 or more, not {getattr(arguments, name)}")


def _engine(arguments: argparse.Namespace, traffic: list[TrafficRequest]) -> tuple[EngineBench, Encode]:
    """The engine, loaded, or what stands for it; and what makes tokens of text."""
    from pageturner.lab import comparison
    from pageturner.lab.step_cost import load_calibration

    flags = configuration.from_flags(arguments)
    settings: dict[str, Any] = SETTINGS | {
        "tpot_ms": arguments.tpot_ms
    }  # what adaptive_chunk aims at is what is wanted
    if traffic[-1].arrival == 0:
        settings["static_patience"] = 0.1  # all are there: a batch that stays short is the last one
    if arguments.simulate is None:
        given = {**settings, "model": arguments.model, **flags["engine"]}
        return comparison.real_engine(configuration.load(arguments.config, flags | {"engine": given}).engine)

    def changed(known: EngineConfig) -> EngineConfig:
        names = {field.name: getattr(known, field.name) for field in fields(known)}
        given = names | settings | flags["engine"]
        return configuration.load(arguments.config, flags | {"engine": given}).engine

    return comparison.simulated_engine(load_calibration(arguments.simulate), changed)


def _traffic(arguments: argparse.Namespace) -> tuple[list[TrafficRequest], str]:
    """What is sent, and what it is. Prompts of traces are made up; longer ones than fit are still in it."""
    from pageturner.lab.traffic import OpenLoop
    from pageturner.lab.traffic_files import read_workload
    from pageturner.lab.traffic_generators import MIXES, poisson

    count = arguments.num_prompts
    if arguments.trace:
        return _trace(arguments)
    if arguments.workload:
        each = read_workload(arguments.workload)[: count or None]
        about = f"workload {arguments.workload.name}, {len(each)} requests"
    else:
        if arguments.mix not in MIXES:
            raise _bad(f"unknown --mix {arguments.mix!r}: one of {', '.join(MIXES)}")
        mix = MIXES[arguments.mix]
        each = mix.make(count or 32, arguments.seed)
        about = f"{len(each)} requests of the mix {arguments.mix}: {mix.about}"
    if arguments.rate:
        each = poisson(each, arguments.rate, arguments.seed)
    return OpenLoop(each).faster(arguments.rate_scale).requests, about + _when(arguments)


def _trace(arguments: argparse.Namespace) -> tuple[list[TrafficRequest], str]:
    """Times begin with the first request."""
    from pageturner.lab import traffic_files
    from pageturner.lab.prompt_text import PromptWriter
    from pageturner.lab.traffic_generators import at_times, with_times

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
        raise _bad(f"no request of the trace fits {context} tokens: lower --length-scale or --cap")
    return kept, f", {out} left out as longer than {context} tokens" if out else ""


# -- what is said and written --------------------------------------------------------------------------------


def _times(arguments: argparse.Namespace) -> str:
    """Where step times come from if nothing is measured."""
    return f"step times of {arguments.simulate.name}" if arguments.simulate else ""


def _about_engine(config: EngineConfig, what: str) -> str:
    budget = f"{config.token_budget} tokens a step" if config.token_budget else "no budget"
    return (
        f"{Path(config.model).name}, {what}, at most {config.max_num_seqs} sequences, {budget},"
        f" blocks of {config.block_size}, static batches of {config.static_batch}"
    )


def _machine(before: tuple[int, int]) -> str:
    here, (busy, stolen) = machine.inspect(), machine.ticks()
    share = (stolen - before[1]) / max(busy - before[0], 1)
    return (
        f"{here.cpu}, {len(here.usable)} cores, load {here.load:.1f} at the end,"
        f" {share:.0%} of their time taken by other machines"
    )


def _command(arguments: argparse.Namespace) -> str:
    """How to get the same once more: what was given and is not the default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["pageturner", "compare", arguments.model]
    plain: dict[str, Any] = {
        name: value
        for name, value in vars(arguments).items()
        if "." not in name and name != "model" and value != parser.get_default(name)
    }
    for name, value in {**plain, **configuration.from_flags(arguments)["engine"]}.items():
        flag = name.replace("_", "-")
        words += (
            [f"--{flag}" if value else f"--no-{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    return shlex.join(words)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write(path: Path, text: str) -> None:
    _make(path.parent)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> EngineFault:
    return EngineFault("output", f"cannot write {path}: {error.strerror}")


def _bad(message: str) -> EngineFault:
    return EngineFault("bad_setting", message)
