"""A sweep as one HTML page: pictures over load, tables, what was measured how. No script, no other file.

Owns words and layout. Must not know how a figure was made. All that came from outside (names, messages of
servers) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pageturner.lab.bench import sweep_charts
from pageturner.lab.bench.sweep import FIGURES, LoadSweep, SweepPoint, tied
from pageturner.lab.bench.sweep_charts import ChartLine, LinePoint
from pageturner.lab.bench.sweep_report import (
    SweepResults,
    figure_text,
    forecast_errors,
    lost,
    number,
    verdict,
)
from pageturner.lab.compare import report_html

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem 1.4rem; margin: .8rem 0 1.2rem }
.charts figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: .5rem .4rem .2rem }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.3rem; padding: 0; margin: .6rem 0; list-style: none }
.legend li { display: flex; align-items: center; gap: .45rem; overflow-wrap: anywhere }
svg.key { width: 28px; height: 16px; flex: none; margin: 0 }
.verdict p { margin: 0; font-weight: 600 } .verdict ul { margin: .4rem 0 0; padding-left: 1.2rem;
  font-size: 1rem } .verdict { overflow-wrap: anywhere }
dl.about { display: grid; grid-template-columns: max-content 1fr;
  gap: .1rem .9rem; font-size: .88rem; color: var(--soft); margin: .4rem 0 1rem }
dl.about dt { font-weight: 600 } dl.about dd { margin: 0; overflow-wrap: anywhere }
ul.notes { border-left: 4px solid var(--missed); background: var(--card); padding: .6rem 1rem .6rem 2rem;
  overflow-wrap: anywhere }
tr.first td { border-top: 2px solid var(--rule) } tr.told td { color: var(--soft); font-style: italic }
table.points td { white-space: nowrap } .pill { font-size: .75rem; border: 1px solid var(--soft);
  border-radius: 1em; padding: 0 .45em; margin-left: .4em; color: var(--soft) }
table.points td:nth-child(2), table.points th:nth-child(2) {
  text-align: left; white-space: normal; min-width: 9.5rem; overflow-wrap: anywhere }
small { color: var(--soft) } td.bad { color: var(--missed); font-weight: 600 }
@media (max-width: 700px) { body { margin: 1rem auto } h1 { font-size: 1.35rem }
  dl.about { display: block } dl.about dd { margin-bottom: .3rem } }
"""

# figure, title, unit, whether its axis may be logarithmic
PICTURES = (
    ("output_tokens_per_s", "Throughput", "output tokens/s", False),
    ("ttft_ms_p99", "Time to first token, p99", "ms", True),
    ("ttft_ms_p50", "Time to first token, p50", "ms", True),
    ("tpot_ms_p50", "Time per token after it, p50", "ms", True),
    ("tpot_ms_p99", "Time per token after it, p99", "ms", True),
    ("gap_ms_p99", "Gap between two tokens, p99", "ms", True),
    ("goodput_per_s", "Goodput", "requests/s within targets", False),
)
OVER = {"concurrency": "clients at once", "rate": "requests/s offered (Poisson)"}
TITLES = {"concurrency": "Over clients", "rate": "Over requests a second"}
# heading, figure, 1 where less is better, -1 where more is
COLUMNS = (
    ("output tokens/s", "output_tokens_per_s", -1),
    ("requests/s", "requests_per_s", 0),
    ("TTFT p50, ms", "ttft_ms_p50", 1),
    ("p99", "ttft_ms_p99", 1),
    ("TPOT p50, ms", "tpot_ms_p50", 1),
    ("p99", "tpot_ms_p99", 1),
    ("gap p99, ms", "gap_ms_p99", 1),
)


