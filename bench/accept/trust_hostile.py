"""Hostile requests beside ordinary streams: who is slowed, what is kept, what breaks.

Owns how the harm is measured: the gaps between the tokens of ordinary streams with an attacker and without
one, the answers of /health, the memory of the API process, 500s and restarts. The attacks are those of
bench/hostile_requests.py.

A gap may grow by MORE_GAP, or by the attacker's fair share of tokens: where its prompts were computed, by as
long as a step takes that is full of an ordinary client's prompt: the longest of nine at first. Attackers and
ordinary clients are processes of their own, so that neither slows the other down by sharing an interpreter.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness
from harness import Line, Server

import hostile_requests as hostile

STREAMS, TOKENS = 16, 120
PATIENCE = 6.0  # seconds after which an attacker leaves
INTENSITIES = {"one": (1, 1), "eight in a row": (8, 1), "eight at once": (1, 8)}  # times, at once
MORE_GAP = 0.1  # seconds by which a gap may grow
ORDINARY = 10  # tokens of a prompt of the streams themselves
BUDGET = 512  # tokens of a step, the server's default: a prompt of as many is a whole share
HEALTH = 0.05  # seconds
TIMES_BODY = 4.0  # how many times its body a request may cost in memory
SLACK_MB = 8.0  # that memory differs by when nothing happens
KEY = os.environ.get("TRUST_KEY", "")  # of ordinary clients, also in their process
HEADERS = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
BACK = 10.0  # seconds until memory has come back
CALM_WINDOWS, CALM_SECONDS = 12, 2.0


# -- ordinary clients ----------------------------------------------------------------------------------------


class Clients:
    """STREAMS clients in a process of their own, each of which asks again when its answer is complete."""

    def __init__(self, url: str) -> None:
        self._process, self._pipe = harness.spawn(_clients, url)

    def gap(self, begin: float, end: float) -> tuple[float, float, int]:
        """The longest wait within this time, in seconds: of any stream for its next token, and of any request
        for its first one; and how many of these came."""
        self._pipe.send((begin, end))
        found: tuple[float, float, int] = self._pipe.recv()
        return found

    def close(self) -> tuple[int, int]:
        """End them. Returns the answers, and how many of these were not what they were at first."""
        self._pipe.send(None)
        answers, differ = self._pipe.recv()
        self._process.join(30)
        return answers, differ


@dataclass(slots=True)
class _Seen:
    gaps: list[tuple[float, float]] = field(default_factory=list)  # end of a wait, its length
    # the same, of waits for a first token
    firsts: list[tuple[float, float]] = field(default_factory=list)
    last: dict[int, float] = field(default_factory=dict)  # client -> when its last token came
    # client that has no token yet -> since when
    asked: dict[int, float] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    answers: int = 0
    differ: int = 0
    stop: bool = False


def _clients(url: str, pipe: Connection) -> None:
    seen = _Seen()
    threads = [
        threading.Thread(target=_client, args=(url, n, seen), daemon=True) for n in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    while (asked := pipe.recv()) is not None:
        begin, end = asked
        pipe.send(
            (
                _longest(seen.gaps, seen.last, begin, end),
                _longest(seen.firsts, seen.asked, begin, end),
                sum(begin <= at <= end for at, _ in list(seen.firsts)),
            )
        )
    seen.stop = True
    for thread in threads:
        thread.join(20)
    pipe.send((seen.answers, seen.differ))


def _longest(
    waits: list[tuple[float, float]], since: dict[int, float], begin: float, end: float
) -> float:
    """Of waits that ended within this time, and of those that go on."""
    found = [length for at, length in list(waits) if begin <= at <= end + length]
    return max([*found, *(end - last for last in list(since.values()) if last < end)], default=0.0)


def _client(url: str, number: int, seen: _Seen) -> None:
    body = json.dumps(
        {
            "prompt": f"Story {number}: once upon a time",
            "max_tokens": TOKENS,
            "stream": True,
            "seed": number,
            "temperature": 0.7,
            "ignore_eos": True,
        }
    )
    while not seen.stop:
        text = ""
        try:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
            connection.request("POST", "/v1/completions", body, HEADERS)
            seen.last.pop(number, None)
            seen.asked[number] = time.monotonic()
            answer = connection.getresponse()
            if answer.status == 429:  # told to come again, which is no answer
                time.sleep(0.25)
                continue
            for line in answer:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if (asked := seen.asked.pop(number, None)) is not None:
                        seen.firsts.append((now, now - asked))
                    else:
                        seen.gaps.append((now, now - seen.last[number]))
                    seen.last[number] = now
                    text += json.loads(line[6:])["choices"][0]["text"]
            connection.close()
        except (OSError, http.client.HTTPException, KeyError):
            text += "(broken)"
        if seen.stop:
            break
        seen.answers += 1
        seen.differ += seen.texts.setdefault(number, text) != text


# -- the attacker --------------------------------------------------------------------------------------------


class Attacker:
    """A process that carries out attacks of the catalogue by their number."""

    def __init__(self, url: str, seed: int) -> None:
        self._process, self._pipe = harness.spawn(_attacker, url, seed)

    def attack(self, number: int, times: int, at_once: int) -> list[hostile.Outcome]:
        """Carry it out; returns when all have been answered or have left."""
        self._pipe.send((number, times, at_once))
        return list(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def _attacker(url: str, seed: int, pipe: Connection) -> None:
    address, attacks = urlsplit(url), hostile.catalogue(seed)
    host, port = str(address.hostname), int(address.port or 0)
    with ThreadPoolExecutor(8) as pool:
        while (asked := pipe.recv()) is not None:
            number, times, at_once = asked
            outcomes: list[hostile.Outcome] = []
            until = time.monotonic() + PATIENCE

            def one(_: int, number: int = number, until: float = until) -> hostile.Outcome:
                patience = max(0.2, until - time.monotonic())
                try:
                    return attacks[number].act(host, port, patience)
                except OSError:
                    return hostile.Outcome(0, 0)

            for _ in range(times):
                outcomes += pool.map(one, range(at_once))
                if time.monotonic() > until:
                    break
            pipe.send(outcomes)


# -- what is looked at meanwhile -----------------------------------------------------------------------------


class Watch:
    """Asks /health and looks at the memory of the API process, all the time, in a thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._netloc = urlsplit(server.url).netloc
        self.health: list[
            tuple[float, float]
        ] = []  # when asked, seconds; infinite if not answered well
        self.memory: list[tuple[float, float]] = []
        self._stop = False
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._ask, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._netloc, timeout=30)
        while not self._stop:
            begin, seconds = time.monotonic(), float("inf")
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    seconds = time.monotonic() - begin
            except (OSError, http.client.HTTPException):
                connection.close()
            self.health.append((begin, seconds))
            time.sleep(0.02)

    def _look(self) -> None:
        while not self._stop:
            self.memory.append((time.monotonic(), api_mb(self._server)))
            time.sleep(0.02)

    def close(self) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join(35)


