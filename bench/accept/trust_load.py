"""Load: 2,000 open connections, 500 of which stream, through one API process.

Owns the clients and what is measured. The engine is the fake one, so that only the way through the API
process is measured:

tokens of one core  that reach the clients, for each second of processor time of the API process alone
gap                 between two tokens of a stream, as its client sees it: the 99th percentile over the
                    median. In it are the engine's own hesitations and the client's
delay               from the end of the engine's step to the client: encoding and decoding of the events, the
                    channel, the API process, the kernel, the client's own turn
bare                the delay where a loop of `send` stands in for engine and API process, with as many
                    connections, the same bytes and the same pace: what of it is the kernel's and the client's

The client and the engine share the machine with the API process: on two cores the three compete.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import harness
import stamped_server
from harness import Line

CONNECTIONS, STREAMS, TOKENS = 2000, 500, 2400
STEP_SECONDS = 0.01  # of the fake engine; its own work comes on top
WARM, SECONDS, BARE_SECONDS = 4.0, 12.0, 5.0
LEAST, MAX_ADDED = 20_000, 0.05  # tokens a second of one core; seconds, at the 99th percentile
FIRST = 1000  # token with which the prompt of the first stream begins, that of the next one with the next


@dataclass(slots=True)
class Seen:
    """What the client saw: at `times` so many `counts` of tokens came to `streams`."""

    begin: float
    times: array[float]
    streams: array[int]
    counts: array[int]

    def arrivals(self) -> list[list[float]]:
        """Of each stream, when its tokens came."""
        found: list[list[float]] = [[] for _ in range(STREAMS)]
        for at, stream, count in zip(self.times, self.streams, self.counts, strict=True):
            found[stream] += [at] * count
        return found


def _request(number: int) -> bytes:
    body = {"prompt": [FIRST + number], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    content = json.dumps(body | {"temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def _client(address: tuple[str, int], seconds: float, pipe: Connection) -> None:
    """All connections in one process, which notes when something came and how many events it had: an event
    ends with an empty line. Nothing else is looked at, so that the client costs little."""
    idle = [socket.create_connection(address) for _ in range(CONNECTIONS - STREAMS)]
    chooser, socks = selectors.EpollSelector(), []
    for number in range(STREAMS):
        socks.append(socket.create_connection(address))
        socks[-1].sendall(_request(number))
        chooser.register(socks[-1], selectors.EVENT_READ, number)
    seen = Seen(time.monotonic(), array("d"), array("l"), array("l"))
    broken = bytearray(STREAMS)  # what came last ended in the middle of an empty line
    until = seen.begin + seconds
    while time.monotonic() < until:
        for key, _ in chooser.select(1.0):
            number = key.data
            data = socks[number].recv(1 << 16)
            if not data:
                chooser.unregister(key.fileobj)
                continue
            count = data.count(b"\n\n") + (broken[number] and data[0] == 10)
            broken[number] = data[-1] == 10 and not data.endswith(b"\n\n")
            seen.times.append(time.monotonic())
            seen.streams.append(number)
            seen.counts.append(count)
    pipe.send(seen)
    pipe.recv()  # stay connected until the figures of the server have been read
    assert len(idle) == CONNECTIONS - STREAMS


def _started(
    address: tuple[str, int], seconds: float
) -> tuple[multiprocessing.Process, Connection]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_client, args=(address, seconds, theirs))
    process.start()
    theirs.close()  # so that its death ends our waiting
    return process, ours  # type: ignore[return-value]


def _measured() -> tuple[Seen, dict[int, list[float]], float]:
    """What the client saw, when the tokens of each stream left the engine, and the processor time that the
    API process took between the two ends of the measurement."""
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps"
        port = harness.free_port()
        words = (
            f"{stamped_server.__file__} server smollm2 --port {port} --backend fake --log-level error"
            f" --max-num-seqs {STREAMS} --max-num-batched-tokens 2048"
        )
        command = [sys.executable, *words.split()]
        more = {"PAGETURNER_FAKE_VOCAB": "40000", "PAGETURNER_FAKE_STEP_SECONDS": str(STEP_SECONDS)}
        process = subprocess.Popen(
            command, env={**os.environ, **more, stamped_server.FILE: str(stamps)}
        )
        try:
            harness.wait_ready(f"http://127.0.0.1:{port}", process, 120.0)
            client, pipe = _started(("127.0.0.1", port), WARM + SECONDS)
            time.sleep(2 * WARM)  # it has to start, too
            before, begin = harness.processor_seconds(process.pid), time.monotonic()
            time.sleep(SECONDS / 2)
            spent, end = harness.processor_seconds(process.pid) - before, time.monotonic()
            seen = pipe.recv()
            pipe.send(None)
            client.join(30)
        finally:
            if process.poll() is None:
                harness.end(process)
        return seen, stamped_server.read(stamps).by_prompt(), spent / (end - begin)


def _bare(pace: float, size: int) -> tuple[Seen, dict[int, list[float]]]:
    """The same where a loop sends `size` bytes to each stream every `pace` seconds."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)
    client, pipe = _started(listener.getsockname(), BARE_SECONDS)
    socks, chooser = {}, selectors.EpollSelector()
    for _ in range(CONNECTIONS):
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        chooser.register(sock, selectors.EVENT_READ)
    while len(socks) < STREAMS:
        for key, _ in chooser.select(10.0):
            asked = re.search(rb'"prompt": \[(\d+)', key.fileobj.recv(1 << 16))  # type: ignore[union-attr]
            assert asked, "what the client asks came in parts"
            socks[int(asked[1])] = key.fileobj
    event, left = b"x" * (size - 2) + b"\n\n", array("d")
    while not pipe.poll():
        left.append(time.monotonic())
        for sock in socks.values():
            sock.send(event)  # type: ignore[union-attr]
        time.sleep(max(left[-1] + pace - time.monotonic(), 0.0))
    seen = pipe.recv()
    pipe.send(None)
    client.join(30)
    listener.close()
    return seen, {begin: list(left) for begin in socks}


