"""The subjects of `simulate`, `tune` and `plan`, from their flags: engines, replicas, traffic.

Owns the flags about several replicas, how flags become what the lab simulates, and the notes that
an answer rests on. All of the lab is imported when it is asked for. What is made can be sent to
another process.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.flag_table import check_range
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.formats import hub
from pageturner.policies.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from pageturner.executor.kv_memory import KVSizes
    from pageturner.lab.simulation.fleet import Roles, TierSizes
    from pageturner.lab.simulation.replica_changes import Autoscaling, Failures
    from pageturner.lab.simulation.step_cost import StepCost
    from pageturner.lab.traffic.traffic import Traffic
    from pageturner.lab.traffic.traffic_files import TraceRow, TraceScaling
    from pageturner.lab.traffic.traffic_generators import SyntheticTraffic

# What a simulated engine takes over from the one that was calibrated or recorded.
SIMULATED_SETTINGS = (
    "max_model_len",
    "kv_cache_dtype",
    "speculation",
    *(field.name for field in fields(SchedulerConfig)),
)
# What fills a GPU: more rows in a step than suit a CPU. Flags and [engine] go before.
GPU_SETTINGS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_queue": 100_000}
ADAPTER = "adapter_model.safetensors"
Flags = dict[str, dict[str, Any]]


def model_path(model: str) -> Path:
    """The file of a model, or what is enough to plan with: no weights are fetched."""
    path = Path(model)
    return path if path.suffix == ".json" else hub.resolve_config(model)


def kv_dtype(config: EngineConfig) -> str:
    return "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def adapter_bytes(folder: Path) -> int:
    """The memory that an adapter takes: its values, in the type that its file has."""
    try:
        return (folder / ADAPTER).stat().st_size
    except OSError as error:
        raise EngineFault("adapter_missing", f"--lora {folder}: it holds no {ADAPTER}") from error


def hot_adapters(folders: list[Path], config: EngineConfig) -> list[int]:
    """Bytes of the adapters that are in memory at once: the largest."""
    return sorted(map(adapter_bytes, folders), reverse=True)[: config.max_loras]


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One replica. longest: sequence in tokens; notes: what its step times rest on."""

    config: EngineConfig
    sizes: KVSizes
    longest: int
    cost: StepCost
    notes: list[str]
    gpus: int = 1
    kind: str = ""
    tiers: TierSizes | None = None
    roles: Roles | None = None


# -- engines ---------------------------------------------------------------------------------------


