"""`pageturner simulate`: what these engines, so many of them, would make of this traffic.

Owns the flags, what goes together of them, and the table. What is simulated is made in
simulated_engines.py; all of the lab is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags, check_range
from pageturner.config.settings import EngineConfig, RouterConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.commands import simulated_engines
from pageturner.lab.commands.flag_values import names, numbers
from pageturner.lab.commands.simulated_engines import SIMULATED_SETTINGS, SimulatedEngine
from pageturner.lab.reporting.output import write_figures

if TYPE_CHECKING:
    from pageturner.lab.planning.capacity_search import Asker, Option
    from pageturner.lab.simulation.scenario import Scenario

# --tpot-ms is a flag of this command: the target, at which adaptive_chunk aims too.
SETTINGS = (
    *(name for name in SIMULATED_SETTINGS if name != "tpot_ms"),
    "kv_host_memory",
    "prefill_tokens",
    "async_scheduling",
)
SEARCHED_GPUS = "1,2,4,8"
WORTH_PROCESSES = 2000  # requests from which a search takes more time than processes take to begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "simulate", "links", "turnover", "search")
    router = RouterConfig()
    parser.set_defaults(placement=router.placement, loads=router.loads)
    others = tuple(field.name for field in fields(EngineConfig) if field.name not in SETTINGS)
    configuration.add_flags(parser, "engine", leave_out=others)


def main(arguments: argparse.Namespace) -> int:
    """Simulate and print."""
    made = make_scenarios(arguments)
    prices = read_prices(arguments.price_per_gpu_hour, [one.kind for one in made.options])
    policies = names(arguments.policies)
    runs, faults, notes = [], [], made.notes
    wanted, kinds = (
        numbers("--rate-scale", arguments.rate_scale),
        dict.fromkeys(one.kind for one in made.options),
    )
    for policy in policies or [made.options[0].scenario.config.policy]:
        for kind, rate in itertools.product(kinds, wanted):
            options = [_with_policy(one, policy) for one in made.options if one.kind == kind]
            try:
                runs += _runs(options, rate, arguments)
            except EngineFault as fault:
                if fault.code != "impossible":
                    raise
                faults.append(fault)
                at = f" at rate x {rate:g}" if len(wanted) > 1 else ""
                notes.append(f"{policy}{at}: {fault.message}")
    if not runs:
        raise faults[0]
    for run in runs:
        add_prices(run, prices)
    if arguments.search:
        runs.sort(key=_cost_of)
    if refused := max(run["refused"] for run in runs):
        longest = made.options[0].scenario.max_model_len
        notes.append(
            f"up to {refused:,} requests were refused: prompt and answer longer than {longest:,} tokens"
            " (--max-model-len), or a full queue (--max-queue); lower --input-len or --cap, or add replicas"
        )
    print(render(runs, notes, search=arguments.search))
    if arguments.output:
        write_figures(arguments.output, {"runs": runs, "notes": notes})
    return 0


def _with_policy(option: Option, policy: str) -> Option:
    one = option.scenario
    return replace(option, scenario=replace(one, config=replace(one.config, policy=policy)))


def _runs(
    options: list[Option], rate: float, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    from pageturner.lab.simulation.scenario import sweep

    if arguments.search:
        targets = options[0].scenario.targets
        if targets.ttft is None and targets.tpot is None:
            raise bad_setting("--search needs targets: --ttft-ms, --tpot-ms or both")
        return [_search(options, rate, arguments.workers)]
    (only,) = options
    about = {
        "gpus_per_replica": only.gpus,
        "gpus": only.gpus * only.scenario.replicas,
        "gpu": only.kind,
    }
    return [run | about for run in sweep(only.scenario, [rate])]


def _search(options: list[Option], rate: float, workers: int) -> dict[str, Any]:
    """The run with the fewest GPUs at this rate."""
    from pageturner.lab.planning.capacity_search import search_capacity
    from pageturner.lab.planning.parallel_runs import ParallelRuns, SerialRuns

    options = [replace(one, scenario=replace(one.scenario, rate=rate)) for one in options]
    workers = workers or len(os.sched_getaffinity(0))
    if options[0].scenario.traffic(rate).total < WORTH_PROCESSES:
        workers = 1
    with contextlib.ExitStack() as stack:

        def asker(possible: Sequence[Option]) -> Asker:
            if workers == 1:
                return SerialRuns(possible)
            return stack.enter_context(ParallelRuns(possible, workers, _tell))

        best, _ = search_capacity(options, asker, _tell)
    return best | {"gpu": options[0].kind}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- what is simulated -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    """The scenarios that were asked for; one option, or several with --search. notes: what must be
    known to believe it."""

    options: list[Option]
    notes: list[str]


def make_scenario(arguments: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """The only one that was asked for, and its notes."""
    made = make_scenarios(arguments)
    if len(made.options) > 1:
        raise bad_setting("one kind of replica is simulated here: --gpu and --gpus are one each")
    return made.options[0].scenario, made.notes


def make_scenarios(arguments: argparse.Namespace) -> Simulated:
    """The scenarios that the flags ask for. EngineFault('bad_setting') says what does not go
    together."""
    from pageturner.lab.bench.request_metrics import LatencyTargets
    from pageturner.lab.planning.capacity_search import Option, splits_of
    from pageturner.lab.simulation.scenario import Scenario

    flags = configuration.from_flags(arguments)
    check(arguments)
    if arguments.tpot_ms is not None:
        flags["engine"]["tpot_ms"] = arguments.tpot_ms  # what adaptive_chunk holds
    engines = _engines(arguments, flags)
    traffic, told = simulated_engines.traffic_of(arguments, engines[0].longest)
    seconds = [None if ms is None else ms / 1e3 for ms in (arguments.ttft_ms, arguments.tpot_ms)]
    notes = [note for one in engines for note in one.notes]
    if seconds == [None, None]:
        notes.append("no targets, so every answer is within them: give --ttft-ms or --tpot-ms")
    found, scaling = [], simulated_engines.autoscaling_of(arguments)
    for one in engines:
        replicas = scaling.most if scaling else arguments.replicas
        if one.roles and not arguments.search:
            replicas = sum(simulated_engines.role_counts(arguments.roles))
        scenario = Scenario(
            config=one.config,
            sizes=one.sizes,
            max_model_len=one.longest,
            cost=one.cost,
            traffic=traffic,
            targets=LatencyTargets(seconds[0], seconds[1], arguments.goodput),
            replicas=replicas,
            placement=arguments.placement,
            loads=arguments.loads,
            tiers=one.tiers,
            roles=one.roles,
            failures=simulated_engines.failures_of(arguments, replicas),
            scaling=scaling,
        )
        option = Option(one.gpus, scenario, one.kind)
        found += splits_of(option) if one.roles and arguments.search else [option]
    return Simulated(found, told + list(dict.fromkeys(notes)))


def _engines(
    arguments: argparse.Namespace, flags: simulated_engines.Flags
) -> list[SimulatedEngine]:
    """One for each number of GPUs of each kind."""
    if not arguments.gpu:
        return [simulated_engines.engine_as_measured(arguments, flags)]
    from pageturner.lab.simulation.roofline import gpu_named

    kinds = [gpu_named(name).name for name in arguments.gpu.split(",")]
    counts = gpu_counts(arguments.gpus or (SEARCHED_GPUS if arguments.search else "1"))
    if not arguments.search and len(kinds) * len(counts) > 1:
        raise bad_setting("several kinds or numbers of GPUs are compared with --search")
    return simulated_engines.engines_that_fit(arguments, flags, kinds, counts)


def gpu_counts(text: str) -> list[int]:
    """The whole numbers of --gpus, the least first."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise bad_setting(
            f"--gpus is a whole number, or several with commas, not {text!r}"
        ) from None
    if found[0] < 1:
        raise bad_setting(f"--gpus is 1 or more, not {found[0]}")
    return found


