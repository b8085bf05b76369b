"""What a sweep found: all that its page, its table and its JSON file show, and the sentences made of it.

Owns the record of a sweep and what is said of it. Must not know HTML, nor how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pageturner.lab.bench.sweep import COUNTS, FIGURES, LoadSweep, SweepPoint, SweptServer, tied
from pageturner.lab.bench.sweep_simulated import TOLD, error
from pageturner.lab.reporting import summary

SCHEMA = 1  # of the JSON file
SHORTER = 0.05  # share by which answers are shorter than asked, from which on it is said
NAME = 12  # most characters of a server's name in the table on the terminal


@dataclass(slots=True)
class SweepResults:
    """about: machine, load, date, command and how long, for people; forecasts: by number of the sweep and
    name of the server, a simulated point for each measured one; forecast: where they come from, or how to
    have some; targets: of goodput, in ms."""

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
        """Servers with anything measured in it."""
        return [one.name for one in self.servers if sweep.series(one.name, "output_tokens_per_s")]

    @property
    def measured(self) -> bool:
        return any(self.names(sweep) for sweep in self.sweeps)


def as_json(found: SweepResults) -> dict[str, Any]:
    """All of it, for other programs: the fields of docs/sweep.md."""
    return {
        "schema": SCHEMA,
        "about": found.about,
        "interrupted": found.interrupted,
        "rounds": found.rounds,
        "goodput_targets_ms": found.targets,
        "notes": found.notes,
        "forecast": found.forecast,
        "servers": [
            {
                "name": one.name,
                "url": one.url,
                "model": one.model,
                "started_with": one.started,
                "failed": one.failed or None,
            }
            for one in found.servers
        ],
        "sweeps": [_sweep_json(found, number) for number in range(len(found.sweeps))],
    }


def _sweep_json(found: SweepResults, number: int) -> dict[str, Any]:
    sweep = found.sweeps[number]
    points = []
    for place, point in enumerate(sweep.points):
        servers: dict[str, Any] = {}
        for name in point.rounds:
            told = found.forecasts.get((number, name))
            servers[name] = {
                **{count: point.total(name, count) for count in COUNTS},
                "median": {figure: _known(point.median(name, figure)) for figure in FIGURES},
                "least_and_most": {
                    figure: [*map(_known, point.spread(name, figure))] for figure in FIGURES
                },
                "messages": point.messages(name),
                "forecast": told
                and {figure: _known(told[place].median(name, figure)) for figure in TOLD},
                "rounds": point.rounds[name],
            }
        points.append({"at": point.at, "servers": servers})
    return {
        "over": sweep.over,
        "unit": sweep.unit,
        "points": points,
        "knees": {one.name: sweep.knee(one.name) for one in found.servers},
        "forecast_errors": {
            name: {figure: _spread_json(_errors(found, number, name, figure)) for figure in TOLD}
            for (at, name) in found.forecasts
            if at == number
        },
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _errors(found: SweepResults, number: int, name: str, figure: str) -> list[float]:
    told = found.forecasts[number, name]
    return [each for _, each in error(found.sweeps[number], told, name, figure)]


def _spread_json(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median_of_sizes": median(map(abs, values)), "least": min(values), "most": max(values)}


# -- sentences -----------------------------------------------------------------------------------------------


def peak(sweep: LoadSweep, name: str) -> SweepPoint | None:
    """The point with most output tokens a second."""
    known = dict(sweep.series(name, "output_tokens_per_s"))
    points = [point for point in sweep.points if point.at in known]
    return max(points, key=lambda point: known[point.at], default=None)


def verdict(found: SweepResults, sweep: LoadSweep) -> list[str]:
    """Who gives most, and what each gives at its knee."""
    best = {name: point for name in found.names(sweep) if (point := peak(sweep, name)) is not None}
    ranked = sorted(best, key=lambda name: -best[name].median(name, "output_tokens_per_s"))
    said = []
    if len(ranked) > 1:
        said.append(_ranking(sweep, best, ranked))
    for name in ranked:
        at = sweep.knee(name)
        point = next((one for one in sweep.points if one.at == at), best[name])
        where = f"{point.at:g} {sweep.unit}"
        speed = f"{number(point.median(name, 'output_tokens_per_s'))} tokens/s"
        late = f"TTFT p99 {milliseconds(point.median(name, 'ttft_ms_p99'))}"
        pace = f"TPOT p99 {milliseconds(point.median(name, 'tpot_ms_p99'))}"
        if at is None:
            said.append(f"{name}: no knee was reached; most at {where}: {speed}, {late}, {pace}.")
        else:
            said.append(f"{name} has its knee at {where}: {speed}, {late}, {pace}.")
    return said


def _ranking(sweep: LoadSweep, best: dict[str, SweepPoint], ranked: list[str]) -> str:
    first = ranked[0]
    figure = "output_tokens_per_s"
    ours = best[first].spread(first, figure)
    alike = [name for name in ranked if tied(best[name].spread(name, figure), ours)]
    top = best[first].median(first, figure)
    if len(alike) > 1:
        text = f"{' and '.join(alike)} are tied: their best rounds overlap at up to {number(top)} tokens/s"
    else:
        text = (
            f"{first} gives most: {number(top)} output tokens/s at {best[first].at:g} {sweep.unit}"
        )
    others = [
        f"{top / value:.2f}x {name} ({number(value)} at {best[name].at:g})"
        for name in ranked
        if name not in alike and (value := best[name].median(name, figure)) > 0
    ]
    return f"{text}, {', '.join(others)}." if others else f"{text}."


def milliseconds(value: float) -> str:
    """With its unit; seconds from ten of them on."""
    if value != value:
        return "unknown"
    return (
        f"{value / 1e3:.1f} s"
        if value >= 1e4
        else f"{value:,.0f} ms"
        if value >= 10
        else f"{value:.1f} ms"
    )


def forecast_errors(found: SweepResults, number: int, name: str) -> list[tuple[str, str]]:
    """How far the simulation was off, by figure, over the points of a sweep."""
    rows = []
    for figure in TOLD:
        values = _errors(found, number, name, figure)
        if values:
            middle = f"{median(map(abs, values)):.0%}"
            rows.append(
                (
                    FIGURES[figure][0],
                    f"{middle} in the middle, {min(values):+.0%} to {max(values):+.0%}",
                )
            )
    return rows


def answers_differ(found: SweepResults) -> list[str]:
    """Whose answers were shorter than was asked: their times do not compare with others'."""
    said = []
    for sweep in found.sweeps:
        for name in found.names(sweep):
            asked = dict(sweep.series(name, "asked_tokens"))
            for at, mean in sweep.series(name, "answer_tokens"):
                if mean < (1 - SHORTER) * asked.get(at, 0.0):
                    said.append(
                        f"answers of {name} are shorter than asked: {mean:.1f} tokens on average at {at:g}"
                        f" {sweep.unit}, of {asked[at]:.1f}. It may not know ignore_eos."
                    )
                    break
    return said


