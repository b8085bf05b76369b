"""A comparison as one HTML page: pictures, tables, what to choose. Readable without scripts and offline.

Owns words and layout. Must not know how a figure was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pageturner.lab import svg_charts
from pageturner.lab.comparison_results import ComparisonResults, ContenderResult
from pageturner.lab.svg_charts import ChartSeries, Panel, Range
from pageturner.runtime.machine_limits import GET

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --soft: #59636e; --rule: #d8dee4;
  --good: #e6f2ea; --reached: #1a7f37; --missed: #b35900; --card: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --soft: #9198a1;
  --rule: #30363d; --good: #12301d; --reached: #4ac26b; --missed: #f0a040; --card: #151b23 } }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  max-width: 1060px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .3rem }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem }
p.soft, td.soft, li.soft { color: var(--soft) } .verdict { font-size: 1.1rem; background: var(--card);
  border-left: 4px solid #3b7dd8; padding: .7rem 1rem; margin: 1rem 0 }
.scroll { overflow-x: auto } svg { max-width: 100%; height: auto; display: block; margin: .6rem 0 }
@media (max-width: 700px) { .scroll svg { max-width: none } }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .28rem .4rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top }
th:first-child, td:first-child, table.words th, table.words td { text-align: left }
th { font-weight: 600; color: var(--soft) } td.best { background: var(--good); font-weight: 600 }
.reached { color: var(--reached); font-weight: 600 } .missed { color: var(--missed); font-weight: 600 }
code { font-size: .9em; background: var(--card); padding: .1em .3em; border-radius: 3px;
  overflow-wrap: anywhere }
"""

ALIKE = 0.03  # two figures that differ by no more than this share are told as one
WHEN = {
    "static": "what continuous batching is compared with: simple, and every request waits for the slowest",
    "window": "static with a bound on the wait for a full batch",
    "orca": "continuous, whole prompts, memory for the longest answer kept from the start",
    "prefill_first": "new prompts at once: the first token comes early, running answers stop meanwhile",
    "served_ratio": "new prompts in groups: fewer interruptions than prefill_first, later first tokens",
    "chunked": "prompts in chunks beside the running answers, which hardly notice; the default",
    "adaptive_chunk": "chunked, with chunks as large as the target of a token's time allows",
    "unbatched": "one request at a time, as a program without batching does it",
}


def page(found: ComparisonResults) -> str:
    """The whole page."""
    sections = [
        ("Which one?", _choice(found)),
        ("Figures", _table(found)),
        ("Who was in each step", _gantt(found)),
        ("Batch size over time", _batch(found)),
        ("KV memory over time", _memory(found)),
        *([("Utilisation over time", _machine(found))] if _known(found) else []),
        ("Latency", _latency(found)),
        *([("Tenants", _tenants(found))] if any("tenants" in c.figures for c in found.contests) else []),
        ("Claims of the literature, and what this run shows", _claims(found)),
        ("How this was measured", _method(found)),
    ]
    body = "\n".join(f"<section><h2>{escape(title)}</h2>\n{text}</section>" for title, text in sections)
    names = ", ".join(contest.name for contest in found.contests)
    kind = "measured" if found.about.real else "simulated"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>pageturner compare: {escape(names)}</title>"
        f"<style>{STYLE}{svg_charts.STYLE}</style></head><body>\n"
        f"<h1>{found.requests} requests, {len(found.contests)} ways to batch them</h1>\n"
        f'<p class="soft">{escape(found.about.workload)}. {kind.capitalize()}: {escape(found.about.engine)}.'
        f"</p>\n{_verdict(found)}\n{body}\n</body></html>\n"
    )


# -- words ---------------------------------------------------------------------------------------------------


def _verdict(found: ComparisonResults) -> str:
    """One sentence, made of the figures."""
    fastest = max(found.contests, key=lambda c: float(c.figures["output_tokens_per_s"]))
    near = (1 - ALIKE) * fastest.figures["output_tokens_per_s"]
    alike = [c for c in found.contests if c.figures["output_tokens_per_s"] >= near]
    fastest = next((c for c in alike if c.policy == "chunked"), fastest)  # the default, among equals
    slowest = min(found.contests, key=lambda c: float(c.figures["output_tokens_per_s"]))
    if fastest is slowest:
        text = f"{fastest.name}: {_seconds(fastest)} for all answers."
    else:
        ratio = fastest.figures["output_tokens_per_s"] / slowest.figures["output_tokens_per_s"]
        text = (
            f"{fastest.name} had answered everything after {_seconds(fastest)}, {slowest.name} after"
            f" {_seconds(slowest)}: {ratio:.2f} times the throughput."
        )
    same = "all" if found.same == found.requests else f"{found.same} of {found.requests}"
    text += f" The answers to {same} requests were the same in all runs, token for token."
    return f'<p class="verdict">{escape(text)}</p>'


