"""Trust, second pass, on the wire: uploads, the page, lack of memory, SIGHUP, Host, flags, Ollama's streams that move,
and /health beside crowds. Each line says what 405d642 did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import harness
from harness import Line, Server

TINY = str(harness.ROOT / "tests" / "goldens" / "tiny_llama.gguf")
TINY_FLAGS = ("--served-model-name", "tiny", "--kv-cache-memory", "64M", "--threads", "1")
MAX_HEALTH = 50  # milliseconds
CROWDS = 3
TOKENS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wire-kills", type=int, default=6, help="replicas killed under streams")


def status_of(url: str, *lines: str) -> int:
    """The status of the answer to a head of these lines."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), 10) as connection:
        connection.sendall("\r\n".join([*lines, "connection: close", "", ""]).encode())
        return int(connection.recv(64).split(b" ")[1])


def heads(urls: dict[str, str]) -> Iterator[Line]:
    told = {name: status_of(url, "GET /health HTTP/1.1") for name, url in urls.items()}
    yield Line("HTTP/1.1 without Host (before: 200)", json.dumps(told), set(told.values()) == {400})
    foreign = status_of(urls["server"], "GET / HTTP/1.1", "host: evil.example")
    own = status_of(urls["server"], "GET / HTTP/1.1", "host: localhost")
    figure = f"{foreign}, {own} under its own"
    yield Line("`/` under a foreign Host (before: 200)", figure, (foreign, own) == (403, 200))


def hangups(programs: dict[str, Server]) -> Line:
    """SIGHUP to programs that have nothing to read again."""
    for one in programs.values():
        one.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    told = {name: one.process.poll() for name, one in programs.items()}
    what = "exit status after SIGHUP without keys or certificates (before: -1)"
    return Line(what, json.dumps(told), set(told.values()) == {None})


def chat(url: str, number: int) -> str:
    """The text of a streamed chat in Ollama's shape, or what went wrong with it."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"story {number}"}],
        "options": {"num_predict": TOKENS, "temperature": 0},
    }
    text = ""
    try:
        with urllib.request.urlopen(harness.request(url, "/api/chat", body), timeout=120) as answer:
            for raw in answer:
                line = json.loads(raw)
                if "error" in line:
                    return f"ERROR {line['error']}"
                text += line["message"]["content"]
                if line["done"]:
                    return text
    except OSError as error:
        return f"ERROR {error}"
    return "ERROR cut"


def moves(kills: int) -> Line:
    """Streams of Ollama's shape while their replicas are killed, one after the other."""
    streams, counts = 8, Counter[str]()
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(harness.server(*TINY_FLAGS, model=TINY))
        wanted = [chat(alone.url, number) for number in range(streams)]
        ports = [harness.free_port() for _ in range(2)]

        def replica(port: int) -> Server:
            command = harness.command("serve", TINY, "--port", str(port), *TINY_FLAGS)
            return stack.enter_context(harness.running(command, port))

        replicas = [replica(port) for port in ports]
        front = harness.router(*(one.url for one in replicas), flags=("--health-interval", "0.2"))
        router = stack.enter_context(front)
        for kill in range(kills):
            with ThreadPoolExecutor(streams) as pool:
                asked = [pool.submit(chat, router.url, number) for number in range(streams)]
                time.sleep(0.3)
                replicas[kill % 2].process.kill()
                replicas[kill % 2].process.wait()
                told = [one.result() for one in asked]
            counts["lost"] += sum(text.startswith("ERROR") for text in told)
            counts["changed"] += sum(
                text != want and not text.startswith("ERROR")
                for text, want in zip(told, wanted, strict=True)
            )
            replicas[kill % 2] = replica(ports[kill % 2])
            time.sleep(1.0)  # the router finds it again
        moved = router.metric("pageturner:router_moved_total")
    asked_for = kills * streams
    figure = f"{moved:.0f} moves, {counts['lost']} lost, {counts['changed']} changed of {asked_for}"
    what = f"Ollama's streams under {kills} kill -9 of two replicas (before: 2 of 30 cut)"
    return Line(what, figure, moved > 0 and not counts["lost"] + counts["changed"])


def looks(urls: list[str], pipe: Connection) -> None:
    """Ask for /health of each, in turns, in a process of its own, until something comes."""
    told: list[list[float]] = [[] for _ in urls]
    while not pipe.poll():
        for url, seconds in zip(urls, told, strict=True):
            begin = time.monotonic()
            harness.fetch(url, "/health")
            seconds.append(1e3 * (time.monotonic() - begin))
            time.sleep(0.005)
    pipe.send([sorted(seconds) for seconds in told])


def health(busy: str, idle: str) -> Line:
    """The slowest of many /health while prompts of a crowd come and go; as slow as one is at a server without
    a crowd meanwhile, it is this machine."""

    def crowd(number: int) -> None:
        body = {"prompt": [f"{number} {n} word " * 20 for n in range(32)], "max_tokens": 4}
        harness.fetch(busy, "/v1/completions", body)

    watcher, pipe = harness.spawn(looks, [busy, idle])
    time.sleep(2.0)
    for _ in range(CROWDS):
        harness.in_threads(8, crowd)
    pipe.send(None)
    with_crowds, without = pipe.recv()
    watcher.join()
    last = int(0.99 * len(with_crowds))
    figure = f"worst {with_crowds[-1]:.0f} ms, p99 {with_crowds[last]:.0f} ms of {len(with_crowds)}; of a server"
    figure += f" without them meanwhile {without[-1]:.0f} and {without[last]:.0f} ms"
    what = f"/health within {MAX_HEALTH} ms beside crowds of 8 x 32 prompts, more than without them"
    return Line(what, figure, with_crowds[-1] <= MAX_HEALTH + without[-1])


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield from harness.proved("trust2_wire")
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(harness.server(*TINY_FLAGS, model=TINY))
        router = stack.enter_context(harness.router(one.url))
        yield from heads({"server": one.url, "router": router.url})
        other = stack.enter_context(harness.server(*TINY_FLAGS, model=TINY))
        yield health(one.url, other.url)
        yield hangups({"server": one, "router": router})
    yield moves(options.wire_kills)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
