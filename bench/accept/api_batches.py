"""Interactive requests beside a batch: the same requests with and without it, in turns.

That a killed batch goes on is held by tests/server/test_batch_journal.py and test_batches.py.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
from harness import Line, Server

ROUNDS, SECONDS, RATE = (
    4,
    40.0,
    1.2,
)  # of the paired measurement: pairs, length of an arm, requests a second
ANSWER = 24  # tokens
MAX_TIMES = 1.3
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
    what = f"interactive TTFT p99 with a batch running, at most {MAX_TIMES}x that without"
    yield Line(what, figure, ratio <= MAX_TIMES)
    pace = done / (rounds * seconds)
    yield Line("lines of the batch answered meanwhile", f"{done} ({pace:.1f} a second)", None)


# -- all of it -----------------------------------------------------------------------------------------------
def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    yield from beside_interactive(1 if arguments.quick else ROUNDS, SECONDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--quick", action="store_true", help="one round")
