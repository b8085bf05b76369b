"""KV events: what they cost a step, and a foreign router, smg, before two servers.

Steps of an engine without a model run with events and without in turns; conversations go through smg's
cache-aware policy and its round robin. That an indexer of vLLM's kind holds what the cache does is held by
tests/engine/test_kv_events.py. `--smg` names the program; where it is absent the line is NOT RUN.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
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
from harness import Line  # noqa: E402

from pageturner.config.settings import EngineConfig  # noqa: E402
from pageturner.engine.engine_factory import make_engine  # noqa: E402
from pageturner.params import SamplingParams  # noqa: E402
from pageturner.request import Request  # noqa: E402

TINY = harness.ROOT / "tests" / "goldens" / "tiny_llama.gguf"
TALKS, TURNS, ANSWER, BLOCK = 16, 5, 8, 16
Prompt = str | list[int]
MAX_A_STEP = 200e-6  # seconds of a step that events may take at 64 sequences


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
        f"a step of 64 sequences with events: at most {MAX_A_STEP * 1e6:.0f} us more",
        figure,
        more <= MAX_A_STEP,
    )


# -- smg -----------------------------------------------------------------------------------------------------
@contextmanager
def router(program: str, policy: str, urls: list[str]) -> Iterator[str]:
    """smg before these servers."""
    port = harness.free_port()
    words = (
        f"launch --host 127.0.0.1 --port {port} --policy {policy} --worker-urls {' '.join(urls)}"
    )
    metrics = f"--prometheus-port {harness.free_port()}"
    with harness.running([program, *words.split(), *metrics.split()], port) as smg:
        wait_workers(smg.url, len(urls))
        yield smg.url


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
            prompt = made["usage"]["prompt_tokens"]
            cached = (made["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
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
        flags = f"--served-model-name tiny --kv-cache-memory 64M --threads 1 --block-size {BLOCK}".split()
        servers = [stack.enter_context(harness.server(*flags, model=str(TINY))) for _ in range(2)]
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


# -- a subscriber's index and the server's cache -------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--smg", default=shutil.which("smg") or "smg", help="program")


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    yield from step_lines()
    if shutil.which(arguments.smg):
        yield from smg_lines(arguments.smg)
    else:
        yield Line("smg before two servers", "not installed: --smg names it", None, run=False)
