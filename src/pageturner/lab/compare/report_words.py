"""What a comparison says in sentences, on the page and on a terminal: what to choose, and why.

Owns the words. Must not know how a figure was made, nor how words are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pageturner.lab.compare.comparison_results import ComparisonResults
from pageturner.lab.planning.advice import DEFAULT, alike, overall

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


FAIR = (
    "the tenant that was served least goes first, whatever it sent. Each token of a prompt counts once, each"
    " of an answer twice; a tenant that sends ten times as much waits behind its own requests, and the others"
    " do not wait for it. Without tenants it is fcfs"
)
ORDERS = {
    "fcfs": "first come, first served: nobody overtakes",
    "priority": "the smallest priority of a request first",
    "sjf": "the least predicted work first: short questions do not wait behind reports",
    "deadline": "the least time left to a request's targets first",
    "adaptive": "by priority, predicted work, waiting time and who runs already",
    "fair": FAIR,
    "prefix": "the longest cached prefix first",
}


def disturbed(found: ComparisonResults) -> tuple[str, str]:
    """That the machine was busy, and what it means; twice "" where it was not."""
    if not found.disturbed:
        return "", ""
    told = f"This machine was busy while it was measured: {'; '.join(found.disturbed)}."
    if not found.reckoned:
        return told, "Small differences below are chance: compare again when it is quiet."
    return told, (
        "Times are longer than they need be, and small differences chance. The advice does not rest on them:"
        " it is reckoned from the steps that each policy makes and what a step costs."
    )


def verdict(found: ComparisonResults) -> list[str]:
    """Sentences made of the figures: what to choose, throughput, stalls, answers."""
    if len(found.contests) < 2:
        only = found.contests[0]
        return [f"{only.name}: {only.timeline.seconds:.1f} s for all answers.", *_same(found)]
    names, most, wants = overall(found.advice())
    if len(names) > 1:
        default = f"; {DEFAULT} is the default" if DEFAULT in names else ""
        told = [
            f"{_tied(names)} are best, or level with the best, in {most} of {wants} wishes below{default}."
        ]
    else:
        default = ", the default" if names == (DEFAULT,) else ""
        told = [
            f"Choose {names[0]}{default}: best, or level with the best, in {most} of {wants} wishes below."
        ]
    return [*told, _ends(found), *_gaps(found), *_same(found)]


def _tied(names: Sequence[str]) -> str:
    return f"Tied: {', '.join(names)}" if len(names) > 1 else names[0]


def _ends(found: ComparisonResults) -> str:
    """When all were answered. Who is not told apart by more than chance is told together."""
    best = max(found.contests, key=lambda c: median(c.rounds))
    last = min(found.contests, key=lambda c: median(c.rounds))
    level = [c for c in found.contests if alike(c.rounds, best.rounds, found.chance)]
    times = sorted(c.timeline.seconds for c in level)
    when = " to ".join(dict.fromkeys(f"{time:.1f}" for time in (times[0], times[-1])))
    behind = "" if last in level else f"; {last.name} after {last.timeline.seconds:.1f} s"
    return f"{_tied([c.name for c in level])} had everything answered after {when} s{behind}."


def _gaps(found: ComparisonResults) -> list[str]:
    """Why the default is what it is."""
    gaps = {c.name: c.figures["itl_ms"]["max"] for c in found.stalls}
    others = {
        name: gap for name, gap in gaps.items() if name in ("prefill_first", "orca", "served_ratio")
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


def _same(found: ComparisonResults) -> list[str]:
    if found.same is None:
        return ["No model ran, so nothing is known of answers."]
    same = "all" if found.same == found.requests else f"{found.same} of {found.requests}"
    return [f"The answers to {same} requests were the same in all runs, token for token."]


def basis(found: ComparisonResults) -> str:
    """What the advice rests on, and when two are called tied."""
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
