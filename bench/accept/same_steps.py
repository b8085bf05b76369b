"""Nothing lost in the engine: recorded step logs, replayed by this tree to the same plans and tokens.

Owns which recorded logs there are, what kind each is of, and how a log is made ready for its tokens to be
computed again. It asks the command `pageturner replay` alone: whatever it is made of may change.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from harness import ROOT, Line, NotRun

from pageturner import cli

FOLDER = ROOT / "tests" / "goldens" / "steplogs"
MAGIC = b"pageturner-steps\x01"  # what a log begins with, its version last
HEADER, ARRIVED = 0, 1  # the first field of these records
FINGERPRINT, CONFIG, MORE = 2, 3, 6  # which field of a header these are; MORE: of an arrival
TIMES = ("deadline", "ttft_target", "tpot_target")
KINDS = ("admission", "preemption", "beams", "drafts", "tiny", "windows", "smollm2")
ORDERS = ("fcfs", "priority", "sjf", "deadline", "adaptive", "fair", "prefix")
REAL_ENGINES = ("tiny", "windows", "schema")  # kinds whose tokens a model computes
# The commit that wrote the logs (8cc2ebe) does not replay these itself.
UNREPEATABLE = {
    "admission-predicted-targets": "a forecast for a request with a target fixes what admission"
    " `predicted` promises it, and a replay makes no forecasts",
}
NOT_HERE = re.compile(
    r"the bits differ|the log is of the model|holds no tokens|cannot find|not there|fetch"
)


@dataclass(frozen=True, slots=True)
class Replay:
    """The report of `pageturner replay` on a log. problem: why it could not compare, or the first difference."""

    log: str
    compared: int
    tokens: int
    same: bool
    problem: str = ""

    @property
    def ran(self) -> bool:
        return self.compared > 0 or not NOT_HERE.search(self.problem)


def recorded() -> dict[str, Path]:
    """The recorded logs by name."""
    paths = sorted(FOLDER.glob("*.steps.gz"))
    return {path.name.removesuffix(".steps.gz"): path for path in paths}


def kind_of(name: str) -> str:
    """The kind of a log, by its name."""
    first = name.partition("-")[0]
    if first in KINDS:
        return "schema" if "schema" in name else first
    return "policies x orders" if name.rpartition("-")[2] in ORDERS else "others"


def replayed(name: str, log: bytes, *flags: str) -> Replay:
    """Replay one log by the command and read its report."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        path = Path(folder) / "log.steps"
        path.write_bytes(log)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main(["replay", str(path), *flags])
    return understood(name, said.getvalue(), "plans" if "--plans" in flags else "answers")


def understood(name: str, said: str, what: str) -> Replay:
    """The line of the report that counts `what`; without such a line, the last line is the problem."""
    found = re.search(rf"^{what}: ([\d,]+)(?: of|,) ([\d,]+) tokens; (.*)$", said, re.M)
    if found is None:
        refused = re.findall(rf"^{what}: (not compared.*)$", said, re.M)
        lines = refused or said.strip().splitlines() or ["it said nothing"]
        return Replay(name, 0, 0, False, lines[-1])
    compared, tokens = (int(number.replace(",", "")) for number in found.group(1, 2))
    same = found[3] == "all the same" and compared > 0
    return Replay(name, compared, tokens, same, "" if same else found[3])


def without_times(log: bytes, fingerprint: str = "") -> bytes:
    """The log without deadlines and targets, which have passed when its requests are answered once more, and
    with policies that do not wait for requests: all of them are there. fingerprint: of the engine that is to
    compute it, where that is another one than the log's."""
    changed = [MAGIC]
    for body in frames(log):
        record = msgspec.msgpack.decode(body)
        if record[0] == HEADER:
            record[CONFIG] |= {"static_patience": 0.0, "window_ms": 0.0}
            record[FINGERPRINT] = fingerprint or record[FINGERPRINT]
        elif record[0] == ARRIVED:
            record[MORE] = {k: value for k, value in record[MORE].items() if k not in TIMES}
        again = msgspec.msgpack.encode(record)
        changed += [struct.pack("<I", len(again)), again]
    return b"".join(changed)


def frames(log: bytes) -> Iterator[bytes]:
    """The records of a log, each as it was written."""
    if not log.startswith(MAGIC):
        raise ValueError("not a step log of version 1")
    at = len(MAGIC)
    while at < len(log):
        (size,) = struct.unpack_from("<I", log, at)
        yield log[at + 4 : at + 4 + size]
        at += 4 + size


def answered(name: str, log: bytes) -> Replay:
    """Compute the tokens of a log once more. Kernels of another build refuse a log, as their bits may differ;
    where only the build differs, and not the instruction set or a type, they must give the same."""
    report = replayed(name, without_times(log))
    engine = another_build(report.problem)
    return replayed(name, without_times(log, engine)) if engine else report


def another_build(problem: str) -> str:
    """The fingerprint of this engine, if it is the log's but for the build; else ""."""
    found = re.search(r"the log is of (\S+), this engine is (\S+): the bits differ", problem)
    if found is None:
        return ""
    then, now = (re.sub(r"^(native-[^-]+)-[^-]+", r"\1", engine) for engine in found.groups())
    return found[2] if then == now else ""


def judged(what: str, reports: Iterable[Replay]) -> Line:
    """One line for several logs that ran; it fails where nothing was compared."""
    reports = list(reports)
    wrong = [f"{report.log}: {report.problem}" for report in reports if not report.same]
    compared = sum(report.compared for report in reports)
    tokens = sum(report.tokens for report in reports)
    same = f"{len(reports) - len(wrong)} of {len(reports)} logs"
    figure = f"{same}, {compared:,} compared, {tokens:,} tokens"
    return Line(what, "; ".join([figure, *wrong[:5]]), bool(reports) and not wrong)


def lines() -> Iterator[Line]:
    """Plans by the scheduler alone, then tokens by an engine."""
    logs = {name: gzip.decompress(path.read_bytes()) for name, path in recorded().items()}
    if not logs:
        raise NotRun(f"{FOLDER} holds no log: tests/goldens/README.md says how they were recorded")
    left_out = [f"{name}: {why}" for name, why in UNREPEATABLE.items() if name in logs]
    kinds: dict[str, list[Replay]] = {}
    for name, log in logs.items():
        if name not in UNREPEATABLE:
            kinds.setdefault(kind_of(name), []).append(replayed(name, log, "--plans"))
    for kind, reports in kinds.items():
        yield judged(f"recorded plans replay: {kind}", reports)
    engines: dict[str, list[Replay]] = {}
    for name, log in logs.items():
        report = answered(name, log)
        if report.ran:
            real = kind_of(name) in REAL_ENGINES
            engines.setdefault(name.partition("-")[0] if real else "fake engine", []).append(report)
        else:
            left_out.append(f"tokens of {name}: {report.problem}")
    for engine, reports in engines.items():
        yield judged(f"recorded tokens come again: {engine}", reports)
    if left_out:
        raise NotRun("; ".join(left_out))
