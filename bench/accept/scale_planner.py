"""The planner against reality: two engines of one core each behind a router, and what the simulator says.

Owns the order of things: two calibrations at once, one a core, since engines share the memory's bandwidth; a
load from a trace at the highest rate that the simulator thinks in time; the same load through
`pageturner route`, simulated again, and once more from a calibration behind it. What the servers, the router
and the load client take beside the engines is in the measured figures only. `--planner-model` and
`--planner-prompts` make it smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import DATA, ROOT, Line, NotRun  # noqa: E402

TRACE = DATA / "traces" / "azure2023_conv.jsonl.gz"
RATES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # of the trace's
TARGETS = {"ttft": 4000, "tpot": 400}  # milliseconds
IN_TIME = 0.95  # of the requests, by the simulator: at more nobody would run such a fleet
BOUNDS = {"goodput": 0.08, "TTFT p50": 0.15, "TTFT p99": 0.30}
LIMIT = 1800.0  # seconds of one command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--planner-model", default="smollm2")
    parser.add_argument("--planner-prompts", type=int, default=120, help="requests of the load")
    parser.add_argument(
        "--planner-rate", type=float, default=0.0, help="of the trace's; 0: what is in time"
    )


def start(log: Path, core: int | None, words: str) -> subprocess.Popen[bytes]:
    """`pageturner WORDS`, on one core or on all. words: without spaces in them; log: what it says."""
    cores = os.sched_getaffinity(0) if core is None else {core}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # a child has its parent's
    try:
        command = [sys.executable, "-m", "pageturner", *words.split()]
        with log.open("wb") as said:
            return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said)
    finally:
        os.sched_setaffinity(0, before)


def done(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a command. RuntimeError with its last line where it fails."""
    try:
        process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        harness.end(process)
        raise
    if process.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"{log.name}: status {process.returncode}: {' '.join(last)}")


def calibrated(model: str, cores: Sequence[int], where: Path) -> Path:
    """The calibration of an engine on the first core, while the other cores calibrate too."""
    files = [where / f"calibration{core}.json" for core in cores]
    logs = [where / f"calibrate{core}" for core in cores]
    words = (
        f"calibrate {model} --threads 1 --num-prompts 48 --input-len 100 --output-len 24 --output"
    )
    running = [
        start(log, core, f"{words} {file}")
        for log, core, file in zip(logs, cores, files, strict=True)
    ]
    for process, log in zip(running, logs, strict=True):
        done(process, log)
    return files[0]


def load_flags(prompts: int, *rates: float) -> str:
    scales = ",".join(f"{rate:g}" for rate in rates)
    return f"--trace {TRACE} --num-prompts {prompts} --rate-scale {scales} --length-scale 0.1 --cap 128"


def simulated(calibration: Path, load: str, engines: str = "--replicas 2") -> list[dict[str, Any]]:
    """What the simulator says of this load, at each of its rates, on these engines."""
    output = calibration.with_name("simulated.json")
    targets = f"--ttft-ms {TARGETS['ttft']} --tpot-ms {TARGETS['tpot']}"
    words = f"simulate --calibration {calibration} {engines} --output {output} {targets} {load}"
    log = calibration.with_name("simulate")
    done(start(log, None, words), log)
    found: list[dict[str, Any]] = json.loads(output.read_text())["runs"]
    return found


def measured(
    model: str,
    cores: Sequence[int],
    load: str,
    where: Path,
    engines: Sequence[str] = ("", ""),
) -> dict[str, Any]:
    """The load through a router before two servers. engines: further flags of each."""
    output, ports = where / "measured.json", [harness.free_port() for _ in range(3)]
    *servers, door = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        for core, port, url, flags in zip(cores, ports, servers, engines, strict=False):
            words = (
                f"serve {model} --port {port} --threads 1 --served-model-name m --developer {flags}"
            )
            process = start(where / f"serve{core}", core, words)
            stack.callback(harness.end, process)
            harness.wait_ready(url, process, 300)
        process = start(where / "route", None, f"route {' '.join(servers)} --port {ports[-1]}")
        stack.callback(harness.end, process)
        harness.wait_ready(door, process, 60)
        goodput = " ".join(f"{name}:{most}" for name, most in TARGETS.items())
        words = (
            f"bench serve --base-url {door} --model m --output {output} --goodput {goodput} {load}"
        )
        log = where / "bench"
        done(start(log, None, words), log)
    return dict(json.loads(output.read_text()))


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """What was measured beside what was said, and each of the three bounds."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise NotRun("two cores are needed, one for each engine")
    if not TRACE.exists():
        raise NotRun(f"{TRACE.name} is not there")
    model, prompts, rate = (
        arguments.planner_model,
        arguments.planner_prompts,
        arguments.planner_rate,
    )
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        calibration = calibrated(model, cores, where)
        if not rate:
            runs = zip(RATES, simulated(calibration, load_flags(prompts, *RATES)), strict=True)
            rate = max(
                (one for one, run in runs if run["goodput_share"] >= IN_TIME), default=RATES[0]
            )
        before = os.getloadavg()[0]
        load = load_flags(prompts, rate)
        found = measured(model, cores, load, where)
        (told,) = simulated(calibration, load)
        (later,) = simulated(calibrated(model, cores, where), load)
    what = f"planner against reality: {prompts} requests of {TRACE.name}, rate x {rate:g}"
    figure = (
        f"measured TTFT p50 {found['ttft_ms']['p50']:,.0f} p99 {found['ttft_ms']['p99']:,.0f} ms, TPOT p50"
        f" {found['tpot_ms']['p50']:.0f} ms, {found['goodput']['share']:.1%} in time; simulated TTFT p50"
        f" {told['ttft_ms']['p50']:,.0f} p99 {told['ttft_ms']['p99']:,.0f} ms, TPOT p50"
        f" {told['tpot_ms']['p50']:.0f} ms, {told['goodput_share']:.1%}; load average before it {before:.1f}"
    )
    yield Line(what, figure, found["failed"] == 0)
    drift = (
        f"TTFT p50 {later['ttft_ms']['p50']:,.0f} p99 {later['ttft_ms']['p99']:,.0f} ms, TPOT p50"
        f" {later['tpot_ms']['p50']:.0f} ms, {later['goodput_share']:.1%}"
    )
    yield Line(
        "simulated from a calibration behind the load: how far the machine itself drifted",
        drift,
        None,
    )
    pairs = {
        "goodput": (told["goodput_per_s"], found["goodput"]["requests_per_s"]),
        "TTFT p50": (told["ttft_ms"]["p50"], found["ttft_ms"]["p50"]),
        "TTFT p99": (told["ttft_ms"]["p99"], found["ttft_ms"]["p99"]),
    }
    for name, (said, was) in pairs.items():
        off = said / was - 1 if was else float("inf")
        figure = f"{said:,.2f} simulated, {was:,.2f} measured: {off:+.1%}"
        yield Line(
            f"planner against reality: {name} within {BOUNDS[name]:.0%}",
            figure,
            abs(off) <= BOUNDS[name],
        )
