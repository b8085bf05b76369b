"""`pageturner simulate`: what these engines, so many of them, would make of this traffic.

Owns the flags and the table. What is simulated is in lab/scenario.py; all of the lab is imported when it is
asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner import config as configuration
from pageturner.config import EngineConfig
from pageturner.errors import EngineFault
from pageturner.lab.engine_settings import SCHEDULER_OPTIONS

if TYPE_CHECKING:
    from pageturner.lab.scenario import Scenario
    from pageturner.lab.traffic import Traffic

# What a simulated engine takes over from the one that was calibrated or recorded.
SIMULATED_SETTINGS = ("max_model_len", "kv_cache_dtype", *SCHEDULER_OPTIONS)
# --tpot-ms is a flag of this command: the target, at which adaptive_chunk aims too.
ENGINE_FLAGS = tuple(name for name in SIMULATED_SETTINGS if name != "tpot_ms")
# What fills a GPU: more rows in a step than suit a CPU. Flags and [engine] go before.
GPU_SETTINGS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_queue": 100_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    # fmt: off
    parser.add_argument("--trace", metavar="FILE", type=Path,
                        help="trace of recorded requests (JSONL, also gzip)")
    parser.add_argument("--log", metavar="FILE", type=Path,
                        help="step log to take the traffic from, and engine and step times too unless "
                             "others are given")
    parser.add_argument("--num-prompts", type=int, default=0,
                        help="how many requests to make up, or to take of the trace (default: 1000, or all)")
    parser.add_argument("--rate", type=float, default=0.0,
                        help="requests a second; arrival times are made up, for a trace too")
    parser.add_argument("--cv", type=float, default=1.0,
                        help="coefficient of variation of the gaps between arrivals: 1 is Poisson, more is "
                             "bursts")
    parser.add_argument("--input-len", type=int, default=512, help="mean prompt length of made-up requests")
    parser.add_argument("--output-len", type=int, default=128, help="mean answer length of made-up requests")
    parser.add_argument("--turns", type=int, default=0,
                        help="make up sessions with this many turns, each sent after the answer before it")
    parser.add_argument("--think", type=float, default=60.0,
                        help="seconds from an answer to the next turn: the mean, or the most in a trace")
    parser.add_argument("--length-scale", type=float, default=1.0, help="multiply the lengths of the trace")
    parser.add_argument("--rate-scale", metavar="X,X", default="1",
                        help="multiply the rate of the traffic by this; several with commas simulate each")
    parser.add_argument("--cap", type=int, default=4096, help="max_tokens that every request is sent with")
    parser.add_argument("--seed", type=int, default=0, help="seed of made-up lengths and times")
    parser.add_argument("--model", help="model on --gpu: a config.json, folder, GGUF file, id or alias")
    parser.add_argument("--gpu", help="GPU whose limits give the step times: A100-80G, H100, H200 or L4")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs in a replica (links are not counted)")
    parser.add_argument("--lora", metavar="FOLDER", type=Path, action="append", default=[],
                        help="a LoRA adapter on --gpu, again for each: requests have each as often as others")
    parser.add_argument("--mfu", type=float, default=0.6, help="share of the GPU's FLOP/s that is reached")
    parser.add_argument("--mbu", type=float, default=0.8, help="share of its bandwidth that is reached")
    parser.add_argument("--overhead-ms", type=float, default=2.0,
                        help="time that each step takes beside its kernels")
    parser.add_argument("--calibration", metavar="FILE", type=Path,
                        help="file that pageturner calibrate wrote")
    parser.add_argument("--replicas", type=int, default=1, help="number of engines behind the router")
    parser.add_argument("--placement", default="least_loaded",
                        help="how the router chooses a replica: round_robin, least_loaded or prefix_aware")
    parser.add_argument("--ttft-ms", type=float, help="target of the time to first token (TTFT)")
    parser.add_argument("--tpot-ms", type=float, help="target of the mean time per token after it (TPOT)")
    parser.add_argument("--goodput", type=float, default=0.99,
                        help="share of the requests that must meet the targets")
    parser.add_argument("--search", action="store_true",
                        help="search the fewest replicas that meet the targets")
    parser.add_argument("--policies", metavar="P,P", default="",
                        help="simulate each of these policies; with --search the one with the fewest "
                             "replicas first")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--config", metavar="FILE",
                        help="TOML file with engine settings in its table [engine]")
    # fmt: on
    others = tuple(field.name for field in fields(EngineConfig) if field.name not in ENGINE_FLAGS)
    configuration.add_flags(parser, "engine", leave_out=others)


def main(arguments: argparse.Namespace) -> int:
    """Simulate and print."""
    from pageturner.lab.report import write_json

    scenario, notes = make_scenario(arguments)
    policies = [name for name in arguments.policies.split(",") if name] or [scenario.config.policy]
    scenarios = [replace(scenario, config=replace(scenario.config, policy=policy)) for policy in policies]
    runs, faults = [], []
    for one in scenarios:
        try:
            runs += _runs(one, arguments)
        except EngineFault as fault:
            if fault.code != "impossible":
                raise
            faults.append(fault)
            notes.append(f"{one.config.policy}: {fault.message}")
    if not runs:
        raise faults[0]
    if arguments.search:
        runs.sort(key=lambda run: (run["replicas"], -run["goodput_share"]))
    print(render(runs, notes, search=arguments.search))
    if arguments.output:
        try:
            write_json(arguments.output, {"runs": runs, "notes": notes})
        except OSError as error:
            raise EngineFault("output", f"cannot write {arguments.output}: {error.strerror}") from error
    return 0


def _runs(scenario: Scenario, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from pageturner.lab.scenario import fewest_replicas, sweep

    wanted = rates(arguments.rate_scale)
    if arguments.search:
        if scenario.targets.ttft is None and scenario.targets.tpot is None:
            raise _bad("--search needs targets: --ttft-ms, --tpot-ms or both")
        return [fewest_replicas(replace(scenario, rate=rate))[0] for rate in wanted]
    return sweep(scenario, wanted)


def make_scenario(arguments: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """What was asked for, and what must be known to believe the answer. EngineFault('bad_setting') says what
    does not go together."""
    from pageturner.lab.request_metrics import LatencyTargets
    from pageturner.lab.scenario import Scenario

    check(arguments)
    flags = configuration.from_flags(arguments)
    if arguments.tpot_ms is not None:
        flags["engine"]["tpot_ms"] = arguments.tpot_ms  # what adaptive_chunk holds
    if arguments.gpu:
        config, sizes, longest, cost, notes = _on_gpu(arguments, flags)
    else:
        config, sizes, longest, cost, notes = _as_measured(arguments, flags)
    traffic, told = _traffic(arguments, longest)
    seconds = [None if ms is None else ms / 1e3 for ms in (arguments.ttft_ms, arguments.tpot_ms)]
    targets = LatencyTargets(seconds[0], seconds[1], arguments.goodput)
    if seconds == [None, None]:
        notes.append("no targets, so every answer is within them: give --ttft-ms or --tpot-ms")
    scenario = Scenario(
        config=config,
        sizes=sizes,
        max_model_len=longest,
        cost=cost,
        traffic=traffic,
        targets=targets,
        replicas=arguments.replicas,
        placement=arguments.placement,
    )
    return scenario, told + notes


def check(arguments: argparse.Namespace) -> None:
    """EngineFault('bad_setting') for what does not go together."""
    given = [name for name in ("trace", "log") if getattr(arguments, name)]
    if len(given) > 1:
        raise _bad("--trace and --log are two kinds of traffic: give one of them")
    if not given and not arguments.rate:
        raise _bad("which traffic? give --trace FILE, --log STEPLOG or --rate N")
    if bool(arguments.gpu) != bool(arguments.model):
        raise _bad("--gpu and --model go together")
    if not (arguments.gpu or arguments.calibration or arguments.log):
        raise _bad("how long does a step take? give --model and --gpu, --calibration FILE or --log STEPLOG")
    if arguments.lora and not arguments.gpu:
        message = (
            "--lora is for --gpu: calibrate an engine while it answers with adapters, and their price is"
        )
        raise _bad(f"{message} in its steps")
    if arguments.gpu and arguments.calibration:
        raise _bad("--gpu and --calibration are two answers to one question: give one of them")
    for name in ("cap", "gpus", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise _bad(f"--{name.replace('_', '-')} is 1 or more, not {getattr(arguments, name)}")
    for name in ("ttft_ms", "tpot_ms", "cv", "length_scale"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise _bad(f"--{name.replace('_', '-')} is more than 0, not {value}")
    for name in ("rate", "think", "turns", "num_prompts"):
        if not getattr(arguments, name) >= 0:
            raise _bad(f"--{name.replace('_', '-')} is 0 or more, not {getattr(arguments, name)}")
    if not 0 < arguments.goodput <= 1:
        raise _bad(f"--goodput is a share, above 0 and at most 1, not {arguments.goodput}")


def rates(text: str) -> list[float]:
    """The numbers of --rate-scale."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise _bad(f"--rate-scale is a number, or several with commas, not {text!r}") from None
    if not all(0 < rate < float("inf") for rate in found):
        raise _bad(f"--rate-scale is more than 0, not {text}")
    return found


