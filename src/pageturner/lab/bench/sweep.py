"""A sweep: servers beside each other at one load after another, in turn, until more load brings
nothing.

Owns the order of runs, when a server has had enough (its knee), and what several rounds say
together. Must not know how a point is run (sweep_load.py), nor how it is shown.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pageturner.lab.reporting import summary

GAIN = (
    0.05  # of throughput: a step that gives less, while first tokens come later, is behind the knee
)
MAX_POINTS = 24

_TABLES = json.loads(Path(__file__).with_name("sweep_figures.json").read_bytes())
# what is summed up over rounds: name, what it is called, its unit
FIGURES: dict[str, list[str]] = _TABLES["figures"]
SIMULATED: list[str] = _TABLES["simulated"]
COUNTS: list[str] = _TABLES["counts"]
# figure, title, unit, whether its axis may be logarithmic
PICTURES: list[tuple[str, str, str, bool]] = _TABLES["pictures"]
UNITS = {"concurrency": "clients", "rate": "requests/s"}
SCHEMA = 1  # of the JSON file


@dataclass(slots=True)
class SweptServer:
    """A server under test. failed: why it is no longer asked; started: by us, with which flags of
    serve."""

    name: str
    url: str = ""
    model: str = ""
    started: str | None = None
    context: int = 0
    alone: float = 0.0  # seconds that a request takes by itself
    ignores_eos: bool = True  # whether it may be asked to answer on to the length that is wanted
    failed: str = ""


@dataclass(slots=True)
class SweepPoint:
    """All rounds at one load, by name of the server."""

    at: float
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def median(self, name: str, figure: str) -> float:
        """nan where there is none."""
        return summary.percentile(self._values(name, figure), 50)

    def medians(self, name: str, figures: Iterable[str]) -> dict[str, float | None]:
        return {figure: _known(self.median(name, figure)) for figure in figures}

    def spread(self, name: str, figure: str) -> tuple[float, float]:
        """Least and most of the rounds."""
        values = self._values(name, figure)
        return (min(values), max(values)) if values else (float("nan"), float("nan"))

    def total(self, name: str, count: str) -> int:
        return sum(one[count] for one in self.rounds.get(name, []))

    def messages(self, name: str) -> list[str]:
        """Return the error messages of a server, each once."""
        return list(
            dict.fromkeys(text for one in self.rounds.get(name, []) for text in one["messages"])
        )

    def _values(self, name: str, figure: str) -> list[float]:
        values = [one[figure] for one in self.rounds.get(name, []) if one["answered"]]
        return [value for value in values if value is not None and value == value]


@dataclass(slots=True)
class LoadSweep:
    """Points over `concurrency` or `rate`. values: those that were asked for; None: doubling from
    `start` on until no server gains anything, or `most` is reached."""

    over: str
    values: list[float] | None = None
    start: float = 1.0
    most: float = 256.0
    points: list[SweepPoint] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return UNITS[self.over]

    def loads(self) -> Iterator[float]:
        if self.values is not None:
            return iter(self.values)
        doubled = (self.start * 2**number for number in range(MAX_POINTS))
        return itertools.takewhile(lambda load: load <= self.most, doubled)

    def series(self, name: str, figure: str) -> list[tuple[float, float]]:
        """Load and median, where there is one."""
        pairs = [(point.at, point.median(name, figure)) for point in self.points]
        return [(at, value) for at, value in pairs if value == value]

    def knee(self, name: str) -> float | None:
        """The load behind which more gives nothing; None: not seen."""
        speed = self.series(name, "output_tokens_per_s")
        late = dict(self.series(name, "ttft_ms_p99"))
        known = [(at, value, late[at]) for at, value in speed if at in late]
        found = knee([(value, wait) for _, value, wait in known])
        return None if found is None else known[found][0]


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """The first of these points (tokens a second, p99 of TTFT) behind which none has GAIN more
    throughput, while first tokens come later at the next. None: there is no such point."""
    for number, ((speed, wait), (_, later)) in enumerate(itertools.pairwise(points)):
        best = max(more for more, _ in points[number + 1 :])
        if best < (1 + GAIN) * speed and later > wait:
            return number
    return None


# one run: server, load, number of the point in its sweep, round; the figures of
# sweep_load.point_figures
RunPoint = Callable[[SweptServer, LoadSweep, float, int, int], dict[str, Any]]


@dataclass(slots=True)
class Sweeper:
    """Runs sweeps, and keeps what came of them whatever happens.

    rounds    of each point; servers take turns within a round
    deadline  of all, on `clock`: no run begins behind it
    notes     what whoever reads the figures must know
    """

    servers: list[SweptServer]
    run: RunPoint
    rounds: int
    deadline: float
    clock: Callable[[], float] = time.monotonic
    notes: list[str] = field(default_factory=list)

    def sweep(self, one: LoadSweep) -> None:
        """All points, or until the deadline. The points are kept in `one` as they come."""
        for number, load in enumerate(one.loads()):
            live = [server for server in self.servers if not server.failed]
            if one.values is None:
                live = [server for server in live if one.knee(server.name) is None]
            if not live:
                return
            one.points.append(SweepPoint(load))
            if not self._rounds(one, number, live):
                return

    def _rounds(self, one: LoadSweep, number: int, live: list[SweptServer]) -> bool:
        """Run all rounds of the last point on all live servers; return whether there was time for
        all."""
        point = one.points[-1]
        for turn in range(self.rounds):
            for server in live:
                if server.failed:
                    continue
                if self.clock() >= self.deadline:
                    self.notes.append(
                        f"the time of all was up at {point.at:g} {one.unit}, before round {turn + 1} of"
                        f" {server.name}: --total-seconds"
                    )
                    return False
                figures = self.run(server, one, point.at, number, turn)
                point.rounds.setdefault(server.name, []).append(figures)
                self._judge(server, one, point, figures)
        return True

    def _judge(
        self, server: SweptServer, one: LoadSweep, point: SweepPoint, figures: dict[str, Any]
    ) -> None:
        if figures["answered"]:
            return
        why = "; ".join(figures["messages"]) or "no answer in the time of a point (--seconds)"
        server.failed = f"answered nothing at {point.at:g} {one.unit}: {why}"
        self.notes.append(f"{server.name} {server.failed}. It is left out from there on.")


def tied(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Return whether two spreads of rounds overlap, so that the rounds do not tell which is
    more."""
    return a[0] <= b[1] and b[0] <= a[1]


