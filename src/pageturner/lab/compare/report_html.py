"""A comparison as one HTML page: pictures, tables, what to choose. Readable without scripts and offline.

Owns words and layout. Must not know how a figure was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from pageturner.engine.machine_limits import GET
from pageturner.lab.compare import report_pictures, report_words, svg_charts
from pageturner.lab.compare.comparison_results import ComparisonResults, ContenderResult
from pageturner.lab.compare.literature_claims import Claim
from pageturner.lab.compare.report_words import FAIR
from pageturner.lab.compare.svg_charts import NARROW, WIDE
from pageturner.lab.planning.advice import alike

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --soft: #59636e; --rule: #d8dee4;
  --good: #e6f2ea; --reached: #1a7f37; --missed: #b35900; --card: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --soft: #9198a1;
  --rule: #30363d; --good: #12301d; --reached: #4ac26b; --missed: #f0a040; --card: #151b23 } }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  max-width: 1060px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .3rem }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem }
p { overflow-wrap: anywhere } p.soft, td.soft, li.soft { color: var(--soft) }
.verdict { font-size: 1.1rem; background: var(--card);
  border-left: 4px solid #3b7dd8; padding: .7rem 1rem; margin: 1rem 0 }
p.busy { background: var(--card); border-left: 4px solid var(--missed); padding: .7rem 1rem }
.scroll { overflow-x: auto } svg { max-width: 100%; height: auto; display: block; margin: .6rem 0 }
.hatches { position: absolute; margin: 0 } .narrow { display: none }
details { margin: .8rem 0 } summary { cursor: pointer; color: var(--soft) }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .28rem .4rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top }
th:first-child, td:first-child, table.words th, table.words td { text-align: left }
th { font-weight: 600; color: var(--soft) } td.best { background: var(--good); font-weight: 600 }
.reached { color: var(--reached); font-weight: 600 } .missed { color: var(--missed); font-weight: 600 }
code { font-size: .9em; background: var(--card); padding: .1em .3em; border-radius: 3px;
  overflow-wrap: anywhere }
@media (max-width: 700px) { .wide { display: none } .narrow { display: block }
  table { font-size: .74rem } th, td { padding: .28rem .2rem }
  table.stack tr:first-child { display: none } table.stack td { display: block; text-align: left; border: 0 }
  table.stack td::before { content: attr(data-head) ": "; color: var(--soft) }
  table.stack tr { display: block; border-bottom: 1px solid var(--rule); padding: .4rem 0 } }
"""

# The first of its name counts, and one in a picture that is not shown would draw nothing.
HATCHES = (
    f'<svg class="pt hatches" width="0" height="0" aria-hidden="true">{svg_charts.HATCH}</svg>\n'
)


def page(found: ComparisonResults) -> str:
    """The whole page."""
    sections = [
        ("Which one?", _choice(found)),
        ("Figures", _table(found)),
        ("Who was in each step", _gantt(found)),
        *([("Long prompts among running answers", _stalls(found))] if found.stalls else []),
        ("Batch size over time", _batch(found)),
        ("KV memory over time", _memory(found)),
        *([("Utilisation over time", _machine(found))] if _known(found) else []),
        ("Latency", _latency(found)),
        *([("Tenants", _tenants(found))] if found.tenants else []),
        ("Claims of the literature, and what this run shows", _claims(found)),
        ("How this was measured" if found.about.real else "How this was simulated", _method(found)),
    ]
    body = "\n".join(
        f"<section><h2>{escape(title)}</h2>\n{text}</section>" for title, text in sections
    )
    names, about = ", ".join(contest.name for contest in found.contests), found.about
    tenants = svg_charts.TENANTS if found.tenants else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>pageturner compare: {escape(names)}</title>"
        f"<style>{STYLE}{svg_charts.STYLE}{tenants}</style></head><body>\n{HATCHES}"
        f"<h1>{found.requests} requests, {len(found.contests)} ways to batch them</h1>\n"
        f'<p class="soft">{"Measured" if about.real else "Simulated"} on {escape(about.machine)}'
        f"{escape(f'; {about.when}' if about.when else '')}.</p>\n"
        f'<p class="soft">{escape(about.workload)}. {escape(about.engine)}.</p>\n'
        f"{_disturbed(found)}{_verdict(found)}\n{body}\n</body></html>\n"
    )


# -- words ---------------------------------------------------------------------------------------------------


