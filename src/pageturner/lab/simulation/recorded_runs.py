"""The contents of a step log: its runs, the measured times of its requests, and its traffic, to be
sent again.

Owns the way from records to metrics and to traffic. Must not know how a log is written, nor who
asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import RequestClock, RequestMetrics
from pageturner.lab.traffic.traffic import OpenLoop, TrafficRequest
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.telemetry import step_log
from pageturner.telemetry.step_log import Arrived, Header, Left, LostRecords, Record, StepRecord

# All settings that decide which plans an engine makes.
SCHEDULER_OPTIONS = tuple(one.name for one in fields(SchedulerConfig))


def recorded_config(recorded: Mapping[str, Any]) -> EngineConfig:
    """The settings of a log or a calibration, without its step log. Settings that this program does
    not have come from another version and are left out."""
    known = {one.name: recorded[one.name] for one in fields(EngineConfig) if one.name in recorded}
    return EngineConfig(**known | {"step_log": ""})


@dataclass(slots=True)
class RecordedRun:
    """One start of an engine and all that followed, in order."""

    header: Header
    records: list[Record] = field(default_factory=list)

    @property
    def config(self) -> EngineConfig:
        """The settings that the engine had."""
        return recorded_config(self.header.config)

    @property
    def sizes(self) -> KVSizes:
        head = self.header
        return KVSizes(head.num_blocks, head.window, head.sliding, head.states, head.tails)

    @property
    def steps(self) -> Iterator[StepRecord]:
        return (record for record in self.records if isinstance(record, StepRecord))

    @property
    def lost(self) -> int:
        """Records that the log lacks."""
        return sum(record.lost for record in self.records if isinstance(record, LostRecords))


def read_runs(path: Path) -> list[RecordedRun]:
    """EngineFault('step_log') for a log without any."""
    found: list[RecordedRun] = []
    for record in step_log.read(path):
        if isinstance(record, Header):
            found.append(RecordedRun(record))
        elif found:
            found[-1].records.append(record)
        else:
            raise EngineFault("step_log", f"{path} is damaged: it does not begin with a header")
    if not found:
        raise EngineFault("step_log", f"{path} holds nothing yet")
    return found


def last_run(path: Path) -> RecordedRun:
    """The newest run in which anything was computed."""
    for run in reversed(read_runs(path)):
        if any(step.items for step in run.steps):
            return run
    raise EngineFault("step_log", f"{path} holds no step")


def request_metrics(run: RecordedRun) -> RequestMetrics:
    """The times of the requests that were answered."""
    found, clocks = RequestMetrics(), dict[int, RequestClock]()
    for record in run.records:
        match record:
            case Arrived(at=at, id=id, arrival=arrival):
                clocks[id] = RequestClock(min(arrival, at) or at)
                found.arrived(clocks[id].arrival)
            case Left(id=id):
                clocks.pop(id, None)
            case StepRecord(end=end, items=items, ended=ended):
                for item in items:
                    if item.tokens and item.id in clocks:
                        clocks[item.id].gained(len(item.tokens), end)
                for id, _, why in ended:
                    clock = clocks.pop(id, None)
                    if clock is not None and why in ("stop", "length"):
                        found.add(clock)
    return found


@dataclass(slots=True)
class _Said:
    """A request of the log and what was answered to it."""

    arrived: Arrived
    at: float
    tokens: list[int] = field(default_factory=list)


def recorded_traffic(found: Iterable[RecordedRun]) -> OpenLoop:
    """All that arrived, at its times from the first on, each answered as long as it was then. A
    request that was taken up again after a crash is one request. EngineFault if nothing was
    answered."""
    said, open_ = list[_Said](), dict[int, _Said]()
    for run in found:
        shift = run.header.wall - run.header.clock
        for record in run.records:
            if isinstance(record, Arrived):
                if "resume" not in record.more or record.id not in open_:
                    begin = min(record.arrival, record.at) or record.at
                    open_[record.id] = _Said(record, begin + shift)
                    said.append(open_[record.id])
                if "resume" in record.more:
                    open_[record.id].tokens = [*record.more["resume"][0]["tokens"]]
            elif isinstance(record, StepRecord):
                for item in record.items:
                    if item.id in open_:
                        open_[item.id].tokens += item.tokens
    answered = sorted((one for one in said if one.tokens), key=lambda one: one.at)
    if not answered:
        raise EngineFault("step_log", "the log holds no request that was answered")
    return OpenLoop(list(_arrivals(answered)))


def _arrivals(said: Iterable[_Said]) -> Iterator[TrafficRequest]:
    first = None
    for one in said:
        first = one.at if first is None else first
        request = one.arrived.request()
        yield TrafficRequest(
            prompt=request.prompt,
            output=len(one.tokens),
            max_tokens=request.params.max_tokens,
            arrival=one.at - first,
            tenant=request.tenant,
            priority=request.priority,
            answer=tuple(one.tokens),
        )
