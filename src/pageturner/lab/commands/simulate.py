"""`pageturner simulate`: what these engines, so many of them, would make of this traffic.

Owns the flags, what goes together of them, and the table. What is simulated is made in simulated_engines.py;
all of the lab is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.settings import EngineConfig, RouterConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.commands import cluster_flags, simulated_engines
from pageturner.lab.commands.simulated_engines import SIMULATED_SETTINGS, SimulatedEngine

if TYPE_CHECKING:
    from pageturner.lab.planning.capacity_search import Asker, Option
    from pageturner.lab.simulation.scenario import Scenario

# --tpot-ms is a flag of this command: the target, at which adaptive_chunk aims too.
ENGINE_FLAGS = (
    *(name for name in SIMULATED_SETTINGS if name != "tpot_ms"),
    "kv_host_memory",
    "prefill_tokens",
    "async_scheduling",
)
SEARCHED_GPUS = "1,2,4,8"
WORTH_PROCESSES = 2000  # requests from which a search takes more time than processes take to begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    _traffic_flags(parser)
    _engine_flags(parser)
    cluster_flags.add_arguments(parser)
    _search_flags(parser)
    others = tuple(field.name for field in fields(EngineConfig) if field.name not in ENGINE_FLAGS)
    configuration.add_flags(parser, "engine", leave_out=others)


def _traffic_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="trace of recorded requests (JSONL, also gzip)"
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="step log to take the traffic from, and engine and step times too unless "
        "others are given",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=0,
        help="how many requests to make up, or to take of the trace (default: 1000, or all)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="requests a second; arrival times are made up, for a trace too",
    )
    parser.add_argument(
        "--cv",
        type=float,
        default=1.0,
        help="coefficient of variation of the gaps between arrivals: 1 is Poisson, more is bursts",
    )
    parser.add_argument(
        "--input-len", type=int, default=512, help="mean prompt length of made-up requests"
    )
    parser.add_argument(
        "--output-len", type=int, default=128, help="mean answer length of made-up requests"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=0,
        help="make up sessions with this many turns, each sent after the answer before it",
    )
    parser.add_argument(
        "--think",
        type=float,
        default=60.0,
        help="seconds from an answer to the next turn: the mean, or the most in a trace",
    )
    parser.add_argument(
        "--length-scale", type=float, default=1.0, help="multiply the lengths of the trace"
    )
    parser.add_argument(
        "--rate-scale",
        metavar="X,X",
        default="1",
        help="multiply the rate of the traffic by this; several with commas simulate each",
    )
    parser.add_argument(
        "--cap",
        type=int,
        default=4096,
        help="max_tokens that every request is sent with (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of made-up lengths and times")


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="model on --gpu: a config.json, folder, GGUF file, id or alias"
    )
    parser.add_argument(
        "--gpu",
        help="GPU whose limits give the step times, such as H100 (an unknown name lists "
        "all); several with commas with --search",
    )
    parser.add_argument(
        "--gpus",
        metavar="N,N",
        default="",
        help="GPUs in a replica, which share each layer; several with commas with --search, "
        f"which tries {SEARCHED_GPUS} (default: 1)",
    )
    parser.add_argument(
        "--link-gb-s",
        type=float,
        default=0.0,
        help="GB/s that a GPU sends to the others of its replica (default: by its sheet)",
    )
    parser.add_argument(
        "--link-us",
        type=float,
        default=10.0,
        help="microseconds of an exchange between GPUs beside its bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--price-per-gpu-hour",
        metavar="PRICE",
        default="",
        help="money for a GPU and an hour, or H100=2,L4=0.5",
    )
    parser.add_argument(
        "--lora",
        metavar="FOLDER",
        type=Path,
        action="append",
        default=[],
        help="a LoRA adapter on --gpu, again for each: requests have each as often as others",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        default=0.6,
        help="share of the GPU's FLOP/s that is reached (default: %(default)s)",
    )
    parser.add_argument(
        "--mbu",
        type=float,
        default=0.8,
        help="share of its bandwidth that is reached (default: %(default)s)",
    )
    parser.add_argument(
        "--overhead-ms",
        type=float,
        default=2.0,
        help="time that each step takes beside its kernels (default: %(default)s)",
    )
    parser.add_argument(
        "--host-ms",
        type=float,
        default=0.0,
        help="time of the host for each step, on a GPU hidden behind the step before it"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="file that pageturner calibrate wrote"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="number of engines behind the router (default: %(default)s; --search counts)",
    )
    parser.add_argument(
        "--placement",
        default=RouterConfig().placement,
        help="how the router chooses a replica: round_robin, least_loaded or prefix_aware "
        "(default: %(default)s, as of pageturner route)",
    )
    parser.add_argument(
        "--loads",
        choices=("tokens", "requests"),
        default=RouterConfig().loads,
        help="what it counts a replica's load in (default: %(default)s, as of route)",
    )


def _search_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttft-ms", type=float, help="target of the time to first token (TTFT)")
    parser.add_argument(
        "--tpot-ms", type=float, help="target of the mean time per token after it (TPOT)"
    )
    parser.add_argument(
        "--goodput",
        type=float,
        default=0.99,
        help="share of the requests that must meet the targets (default: %(default)s)",
    )
    parser.add_argument(
        "--search", action="store_true", help="search the fewest GPUs that meet the targets"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes that a search takes; its answer is the same (default: one a core)",
    )
    parser.add_argument(
        "--policies",
        metavar="P,P",
        default="",
        help="simulate each of these policies; with --search the one with the fewest GPUs first",
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write all figures to this JSON file"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with engine settings in its table [engine]"
    )


def main(arguments: argparse.Namespace) -> int:
    """Simulate and print."""
    from pageturner.lab.reporting.summary import write_json

    made = make_scenarios(arguments)
    prices = read_prices(arguments.price_per_gpu_hour, [one.kind for one in made.options])
    policies = [name for name in arguments.policies.split(",") if name]
    runs, faults, notes = [], [], made.notes
    wanted, kinds = rates(arguments.rate_scale), dict.fromkeys(one.kind for one in made.options)
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
        try:
            write_json(arguments.output, {"runs": runs, "notes": notes})
        except OSError as error:
            raise EngineFault(
                "output", f"cannot write {arguments.output}: {error.strerror}"
            ) from error
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


# -- what is simulated ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    """What was asked for; one option, or several with --search. notes: what must be known to believe it."""

    options: list[Option]
    notes: list[str]


def make_scenario(arguments: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """The only one that was asked for, and its notes."""
    made = make_scenarios(arguments)
    if len(made.options) > 1:
        raise bad_setting("one kind of replica is simulated here: --gpu and --gpus are one each")
    return made.options[0].scenario, made.notes


def make_scenarios(arguments: argparse.Namespace) -> Simulated:
    """What was asked for. EngineFault('bad_setting') says what does not go together."""
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
    found, scaling = [], cluster_flags.autoscaling_of(arguments)
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
            failures=cluster_flags.failures_of(arguments, replicas),
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
    counts = numbers("gpus", arguments.gpus or (SEARCHED_GPUS if arguments.search else "1"))
    if not arguments.search and len(kinds) * len(counts) > 1:
        raise bad_setting("several kinds or numbers of GPUs are compared with --search")
    return simulated_engines.engines_that_fit(arguments, flags, kinds, counts)


def numbers(name: str, text: str) -> list[int]:
    """Of a flag with whole numbers and commas, the least first."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise bad_setting(
            f"--{name} is a whole number, or several with commas, not {text!r}"
        ) from None
    if found[0] < 1:
        raise bad_setting(f"--{name} is 1 or more, not {found[0]}")
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
    """What an hour and a million tokens of answers cost, all GPUs paid from the first request to the last
    answer; of replicas that come and go those that are there or start."""
    if (price := prices.get(run["gpu"])) is not None:
        run["price_per_hour"] = hourly = price * _gpus_paid(run)
        millions = run["output_tokens"] / 1e6
        run["price_per_million"] = (
            hourly * run["seconds"] / 3600 / millions if millions else float("nan")
        )