def _disturbed(found: ComparisonResults) -> str:
    """A busy machine is said first."""
    told, rests = report_words.disturbed(found)
    return f'<p class="busy"><b>{escape(told)}</b> {escape(rests)}</p>\n' if told else ""


def _verdict(found: ComparisonResults) -> str:
    """What to choose, in one sentence, and the two figures that tell most."""
    return f'<p class="verdict">{escape(" ".join(report_words.verdict(found)))}</p>'


def _choice(found: ComparisonResults) -> str:
    if len(found.contests) < 2:
        return "<p>One contender: nothing to choose.</p>"
    advice, beside = found.advice(), any(one.measured for one in found.advice())
    figure = "reckoned" if found.reckoned else "here"
    head = ["if you want", "choose", figure, "the next", *(["measured"] if beside else [])]
    rows = []
    for one in advice:
        otherwise = "" if one.agrees else "otherwise: "
        measured = [otherwise + one.measured] if beside else []
        rows.append([one.want, one.chosen, one.figure, one.behind, *measured])
    return (
        _words(head, rows)
        + f'<p class="soft">{escape(report_words.basis(found))}</p>'
        + _kinds(found)
    )


def _kinds(found: ComparisonResults) -> str:
    """Each policy in a sentence, and each order but the plainest."""
    told = [
        (policy, report_words.WHEN.get(policy, ""))
        for policy in dict.fromkeys(c.policy for c in found.contests)
    ]
    orders = list(dict.fromkeys(c.order for c in found.contests))
    told += [
        (f"order {order}", report_words.ORDERS.get(order, ""))
        for order in orders
        if orders != ["fcfs"]
    ]
    if found.tenants and "fair" not in orders:
        told.append(("order fair", f"not among these (--orders fcfs,fair): {FAIR}"))
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(words)}</li>" for name, words in told)
    return f"<ul>{items}</ul>"