def most(seen: list[tuple[float, float]], begin: float, end: float) -> float:
    return max((value for at, value in list(seen) if begin <= at <= end), default=0.0)


def api_mb(server: Server) -> float:
    """Resident memory of the API process and of all its children but the engine, in MB."""
    pid = server.process.pid
    total = 0.0
    for one in (pid, *harness.children(pid)):
        try:
            if b"engine.worker" not in Path(f"/proc/{one}/cmdline").read_bytes():
                total += harness.rss_mb(one)
        except (OSError, StopIteration):
            continue
    return total


# -- lines ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Harm:
    """What one attack at one intensity did."""

    attack: str
    gap: float  # seconds between two tokens of a stream; once judged, by how much they grew
    first: float  # seconds until the first token of one
    tokens: int  # of prompts, computed in the meantime
    health: float
    memory: float  # MB over rest
    body: float  # MB, of all that was sent at once
    errors: list[str]
    seconds: float
    unfair: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hostile-seed", type=int, default=1)
    parser.add_argument("--hostile-most", type=int, default=10_000, help="requests")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Every attack at every intensity."""
    seed = options.hostile_seed
    attacks = hostile.catalogue(seed)[: options.hostile_most]
    with harness.server() as server:
        warm(server)
        time.sleep(6)  # it loads the vocabulary of grammars once it rests: trust2_grammar.py
        clients, attacker, watch = Clients(server.url), Attacker(server.url, seed), Watch(server)
        calm, rest = calm_waits(clients, watch)
        share = max(0.0, full_step(server, clients) - calm[0])
        engine, harms = server.engine_pid(), []
        for number, attack in enumerate(attacks):
            for name, (times, at_once) in INTENSITIES.items():
                title = f"{attack.kind}, {attack.name}, {name}"
                harm = harm_of(
                    title,
                    lambda n=number, t=times, a=at_once: attacker.attack(n, t, a),
                    (server, clients, watch),
                    rest,
                )
                harm.unfair = judge_gap(harm, clients, calm[0], share)
                harms.append(harm)
        back = memory_back(server, rest)
        restarted = server.engine_pid() != engine
        attacker.close()
        answers, differ = clients.close()
        watch.close()
    yield from _judged(harms, calm, share, len(attacks))
    figure = f"{back:.0f} MB over rest"
    yield Line(
        f"API memory is back within {BACK:.0f} s of the last attack", figure, back < SLACK_MB * 4
    )
    yield Line("engine restarts", "some" if restarted else "0", not restarted)
    yield Line(
        "ordinary answers that changed or broke",
        f"{differ} of {answers}",
        answers > 0 and not differ,
    )


def warm(server: Server) -> None:
    """Long requests that nobody could object to, so that the processes which read them are there at rest."""
    for size in (16_000, 200_000):
        harness.fetch(server.url, "/tokenize", {"prompt": "a few words " * (size // 12)}, **HEADERS)


def calm_waits(clients: Clients, watch: Watch) -> tuple[tuple[float, float], float]:
    """The longest waits of a usual window without an attacker, and the memory at rest in MB."""
    waits = []
    for _ in range(CALM_WINDOWS):
        begin = time.monotonic()
        time.sleep(CALM_SECONDS)
        waits.append(clients.gap(begin, time.monotonic()))
    gaps, firsts, _ = zip(*waits, strict=True)
    calm = statistics.median(gaps), statistics.median(firsts)
    return calm, most(watch.memory, time.monotonic() - CALM_SECONDS, time.monotonic())


def full_step(server: Server, clients: Clients) -> float:
    """The longest gap beside a long prompt of an ordinary client, of nine."""
    gaps = []
    for number in range(9):
        body = {"prompt": f"{number} " * 2000, "max_tokens": 1}
        begin = time.monotonic()
        harness.fetch(server.url, "/v1/completions", body, **HEADERS)
        gaps.append(clients.gap(begin, time.monotonic())[0])
    return max(gaps)


def _computed(server: Server) -> int:
    """Tokens of prompts that were computed since the start."""
    return int(
        server.metric("vllm:prompt_tokens_total") - server.metric("vllm:prompt_tokens_cached_total")
    )


def harm_of(title: str, attack: Any, seen: tuple[Server, Clients, Watch], rest: float) -> Harm:
    server, clients, watch = seen
    before = _computed(server)
    rest = max(rest, api_mb(server))  # what attacks before have left is told at the end
    begin = time.monotonic()
    outcomes = attack()
    sent = time.monotonic()
    time.sleep(0.3)  # what an attacker left behind
    end = time.monotonic()
    errors = [repr(outcome.start[-200:]) for outcome in outcomes if outcome.status == 500]
    gap, first, begun = clients.gap(begin, end)
    return Harm(
        attack=title,
        gap=gap,
        first=first,
        tokens=max(0, _computed(server) - before - ORDINARY * begun),
        health=most(watch.health, begin, end),
        memory=most(watch.memory, begin, sent) - rest,
        body=sum(outcome.size for outcome in outcomes) / 2**20,
        errors=errors,
        seconds=end - begin,
    )


def judge_gap(harm: Harm, clients: Clients, calm: float, share: float) -> bool:
    """Make the gap that by which it grew, and tell whether that is more than fair. Others use this machine, too:
    then as long a time without the attack is looked at."""
    fair = max(MORE_GAP, share * min(1, harm.tokens / BUDGET))
    longest = harm.gap
    harm.gap -= calm
    if harm.gap > fair:
        begin = time.monotonic()
        time.sleep(harm.seconds)
        harm.gap = min(harm.gap, longest - clients.gap(begin, time.monotonic())[0])
    return harm.gap > fair


def memory_back(server: Server, rest: float) -> float:
    """Memory over rest, as soon as it is low again or when it should be."""
    until = time.monotonic() + BACK
    while (over := api_mb(server) - rest) > SLACK_MB and time.monotonic() < until:
        time.sleep(0.2)
    return over


def _judged(
    harms: list[Harm], usual: tuple[float, float], share: float, count: int
) -> Iterator[Line]:
    calm, calm_first = usual
    figure = f"{count} attacks of {len(hostile.KINDS)} kinds at {len(INTENSITIES)} intensities; {STREAMS} streams"
    figure += f"; longest gap without them {calm:.3f} s, beside an ordinary prompt of 4,000 tokens {share:+.3f} s"
    yield Line("hostile requests", figure, None)
    by_kind: dict[str, list[Harm]] = defaultdict(list)
    for harm in harms:
        by_kind[harm.attack.split(",")[0]].append(harm)
    for kind, found in sorted(by_kind.items()):
        worst = max(found, key=lambda harm: harm.gap)
        over = [harm for harm in found if harm.gap > MORE_GAP]
        unfair = [harm for harm in over if harm.unfair]
        figure = f"{len(over)} of {len(found)} over, {len(unfair)} of them by more than its share of tokens"
        figure += f"; worst {worst.gap:+.2f} s ({worst.attack}, {worst.tokens} tokens)"
        figure += "".join(f"; unfair {one.gap:+.2f} s ({one.attack})" for one in unfair[:3])
        what = f"{kind}: nobody's gap grows by more than {MORE_GAP * 1000:.0f} ms or a fair share of tokens"
        yield Line(what, figure, not unfair)
    late = [harm for harm in harms if harm.first > calm_first + MORE_GAP]
    worst = max(harms, key=lambda harm: harm.first)
    figure = f"{calm_first:.3f} s without attackers; {len(late)} of {len(harms)} over by more than"
    figure += f" {MORE_GAP * 1000:.0f} ms; worst {worst.first - calm_first:+.2f} s ({worst.attack})"
    yield Line("waits for a first token, in which places and prompts of others count", figure, None)
    slow = [harm for harm in harms if harm.health > HEALTH]
    worst = max(harms, key=lambda harm: harm.health)
    figure = f"{len(slow)} of {len(harms)} over; worst {worst.health:.3f} s ({worst.attack})"
    yield Line(f"/health answers within {HEALTH * 1000:.0f} ms", figure, not slow)
    fat = [harm for harm in harms if harm.memory > TIMES_BODY * harm.body + SLACK_MB]
    worst = max(harms, key=lambda harm: harm.memory - TIMES_BODY * harm.body)
    figure = f"{len(fat)} of {len(harms)} over; worst {worst.memory:.0f} MB for {worst.body:.1f} MB"
    figure += f" ({worst.attack})"
    yield Line(f"API memory peaks at most {TIMES_BODY:g}x the bodies over rest", figure, not fat)
    failed = [f"{harm.attack}: {error}" for harm in harms for error in harm.errors]
    yield Line(
        "answers 500", f"{len(failed)}" + "".join(f"; {one}" for one in failed[:3]), not failed
    )
