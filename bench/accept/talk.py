"""`make accept NAME=talk`: talk to SmolLM2, end to end, as figures.

fresh   a clean clone: make serve, the README's curl, the size, make test
right   against Transformers' fp32 answers; the path as shipped against fp32
alive   memory over 2,000 requests, gaps under load
ready   start-up and import
speed   time outside native calls
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import answers
import harness
from harness import ROOT, Line, Server, median

sys.path.insert(0, str(ROOT / "bench"))
from pageturner.formats import hub
from pageturner.lab.bench import bench_engine, bench_serve
from pageturner.lab.bench.client import Client
from pageturner.lab.traffic.traffic_generators import word_prompts
from pageturner.progress import Progress

SPEED = SimpleNamespace(
    model="smollm2",
    workload=None,
    num_prompts=64,
    input_len=100,
    output_len=100,
    threads=0,
    policy="chunked",
    backend="auto",
    dtype="auto",
    max_num_seqs=64,
    output=None,
)
GOLDENS = ROOT / "tests" / "goldens"


# -- fresh ---------------------------------------------------------------------------------------------------


def fresh() -> Iterator[Line]:
    """Two commands on a clean clone, nothing else; then the README's curl."""
    with tempfile.TemporaryDirectory(prefix="pageturner-fresh-") as folder:
        clone = Path(folder) / "pageturner"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        shared = ROOT.parent / "shared"
        if shared.exists():  # tests may read it beside the checkout
            (Path(folder) / "shared").symlink_to(shared)
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        yield from _fresh_serve(clone, environment)
        begin = time.monotonic()
        done = subprocess.run(
            ["make", "test"], cwd=clone, env=environment, capture_output=True, text=True
        )
        closing = done.stdout.strip().splitlines()[-1]
        seconds = time.monotonic() - begin
        yield Line(
            "fresh clone: make test",
            f"{closing.strip('= ')}; {seconds:.0f} s",
            done.returncode == 0,
        )


def _fresh_serve(clone: Path, environment: dict[str, str]) -> Iterator[Line]:
    port = harness.free_port()
    begin = time.monotonic()
    command = ["make", "serve", f"ARGS=--port {port}"]
    process = subprocess.Popen(
        command,
        cwd=clone,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        harness.wait_ready(f"http://127.0.0.1:{port}", process, 900)
        seconds = time.monotonic() - begin
        curl = re.search(r"^curl .*?(?=^```)", (clone / "README.md").read_text(), re.M | re.S)
        if curl is None:
            yield Line("fresh clone: the README's curl", "the README has no curl command", False)
            return
        shell = curl.group().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        answer = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
        chunks = answer.stdout.count("data: ")
        streamed = chunks > 3 and answer.stdout.rstrip().endswith("data: [DONE]")
        yield Line(
            "fresh clone: make serve",
            f"serving after {seconds:.0f} s; curl: {chunks} events",
            streamed,
        )
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
    size = sum(
        f.stat().st_size for f in (clone / ".venv").rglob("*") if f.is_file() and not f.is_symlink()
    )
    pip = sum(
        f.stat().st_size
        for name in ("pip", "setuptools")
        for f in (clone / ".venv").glob(f"lib/python3*/site-packages/{name}/**/*")
        if f.is_file()
    )
    megabytes = (size - pip) / 1e6
    yield Line(
        "installed size without model < 150 MB",
        f"{megabytes:.0f} MB (+ pip {pip / 1e6:.0f})",
        megabytes < 150,
    )


# -- right ---------------------------------------------------------------------------------------------------


def right() -> Iterator[Line]:
    """Against recorded answers of Transformers in fp32 (tests/tools/record_smollm2.py)."""
    yield answers.greedy("smollm2", answers.GOLDENS / "smollm2_greedy.npz", 3)
    yield from answers.served(hub.resolve("smollm2").path, 20_480)


# -- alive ---------------------------------------------------------------------------------------------------


def alive() -> Iterator[Line]:
    """Memory and gaps under load. KV memory is touched as it is first used, so a small pool is used."""
    with harness.server("--kv-cache-memory", "256M") as server:
        yield from _alive_memory(server)


def _alive_memory(server: Server) -> Iterator[Line]:
    client = Client(server.url, "smollm2")

    def load(count: int, seed: int) -> list:
        jobs = word_prompts(count, 24, 12, seed=seed)
        with Progress("requests", count) as line:
            return asyncio.run(bench_serve.closed_loop(client, jobs, 64, line))

    load(500, 1)
    before = server.rss_mb()
    traces = load(2000, 2)
    growth = server.rss_mb() - before
    failed = sum(trace.error is not None for trace in traces)
    figure = f"{growth:+.1f} MB from {before:.0f} MB, {failed} failed"
    yield Line("RSS grows < 20 MB over 2,000 requests", figure, growth < 20 and failed == 0)
    heavy = word_prompts(128, 100, 60, seed=4)
    with Progress("requests", len(heavy)) as line:
        traces = asyncio.run(bench_serve.closed_loop(client, heavy, 64, line))
    figures = bench_serve.summarise(traces, 1.0)
    itl = figures["itl_ms"]
    yield Line(
        "ITL under load, 64 clients", f"p50 {itl['p50']:.0f} ms, p99 {itl['p99']:.0f} ms", None
    )


# -- ready ---------------------------------------------------------------------------------------------------


def ready() -> Iterator[Line]:
    seconds = [_first_token() for _ in range(11)]
    figure = f"median {median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}"
    yield Line(
        "process start to first streamed token <= 1.8 s, median of 11",
        figure,
        median(seconds) <= 1.8,
    )
    code = "import time; a = time.perf_counter(); import pageturner; print(time.perf_counter() - a)"
    imports = [
        1e3 * float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(11)
    ]
    yield Line(
        "import pageturner < 50 ms", f"median {median(imports):.1f} ms", median(imports) < 50
    )


def _first_token() -> float:
    """Seconds from the start of the process to the first streamed token."""
    port = harness.free_port()
    command = [sys.executable, "-m", "pageturner", "serve", "smollm2", "--port", str(port)]
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 2, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while time.monotonic() < begin + 60:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    answer.readline()
                    return time.monotonic() - begin
            except OSError:  # nobody listens yet, or 503: no engine yet
                time.sleep(0.005)
        raise TimeoutError("no token within a minute")
    finally:
        harness.end(process)


# -- speed ---------------------------------------------------------------------------------------------------


def speed() -> Iterator[Line]:
    """Time outside native calls; the loads beside peers are in `NAME=kernels`."""
    figures = bench_engine.run(SPEED)  # type: ignore[arg-type]
    outside = figures["outside_ms_fullest"]
    running = figures["most_running"]
    figure = f"p50 {outside['p50']:.2f} ms, p99 {outside['p99']:.2f} ms at {running:.0f} running"
    what = "time outside native calls <= 2 ms a step with 64 running"
    yield Line(what, figure, outside["p50"] <= 2 and running == 64)


CHECKS = {"ready": ready, "right": right, "alive": alive, "speed": speed, "fresh": fresh}

if __name__ == "__main__":
    assert shutil.which("git")
    sys.exit(harness.run("talk", CHECKS))