# -- engines -------------------------------------------------------------------------------------------------

Engine = tuple[EngineConfig, Any, int, Any, list[str]]  # settings, KVSizes, longest sequence, Cost, notes


def _on_gpu(arguments: argparse.Namespace, flags: dict[str, dict[str, Any]]) -> Engine:
    from pageturner.commands.plan import adapter_bytes
    from pageturner.files import hub
    from pageturner.lab.model_outline import read_outline
    from pageturner.lab.roofline import GPUS, Reach, kv_tokens, roofline
    from pageturner.runtime.kv_memory import KVSizes

    if arguments.gpu not in GPUS:
        raise _bad(f"unknown --gpu {arguments.gpu!r}: one of {', '.join(GPUS)}")
    path = Path(arguments.model)
    path = path if path.suffix == ".json" else hub.resolve(arguments.model, offline=True).path
    model, gpu, count = read_outline(path), GPUS[arguments.gpu], arguments.gpus
    flags["engine"] = GPU_SETTINGS | flags["engine"]
    config = configuration.load(arguments.config, flags).engine
    dtype = "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    reach = Reach(arguments.mfu, arguments.mbu, arguments.overhead_ms / 1e3).check()
    adapters = [adapter_bytes(folder) for folder in arguments.lora]
    hot = sorted(adapters, reverse=True)[: config.max_loras]
    cost = roofline(model, gpu, reach, count, dtype, adapters)
    blocks = kv_tokens(model, gpu, reach, count, dtype, sum(hot)) // config.block_size
    longest = config.max_model_len or model.context
    notes = [
        f"roofline: {model.name} ({model.weights_from}) on {count} x {gpu.name}:"
        f" {gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.bandwidth / 1e9:,.0f} GB/s ({gpu.source})",
        f"assumed: {reach.compute:.0%} of the FLOP/s, {reach.bandwidth:.0%} of the GB/s and"
        f" {reach.memory:.0%} of the memory are reached, {1e3 * reach.overhead:g} ms of each step beside",
        f"KV: {blocks * config.block_size:,} tokens in {blocks:,} blocks",
    ]
    if adapters:
        told = f"{len(adapters)}, of which {len(hot)} are in memory ({sum(hot) / 1e6:,.1f} MB)"
        notes.append(f"adapters: {told}; reading others again is not counted")
    return config, KVSizes(max(blocks, 1)), longest, cost, notes