def _seconds(contest: ContenderResult) -> str:
    return f"{contest.timeline.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What somebody may want, the figure that tells, and how it is written. sign: 1 where less is better;
    without: policies that have it for nothing, because they let nobody in meanwhile."""

    want: str
    of: Callable[[dict[str, Any]], float]
    written: str
    sign: int = 1
    without: tuple[str, ...] = ()


RECOMMENDATIONS = (
    Recommendation("most throughput", lambda f: f["output_tokens_per_s"], "{:,.0f} tokens/s", -1),
    Recommendation("most answers within the targets", lambda f: f["goodput_per_s"], "{:.2f} a second", -1),
    Recommendation("earliest first token", lambda f: f["ttft_ms"]["mean"], "mean TTFT {:,.0f} ms"),
    Recommendation(
        "steadiest stream while others are let in",
        lambda f: f["itl_ms"]["max"],
        "longest gap {:,.0f} ms",
        without=("static", "window", "unbatched"),
    ),
    Recommendation("earliest end of the slowest", lambda f: f["e2e_s"]["p99"], "p99 of end-to-end {:.1f} s"),
    Recommendation("short answers early", lambda f: f["short_e2e_s"], "the shortest quarter after {:.1f} s"),
)


def _choice(found: ComparisonResults) -> str:
    if len(found.contests) < 2:
        return "<p>One contender: nothing to choose.</p>"
    rows = [row for one in RECOMMENDATIONS if (row := _recommendation(one, found.contests))]
    kinds = "".join(
        f"<li><b>{escape(policy)}</b>: {escape(WHEN.get(policy, ''))}</li>"
        for policy in dict.fromkeys(c.policy for c in found.contests)
    )
    noise = ""
    if found.about.real and found.about.rounds == 1:
        noise = '<p class="soft">One run each: differences of less than a tenth may be chance.</p>'
    return _words(["if you want", "choose", "here", "the next"], rows) + noise + f"<ul>{kinds}</ul>"


def _recommendation(recommendation: Recommendation, contests: Sequence[ContenderResult]) -> list[str]:
    """Who does it best, together with those that are ALIKE; and the best of the others."""
    known = {c.name: recommendation.of(c.figures) for c in contests if c.policy not in recommendation.without}
    known = {name: value for name, value in known.items() if value == value}
    if not known:
        return []
    ranked = sorted(known, key=lambda name: recommendation.sign * known[name])
    best = known[ranked[0]]
    if recommendation.sign < 0 and not best:
        return [recommendation.want, "none of these", recommendation.written.format(best), "-"]
    alike = [name for name in known if abs(known[name] - best) <= ALIKE * abs(best)]
    others = [name for name in ranked if name not in alike]
    behind = f"{others[0]}: {recommendation.written.format(known[others[0]])}" if others else "-"
    return [recommendation.want, " or ".join(alike), recommendation.written.format(best), behind]


def _words(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table class="words"><tr>{top}</tr>{cells}</table></div>'


# -- tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """sign: 1 where the least is best, -1 where the most is, 0 where neither."""

    head: str
    of: Callable[[dict[str, Any]], float]
    written: str
    sign: int


COLUMNS = (
    Column("output tokens/s", lambda f: f["output_tokens_per_s"], "{:,.1f}", -1),
    Column("goodput, answers/s", lambda f: f["goodput_per_s"], "{:.2f}", -1),
    Column("TTFT p50, ms", lambda f: f["ttft_ms"]["p50"], "{:,.0f}", 1),
    Column("p99", lambda f: f["ttft_ms"]["p99"], "{:,.0f}", 1),
    Column("TPOT p50, ms", lambda f: f["tpot_ms"]["p50"], "{:,.1f}", 1),
    Column("p99", lambda f: f["tpot_ms"]["p99"], "{:,.1f}", 1),
    Column("longest gap, ms", lambda f: f["itl_ms"]["max"], "{:,.0f}", 1),
    Column("e2e p50, s", lambda f: f["e2e_s"]["p50"], "{:.2f}", 1),
    Column("p99", lambda f: f["e2e_s"]["p99"], "{:.2f}", 1),
    Column("sequences a step", lambda f: f["sequences_per_step"], "{:.1f}", 0),
    Column("padding rows", lambda f: f["padding_share"], "{:.0%}", 1),
    Column("arithmetic", lambda f: f["machine"].get("compute_share", math.nan), "{:.0%}", 0),
    Column("bandwidth", lambda f: f["machine"].get("read_share", math.nan), "{:.0%}", 0),
    Column("KV wasted", lambda f: f["kv"]["waste"], "{:.1%}", 0),
    Column("preempted", lambda f: f["preemptions"], "{:.0f}", 0),
)


def _table(found: ComparisonResults) -> str:
    head = "".join(f"<th>{escape(column.head)}</th>" for column in COLUMNS)
    best = {}
    for number, column in enumerate(COLUMNS):
        values = [column.of(c.figures) for c in found.contests]
        ranked = sorted({value for value in values if value == value}, key=lambda value: column.sign * value)
        best[number] = ranked[0] if column.sign and len(ranked) > 1 else None
    rows = []
    for contest in found.contests:
        cells = [f"<td>{escape(contest.name)}</td>"]
        for number, column in enumerate(COLUMNS):
            value = column.of(contest.figures)
            kind = ' class="best"' if value == best[number] else ""
            cells.append(f"<td{kind}>{column.written.format(value) if value == value else '-'}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    targets = found.about.targets
    goals = f"TTFT {_target(targets.ttft)}, TPOT {_target(targets.tpot)}"
    return (
        f'<div class="scroll"><table><tr><th>policy</th>{head}</tr>{"".join(rows)}</table></div>'
        f'<p class="soft">TTFT: time to first token. TPOT: mean time of a token after the first. Gap: between'
        f" two tokens of an answer. Goodput: answers within the targets, {escape(goals)}. Rows for nobody:"
        " padding that is computed. Arithmetic, bandwidth: shares of the machine's limits, padding too. The"
        " best of a column is marked.</p>" + _bars(found)
    )


def _target(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _bars(found: ComparisonResults) -> str:
    static = next((c for c in found.contests if c.policy == "static"), None)
    base = float(static.figures["output_tokens_per_s"]) if static else 0.0
    rows = []
    for contest in found.contests:
        speed = float(contest.figures["output_tokens_per_s"])
        words = f"{speed:,.1f}" + (f" = {speed / base:.2f}x static" if base and contest is not static else "")
        if len(contest.rounds) > 1:
            words += f" ({min(contest.rounds):,.1f} to {max(contest.rounds):,.1f})"
        rows.append((contest.name, speed, words))
    mark = None
    if static:
        allowed = found.ideal["rows"]
        mark = (base * allowed, f"static x {allowed:.2f}: no row computed for nobody, all rows as fast")
    svg = svg_charts.bars("Output tokens per second", rows, mark)
    ratio = (
        f"<p>What the lengths alone allow continuous over static batches of {found.ideal['batch']}:"
        f" <b>{found.ideal['steps']:.2f}x</b> where a step takes as long however full it is (the longest"
        " answer of each batch, by the steps that so many places need when none stands empty),"
        f" <b>{found.ideal['rows']:.2f}x</b> where a step takes as long as it has rows (all rows with"
        " padding, by those that are needed).</p>"
    )
    return f'<div class="scroll">{svg}</div>{ratio}'


def _claims(found: ComparisonResults) -> str:
    rows = []
    for claim in found.claims:
        kind = {"reached": "reached", "not reached": "missed"}.get(claim.verdict, "soft")
        rows.append(
            f"<tr><td>{escape(claim.text)}</td><td class='soft'>{escape(claim.source)}</td>"
            f"<td>{escape(claim.measured)}</td><td class='{kind}'>{escape(claim.verdict)}</td>"
            f"<td class='soft'>{escape(claim.why)}</td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("claim", "from", "here", "verdict", "why not"))
    return f'<div class="scroll"><table class="words"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _method(found: ComparisonResults) -> str:
    about = found.about
    turns = "Each contender ran once." if about.rounds == 1 else (
        f"Each contender ran {about.rounds} times, in turn; pictures and figures are of the middle one."
    )  # fmt: skip
    clock = (
        "The engine ran for real, on the machine named below." if about.real
        else "Step times come from a calibration; the scheduler is the engine's own."
    )  # fmt: skip
    unknown = "" if _known(found) else f" They are not known: {GET}, then compare again."
    lines = [
        f"{clock} {turns}",
        "Nobody was told how long an answer will be: every request names the same cap as its max_tokens, and"
        " its end is forced in the sampler at its true length.",
        "All figures and pictures are made from the step log of each run. In KV memory, what is shared counts"
        " once; empty is what of the blocks in use holds no token.",
        f"Machine: {about.machine}.",
        "Used is what products, attention, weights and KV would have taken at the limits of that machine,"
        f" padding too, by the time of steps.{unknown}",
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}<li>Again: <code>{escape(about.command)}</code></li></ul>"


# -- pictures ------------------------------------------------------------------------------------------------


def _figure(words: str, svg: str) -> str:
    return f'<p>{escape(words)}</p>\n<div class="scroll">{svg}</div>\n'


def gantt(found: ComparisonResults) -> str:
    """The picture of who was in each step."""
    runs = [(contest.name, contest.timeline) for contest in found.contests]
    return svg_charts.gantt(runs, svg_charts.time_axis([found.seconds]))


def _gantt(found: ComparisonResults) -> str:
    return _figure(
        "A line is a place in the batch, a block one request; all panels have the same axis of time. Where"
        " blocks end ragged and hatched, places are idle until the longest answer ends; where they are not,"
        " somebody takes the place at once. Point at a block for its request.",
        gantt(found),
    )


def batch(found: ComparisonResults) -> str:
    """The picture of batch sizes."""
    panels = []
    for contest in found.contests:
        series = found.series(contest)
        layers = [
            ChartSeries("decode", "sequences that decode", series["decoding"]),
            ChartSeries("prefill", "whose prompts are computed", series["prefilling"]),
            ChartSeries("padding", "ended, computed all the same", series["padding"]),
        ]
        waiting = [ChartSeries("dashed", "waiting", series["waiting"])] if any(series["waiting"]) else []
        panels.append(Panel(contest.name, layers, waiting))
    return svg_charts.areas(panels, svg_charts.time_axis([found.seconds]), "sequences")


def _batch(found: ComparisonResults) -> str:
    return _figure(
        "How many sequences each step computes something for. Blue is work that somebody waits for.",
        batch(found),
    )


def memory(found: ComparisonResults) -> str:
    """The picture of KV memory."""
    panels = []
    for contest in found.contests:
        series = found.series(contest)
        pairs = zip(series["kv_reserved"], series["kv_used"], strict=True)
        layers = [
            ChartSeries("used", "tokens with KV", series["kv_used"]),
            ChartSeries("waste", "empty, in blocks in use", [max(0.0, r - u) for r, u in pairs]),
        ]
        whole = ChartSeries("dashed", "prompt and max_tokens of all who run", series["kv_whole"])
        panels.append(Panel(contest.name, layers, [whole]))
    return svg_charts.areas(panels, svg_charts.time_axis([found.seconds]), "tokens of KV memory")


def _memory(found: ComparisonResults) -> str:
    return _figure(
        "Blocks are taken when a token needs them. The dashed line is what a server without pages must keep"
        " for the same requests, and what orca promises them: prompt and max_tokens of each.",
        memory(found),
    )


def _known(found: ComparisonResults) -> bool:
    """Whether shares of a machine are known."""
    return any("compute_share" in contest.figures["machine"] for contest in found.contests)


def machine(found: ComparisonResults) -> str:
    """The picture of the shares of the machine's limits."""
    panels = []
    for contest in found.contests:
        series = found.series(contest)
        areas = [ChartSeries("used", "arithmetic: products of int8 and fp32", series["useful"])]
        if any(series["for_nobody"]):
            areas.append(ChartSeries("padding", "for padding", series["for_nobody"]))
        panels.append(Panel(contest.name, areas, [ChartSeries("dashed", "reading", series["read"])]))
    return svg_charts.areas(panels, svg_charts.time_axis([found.seconds]), "% of the machine's limits")


