"""Schemas that stall: gaps of other streams, memory and steps while schemas with very many optional properties, and
grammars with very many ways, come to a server with a real model.

Each kind is one side of a pair: as long before it the same streams run without it, since others use this machine,
too. `--trust2-grammar-seconds` is the time of a side. The server's KV is small and was written over before
memory is looked at. The first grammar needs the vocabulary, which a server loads once it rests for a second. The
other finding, that nothing is compiled within a step, is counted by tests/engine/test_grammar.py.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import harness
from harness import Line

STREAMS = 4
MAX_GAP = 0.25  # seconds beyond the longest gap without them, on two processors shared by all
KV = "64M"  # is full within the seconds of WARM
WARM = 20.0
REST = 5.0
TRIES = 3  # of a pair that is over
MAX_GROWTH = 1.5  # of the memory of server and engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust2-grammar-seconds", type=float, default=15.0)


def optional(count: int, mark: int) -> dict[str, Any]:
    one = {"type": "string", "maxLength": 50}
    return {"type": "object", "properties": {f"p{mark}_{i}": one for i in range(count)}}


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def wide(count: int, mark: int) -> dict[str, Any]:
    ways = " ".join(f'("{chr(97 + i % 26)}{mark}{i}")?' for i in range(count))
    return {"structured_outputs": {"grammar": f'root ::= "x" wide\nwide ::= {ways}'}}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "the first grammar of a server": lambda mark: form(optional(3, mark)),
    "450 optional properties": lambda mark: form(optional(450, mark)),
    "900 optional properties": lambda mark: form(optional(900, mark)),
    "2,000 optional properties": lambda mark: form(optional(2000, mark)),
    "5,000 optional properties": lambda mark: form(optional(5000, mark)),
    "3 alternatives of 600": lambda mark: form(
        {"anyOf": [optional(600, 9 * mark + k) for k in range(3)]}
    ),
    "a choice of 200,000 characters": lambda mark: {
        "structured_outputs": {"choice": [f"{mark:05}" * 40_000]}
    },
    "a grammar with 3,000 ways behind a letter": lambda mark: wide(3000, mark),
}


def chat(url: str, words: str, tokens: int, **more: Any) -> urllib.request.Request:
    body = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": tokens,
        "temperature": 1,
        **more,
    }
    return harness.request(url, "/v1/chat/completions", body)


def stream(url: str, until: float, gaps: list[float]) -> None:
    """Note the longest gap between two pieces of an answer, answer after answer."""
    while time.monotonic() < until:
        request = chat(url, "Tell a story.", 300, stream=True, ignore_eos=True)
        with urllib.request.urlopen(request, timeout=120) as answer:
            last = None
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now > until:
                    break


def ask(url: str, fields: dict[str, Any]) -> str:
    try:
        with urllib.request.urlopen(chat(url, "An example.", 12, **fields), timeout=120) as answer:
            return str(json.loads(answer.read())["choices"][0]["finish_reason"])
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["error"].get("reason"))


def measured(url: str, kind: str, seconds: float) -> tuple[float, Counter[str]]:
    """The longest gap of the other streams while requests of this kind come, and their outcomes."""
    until, gaps, outcomes = time.monotonic() + seconds, list[float](), Counter[str]()
    threads = [threading.Thread(target=stream, args=(url, until, gaps)) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    mark = 0
    while time.monotonic() < until:
        mark += 1
        if kind:
            outcomes[ask(url, KINDS[kind](mark))] += 1
        else:
            time.sleep(0.1)
    for thread in threads:
        thread.join()
    return max(gaps), outcomes


def lines(options: argparse.Namespace) -> Iterator[Line]:
    seconds = options.trust2_grammar_seconds
    with harness.server("--kv-cache-memory", KV) as server:
        time.sleep(REST)
        measured(server.url, "", WARM)
        before = server.rss_mb()
        for kind in KINDS:
            for _ in range(TRIES):
                alone, _ = measured(server.url, "", seconds)
                gap, outcomes = measured(server.url, kind, seconds)
                if gap <= alone + MAX_GAP:
                    break
            figure = f"{gap * 1e3:.0f} ms beside {alone * 1e3:.0f} ms without; {dict(outcomes)}"
            good = gap <= alone + MAX_GAP and "nothing_allowed" not in outcomes
            yield Line(
                f"longest gap of {STREAMS} other streams (before: 2.4 s): {kind}", figure, good
            )
        after = server.rss_mb()
        figure = f"{before:.0f} MB before, {after:.0f} MB after"
        what = f"memory of server and engine after all of them: at most {MAX_GROWTH} times (before: 2.5)"
        yield Line(what, figure, after <= MAX_GROWTH * before)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