def _as_measured(arguments: argparse.Namespace, flags: dict[str, dict[str, Any]]) -> Engine:
    from pageturner.lab import recorded_runs, step_cost
    from pageturner.lab.calibration import engine_of, fit_runs

    run = recorded_runs.last_run(arguments.log) if arguments.log else None
    if arguments.calibration:
        cost = step_cost.load_calibration(arguments.calibration)
        where = str(arguments.calibration)
    else:
        assert run is not None
        cost, where = fit_runs(run), f"a fit of {arguments.log}"
    known, sizes, longest = engine_of(cost)
    flags["engine"] = {name: getattr(known, name) for name in SIMULATED_SETTINGS} | flags["engine"]
    config = configuration.load(arguments.config, flags).engine
    sizes = replace(sizes, blocks=sizes.blocks * known.block_size // config.block_size)
    notes = [
        f"step times: {where}, {cost.steps:,} steps, half of them within {cost.error[0]:.1%},"
        f" 90 % within {cost.error[1]:.1%}",
        f"engine: {known.model}, KV {sizes.blocks * config.block_size:,} tokens",
    ]
    return config, sizes, config.max_model_len or longest, cost, notes


# -- traffic -------------------------------------------------------------------------------------------------


def _traffic(arguments: argparse.Namespace, longest: int) -> tuple[Callable[[float], Traffic], list[str]]:
    """Traffic at so many times its rate, and what it is."""
    from pageturner.lab import recorded_runs, traffic_files
    from pageturner.lab.traffic_generators import SyntheticTraffic, with_times

    if arguments.log:
        found = recorded_runs.recorded_traffic(recorded_runs.read_runs(arguments.log))
        about = f"traffic: {arguments.log.name}, {found.total:,} requests, answered as long as they were then"
        return found.faster, [about]
    if arguments.trace is None:
        made = SyntheticTraffic(
            count=arguments.num_prompts or 1000,
            rate=arguments.rate,
            prompt=arguments.input_len,
            output=arguments.output_len,
            cv=arguments.cv,
            cap=arguments.cap,
            seed=arguments.seed,
        )
        turns, think = arguments.turns, arguments.think
        if turns:
            about = f"traffic: {made.count:,} sessions of {turns} turns, {made.rate:g} begin a second"
            return lambda rate: replace(made, rate=made.rate * rate).sessions(turns, think), [about]
        about = f"traffic: {made.count:,} requests made up, {made.rate:g} a second, variation {made.cv:g}"
        return lambda rate: replace(made, rate=made.rate * rate).open_loop(), [about]
    rows = traffic_files.read_trace(arguments.trace, arguments.num_prompts)
    name = traffic_files.trace_name(arguments.trace)
    if arguments.rate:
        rows = with_times(rows, arguments.rate, arguments.cv, arguments.seed)
    scaling = traffic_files.TraceScaling(
        length=arguments.length_scale, cap=arguments.cap, context=longest, think=arguments.think
    )
    _, out = traffic_files.from_trace(rows, scaling, name)
    cut = sum(map(scaling.cuts, rows))
    about = (
        f"traffic: {name}, {len(rows):,} requests, lengths x {scaling.length:g}; {out:,} left out as longer"
        f" than {longest:,} tokens with the cap of {scaling.cap:,}, {cut:,} answers cut by it"
    )
    return lambda rate: traffic_files.from_trace(rows, replace(scaling, rate=rate), name)[0], [about]


# -- what is shown -------------------------------------------------------------------------------------------


def render(runs: list[dict[str, Any]], notes: list[str], *, search: bool) -> str:
    """A row for each run, and what it rests on."""
    from pageturner.lab.report import table

    head = (
        "policy", "order", "replicas", "rate x", "answered", "refused", "tokens/s", "goodput/s", "within",
        "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "gap p99", "e2e p50", "p99 s", "KV", "busy", "cached",
    )  # fmt: skip
    rows = [_row(run) for run in runs]
    lines = [table(rows, head)]
    if search:
        best = runs[0]
        lines.append(f"cheapest: {best['replicas']:,} replicas with policy {best['policy']}")
    return "\n".join([*lines, "", *(f"note: {note}" for note in notes)])


def _row(run: dict[str, Any]) -> list[object]:
    engines, ttft, tpot = run["engines"], run["ttft_ms"], run["tpot_ms"]
    return [
        run["policy"], run["order"], run["replicas"], f"{run['rate']:g}", run["requests"] - run["refused"],
        run["refused"], f"{run['output_tokens_per_s']:,.0f}", run["goodput_per_s"],
        f"{run['goodput_share']:.1%}",
        f"{ttft['p50']:,.0f}", f"{ttft['p99']:,.0f}", f"{tpot['p50']:.1f}", f"{tpot['p99']:.1f}",
        f"{run['longest_gap_ms']['p99']:,.0f}", run["e2e_s"]["p50"], run["e2e_s"]["p99"],
        f"{engines['kv_used']:.0%}", f"{engines['busy']:.0%}", f"{engines['cached_share']:.0%}",
    ]  # fmt: skip


def _bad(message: str) -> EngineFault:
    return EngineFault("bad_setting", message)