def read_prices(text: str, kinds: list[str]) -> dict[str, float]:
    """Money for an hour of each kind of GPU; {} where nobody said."""
    if not text:
        return {}
    found = dict[str, float]()
    for part in text.split(","):
        kind, _, price = part.rpartition("=")
        try:
            found |= dict.fromkeys([kind] if kind else kinds, float(price))
        except ValueError:
            raise bad_setting(
                f"--price-per-gpu-hour is a number, or H100=2,L4=0.5, not {text!r}"
            ) from None
    if not all(0 <= price < float("inf") for price in found.values()):
        raise bad_setting("--price-per-gpu-hour is 0 or more")
    if missing := [kind for kind in kinds if kind not in found]:
        raise bad_setting(f"--price-per-gpu-hour says nothing of {', '.join(missing)}")
    return found


def add_prices(run: dict[str, Any], prices: dict[str, float]) -> None:
    """Add the prices of an hour and of a million tokens of answers, all GPUs paid from the first
    request to the last answer; of replicas that come and go those that are there or start."""
    if (price := prices.get(run["gpu"])) is not None:
        replicas = run.get("turnover", {}).get("replicas_mean", run["replicas"])
        run["price_per_hour"] = hourly = price * (replicas * run["gpus_per_replica"])
        millions = run["output_tokens"] / 1e6
        run["price_per_million"] = (
            hourly * run["seconds"] / 3600 / millions if millions else float("nan")
        )