# -- the terminal --------------------------------------------------------------------------------------------


def table(found: SweepResults, number: int) -> str:
    """Medians of one sweep, in at most 100 columns."""
    sweep, rows = found.sweeps[number], list[list[object]]()
    width = max(len(" simulated"), *(len(clipped(one.name)) for one in found.servers))
    for place, point in enumerate(sweep.points):
        for name in point.rounds:
            first: list[object] = [
                _load(point, sweep, name),
                clipped(name).ljust(width),
                *_figures(point, name),
            ]
            good = _goodput(found, point, name)
            rows.append([*first, wide(point, name), *good, lost(point, name)])
            told = found.forecasts.get((number, name))
            if told and told[place].rounds:
                first = ["", " simulated".ljust(width), *_figures(told[place], name)]
                rows.append([*first, "", *_goodput(found, told[place], name), ""])
    names = [sweep.unit, "server".ljust(width), "tokens/s", "TTFT ms", "p99", "TPOT ms", "p99"]
    head = [*names, "gap p99", "spread", *(["good"] if found.targets else []), "failed"]
    about = f"medians of {found.rounds} rounds; " if found.rounds > 1 else ""
    return f"{summary.table(rows, head)}\n{about}TTFT, TPOT: p50, then p99; spread: of tokens/s over rounds"


def lost(point: SweepPoint, name: str) -> int:
    """Requests without an answer: errors, refused, or given up."""
    return sum(point.total(name, count) for count in ("errors", "refused", "unanswered"))


def wide(point: SweepPoint, name: str) -> str:
    """Half of the spread of throughput over rounds, as a share of it; empty for one round."""
    low, high = point.spread(name, "output_tokens_per_s")
    middle = point.median(name, "output_tokens_per_s")
    return f"±{(high - low) / 2 / middle:.0%}" if len(point.rounds[name]) > 1 and middle > 0 else ""


def _load(point: SweepPoint, sweep: LoadSweep, name: str) -> str:
    return f"{point.at:g}{' knee' if sweep.knee(name) == point.at else ''}"


def _figures(point: SweepPoint, name: str) -> list[str]:
    names = (
        "output_tokens_per_s",
        "ttft_ms_p50",
        "ttft_ms_p99",
        "tpot_ms_p50",
        "tpot_ms_p99",
        "gap_ms_p99",
    )
    return [figure_text(point, name, figure) for figure in names]


def figure_text(point: SweepPoint, name: str, figure: str) -> str:
    """A median; a lower bound as one: p99 of TTFT where requests were given up."""
    text = number(point.median(name, figure))
    return f"≥{text}" if figure == "ttft_ms_p99" and point.total(name, "unanswered") else text


def _goodput(found: SweepResults, point: SweepPoint, name: str) -> list[str]:
    if not found.targets:
        return []
    share = point.median(name, "goodput_share")
    return [f"{share:.0%}" if share == share else "-"]


def number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    if value != value:
        return "-"
    if value >= 1e5:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def clipped(name: str) -> str:
    """A name that fits the table."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"