def page(found: SweepResults) -> str:
    """The whole page."""
    names = [one.name for one in found.servers]
    title = _listed(names) if len(names) < 5 else f"{len(names)} servers side by side"
    about = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in found.about.items()
    )
    sections = "\n".join(
        f"<section><h2>{TITLES[sweep.over]}</h2>\n{_sweep(found, number)}</section>"
        for number, sweep in enumerate(found.sweeps)
        if sweep.points
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>pageturner bench sweep: {escape(', '.join(names))}</title>"
        f"<style>{report_html.STYLE}{sweep_charts.STYLE}{STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}: throughput and latency over load</h1>\n"
        f'<dl class="about">{about}</dl>\n{_notes(found)}{sections}\n'
        f"<section><h2>Servers</h2>{_servers(found)}</section>\n"
        f"<section><h2>How this was measured</h2>{_method(found)}</section>\n</body></html>\n"
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _notes(found: SweepResults) -> str:
    stopped = (
        ["It was interrupted: this is what was measured until then."] if found.interrupted else []
    )
    items = "".join(f"<li>{escape(note)}</li>" for note in [*stopped, *found.notes])
    return f'<ul class="notes">{items}</ul>\n' if items else ""


def _sweep(found: SweepResults, place: int) -> str:
    sweep = found.sweeps[place]
    first, *others = verdict(found, sweep)
    items = "".join(f"<li>{escape(one)}</li>" for one in others)
    said = f"<p>{escape(first)}</p>{f'<ul>{items}</ul>' if items else ''}"
    pictures = [
        _picture(found, place, *each)
        for each in PICTURES
        if found.targets or each[0] != "goodput_per_s"
    ]
    pictures.append(_trade(found, sweep))
    figures = "\n".join(f"<figure>{svg}</figure>" for svg in pictures if svg)
    return (
        f'<div class="verdict">{said}</div>\n{_legend(found, place)}\n<div class="charts">{figures}</div>\n'
        f"{_table(found, place)}{_forecast(found, place)}"
    )


def _legend(found: SweepResults, place: int) -> str:
    numbers = {one.name: at for at, one in enumerate(found.servers)}
    items = [
        f"<li>{sweep_charts.key(numbers[name])}{escape(name)}</li>"
        for name in found.names(found.sweeps[place])
    ]
    items += [
        f"<li>{sweep_charts.key(numbers[name], dashed=True)}{escape(name)}, simulated</li>"
        for at, name in found.forecasts
        if at == place
    ]
    if any(found.sweeps[place].knee(one.name) is not None for one in found.servers):
        items.append('<li class="soft">ring: the knee, behind which more load brings nothing</li>')
    if found.rounds > 1:
        items.append(f'<li class="soft">pale bars: least to most of {found.rounds} rounds</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


# -- pictures ------------------------------------------------------------------------------------------------


def _picture(found: SweepResults, place: int, figure: str, title: str, unit: str, log: bool) -> str:
    sweep, lines = found.sweeps[place], []
    for one in found.servers:
        points = [
            _point(sweep, point, one.name, figure, point.at)
            for point in sweep.points
            if (value := point.median(one.name, figure)) == value
        ]
        told = [
            (point.at, value)
            for point in found.forecasts.get((place, one.name), [])
            if (value := point.median(one.name, figure)) == value
        ]
        lines.append(ChartLine(points, told, sweep.knee(one.name)))
    return sweep_charts.chart(title, unit, OVER[sweep.over], lines, log=log)


def _point(sweep: LoadSweep, point: SweepPoint, name: str, figure: str, x: float) -> LinePoint:
    value, (low, high) = point.median(name, figure), point.spread(name, figure)
    what, unit = FIGURES[figure]
    rounds = f" ({number(low)} to {number(high)})" if len(point.rounds[name]) > 1 else ""
    hint = f"{name}, {point.at:g} {sweep.unit}: {what} {number(value)} {unit}{rounds}"
    return LinePoint(x, value, low, high, hint)


def _trade(found: SweepResults, sweep: LoadSweep) -> str:
    """What throughput costs in waiting: one line from the lightest to the heaviest load of each server."""
    lines = []
    for name in (one.name for one in found.servers):
        speed = dict(sweep.series(name, "output_tokens_per_s"))
        points = [
            _point(sweep, point, name, "ttft_ms_p99", speed[point.at])
            for point in sweep.points
            if point.at in speed and (late := point.median(name, "ttft_ms_p99")) == late
        ]
        ring = speed.get(sweep.knee(name) or -1.0)
        lines.append(ChartLine(points, ring=ring))
    title = "What throughput costs: TTFT p99"
    return sweep_charts.chart(title, "ms", "output tokens/s", lines, log=True, loads=False)


# -- tables --------------------------------------------------------------------------------------------------


def _table(found: SweepResults, place: int) -> str:
    sweep, rows = found.sweeps[place], []
    heads = [sweep.unit, "server", *(head for head, _, _ in COLUMNS)]
    heads += [*(["within targets"] if found.targets else []), "requests", "failed"]
    for at, point in enumerate(sweep.points):
        for order, name in enumerate(point.rounds):
            load = f"{point.at:g}" if not order else ""
            pill = '<span class="pill">knee</span>' if sweep.knee(name) == point.at else ""
            cells = [load, escape(name) + pill, *_cells(point, name)]
            cells += _share(found, point, name)
            rows.append(
                _row("first" if not order else "", cells, _counts(point, name), _best(point, name))
            )
            told = found.forecasts.get((place, name))
            if told and told[at].rounds:
                made = told[at]
                cells = ["", "simulated", *_cells(made, name), *_share(found, made, name)]
                rows.append(_row("told", cells, "<td></td><td></td>", frozenset()))
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    return (
        f'<div class="scroll"><table class="points"><tr>{top}</tr>{"".join(rows)}</table></div>'
        '<p class="soft">Medians of rounds; small: least and most tokens/s of them. Marked: the best at this'
        " load, where its rounds are apart from all others'.</p>"
    )


def _row(kind: str, cells: Sequence[str], counts: str, best: frozenset[int]) -> str:
    parts = [
        f'<td class="best">{cell}</td>' if place in best else f"<td>{cell}</td>"
        for place, cell in enumerate(cells)
    ]
    return f'<tr class="{kind}">{"".join(parts)}{counts}</tr>'


def _cells(point: SweepPoint, name: str) -> list[str]:
    cells = []
    for _, figure, _ in COLUMNS:
        cell = figure_text(point, name, figure)
        low, high = point.spread(name, figure)
        if figure == "output_tokens_per_s" and low < high:
            cell += f" <small>{number(low)}–{number(high)}</small>"
        cells.append(cell)
    return cells


def _share(found: SweepResults, point: SweepPoint, name: str) -> list[str]:
    if not found.targets:
        return []
    share = point.median(name, "goodput_share")
    return [f"{share:.0%}" if share == share else "-"]


def _counts(point: SweepPoint, name: str) -> str:
    failed = lost(point, name)
    why = escape("; ".join(point.messages(name)))
    counts = [(what, point.total(name, what)) for what in ("errors", "refused", "unanswered")]
    told = ", ".join(f"{count} {what}" for what, count in counts if count)
    kind = f' class="bad" title="{why}"' if failed else ""
    return f"<td>{point.total(name, 'requests')}</td><td{kind}>{told or 0}</td>"


def _best(point: SweepPoint, name: str) -> frozenset[int]:
    """Columns in which this server is best at this load beyond what rounds differ by."""
    others = [other for other in point.rounds if other != name]
    found = set()
    for place, (_, figure, sign) in enumerate(COLUMNS, 2):
        mine, spread = point.median(name, figure), point.spread(name, figure)
        beaten = [
            sign * mine < sign * point.median(other, figure)
            and not tied(spread, point.spread(other, figure))
            for other in others
        ]
        if sign and beaten and all(beaten):
            found.add(place)
    return frozenset(found)


def _forecast(found: SweepResults, place: int) -> str:
    names = [name for at, name in found.forecasts if at == place]
    parts = []
    for name in names:
        rows = forecast_errors(found, place, name)
        parts.append(
            f"<h3>Simulated beside measured: {escape(name)}</h3>{_words(('figure', 'off by'), rows)}"
        )
    return f'{"".join(parts)}<p class="soft">{escape(found.forecast)}</p>'


def _words(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table class="words"><tr>{top}</tr>{cells}</table></div>'


def _servers(found: SweepResults) -> str:
    rows = []
    for one in found.servers:
        how = (
            f"started here: pageturner serve {one.started}".strip()
            if one.started is not None
            else one.url
        )
        rows.append((one.name, one.model or "-", how, one.failed or "answered to the end"))
    return _words(("name", "model", "where", "what became of it"), rows)


def _method(found: SweepResults) -> str:
    lines = [
        "Clients at once: each sends its next request when its last one is answered. Throughput counts the"
        " tokens that came while all of them were busy; the first request of each client, when all begin"
        " together, does not count in latencies.",
        "Requests a second: Poisson arrivals, whatever the server does; throughput counts until the last"
        " answer. What had no answer after four times the seconds of a point was given up, counts as failed,"
        " and in TTFT with the time that it had waited.",
        "Servers took turns at each point, in each round with the same requests, which no point before had"
        " sent (a prefix cache would know them). Temperature 0, and every answer as long as was asked.",
        "The knee: the first load behind which none brings 5 % more output tokens/s, while p99 of TTFT"
        " grows. TTFT: from sending to the first token. TPOT: mean time of a token after the first. Gap:"
        " between two pieces of a stream that came one after the other. All by the client's clock, which ran"
        " on the machine named above.",
        *(
            [f"Goodput: requests within all of {_goals(found)}; one that failed is within none."]
            if found.targets
            else []
        ),
    ]
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _goals(found: SweepResults) -> str:
    return ", ".join(f"{name.upper()} {most:g} ms" for name, most in found.targets.items())
