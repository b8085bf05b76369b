"""`make accept NAME=lab`: every line that policies, orders, lab and simulator must show.

    python bench/accept/lab.py [--only fidelity policies speed scale capacity]

Simulated time is exact; what is measured on the real engine wants an idle machine.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import harness
import lab_compare
from harness import DATA, Line, NotRun
from simulate import simulate

from pageturner.config.settings import EngineConfig
from pageturner.formats import hub
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.commands.calibrate import render
from pageturner.lab.simulation import calibration, log_replay, recorded_runs
from pageturner.lab.simulation.calibration import Check
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.traffic.traffic_generators import TokenPrompts, burst_times

LENGTHS = (128, 48, 24)  # mean tokens of prompt and answer, requests of a load
PAIRS = 5  # of a fit and a load behind it, for each load
BOUNDS = {
    "throughput": 0.08,
    "TTFT p50": 0.12,
    "TTFT p99": 0.25,
    "TPOT p50": 0.12,
    "TPOT p99": 0.25,
}
RATES = (15, 30, 60)  # requests a second, all of 10,000 replicas
PLACEMENTS = ("prefix_aware", "round_robin")
TRACE_REQUESTS = 2000  # of the Mooncake trace in the search for the fewest replicas


def fidelity() -> Iterator[Line]:
    """Five loads on the real engine, five times in turn: the same plans, fed the measured step times; then
    times by a fit of what was run just before and just behind each of them."""
    bench = EngineBench.load(EngineConfig(model=str(hub.resolve("smollm2").path)))
    prompt, output, count = LENGTHS
    prompts = TokenPrompts(prompt, output, bench.built.vocab_size)
    probe = bench.measure(prompts.at(burst_times(count, 0.0, 1), 1, name="warming up"))
    capacity = recorded_runs.request_metrics(probe).figures(LatencyTargets())["requests_per_s"]
    checks = defaultdict[str, list[Check]](list)
    compared: Counter[str] = Counter()
    differences = defaultdict[str, list[str]](list)
    seeds = itertools.count(200)

    def train() -> RecordedRun:
        context = bench.built.max_model_len
        return bench.measure(calibration.training(capacity, prompts, count, next(seeds), context))

    before = train()
    for number in range(PAIRS):
        for load in calibration.check_loads(capacity, prompts, count, 100 + number):
            run = bench.measure(load)
            behind = train()
            same = log_replay.replay_plans(run)
            compared[load.name] += same.compared
            differences[load.name] += same.differences
            cost, before = calibration.fit_runs(before, behind), behind
            checks[load.name].append(calibration.checked(run, cost, load.name))
        print(render(cost, [each[-1] for each in checks.values()]), flush=True)
    for name, plans in compared.items():
        figure = "; ".join(
            [f"{plans} plans, {len(differences[name])} differ", *differences[name][:1]]
        )
        what = f"{name}: the simulator's plans equal the engine's, fed the measured step times"
        yield Line(what, figure, plans > 0 and not differences[name])
    for figure, bound in BOUNDS.items():
        yield _within(figure, bound, checks)
    yield from _drift([check for each in checks.values() for check in each])


def _within(figure: str, bound: float, checks: dict[str, list[Check]]) -> Line:
    """The median of the pairs of each load."""
    middles = {
        load: statistics.median(one.errors[figure] for one in each) for load, each in checks.items()
    }
    told = ", ".join(f"{load} {middle:+.1%}" for load, middle in middles.items())
    worst = max(abs(one.errors[figure]) for each in checks.values() for one in each)
    what = f"calibrated, unseen loads: {figure} within {bound:.0%} (median of {PAIRS} pairs of each load)"
    passed = all(abs(middle) <= bound for middle in middles.values())
    return Line(what, f"{told}; the worst single pair {worst:.1%}", passed)


def _drift(checks: list[Check]) -> Iterator[Line]:
    """How much of the errors is the machine's."""
    drift = sorted(check.drift for check in checks)
    figure = f"{drift[0]:.2f} to {drift[-1]:.2f}, median {statistics.median(drift):.2f}"
    yield Line("drift of the machine between a fit and its load", figure, None)
    told = (
        f"{name} {statistics.median(abs(c.steady[name]) for c in checks):.1%}" for name in BOUNDS
    )
    yield Line("medians of all errors with this drift taken out", ", ".join(told), None)