def _cost_of(run: dict[str, Any]) -> tuple[float, float, int, float]:
    """A key by which runs are sorted; of one rate smaller is cheaper."""
    cost = run.get("price_per_hour", run["gpus"])
    return run["rate"], cost, run["replicas"], -run["goodput_share"]


def check(arguments: argparse.Namespace) -> None:
    """EngineFault('bad_setting') for what does not go together."""
    given = [name for name in ("trace", "log") if getattr(arguments, name)]
    if len(given) > 1:
        raise bad_setting("--trace and --log are two kinds of traffic: give one of them")
    if not given and not arguments.rate:
        raise bad_setting("which traffic? give --trace FILE, --log STEPLOG or --rate N")
    check_range(arguments, "0 or more", "workers")
    if bool(arguments.gpu) != bool(arguments.model):
        raise bad_setting("--gpu and --model go together")
    if not (arguments.gpu or arguments.calibration or arguments.log):
        raise bad_setting(
            "how long does a step take? give --model and --gpu, --calibration FILE or --log STEPLOG"
        )
    if arguments.lora and not arguments.gpu:
        message = "--lora is for --gpu: calibrate an engine while it answers with adapters, and their price is"
        raise bad_setting(f"{message} in its steps")
    simulated_engines.check_replicas(arguments)
    if arguments.gpu and arguments.calibration:
        raise bad_setting(
            "--gpu and --calibration are two answers to one question: give one of them"
        )
    check_range(arguments, "1 or more", "cap", "input_len", "output_len")
    check_range(arguments, "more than 0", "ttft_ms", "tpot_ms", "cv", "length_scale")
    check_range(arguments, "0 or more", "rate", "think", "turns", "num_prompts", "kv_file_gb")
    if not 0 < arguments.goodput <= 1:
        raise bad_setting(f"--goodput is a share, above 0 and at most 1, not {arguments.goodput}")


# -- what is shown ---------------------------------------------------------------------------------


def render(runs: list[dict[str, Any]], notes: list[str], *, search: bool) -> str:
    """A row for each run, and what it rests on."""
    from pageturner.lab.reporting.summary import COLUMNS, table

    columns = COLUMNS["simulate"]
    rows = []
    for run in runs:
        figures = run | {"answered": run["requests"] - run["refused"]}
        rows.append([column.form.format(column.of(figures)) for column in columns])
    lines = [
        table(rows, [column.head for column in columns]),
        *(simulated_engines.turnover_in_words(run) for run in runs if "turnover" in run),
    ]
    if not search:
        lines += [_states(run["engines"]) for run in runs if "state_hits" in run["engines"]]
        lines += [
            f"money: {run['replicas']:,} replicas{_money(run)}" for run in runs if _money(run)
        ]
    if search:
        several = runs[0]["rate"] != runs[-1]["rate"]
        for rate, group in itertools.groupby(runs, key=lambda run: run["rate"]):
            best = next(group)
            at = f" at rate x {rate:g}" if several else ""
            low, high = best["goodput_range"]
            lines.append(
                f"cheapest{at}: {_in_gpus(best)} with policy {best['policy']}{_money(best)}; of all such"
                f" requests {low:.1%} to {high:.1%} are within the targets"
            )
    return "\n".join([*lines, "", *(f"note: {note}" for note in notes)])


def _states(engines: dict[str, Any]) -> str:
    missed = f"{engines['state_missed_tokens']:,} tokens whose KV was there lacked one"
    return f"states: {engines['state_hits']:,} prompts began at one, {missed}"


def _in_gpus(run: dict[str, Any]) -> str:
    said = f"{run['replicas']:,} replica{'s' if run['replicas'] > 1 else ''}"
    if not run["gpu"]:
        return said
    roles = f" ({run['roles']})" if run["roles"] else ""
    in_all = f"{run['gpus']:,} GPU{'s' if run['gpus'] > 1 else ''} in all"
    return f"{said}{roles} of {run['gpus_per_replica']} x {run['gpu']}, {in_all},"


def _money(run: dict[str, Any]) -> str:
    if "price_per_hour" not in run:
        return ""
    return f": {run['price_per_hour']:,.2f} an hour, {run['price_per_million']:,.2f} a million tokens of answers"
