"""Traffic from files: workloads (JSONL of prompts) and traces (JSONL of lengths, plain or gzip).

Owns the two formats, the scaling of traces to a small engine, and what is said of lines that make
no sense. Must not know servers, engines or step logs.

    workload   prompt, max_tokens, and optional arrival_s, forced_end (where the answer ends),
               tenant
    trace      prompt_tokens, output_tokens, and optional arrival_s, client_id, hash_ids (each
               stands for HASH_TOKENS of the prompt); of sessions session_id, turn, think_s,
               session_start_s
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pageturner.errors import EngineFault
from pageturner.lab.traffic.traffic import (
    OWN,
    OpenLoop,
    Pieces,
    Sessions,
    SessionTurn,
    Traffic,
    TrafficRequest,
)

HASH_TOKENS = 512  # of the prompt, for each of the `hash_ids`


# -- workloads -------------------------------------------------------------------------------------


class _WorkloadLine(msgspec.Struct, frozen=True):
    prompt: str
    max_tokens: int
    arrival_s: float = 0.0
    forced_end: int | None = None
    tenant: str = ""


def read_workload(path: Path) -> list[TrafficRequest]:
    """The requests of a JSONL file, in file order. EngineFault names the line that cannot be
    read."""
    decoder = msgspec.json.Decoder(_WorkloadLine)
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EngineFault(
            "workload", f"cannot read the workload {path}: {error.strerror}"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise EngineFault("workload", f"{path}:{number}: {error}") from error
        if one.max_tokens < 1 or one.arrival_s < 0:
            raise EngineFault(
                "workload", f"{path}:{number}: max_tokens must be > 0 and arrival_s >= 0"
            )
        found.append(
            TrafficRequest(
                one.prompt, one.forced_end, one.max_tokens, one.arrival_s, tenant=one.tenant
            )
        )
    if not found:
        raise EngineFault("workload", f"{path} holds no request")
    return found


# -- traces ----------------------------------------------------------------------------------------


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace; unknown keys are ignored."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    hash_ids: list[int] = []
    session_id: str | None = None
    turn: int = 0
    think_s: float | None = None
    session_start_s: float = 0.0
    client_id: int | None = None

    @property
    def tenant(self) -> str:
        return "" if self.client_id is None else str(self.client_id)


def read_trace(path: Path, most: int = 0, *, sessions: bool = True) -> list[TraceRow]:
    """The first `most` rows of a trace (0: all). EngineFault names the line that cannot be read,
    and refuses sessions where they cannot be sent."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    try:
        opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
        with opened as file:
            for number, line in enumerate(itertools.islice(file, most or None), 1):
                row = decoder.decode(line)
                if row.prompt_tokens < 1 or row.output_tokens < 1:
                    raise EngineFault("workload", f"{path}:{number}: lengths are 1 or more")
                rows.append(row)
    except msgspec.DecodeError as error:
        raise EngineFault("workload", f"{path}:{len(rows) + 1}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise EngineFault(
            "workload", f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not rows:
        raise EngineFault("workload", f"{path} holds no request")
    if rows[0].session_id is not None and not sessions:
        message = f"{path} holds sessions, whose turns wait for answers: that is not replayed yet"
        raise EngineFault("workload", message)
    return rows


def trace_name(path: Path) -> str:
    """The name of a trace."""
    return path.name.split(".")[0]


@dataclass(frozen=True, slots=True)
class TraceScaling:
    """The way in which the requests of a trace become traffic for another engine.

    length, rate  lengths are multiplied (and stay 1 or more), arrival times divided
    cap           max_tokens of every request, as a client would send it; longer answers are cut
                  there
    context       most tokens of prompt and cap together; longer requests are left out; 0: no limit
    think         most seconds between an answer and the next turn
    oracle        the server is told the true length instead of the cap
    """

    length: float = 1.0
    rate: float = 1.0
    cap: int = 4096
    context: int = 0
    think: float = 60.0
    oracle: bool = False

    def tokens(self, length: int) -> int:
        return max(1, round(length * self.length))

    def max_tokens(self, row: TraceRow) -> int:
        return min(self.tokens(row.output_tokens), self.cap) if self.oracle else self.cap

    def fits(self, row: TraceRow) -> bool:
        return (
            not self.context
            or self.tokens(row.prompt_tokens) + self.max_tokens(row) <= self.context
        )

    def cuts(self, row: TraceRow) -> bool:
        """Return whether the cap ends its answer."""
        return self.tokens(row.output_tokens) > self.cap


def trace_requests(rows: list[TraceRow], scaling: TraceScaling) -> list[TrafficRequest]:
    """The requests that fit; times that are missing are 0."""
    return [_request(number, row, scaling) for number, row in enumerate(rows) if scaling.fits(row)]


def from_trace(rows: list[TraceRow], scaling: TraceScaling, where: str) -> tuple[Traffic, int]:
    """The traffic of a trace, and how many of its requests were left out as too long. EngineFault
    for times that are missing, negative or out of order."""
    if rows[0].session_id is not None:
        return _sessions(rows, scaling, where)
    check_times(rows, where)
    kept = trace_requests(rows, scaling)
    if not kept:
        message = (
            f"no request of {where} fits {scaling.context:,} tokens beside a cap of {scaling.cap:,}"
        )
        raise EngineFault("workload", message)
    return OpenLoop(kept), len(rows) - len(kept)


def _request(number: int, row: TraceRow, scaling: TraceScaling) -> TrafficRequest:
    own, block, left = (
        OWN + 2 * number,
        scaling.tokens(HASH_TOKENS),
        scaling.tokens(row.prompt_tokens),
    )
    parts = []
    for id in row.hash_ids:
        if left <= 0:
            break
        parts.append((id, min(block, left)))
        left -= block
    if left > 0:  # what no hash id reaches to is its own
        parts.append((own, left))
    return TrafficRequest(
        prompt=Pieces(tuple(parts)),
        output=None if scaling.oracle else scaling.tokens(row.output_tokens),
        max_tokens=scaling.max_tokens(row),
        arrival=(row.arrival_s or 0.0) / scaling.rate,
        tenant=row.tenant,
        answer=own + 1,
    )


def check_times(rows: list[TraceRow], where: str) -> None:
    """EngineFault for times that are missing, negative or out of order."""
    before = 0.0
    for number, row in enumerate(rows, 1):
        at = row.arrival_s
        if at is None:
            message = (
                f"{where}: request {number} has no arrival time: give --rate, and times are made up"
            )
            raise EngineFault("workload", message)
        if not 0 <= at < float("inf"):
            raise EngineFault(
                "workload", f"{where}: request {number} arrives at {at} s: 0 or later is possible"
            )
        if at < before:
            message = (
                f"{where}: request {number} arrives at {at:g} s, the one before it at {before:g} s"
            )
            raise EngineFault("workload", f"{message}: sort the trace by arrival_s")
        before = at


def _sessions(rows: list[TraceRow], scaling: TraceScaling, where: str) -> tuple[Traffic, int]:
    names: dict[str, list[TraceRow]] = {}
    for number, row in enumerate(rows, 1):
        if row.session_id is None or (row.think_s is not None and not row.think_s >= 0):
            raise EngineFault(
                "workload", f"{where}: request {number} has no session, or a negative think_s"
            )
        names.setdefault(row.session_id, []).append(row)
    turns, starts, out = [], [], 0
    for each in names.values():
        fit = list(itertools.takewhile(scaling.fits, sorted(each, key=lambda row: row.turn)))
        out += len(each) - len(fit)
        if not fit:
            continue
        starts.append(fit[0].session_start_s / scaling.rate)
        turns.append(
            [
                SessionTurn(
                    think=min(row.think_s or 0.0, scaling.think),
                    prompt=scaling.tokens(row.prompt_tokens),
                    output=scaling.tokens(row.output_tokens),
                )
                for row in fit
            ]
        )
    if not turns:
        raise EngineFault("workload", f"no request of {where} fits {scaling.context:,} tokens")
    return Sessions(starts, turns, scaling.cap), out
