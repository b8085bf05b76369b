"""The frame of an HTML report: style, sections, tables. Readable without scripts and offline.

Owns markup. Must not know what is reported. Everything that is given as text is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pageturner.http.web_pages import design

STYLE = """
:root { --best: light-dark(#e6f2ea, #12301d); --missed: light-dark(#b35900, #f0a040) }
body { max-width: 1060px; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: .3rem }
h2 { margin: 2.4rem 0 .4rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem }
p { overflow-wrap: anywhere } p.soft, td.soft, li.soft { color: var(--soft) }
.verdict { font-size: 1.1rem; background: var(--card);
  border-left: 4px solid var(--decode); padding: .7rem 1rem; margin: 1rem 0 }
p.busy { background: var(--card); border-left: 4px solid var(--missed); padding: .7rem 1rem }
.scroll { overflow-x: auto } svg { max-width: 100%; height: auto; display: block; margin: .6rem 0 }
.hatches { position: absolute; margin: 0 } .narrow { display: none }
details { margin: .8rem 0 }
table { font-size: .82rem; width: 100% }
th, td { padding: .28rem .4rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top }
th:first-child, td:first-child, table.words th, table.words td { text-align: left }
td.best { background: var(--best); font-weight: 600 }
.reached { color: var(--good); font-weight: 600 } .missed { color: var(--missed); font-weight: 600 }
code { font-size: .9em; background: var(--card); padding: .1em .3em; border-radius: 3px;
  overflow-wrap: anywhere }
@media (max-width: 700px) { .wide { display: none } .narrow { display: block }
  table { font-size: .74rem } th, td { padding: .28rem .2rem }
  table.stack tr:first-child { display: none } table.stack td { display: block; text-align: left; border: 0 }
  table.stack td::before { content: attr(data-head) ": "; color: var(--soft) }
  table.stack tr { display: block; border-bottom: 1px solid var(--rule); padding: .4rem 0 } }
"""


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a table. kind: its CSS class; title: its hint; markup: HTML that stands behind its
    text."""

    text: str
    kind: str = ""
    title: str = ""
    markup: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table with a CSS class of its own."""

    cells: Sequence[str | TableCell]
    kind: str = ""


def page(title: str, style: str, body: str) -> str:
    """Return a whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{design()}{STYLE}{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def sections(each: Iterable[tuple[str, str]]) -> str:
    """Return a section for each pair of title and content."""
    return "\n".join(
        f"<section><h2>{escape(title)}</h2>\n{content}</section>" for title, content in each
    )


def table(
    head: Sequence[str], rows: Iterable[TableRow | Sequence[str | TableCell]], kind: str = ""
) -> str:
    """Return a table; with the kind "stack" its rows are lists on a phone."""
    lines = "".join(
        _row(row if isinstance(row, TableRow) else TableRow(row), head, kind) for row in rows
    )
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="scroll">{opening}<tr>{top}</tr>{lines}</table></div>'


def _row(row: TableRow, head: Sequence[str], kind: str) -> str:
    cells = []
    for name, given in zip(head, row.cells, strict=False):
        cell = given if isinstance(given, TableCell) else TableCell(given)
        label = name if "stack" in kind else ""
        wanted = {"class": cell.kind, "title": cell.title, "data-head": label}
        about = "".join(f' {key}="{escape(value)}"' for key, value in wanted.items() if value)
        cells.append(f"<td{about}>{escape(cell.text)}{cell.markup}</td>")
    about = f' class="{row.kind}"' if row.kind else ""
    return f"<tr{about}>{''.join(cells)}</tr>"


def bullets(items: Iterable[str], kind: str = "") -> str:
    """Return a list of texts; "" for none."""
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    about = f' class="{kind}"' if kind else ""
    return f"<ul{about}>{lines}</ul>" if lines else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; "" for no text."""
    about = f' class="{kind}"' if kind else ""
    return f"<p{about}>{escape(text)}</p>" if text else ""


def folded(title: str, content: str) -> str:
    """Return content that is shown on demand."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
