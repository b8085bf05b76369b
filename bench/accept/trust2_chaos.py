"""Chaos in every setup: tensor and pipeline ranks, tiers with adapters and batches, and replicas behind a router.

    python bench/accept/trust2_chaos.py [--chaos-minutes 3] [--chaos-clients 16] [--chaos-setups NAME ...]

Owns the setups, and what befalls whole replicas; each answer must be what it was when nothing was disturbed. Faults
of engines are in chaos_faults.py, the comparison in trust_chaos.py. A stream that no other replica can take over (as
docs/api.md says, of several choices and the like) ends with `replica_lost` and is asked for again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import dialect_jobs
import harness
import trust_chaos
from harness import Line
from trust_chaos import Seen, Setup

from pageturner.formats import hub
from pageturner.models.load import open_model
from support.adapters import write_adapter

ADAPTERS = ("red", "green")
MIXED = "--kv-cache-memory 48M --kv-host-memory 32M --kv-file {folder}/kv --kv-file-size 128M --max-loras 1"
SETUPS = (
    Setup("two tensor parallel ranks", ("--tensor-parallel-size", "2")),
    Setup("two pipeline stages", ("--pipeline-parallel-size", "2")),
    Setup(
        "tiers, adapters, batches",
        (*MIXED.split(), "--batch-dir", "{folder}/batches"),
        ADAPTERS,
        True,
    ),
)
FLEET = "replicas"
REPLICAS = 2
FAULTS_A_MINUTE = 4
SHORT = 1.0  # minutes in which none of the few streams may be on the replica that dies
BACK = 120.0  # seconds until a replica answers again


class Replica:
    """A server in a process group of its own, on a port that it keeps."""

    def __init__(self) -> None:
        self.port = harness.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            harness.command("serve", "smollm2", "--port", str(self.port), *trust_chaos.FLAGS),
            cwd=harness.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        harness.wait_ready(self.url, self.process, BACK)

    def signal(self, number: int) -> None:
        """Send it to the server, its engine and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


class Fleet:
    """Do what befalls replicas: one of them at a time, and the next one when all are there again."""

    def __init__(self, dice: random.Random) -> None:
        self.replicas = [Replica() for _ in range(REPLICAS)]
        self._dice = dice

    def kinds(self) -> dict[str, Callable[[], None]]:
        return {
            "replica killed": self._kill,
            "replica ended": self._end,
            "replica silent": self._silent,
            "server silent": self._server_silent,
            "engine killed": self._kill_engine,
        }

    def _kill(self) -> None:
        one = self._dice.choice(self.replicas)
        one.end()
        time.sleep(self._dice.uniform(0.0, 3.0))
        one.start()

    def _end(self) -> None:
        """Restart one as an upgrade does."""
        one = self._dice.choice(self.replicas)
        one.process.send_signal(signal.SIGTERM)
        one.process.wait(BACK)
        one.start()

    def _silent(self) -> None:
        self._stopped(lambda one: one.signal)

    def _server_silent(self) -> None:
        """Its engine goes on."""
        self._stopped(lambda one: one.process.send_signal)

    def _stopped(self, of: Callable[[Replica], Callable[[int], None]]) -> None:
        one = self._dice.choice(self.replicas)
        of(one)(signal.SIGSTOP)
        time.sleep(self._dice.uniform(1.0, 2.0) * dialect_jobs.ENGINE_TIMEOUT)
        of(one)(signal.SIGCONT)
        harness.wait_ready(one.url, one.process, BACK)

    def _kill_engine(self) -> None:
        one = self._dice.choice(self.replicas)
        os.kill(harness.Server(one.url, one.process).engine_pid(), signal.SIGKILL)
        time.sleep(1.0)
        harness.wait_ready(one.url, one.process, BACK)

    def close(self) -> None:
        for one in self.replicas:
            one.end()


def fleet(minutes: float, clients: int, faults: int) -> Iterator[Line]:
    """Every client comes through the router, in every shape; answers in the background stay where they were asked."""
    dice, seen = random.Random(5), Seen()
    with contextlib.closing(Fleet(dice)) as found:
        urls = [one.url for one in found.replicas]
        flags = ("--health-interval", "0.5", "--move-timeout", "60")
        with harness.router(*urls, flags=flags) as front:
            every = [
                job
                for job in trust_chaos.with_truths(urls[0])
                if not job.body.get("background") and "session" not in job.body
            ]
            until = time.monotonic() + 60 * minutes

            def one(number: int) -> None:
                if number == 0:
                    trust_chaos.disturb(found.kinds(), faults, until, dice, seen)
                else:
                    own = random.Random(number)
                    trust_chaos.client((front.url, front.url), every, until, own, seen)

            harness.in_threads(clients + 1, one)
            moved = front.metric("pageturner:router_moved_total")
            memory = harness.rss_mb(front.process.pid)
    paths = Counter(job.path for job in every)
    figure = f"{seen.answers} answers, {len(seen.differ)} lost or changed, {len(seen.late)} late"
    figure += f", {moved:.0f} moved, {seen.refused} refused"
    figure += f" for a moment, {seen.cut} that cannot move were told so; router {memory:.0f} MB"
    wrong = seen.differ + seen.late
    figure += "".join(f"; {one}" for one in wrong[:3])
    what = f"{REPLICAS} replicas behind a router: chaos of {minutes:.3g} minutes, {len(every)} requests of"
    enough = seen.answers > 0 and (moved > 0 or minutes < SHORT)
    yield Line(f"{what} {len(paths)} paths", figure, enough and not wrong)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.faults.items()))
    told = "".join(f"; {one}" for one in seen.failed_faults)
    yield Line(f"{FLEET}: faults", kinds + told, bool(kinds) and not told)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chaos-minutes", type=float, default=3.0, help="of all setups together")
    parser.add_argument("--chaos-clients", type=int, default=16)
    names = [trust_chaos.ALONE.name, *(one.name for one in SETUPS), FLEET]
    parser.add_argument("--chaos-setups", nargs="*", choices=names, default=names)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    minutes = options.chaos_minutes / len(options.chaos_setups)
    faults = max(3, round(FAULTS_A_MINUTE * minutes))
    with tempfile.TemporaryDirectory() as folder:
        spec = open_model(hub.resolve("smollm2").path)[1]
        loras = []
        for number, name in enumerate(ADAPTERS):
            made = write_adapter(Path(folder) / name, spec, seed=number, size=1.0)
            loras += ["--lora", f"{name}={made}"]
        for setup in (trust_chaos.ALONE, *SETUPS):
            if setup.name in options.chaos_setups:
                flags = (*setup.flags, *(loras if setup.adapters else ()))
                named = Setup(setup.name, flags, setup.adapters, setup.batches)
                yield from trust_chaos.lines(minutes, options.chaos_clients, faults, named)
    if FLEET in options.chaos_setups:
        yield from fleet(minutes, options.chaos_clients, max(5, faults))  # each kind once


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
