"""Prefill elsewhere: an engine that answers, one that computes its long prompts, and a link that is cut.

Owns what is measured: two engines of one thread each, the one that computes in a process of its own, and the
answers, held bit for bit against those of one engine alone. A relay of bytes stands between them and cuts the
link behind a random number of them; or the other process is killed after a random time.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line, pytest_line  # noqa: E402

from pageturner.config.settings import EngineConfig  # noqa: E402
from pageturner.engine.engine_factory import LoadedEngine, make_engine  # noqa: E402
from pageturner.params import SamplingParams  # noqa: E402
from pageturner.request import Request  # noqa: E402

TIMES, PROMPT, ANSWER = 50, 1024, 16
TOKENS_OF = SamplingParams(temperature=1.0, seed=7, max_tokens=ANSWER, stop_ids=())
HELPER = """
import sys, time
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
engine = make_engine(EngineConfig(model=sys.argv[1], threads=1, block_size=16, kv_cache_memory=64 << 20,
    max_num_batched_tokens=64, role="prefill", prefill_listen="127.0.0.1:0")).engine
print(engine.connectors.prefill_server.port, flush=True)
while True:
    engine.step() if engine.has_work else time.sleep(0.001)
"""


def engine(model: str, port: int = 0) -> LoadedEngine:
    there = {"prefill_from": f"127.0.0.1:{port}", "role": "decode"} if port else {}
    return make_engine(
        EngineConfig(
            model=model,
            threads=1,
            block_size=16,
            kv_cache_memory=64 << 20,
            max_num_batched_tokens=64,
            **there,
        )
    )


def prompt(number: int, vocab: int) -> tuple[int, ...]:
    dice = random.Random(number)
    return tuple(dice.randrange(3, vocab) for _ in range(PROMPT))


def answer(built: LoadedEngine, number: int) -> list[int]:
    """The tokens of one request; beside it nobody runs."""
    events = built.engine.submit(Request(number + 1, prompt(number, built.vocab_size), TOKENS_OF))
    while built.engine.has_work:
        events += built.engine.step()
        time.sleep(0 if built.engine.scheduler.has_work else 0.001)
    return (
        []
        if any(one.failure for one in events)
        else [token for one in events for token in one.tokens]
    )


@contextmanager
def helper(model: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The other engine, and its port."""
    words = [sys.executable, "-c", HELPER, model]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def relay(port: int, after: int) -> int:
    """The port of a link that is cut behind so many bytes of KV."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (data := source.recv(min(most, 65536))):
                sink.sendall(data)
                most -= len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(near, far, 1 << 40), daemon=True).start()
        pump(far, near, after)
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of prefill elsewhere."""
    os.environ["PAGETURNER_PREFILL_KEY"] = secrets.token_hex(16)
    model, times, dice = arguments.prefill_model, arguments.times, random.Random(18)
    alone = engine(model)
    want = [answer(alone, number) for number in range(times)]
    with helper(model) as (_, port):
        here = engine(model, port)
        same = sum(answer(here, number) == want[number] for number in range(times))
        stats = here.engine.stats()
        megabytes, found = (
            stats["kv_received_bytes"] / 1e6,
            stats["cached_tokens"] / (times * PROMPT),
        )
        told = f"{same} of {times} equal; {found:.1%} of their tokens came, {megabytes:.1f} MB"
        yield Line(
            "answers are bit for bit those of one engine alone", told, same == times and found > 0.9
        )
        whole = int(stats["kv_received_bytes"] / times)
        same = cut = 0
        for number in range(times):
            here = engine(model, relay(port, dice.randrange(whole)))
            same += answer(here, number) == want[number]
            cut += here.engine.stats()["prefill_fallback_broken"] == 1
        told = (
            f"{times - same} changed or lost of {times}; {cut} links were cut before the last block"
        )
        yield Line("the link is cut at random", told, same == times and cut > times / 2)
    same = short = 0
    for number in range(times):
        with helper(model) as (process, port):
            here = engine(model, port)
            timer = threading.Timer(dice.random() * arguments.killed_within, process.kill)
            timer.start()
            same += answer(here, number) == want[number]
            timer.cancel()
            short += here.engine.stats()["kv_received_blocks"] < (PROMPT - 1) // 16
    told = f"{times - same} changed or lost of {times}; {short} kills came before the last block"
    yield Line("the engine that computes is killed at random", told, same == times and short > 0)
    yield pytest_line(
        "peers that do not fit, hostile bytes, cut links", "tests/engine/test_remote_prefill.py"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    tiny = str(HERE.parent.parent / "tests" / "goldens" / "tiny_llama.gguf")
    parser.add_argument("--prefill-model", default=tiny, help="model of the two engines")
    parser.add_argument("--times", type=int, default=TIMES, help="answers of each kind")
    parser.add_argument("--killed-within", type=float, default=0.05, help="seconds")


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
