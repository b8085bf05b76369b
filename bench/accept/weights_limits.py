"""Steps by the machine: what token budgets cost and bring, and what the default becomes by the kept limits.

Owns the rounds. mixed64 is answered by one loaded model with each budget in turn, so that what else runs on
the machine meets all of them alike; ratios are of one round. With --limits-threads 1 everything is timed by
processor time: other processes do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from harness import DATA, Line, NotRun, median

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, engine_again, make_engine
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.lab.traffic.traffic import OpenLoop, encoded
from pageturner.lab.traffic.traffic_files import read_workload
from pageturner.request import Request

BUDGETS = (64, 128, 256, 512)
KEPT = (
    0.97  # of the tokens a second that a budget of 512 has: no loss but what measuring cannot tell
)
GAP = 0.112  # seconds, 99th percentile: OpenVINO GenAI's on the machine on which 512 tokens made 213 ms


@dataclass(frozen=True, slots=True)
class Run:
    """Of one round: output tokens a second, gaps between the tokens of one answer (99th percentile and the
    longest) in seconds, and seconds of processors."""

    pace: float
    gap: float
    longest: float
    processors: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--limits-rounds", type=int, default=2)
    parser.add_argument(
        "--limits-threads", type=int, default=0, help="1: by processor time; 0: all cores"
    )
    parser.add_argument("--limits-budgets", type=int, nargs="+", default=BUDGETS, metavar="TOKENS")
    parser.add_argument("--limits-only", nargs="*", choices=("budgets", "start"))


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """What the default becomes and what it brings; that no answer depends on it."""
    wanted = arguments.limits_only or ("budgets", "start")
    if "budgets" in wanted:
        yield from _budgets(arguments)
    if "start" in wanted:
        yield from _start()


def _budgets(arguments: argparse.Namespace) -> Iterator[Line]:
    path = DATA / "workloads" / "mixed64.jsonl"
    if not path.is_file():
        raise NotRun(f"{path} is not here")
    config = EngineConfig(
        model="smollm2", threads=arguments.limits_threads, enable_prefix_caching=False
    )
    built = make_engine(config)
    chosen, known = built.engine.stack.config.token_budget, "kept" if built.limits else "glanced at"
    requests = _requests(path)
    clock = time.process_time if arguments.limits_threads == 1 else time.perf_counter
    budgets = tuple(dict.fromkeys((*arguments.limits_budgets, chosen, 512)))
    rounds: list[dict[int, Run]] = []
    for number in range(arguments.limits_rounds):
        order = budgets if number % 2 == 0 else budgets[::-1]
        rounds.append({n: _answered(built, config, n, requests, clock) for n in order})
    for budget in sorted(budgets):
        runs, bases = [one[budget] for one in rounds], [one[512] for one in rounds]
        pace = median([run.pace / base.pace for run, base in zip(runs, bases, strict=True)])
        work = median(
            [run.processors / base.processors for run, base in zip(runs, bases, strict=True)]
        )
        gap = median([run.gap for run in runs])
        figure = (
            f"{median([run.pace for run in runs]):.0f} output tok/s, {pace:.2f}x of 512's pace,"
            f" {work:.2f}x its processor time; gap p99 {1e3 * gap:.0f} ms"
            f" ({' '.join(f'{1e3 * run.gap:.0f}' for run in runs)}), longest"
            f" {1e3 * median([run.longest for run in runs]):.0f}"
        )
        if budget != chosen:
            yield Line(f"mixed64, {budget} tokens a step", figure, None)
            continue
        yield Line(
            f"mixed64, {budget} tokens a step: the default by limits that were {known}, at least {KEPT:.2f}x",
            figure,
            pace >= KEPT,
        )
        what = f"its gap, p99 at most {1e3 * GAP:.0f} ms (a peer's on another machine)"
        yield Line(what, f"{1e3 * gap:.0f} ms", gap <= GAP)


def _requests(path: Path) -> list[Request]:
    tokenizer = load_tokenizer(hub.resolve("smollm2").path)
    known = encoded(
        read_workload(path),
        lambda text: tokenizer.encode(text, add_special=True, parse_special=False),
    )
    return OpenLoop([replace(one, output=None, arrival=0.0) for one in known]).engine_requests()


def _answered(
    built: LoadedEngine,
    config: EngineConfig,
    budget: int,
    requests: list[Request],
    clock: Callable[[], float],
) -> Run:
    """All requests at once, as 64 clients send them."""
    engine = engine_again(built, replace(config, max_num_batched_tokens=budget))
    for request in requests:
        engine.submit(request)
    last: dict[int, float] = {}
    gaps, tokens = list[float](), 0
    processors, begin = time.process_time(), clock()
    while engine.scheduler.has_work:
        events = engine.step()
        now = clock()
        for event in events:
            tokens += len(event.tokens)
            if event.tokens and event.id in last:
                gaps.append(now - last[event.id])
            if event.tokens:
                last[event.id] = now
    took = clock() - begin
    return Run(
        tokens / took,
        statistics.quantiles(gaps, n=100)[98],
        max(gaps),
        time.process_time() - processors,
    )


def _start() -> Iterator[Line]:
    """A glance is a part of the start; without one a start takes what it took."""
    from pageturner.kernels import peak
    from pageturner.kernels.cpu import native_module

    isas = native_module.available_isas()
    if not isas:
        raise NotRun("there are no native kernels here")
    peak.quick_peak.cache_clear()
    begin = time.perf_counter()
    integer, floats = peak.quick_peak(isas[0], 2)
    took = time.perf_counter() - begin
    kept = peak.measure(isas[0], 2, 1.0)
    if integer is None or floats is None or kept.integer_gop_s is None or kept.fp32_gop_s is None:
        raise NotRun(f"{isas[0]} has no loops of its own")
    what = "a glance at a machine without kept limits takes at most 0.1 s"
    yield Line(what, f"{took:.3f} s", took <= 0.1)
    figure = f"{integer / kept.integer_gop_s:.2f} of int8, {floats / kept.fp32_gop_s:.2f} of fp32"
    yield Line("what it finds beside what is measured in a second", figure, None)
