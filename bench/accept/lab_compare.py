"""What `pageturner compare` must show on the real engine, and its page in a real browser.

Owns the comparisons of `make accept NAME=lab` and which claim each one judges. Everything goes through the
command, as a user would run it. Pages and screenshots stay in build/accept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from harness import ROOT, Line

PAGES = ROOT / "build" / "accept"
ROUNDS = 3
REQUESTS = {"mixed": 64, "stalls": 32, "tenants": 95}
Told = dict[str, Any]


def policies() -> Iterator[Line]:
    """The mixes, each under those it tells apart."""
    batching = _compare("mixed", "static,chunked", "fcfs")
    yield _claim(batching, "continuous batching")
    yield _claim(batching, "p99 of the end-to-end time")
    yield _same(batching, "mixed lengths, static and chunked")
    yield from _shortest_first(_compare("mixed", "chunked", "fcfs,sjf"))
    # A step of the default budget takes 0.3 s on two cores: who minds gaps has smaller ones.
    gaps = _compare("stalls", "prefill_first,chunked", "fcfs", "--max-num-batched-tokens", "128")
    yield _claim(gaps, "stall-free")
    yield from _fair(_compare("tenants", "chunked", "fcfs,fair", "--max-num-seqs", "8"))


def _compare(mix: str, names: str, orders: str, *flags: str) -> Told:
    """The figures that the command wrote."""
    page = PAGES / f"{mix}-{orders.replace(',', '-')}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    words = (
        f"-m pageturner compare smollm2 --mix {mix} --policies {names} --orders {orders}"
        f" --num-prompts {REQUESTS[mix]} --rounds {ROUNDS} --output {page}"
    )
    command = [sys.executable, *words.split(), *flags]
    subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found: Told = json.loads(page.with_suffix(".json").read_text())
    return found


def _claim(told: Told, begin: str) -> Line:
    """A claim as the report itself judges it."""
    claim = next(claim for claim in told["claims"] if claim["text"].startswith(begin))
    figure = claim["measured"] + (f" ({claim['why']})" if claim["why"] else "")
    return Line(claim["text"], figure, claim["verdict"] == "reached")


def _same(told: Told, what: str) -> Line:
    same, requests = told["same_answers"], told["requests"]
    return Line(f"{what}: the same answers in all runs", f"{same} of {requests}", same == requests)


def _shortest_first(told: Told) -> Iterator[Line]:
    yield _claim(told, "sjf")
    mine, other = (
        told["contenders"][name]["ttft_ms"]["max"] / 1e3 for name in ("chunked + sjf", "chunked")
    )
    figure = (
        f"the longest waited {mine:.1f} s, under fcfs {other:.1f} s; ageing after 30 s: see rules"
    )
    yield Line(
        "sjf: nobody waits longer than under fcfs by more than the bound",
        figure,
        mine <= other + 30,
    )


def _fair(told: Told) -> Iterator[Line]:
    yield _claim(told, "fair")
    fair, plain = (told["contenders"][name]["tenants"] for name in ("chunked + fair", "chunked"))
    loud = fair["served"][fair["loudest"]]
    most = max(served for tenant, served in fair["served"].items() if tenant != fair["loudest"])
    figure = (
        f"{fair['loudest_share']:.1%} of the service of {len(fair['served'])} tenants,"
        f" under fcfs {plain['loudest_share']:.1%}; {loud:,.0f} tokens, the best served other {most:,.0f}"
    )
    what = (
        "fair: a tenant with ten times the load gets no more than its share while others have work"
    )
    yield Line(what, figure, loud <= most)
