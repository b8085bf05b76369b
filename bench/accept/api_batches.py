"""Batches: a journal that is killed again and again, and interactive requests beside a batch.

Owns both measurements. Kills are SIGKILL at random moments: of the server with all its processes, and of
`pageturner batch` with all of its; what is there at the end is compared with a run that nobody disturbed. The
interactive requests are the same with and without a batch, in turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
from harness import Line, Server

KILLS_FAKE, KILLS_REAL = 40, 10
LINES_FAKE, LINES_REAL = 3000, 120
ROUNDS, SECONDS, RATE = (
    4,
    40.0,
    1.2,
)  # of the paired measurement: pairs, length of an arm, requests a second
ANSWER = 24  # tokens
MOST_TIMES = 1.3
WORDS = [
    "time",
    "river",
    "stone",
    "market",
    "lamp",
    "winter",
    "engine",
    "garden",
    "letter",
    "signal",
    "bridge",
    "copper",
    "window",
    "history",
]


# -- lines of batches ----------------------------------------------------------------------------------------
def batch_lines(n: int, words: int, tokens: int, seed: int = 1) -> list[dict[str, Any]]:
    """Chats, sampled; a few completions' worth of them are refused by the server."""
    dice = random.Random(seed)
    made = []
    for i in range(n):
        text = " ".join(dice.choice(WORDS) for _ in range(dice.randrange(3, words)))
        body = {
            "messages": [{"role": "user", "content": f"{i}: {text}"}],
            "max_tokens": dice.randrange(2, tokens),
        }
        if i % 97 == 0:
            body["temperature"] = -1
        made.append(
            {
                "custom_id": f"line-{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
        )
    return made


def as_text(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def answers_of(content: bytes) -> dict[str, list[Any]]:
    """By custom_id, what was answered each time: status and body without the moment of its making."""
    found: dict[str, list[Any]] = {}
    for text in content.splitlines():
        line = json.loads(text)
        response = line["response"] or {"status_code": 0, "body": line["error"]}
        body = {
            name: value for name, value in response["body"].items() if name not in ("created", "id")
        }
        body.get("usage", {}).pop(
            "prompt_tokens_details", None
        )  # what was cached is the affair of the moment
        found.setdefault(line["custom_id"], []).append((response["status_code"], body))
    return found


def compared(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> tuple[int, int, int]:
    """Lines lost, lines answered twice, lines answered otherwise."""
    lost = len(expected.keys() - found.keys())
    twice = sum(len(answers) > 1 for answers in found.values())
    other = sum(answers != expected.get(id) for id, answers in found.items() if len(answers) == 1)
    return lost, twice, other


# -- the command ---------------------------------------------------------------------------------------------
def kill_all(process: subprocess.Popen[bytes]) -> None:
    """It and every process that it started, at once: they are one session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def killed_command(
    folder: Path, flags: list[str], lines: bytes, kills: int, dice: random.Random
) -> Line:
    """`pageturner batch`, killed so many times and begun anew, beside one that ran undisturbed."""
    source, out, errors = folder / "in.jsonl", folder / "out.jsonl", folder / "err.jsonl"
    source.write_bytes(lines)
    calm = folder / "calm.jsonl"
    program = [sys.executable, "-m", "pageturner", "batch", str(source)]

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [*program, *words, *flags]
        return subprocess.Popen(
            command, cwd=harness.ROOT, stderr=subprocess.DEVNULL, start_new_session=True
        )

    begin = time.monotonic()
    process = start(str(calm))
    if process.wait(600) != 0:
        raise RuntimeError("the undisturbed batch failed")
    whole = time.monotonic() - begin
    done = 0
    while done < kills:
        if out.exists() and not Path(f"{out}.journal").exists():  # it was quicker: once more
            out.unlink()
            errors.unlink(missing_ok=True)
        process = start(str(out), "--errors", str(errors))
        try:
            process.wait(dice.uniform(0.1, max(1.0, 0.8 * whole)))
        except subprocess.TimeoutExpired:
            kill_all(process)
            done += 1
    if start(str(out), "--errors", str(errors)).wait(600) not in (0, 2):
        raise RuntimeError("the last run failed")
    lost, twice, other = compared(
        answers_of(out.read_bytes() + errors.read_bytes()), answers_of(calm.read_bytes())
    )
    figure = (
        f"{lost} lost, {twice} twice, {other} other answers, of {len(lines.splitlines())} lines"
    )
    what = f"`pageturner batch {' '.join(flags)}` killed {kills} times: nothing lost or twice, same answers"
    return Line(what, figure, lost + twice + other == 0)


# -- the server ----------------------------------------------------------------------------------------------
def call(url: str, method: str = "GET", body: bytes = b"", kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, body or None, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def upload(url: str, lines: bytes) -> str:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + lines,
        b"\r\n--x--\r\n",
    ]
    told = call(f"{url}/v1/files", "POST", b"".join(parts), "multipart/form-data; boundary=x")
    return str(json.loads(told)["id"])


def create(url: str, lines: bytes) -> str:
    wanted = {
        "input_file_id": upload(url, lines),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return str(json.loads(call(f"{url}/v1/batches", "POST", json.dumps(wanted).encode()))["id"])


def batch_of(url: str, id: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(call(f"{url}/v1/batches/{id}"))
    return told


def ended(url: str, id: str, seconds: float = 600.0) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while (told := batch_of(url, id))["status"] not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        if time.monotonic() > until:
            raise TimeoutError(f"the batch is still {told['status']}: {told['request_counts']}")
        time.sleep(0.2)
    return told


def contents(url: str, told: dict[str, Any]) -> bytes:
    files = (told["output_file_id"], told["error_file_id"])
    return b"".join(call(f"{url}/v1/files/{id}/content") for id in files if id)


def serving(folder: Path, flags: list[str]) -> tuple[str, subprocess.Popen[bytes]]:
    port = harness.free_port()
    command = [sys.executable, "-m", "pageturner", "serve", "smollm2", "--port", str(port)]
    command += ["--batch-dir", str(folder / "batches"), "--log-level", "error", *flags]
    process = subprocess.Popen(
        command, cwd=harness.ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    harness.wait_ready(f"http://127.0.0.1:{port}", process, 60)
    return f"http://127.0.0.1:{port}", process


def killed_server(
    folder: Path, flags: list[str], lines: bytes, kills: int, dice: random.Random
) -> Line:
    """A server with a batch, killed so many times; where a batch ends before that, another one begins."""
    url, process = serving(folder, flags)
    try:
        begin = time.monotonic()
        expected = answers_of(contents(url, ended(url, create(url, lines))))
        whole = time.monotonic() - begin
        ids, done = [create(url, lines)], 0
        while done < kills:
            time.sleep(dice.uniform(0.02, max(0.3, 0.5 * whole)))
            if batch_of(url, ids[-1])["status"] == "completed":
                ids.append(create(url, lines))
                continue
            kill_all(process)
            done += 1
            url, process = serving(folder, flags)
        sums = [0, 0, 0]
        for id in ids:
            found = compared(answers_of(contents(url, ended(url, id))), expected)
            sums = [a + b for a, b in zip(sums, found, strict=True)]
    finally:
        harness.end(process)
    lost, twice, other = sums
    figure = f"{lost} lost, {twice} twice, {other} other answers, in {len(ids)} batches of {len(expected)} lines"
    what = f"a server {' '.join(flags)} killed {kills} times: nothing lost or twice, same answers"
    return Line(what, figure, lost + twice + other == 0)


# -- beside interactive requests -----------------------------------------------------------------------------
def ttft(host: str, text: str) -> float:
    """Seconds until the first token of a streamed chat; it is read to its end."""
    connection = http.client.HTTPConnection(host, timeout=120)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": ANSWER,
        "stream": True,
        "seed": 1,
    }
    begin = time.monotonic()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:200]!r}")
    answer.readline()
    took = time.monotonic() - begin
    answer.read()
    connection.close()
    return took


def arm(server: Server, seed: int, nonce: str, seconds: float) -> list[float]:
    """The times to the first token of requests at random times: the same for each seed, but for a nonce in
    front, so that no prefix is found again."""
    dice, host = random.Random(seed), server.url.removeprefix("http://")
    took: list[float] = []
    lock = threading.Lock()

    def one(text: str) -> None:
        first = ttft(host, text)
        with lock:
            took.append(first)

    begin, at = time.monotonic(), 0.0
    with ThreadPoolExecutor(64) as pool:
        asked = []
        while (at := at + dice.expovariate(RATE)) < seconds:
            words = min(400, round(dice.lognormvariate(4.3, 0.9)))
            text = f"{nonce} {at:.3f} " + " ".join(dice.choice(WORDS) for _ in range(words))
            time.sleep(max(0.0, begin + at - time.monotonic()))
            asked.append(pool.submit(one, text))
        for future in asked:
            future.result()
    return took


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def beside_interactive(rounds: int, seconds: float) -> Iterator[Line]:
    """The same requests with a batch and without, in turns, at a server as it comes."""
    lines = as_text(batch_lines(20_000, 120, 160, seed=7))
    without: list[float] = []
    beside: list[float] = []
    done = 0
    with tempfile.TemporaryDirectory() as folder, harness.server("--batch-dir", folder) as server:
        arm(server, 0, "warm", 5.0)
        for round in range(rounds):
            for batch in (False, True) if round % 2 == 0 else (True, False):
                if not batch:
                    without += arm(server, round + 1, f"a{round}", seconds)
                    continue
                id = create(server.url, lines)
                while batch_of(server.url, id)["request_counts"]["completed"] < 20:
                    time.sleep(0.1)
                before = batch_of(server.url, id)["request_counts"]["completed"]
                beside += arm(server, round + 1, f"b{round}", seconds)
                done += batch_of(server.url, id)["request_counts"]["completed"] - before
                call(f"{server.url}/v1/batches/{id}/cancel", "POST")
                ended(server.url, id)
    ratio = p99(beside) / p99(without)
    middle = statistics.median(beside) / statistics.median(without)
    figure = (
        f"{ratio:.2f}x ({1000 * p99(beside):.0f} / {1000 * p99(without):.0f} ms); p50 {middle:.2f}x"
        f" ({1000 * statistics.median(beside):.0f} / {1000 * statistics.median(without):.0f} ms);"
        f" {len(beside)} requests in each arm, {rounds} pairs"
    )
    what = f"interactive TTFT p99 with a batch running, at most {MOST_TIMES}x that without"
    yield Line(what, figure, ratio <= MOST_TIMES)
    pace = done / (rounds * seconds)
    yield Line("lines of the batch answered meanwhile", f"{done} ({pace:.1f} a second)", None)


# -- all of it -----------------------------------------------------------------------------------------------
def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of batches. arguments: quick, a tenth of it; seed."""
    quick = arguments.quick
    dice = random.Random(arguments.seed)
    share = 10 if quick else 1
    for flags, n, kills, words, tokens in (
        (["--backend", "fake"], LINES_FAKE, KILLS_FAKE, 30, 24),
        ([], LINES_REAL, KILLS_REAL, 60, 48),
    ):
        asked = as_text(batch_lines(n, words, tokens))
        for killed in (killed_server, killed_command):
            with tempfile.TemporaryDirectory() as folder:
                yield killed(Path(folder), flags, asked, max(1, kills // 2 // share), dice)
    yield from beside_interactive(1 if quick else ROUNDS, SECONDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--seed", type=int, default=14)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
