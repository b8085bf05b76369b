"""KV events: what they cost a step, and a foreign router, smg, before two servers that publish them.

Owns what is measured: steps of an engine without a model, with events and without in turns; conversations
through smg's cache-aware policy and its round robin, on a tiny model; and a subscriber of vLLM's kind
(kv_subscriber.py), whose index must say what the server finds. `--smg` names the program; one that is not
there is NOT RUN.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
import kv_subscriber  # noqa: E402
from harness import Line, pytest_line  # noqa: E402
from kv_subscriber import Subscriber  # noqa: E402

from pageturner.config.settings import EngineConfig  # noqa: E402
from pageturner.engine.engine_factory import make_engine  # noqa: E402
from pageturner.params import SamplingParams  # noqa: E402
from pageturner.request import Request  # noqa: E402

TINY = harness.ROOT / "tests" / "goldens" / "tiny_llama.gguf"
TALKS, TURNS, ANSWER, BLOCK = 16, 5, 8, 16
SMALL, PROMPTS = "512K", 60  # a cache of few blocks, and prompts whose lengths in it are foretold
Prompt = str | list[int]
MOST_A_STEP = 200e-6  # seconds of a step that events may take at 64 sequences


# -- what a step pays ----------------------------------------------------------------------------------------
def step_seconds(address: str, rounds: int) -> float:
    """Median seconds of a step of 64 sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=120, stop_ids=())
    config = EngineConfig(
        backend="null", kv_events=address, max_num_seqs=64, max_num_batched_tokens=2048
    )
    engine, times = make_engine(config).engine, []
    for number in range(rounds):
        for n in range(64):
            engine.submit(Request(64 * number + n, tuple(range(n, n + 64)), params))
        while engine.has_work:
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
    return harness.median(times)


def step_lines() -> Iterator[Line]:
    pairs = [(step_seconds("", 3), step_seconds("tcp://127.0.0.1:0", 3)) for _ in range(5)]
    more = harness.median([b - a for a, b in pairs])
    alone = harness.median([a for a, _ in pairs])
    figure = f"{more * 1e6:+.0f} us beside {alone * 1e6:.0f} us without a model (median of 5 pairs)"
    yield Line(
        f"a step of 64 sequences with events: at most {MOST_A_STEP * 1e6:.0f} us more",
        figure,
        more <= MOST_A_STEP,
    )


# -- smg -----------------------------------------------------------------------------------------------------
@contextmanager
def router(program: str, policy: str, urls: list[str]) -> Iterator[str]:
    """smg before these servers."""
    port, metrics = harness.free_port(), harness.free_port()
    command = [
        program,
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        policy,
        "--prometheus-port",
        str(metrics),
        "--worker-urls",
        *urls,
    ]
    with Path(os.devnull).open("wb") as nothing:
        process = subprocess.Popen(command, stdout=nothing, stderr=nothing)
    try:
        url = f"http://127.0.0.1:{port}"
        harness.wait_ready(url, process, 60)
        wait_workers(url, len(urls))
        yield url
    finally:
        harness.end(process)


def wait_workers(url: str, servers: int) -> None:
    """Until it knows all servers: it asks them what they are once it runs."""
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/workers", timeout=5) as answer:
                workers = json.load(answer)["workers"]
            if sum(bool(one.get("is_healthy")) for one in workers) >= servers:
                return
        except (urllib.error.URLError, KeyError, ValueError):
            pass
        if time.monotonic() > until:
            raise TimeoutError("smg does not find the servers")
        time.sleep(0.2)


