"""Load: 2,000 open connections, 500 of which stream, through one API process.

Owns the clients and what is measured: tokens that reach them for each second of processor time of the API
process, and how much later than the engine's steps they come. The engine is the fake one, so that only the
way through the API process is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import house_base
import house_speed
from harness import Line

CONNECTIONS, STREAMS, TOKENS = 2000, 500, 1200
STEP_SECONDS = 0.02
WARM, SECONDS = 4.0, 12.0
LEAST, MOST_ADDED = 20_000, 0.05  # tokens a second of one core; seconds, at the 99th percentile


def _client(host: str, port: int, pipe: Connection) -> None:
    """All connections in one process: counts tokens, and notes the gaps of a few streams."""
    idle = [socket.create_connection((host, port)) for _ in range(CONNECTIONS - STREAMS)]
    body = {"prompt": "a", "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
    chooser = selectors.DefaultSelector()
    for number in range(STREAMS):
        content = json.dumps(body | {"prompt": f"stream {number}"}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        sock = socket.create_connection((host, port))
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        chooser.register(sock, selectors.EVENT_READ, number)
    begin, count, ended = time.monotonic(), 0, 0
    last, gaps = {}, []
    while time.monotonic() < begin + WARM + SECONDS and ended < STREAMS:
        for key, _ in chooser.select(1.0):
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            now = time.monotonic()
            if not data:
                chooser.unregister(key.fileobj)
                ended += 1
                continue
            if now < begin + WARM:
                pipe.send(None) if not last else None
                last[key.data] = now
                continue
            count += data.count(b"data: {")
            gaps.append(now - last.get(key.data, now))
            last[key.data] = now
    pipe.send((count, sorted(gaps), ended, len(idle)))


def lines() -> Iterator[Line]:
    """The tokens a second of one core, and what is added to the engine's gap."""
    environment = {"PAGETURNER_FAKE_VOCAB": "40000", "PAGETURNER_FAKE_STEP_SECONDS": str(STEP_SECONDS)}
    flags = ("--backend", "fake", "--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", "2048")
    with house_base.serving(house_base.ours(), *flags, **environment) as address:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_client, args=(address.host, address.port, theirs))
        process.start()
        ours.recv()  # the first token has come
        time.sleep(WARM)
        before, begin = house_speed.processor_seconds(address.pid), time.monotonic()
        count, gaps, ended, idle = ours.recv()
        spent, wall = house_speed.processor_seconds(address.pid) - before, time.monotonic() - begin
        process.join(30)
    rate, added = count / spent, gaps[int(0.99 * len(gaps))] - statistics.median(gaps)
    what = f"{idle + STREAMS} open connections, {STREAMS} streaming: tokens for a second of one core"
    figure = f"{rate:,.0f} ({count / wall:,.0f} a second, with {spent / wall:.0%} of a core; {ended} ended)"
    yield Line(f"{what}, at least {LEAST:,}", figure, rate >= LEAST)
    figure = f"{added * 1000:.0f} ms (median gap {statistics.median(gaps) * 1000:.0f} ms)"
    yield Line(
        f"99th percentile of a token's gap over its median, under {MOST_ADDED * 1000:.0f} ms",
        figure,
        added < MOST_ADDED,
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for line in lines():
        print(line)
