"""What every acceptance script shares: lines with a figure and a verdict, servers started and ended, load.

A line is PASS, FAIL or NOT RUN (with the reason); PUBLISHED is a figure without a target. The script's exit
status is 1 when a line failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "bench/clients", "bench/gpu", "tests", "tests/models", "tests/e2e")
sys.path += [str(ROOT / folder) for folder in FOLDERS]  # of whatever imports this module first
DATA = Path(os.environ.get("PAGETURNER_DATA") or ROOT.parent / "shared" / "data")
RESULTS = ROOT / "bench" / "results"
PATIENT = 600.0  # seconds for what must be answered, on a machine that others use, too


class NotRun(Exception):
    """This line cannot be measured here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report. `passed` None: a figure without a target. `run` False: it could not be measured
    here, and the figure says what is missing."""

    what: str
    figure: str
    passed: bool | None
    run: bool = True

    @property
    def verdict(self) -> str:
        """The word in front of it."""
        if not self.run:
            return "NOT RUN"
        return {True: "PASS", False: "FAIL", None: "PUBLISHED"}[self.passed]


Check = Callable[[argparse.Namespace], Iterator[Line]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a script: `lines` yields its lines, `add_arguments` names the options that it knows."""

    lines: Check
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def options(self, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of this part, and the words that it does not know."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        self.add_arguments(parser)
        return parser.parse_known_args(given)


def part(module: str) -> Part:
    """The part that a module beside this one holds: its `lines(options)` and, where there is one, its
    `add_arguments(parser)`. The module is imported when the part is asked for."""

    def lines(options: argparse.Namespace) -> Iterator[Line]:
        yield from importlib.import_module(module).lines(options)

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        found = importlib.import_module(module)
        if hasattr(found, "add_arguments"):
            found.add_arguments(parser)

    return Part(lines, add_arguments)


def main_of_parts(script: str, about: str | None, names: Sequence[str]) -> int:
    """Run a script whose parts are the modules SCRIPT_NAME beside it."""
    return main(script, about, {name: part(f"{script}_{name}") for name in names})


def alone(file: str, about: str | None) -> NoReturn:
    """Run SCRIPT_PART.py by itself, as the part of a script that it is."""
    name = Path(file).stem
    sys.exit(main(name, about, {name.partition("_")[2]: part(name)}))


def main(name: str, about: str | None, parts: Mapping[str, Part]) -> int:
    """Run the parts that the command line asks for (all, or those after --only) and print every line as it is
    known. An option goes to every part that knows it. Returns the exit status: 1 when a line failed."""
    parser = argparse.ArgumentParser(
        prog=f"make accept NAME={name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", choices=list(parts), help="run these parts alone")
    chosen, given = parser.parse_known_args()
    checks, unknown = {}, given
    for one in chosen.only or parts:
        options, rest = parts[one].options(given)
        unknown = [word for word in unknown if word in rest]
        checks[one] = functools.partial(parts[one].lines, options)
    if unknown:
        parser.error(f"no part knows {' '.join(unknown)}")
    return report(name, checks)


def run(name: str, checks: Mapping[str, Callable[[], Iterator[Line]]]) -> int:
    """Run a script whose parts have no options, as `main` does."""

    def part_of(check: Callable[[], Iterator[Line]]) -> Part:
        return Part(lambda _: check())

    return main(name, None, {one: part_of(check) for one, check in checks.items()})


def report(name: str, checks: Mapping[str, Callable[[], Iterator[Line]]]) -> int:
    """Print the lines of all checks, and keep them in bench/results."""
    rows: list[dict[str, str]] = []
    for check, lines in checks.items():
        begin = time.monotonic()
        for line in safely(check, lines):
            rows.append({"what": line.what, "figure": line.figure, "verdict": line.verdict})
            print(f"{line.verdict:9} {line.what}: {line.figure}", flush=True)
        print(f"          ({check}: {time.monotonic() - begin:.0f} s)", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"accept_{name}.json").write_text(json.dumps(rows, indent=2))
    counts = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} lines, {counts['FAIL']} failed, {counts['NOT RUN']} not run")
    return 1 if counts["FAIL"] else 0


