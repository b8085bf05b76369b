"""Soak: a million requests through one server with the fake engine, and the memory of its two processes.

Owns the clients, the requests and what counts as growth. Everything is the product's but for the model:
HTTP, parsing, the channel, scheduler, blocks, prefix cache, detokenizing. No two requests are the same: other
prompts, ids, users and salts, so that whatever is kept by one of these grows. Some are refused, some clients
leave in the middle, some answers are streamed, have several choices, logprobs or a stop string.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection

import harness
from harness import Line, Server

CONNECTIONS = 48
WORDS = 400  # of which prompts are made
SETTLED = 0.3  # of the requests: what is bounded has reached its bound by then
MAX_GROWTH_MB = (
    8.0  # between the first and the last third of what follows; that much it goes up and down
)
SAMPLE_EVERY = 1.0  # seconds


class Client:
    """One connection with one request under way. dice: decides what is asked."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        self.address, self.dice = address, random.Random(number)
        self.sock = socket.create_connection(address)
        self._got = b""

    def ask(self, id: int) -> None:
        """Send a request of this id."""
        dice, self._got = self.dice, b""
        self._leaves = dice.random() < 0.05
        words = " ".join(f"w{dice.randrange(WORDS)}" for _ in range(dice.randrange(1, 40)))
        body = {
            "prompt": words,
            "max_tokens": dice.randrange(1, 12),
            "seed": id,
            "stream": dice.random() < 0.5,
        }
        if dice.random() < 0.1:
            body |= {"n": 2}
        if dice.random() < 0.1:
            body |= {"logprobs": 2}
        if dice.random() < 0.1:
            body |= {"stop": [f"w{id}", "e"]}
        if dice.random() < 0.1:
            body |= {"user": f"user {id}", "cache_salt": f"salt {id}"}
        if dice.random() < 0.02:
            body |= {"temperature": -id}  # refused
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: r{id}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.sock.sendall(head.encode() + content)

    def take(self) -> str:
        """Take what has come. Returns how the request ended, "" while it has not."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise RuntimeError(f"the server closed a connection: {self._got[-300:]!r}")
        self._got += data
        if self._leaves:
            self.sock.close()
            self.sock = socket.create_connection(self.address)
            return "left"
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end:
            return ""
        if b"chunked" in head:
            whole = body.endswith(b"0\r\n\r\n")
        else:
            whole = len(body) == int(head.lower().split(b"content-length: ")[1].split()[0])
        return head[9:12].decode() if whole else ""


def _clients(address: tuple[str, int], requests: int, pipe: Connection) -> None:
    """All requests, one after the other on each connection; tells how many have ended, and at the end how."""
    chooser = selectors.EpollSelector()
    asked, ended, ends = 0, 0, Counter[str]()
    for number in range(min(CONNECTIONS, requests)):
        client = Client(address, number)
        client.ask(asked := asked + 1)
        chooser.register(client.sock, selectors.EVENT_READ, client)
    told = 0.0
    while ended < requests:
        for key, _ in chooser.select(10.0):
            client, before = key.data, key.fileobj
            end = client.take()
            if not end:
                continue
            ended, ends[end] = ended + 1, ends[end] + 1
            if client.sock is not before:
                chooser.unregister(before)
                chooser.register(client.sock, selectors.EVENT_READ, client)
            if asked < requests:
                client.ask(asked := asked + 1)
        if time.monotonic() > told + SAMPLE_EVERY:
            told = time.monotonic()
            pipe.send(ended)
    pipe.send(ends)


def growth(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """MB by which memory grew from the first third to the last one, by their medians, and the slope in MB for
    a million requests. samples: (requests so far, MB)."""
    third = max(1, len(samples) // 3)
    first, last = samples[:third], samples[-third:]
    grown = statistics.median(mb for _, mb in last) - statistics.median(mb for _, mb in first)
    slope = (
        statistics.linear_regression(*zip(*samples, strict=True)).slope if len(samples) > 2 else 0.0
    )
    return grown, slope * 1e6


def _soaked(
    server: Server, requests: int
) -> tuple[Counter[str], dict[str, list[tuple[float, float]]], float]:
    host, port = server.url.removeprefix("http://").split(":")
    process, ours = harness.spawn(_clients, (host, int(port)), requests)
    pids = {"API process": server.process.pid, "engine": server.engine_pid()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
    begin = time.monotonic()
    while isinstance(ended := ours.recv(), int):
        for name, pid in pids.items():
            samples[name].append((ended, harness.rss_mb(pid)))
    process.join(30)
    return ended, samples, time.monotonic() - begin


def lines(requests: int) -> Iterator[Line]:
    """How the requests ended, and how memory went on."""
    flags = ("--backend", "fake", "--log-level", "error", "--max-num-seqs", str(CONNECTIONS))
    with harness.server(*flags) as server:
        ends, samples, seconds = _soaked(server, requests)
        restarts = server.metric("pageturner:engine_restarts_total")
    wrong = {end: count for end, count in ends.items() if end not in ("200", "400", "left")}
    figure = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    figure += f"; {requests / seconds:,.0f} a second, {restarts:.0f} restarts"
    yield Line(
        f"{requests:,} requests over HTTP: each ends as it should",
        figure,
        not wrong and not restarts,
    )
    for name, all in samples.items():
        settled = [sample for sample in all if sample[0] > SETTLED * requests]
        grown, slope = growth(settled or all)
        figure = (
            f"{grown:+.1f} MB of {all[-1][1]:.0f} ({slope:+.1f} MB for a million, {len(all)} looks)"
        )
        what = f"memory of the {name} behind the first {SETTLED:.0%}, under {MAX_GROWTH_MB:.0f} MB more"
        yield Line(what, figure, grown < MAX_GROWTH_MB)


if __name__ == "__main__":
    sys.exit(harness.run("soak", {"soak": lambda: lines(1_000_000)}))