def _trace(name: str) -> Path:
    path = DATA / "traces" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    return path


def speed() -> Iterator[Line]:
    """The conversation trace on 100 replicas."""
    found = simulate(f"--trace {_trace('azure2023_conv')} --replicas 100")
    run, seconds, most = found.run, found.processors, found.peak_mb
    pace = run["requests"] / seconds * 60
    figure = (
        f"{pace:,.0f} ({run['requests']:,} in {seconds:.1f} s of one core, start and reading included;"
        f" {most:,.0f} MB)"
    )
    yield Line(
        "azure2023_conv, 100 replicas: at least 40,000 requests a minute", figure, pace >= 40_000
    )


def scale() -> Iterator[Line]:
    """10,000 replicas for ten simulated minutes, at three loads."""
    found = []
    for rate in RATES:
        flags = f"--rate {rate} --num-prompts {600 * rate} --replicas 10000 --block-size 256"
        one = simulate(flags)
        found.append((one.run["requests"], one.processors, one.peak_mb))
    figure = "; ".join(
        f"{count:,} requests {seconds:.1f} s, {most:,.0f} MB" for count, seconds, most in found
    )
    grows = all(
        later[1] <= first[1] * later[0] / first[0] * 1.1
        for first, later in itertools.pairwise(found)
    )
    yield Line(
        "10,000 replicas for ten simulated minutes: time at most linear in requests", figure, grows
    )
    memory, requests = (found[-1][i] / found[0][i] for i in (2, 0))
    figure = f"{memory:.2f}x for {requests:.0f}x the requests"
    yield Line("10,000 replicas: memory at most linear in requests", figure, memory <= requests)


def capacity() -> Iterator[Line]:
    """The Mooncake conversation trace on 100 replicas, and how many are enough."""
    trace = _trace("mooncake_conversation")  # whose blocks are of 512 tokens
    targets = f"--trace {trace} --ttft-ms 5000 --tpot-ms 50 --max-model-len 131072 --block-size 64"
    shares, told = {}, []
    for placement in PLACEMENTS:
        found = simulate(f"{targets} --replicas 100 --placement {placement}")
        run, seconds = found.run, found.processors
        share = shares[placement] = run["engines"]["cached_share"]
        first = run["ttft_ms"]
        told.append(
            f"{placement}: {share:.1%} of prompt tokens cached, TTFT p50 {first['p50']:,.0f} ms, p99"
            f" {first['p99']:,.0f} ms, {run['goodput_share']:.1%} within the targets, {seconds:.0f} s"
        )
    better = shares["prefix_aware"] > shares["round_robin"]
    yield Line("Mooncake conversation, 100 replicas of 8B on H100", "; ".join(told), better)
    replicas, told = [], []
    for placement in PLACEMENTS:
        flags = f"--search --goodput 0.9 --placement {placement} --num-prompts {TRACE_REQUESTS}"
        found = simulate(f"{targets} {flags}")
        run, seconds = found.run, found.processors
        replicas.append(run["replicas"])
        told.append(
            f"{placement} {run['replicas']}, {run['goodput_share']:.1%} within the targets ({seconds:.0f} s)"
        )
    what = f"its first {TRACE_REQUESTS:,} requests: replicas for 90 % within 5 s and 50 ms"
    yield Line(what, "; ".join(told), replicas[0] <= replicas[1])


if __name__ == "__main__":
    checks = {
        "fidelity": fidelity,
        "policies": lab_compare.policies,
        "speed": speed,
        "scale": scale,
        "capacity": capacity,
    }
    sys.exit(harness.run("lab", checks))