def engine_on_gpu(
    arguments: argparse.Namespace, flags: Flags, kind: str, count: int
) -> SimulatedEngine:
    """A replica on so many GPUs of this kind. EngineFault for a kind that is unknown, and for too
    little memory."""
    from pageturner.executor.kv_memory import KVSizes
    from pageturner.lab.planning.kv_planner import KVPlanner, states_in_words
    from pageturner.lab.planning.model_outline import read_outline
    from pageturner.lab.simulation.roofline import Reach, gpu_named, kv_tokens, roofline

    gpu = gpu_named(kind)
    model = replace(read_outline(model_path(arguments.model)), gpu_kv=True)
    config = configuration.load(
        arguments.config, flags | {"engine": GPU_SETTINGS | flags["engine"]}
    ).engine
    dtype = kv_dtype(config)
    reach = Reach(
        compute=arguments.mfu,
        bandwidth=arguments.mbu,
        overhead=arguments.overhead_ms / 1e3,
        link=1e9 * arguments.link_gb_s,
        latency=1e-6 * arguments.link_us,
        host=arguments.host_ms / 1e3,
        ahead=config.async_scheduling,
    ).check()
    adapters = [*map(adapter_bytes, arguments.lora)]
    hot = hot_adapters(arguments.lora, config)
    cost = roofline(model, gpu, reach, count, dtype, adapters)
    longest = config.max_model_len or model.context
    tokens = kv_tokens(model, gpu, reach, count, dtype, sum(hot))
    blocks = tokens // config.block_size
    sizes, told = KVSizes(max(blocks, 1)), ""
    if model.recurrent(dtype) is not None:
        memory = tokens * model.bytes_per_token(dtype)
        sizes = KVPlanner(model, dtype, config.block_size, longest, memory).sizes(config)
        told = f"; states of recurrent layers: {states_in_words(sizes)}"
    link = f", {(reach.link or gpu.link) / 1e9:,.0f} GB/s between them" if count > 1 else ""
    notes = [
        f"roofline: {model.name} ({model.weights_from}) on {count} x {gpu.name}:"
        f" {gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.bandwidth / 1e9:,.0f} GB/s{link} ({gpu.source})",
        f"assumed: {reach.compute:.0%} of the FLOP/s, {reach.bandwidth:.0%} of the GB/s and"
        f" {reach.memory:.0%} of the memory are reached, {1e3 * reach.overhead:g} ms of each step beside",
        f"KV: {sizes.blocks * config.block_size:,} tokens in {sizes.blocks:,} blocks{told}",
    ]
    if reach.host:
        when = "while the step before it runs" if reach.ahead else "before it"
        notes[1] += f", {1e3 * reach.host:g} ms of the host {when}"
    if count > 1:
        notes[1] += f", {1e6 * reach.latency:g} us of each exchange between them beside its bytes"
    if adapters:
        told = f"{len(adapters)}, of which {len(hot)} are in memory ({sum(hot) / 1e6:,.1f} MB)"
        notes.append(f"adapters: {told}; reading others again is not counted")
    engine = SimulatedEngine(config, sizes, longest, cost, notes, count, gpu.name)
    return beside(arguments, engine, cost.needs.position)


def beside(
    arguments: argparse.Namespace, engine: SimulatedEngine, nbytes: float
) -> SimulatedEngine:
    """The engine with slower memory for KV of which a token takes so many bytes, and with a role;
    what is assumed of both is in its notes. EngineFault for what it does not do."""
    config, notes = engine.config, list(engine.notes)
    tiers, roles = tiers_of(arguments, config, nbytes), roles_of(arguments, config, nbytes)
    if engine.sizes.states and (tiers or roles):
        flags = "--roles, --kv-host-memory and --kv-file-gb"
        raise bad_setting(f"{flags} are not simulated with recurrent layers yet: leave them out")
    if roles is not None:
        notes.append(
            f"roles: {arguments.roles}; prompts with {roles.least:,} new tokens and more are computed apart,"
            f" KV comes at {arguments.kv_link_gb_s:g} GB/s on a link of each pair,"
            f" {arguments.kv_link_ms:g} ms late"
        )
    if tiers is not None:
        notes.append(
            f"KV below, in each replica: {tiers.host_tokens:,} tokens in host memory at"
            f" {arguments.kv_host_gb_s:g} GB/s, {tiers.file_tokens:,} in a file at {arguments.kv_file_gb_s:g}"
        )
    return replace(engine, notes=notes, tiers=tiers, roles=roles)


