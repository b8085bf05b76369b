"""KV events: what they cost a step, and a foreign router, smg, before two servers that publish them.

Owns what is measured: steps of an engine without a model, with events and without in turns; conversations
through smg's cache-aware policy and its round robin, on a tiny model, and a subscriber beside them that hears
every batch. smg is found on the path or beside this Python: `pip install smg`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
import msgspec  # noqa: E402
from harness import Line, NotRun, Server, pytest_line  # noqa: E402

from pageturner.config import EngineConfig  # noqa: E402
from pageturner.params import SamplingParams  # noqa: E402
from pageturner.request import Request  # noqa: E402
from pageturner.runtime.engine_factory import make_engine  # noqa: E402

TINY = harness.ROOT / "tests" / "goldens" / "tiny_llama.gguf"
TALKS, TURNS, ANSWER = 16, 5, 8
MOST_A_STEP = 200e-6  # seconds of a step that events may take at 64 sequences


# -- what a step pays ----------------------------------------------------------------------------------------
def step_seconds(address: str, rounds: int) -> float:
    """Median seconds of a step of 64 sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=120, stop_ids=())
    config = EngineConfig(backend="null", kv_events=address, max_num_seqs=64, max_num_batched_tokens=2048)
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
    yield Line(f"a step of 64 sequences with events: at most {MOST_A_STEP * 1e6:.0f} us more", figure,
               more <= MOST_A_STEP)  # fmt: skip


# -- smg -----------------------------------------------------------------------------------------------------
def smg() -> str:
    found = shutil.which("smg") or shutil.which("smg", path=str(Path(sys.executable).parent))
    if found is None:
        raise NotRun("smg is not installed: pip install smg")
    return found


@contextmanager
def router(policy: str, urls: list[str]) -> Iterator[str]:
    """smg before these servers."""
    port, metrics = harness.free_port(), harness.free_port()
    command = [smg(), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
               "--prometheus-port", str(metrics), "--worker-urls", *urls]  # fmt: skip
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


def asked(url: str, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def converse(url: str, mark: str) -> list[str]:
    """Conversations whose turns alternate, each turn beginning with all before it; in no order that a round
    robin could keep."""
    texts = [f"{mark} {n} " + "the house by the sea " * 8 for n in range(TALKS)]
    for turn in range(TURNS):
        for n in range(TALKS):
            place = (n * 5 + turn * 3) % TALKS
            texts[place] += f" and then {turn} {place} " * 3
            texts[place] += asked(url, texts[place])
    return texts


def heard(socket: Any) -> tuple[list[int], set[int]]:
    """Numbers of batches so far, and the blocks that are held by them."""
    numbers: list[int] = []
    blocks: set[int] = set()
    while socket.poll(500):
        _, number, data = socket.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        for event in msgspec.msgpack.decode(data)[1]:
            if event[0] == "BlockStored":
                blocks |= set(event[1])
            elif event[0] == "BlockRemoved":
                blocks -= set(event[1])
            else:
                blocks.clear()
    return numbers, blocks


def found_share(servers: list[Server], before: list[tuple[float, float]]) -> float:
    """Share of prompt tokens found in the prefix caches since `before`."""
    now = figures(servers)
    found = sum(a[0] - b[0] for a, b in zip(now, before, strict=True))
    return found / sum(a[1] - b[1] for a, b in zip(now, before, strict=True))


def figures(servers: list[Server]) -> list[tuple[float, float]]:
    time.sleep(1)  # figures come four times a second
    names = ("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total")
    return [(one.metric(names[0]), one.metric(names[1])) for one in servers]


def smg_lines() -> Iterator[Line]:
    import zmq

    smg()
    with ExitStack() as stack:
        addresses = [f"tcp://127.0.0.1:{harness.free_port()}" for _ in range(2)]
        flags = ("--served-model-name", "tiny", "--kv-cache-memory", "64M", "--threads", "1")
        servers = [
            stack.enter_context(harness.server(*flags, "--kv-events", address, model=str(TINY)))
            for address in addresses
        ]
        sockets = []
        for address in addresses:
            sockets.append(zmq.Context.instance().socket(zmq.SUB))
            sockets[-1].setsockopt(zmq.SUBSCRIBE, b"")
            sockets[-1].connect(address)
        time.sleep(1)  # until the subscriptions stand
        urls, shares, texts = [one.url for one in servers], {}, {}
        for policy in ("cache_aware", "round_robin"):
            before = figures(servers)
            with router(policy, urls) as url:
                texts[policy] = converse(url, policy[:5])
            shares[policy] = found_share(servers, before)
        better = shares["cache_aware"] > shares["round_robin"]
        figure = f"{shares['cache_aware']:.1%}, {shares['round_robin']:.1%} with its round robin"
        what = f"prompt tokens found through smg, cache-aware, two servers ({TALKS} talks, {TURNS} turns)"
        yield Line(what, figure, better)
        direct = [asked(urls[0], texts["cache_aware"][0][:200]) for _ in range(2)]
        yield Line("answers come through whole", f"{len(direct[0])} characters", direct[0] == direct[1])
        told, whole = [], True
        for socket, server in zip(sockets, servers, strict=True):
            numbers, blocks = heard(socket)
            whole &= bool(numbers) and numbers == list(range(numbers[0], numbers[-1] + 1)) and bool(blocks)
            told.append(f"{len(numbers)} batches, {len(blocks)} blocks held")
            whole &= server.metric("pageturner:kv_event_batches_dropped_total") == 0
            socket.close(0)
        yield Line("a subscriber beside it hears every batch, in order", "; ".join(told), whole)


def lines(_: argparse.Namespace) -> Iterator[Line]:
    """Every line of events."""
    yield from step_lines()
    yield from smg_lines()
    yield pytest_line(
        "an indexer written from the format's definition holds what the cache does; replay, bounds",
        "tests/runtime/test_kv_events.py",
    )


if __name__ == "__main__":
    sys.exit(harness.alone(lines, lambda parser: None, __doc__))
