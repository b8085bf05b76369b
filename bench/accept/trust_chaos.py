"""Chaos: answers of every dialect and decoding method while engines die, hang or are poisoned.

    python bench/accept/trust_chaos.py [--minutes 20] [--clients 24] [--faults 80]

Owns what is asked, which faults come when, and the comparison: each answer must be what it was when nothing
was disturbed. Faults are real: SIGKILL and SIGSTOP of the engine, SIGSEGV by injection, requests that bring
the engine down, a limit on the memory of the API process's text workers, a step log on a disk that is full.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import harness
from harness import Line, Server, rss_mb

PLACES = ("Paris", "the sea", "a small village", "the moon", "winter", "a library")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
# what an answer may be asked for, beside its prompt
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "several": {"temperature": 0.8, "n": 3},
    "logprobs": {"temperature": 0.5, "logprobs": 3},
    "bias": {"temperature": 0.6, "logit_bias": {"100": -50, "200": 5}},
    "stop": {"temperature": 0.7, "stop": [" the", "\n\n"]},
    "beams": {"use_beam_search": True, "n": 3},
    "schema": {"temperature": 0.7, "response_format": FORM},
    "choice": {"temperature": 0.7, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
}  # fmt: skip
FAULTS = ("kill", "stop", "segfault", "poison", "exception", "long text", "hostile schema")
FLAGS = (
    "--developer", "--engine-timeout", "2", "--max-restarts", "1000", "--speculation", "ngram",
    "--text-memory", "400M", "--step-log", "/dev/full",
)  # fmt: skip


@dataclass(slots=True)
class Job:
    """One request and what it answers when nothing is disturbed."""

    name: str
    path: str
    body: dict[str, Any]
    truth: str = ""


@dataclass(slots=True)
class Seen:
    answers: int = 0
    differ: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


def jobs() -> list[Job]:
    """Every method in both dialects, streamed and whole."""
    found = []
    for number, (name, fields) in enumerate(METHODS.items()):
        place, body = PLACES[number % len(PLACES)], fields | {"seed": number, "max_tokens": 60}
        for stream in (False, True):
            if name == "beams" and stream:
                continue
            completion = body | {"prompt": f"A story about {place}. Once", "stream": stream}
            found.append(Job(f"{name}, completion, {stream}", "/v1/completions", completion))
            talk = body | {
                "messages": [{"role": "user", "content": f"Tell me of {place}."}],
                "stream": stream,
            }
            if name == "logprobs":
                talk |= {"logprobs": True, "top_logprobs": 3}
            found.append(Job(f"{name}, chat, {stream}", "/v1/chat/completions", talk))
    return found


def ask(server: Server, job: Job) -> str:
    """Everything of the answer that must never change, as one text."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    try:
        connection.request("POST", job.path, json.dumps(job.body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        return f"status {answer.status}: {data[:200]!r}"
    if not job.body["stream"]:
        return json.dumps([_parts(choice) for choice in json.loads(data)["choices"]])
    texts: Counter[int] = Counter()
    said: dict[int, list[Any]] = {}
    for line in data.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return f"error: {event['error']}"
        for choice in event["choices"]:
            texts[choice["index"]] += 1
            said.setdefault(choice["index"], []).append(_parts(choice))
    return json.dumps(sorted(said.items()))


def _parts(choice: dict[str, Any]) -> list[Any]:
    message = choice.get("message") or choice.get("delta") or {}
    return [choice.get("text"), message.get("content"), choice.get("logprobs"), choice.get("finish_reason")]


def disturb(server: Server, dice: random.Random, seen: Seen) -> None:
    """One fault. Whoever asks for it is not one of those whose answers count."""
    kind = dice.choice(FAULTS)
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "stream": False}
    if kind in ("kill", "stop"):
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        try:
            os.kill(server.engine_pid(), number)
        except (RuntimeError, ProcessLookupError, OSError):
            return  # it is being restarted at this moment
    else:
        if kind in ("segfault", "exception"):
            body["inject_fault"] = f"{kind}@{dice.randrange(1, 6)}"
        elif kind == "poison":
            body["inject_fault"] = "segfault@1"
        elif kind == "long text":
            body["prompt"] = "word " * 700_000
        else:
            patterns = {f"^[a-z]*{i}[a-z]*$": {"type": "string"} for i in range(800)}
            schema = {"type": "object", "patternProperties": patterns}
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        threading.Thread(
            target=_quietly, args=(server, Job(kind, "/v1/completions", body)), daemon=True
        ).start()
    seen.faults[kind] += 1


def _quietly(server: Server, job: Job) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(server, job)


def run(minutes: float, clients: int, faults: int, seed: int = 3) -> tuple[Seen, float, float]:
    """What was seen, and the memory of the API process in MB before and behind it."""
    every, seen, lock = jobs(), Seen(), threading.Lock()
    with harness.server(*FLAGS) as server:
        for job in every:
            job.truth = ask(server, job)
            if not job.truth.startswith("["):
                raise RuntimeError(f"{job.name} is not answered when nothing is disturbed: {job.truth}")
        before, until = rss_mb(server.process.pid), time.monotonic() + 60 * minutes
        pause = 60 * minutes / faults

        def client(number: int) -> None:
            dice = random.Random(1000 * seed + number)
            while time.monotonic() < until:
                job = dice.choice(every)
                answer = ask(server, job)
                with lock:
                    seen.answers += 1
                    if answer != job.truth:
                        seen.differ.append(f"{job.name}: {answer[:200]}")

        def disturber() -> None:
            dice = random.Random(seed)
            while time.monotonic() < until:
                time.sleep(dice.uniform(0.5, 1.5) * pause)
                disturb(server, dice, seen)

        harness.in_threads(clients + 1, lambda n: client(n) if n else disturber())
        time.sleep(2)
        return seen, before, rss_mb(server.process.pid)


def lines(minutes: float = 20.0, clients: int = 24, faults: int = 80) -> Iterator[Line]:
    """Nothing lost, repeated or changed."""
    seen, before, behind = run(minutes, clients, faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in seen.faults.most_common())
    what = f"chaos of {minutes:g} minutes, {len(METHODS)} methods in two dialects, {clients} clients"
    enough = sum(seen.faults.values()) >= 0.9 * faults
    figure = f"{seen.answers} answers, {len(seen.differ)} lost or changed; faults: {kinds}"
    figure += "".join(f"; {one}" for one in seen.differ[:2])
    yield Line(what, figure, bool(seen.answers) and not seen.differ and enough)
    yield Line(
        "memory of the API process in it", f"{before:.0f} MB, then {behind:.0f} MB", behind < before + 64
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--faults", type=int, default=80)
    options = parser.parse_args()
    outcome = list(lines(options.minutes, options.clients, options.faults))
    for line in outcome:
        print("PASS" if line.passed else "FAIL", line.what, line.figure, sep="  ")
    sys.exit(not all(line.passed for line in outcome))
