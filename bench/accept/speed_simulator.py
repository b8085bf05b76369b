"""The simulator beside the machine: one engine under loads not seen before, and two behind a router.

    python bench/accept/speed_simulator.py [--simulator-prompts N] [--simulator-only one two]

Owns the loads and what is set side by side. One engine is calibrated as by `calibrate --check`, a fit
before and behind each load. Two engines of one core each answer a trace behind a router and write step
logs; one log is the calibration (`calibrate --log`) by which another trace is simulated. Router, servers
and clients share the cores: what they take is in the logs as far as it holds up steps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
from harness import DATA, Line, NotRun, Server

from pageturner.config.settings import EngineConfig
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.simulation import calibration
from pageturner.lab.traffic.traffic_files import read_trace

ONE, TWO = 0.05, 0.10  # errors that are wanted at most: of one engine, of two
SIZES = (128, 64)  # mean tokens of prompt and answer
SEEN, UNSEEN = "azure2023_conv", "servegen_deepseek-r1_1h"
RATE = 2.0  # requests a second; lengths of the traces are a tenth
FIGURES = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulator-prompts", type=int, default=60, help="requests of a load")
    parser.add_argument("--simulator-rate", type=float, default=RATE)
    parser.add_argument(
        "--simulator-only", nargs="+", choices=("one", "two"), default=["one", "two"]
    )


def lines(options: argparse.Namespace) -> Iterator[Line]:
    if "one" in options.simulator_only:
        yield from _one(options.simulator_prompts)
    if "two" in options.simulator_only:
        yield from _two(options.simulator_prompts, options.simulator_rate)


def _one(count: int) -> Iterator[Line]:
    bench = EngineBench.load(EngineConfig(model="smollm2"))
    for check in calibration.calibrate(bench, (*SIZES, count), 1, check=True)[1]:
        told = f"{_errors(check.errors)}; without the machine's drift of {check.drift:.3f}:"
        told += f" {_errors(check.steady)}"
        worst = max(abs(check.errors[name]) for name in FIGURES)
        yield Line(f"simulated, one engine, {check.load}: within {ONE:.0%}", told, worst <= ONE)


def _errors(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {errors[name]:+.1%}" for name in ("throughput", *FIGURES))


# -- two engines ---------------------------------------------------------------------------------------------
def _two(count: int, rate: float) -> Iterator[Line]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise NotRun("two cores are needed, one for each engine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ExitStack() as stack:
            urls = [_server(stack, core, folder / f"steps{core}") for core in cores]
            door = stack.enter_context(harness.router(*urls))
            _measured(door, _load(SEEN, count, rate), folder)
            _done("calibrate", "--log", folder / f"steps{cores[0]}", "--output", folder / "cost")
            measured = _measured(door, _load(UNSEEN, count, rate), folder)
        words = ("--calibration", folder / "cost", "--replicas", "2", *_load(UNSEEN, count, rate))
        _done("simulate", *words, "--output", folder / "told")
        (told,) = json.loads((folder / "told").read_text())["runs"]
    pairs = {
        f"{what} {mark}": (told[key][mark], measured[key][mark])
        for what, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        for mark in ("mean", "p50", "p99")
    }
    errors = {name: said / was - 1 for name, (said, was) in pairs.items()}
    figure = ", ".join(
        f"{name} {said:,.1f} told, {was:,.1f} ms measured ({errors[name]:+.1%})"
        for name, (said, was) in pairs.items()
    )
    worst = max(map(abs, errors.values()))
    what = f"simulated, two engines behind a router, {UNSEEN} by a step log of {SEEN}: within {TWO:.0%}"
    yield Line(what, figure, worst <= TWO)


def _server(stack: ExitStack, core: int, log: Path) -> str:
    """A server on one core; a child has its parent's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        flags = ("--threads", "1", "--speculation", "off", "--step-log", str(log), "--developer")
        return stack.enter_context(harness.server(*flags)).url
    finally:
        os.sched_setaffinity(0, before)


def _load(trace: str, count: int, rate: float) -> tuple[str, ...]:
    path = DATA / "traces" / f"{trace}.jsonl.gz"
    if not path.is_file():
        raise NotRun(f"{path.name} is not there")
    scale = rate * (read_trace(path, count)[-1].arrival_s or 1.0) / count
    words = (
        f"--trace {path} --num-prompts {count} --rate-scale {scale:g} --length-scale 0.1 --cap 128"
    )
    return tuple(words.split())


def _measured(door: Server, load: tuple[str, ...], folder: Path) -> dict[str, Any]:
    output = folder / "measured"
    _done("bench", "serve", "--base-url", door.url, "--model", "smollm2", "--output", output, *load)
    return dict(json.loads(output.read_text()))


def _done(*words: str | Path) -> None:
    done = harness.ran(*harness.command(*map(str, words)))
    if done.returncode:
        raise RuntimeError(f"{words[0]}: {done.stderr.strip()[-300:]}")


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
