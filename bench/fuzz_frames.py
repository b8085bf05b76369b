"""`python bench/fuzz_frames.py --seconds 60`: hostile bytes between processes, and hostile JSON.

A case has one thing wrong, or a few (bench/hostile/*_cases.py), of one of these kinds, which take turns:

    channel   what an engine says to the API process, with its ledger
    engine    what an engine hears
    pool      what a text worker says to the API process
    worker    what a text worker hears
    outcome   what a text worker made of a request
    router    what a replica answers, as the router passes it on
    client    what a server answers, in pieces and events, as our clients read it
    kv        KV memory that outlived its engine
    json      bodies of requests, twenty in each case

Every request has to be answered, soon and in good form; no exception may come out that nobody foresaw, and no
process or memory may be left. Anything else is a finding, printed with what makes it again. Exit code 1 if
there was any.

    --number N    only this case, of one kind, in this process: to see its traceback
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType

from hostile import channel_cases, http_cases, json_bodies, kv_cases, text_cases
from hostile.binary import Dice
from hostile.whole_server import where

KINDS: dict[str, Callable[[Dice], str]] = {
    "channel": channel_cases.channel,
    "engine": channel_cases.engine,
    "pool": text_cases.server,
    "worker": text_cases.worker,
    "outcome": text_cases.outcome,
    "router": http_cases.router,
    "client": http_cases.client,
    "kv": kv_cases.kv,
    "json": json_bodies.json_body,
}
SHARES = {"outcome": 0.2, "worker": 0.5}  # of the time that others get
ROUND = 2.0  # seconds of one kind, until it is another one's turn
WAITING = 60  # seconds after which a case hangs
RESIDENT = 400  # MB that a case may add to this process


class Hangs(BaseException):
    """A case that does not end."""


def _hangs(_: int, frame: FrameType | None) -> None:
    raise Hangs(f"no end within {WAITING} s")


def peak() -> int:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def used() -> float:
    """Seconds of processor time of this process and its children that have ended."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in times)


def dice(kind: str, seed: int, number: int) -> Dice:
    return random.Random(f"{kind} {seed} {number}")


def run(kind: str, seed: int, number: int) -> tuple[str, str]:
    """(what came of a case, the finding or "")."""
    before = peak()
    signal.alarm(WAITING)
    try:
        outcome = KINDS[kind](dice(kind, seed, number))
    except AssertionError as found:
        return "finding", str(found)
    except (Exception, Hangs) as error:
        return "finding", where(error)
    finally:
        signal.alarm(0)
        gc.unfreeze()  # an engine freezes what is there when it begins: here that is the engine before it
    grown = peak() - before
    return outcome, f"memory: {grown} MB" if grown > RESIDENT else ""


def fuzz(kinds: list[str], seconds: float, seed: int) -> int:
    """All kinds in turns; the number of findings."""
    numbers, outcomes, spent = Counter[str](), dict[str, Counter[str]](), Counter[str]()
    findings, kept = Counter[str](), Counter[str]()
    end, turn = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kind = kinds[turn % len(kinds)]
        turn, begun, until = (
            turn + 1,
            used(),
            min(end, time.monotonic() + ROUND * SHARES.get(kind, 1.0)),
        )
        while time.monotonic() < until:
            outcome, finding = run(kind, seed, numbers[kind])
            outcomes.setdefault(kind, Counter())[outcome] += 1
            if finding:
                findings[kind] += 1
                kept[f"{kind} {finding[:60]}"] += 1
                if kept[f"{kind} {finding[:60]}"] <= 2:
                    again = f"--kinds {kind} --seed {seed} --number {numbers[kind]}"
                    print(f"{kind}: {finding!a:.500}\n    {again}", flush=True)
            numbers[kind] += 1
        spent[kind] += used() - begun
    for kind in kinds:
        common = ", ".join(
            f"{n} {what}" for what, n in outcomes.get(kind, Counter()).most_common(8)
        )
        print(f"{kind}: {numbers[kind]} cases, {spent[kind] / 60:.1f} CPU minutes: {common}")
    count = sum(findings.values())
    print(f"{sum(numbers.values())} cases, {used() / 60:.1f} CPU minutes, {count} findings")
    return count


def one(kind: str, seed: int, number: int) -> int:
    """One case with its traceback."""
    try:
        print(KINDS[kind](dice(kind, seed, number)))
    except (Exception, Hangs):
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz_frames.py")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--number", type=int, help="only this case, of one kind, in this process")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _hangs)
    if arguments.number is not None:
        return one(arguments.kinds[0], arguments.seed, arguments.number)
    logging.getLogger("pageturner").addHandler(logging.NullHandler())  # nothing of it is news here
    logging.getLogger("pageturner").propagate = False
    return 1 if fuzz(arguments.kinds, arguments.seconds, arguments.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
