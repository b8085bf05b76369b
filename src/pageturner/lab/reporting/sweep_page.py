"""A sweep as an HTML page and as text for a terminal: charts over load, tables, and the sentences
made of them.

Owns words and layout. Must not know how a figure was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from pageturner.lab.bench.sweep import (
    FIGURES,
    PICTURES,
    SIMULATED,
    LoadSweep,
    SweepPoint,
    SweepResults,
    tied,
)
from pageturner.lab.reporting import charts, summary
from pageturner.lab.reporting import page as html
from pageturner.lab.reporting.charts import ChartLine, LineChart, LinePoint
from pageturner.lab.reporting.page import TableCell, TableRow
from pageturner.lab.reporting.summary import COLUMNS

SPEED = "output_tokens_per_s"
SHORTER = 0.05  # share by which answers are shorter than asked, from which on it is said
MAX_NAME = 12  # characters of a server's name in the table on the terminal
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

OVER = {"concurrency": "clients at once", "rate": "requests/s offered (Poisson)"}
TITLES = {"concurrency": "Over clients", "rate": "Over requests a second"}


def page(found: SweepResults) -> str:
    """Return the whole page."""
    *others, last = [one.name for one in found.servers]
    title = f"{', '.join(others)} and {last}" if others else last
    if len(others) > 3:
        title = f"{len(found.servers)} servers side by side"
    about = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in found.about.items()
    )
    stopped = "It was interrupted: this is what was measured until then."
    notes = html.bullets([stopped] * found.interrupted + found.notes, "notes")
    servers = [
        (
            one.name,
            one.model or "-",
            _where(one.started, one.url),
            one.failed or "answered to the end",
        )
        for one in found.servers
    ]
    head = ("name", "model", "where", "what became of it")
    sections = [
        (TITLES[sweep.over], _sweep(found, number))
        for number, sweep in enumerate(found.sweeps)
        if sweep.points
    ]
    sections += [
        ("Servers", html.table(head, servers, "words")),
        ("How this was measured", html.bullets(_method(found))),
    ]
    return html.page(
        f"pageturner bench sweep: {', '.join([*others, last])}",
        charts.LINES_STYLE + STYLE,
        f"<h1>{escape(title)}: throughput and latency over load</h1>\n"
        f'<dl class="about">{about}</dl>\n{notes}{html.sections(sections)}',
    )


def _where(started: str | None, url: str) -> str:
    return url if started is None else f"started here: pageturner serve {started}".strip()


def _sweep(found: SweepResults, place: int) -> str:
    sweep = found.sweeps[place]
    first, *others = verdict(found, sweep)
    pictures = [
        _picture(found, place, figure, LineChart(title, unit, OVER[sweep.over], log))
        for figure, title, unit, log in PICTURES
        if found.targets or figure != "goodput_per_s"
    ]
    pictures.append(_trade(found, sweep))
    figures = "\n".join(f"<figure>{svg}</figure>" for svg in pictures if svg)
    forecasts = "".join(
        f"<h3>Simulated beside measured: {escape(name)}</h3>"
        + html.table(("figure", "off by"), forecast_errors(found, place, name), "words")
        for name in found.simulated(place)
    )
    return (
        f'<div class="verdict">{html.paragraph(first)}{html.bullets(others)}</div>\n{_legend(found, place)}\n'
        f'<div class="charts">{figures}</div>\n'
        f"{_page_table(found, place)}{forecasts}{html.paragraph(found.forecast, 'soft')}"
    )


def _legend(found: SweepResults, place: int) -> str:
    numbers = {one.name: at for at, one in enumerate(found.servers)}
    sweep = found.sweeps[place]
    items = [
        f"<li>{charts.line_key(numbers[name])}{escape(name)}</li>" for name in found.names(sweep)
    ]
    items += [
        f"<li>{charts.line_key(numbers[name], dashed=True)}{escape(name)}, simulated</li>"
        for name in found.simulated(place)
    ]
    if any(sweep.knee(name) is not None for name in numbers):
        items.append('<li class="soft">ring: the knee, behind which more load brings nothing</li>')
    if found.rounds > 1:
        items.append(f'<li class="soft">pale bars: least to most of {found.rounds} rounds</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _method(found: SweepResults) -> list[str]:
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
    ]
    if found.targets:
        goals = ", ".join(f"{name.upper()} {most:g} ms" for name, most in found.targets.items())
        lines.append(f"Goodput: requests within all of {goals}; one that failed is within none.")
    return lines


# -- charts ----------------------------------------------------------------------------------------


def _picture(found: SweepResults, place: int, figure: str, chart: LineChart) -> str:
    sweep = found.sweeps[place]
    lines = []
    for name in (one.name for one in found.servers):
        points = [_point(sweep, point, name, figure) for point in _with(sweep.points, name, figure)]
        forecasts = found.forecasts.get((place, name), [])
        simulated = [
            (point.at, point.median(name, figure)) for point in _with(forecasts, name, figure)
        ]
        lines.append(ChartLine(points, simulated, sweep.knee(name)))
    return charts.lines_chart(chart, lines)


def _with(points: Sequence[SweepPoint], name: str, figure: str) -> Iterator[SweepPoint]:
    """Yield the points at which this figure of a server is known."""
    for point in points:
        value = point.median(name, figure)
        if value == value:
            yield point


def _point(
    sweep: LoadSweep, point: SweepPoint, name: str, figure: str, x: float | None = None
) -> LinePoint:
    value = point.median(name, figure)
    low, high = point.spread(name, figure)
    what, unit = FIGURES[figure]
    rounds = f" ({number(low)} to {number(high)})" if len(point.rounds[name]) > 1 else ""
    hint = f"{name}, {point.at:g} {sweep.unit}: {what} {number(value)} {unit}{rounds}"
    return LinePoint(point.at if x is None else x, value, low, high, hint)


def _trade(found: SweepResults, sweep: LoadSweep) -> str:
    """Draw what throughput costs in waiting: a line from the lightest to the heaviest load of each
    server."""
    lines = []
    for name in (one.name for one in found.servers):
        speed = dict(sweep.series(name, SPEED))
        points = [
            _point(sweep, point, name, "ttft_ms_p99", speed[point.at])
            for point in _with(sweep.points, name, "ttft_ms_p99")
            if point.at in speed
        ]
        lines.append(ChartLine(points, ring=speed.get(sweep.knee(name) or -1.0)))
    title = "What throughput costs: TTFT p99"
    chart = LineChart(title, "ms", "output tokens/s", log=True, loads=False)
    return charts.lines_chart(chart, lines)


# -- tables ----------------------------------------------------------------------------------------


def _rows(found: SweepResults, place: int) -> Iterator[tuple[SweepPoint, str, SweepPoint | None]]:
    """Yield each measured point of each server, with the simulated one or None."""
    for at, point in enumerate(found.sweeps[place].points):
        for name in point.rounds:
            simulated = found.forecasts.get((place, name))
            made = simulated[at] if simulated and simulated[at].rounds else None
            yield point, name, made


def table(found: SweepResults, place: int) -> str:
    """Return the medians of one sweep as text, in at most 100 columns."""
    sweep = found.sweeps[place]
    width = max(len(" simulated"), *(len(clipped(one.name)) for one in found.servers))
    columns = COLUMNS["sweep on a terminal"]  # which is too narrow for requests a second

    def cells(shown: SweepPoint, name: str, spread: str) -> list[str]:
        texts = [figure_text(shown, name, column.path) for column in columns]
        return [*texts, spread, *_within(found, shown, name)]

    rows: list[list[object]] = []
    for point, name, made in _rows(found, place):
        knee = " knee" if sweep.knee(name) == point.at else ""
        low, high = point.spread(name, SPEED)
        middle = point.median(name, SPEED)
        several = len(point.rounds[name]) > 1 and middle > 0
        spread = f"±{(high - low) / 2 / middle:.0%}" if several else ""
        lead = [f"{point.at:g}{knee}", clipped(name).ljust(width)]
        rows.append([*lead, *cells(point, name, spread), _lost(point, name)])
        if made is not None:
            rows.append(["", " simulated".ljust(width), *cells(made, name, ""), ""])
    heads = [column.head for column in columns]
    good = ["good"] * bool(found.targets)
    head = [sweep.unit, "server".ljust(width), *heads, "spread", *good, "failed"]
    about = f"medians of {found.rounds} rounds; " if found.rounds > 1 else ""
    return f"{summary.table(rows, head)}\n{about}TTFT, TPOT: p50, then p99; spread: of tokens/s over rounds"


def _page_table(found: SweepResults, place: int) -> str:
    sweep = found.sweeps[place]
    rows = []
    shown = None
    for point, name, made in _rows(found, place):
        first = point is not shown
        shown = point
        pill = '<span class="pill">knee</span>' if sweep.knee(name) == point.at else ""
        counts = [(what, point.total(name, what)) for what in ("errors", "refused", "unanswered")]
        lost = ", ".join(f"{count} {what}" for what, count in counts if count)
        failed = TableCell(lost, "bad", "; ".join(point.messages(name))) if lost else TableCell("0")
        cells: list[str | TableCell] = [
            f"{point.at:g}" * first,
            TableCell(name, markup=pill),
            *_cells(point, name),
            *_within(found, point, name),
            f"{point.total(name, 'requests')}",
            failed,
        ]
        rows.append(TableRow(cells, "first" * first))
        if made is not None:
            cells = ["", "simulated", *_cells(made, name), *_within(found, made, name), "", ""]
            rows.append(TableRow(cells, "told"))
    heads = [sweep.unit, "server", *(column.head for column in COLUMNS["sweep"])]
    heads += ["within targets"] * bool(found.targets) + ["requests", "failed"]
    return html.table(heads, rows, "points") + html.paragraph(
        "Medians of rounds; small: least and most tokens/s of them. Marked: the best at this load, where its"
        " rounds are apart from all others'.",
        "soft",
    )


def _cells(point: SweepPoint, name: str) -> list[TableCell]:
    """Return the figures of a server; those that are the best beyond what rounds differ by are
    marked."""
    cells = []
    others = [other for other in point.rounds if other != name]
    for column in COLUMNS["sweep"]:
        figure = column.path
        sign = column.sign
        mine = point.median(name, figure)
        spread = point.spread(name, figure)
        best = bool(sign and others) and all(
            sign * mine < sign * point.median(other, figure)
            and not tied(spread, point.spread(other, figure))
            for other in others
        )
        low, high = spread
        ends = f" <small>{number(low)}–{number(high)}</small>"
        ends *= figure == SPEED and low < high
        cells.append(TableCell(figure_text(point, name, figure), "best" * best, markup=ends))
    return cells


def _lost(point: SweepPoint, name: str) -> int:
    """Return the number of requests without an answer: errors, refused, or given up."""
    return sum(point.total(name, count) for count in ("errors", "refused", "unanswered"))


def _within(found: SweepResults, point: SweepPoint, name: str) -> list[str]:
    """Return the share of requests within the targets, where there are any."""
    if not found.targets:
        return []
    share = point.median(name, "goodput_share")
    return [f"{share:.0%}" if share == share else "-"]


def figure_text(point: SweepPoint, name: str, figure: str) -> str:
    """Return a median; p99 of TTFT is a lower bound where requests were given up."""
    text = number(point.median(name, figure))
    return f"≥{text}" if figure == "ttft_ms_p99" and point.total(name, "unanswered") else text


def number(value: float) -> str:
    """Return three digits, or all that stand before the point."""
    if value != value:
        return "-"
    if value >= 1e5:
        return f"{value / 1e3:,.0f}k"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def clipped(name: str) -> str:
    """Return a name that fits the table."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


