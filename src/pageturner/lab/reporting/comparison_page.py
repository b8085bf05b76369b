"""A comparison as an HTML page and as text for a terminal: what to choose and why, figures,
pictures.

Owns the words, the columns of the tables and their layout. Must not know how a figure was made, nor
how a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from statistics import median

from pageturner.engine.machine_limits import GET
from pageturner.lab.compare.comparison_results import ComparisonResults, ContenderResult
from pageturner.lab.compare.literature_claims import Claim
from pageturner.lab.planning.advice import DEFAULT, alike, overall, rank
from pageturner.lab.reporting import charts, summary
from pageturner.lab.reporting import comparison_pictures as pictures
from pageturner.lab.reporting import page as html
from pageturner.lab.reporting.page import TableCell
from pageturner.lab.reporting.summary import COLUMNS, Column

# The first pattern of its name counts, and a pattern in a picture that is not shown would draw
# nothing.
HATCHES = f'<svg class="pt hatches" width="0" height="0" aria-hidden="true">{charts.HATCH}</svg>\n'
OPEN = 3  # sections that are shown, on three screens; the others are opened on demand
POLICIES = pictures.WORDS["policies"]
ORDERS = pictures.WORDS["orders"]
FAIR = ORDERS["fair"]


def page(found: ComparisonResults) -> str:
    """Return the whole page."""
    about = found.about
    busy, meaning = disturbed(found)
    warning = f"<b>{escape(busy)}</b> {escape(meaning)}"
    when = f"; {about.when}" if about.when else ""
    head = [
        f"{HATCHES}<h1>{found.requests} requests, {len(found.contests)} ways to batch them</h1>",
        f'<p class="busy">{warning}</p>' if busy else "",
        html.paragraph(
            f"{'Measured' if about.real else 'Simulated'} on {about.machine}{when}.", "soft"
        ),
        html.paragraph(f"{about.workload}. {about.engine}.", "soft"),
        html.paragraph(" ".join(verdict(found)), "verdict"),
    ]
    # title, whether it is shown, what makes its content
    sections: tuple[tuple[str, bool, Callable[[ComparisonResults], str]], ...] = (
        ("Which one?", True, _choice),
        ("Figures", True, _figures),
        ("Who was in each step", True, _gantt),
        ("Long prompts among running answers", bool(found.stalls), _stalls),
        ("Batch size over time", True, partial(_over_time, "batch")),
        ("KV memory over time", True, partial(_over_time, "memory")),
        ("Utilisation over time", _known(found), partial(_over_time, "machine")),
        ("Latency", True, partial(_drawn, pictures.latency)),
        ("Tenants", found.tenants, _tenants),
        ("Claims of the literature, and what this run shows", True, _claims),
        ("How this was measured" if about.real else "How this was simulated", True, _method),
    )
    each = [(title, make(found)) for title, shown, make in sections if shown]
    body = html.sections(each[:OPEN]) + "\n".join(html.folded(*one) for one in each[OPEN:])
    names = ", ".join(contest.name for contest in found.contests)
    style = charts.STYLE + (charts.TENANTS if found.tenants else "")
    return html.page(f"pageturner compare: {names}", style, "\n".join([*filter(None, head), body]))


def terminal(found: ComparisonResults, *, every: bool = False) -> str:
    """Return disturbances, a row for each contender, and what to choose. every: also the figures
    that are folded on the page, and the simulated ones."""
    parts = [" ".join(disturbed(found))] if found.disturbed else []
    if found.disturbed and found.reckoned:
        parts.append("reckoned:\n" + _text_table(found.reckoned, "compare"))
    measured = "measured on the busy machine:\n" if found.disturbed else ""
    parts.append(measured + _text_table(found.contests, "compare"))
    if every:
        parts.append(_text_table(found.contests, "compare more"))
    if every and found.reckoned and not found.disturbed:
        parts.append("reckoned:\n" + _text_table(found.reckoned, "compare"))
    if every and found.stalls:
        title = "long prompts among running answers, simulated:"
        parts.append(f"{title}\n" + _text_table(found.stalls, "compare"))
    if len(found.contests) > 1:
        lines = []
        for one in found.advice():
            otherwise = "" if one.agrees else "otherwise: "
            measured = f"; measured {otherwise}{one.measured}" if one.measured else ""
            lines.append(f"{one.want}:\n    {one.chosen} ({one.figure}){measured}")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "\n".join(verdict(found))])


# -- sentences -------------------------------------------------------------------------------------


def disturbed(found: ComparisonResults) -> tuple[str, str]:
    """Return that the machine was busy, and what this means; twice "" where it was not."""
    if not found.disturbed:
        return "", ""
    busy = f"This machine was busy while it was measured: {'; '.join(found.disturbed)}."
    if not found.reckoned:
        return busy, "Nothing is judged by what was measured: compare again when it is quiet."
    return busy, (
        "Nothing is judged by what was measured. Verdicts are reckoned, from the steps that each policy"
        " makes and what a step costs."
    )


def verdict(found: ComparisonResults) -> list[str]:
    """Return sentences made of the figures: what to choose, throughput, stalls, answers."""
    if len(found.contests) < 2:
        only = found.contests[0]
        return [f"{only.name}: {only.timeline.seconds:.1f} s for all answers.", _same(found)]
    if not found.judged:
        return ["No policy is advised, for no figure can be trusted.", _same(found)]
    names, most, wants = overall(found.advice())
    level = f"best, or level with the best, in {most} of {wants} wishes below"
    if len(names) > 1:
        default = f"; {DEFAULT} is the default" if DEFAULT in names else ""
        choice = f"{_tied(names)} are {level}{default}."
    else:
        default = ", the default" if names == (DEFAULT,) else ""
        choice = f"Choose {names[0]}{default}: {level}."
    return [choice, _ends(found), *_gaps(found), _same(found)]


def _tied(names: Sequence[str]) -> str:
    return f"Tied: {', '.join(names)}" if len(names) > 1 else names[0]


def _ends(found: ComparisonResults) -> str:
    """Return when everything was answered; contenders that only chance tells apart are named
    together."""
    chance = 0.0 if found.disturbed else found.chance
    best = max(found.judged, key=lambda c: median(c.rounds))
    last = min(found.judged, key=lambda c: median(c.rounds))
    level = [c for c in found.judged if alike(c.rounds, best.rounds, chance)]
    times = sorted(c.timeline.seconds for c in level)
    when = " to ".join(dict.fromkeys(f"{time:.1f}" for time in (times[0], times[-1])))
    behind = "" if last in level else f"; {last.name} after {last.timeline.seconds:.1f} s"
    said = f"{_tied([c.name for c in level])} had everything answered after {when} s{behind}."
    return f"Reckoned: {said[0].lower()}{said[1:]}" if found.disturbed else said


def _gaps(found: ComparisonResults) -> list[str]:
    """Return why the default is the default, where the simulation shows it."""
    gaps = {c.name: c.figures["itl_ms"]["max"] for c in found.stalls}
    others = {
        name: gaps[name] for name in ("prefill_first", "orca", "served_ratio") if name in gaps
    }
    if DEFAULT not in gaps or not others:
        return []
    worst = max(others, key=lambda name: others[name])
    if others[worst] <= 1.1 * gaps[DEFAULT]:
        return []
    return [
        f"When long prompts come while others are being answered (simulated below), nobody stands still for"
        f" longer than {gaps[DEFAULT]:,.0f} ms under {DEFAULT}, but for up to {others[worst]:,.0f} ms under"
        f" {worst}."
    ]


def _same(found: ComparisonResults) -> str:
    if found.same is None:
        return "No model ran, so nothing is known of answers."
    same = "all" if found.same == found.requests else f"{found.same} of {found.requests}"
    return f"The answers to {same} requests were the same in all runs, token for token."


def _basis(found: ComparisonResults) -> str:
    """Return what the advice rests on, and when two contenders are called tied."""
    if not found.about.real:
        return "All of it is simulated. Tied: within 5 % of the best."
    rounds = found.about.rounds
    measured = f"those are tied that differ by no more than {found.chance:.0%}"
    measured += f" or overlap over {rounds} rounds" if rounds > 1 else ": one round tells no more"
    if not found.reckoned:
        return f"Costs of steps are not known here. Measured, {measured}."
    return (
        "Choices are reckoned: the engine's own scheduler makes the steps, and a step takes what it costs on"
        f" this machine ({found.words}), so they are the same on a busy machine as on a quiet one. Tied:"
        " within 5 % of the best. The steadiest stream is told by long prompts among running answers."
        f" Measured, {measured}."
    )


def _choice(found: ComparisonResults) -> str:
    if len(found.contests) < 2:
        return "<p>One contender: nothing to choose.</p>"
    if not found.judged:
        return "<p>Nothing is advised: the machine was too busy.</p>"
    advice = found.advice()
    head = ["if you want", "choose", "reckoned" if found.reckoned else "here", "the next"]
    if any(one.measured for one in advice):
        head.append("measured")
    rows = [
        [
            one.want,
            one.chosen,
            one.figure,
            one.behind,
            "otherwise: " * (not one.agrees) + one.measured,
        ]
        for one in advice
    ]
    kinds = [
        (name, POLICIES.get(name, "")) for name in dict.fromkeys(c.policy for c in found.contests)
    ]
    orders = list(dict.fromkeys(c.order for c in found.contests))
    if orders != ["fcfs"]:
        kinds += [(f"order {order}", ORDERS.get(order, "")) for order in orders]
    if found.tenants and "fair" not in orders:
        kinds.append(("order fair", f"not among these (--orders fcfs,fair): {FAIR}"))
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(words)}</li>" for name, words in kinds)
    about = f"{html.paragraph(_basis(found), 'soft')}<ul>{items}</ul>"
    table = html.table(head, rows, "words stack")
    return table + html.folded("What these policies do, and what the choice rests on", about)


# -- figures ---------------------------------------------------------------------------------------


def _text_table(contests: Sequence[ContenderResult], table: str) -> str:
    columns = COLUMNS[table]
    rows = [[c.name, *(column.text(c.figures) for column in columns)] for c in contests]
    return summary.table(rows, ["", *(column.head for column in columns)])


def _columns(contests: Sequence[ContenderResult], table: str, chance: float = 0.0) -> str:
    """Return a row for each contender; the best of a column is marked where nothing is tied with
    it."""
    columns = COLUMNS[table]
    best = [_best(contests, column, chance) for column in columns]
    rows = []
    for contest in contests:
        cells: list[str | TableCell] = [contest.name]
        for column, name in zip(columns, best, strict=True):
            cells.append(TableCell(column.text(contest.figures), "best" * (contest.name == name)))
        rows.append(cells)
    return html.table(["policy", *(column.head for column in columns)], rows)


def _best(contests: Sequence[ContenderResult], column: Column, chance: float) -> str | None:
    """Return the contender that is best by more than chance."""
    found = rank({c.name: c.each for c in contests}, column.path, column.sign, chance)
    if not column.sign or found is None:
        return None
    return found.best if found.tied == (found.best,) and len(found.values) > 1 else None


def _figures(found: ComparisonResults) -> str:
    targets = (found.about.targets.ttft, found.about.targets.tpot)
    ttft, tpot = ("none" if most is None else f"{1e3 * most:,.0f} ms" for most in targets)
    words = html.paragraph(
        "TTFT: time to first token. TPOT: mean time of a token after the first. Gap: between two tokens of an"
        " answer. e2e: from the request to the end of its answer. What is best, and tied with nothing, is"
        " marked.",
        "soft",
    )
    more = html.paragraph(
        f"Goodput: answers within the targets, TTFT {ttft}, TPOT {tpot}. Padding rows are computed for nobody."
        " Arithmetic, bandwidth: shares of the machine's limits, padding too.",
        "soft",
    )
    chance = math.inf if found.disturbed else found.chance
    shown = _columns(found.contests, "compare", chance)
    folded = _columns(found.contests, "compare more", chance) + more
    if found.reckoned:
        beside = "<p>The same, reckoned:</p>" + _columns(found.reckoned, "compare")
        if found.disturbed:
            shown, beside = beside, f"<p>Measured on the busy machine:</p>{shown}"
        folded += beside
    ideal = found.ideal
    ratio = (
        f"<p>What the lengths alone allow continuous over static batches of {ideal['batch']}:"
        f" <b>{ideal['steps']:.2f}x</b> where a step takes as long however full it is (the longest"
        " answer of each batch, by the steps that so many places need when none stands empty),"
        f" <b>{ideal['rows']:.2f}x</b> where a step takes as long as it has rows (all rows with"
        " padding, by those that are needed).</p>"
    )
    folded += _drawn(pictures.throughput, found) + ratio
    return shown + words + html.folded("More figures", folded)


def _claims(found: ComparisonResults) -> str:
    """Return the claims that this run judges; the others are folded."""
    judged = [claim for claim in found.claims if claim.verdict != "not measured"]
    others = [claim for claim in found.claims if claim.verdict == "not measured"]
    text = _judged(judged, "why not") if judged else "<p>None was measured here.</p>"
    if not others:
        return text
    return text + html.folded(f"{len(others)} that were not measured", _judged(others, "it needs"))


def _judged(claims: Sequence[Claim], why: str) -> str:
    kinds = {"reached": "reached", "not reached": "missed"}
    rows: list[list[str | TableCell]] = [
        [
            claim.text,
            TableCell(claim.source, "soft"),
            claim.measured,
            TableCell(claim.verdict, kinds.get(claim.verdict, "soft")),
            *([TableCell(claim.why, "soft")] if claim.why else []),
        ]
        for claim in claims
    ]
    return html.table(("claim", "from", "here", "verdict", why), rows, "words stack")


def _method(found: ComparisonResults) -> str:
    about = found.about
    turns = "Each contender ran once."
    if about.rounds > 1:
        turns = (
            f"Each contender ran {about.rounds} times, in turn (A B C, A B C); pictures and figures are of the"
            f" middle one, and rounds of one contender differ by up to {found.spread:.0%}."
        )
    if about.seconds:
        turns += (
            f" All of it took {about.seconds:.0f} s, {about.cpu_seconds:.0f} of them of processors."
        )
    clock = "Step times come from a calibration; the scheduler is the engine's own."
    if about.real:
        clock = "The engine ran for real, on the machine named below."
    unknown = "" if _known(found) else f" They are not known: {GET}, then compare again."
    lines = [
        f"{clock} {turns}",
        "Nobody was told how long an answer will be: every request names the same cap as its max_tokens, and"
        " its end is forced in the sampler at its true length.",
        "All figures and pictures are made from the step log of each run. In KV memory, what is shared counts"
        " once; empty is what of the blocks in use holds no token.",
        *([f"Costs of steps: {found.words}."] if found.words else []),
        "Used is what products, attention, weights and KV would have taken at the limits of that machine,"
        f" padding too, by the time of steps.{unknown}",
    ]
    return f"{html.bullets(lines)}<p>Again: <code>{escape(about.command)}</code></p>"


# -- pictures --------------------------------------------------------------------------------------

Draw = Callable[[ComparisonResults, float], str]


def _drawn(draw: Draw, found: ComparisonResults) -> str:
    """Return a picture for a desktop and one for a phone, of which one is shown."""
    wide, narrow = (draw(found, width) for width in (charts.WIDE, charts.NARROW))
    return f'<div class="wide">{wide}</div>\n<div class="narrow">{narrow}</div>\n'


def _gantt(found: ComparisonResults) -> str:
    return html.paragraph(
        "A line is a place in the batch, a block one request; all panels have the same axis of time. Where"
        " blocks end ragged and hatched, places are idle until the longest answer ends; where they are not,"
        " somebody takes the place at once. Point at a block for its request: prompt, answer, time to first"
        " token."
    ) + _drawn(pictures.gantt, found)


def _stalls(found: ComparisonResults) -> str:
    """Return what tells batching policies apart when not everything is there from the start."""
    requests = found.stalls[0].timeline.requests.values()
    words = (
        f"Simulated, with what a step costs here ({found.words}): {len(requests)} requests come in"
        " groups of four at seven tenths of what this machine can do, the last of each with a prompt of"
        f" {max(request.prompt for request in requests):,} tokens, in the middle of the others'"
        " answers. Pale: whoever is being answered"
        " stands still for somebody else's prompt. A step with a whole prompt in it holds everybody in it up"
        " just as long. chunked takes no more of a prompt into a step than its budget leaves: that is why it"
        " is the default."
    )
    drawn = _drawn(pictures.stalls, found)
    return html.paragraph(words) + drawn + _columns(found.stalls, "compare stalls")


def _over_time(name: str, found: ComparisonResults) -> str:
    drawn = _drawn(partial(pictures.over_time, name), found)
    return html.paragraph(pictures.WORDS["over_time"][name]) + drawn


def _known(found: ComparisonResults) -> bool:
    """Return whether shares of a machine are known."""
    return any("compute_share" in contest.figures["machine"] for contest in found.contests)


def _tenants(found: ComparisonResults) -> str:
    rows = []
    for contest in found.contests:
        if about := contest.figures.get("tenants"):
            shares = [f"{about['loudest_share']:.0%}", f"{1 / len(about['served']):.0%}"]
            rows.append([contest.name, *shares, f"{about['difference']:,.0f}"])
    head = [
        "contender",
        "share of the loudest tenant while others waited",
        "an equal share",
        "largest difference of two who waited, tokens",
    ]
    words = (
        "Tokens served to each tenant; one of an answer counts as much as the order fair takes it."
    )
    table = html.paragraph(f"fair: {FAIR}.") + html.table(head, rows, "words stack")
    return table + html.paragraph(words) + _drawn(pictures.services, found)
