"""The hunter beside ordinary streams: every field of every operation made hostile, by a tenant of a real server.

    python bench/accept/trust2_hunter.py [--hunter-cases 5000] [--hunter-first 0] [--hunter-seeds 1 2]

Owns how the cases of bench/hostile/hunter.py are sent and judged: by the gaps of ordinary streams of another
tenant, the memory of the API process, statuses, engine restarts, what a third tenant keeps, and the files that
are left. Cases go in windows; a window that was over a bound is sent again case by case, which names the case.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness
import trust_hostile
from harness import Line, Server

import hostile_requests
from hostile.hunter import Hunter

KEYS = "hunter:key-1,ordinary:key-2,owner:key-3"
WINDOW = 25  # cases, one after another
TRIES, SPARED = 9, 2  # of a case in a window that was over; and tries in which it may not be
LATER = (503, 504)  # statuses from 500 on that say: not now
TEXT = "/v1/completions"
OURS = "owned"  # names of what the owner keeps


def ask(
    url: str, key: str, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    """One request of a tenant. body: bytes, or what becomes JSON."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    asked = harness.request(url, path, None, Authorization=f"Bearer {key}", **named)
    asked.method = method
    asked.data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(asked, timeout=harness.PATIENT) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def upload(url: str, key: str, content: str) -> tuple[int, bytes]:
    """A file for a batch."""
    head = "--B\r\nContent-Disposition: form-data; name="
    form = (
        f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"; filename="f"\r\n\r\n{content}\r\n--B--\r\n'
    )
    kind = "multipart/form-data; boundary=B"
    return ask(url, key, "POST", "/v1/files", form.encode(), Content_Type=kind)


