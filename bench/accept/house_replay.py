"""Nothing lost, part one: the step logs that commit 8cc2ebe wrote, replayed by this tree.

Owns which recorded logs there are, what kind each is of, and how a log is made ready for its tokens to be
computed again. Asks the command `pageturner replay` alone: whatever it is made of may change.
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
# What 8cc2ebe itself does not replay, and why.
UNREPEATABLE = {
    "admission-predicted-targets": "8cc2ebe plans it differently itself: a forecast for a request with a"
    " target fixes what admission `predicted` promises it, and a replay makes no forecasts",
}
NOT_HERE = re.compile(
    r"the bits differ|the log is of the model|holds digests|cannot find|not there|fetch"
)


@dataclass(frozen=True, slots=True)
class Told:
    """What `pageturner replay` said of a log. problem: why it could not compare, or what differs first."""

    log: str
    compared: int
    tokens: int
    same: bool
    problem: str = ""

    @property
    def ran(self) -> bool:
        return self.compared > 0 or not NOT_HERE.search(self.problem)


def logs() -> list[Path]:
    return sorted(FOLDER.glob("*.steps.gz"))


def kind_of(name: str) -> str:
    """What a log is there for, by its name."""
    first = name.partition("-")[0]
    kinds = ("admission", "preemption", "beams", "drafts", "tiny", "windows", "smollm2")
    if first in kinds:
        return "schema" if "schema" in name else first
    orders = ("fcfs", "priority", "sjf", "deadline", "adaptive", "fair", "prefix")
    return "policies x orders" if name.rpartition("-")[2] in orders else "others"


def replayed(name: str, log: bytes, *flags: str) -> Told:
    """Replay one log by the command and understand what it printed."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        path = Path(folder) / "log.steps"
        path.write_bytes(log)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main(["replay", str(path), *flags])
    return understood(name, said.getvalue(), "plans" if "--plans" in flags else "answers")


def understood(name: str, said: str, what: str) -> Told:
    """The line of the command's report that tells of `what`; without one, its last line is the problem."""
    found = re.search(rf"^{what}: ([\d,]+)(?: of|,) ([\d,]+) tokens; (.*)$", said, re.M)
    if found is None:
        lines = said.strip().splitlines()
        return Told(name, 0, 0, False, lines[-1] if lines else "it said nothing")
    compared, tokens = (int(number.replace(",", "")) for number in found.group(1, 2))
    same = found[3] == "all the same" and compared > 0
    return Told(name, compared, tokens, same, "" if same else found[3])


def without_times(log: bytes, fingerprint: str = "") -> bytes:
    """The log with no deadlines and targets, which have long passed when its requests are answered once more,
    and with policies that do not stand idle to wait for requests: all of them are there. fingerprint: of the
    engine that is to compute it, if it is not the log's."""
    changed = [MAGIC]
    for body in frames(log):
        record = msgspec.msgpack.decode(body)
        if record[0] == HEADER:
            record[CONFIG] |= {"static_patience": 0.0, "window_ms": 0.0}
            record[FINGERPRINT] = fingerprint or record[FINGERPRINT]
        elif record[0] == ARRIVED:
            record[MORE] = {
                name: value for name, value in record[MORE].items() if name not in TIMES
            }
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


def answered(name: str, log: bytes) -> Told:
    """The tokens of a log once more. Kernels of another build refuse a log, as their bits may differ; where
    only the build differs, and not the instruction set or a type, they have to give the same."""
    told = replayed(name, without_times(log))
    engine = another_build(told.problem)
    return replayed(name, without_times(log, engine)) if engine else told


def another_build(problem: str) -> str:
    """The fingerprint of this engine, if it is the log's but for the build; else ""."""
    found = re.search(r"the log is of (\S+), this engine is (\S+): the bits differ", problem)
    if found is None:
        return ""
    then, now = (
        re.sub(r"^(native-[^-]+)-[^-]+", r"\1", fingerprint) for fingerprint in found.groups()
    )
    return found[2] if then == now else ""


def judged(what: str, told: Iterable[Told]) -> Line:
    """One line for several logs that ran; it fails where nothing was compared."""
    told = list(told)
    wrong = [f"{one.log}: {one.problem}" for one in told if not one.same]
    compared, tokens = (sum(getattr(one, name) for one in told) for name in ("compared", "tokens"))
    figure = (
        f"{len(told) - len(wrong)} of {len(told)} logs, {compared:,} compared, {tokens:,} tokens"
    )
    return Line(what, "; ".join([figure, *wrong[:5]]), bool(told) and not wrong)


def replay() -> Iterator[Line]:
    """Plans by the scheduler alone, then tokens by an engine."""
    found = {
        path.name.removesuffix(".steps.gz"): gzip.decompress(path.read_bytes()) for path in logs()
    }
    if not found:
        raise NotRun(f"{FOLDER} holds no log: tests/tools/record_steplogs.py records them")
    left_out = [f"{name}: {why}" for name, why in UNREPEATABLE.items() if name in found]
    kinds: dict[str, list[Told]] = {}
    for name, log in found.items():
        if name not in UNREPEATABLE:
            kinds.setdefault(kind_of(name), []).append(replayed(name, log, "--plans"))
    for kind, told in kinds.items():
        yield judged(f"the plans of 8cc2ebe replay: {kind}", told)
    engines: dict[str, list[Told]] = {}
    for name, log in found.items():
        one = answered(name, log)
        if not one.ran:
            left_out.append(f"tokens of {name}: {one.problem}")
            continue
        engine = (
            name.partition("-")[0]
            if kind_of(name) in ("tiny", "windows", "schema")
            else "fake engine"
        )
        engines.setdefault(engine, []).append(one)
    for engine, told in engines.items():
        yield judged(f"the tokens of 8cc2ebe come again: {engine}", told)
    if left_out:
        raise NotRun("; ".join(left_out))