def tiers_of(
    arguments: argparse.Namespace, config: EngineConfig, nbytes: float
) -> TierSizes | None:
    """Slower memory for KV of which a token takes so many bytes; None: there is none."""
    from pageturner.lab.simulation.fleet import TierSizes

    check_range(arguments, "more than 0", "kv_host_gb_s", "kv_file_gb_s")
    if not (config.kv_host_memory or arguments.kv_file_gb):
        return None
    return TierSizes(
        host_tokens=int(config.kv_host_memory // nbytes),
        file_tokens=int(1e9 * arguments.kv_file_gb // nbytes),
        host_seconds=nbytes / (1e9 * arguments.kv_host_gb_s),
        file_seconds=nbytes / (1e9 * arguments.kv_file_gb_s),
    )


def engines_that_fit(
    arguments: argparse.Namespace, flags: Flags, kinds: list[str], counts: list[int]
) -> list[SimulatedEngine]:
    """A replica on each number of GPUs of each kind on which model and KV fit; a kind on which they
    never do is in the notes of the others. EngineFault where they fit on none."""
    found: list[SimulatedEngine] = []
    faults: list[EngineFault] = []
    for kind in kinds:
        fits, fault = len(found), None
        for count in counts:
            try:
                found.append(engine_on_gpu(arguments, flags, kind, count))
            except (
                EngineFault
            ) as error:  # most often its memory is too small; what else is wrong is so with all
                fault = error
        if len(found) == fits and fault is not None:
            faults.append(fault)
    if not found:
        raise faults[0]
    for fault in faults:
        found[0].notes.append(f"left out: {fault.message}")
    return found


def engine_as_measured(arguments: argparse.Namespace, flags: Flags) -> SimulatedEngine:
    """The engine of a calibration or of a step log."""
    from pageturner.lab.simulation import recorded_runs, step_cost
    from pageturner.lab.simulation.calibration import engine_of, fit_runs

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
    needs = cost.engine.get("needs")
    if (arguments.roles or arguments.kv_file_gb or config.kv_host_memory) and not needs:
        raise bad_setting(
            f"{where} does not say how many bytes the KV of a token takes: calibrate again"
        )
    engine = SimulatedEngine(config, sizes, config.max_model_len or longest, cost, notes)
    return beside(arguments, engine, needs["position"] if needs else 1.0)


def roles_of(arguments: argparse.Namespace, config: EngineConfig, nbytes: float) -> Roles | None:
    """The roles of the replicas, where KV takes so many bytes a token; None: all do everything."""
    from pageturner.lab.simulation.fleet import Roles

    check_range(arguments, "more than 0", "kv_link_gb_s")
    check_range(arguments, "0 or more", "kv_link_ms")
    if not arguments.roles:
        return None
    return Roles(
        prefill=1 if arguments.roles == "search" else role_counts(arguments.roles)[0],
        least=config.prefill_tokens,
        token_seconds=nbytes / (1e9 * arguments.kv_link_gb_s),
        latency=arguments.kv_link_ms / 1e3,
    )


def role_counts(text: str) -> tuple[int, int]:
    """Replicas that compute prompts, and those that answer."""
    found = re.fullmatch(r"prefill=([1-9]\d{0,5}),decode=([1-9]\d{0,5})", text)
    if found is None:
        raise bad_setting(f"--roles is prefill=N,decode=M with 1 or more of each, not {text!r}")
    return int(found[1]), int(found[2])


# -- replicas that come and go ---------------------------------------------------------------------


def check_replicas(arguments: argparse.Namespace) -> None:
    """EngineFault('bad_setting') for flags about several replicas that do not go together."""
    if arguments.roles and arguments.search and arguments.roles != "search":
        raise bad_setting("--search counts replicas: give it --roles search, or leave --roles out")
    if arguments.roles and not arguments.search and arguments.replicas != 1:
        raise bad_setting("--roles says how many replicas there are: leave --replicas out")
    if arguments.roles == "search" and not arguments.search:
        raise bad_setting("--roles search goes with --search; else it is prefill=N,decode=M")
    failing = arguments.failures_per_hour or arguments.events
    check_range(
        arguments,
        "0 or more",
        *("restart_seconds", "drain_seconds", "start_seconds", "upscale_delay", "downscale_delay"),
        "failures_per_hour",
    )
    if arguments.autoscale and failing:
        raise bad_setting(
            "--autoscale is simulated without --failures-per-hour and --events: leave one out"
        )
    if arguments.autoscale and (arguments.search or arguments.roles or arguments.replicas != 1):
        raise bad_setting(
            "--autoscale says how many replicas there are: leave --search, --roles, --replicas out"
        )
    if arguments.search and failing:
        raise bad_setting(
            "--search counts replicas that do not fail: leave --failures-per-hour and --events out"
        )


def failures_of(arguments: argparse.Namespace, replicas: int) -> Failures | None:
    """The failures of so many replicas; None: none were asked for."""
    from pageturner.lab.simulation.replica_changes import Failures, read_events

    if not (arguments.failures_per_hour or arguments.events):
        return None
    return Failures(
        per_hour=arguments.failures_per_hour,
        events=read_events(arguments.events, replicas) if arguments.events else (),
        back=arguments.restart_seconds,
        grace=arguments.drain_seconds,
        move=arguments.streams == "move",
        seed=arguments.seed,
    )


def autoscaling_of(arguments: argparse.Namespace) -> Autoscaling | None:
    """The bounds between which the number of replicas follows the load; None: it does not."""
    from pageturner.lab.simulation.replica_changes import Autoscaling
    from pageturner.lab.simulation.scenario import MAX_REPLICAS

    if not arguments.autoscale:
        return None
    found = re.fullmatch(r"([1-9]\d{0,6}),([1-9]\d{0,6})", arguments.autoscale)
    least, most = (int(found[1]), int(found[2])) if found else (1, 0)
    if not least <= most <= MAX_REPLICAS:
        message = f"--autoscale is LEAST,MOST replicas, 1 to {MAX_REPLICAS:,}, such as 1,8"
        raise bad_setting(f"{message}, not {arguments.autoscale!r}")
    return Autoscaling(
        least,
        most,
        start=arguments.start_seconds,
        up=arguments.upscale_delay,
        down=arguments.downscale_delay,
        grace=arguments.drain_seconds,
        goal=arguments.goodput,
    )


def turnover_in_words(run: Mapping[str, Any]) -> str:
    """A sentence about replicas that end, or come and go."""
    found = run["turnover"]
    streams = f"{found['streams_moved']:,} streams moved, {found['tokens_recomputed']:,} tokens recomputed"
    if found["streams_restarted"]:
        streams = f"{found['streams_restarted']:,} streams began again, {found['tokens_lost']:,} tokens lost"
    if found["streams_moved"] or found["streams_restarted"]:
        streams += f", their longest gap p99 {found['longest_gap_ms']['p99']:,.0f} ms"
    if "replica_seconds" in found:
        return (
            f"autoscaled: {found['replicas_mean']:,.1f} replicas on average, {found['replicas_most']:,} at"
            f" most ({found['replica_seconds']:,.0f} s of replicas; {found['replicas_added']:,} added,"
            f" {found['replicas_removed']:,} taken away), {streams}"
        )
    return (
        f"failures: {found['replicas_failed']:,} replicas ended, {found['replicas_drained']:,} drained,"
        f" {streams}"
    )


# -- traffic ---------------------------------------------------------------------------------------


def traffic_of(
    arguments: argparse.Namespace, longest: int
) -> tuple[Callable[[float], Traffic], list[str]]:
    """Traffic at so many times its rate, and what it is."""
    from pageturner.lab.simulation import recorded_runs
    from pageturner.lab.traffic import traffic_files
    from pageturner.lab.traffic.traffic_generators import SyntheticTraffic, with_times

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
        about = f"traffic: {made.count:,} sessions of {arguments.turns} turns,"
        about += f" {made.rate:g} begin a second"
        if not arguments.turns:
            about = f"traffic: {made.count:,} requests made up, {made.rate:g} a second,"
            about += f" variation {made.cv:g}"
            about += (
                f"; prompts of {made.prompt:,} and answers of {made.output:,} tokens on average"
            )
            if made.output > made.cap:
                about += f", answers cut at {made.cap:,} (--cap)"
        return partial(_made_up, made, arguments.turns, arguments.think), [about]
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
    return partial(_of_trace, rows, scaling, name), [about]


def _made_up(made: SyntheticTraffic, turns: int, think: float, rate: float) -> Traffic:
    made = replace(made, rate=made.rate * rate)
    return made.sessions(turns, think) if turns else made.open_loop()


def _of_trace(rows: list[TraceRow], scaling: TraceScaling, name: str, rate: float) -> Traffic:
    from pageturner.lab.traffic import traffic_files

    return traffic_files.from_trace(rows, replace(scaling, rate=rate), name)[0]