# -- the owner of what nobody else may touch -----------------------------------------------------------------
def keep_things(url: str) -> dict[str, str]:
    """Have a server keep one of everything. Path -> id."""

    def made(path: str, body: Any, **headers: str) -> str:
        status, told = ask(url, "key-3", "POST", path, body, **headers)
        if status != 200:
            raise RuntimeError(f"{path}: {told[:300]!r}")
        return str(json.loads(told)["id"])

    asked = {"prompt": "hello", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": TEXT, "body": asked}
    file = str(json.loads(upload(url, "key-3", json.dumps(line))[1])["id"])
    response = made("/v1/responses", {"input": "hello", "max_output_tokens": 4}, X_Request_Id=OURS)
    made(TEXT, asked | {"session": OURS}, X_Request_Id=OURS)
    return {
        "/v1/responses/": response,
        "/v1/sessions/": OURS,
        "/v1/files/": file,
        "/v1/batches/": made("/v1/batches", {"input_file_id": file, "endpoint": TEXT}),
        "/v1/prefixes": made("/v1/prefixes", {"id": OURS, "prompt": "a prefix of the owner"}),
    }


def lost(url: str, things: dict[str, str]) -> list[str]:
    """What the owner does not find any more."""
    gone = []
    for path, id in things.items():
        status, told = ask(url, "key-3", "GET", path if path == "/v1/prefixes" else path + id)
        if status != 200 or id.encode() not in told:
            gone.append(f"{path}{id}: {status}")
    return gone


# -- the hunter, a process of its own ------------------------------------------------------------------------
def begun(url: str) -> dict[str, Any]:
    """What a stream says of its beginning, so that moved streams are taken."""
    body = {"prompt": "hello", "max_tokens": 9, "stream": True}
    _, told = ask(url, "key-1", "POST", TEXT, body, X_Pageturner_Moves="1")
    told = told.partition(b":pt begin ")[2].partition(b"\n")[0]
    return {"path": TEXT, "body": json.dumps(body), "begun": json.loads(told)}


def hunt(url: str, seed: int, theirs: tuple[str, ...], pipe: Connection) -> None:
    """Send the cases between two numbers; tells of each its status and bytes, and its name where it is bad."""
    document = json.loads(harness.fetch(url, "/openapi.json"))
    honest = {"messages": [{"role": "user", "content": "hello"}], "documents": ["a"], **begun(url)}
    hunter = Hunter(document, honest, theirs)
    pipe.send(len(hunter.places))
    host, port = urlsplit(url).netloc.split(":")
    while (span := pipe.recv()) is not None:
        told = []
        for case in hunter.cases(seed, span[1] - span[0], span[0]):
            head = f"{case.method} {case.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
            told_length = (b"content-length", b"%d" % len(case.body))
            headers = [
                (b"authorization", b"Bearer key-1"),
                told_length,
                (b"connection", b"close"),
                *case.headers,
            ]
            head += b"".join(b"%s: %s\r\n" % pair for pair in headers) + b"\r\n"
            try:
                done = hostile_requests.raw([head, case.body])(
                    host, int(port), trust_hostile.PATIENCE
                )
            except OSError:
                done = hostile_requests.Outcome(0, 0)
            told.append((done.status, done.size, f"{case.name}: {done.start[-200:]!r}"))
        pipe.send(told)


@dataclass(slots=True)
class Found:
    """What a hunt comes to."""

    statuses: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    fat: list[str] = field(default_factory=list)
    worst_gap: float = 0.0
    again: int = 0


class Hunt:
    """One seed against one server."""

    def __init__(self, server: Server, seed: int, theirs: tuple[str, ...]) -> None:
        self.found, self._server, self._seed = Found(), server, seed
        self.clients, self.watch = trust_hostile.Clients(server.url), trust_hostile.Watch(server)
        self._process, self._pipe = harness.spawn(hunt, server.url, seed, theirs)
        self.places = self._pipe.recv()
        time.sleep(4)
        (self.calm, _), self.rest = trust_hostile.calm_waits(self.clients, self.watch)
        self.share = max(0.0, trust_hostile.full_step(server, self.clients) - self.calm)

    def run(self, begin: int, end: int) -> None:
        """Cases between two numbers; what was over a bound in company is looked at alone."""
        for first in range(begin, end, WINDOW):
            last = min(first + WINDOW, end)
            if self._over(first, last):
                self.found.again += 1
                for one in range(first, last):
                    self._alone(one)
            if last % 500 == 0:
                print(
                    f"seed {self._seed}: {last} cases, {self.found.again} windows again",
                    file=sys.stderr,
                )

    def _alone(self, one: int) -> None:
        """Note what a case is over nearly each time: what others do on this machine comes and goes."""
        for kind, found in enumerate((self.found.gaps, self.found.fat)):
            over = []
            for tried in range(TRIES):
                told = self._over(one, one + 1)
                over += [told] if told and told[kind] else []
                if tried - len(over) >= SPARED:
                    break
            else:
                found.append(f"{over[0][kind]:+.2f} by case {one}, {over[0][2]}")

    def _over(self, first: int, last: int) -> tuple[float, float, str] | None:
        """By how much the cases are over the bounds of gap and memory, and the last one's name; None: by nothing."""
        names: list[str] = []

        def attack() -> list[hostile_requests.Outcome]:
            self._pipe.send((first, last))
            told = self._pipe.recv()
            for status, _, name in told:
                names.append(name)
                self.found.statuses[status] += 1
                if status >= 500 and status not in LATER:
                    self.found.errors.append(name)
            return [hostile_requests.Outcome(status, size) for status, size, _ in told]

        harm = trust_hostile.harm_of(
            "", attack, (self._server, self.clients, self.watch), self.rest
        )
        unfair = trust_hostile.judge_gap(harm, self.clients, self.calm, self.share)
        self.found.worst_gap = max(self.found.worst_gap, harm.gap)
        fat = (
            harm.memory
            if harm.memory > trust_hostile.TIMES_BODY * harm.body + trust_hostile.SLACK_MB
            else 0.0
        )
        return (harm.gap * unfair, fat, names[-1][:160]) if unfair or fat else None

    def close(self) -> tuple[int, int]:
        self._pipe.send(None)
        self._process.join(30)
        ended = self.clients.close()
        self.watch.close()
        return ended


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Each seed against a server with all options on."""
    os.environ["TRUST_KEY"] = "key-2"
    trust_hostile.HEADERS["Authorization"] = "Bearer key-2"
    for seed in options.hunter_seeds:
        with tempfile.TemporaryDirectory() as folder:
            flags = f"--batch-dir {folder}/batches --step-log {folder}/steps --step-log-tokens"
            flags += f" --packed-cache {folder}/packed"
            flags += (
                f" --kv-file {folder}/kv --kv-file-size 64M --kv-host-memory 16M --admin-key key-4"
            )
            umask = os.umask(0)
            try:
                with harness.server(*flags.split(), "--api-key", KEYS) as server:
                    yield from _of_seed(server, seed, options.hunter_first, options.hunter_cases)
            finally:
                os.umask(umask)
            yield files_line(Path(folder), f"seed {seed}: files of a server with all options on")


def _of_seed(server: Server, seed: int, first: int, count: int) -> Iterator[Line]:
    things, pid = keep_things(server.url), server.engine_pid()
    hunting = Hunt(server, seed, tuple(things.values()))
    begin = time.monotonic()
    hunting.run(first, first + count)
    seconds, found = time.monotonic() - begin, hunting.found
    back = trust_hostile.memory_back(server, hunting.rest)
    answers, differ = hunting.close()
    told = ", ".join(f"{n} x {status}" for status, n in found.statuses.most_common())
    figure = f"{count} cases of {hunting.places} places in {seconds:.0f} s: {told}; {found.again} windows again"
    figure += f"; longest gap without them {hunting.calm:.3f} s"
    yield Line(f"seed {seed}: hostile requests from the API's own document", figure, None)
    for what, wrong in (
        ("gaps beyond 100 ms and a fair share", found.gaps),
        ("memory over 4x of the bodies", found.fat),
        ("answers 500", found.errors),
        ("things of another tenant that are gone", lost(server.url, things)),
    ):
        yield Line(f"seed {seed}: {what}", "; ".join([str(len(wrong)), *wrong[:5]]), not wrong)
    yield Line(f"seed {seed}: worst growth of a gap", f"{found.worst_gap:+.3f} s", None)
    yield Line(
        f"seed {seed}: API memory at rest, over before",
        f"{back:.0f} MB",
        back < 4 * trust_hostile.SLACK_MB,
    )
    restarted = int(server.engine_pid() != pid)
    yield Line(f"seed {seed}: engine restarts", str(restarted), not restarted)
    broke = f"{differ} of {answers}"
    yield Line(
        f"seed {seed}: ordinary answers that changed or broke", broke, answers > 0 and not differ
    )


def files_line(folder: Path, what: str) -> Line:
    """Modes and owners of everything in a folder."""
    kinds, wide = Counter[str](), []
    for one in folder.rglob("*"):
        about = one.stat()
        mode = stat.S_IMODE(about.st_mode)
        kinds[f"{'folders' if one.is_dir() else 'files'} {mode:04o} of uid {about.st_uid}"] += 1
        if mode & 0o077 or about.st_uid != os.geteuid():
            wide.append(f"{one.name} {mode:04o} of {about.st_uid}")
    figure = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return Line(what, "; ".join([figure, *wide[:5]]), bool(kinds) and not wide)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hunter-cases", type=int, default=5000, help="of each seed")
    parser.add_argument("--hunter-first", type=int, default=0)
    parser.add_argument("--hunter-seeds", type=int, nargs="*", default=[1, 2])


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
