"""`make accept NAME=lab`: every line that policies, orders, lab and simulator must show.

    python bench/accept/lab.py [--only fidelity speed scale capacity rules]

Simulated time is exact; what is measured on the real engine wants an idle machine.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from harness import DATA, ROOT, Line, NotRun

from pageturner.config import EngineConfig
from pageturner.files import hub
from pageturner.lab import calibrate, history, replay
from pageturner.lab.outcome import Targets

LENGTHS = (256, 96, 32)  # mean tokens of prompt and answer, requests of a load
BOUNDS = {"throughput": 0.08, "TTFT p50": 0.12, "TTFT p99": 0.25, "TPOT p50": 0.12, "TPOT p99": 0.25}
EIGHT_BILLION = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip  # Llama 3.1 8B, by its published config.json


def fidelity() -> Iterator[Line]:
    """Five loads on the real engine: the same plans, fed the measured step times; then times by a fit that
    was made just before each of them."""
    bench = calibrate.Bench(EngineConfig(model=str(hub.resolve("smollm2").path)))
    prompt, output, count = LENGTHS
    probe = bench.run(calibrate.poisson("warming up", count // 2, 0.0, prompt, output, 1))
    capacity = history.outcomes(probe).figures(Targets())["requests_per_s"]
    checks = []
    for number, load in enumerate(calibrate.loads(capacity, prompt, output, count, 100)):
        fitted = bench.run(calibrate.training(capacity, prompt, output, count, 2 + number))
        run = bench.run(load)
        same = replay.plans(run)
        figure = f"{same.compared} plans, {len(same.differences)} differ"
        what = f"{load.name}: the simulator's plans equal the engine's, fed the measured step times"
        yield Line(what, figure, same.compared > 0 and not same.differences)
        checks.append(calibrate.checked(run, calibrate.fit_run(fitted), load.name))
    for name, bound in BOUNDS.items():
        errors = [check.errors[name] for check in checks]
        middle = statistics.median(map(abs, errors))
        told = ", ".join(f"{check.load} {check.errors[name]:+.1%}" for check in checks)
        yield Line(
            f"calibrated on unseen loads: {name} within {bound:.0%}",
            f"{middle:.1%} ({told})",
            middle <= bound,
        )
    drift = [check.drift for check in checks]
    yield Line(
        "drift of the machine between a fit and its load", f"{min(drift):.2f} to {max(drift):.2f}", None
    )


def _trace(name: str) -> Path:
    path = DATA / "traces" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    return path


def _simulate(*flags: str) -> tuple[dict[str, Any], float, float]:
    """What the command says of the last of its runs; seconds and MB that it took."""
    with tempfile.TemporaryDirectory() as folder:
        model, output = Path(folder) / "config.json", Path(folder) / "result.json"
        model.write_text(json.dumps(EIGHT_BILLION))
        command = [sys.executable, "-m", "pageturner.cli", "simulate", "--model", str(model), "--gpu", "H100",
                   "--output", str(output), *flags]  # fmt: skip
        begin = time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
        runs = json.loads(output.read_text())["runs"]
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return runs[-1], seconds, most


def speed() -> Iterator[Line]:
    """The conversation trace on 100 replicas."""
    run, seconds, most = _simulate("--trace", str(_trace("azure2023_conv")), "--replicas", "100")
    pace = run["requests"] / seconds * 60
    figure = (
        f"{pace:,.0f} ({run['requests']:,} in {seconds:.1f} s, start and reading included; {most:,.0f} MB)"
    )
    yield Line("azure2023_conv, 100 replicas: at least 40,000 requests a minute", figure, pace >= 40_000)


def scale() -> Iterator[Line]:
    """10,000 replicas for ten simulated minutes, at two loads."""
    found = []
    for rate in (25, 50):
        flags = (
            "--rate",
            str(rate),
            "--num-prompts",
            str(600 * rate),
            "--replicas",
            "10000",
            "--block-size",
            "256",
        )
        run, seconds, most = _simulate(*flags)
        found.append((run["requests"], seconds, most))
    (few, first, _), (many, second, most) = found
    figure = f"{few:,} requests {first:.1f} s, {many:,} {second:.1f} s; {most:,.0f} MB"
    what = "10,000 replicas for ten simulated minutes finish; time at most linear in requests"
    yield Line(what, figure, second <= first * many / few * 1.1)


def capacity() -> Iterator[Line]:
    """The Mooncake conversation trace on 100 replicas, and how many are enough."""
    trace = str(_trace("mooncake_conversation"))
    targets = ("--trace", trace, "--ttft-ms", "5000", "--tpot-ms", "50", "--max-model-len", "131072")
    shares, told = {}, []
    for placement in ("prefix_aware", "round_robin"):
        run, seconds, _ = _simulate(*targets, "--replicas", "100", "--placement", placement)
        share = shares[placement] = run["engines"]["cached_share"]
        first = run["ttft_ms"]
        told.append(
            f"{placement}: {share:.1%} of prompt tokens cached, TTFT p50 {first['p50']:,.0f} ms, p99"
            f" {first['p99']:,.0f} ms, {run['goodput_share']:.1%} within the targets, {seconds:.0f} s"
        )
    better = shares["prefix_aware"] > shares["round_robin"]
    yield Line("Mooncake conversation, 100 replicas of 8B on H100", "; ".join(told), better)
    for placement in ("prefix_aware", "round_robin"):
        flags = (*targets, "--search", "--goodput", "0.9", "--placement", placement, "--num-prompts", "3000")
        run, _, _ = _simulate(*flags)
        figure = f"{run['replicas']} replicas, {run['goodput_share']:.1%} within the targets"
        yield Line(
            f"its first 3,000 requests, {placement}: replicas for 90 % within 5 s and 50 ms", figure, None
        )


def rules() -> Iterator[Line]:
    """What is proved by tests."""
    tests = {
        "ageing bounds, promises of each policy and order, predictor, liar": ("tests/core",),
        "steps at once equal steps one by one, 1,000 runs; replays; costs": ("tests/lab",),
        "every policy and order changes no answer": ("tests/e2e/test_invariance.py",),
        "commands of the lab, bad input": ("tests/commands",),
    }
    for what, files in tests.items():
        yield harness.pytest_line(what, *files, "-m", "(slow or not slow) and not model")


if __name__ == "__main__":
    checks = {
        "fidelity": fidelity, "speed": speed, "scale": scale, "capacity": capacity, "rules": rules,
    }  # fmt: skip
    sys.exit(harness.run("lab", checks))
