"""The page of a sweep: whole, escaped, offline; its axes and legends."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from pageturner.lab.reporting import charts, sweep_page
from pageturner.lab.reporting.charts import ChartLine, LineChart, LinePoint, value_axis
from support.sweeps import results

VOID = ("meta",)


class Balanced(HTMLParser):
    """Fails for tags that are not closed in order; collects attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = sweep_page.page(results())
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    linked = [
        value for name, value in parser.attributes if name in ("href", "src", "srcset", "action")
    ]
    assert linked == []
    assert "@import" not in text
    assert "url(" not in text
    outside = set(re.findall(r"https?://[^\s\"<')]+", text))
    assert outside <= {"http://www.w3.org/2000/svg", "http://127.0.0.1:1", "http://127.0.0.1:2"}


def test_what_came_from_outside_is_escaped() -> None:
    text = sweep_page.page(results())
    for raw in ("<script", "<b>no", "<i>m", "<here>", "<machine>"):
        assert raw not in text
    assert "evil &quot;&lt;script&gt;" in text
    assert "a &lt;machine&gt;" in text


def test_pictures_have_titles_units_and_a_table_beside() -> None:
    text = sweep_page.page(results())
    for words in (
        "Throughput",
        "output tokens/s",
        "clients at once",
        "Time to first token, p99",
        "Goodput",
        "Gap between two tokens, p99",
        "What throughput costs",
        "simulated",
        "knee",
        "5 errors",
        "2026-11-23",
        "pale bars",
    ):
        assert words in text, words
    assert text.count("<figure>") == 8
    assert "ours, 2 clients: output tokens 182 tokens/s (180 to 184)" in text
    plain = sweep_page.page(results(targets={}))
    assert plain.count("<figure>") == 7
    assert "Goodput" not in plain
    assert "interrupted" in sweep_page.page(results(interrupted=True))


def test_the_best_is_marked_only_where_rounds_are_apart() -> None:
    row = next(
        line for line in sweep_page.page(results()).split("<tr") if ">1</td><td>ours" in line
    )
    assert '<td class="best">102 ' in row
    assert row.count('class="best"') == 1, "latencies are equal"


def test_charts_are_xml_with_dashes_and_a_ring() -> None:
    line = ChartLine(
        [LinePoint(1, 5, 4, 6, "a"), LinePoint(2, 9, 9, 9, "b")], [(1, 5), (2, 10)], ring=2
    )
    svg = charts.lines_chart(LineChart("T", "ms", "clients", log=True), [line, ChartLine([])])
    ElementTree.fromstring(svg)
    assert svg.count('class="told c0"') == 1
    assert svg.count('class="ring c0"') == 1
    assert svg.count('class="spread c0"') == 1
    assert charts.lines_chart(LineChart("T", "ms", "clients"), [ChartLine([])]) == ""
    ElementTree.fromstring(
        charts.line_key(5).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    )


@pytest.mark.parametrize("values", [[3.0], [0.0], [1.0, 5.0], [1.0, 1e6], [0.02, 0.9], [7e4, 9e4]])
@pytest.mark.parametrize("log", [False, True])
def test_axes_have_a_few_round_ticks_within(values: list[float], log: bool) -> None:
    scale = value_axis(values, log)
    ticks = scale.ticks(5)
    assert 2 <= len(ticks) <= 8
    assert all(scale.low * 0.99 <= tick <= scale.high * 1.01 for tick in ticks)
    places = [scale.at(tick) for tick in ticks]
    assert places == sorted(places, reverse=True)
    assert len(set(map(charts.short, ticks))) == len(ticks)