def safely(check: str, lines: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """The lines of a check. A check that breaks is a failed line, and the others still run."""
    try:
        yield from lines()
    except NotRun as reason:
        yield Line(check, str(reason), None, run=False)
    except Exception as error:
        traceback.print_exc()
        yield Line(check, f"{type(error).__name__}: {error}", False)


def ran(*words: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it said. how: as `subprocess.run` takes it."""
    return subprocess.run(words, capture_output=True, text=True, **{"cwd": ROOT, **how})


def pytest_line(what: str, *arguments: str, environment: dict[str, str] | None = None) -> Line:
    """A line that a set of tests proves; the figure is pytest's own closing line, and what failed. Why it
    failed is printed to stderr."""
    command = [
        sys.executable,
        *["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"],
        *arguments,
    ]
    environment = {**os.environ, **(environment or {})}
    done = ran(*command, timeout=3600, env=environment)
    closing = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    skipped = re.search(r"\b\d+ skipped", closing)
    failed = re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", done.stdout, re.M)
    figure = "; ".join([closing.strip("= "), *failed[:5]])
    if done.returncode:
        print(done.stdout[-20_000:], file=sys.stderr)
    return Line(what, figure, done.returncode == 0 and skipped is None)


def proved(part: str, *always: str, environment: dict[str, str] | None = None) -> Iterator[Line]:
    """The lines of a part that tests prove: proofs.json has the arguments of each. always: others for all."""
    proofs = json.loads(Path(__file__).with_name("proofs.json").read_text())
    for what, arguments in proofs[part].items():
        yield pytest_line(what, *always, *arguments, environment=environment)


def request(url: str, path: str, body: Any = None, **headers: str) -> urllib.request.Request:
    """A request for a page, or with a body that becomes JSON."""
    content = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(
        url + path, content, {"Content-Type": "application/json", **headers}
    )


def fetch(url: str, path: str, body: Any = None, **headers: str) -> bytes:
    """The body of the answer to such a request. HTTPError where its status is no success."""
    with urllib.request.urlopen(request(url, path, body, **headers), timeout=PATIENT) as answer:
        return bytes(answer.read())


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    lines = fetch(url, "/metrics").decode().splitlines()
    samples = [line for line in lines if re.match(rf"{re.escape(name)}[ {{]", line)]
    if not samples:
        raise KeyError(f"/metrics has no {name}")
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Server:
    """A running `pageturner serve`."""

    url: str
    process: subprocess.Popen[bytes]

    def engine_pid(self) -> int:
        """The child that runs the engine."""
        for child in children(self.process.pid):
            if b"pageturner.engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        raise RuntimeError("the server has no engine process")

    def rss_mb(self) -> float:
        """Resident memory of the API process and its engine."""
        return sum(rss_mb(pid) for pid in (self.process.pid, self.engine_pid()))

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return metric(self.url, name)


def rss_mb(pid: int, which: str = "VmRSS") -> float:
    """Resident memory of one process; its peak is VmHWM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(one for one in status.splitlines() if one.startswith(which)).split()[1]) / 1024


def processor_seconds(*pids: int) -> float:
    """Processor time of the threads of these processes that live, to the nanosecond."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def command(*words: str) -> list[str]:
    """`pageturner WORDS`."""
    return [sys.executable, "-m", "pageturner", *words]


@contextmanager
def running(
    command: list[str], port: int, wait: float = 60.0, log: Path = Path(os.devnull)
) -> Iterator[Server]:
    """A command that serves on this loopback port, ready; ended by its process id. log: what it says."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, wait)
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        if process.poll() is None:
            end(process)


@contextmanager
def server(
    *flags: str, model: str = "smollm2", wait: float = 60.0, log: Path = Path(os.devnull)
) -> Iterator[Server]:
    """`pageturner serve` on a free loopback port."""
    port = free_port()
    words = command("serve", model, "--port", str(port), *flags)
    with running(words, port, wait, log) as one:
        yield one


def router(*urls: str, flags: Sequence[str] = ()) -> AbstractContextManager[Server]:
    """`pageturner route` in front of these servers, on a free loopback port."""
    port = free_port()
    return running(command("route", *urls, "--port", str(port), *flags), port)


def spawn(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """A process of its own that runs work(*arguments, pipe), and the other end of the pipe."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(*arguments, theirs))
    process.start()
    theirs.close()
    return process, ours


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that compute without end, ended by their ids."""
    each = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in each:
            process.kill()
            process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], limit: float) -> None:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(
                f"the server ended with status {process.returncode} before it was ready"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    raise TimeoutError(f"{url} was not ready within {limit:.0f} s")


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """work(0..count-1), all at the same time; the first exception is raised at the end."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
