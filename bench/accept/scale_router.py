"""Streams that move: replicas are killed, or drained, under streams through the router.

Each round: three replicas of one model behind a router, `--router-streams` streams in four shapes of the
API; when so many have begun as chance says, one replica gets SIGKILL, or is drained, and is started again.
Every text is held against the one that a replica alone gives.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import harness
from harness import ROOT, Line

TINY = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
KEY = "drain-key"
SHAPES = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--router-rounds", type=int, default=30, help="of each: kills, drains")
    parser.add_argument("--router-streams", type=int, default=64)
    parser.add_argument("--router-model", default=str(TINY))


@dataclass
class Replica:
    """One server of the fleet on a port of its own."""

    model: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        template = harness.RESULTS / "template.jinja"
        template.parent.mkdir(parents=True, exist_ok=True)
        template.write_text(TEMPLATE)
        command = [
            sys.executable,
            "-m",
            "pageturner",
            "serve",
            self.model,
            "--port",
            str(self.port),
        ]
        command += ["--admin-key", KEY, "--served-model-name", "m"]
        if self.model == str(TINY):
            command += ["--chat-template", str(template)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        harness.wait_ready(self.url, self.process, 180.0)

    def kill(self) -> None:
        """The server and its engine, at once."""
        assert self.process is not None
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def drain(self, on: bool) -> dict[str, Any]:
        asked = urllib.request.Request(
            f"{self.url}/v1/admin/drain",
            json.dumps({"drain": on}).encode(),
            method="POST",
            headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


def body_of(i: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """Request i: its path and its body."""
    path = SHAPES[i % len(SHAPES)]
    sampled = {"temperature": 0.9} if i % 2 else {"temperature": 0}
    words = f"Story number {i} begins with a {('lamp', 'river', 'train')[i % 3]}"
    common: dict[str, Any] = {"max_tokens": tokens, "stream": True, **sampled}
    if path == "/v1/completions":
        return path, {"prompt": words, "ignore_eos": True, "seed": i, **common}
    messages = [{"role": "user", "content": words}]
    if path == "/v1/messages":
        return path, {"model": "m", "messages": messages, **common, "temperature": 0}
    if path == "/v1/responses":
        del common["max_tokens"]
        return path, {"input": words, "max_output_tokens": tokens, **common, "temperature": 0}
    return path, {"messages": messages, "ignore_eos": True, "seed": i, **common}


def stream(
    url: str, path: str, body: dict[str, Any], begun: list[int] | None = None
) -> tuple[str, bool, float]:
    """The text of a streamed answer, whether it ended as it should, seconds to its first byte. begun: gets
    an entry then."""
    asked = urllib.request.Request(
        url + path, json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
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
            if path == "/v1/responses":
                text += event["delta"] if event["type"] == "response.output_text.delta" else ""
                ended = ended or event["type"] in ("response.completed", "response.incomplete")
            elif path == "/v1/messages":
                text += event.get("delta", {}).get("text", "")
                ended = ended or event["type"] == "message_stop"
            else:
                for choice in event["choices"]:
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text, ended, first


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Kills, drains, and what the router costs."""
    n, model = arguments.router_streams, arguments.router_model
    jobs = [body_of(i, 200 if model == str(TINY) else 60) for i in range(n)]
    with ExitStack() as stack:
        fleet = [Replica(model, harness.free_port()) for _ in range(3)]
        for one in fleet:
            one.start()
            stack.callback(one.kill)
        port = harness.free_port()
        command = [sys.executable, "-m", "pageturner", "route", *(one.url for one in fleet)]
        command += ["--port", str(port), "--health-interval", "0.2", "--max-open", "1000"]
        router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(harness.end, router)
        url = f"http://127.0.0.1:{port}"
        harness.wait_ready(url, router, 120.0)
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            wanted = [text for text, _, _ in pool.map(lambda job: stream(fleet[0].url, *job), jobs)]
            for what in ("kill -9", "drain"):
                yield _rounds(what, arguments.router_rounds, fleet, url, jobs, wanted, pool)
        pairs = [
            (stream(fleet[i % 3].url, *jobs[0])[2], stream(url, *jobs[0])[2]) for i in range(60)
        ]
        direct, through = zip(*pairs, strict=True)
        added = [
            1e3 * (statistics.quantiles(x, n=100)[q]) for q in (49, 98) for x in (through, direct)
        ]
        figure = f"p50 {added[0] - added[1]:+.1f} ms, p99 {added[2] - added[3]:+.1f} ms"
        yield Line("what the router adds to a first byte, one at a time", figure, None)


def _rounds(
    what: str,
    rounds: int,
    fleet: list[Replica],
    url: str,
    jobs: list[tuple[str, dict[str, Any]]],
    wanted: list[str],
    pool: concurrent.futures.ThreadPoolExecutor,
) -> Line:
    lost, changed, dice = 0, 0, random.Random(what)
    moved_before = metric(url, "pageturner:router_moved_total")
    for number in range(rounds):
        victim = fleet[number % len(fleet)]
        begun: list[int] = []
        running = [pool.submit(stream, url, *job, begun) for job in jobs]
        enough, until = dice.randint(len(jobs) // 4, len(jobs)), time.monotonic() + 60
        while len(begun) < enough and time.monotonic() < until:
            time.sleep(0.005)
        if what == "drain":
            victim.drain(True)
        else:
            victim.kill()
            victim.start()
        for future, text in zip(running, wanted, strict=True):
            try:
                got, ended, _ = future.result(300)
            except OSError:
                got, ended = "", False
            lost += not ended
            changed += ended and got != text
        if what == "drain":
            victim.drain(False)
        until = time.monotonic() + 30
        while metric(url, "pageturner:router_replica_up") < len(fleet) and time.monotonic() < until:
            time.sleep(0.05)
    moved = metric(url, "pageturner:router_moved_total") - moved_before
    figure = f"{rounds} times under {len(jobs)} streams: {lost} lost, {changed} changed or repeated"
    figure += f"; {moved:.0f} moved"
    return Line(f"{what} of one of three replicas", figure, lost == changed == 0 and moved > 0)


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        rows = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