# -- results ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class SweepResults:
    """Everything that a page, a table and the JSON file show of a sweep.

    about      machine, load, date, command and how long, for people
    forecasts  by number of the sweep and name of the server, a simulated point for each measured
               one
    forecast   where the simulated points come from, or how to have some
    targets    of goodput, in ms
    """

    servers: list[SweptServer]
    sweeps: list[LoadSweep]
    about: dict[str, str]
    rounds: int
    targets: dict[str, float]
    notes: list[str]
    forecast: str = ""
    forecasts: dict[tuple[int, str], list[SweepPoint]] = field(default_factory=dict)
    interrupted: bool = False

    def names(self, sweep: LoadSweep) -> list[str]:
        """Return the servers with anything measured in this sweep."""
        return [one.name for one in self.servers if sweep.series(one.name, "output_tokens_per_s")]

    @property
    def measured(self) -> bool:
        return any(self.names(sweep) for sweep in self.sweeps)

    def simulated(self, number: int) -> list[str]:
        """Return the servers of which there is a forecast for this sweep."""
        return [name for at, name in self.forecasts if at == number]

    def errors(self, number: int, name: str, figure: str) -> list[float]:
        """Return forecast by measured less 1 at each load with both."""
        found = []
        points = zip(self.sweeps[number].points, self.forecasts[number, name], strict=True)
        for point, simulated in points:
            measured = point.median(name, figure)
            expected = simulated.median(name, figure)
            if measured > 0 and expected == expected:
                found.append(expected / measured - 1)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all of it for other programs: the fields of docs/sweep.md."""
        servers = [
            {
                **{name: getattr(one, name) for name in ("name", "url", "model")},
                "started_with": one.started,
                "failed": one.failed or None,
            }
            for one in self.servers
        ]
        return {
            "schema": SCHEMA,
            "about": self.about,
            "interrupted": self.interrupted,
            "rounds": self.rounds,
            "goodput_targets_ms": self.targets,
            "notes": self.notes,
            "forecast": self.forecast,
            "servers": servers,
            "sweeps": [self._sweep_json(number) for number in range(len(self.sweeps))],
        }

    def _sweep_json(self, number: int) -> dict[str, Any]:
        sweep = self.sweeps[number]
        points = []
        for place, point in enumerate(sweep.points):
            servers: dict[str, Any] = {}
            for name in point.rounds:
                simulated = self.forecasts.get((number, name))
                spreads = {figure: point.spread(name, figure) for figure in FIGURES}
                servers[name] = {
                    **{count: point.total(name, count) for count in COUNTS},
                    "median": point.medians(name, FIGURES),
                    "least_and_most": {f: [*map(_known, ends)] for f, ends in spreads.items()},
                    "messages": point.messages(name),
                    "forecast": simulated and simulated[place].medians(name, SIMULATED),
                    "rounds": point.rounds[name],
                }
            points.append({"at": point.at, "servers": servers})
        return {
            "over": sweep.over,
            "unit": sweep.unit,
            "points": points,
            "knees": {one.name: sweep.knee(one.name) for one in self.servers},
            "forecast_errors": {
                name: {
                    figure: _errors_json(self.errors(number, name, figure)) for figure in SIMULATED
                }
                for name in self.simulated(number)
            },
        }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _errors_json(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median_of_sizes": median(map(abs, values)), "least": min(values), "most": max(values)}
