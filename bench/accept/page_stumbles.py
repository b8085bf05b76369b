"""Where newcomers stumbled: each command or request as it was typed, what came out before, and what does now.

Owns what was typed by people who knew the README, vLLM, llama.cpp or Ollama, and what they were told before
it was mended. A line passes when what must be in the answer now is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import ROOT, Line  # noqa: E402

TINY = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
SHOWN = 160  # characters of what came out
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Typed:
    """A command: what it said before, what it must say now, and its exit code."""

    words: str
    before: str
    now: str
    code: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A request: what was answered before, what must be now, and its status."""

    path: str
    fields: dict[str, Any]
    before: str
    now: str
    status: int


_STUMBLES = json.loads((ROOT / "bench" / "data" / "stumbles.json").read_text())
TYPED = [Typed(**row) for row in _STUMBLES["typed"]]
SENT = [Sent(**row) for row in _STUMBLES["sent"]]


def command(words: str) -> list[str]:
    """As a shell has it, where only '' is quoted."""
    return [
        sys.executable,
        "-m",
        "pageturner",
        *("" if word == "''" else word for word in words.split()),
    ]


def _line(what: str, before: str, said: str, passed: bool) -> Line:
    last = said.strip().splitlines()[-1] if said.strip() else ""
    return Line(what, f"before: {before}; now: {last[:SHOWN]}", passed)


def typed(one: Typed) -> Line:
    """Run the command."""
    done = subprocess.run(command(one.words), cwd=ROOT, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    passed = done.returncode == one.code and re.search(one.now, said) is not None
    return _line(f"pageturner {one.words}", one.before, said, passed)


def sent(url: str, one: Sent) -> Line:
    """Send the request."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + one.path, json.dumps(one.fields).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, said = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read().decode()
    passed = status == one.status and re.search(one.now, said) is not None
    return _line(
        f"POST {one.path} {json.dumps(one.fields)}", one.before, f"{status} {said}", passed
    )


def served() -> Iterator[Line]:
    """The requests, then `kill` of the whole group, and what the server wrote from its start to its end."""
    port = harness.free_port()
    with tempfile.TemporaryFile("w+") as log:
        words = command(f"serve {TINY} --port {port} --kv-cache-memory 64M")
        process = subprocess.Popen(words, cwd=ROOT, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            harness.wait_ready(url, process, 120.0)
            for one in SENT:
                yield sent(url, one)
            with urllib.request.urlopen(f"{url}/slots", timeout=60) as answer:
                busy = sum(slot["is_processing"] for slot in json.load(answer))
            yield Line(
                "GET /slots while nothing runs", f"before: 1 busy; now: {busy} busy", busy == 0
            )
        finally:
            signal_group(process)
        log.seek(0)
        lines = log.read().splitlines()
    first = lines[0] if lines else ""
    yield _line(
        "serve MODEL, its first line", "nothing until it was ready", first, "loading" in first
    )
    lost = [line for line in lines if "is lost" in line]
    told = "; ".join([*lines[-1:], *lost])
    before = "stopped ..., then: ERROR engine process 1 is lost"
    yield _line("SIGTERM to the process group", before, told, not lost and "stopped" in told)


def signal_group(process: subprocess.Popen[bytes]) -> None:
    """End it as `timeout` and systemd do: the engine process gets the signal, too."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def batch_again() -> Line:
    """A file of requests that is answered already."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        body = {"prompt": "a", "max_tokens": 1}
        line = {"custom_id": "c", "method": "POST", "url": COMPLETIONS, "body": body}
        source.write_text(json.dumps(line) + "\n")
        words = command(f"batch {source} {out} --model {TINY} --kv-cache-memory 64M")
        first, again = (
            subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
            for _ in range(2)
        )
    passed = (first.returncode, again.returncode) == (
        0,
        0,
    ) and "has the answers already" in again.stderr
    said = again.stderr.replace(folder, "")
    return _line("batch, again with the same files", "exit 2: OUT is there already", said, passed)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Each stumble."""
    for one in TYPED:
        yield typed(one)
    yield from served()
    yield batch_again()
