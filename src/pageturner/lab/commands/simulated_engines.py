"""What `simulate` and `tune` simulate, from their flags: engines with step times, and the traffic.

Owns how flags become these, and what must be said of them to believe an answer. All of the lab is imported
when it is asked for. What is made can be sent to another process.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.policies.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from pageturner.executor.kv_memory import KVSizes
    from pageturner.lab.simulation.fleet import Roles, TierSizes
    from pageturner.lab.simulation.step_cost import StepCost
    from pageturner.lab.traffic.traffic import Traffic
    from pageturner.lab.traffic.traffic_files import TraceRow, TraceScaling
    from pageturner.lab.traffic.traffic_generators import SyntheticTraffic

# What a simulated engine takes over from the one that was calibrated or recorded.
SIMULATED_SETTINGS = (
    "max_model_len",
    "kv_cache_dtype",
    *(field.name for field in fields(SchedulerConfig)),
)
# What fills a GPU: more rows in a step than suit a CPU. Flags and [engine] go before.
GPU_SETTINGS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_queue": 100_000}
Flags = dict[str, dict[str, Any]]


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


# -- engines -------------------------------------------------------------------------------------------------


def engine_on_gpu(
    arguments: argparse.Namespace, flags: Flags, kind: str, count: int
) -> SimulatedEngine:
    """A replica on so many GPUs of this kind. EngineFault for a kind that is unknown, and for too little
    memory."""
    from pageturner.executor.kv_memory import KVSizes
    from pageturner.formats import hub
    from pageturner.lab.commands.plan import adapter_bytes
    from pageturner.lab.planning.model_outline import read_outline
    from pageturner.lab.simulation.roofline import Reach, gpu_named, kv_tokens, roofline

    gpu = gpu_named(kind)
    path = Path(arguments.model)
    path = path if path.suffix == ".json" else hub.resolve(arguments.model, offline=True).path
    model = replace(read_outline(path), gpu_kv=True)
    config = configuration.load(
        arguments.config, flags | {"engine": GPU_SETTINGS | flags["engine"]}
    ).engine
    dtype = "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    reach = Reach(
        compute=arguments.mfu,
        bandwidth=arguments.mbu,
        overhead=arguments.overhead_ms / 1e3,
        link=1e9 * arguments.link_gb_s,
        latency=1e-6 * arguments.link_us,
        host=arguments.host_ms / 1e3,
        ahead=config.async_scheduling,
    ).check()
    adapters = [adapter_bytes(folder) for folder in arguments.lora]
    hot = sorted(adapters, reverse=True)[: config.max_loras]
    cost = roofline(model, gpu, reach, count, dtype, adapters)
    blocks = kv_tokens(model, gpu, reach, count, dtype, sum(hot)) // config.block_size
    link = f", {(reach.link or gpu.link) / 1e9:,.0f} GB/s between them" if count > 1 else ""
    notes = [
        f"roofline: {model.name} ({model.weights_from}) on {count} x {gpu.name}:"
        f" {gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.bandwidth / 1e9:,.0f} GB/s{link} ({gpu.source})",
        f"assumed: {reach.compute:.0%} of the FLOP/s, {reach.bandwidth:.0%} of the GB/s and"
        f" {reach.memory:.0%} of the memory are reached, {1e3 * reach.overhead:g} ms of each step beside",
        f"KV: {blocks * config.block_size:,} tokens in {blocks:,} blocks",
    ]
    if reach.host:
        when = "while the step before it runs" if reach.ahead else "before it"
        notes[1] += f", {1e3 * reach.host:g} ms of the host {when}"
    if count > 1:
        notes[1] += f", {1e6 * reach.latency:g} us of each exchange between them beside its bytes"
    if adapters:
        told = f"{len(adapters)}, of which {len(hot)} are in memory ({sum(hot) / 1e6:,.1f} MB)"
        notes.append(f"adapters: {told}; reading others again is not counted")
    tiers, roles = beside(arguments, config, cost.needs.position, notes)
    return SimulatedEngine(
        config,
        KVSizes(max(blocks, 1)),
        config.max_model_len or model.context,
        cost,
        notes,
        count,
        gpu.name,
        tiers,
        roles,
    )


def beside(
    arguments: argparse.Namespace, config: EngineConfig, nbytes: float, notes: list[str]
) -> tuple[TierSizes | None, Roles | None]:
    """Slower memory for KV of which a token takes so many bytes, and the roles of replicas; notes: what is
    assumed of both is added."""
    tiers, roles = tiers_of(arguments, config, nbytes), roles_of(arguments, config, nbytes)
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
    return tiers, roles


def tiers_of(
    arguments: argparse.Namespace, config: EngineConfig, nbytes: float
) -> TierSizes | None:
    """Slower memory for KV of which a token takes so many bytes; None: there is none."""
    from pageturner.lab.simulation.fleet import TierSizes

    for name in ("kv_host_gb_s", "kv_file_gb_s"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise bad_setting(
                f"--{name.replace('_', '-')} is more than 0, not {getattr(arguments, name)}"
            )
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
    """A replica on each number of GPUs of each kind on which model and KV fit; a kind on which they never do
    is in the notes of the others. EngineFault where they fit on none."""
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
    tiers, roles = beside(arguments, config, needs["position"] if needs else 1.0, notes)
    return SimulatedEngine(
        config, sizes, config.max_model_len or longest, cost, notes, tiers=tiers, roles=roles
    )


def roles_of(arguments: argparse.Namespace, config: EngineConfig, nbytes: float) -> Roles | None:
    """The roles of the replicas, where KV takes so many bytes a token; None: all do everything."""
    from pageturner.lab.simulation.fleet import Roles

    if not (0 < arguments.kv_link_gb_s < float("inf") and 0 <= arguments.kv_link_ms < float("inf")):
        raise bad_setting("--kv-link-gb-s is more than 0, --kv-link-ms 0 or more")
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


# -- traffic -------------------------------------------------------------------------------------------------


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
        turns, think = arguments.turns, arguments.think
        if turns:
            about = (
                f"traffic: {made.count:,} sessions of {turns} turns, {made.rate:g} begin a second"
            )
            return partial(_sessions, made, turns, think), [about]
        about = f"traffic: {made.count:,} requests made up, {made.rate:g} a second, variation {made.cv:g}"
        about += f"; prompts of {made.prompt:,} and answers of {made.output:,} tokens on average"
        if made.output > made.cap:
            about += f", answers cut at {made.cap:,} (--cap)"
        return partial(_open_loop, made), [about]
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


def _open_loop(made: SyntheticTraffic, rate: float) -> Traffic:
    return replace(made, rate=made.rate * rate).open_loop()


def _sessions(made: SyntheticTraffic, turns: int, think: float, rate: float) -> Traffic:
    return replace(made, rate=made.rate * rate).sessions(turns, think)


def _of_trace(rows: list[TraceRow], scaling: TraceScaling, name: str, rate: float) -> Traffic:
    from pageturner.lab.traffic import traffic_files

    return traffic_files.from_trace(rows, replace(scaling, rate=rate), name)[0]