def delays(seen: Seen, left: dict[int, list[float]], since: float) -> list[float]:
    """From the engine to the client, of all tokens that left after `since`; ascending."""
    found = []
    for number, times in enumerate(seen.arrivals()):
        began = left[FIRST + number]
        found += [at - then for at, then in zip(times, began, strict=False) if then > since]
    return sorted(found)


def _percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def _told(values: list[float]) -> str:
    parts = ((0.5, "median"), (0.99, "99 %"), (0.999, "99.9 %"))
    return ", ".join(f"{name} {1000 * _percentile(values, share):.1f} ms" for share, name in parts)


def lines() -> Iterator[Line]:
    """The tokens a second of one core, what is added to the engine's gap, and the delay on the way."""
    seen, left, share = _measured()
    since = seen.begin + WARM
    arrivals = [[at for at in times if at > since] for times in seen.arrivals()]
    count = sum(map(len, arrivals))
    took = max(times[-1] for times in arrivals) - since
    rate = count / took / share
    what = f"{CONNECTIONS} open connections, {STREAMS} streaming: tokens for a second of one core"
    figure = f"{rate:,.0f} ({count / took:,.0f} a second in fact, with {share:.0%} of a core)"
    yield Line(f"{what}, at least {LEAST:,}", figure, rate >= LEAST)
    gaps = sorted(b - a for times in arrivals for a, b in pairwise(times))
    median = statistics.median(gaps)
    added = _percentile(gaps, 0.99) - median
    what = f"99th percentile of a token's gap over its median, under {MAX_ADDED * 1000:.0f} ms"
    yield Line(what, f"{added * 1000:.0f} ms (gaps: {_told(gaps)})", added < MAX_ADDED)
    delayed = delays(seen, left, since)
    what = f"99th percentile of the delay from the engine's step to the client, under {MAX_ADDED * 1000:.0f} ms"
    yield Line(what, _told(delayed), _percentile(delayed, 0.99) < MAX_ADDED)
    bare, sent = _bare(median, 260)
    what = "the same delay without engine and API process: a loop of send, as many bytes, the same pace"
    yield Line(what, _told(delays(bare, sent, bare.begin + 1.0)), None)

    for line in lines():
        print(line)