# -- sentences -------------------------------------------------------------------------------------


def verdict(found: SweepResults, sweep: LoadSweep) -> list[str]:
    """Return which server gives most, and what each gives at its knee."""
    best = {}
    for name in found.names(sweep):
        known = dict(sweep.series(name, SPEED))
        points = [point for point in sweep.points if point.at in known]
        best[name] = max(points, key=lambda point: known[point.at])
    ranked = sorted(best, key=lambda name: -best[name].median(name, SPEED))
    lines = [_ranking(sweep, best, ranked)] if len(ranked) > 1 else []
    for name in ranked:
        at = sweep.knee(name)
        point = next((one for one in sweep.points if one.at == at), best[name])
        load = f"{point.at:g} {sweep.unit}"
        where = f"{name} has its knee at {load}"
        if at is None:
            where = f"{name}: no knee was reached; most at {load}"
        speed = f"{number(point.median(name, SPEED))} tokens/s"
        late = f"TTFT p99 {milliseconds(point.median(name, 'ttft_ms_p99'))}"
        pace = f"TPOT p99 {milliseconds(point.median(name, 'tpot_ms_p99'))}"
        lines.append(f"{where}: {speed}, {late}, {pace}.")
    return lines


def _ranking(sweep: LoadSweep, best: dict[str, SweepPoint], ranked: list[str]) -> str:
    first = ranked[0]
    spread = best[first].spread(first, SPEED)
    alike = [name for name in ranked if tied(best[name].spread(name, SPEED), spread)]
    top = best[first].median(first, SPEED)
    text = f"{first} gives most: {number(top)} output tokens/s at {best[first].at:g} {sweep.unit}"
    if len(alike) > 1:
        text = f"{' and '.join(alike)} are tied: their best rounds overlap at up to {number(top)} tokens/s"
    for name in ranked:
        value = best[name].median(name, SPEED)
        if name not in alike and value > 0:
            text += f", {top / value:.2f}x {name} ({number(value)} at {best[name].at:g})"
    return f"{text}."


