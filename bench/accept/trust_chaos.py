"""Chaos: answers of every dialect and decoding method while everything fails that can fail.

    python bench/accept/trust_chaos.py [--minutes 20] [--clients 24] [--faults 80] [--only KIND ...]

Owns which faults come when, and the comparison: each answer must be what it was when nothing was disturbed,
chunk by chunk. What is asked is in chaos_jobs.py, what goes wrong in chaos_faults.py. Every other client
comes through a router.
"""

from __future__ import annotations

import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import chaos_faults
import chaos_jobs
import dialect_jobs
import harness
from chaos_jobs import Job, ask
from harness import Line, rss_mb

from pageturner.telemetry import step_log

FLAGS = (
    *f"--engine-timeout {dialect_jobs.ENGINE_TIMEOUT:g} --max-restarts 1000 --max-num-seqs 64".split(),
    *("--speculation", "ngram", "--text-memory", "400M"),
    *dialect_jobs.FLAGS,
)
AT_ONCE = 8  # truths
Kinds = dict[str, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Setup:
    """A server that is disturbed. flags: what it is given besides; {folder} is a folder of its own.
    adapters: names in turns with the model's own. batches: some of what is asked is asked as a batch.
    only: kinds of faults; none: all."""

    name: str = "a server"
    flags: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    batches: bool = False
    seed: int = 3
    only: tuple[str, ...] = ()


ALONE = Setup()


@dataclass(slots=True)
class Seen:
    """cut: streams that no other replica can take over, told so and asked for again; differ: answers that were
    lost or changed; late: those that had not come when patience ended; lost: how engines were;
    pressed: what those were told who took the memory; before, behind: memory of the API process in MB;
    records: of the step log."""

    answers: int = 0
    refused: int = 0
    cut: int = 0
    differ: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    failed_faults: list[str] = field(default_factory=list)
    pressed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    restarts: float = 0
    resumed: float = 0
    poisoned: float = 0
    before: float = 0
    behind: float = 0
    records: int = 0


def run(minutes: float, clients: int, faults: int, setup: Setup = ALONE) -> Seen:
    """Records what was seen."""
    seen, seed = Seen(), setup.seed
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps"
        said = Path(folder) / "said"
        more = (flag.format(folder=folder) for flag in setup.flags)
        flags = (*FLAGS, "--step-log", str(log), *more)
        with harness.server(*flags, log=said) as server, harness.router(server.url) as router:
            every = with_truths(server.url, setup)
            seen.before = rss_mb(server.process.pid)
            disturbed = chaos_faults.Faults(server, random.Random(seed), log)
            kinds = {
                kind: act
                for kind, act in disturbed.kinds().items()
                if not setup.only or kind in setup.only
            }
            until = time.monotonic() + 60 * minutes

            def one(number: int) -> None:
                if number == 0:
                    disturb(kinds, faults, until, random.Random(seed + 1), seen)
                else:
                    client(
                        (server.url, router.url if number % 2 else server.url),
                        every,
                        until,
                        random.Random(1000 * seed + number),
                        seen,
                    )

            harness.in_threads(clients + 1, one)
            time.sleep(2)
            if server.process.poll() is not None:
                raise RuntimeError(
                    f"the API process has ended with {server.process.returncode}: {seen.faults}"
                )
            seen.pressed.update(disturbed.pressed)
            seen.behind = rss_mb(server.process.pid)
            seen.restarts = server.metric("pageturner:engine_restarts_total")
            seen.resumed = server.metric("pageturner:resumed_streams_total")
            seen.poisoned = server.metric("pageturner:poisoned_requests_total")
        seen.lost.update(re.findall(r"is lost \((.*?)\) with", said.read_text(errors="replace")))
        seen.records = sum(1 for _ in step_log.read(log))
    return seen


def with_truths(url: str, setup: Setup = ALONE) -> list[Job]:
    """What is asked, and what that answers now."""
    every = [*chaos_jobs.jobs(), *chaos_jobs.dialects(url)]
    if setup.batches:
        every += chaos_jobs.batches(every)
    for number, name in enumerate(setup.adapters):
        for job in every[number :: len(setup.adapters) + 1]:
            job.use(name)
    pinned = ask(url, Job("", "/v1/prefixes", {"id": "chaos", "prompt": chaos_jobs.PINNED}))
    if pinned.text.startswith("status"):
        raise RuntimeError(f"the prefix is not kept: {pinned.text}")

    def find(number: int) -> None:
        for job in every[number::AT_ONCE]:
            job.truth = ask(url, job).text
            if job.truth[:1] not in "[{":
                raise RuntimeError(
                    f"{job.name} is not answered when nothing is disturbed: {job.truth}"
                )

    harness.in_threads(AT_ONCE, find)
    return every


_lock = threading.Lock()


def client(
    urls: tuple[str, str], every: list[Job], until: float, dice: random.Random, seen: Seen
) -> None:
    """urls: of a server, and for what a router passes on."""
    while time.monotonic() < until:
        job = dice.choice(every)
        answer = ask(urls[job.routed], job)
        with _lock:
            seen.answers += 1
            seen.refused += answer.refused
            seen.cut += answer.cut
            if answer.text != job.truth:
                wrong = seen.late if answer.late else seen.differ
                wrong.append(f"{job.name}: {_difference(job.truth, answer.text)}")


def _difference(truth: str, text: str) -> str:
    """Where the two part."""
    at = next((i for i, (a, b) in enumerate(zip(truth, text, strict=False)) if a != b), 0)
    return text[:300] if text[:1] not in "[{" else f"at {at}: {text[max(at - 60, 0) : at + 140]}"


def disturb(kinds: Kinds, count: int, until: float, dice: random.Random, seen: Seen) -> None:
    """Each kind as often as every other, spread evenly over the time."""
    begin = time.monotonic()
    period = (until - begin) / count
    order = [
        kind
        for _ in range(-(-count // len(kinds)))
        for kind in dice.sample(list(kinds), len(kinds))
    ]
    for number, kind in enumerate(order[:count]):
        time.sleep(max(0.0, begin + (number + dice.uniform(0.2, 0.6)) * period - time.monotonic()))
        try:
            kinds[kind]()
            seen.faults[kind] += 1
        except (OSError, RuntimeError, StopIteration) as error:
            seen.failed_faults.append(f"{kind}: {error!r}")


def lines(
    minutes: float = 20.0,
    clients: int = 24,
    faults: int = 80,
    setup: Setup = ALONE,
) -> Iterator[Line]:
    """Nothing lost, repeated or changed."""
    seen = run(minutes, clients, faults, setup)
    methods = len(chaos_jobs.METHODS) + len(chaos_jobs.PROMPTS)
    what = f"{setup.name}: chaos of {minutes:.3g} minutes, {methods} methods in two dialects, calls, thoughts"
    what += f" and every other shape, {clients} clients"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.faults.items()))
    figure = f"{seen.answers} answers, {len(seen.differ)} lost or changed, {len(seen.late)} late"
    figure += f", {seen.refused} refused for a moment"
    figure += f"; {seen.restarts:g} engines lost, {seen.resumed:g} streams resumed, {seen.poisoned:g} poisoned"
    wrong = seen.differ + seen.late
    figure += "".join(f"; {one}" for one in wrong[:3])
    yield Line(what, figure, bool(seen.answers) and not wrong)
    failed = "".join(f"; {one}" for one in seen.failed_faults)
    enough = sum(seen.faults.values()) == faults and not failed
    yield Line(f"{setup.name}: {faults} faults of {len(seen.faults)} kinds", kinds + failed, enough)
    ends = ", ".join(f"{count} {end}" for end, count in seen.lost.most_common())
    yield Line(f"{setup.name}: how engines were lost", ends, None)
    told = ", ".join(f"{count} times {what}" for what, count in seen.pressed.most_common())
    wild = [what for what in seen.pressed if what.startswith("500")]
    yield Line(f"{setup.name}: those who took the API process's memory were told", told, not wild)
    memory = f"{seen.before:.0f} MB, then {seen.behind:.0f} MB"
    yield Line(
        f"{setup.name}: memory of the API process in it", memory, seen.behind < seen.before + 64
    )
    yield Line(
        f"{setup.name}: records in the step log, whose disk was full at times",
        f"{seen.records}",
        seen.records > 0,
    )
