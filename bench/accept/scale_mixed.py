"""Prefill elsewhere beside chunked prefill on both engines: the time between tokens, measured and simulated.

Owns the order of things: two engines of one core each, calibrated at once; mixed traffic, short and long
prompts of a trace, at the highest rate that the simulator thinks in time both ways; each way through a router
in turns. What the simulator says is wanted beforehand: which of the two has the shorter times between tokens.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line, NotRun  # noqa: E402
from scale_planner import IN_TIME, RATES, TRACE, calibrated, measured, simulated  # noqa: E402

KEY = "PAGETURNER_PREFILL_KEY"
LEAST = "256"  # tokens of prompts that are computed elsewhere
CHUNKED, APART = "chunked on both", "prompts elsewhere"
LINK = "--kv-link-gb-s 1 --kv-link-ms 2"  # of loopback, where both ends copy
CLUSTERS = {
    CHUNKED: "--replicas 2",
    APART: f"--roles prefill=1,decode=1 --prefill-tokens {LEAST} {LINK}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--mixed-model", default="smollm2")
    parser.add_argument("--mixed-prompts", type=int, default=60, help="requests of a run")
    parser.add_argument(
        "--mixed-rate", type=float, default=0.0, help="of the trace's; 0: what is in time"
    )
    parser.add_argument("--mixed-rounds", type=int, default=2, help="runs of each")


def load_flags(prompts: int, *rates: float) -> str:
    scales = ",".join(f"{rate:g}" for rate in rates)
    return f"--trace {TRACE} --num-prompts {prompts} --rate-scale {scales} --length-scale 0.25 --cap 64"


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Both ways, and whether the simulator knew."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise NotRun("two cores are needed, one for each engine")
    if not TRACE.exists():
        raise NotRun(f"{TRACE.name} is not there")
    model, prompts, rate = arguments.mixed_model, arguments.mixed_prompts, arguments.mixed_rate
    os.environ[KEY] = secrets.token_hex(16)
    listen = f"127.0.0.1:{harness.free_port()}"
    engines = {
        CHUNKED: ("", ""),
        APART: (
            f"--role prefill --prefill-listen {listen}",
            f"--role decode --prefill-from {listen} --prefill-tokens {LEAST}",
        ),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CLUSTERS}
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        calibration = calibrated(model, cores, where)
        if not rate:
            tried = [
                simulated(calibration, load_flags(prompts, *RATES), flags)
                for flags in CLUSTERS.values()
            ]
            shares = [
                min(run["goodput_share"] for run in runs) for runs in zip(*tried, strict=True)
            ]
            in_time = [one for one, share in zip(RATES, shares, strict=True) if share >= IN_TIME]
            rate = max(in_time, default=RATES[0])
        load = load_flags(prompts, rate)
        told = {name: simulated(calibration, load, flags)[0] for name, flags in CLUSTERS.items()}
        for _ in range(arguments.mixed_rounds):
            for name, flags in engines.items():
                found[name].append(measured(model, cores, load, where, flags))
    times: dict[str, float] = {}
    for name, runs in found.items():
        said = told[name]
        p50, p99, gap, first = (
            harness.median([run[what][share] for run in runs])
            for what, share in (
                ("tpot_ms", "p50"),
                ("tpot_ms", "p99"),
                ("itl_ms", "p99"),
                ("ttft_ms", "p50"),
            )
        )
        times[name] = p99
        each = ", ".join(f"{run['tpot_ms']['p99']:.0f}" for run in runs)
        figure = (
            f"measured TPOT p50 {p50:.0f} p99 {p99:.0f} ms ({each}), gap p99 {gap:.0f} ms, TTFT"
            f" p50 {first:,.0f} ms; simulated TPOT p50 {said['tpot_ms']['p50']:.0f} p99"
            f" {said['tpot_ms']['p99']:.0f} ms, TTFT p50 {said['ttft_ms']['p50']:,.0f} ms"
        )
        whole = all(run["failed"] == 0 for run in runs)
        yield Line(f"mixed traffic, {prompts} requests, rate x {rate:g}: {name}", figure, whole)
    said, was = (
        one[APART] / one[CHUNKED]
        for one in ({name: run["tpot_ms"]["p99"] for name, run in told.items()}, times)
    )
    figure = f"{said:.2f} of chunked's simulated, {was:.2f} measured"
    yield Line(
        "TPOT p99 with prompts elsewhere: the simulator knew which is better",
        figure,
        (said < 1) == (was < 1),
    )