def _words(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words; on a phone each of its rows is a list."""
    cells = "".join(
        "<tr>"
        + "".join(
            f'<td data-head="{escape(h)}">{escape(c)}</td>' for h, c in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table class="words stack"><tr>{top}</tr>{cells}</table></div>'


# -- tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """sign: 1 where the least is best, -1 where the most is, 0 where neither."""

    head: str
    of: Callable[[dict[str, Any]], float]
    written: str
    sign: int


FIVE = (
    Column("output tokens/s", lambda f: f["output_tokens_per_s"], "{:,.1f}", -1),
    Column("TTFT p99, ms", lambda f: f["ttft_ms"]["p99"], "{:,.0f}", 1),
    Column("TPOT p50, ms", lambda f: f["tpot_ms"]["p50"], "{:,.1f}", 1),
    Column("longest gap, ms", lambda f: f["itl_ms"]["max"], "{:,.0f}", 1),
    Column("e2e p99, s", lambda f: f["e2e_s"]["p99"], "{:.2f}", 1),
)
MORE = (
    Column("goodput, answers/s", lambda f: f["goodput_per_s"], "{:.2f}", -1),
    Column("TTFT p50, ms", lambda f: f["ttft_ms"]["p50"], "{:,.0f}", 1),
    Column("TPOT p99, ms", lambda f: f["tpot_ms"]["p99"], "{:,.1f}", 1),
    Column("e2e p50, s", lambda f: f["e2e_s"]["p50"], "{:.2f}", 1),
    Column("steps", lambda f: f["steps"], "{:,.0f}", 0),
    Column("sequences a step", lambda f: f["sequences_per_step"], "{:.1f}", 0),
    Column("padding rows", lambda f: f["padding_share"], "{:.0%}", 1),
    Column("arithmetic", lambda f: f["machine"].get("compute_share", math.nan), "{:.0%}", 0),
    Column("bandwidth", lambda f: f["machine"].get("read_share", math.nan), "{:.0%}", 0),
    Column("KV wasted", lambda f: f["kv"]["waste"], "{:.1%}", 0),
    Column("preempted", lambda f: f["preemptions"], "{:.0f}", 0),
)


def _columns(
    contests: Sequence[ContenderResult], columns: Sequence[Column], chance: float = 0.0
) -> str:
    """A row for each contender; the best of a column is marked where nothing is tied with it."""
    head = "".join(f"<th>{escape(column.head)}</th>" for column in columns)
    best = {column.head: _alone(contests, column, chance) for column in columns}
    rows = []
    for contest in contests:
        cells = [f"<td>{escape(contest.name)}</td>"]
        for column in columns:
            value = column.of(contest.figures)
            kind = ' class="best"' if contest.name == best[column.head] else ""
            cells.append(
                f"<td{kind}>{column.written.format(value) if value == value else '-'}</td>"
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr><th>policy</th>{head}</tr>{"".join(rows)}</table></div>'


def _alone(contests: Sequence[ContenderResult], column: Column, chance: float) -> str | None:
    """Who is best, and by more than chance."""
    values = {c.name: [column.of(figures) for figures in c.each] for c in contests}
    values = {name: each for name, each in values.items() if all(value == value for value in each)}
    if not column.sign or not values:
        return None
    best = min(values, key=lambda name: column.sign * median(values[name]))
    level = [name for name in values if alike(values[name], values[best], chance)]
    return best if level == [best] and len(values) > 1 else None


def _table(found: ComparisonResults) -> str:
    targets = found.about.targets
    goals = f"TTFT {_target(targets.ttft)}, TPOT {_target(targets.tpot)}"
    reckoned = (
        f"<p>The same, reckoned:</p>{_columns(found.reckoned, FIVE)}" if found.reckoned else ""
    )
    words = (
        '<p class="soft">TTFT: time to first token. TPOT: mean time of a token after the first. Gap: between'
        " two tokens of an answer. e2e: from the request to the end of its answer. What is best, and"
        " tied with nothing, is marked.</p>"
    )
    more = (
        f'<p class="soft">Goodput: answers within the targets, {escape(goals)}. Padding rows are computed for'
        " nobody. Arithmetic, bandwidth: shares of the machine's limits, padding too.</p>"
    )
    folded = _columns(found.contests, MORE, found.chance) + more + reckoned
    return (
        _columns(found.contests, FIVE, found.chance)
        + words
        + _folded("More figures", folded)
        + _bars(found)
    )


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{text}</details>"


def _target(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _bars(found: ComparisonResults) -> str:
    ratio = (
        f"<p>What the lengths alone allow continuous over static batches of {found.ideal['batch']}:"
        f" <b>{found.ideal['steps']:.2f}x</b> where a step takes as long however full it is (the longest"
        " answer of each batch, by the steps that so many places need when none stands empty),"
        f" <b>{found.ideal['rows']:.2f}x</b> where a step takes as long as it has rows (all rows with"
        " padding, by those that are needed).</p>"
    )
    return _drawn(lambda width: report_pictures.throughput(found, width)) + ratio


def _claims(found: ComparisonResults) -> str:
    """Those that this run tells of; the others folded."""
    told = [claim for claim in found.claims if claim.verdict != "not measured"]
    others = [claim for claim in found.claims if claim.verdict == "not measured"]
    text = _judged(told, "why not") if told else "<p>None was measured here.</p>"
    return text + (
        _folded(f"{len(others)} that were not measured", _judged(others, "it needs"))
        if others
        else ""
    )


def _judged(claims: Sequence[Claim], why: str) -> str:
    rows = []
    for claim in claims:
        kind = {"reached": "reached", "not reached": "missed"}.get(claim.verdict, "soft")
        cells = [
            ("claim", "", claim.text),
            ("from", "soft", claim.source),
            ("here", "", claim.measured),
            ("verdict", kind, claim.verdict),
            (why, "soft", claim.why),
        ]
        each = (
            f'<td class="{k}" data-head="{h}">{escape(text)}</td>'
            for h, k, text in cells
            if text or h != why
        )
        rows.append(f"<tr>{''.join(each)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("claim", "from", "here", "verdict", why))
    return f'<div class="scroll"><table class="words stack"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _method(found: ComparisonResults) -> str:
    about = found.about
    turns = (
        "Each contender ran once."
        if about.rounds == 1
        else (
            f"Each contender ran {about.rounds} times, in turn (A B C, A B C); pictures and figures are of the"
            f" middle one, and rounds of one contender differ by up to {found.spread:.0%}."
        )
    )
    took = (
        f" All of it took {about.seconds:.0f} s, {about.cpu_seconds:.0f} of them of processors."
        * bool(about.seconds)
    )
    clock = (
        "The engine ran for real, on the machine named below."
        if about.real
        else "Step times come from a calibration; the scheduler is the engine's own."
    )
    unknown = "" if _known(found) else f" They are not known: {GET}, then compare again."
    lines = [
        f"{clock} {turns}{took}",
        "Nobody was told how long an answer will be: every request names the same cap as its max_tokens, and"
        " its end is forced in the sampler at its true length.",
        "All figures and pictures are made from the step log of each run. In KV memory, what is shared counts"
        " once; empty is what of the blocks in use holds no token.",
        *([f"Costs of steps: {found.words}."] if found.words else []),
        "Used is what products, attention, weights and KV would have taken at the limits of that machine,"
        f" padding too, by the time of steps.{unknown}",
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}<li>Again: <code>{escape(about.command)}</code></li></ul>"


# -- pictures ------------------------------------------------------------------------------------------------


def _drawn(draw: Callable[[float], str]) -> str:
    """A picture for a desk and one for a phone, of which one is shown."""
    return f'<div class="wide">{draw(WIDE)}</div>\n<div class="narrow">{draw(NARROW)}</div>\n'


def _figure(words: str, draw: Callable[[float], str]) -> str:
    return f"<p>{escape(words)}</p>\n{_drawn(draw)}"


def _gantt(found: ComparisonResults) -> str:
    return _figure(
        "A line is a place in the batch, a block one request; all panels have the same axis of time. Where"
        " blocks end ragged and hatched, places are idle until the longest answer ends; where they are not,"
        " somebody takes the place at once. Point at a block for its request: prompt, answer, time to first"
        " token.",
        lambda width: report_pictures.gantt(found, width),
    )


STALL_COLUMNS = (
    Column("longest gap, ms", lambda f: f["itl_ms"]["max"], "{:,.0f}", 1),
    Column("gap p99, ms", lambda f: f["itl_ms"]["p99"], "{:,.0f}", 1),
    Column("TTFT p50, ms", lambda f: f["ttft_ms"]["p50"], "{:,.0f}", 1),
    Column("TTFT p99, ms", lambda f: f["ttft_ms"]["p99"], "{:,.0f}", 1),
    Column("output tokens/s", lambda f: f["output_tokens_per_s"], "{:,.1f}", -1),
)


def _stalls(found: ComparisonResults) -> str:
    """What tells batching policies apart when not everything is there from the start."""
    first = found.stalls[0].timeline
    return _figure(
        f"Simulated, with what a step costs here ({found.words}): {len(first.requests)} requests come in"
        " groups of four at seven tenths of what this machine can do, the last of each with a prompt of"
        f" {max(one.prompt for one in first.requests.values()):,} tokens, in the middle of the others'"
        " answers. Pale: whoever is being answered"
        " stands still for somebody else's prompt. A step with a whole prompt in it holds everybody in it up"
        " just as long. chunked takes no more of a prompt into a step than its budget leaves: that is why it"
        " is the default.",
        lambda width: report_pictures.stalls(found, width),
    ) + _columns(found.stalls, STALL_COLUMNS)


def _batch(found: ComparisonResults) -> str:
    return _figure(
        "How many sequences each step computes something for. Blue is work that somebody waits for.",
        lambda width: report_pictures.batch(found, width),
    )


def _memory(found: ComparisonResults) -> str:
    return _figure(
        "Blocks are taken when a token needs them. The dashed line is what a server without pages must keep"
        " for the same requests, and what orca promises them: prompt and max_tokens of each.",
        lambda width: report_pictures.memory(found, width),
    )


def _known(found: ComparisonResults) -> bool:
    """Whether shares of a machine are known."""
    return any("compute_share" in contest.figures["machine"] for contest in found.contests)


def _machine(found: ComparisonResults) -> str:
    return _figure(
        "How much of what this machine can compute and read the steps used. What static batches compute for"
        " somebody decays as their members end; padding takes the rest.",
        lambda width: report_pictures.machine(found, width),
    )


def _latency(found: ComparisonResults) -> str:
    return _drawn(lambda width: "\n".join(report_pictures.latency(found, width)))


def _tenants(found: ComparisonResults) -> str:
    each = [c for c in found.contests if "tenants" in c.figures]
    rows = []
    for contest in each:
        about = contest.figures["tenants"]
        rows.append(
            [
                contest.name,
                f"{about['loudest_share']:.0%}",
                f"{1 / len(about['served']):.0%}",
                f"{about['difference']:,.0f}",
            ]
        )
    head = [
        "contender",
        "share of the loudest tenant while others waited",
        "an equal share",
        "largest difference of two who waited, tokens",
    ]
    return (
        f"<p>fair: {escape(FAIR)}.</p>"
        + _words(head, rows)
        + _figure(
            "Tokens served to each tenant; one of an answer counts as much as the order fair takes it.",
            lambda width: report_pictures.services(found, width),
        )
    )