def _machine(found: ComparisonResults) -> str:
    return _figure(
        "How much of what this machine can compute and read the steps used. What static batches compute for"
        " somebody decays as their members end; padding takes the rest.",
        machine(found),
    )


def latency(found: ComparisonResults) -> list[str]:
    """Three pictures."""
    kinds = (
        ("Time to first token", "ttft_ms", "ms"),
        ("Mean time of a token after the first", "tpot_ms", "ms"),
        ("Whole answer", "e2e_s", "s"),
    )
    return [
        svg_charts.ranges(
            title,
            [Range(c.name, *(c.figures[name][q] for q in ("p50", "p90", "p99"))) for c in found.contests],
            unit,
        )
        for title, name, unit in kinds
    ]


def _latency(found: ComparisonResults) -> str:
    return "".join(f'<div class="scroll">{svg}</div>\n' for svg in latency(found))


def services(found: ComparisonResults) -> str:
    """The picture of what each tenant was served; nothing in it without tenants."""
    each = [c for c in found.contests if "tenants" in c.figures]
    panels = [(c.name, found.services(c), c.figures["tenants"]["loudest"]) for c in each]
    return svg_charts.services(panels, svg_charts.time_axis([found.seconds]))


def _tenants(found: ComparisonResults) -> str:
    each = [c for c in found.contests if "tenants" in c.figures]
    rows = []
    for contest in each:
        about = contest.figures["tenants"]
        rows.append(
            [contest.name, f"{about['loudest_share']:.0%}", f"{1 / len(about['served']):.0%}",
             f"{about['difference']:,.0f}"]
        )  # fmt: skip
    head = ["contender", "share of the loudest tenant while others waited", "an equal share",
            "largest difference of two who waited, tokens"]  # fmt: skip
    return _words(head, rows) + _figure(
        "Tokens served to each tenant; one of an answer counts as much as the order fair takes it.",
        services(found),
    )