def milliseconds(value: float) -> str:
    """Return a time with its unit; in seconds from ten of them on."""
    if value != value:
        return "unknown"
    if value >= 1e4:
        return f"{value / 1e3:.1f} s"
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def forecast_errors(found: SweepResults, place: int, name: str) -> list[tuple[str, str]]:
    """Return how far the simulation was off, by figure, over the points of a sweep."""
    rows = []
    for figure in SIMULATED:
        values = found.errors(place, name, figure)
        if values:
            middle = f"{median(map(abs, values)):.0%} in the middle"
            rows.append((FIGURES[figure][0], f"{middle}, {min(values):+.0%} to {max(values):+.0%}"))
    return rows


def answers_differ(found: SweepResults) -> list[str]:
    """Name the servers whose answers were shorter than asked: their times do not compare with
    others'."""
    lines = []
    for sweep in found.sweeps:
        for name in found.names(sweep):
            asked = dict(sweep.series(name, "asked_tokens"))
            for at, mean in sweep.series(name, "answer_tokens"):
                if mean < (1 - SHORTER) * asked.get(at, 0.0):
                    lines.append(
                        f"answers of {name} are shorter than asked: {mean:.1f} tokens on average at {at:g}"
                        f" {sweep.unit}, of {asked[at]:.1f}. It may not know ignore_eos."
                    )
                    break
    return lines