def asked(url: str, prompt: Prompt, tokens: int = ANSWER) -> dict[str, Any]:
    """The answer of a completion."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        made: dict[str, Any] = json.load(answer)
    return made


@dataclass(slots=True)
class Found:
    """What conversations found: prompt tokens, those that were cached, turns behind the first, and of these
    the ones whose replica had all whole blocks of the turn before."""

    prompt: int = 0
    cached: int = 0
    later: int = 0
    held: int = 0


def converse(url: str, mark: str) -> Found:
    """Conversations whose turns alternate, each turn beginning with all before it, in another order each
    time: a round robin finds the same server again by chance."""
    texts = [f"{mark} {n} " + "the house by the sea " * 8 for n in range(TALKS)]
    before, found, dice = [0] * TALKS, Found(), random.Random(11)
    for turn in range(TURNS):
        for place in dice.sample(range(TALKS), TALKS):
            texts[place] += f" and then {turn} {place} " * 3
            made = asked(url, texts[place])
            prompt, cached = kv_subscriber.answer(made)
            found.prompt, found.cached = found.prompt + prompt, found.cached + cached
            if turn:
                found.later += 1
                found.held += cached >= before[place] // BLOCK * BLOCK
            before[place] = prompt
            texts[place] += made["choices"][0]["text"]
    return found


def smg_lines(program: str) -> Iterator[Line]:
    """smg's policies in turns, over servers that are fresh for each conversation's words."""
    with ExitStack() as stack:
        flags = (
            "--served-model-name",
            "tiny",
            "--kv-cache-memory",
            "64M",
            "--threads",
            "1",
            "--block-size",
            str(BLOCK),
        )
        places = [Addresses() for _ in range(2)]
        servers = [
            stack.enter_context(harness.server(*flags, *one.flags, model=str(TINY)))
            for one in places
        ]
        listening = [Subscriber(one.events, one.replay) for one in places]
        for one in listening:
            stack.callback(one.close)
        time.sleep(1)  # until the subscriptions stand
        urls, found = [one.url for one in servers], dict[str, Found]()
        for policy in ("cache_aware", "round_robin"):
            with router(program, policy, urls) as url:
                found[policy] = converse(url, policy[:5])
        aware, turns = found["cache_aware"], found["round_robin"]
        figure = (
            f"{aware.held} of {aware.later} ({aware.held / aware.later:.1%}), with its round robin"
            f" {turns.held} of {turns.later} ({turns.held / turns.later:.1%})"
        )
        what = f"later turns that smg, cache-aware, sent where their talk is held ({TALKS} talks of {TURNS})"
        yield Line(what, figure, aware.held / aware.later > turns.held / turns.later)
        figure = f"{aware.cached / aware.prompt:.1%}, {turns.cached / turns.prompt:.1%} with its round robin"
        yield Line(
            "prompt tokens found through smg, cache-aware, two servers",
            figure,
            aware.cached / aware.prompt > turns.cached / turns.prompt,
        )
        told, well = [], True
        for one, server in zip(listening, servers, strict=True):
            one.listen()
            well &= kv_subscriber.whole(one) and bool(one.index.place)
            well &= server.metric("pageturner:kv_event_batches_dropped_total") == 0
            told.append(f"{len(one.numbers)} batches, {len(one.index.place)} blocks held")
        yield Line("a subscriber beside smg has every batch, in order", "; ".join(told), well)


# -- a subscriber's index and the server's cache -------------------------------------------------------------
class Addresses:
    """Where one server publishes."""

    def __init__(self) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{harness.free_port()}" for _ in range(2))
        self.flags = ("--kv-events", self.events, "--kv-events-replay", self.replay)


def subscriber_lines() -> Iterator[Line]:
    """A client that comes late and loses what comes in the middle; then what its index says of each prompt
    beside what the server finds, in a cache that has no room for all of them."""
    place, rng = Addresses(), random.Random(5)
    flags = (
        "--served-model-name",
        "tiny",
        "--threads",
        "1",
        "--block-size",
        str(BLOCK),
        *place.flags,
        "--kv-cache-memory",
        SMALL,
        "--max-model-len",
        "256",
    )
    stems = [[rng.randrange(200) for _ in range(BLOCK * 4)] for _ in range(6)]

    def prompt() -> list[int]:
        stem = rng.choice(stems)
        return stem[: rng.randrange(1, len(stem))] + [
            rng.randrange(200) for _ in range(rng.randrange(1, 40))
        ]

    with harness.server(*flags, model=str(TINY)) as server:
        for _ in range(20):
            asked(server.url, prompt(), 4)
        client = Subscriber(place.events, place.replay)
        try:
            time.sleep(1)  # until the subscription stands
            asked(server.url, prompt(), 4)
            client.listen()
            late = client.replayed
            for _ in range(10):
                asked(server.url, prompt(), 4)
            client.listen(lose=True)
            equal = 0
            for _ in range(PROMPTS):
                given = prompt()
                asked(server.url, [rng.randrange(200)], 2)  # something to hear, where much was lost
                client.listen(150)
                said = client.index.found(given)
                equal += said == kv_subscriber.answer(asked(server.url, given, 4))[1]
            client.listen()
            figure = (
                f"{len(client.numbers)} batches, {late} of them asked for again when it came late,"
                f" {client.replayed - late} after a gap"
            )
            what = "a subscriber with vLLM's types that came late and lost batches has every one, in order"
            yield Line(
                what, figure, kv_subscriber.whole(client) and late > 0 and client.replayed > late
            )
            figure = f"{equal} of {PROMPTS} prompts, {client.index.removed} blocks were evicted meanwhile"
            yield Line(
                "its index says of each prompt how much the server finds",
                figure,
                equal == PROMPTS and client.index.removed > 0,
            )
        finally:
            client.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--smg", default=shutil.which("smg") or "smg", help="program")


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of events."""
    yield from subscriber_lines()
    if shutil.which(arguments.smg):
        yield from smg_lines(arguments.smg)
    else:
        yield Line("smg before two servers", "not installed: --smg names it", None, run=False)
    yield from step_lines()
    yield pytest_line(
        "an indexer written from the format's definition holds what the cache does; replay, bounds",
        "tests/engine/test_kv_events.py",
    )


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