def _gpus_paid(run: dict[str, Any]) -> float:
    """On average, from the first request to the last answer."""
    mean = float(run.get("turnover", {}).get("replicas_mean", run["replicas"]))
    return mean * float(run["gpus_per_replica"])


def _cost_of(run: dict[str, Any]) -> tuple[float, float, int, float]:
    """Of one rate smaller is cheaper."""
    cost = run.get("price_per_hour", run["gpus"])
    return run["rate"], cost, run["replicas"], -run["goodput_share"]


def check(arguments: argparse.Namespace) -> None:
    """EngineFault('bad_setting') for what does not go together."""
    given = [name for name in ("trace", "log") if getattr(arguments, name)]
    if len(given) > 1:
        raise bad_setting("--trace and --log are two kinds of traffic: give one of them")
    if not given and not arguments.rate:
        raise bad_setting("which traffic? give --trace FILE, --log STEPLOG or --rate N")
    if arguments.workers < 0:
        raise bad_setting(f"--workers is 0 or more, not {arguments.workers}")
    if bool(arguments.gpu) != bool(arguments.model):
        raise bad_setting("--gpu and --model go together")
    if not (arguments.gpu or arguments.calibration or arguments.log):
        raise bad_setting(
            "how long does a step take? give --model and --gpu, --calibration FILE or --log STEPLOG"
        )
    if arguments.lora and not arguments.gpu:
        message = "--lora is for --gpu: calibrate an engine while it answers with adapters, and their price is"
        raise bad_setting(f"{message} in its steps")
    cluster_flags.check(arguments)
    if arguments.gpu and arguments.calibration:
        raise bad_setting(
            "--gpu and --calibration are two answers to one question: give one of them"
        )
    for name in ("cap", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise bad_setting(
                f"--{name.replace('_', '-')} is 1 or more, not {getattr(arguments, name)}"
            )
    for name in ("ttft_ms", "tpot_ms", "cv", "length_scale"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise bad_setting(f"--{name.replace('_', '-')} is more than 0, not {value}")
    for name in ("rate", "think", "turns", "num_prompts", "kv_file_gb"):
        if not 0 <= (getattr(arguments, name) or 0) < math.inf:
            raise bad_setting(
                f"--{name.replace('_', '-')} is 0 or more, not {getattr(arguments, name)}"
            )
    if not 0 < arguments.goodput <= 1:
        raise bad_setting(f"--goodput is a share, above 0 and at most 1, not {arguments.goodput}")


def rates(text: str) -> list[float]:
    """The numbers of --rate-scale."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise bad_setting(
            f"--rate-scale is a number, or several with commas, not {text!r}"
        ) from None
    if not all(0 < rate < float("inf") for rate in found):
        raise bad_setting(f"--rate-scale is more than 0, not {text}")
    return found


# -- what is shown -------------------------------------------------------------------------------------------


def render(runs: list[dict[str, Any]], notes: list[str], *, search: bool) -> str:
    """A row for each run, and what it rests on."""
    from pageturner.lab.reporting.summary import table

    head = (
        "policy",
        "order",
        "replicas",
        "rate x",
        "answered",
        "refused",
        "tokens/s",
        "goodput/s",
        "within",
        "TTFT p50",
        "p99 ms",
        "TPOT p50",
        "p99 ms",
        "gap p99",
        "e2e p50",
        "p99 s",
        "KV",
        "busy",
        "cached",
    )
    rows = [_row(run) for run in runs]
    lines = [table(rows, head), *(cluster_flags.in_words(run) for run in runs if "turnover" in run)]
    if not search:
        lines += [
            f"money: {run['replicas']:,} replicas{_money(run)}" for run in runs if _money(run)
        ]
    if search:
        several = runs[0]["rate"] != runs[-1]["rate"]
        for rate, group in itertools.groupby(runs, key=lambda run: run["rate"]):
            best = next(group)
            at = f" at rate x {rate:g}" if several else ""
            lines.append(
                f"cheapest{at}: {_in_gpus(best)} with policy {best['policy']}{_money(best)}"
            )
    return "\n".join([*lines, "", *(f"note: {note}" for note in notes)])


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


def _row(run: dict[str, Any]) -> list[object]:
    engines, ttft, tpot = run["engines"], run["ttft_ms"], run["tpot_ms"]
    return [
        run["policy"],
        run["order"],
        run["replicas"],
        f"{run['rate']:g}",
        run["requests"] - run["refused"],
        run["refused"],
        f"{run['output_tokens_per_s']:,.0f}",
        run["goodput_per_s"],
        f"{run['goodput_share']:.1%}",
        f"{ttft['p50']:,.0f}",
        f"{ttft['p99']:,.0f}",
        f"{tpot['p50']:.1f}",
        f"{tpot['p99']:.1f}",
        f"{run['longest_gap_ms']['p99']:,.0f}",
        run["e2e_s"]["p50"],
        run["e2e_s"]["p99"],
        f"{engines['kv_used']:.0%}",
        f"{engines['busy']:.0%}",
        f"{engines['cached_share']:.0%}",
    ]
