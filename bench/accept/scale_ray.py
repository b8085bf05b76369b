"""Ray Serve: replicas are killed, added, removed and replaced under streams through Serve's HTTP proxy.

A cluster of its own is started (`ray start --head`), an application on it (`pageturner deploy`), and both end
with this script. Every text is held against the one that was given before anything happened.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Line, NotRun, processor_seconds

TINY = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
MARK = "PAGETURNER_ACCEPT_RAY"
IDLE_SECONDS = 3.0
Job = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--ray-rounds", type=int, default=5, help="kills")
    parser.add_argument("--ray-streams", type=int, default=16)
    parser.add_argument("--ray-model", default=str(TINY))
    parser.add_argument("--ray-tokens", type=int, default=700, help="of each stream")
    parser.add_argument(
        "--ray-requests", type=int, default=100, help="for what Serve adds to a first byte"
    )
    parser.add_argument("--ray-patience", type=float, default=300.0, help="seconds for each change")


def stream(
    url: str, body: dict[str, Any], begun: list[int] | None = None
) -> tuple[str, bool, float]:
    """The text of a streamed answer, whether it ended as it should, seconds to its first byte. begun: gets
    an entry then."""
    asked = harness.request(url, "/v1/completions", body)
    text, ended, begin, first = "", False, time.monotonic(), 0.0
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if not first:
                first = time.monotonic() - begin
                if begun is not None:
                    begun.append(1)
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                return text, False, first
            for choice in event["choices"]:
                text += choice["text"]
    return text, ended, first


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    text = harness.fetch(url, "/metrics").decode()
    rows = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


class Cluster:
    """A Ray cluster of this machine, with an application of one model on it."""

    def __init__(self, folder: Path, model: str, patience: float) -> None:
        self.folder, self.model, self.patience = folder, model, patience
        self.port, self.gcs = harness.free_port(), harness.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = f"{os.getpid()}-{random.randrange(1 << 30)}"
        # Ray gives its workers the niceness 15: another program would take the processor from a replica
        more = {MARK: self.mark, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        # a token of the user's would be asked for by the cluster, and not sent to a named address
        more |= {"RAY_raylet_start_wait_time_s": f"{patience:.0f}", "RAY_AUTH_MODE": "disabled"}
        self.environment = {**os.environ, **more}

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--num-cpus=2",
            f"--port={self.gcs}",
            "--object-store-memory=104857600",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--temp-dir={self.folder}/ray",
        ]
        self._run(command)

    def deploy(self, replicas: int | list[int], **engine: Any) -> None:
        """Start the application, or change it: until it is as it should be."""
        engine = {
            "threads": 1,
            "kv_cache_memory": 1 << 26 if self.model == str(TINY) else 1 << 28,
        } | engine
        lines = [
            f"port = {self.port}",
            "[router]",
            "move_timeout = 60.0",
            "[models.m]",
            f"model = {json.dumps(self.model)}",
            f"replicas = {replicas}",
            "cpus = 0.5",
            "upscale_delay = 2.0",
            "downscale_delay = 5.0",
            "[models.m.engine]",
            *(f"{key} = {value}" for key, value in engine.items()),
        ]
        path = self.folder / "app.toml"
        path.write_text("\n".join(lines) + "\n")
        address = f"127.0.0.1:{self.gcs}"
        self._run(harness.command("deploy", str(path), "--address", address, "--detach"))

    def _run(self, command: list[str]) -> None:
        how = {"env": self.environment, "cwd": self.folder, "timeout": self.patience}
        done = harness.ran(*command, **how)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command[2:5])}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
            )

    def processes(self) -> list[int]:
        """All that were started for this cluster, and none of another one."""
        found, wanted = [], f"{MARK}={self.mark}".encode()
        for one in Path("/proc").iterdir():
            try:
                if one.name.isdigit() and wanted in (one / "environ").read_bytes().split(b"\0"):
                    found.append(int(one.name))
            except OSError:
                continue
        return [pid for pid in found if pid != os.getpid()]

    def replicas(self) -> list[int]:
        """The actors of the model, by process id; not the text workers that they forked."""
        found = []
        for pid in self.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                worker = Path(f"/proc/{pid}/comm").read_bytes().startswith(b"pageturner-text")
            except OSError:
                continue
            if command.startswith(b"ray::ServeReplica:pageturner:m") and not worker:
                found.append(pid)
        return sorted(found)

    def wait_replicas(self, count: int) -> float:
        """Seconds until the door knows so many; TimeoutError."""
        begin = time.monotonic()
        while time.monotonic() - begin < self.patience:
            stream(self.url, {"prompt": "x", "max_tokens": 1, "stream": True})
            if metric(self.url, "pageturner:router_replicas") == count:
                return time.monotonic() - begin
            time.sleep(0.2)
        raise TimeoutError(f"there were not {count} replicas within {self.patience:g} s")

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.processes():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            time.sleep(2.0)


class Load:
    """So many streams at a time, again and again, each held against its text. lost, changed: of `count`."""

    def __init__(self, url: str, jobs: list[Job], wanted: list[str], streams: int) -> None:
        self.count = self.lost = self.changed = 0
        self._over, self._lock = threading.Event(), threading.Lock()
        self._url, self._jobs, self._wanted = url, jobs, wanted
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(streams)]

    def __enter__(self) -> Load:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join()

    def _work(self, first: int) -> None:
        i = first
        while not self._over.is_set():
            text, ended = _text(self._url, self._jobs[i])
            with self._lock:
                self.count += 1
                self.lost += not ended
                self.changed += ended and text != self._wanted[i]
            i = (i + len(self._threads)) % len(self._jobs)

    def line(self, what: str, more: str = "") -> Line:
        figure = f"{self.count} streams: {self.lost} lost, {self.changed} changed{more}"
        return Line(what, figure, self.lost == self.changed == 0 and self.count > 0)


def _text(url: str, job: Job, begun: list[int] | None = None) -> tuple[str, bool]:
    try:
        text, ended, _ = stream(url, job, begun)
        return text, ended
    except OSError as error:
        return str(error), False


def _jobs(count: int, tokens: int) -> list[Job]:
    words = ("lamp", "river", "train")
    common = {"stream": True, "ignore_eos": True, "max_tokens": tokens}
    return [
        {
            "prompt": f"Story number {i} begins with a {words[i % 3]}",
            "seed": i,
            "temperature": 0.9 if i % 2 else 0,
            **common,
        }
        for i in range(count)
    ]


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Kills, scaling, an upgrade, and what Serve costs."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise NotRun("Ray is not installed: pip install 'pageturner[ray]'")
    # else the cluster would outlive this script
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    n = arguments.ray_streams
    jobs = _jobs(n, arguments.ray_tokens)
    with ExitStack() as stack:
        # a short path: sockets of Ray are below it
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pt", ignore_cleanup_errors=True)
            )
        )
        cluster = Cluster(folder, arguments.ray_model, arguments.ray_patience)
        stack.callback(cluster.end)
        begin = time.monotonic()
        cluster.start()
        cluster.deploy(2)
        cluster.wait_replicas(2)
        yield Line(
            "a cluster and an application with two replicas",
            f"{time.monotonic() - begin:.0f} s",
            None,
        )
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            wanted = [text for text, _ in pool.map(lambda job: _text(cluster.url, job), jobs)]
            yield _kills(cluster, arguments.ray_rounds, jobs, wanted, pool)
        yield from _added(cluster, arguments.ray_requests)
        with Load(cluster.url, jobs, wanted, 4) as load:
            cluster.deploy(2, max_num_seqs=24)
            cluster.wait_replicas(2)
        yield load.line("rolling upgrade to other settings")
        with Load(cluster.url, jobs, wanted, 4) as load:
            cluster.deploy(1, max_num_seqs=24)
            cluster.wait_replicas(1)
            cluster.deploy(2, max_num_seqs=24)
            up = cluster.wait_replicas(2)
            cluster.deploy(1, max_num_seqs=24)
            down = cluster.wait_replicas(1)
        yield load.line(
            "2 to 1 to 2 to 1 replicas by hand", f"; seen after {up:.1f} and {down:.1f} s"
        )
        yield _by_goodput(cluster, jobs, wanted)


def _kills(
    cluster: Cluster,
    rounds: int,
    jobs: list[Job],
    wanted: list[str],
    pool: concurrent.futures.ThreadPoolExecutor,
) -> Line:
    lost, changed, dice = 0, 0, random.Random("ray")
    before = metric(cluster.url, "pageturner:router_moved_total")
    for _ in range(rounds):
        begun: list[int] = []
        running = [pool.submit(_text, cluster.url, job, begun) for job in jobs]
        enough, until = dice.randint(len(jobs) // 4, len(jobs)), time.monotonic() + 60
        while len(begun) < enough and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(dice.choice(cluster.replicas()), signal.SIGKILL)
        for future, text in zip(running, wanted, strict=True):
            got, ended = future.result(300)
            lost += not ended
            changed += ended and got != text
        time.sleep(3.0)  # Serve looks after its replicas once in a while
        cluster.wait_replicas(2)
    moved = metric(cluster.url, "pageturner:router_moved_total") - before
    figure = f"{rounds} times under {len(jobs)} streams: {lost} lost, {changed} changed or repeated"
    return Line(
        "kill -9 of one of two replicas",
        f"{figure}; {moved:.0f} moved",
        lost == changed == 0 and moved > 0,
    )


def _added(cluster: Cluster, requests: int) -> Iterator[Line]:
    """First bytes and whole short answers, one at a time: of a server alone, and through Serve."""
    job = _jobs(1, 16)[0]
    memory = "--kv-cache-memory", "64M" if cluster.model == str(TINY) else "256M"
    with harness.server("--threads", "1", *memory, model=cluster.model) as alone:
        first: dict[str, list[float]] = {"alone": [], "serve": []}
        whole: dict[str, list[float]] = {"alone": [], "serve": []}
        everybody, engine = cluster.processes(), [alone.process.pid, alone.engine_pid()]
        everybody = [pid for pid in everybody if pid not in engine]
        before = processor_seconds(*everybody)
        time.sleep(IDLE_SECONDS)
        idle = processor_seconds(*everybody) - before
        taken = [[0.0, 0.0, idle], [0.0, 0.0]]
        for i in range(requests + 5):
            if i == 5:
                taken[0][0], taken[1][0] = processor_seconds(*everybody), processor_seconds(*engine)
            for name, url in (("alone", alone.url), ("serve", cluster.url)):
                begin = time.monotonic()
                ttft = stream(url, job)[2]
                if i >= 5:
                    first[name].append(1e3 * ttft)
                    whole[name].append(1e3 * (time.monotonic() - begin))
        taken[0][1], taken[1][1] = processor_seconds(*everybody), processor_seconds(*engine)
    for what, of in (("a first byte", first), ("an answer of 16 tokens", whole)):
        points = {name: statistics.quantiles(values, n=100) for name, values in of.items()}
        figure = ", ".join(
            f"p{q + 1} {points['alone'][q]:.1f} -> {points['serve'][q]:.1f} ms" for q in (49, 98)
        )
        yield Line(f"what Serve adds to {what}, one at a time", figure, None)
    of_all, of_alone = taken
    idle = of_all[2] / IDLE_SECONDS  # for each second, of processes that look after each other
    asked = (sum(whole["serve"]) + sum(whole["alone"])) / 1e3
    serve = (of_all[1] - of_all[0] - idle * asked) / requests
    figure = f"{1e3 * (of_alone[1] - of_alone[0]) / requests:.1f} -> {1e3 * serve:.1f} ms"
    yield Line("processor time of such an answer, alone and through Serve", figure, None)


def _by_goodput(cluster: Cluster, jobs: list[Job], wanted: list[str]) -> Line:
    """Targets that cannot be met bring a second replica; a load that is light and meets them lets it go."""
    cluster.deploy([1, 2], max_num_seqs=4)
    cluster.wait_replicas(1)
    # a target for the first token would be refused at the door of an engine that cannot meet it
    missed = [{**body, "tpot_target_ms": 0.1} for body in jobs]
    with Load(cluster.url, missed, wanted, len(jobs)) as hard:
        up = cluster.wait_replicas(2)
    with Load(cluster.url, jobs, wanted, 1) as light:
        down = cluster.wait_replicas(1)  # the last minute's misses have to be forgotten first
    hard.count, hard.lost = hard.count + light.count, hard.lost + light.lost
    hard.changed += light.changed
    return hard.line(
        "1 to 2 to 1 replicas by goodput", f"; up after {up:.0f} s, down after {down:.0f} s"
    )
