"""Measures what an open page costs, in pairs: the same requests to the same server, with somebody who polls as the page
does and with nobody, by turns, one first and then the other. What the page does is part `page` of hour.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import harness
from harness import Line, NotRun, median

from pageturner.formats import hub

MODEL = "smollm2-135m-instruct-q4_1.gguf"
POLL = 0.4  # seconds, as engine.js
CLIENTS, TOKENS = 16, 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--page-rounds", type=int, default=8, help="pairs of the cost")


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """The cost of an open page."""
    path = hub.cache_folder() / MODEL
    if not path.is_file():
        raise NotRun(f"{MODEL} is absent: make model")
    with harness.server(model=str(path)) as server:
        yield _cost(server, arguments.page_rounds)


# -- what it costs -------------------------------------------------------------------------------------------
def _cost(server: harness.Server, rounds: int) -> Line:
    """Processor time of both processes while the page polls, beside nobody who does: what other processes of
    the machine do counts for neither."""
    _load(server.url, 0)
    ratios, paces, each = [], [], []
    for number in range(rounds):
        spent, pace = {}, {}
        for polled in (False, True) if number % 2 else (True, False):
            time.sleep(0.0 if polled else 3.2)  # until the engine notes no steps any more
            before = harness.processor_seconds(server.process.pid, server.engine_pid())
            with _polling(server.url) if polled else contextlib.nullcontext():
                pace[polled] = _load(server.url, 2 * number + polled + 1)
            spent[polled] = (
                harness.processor_seconds(server.process.pid, server.engine_pid()) - before
            )
        ratios.append(spent[True] / spent[False])
        paces.append(pace[True] / pace[False])
        # it asks by the clock: a machine that is slow because it is busy computes less between two looks
        each.append(1000 * (spent[True] - spent[False]) * pace[True] / (CLIENTS * TOKENS))
    said = (
        f"{100 * (median(ratios) - 1):+.2f} % processor time ({100 * (min(ratios) - 1):+.1f} to "
        f"{100 * (max(ratios) - 1):+.1f}, {rounds} pairs), pace {median(paces):.3f}x,"
        f" {median(each):.1f} ms of a processor each second that it is open"
    )
    return Line("an open page costs under 1 %", said, median(ratios) <= 1.01)


def _load(url: str, mark: int) -> float:
    """Tokens a second of some requests at once, whose prompts nobody asked before."""
    begun = time.monotonic()

    def one(number: int) -> None:
        body = {
            "prompt": f"{mark} {number} " + "word " * (8 + 5 * number),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()

    harness.in_threads(CLIENTS, one)
    return CLIENTS * TOKENS / (time.monotonic() - begun)


class _polling:
    """Asks as an open page does, on one connection after another."""

    def __init__(self, url: str) -> None:
        self._url, self._end = url, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        since = 0
        while not self._end.wait(POLL):
            with urllib.request.urlopen(f"{self._url}/v1/live?since={since}", timeout=30) as answer:
                steps = json.load(answer)["steps"]
            since = max([since, *(step["number"] for step in steps if step["ended_s"])])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(60)
