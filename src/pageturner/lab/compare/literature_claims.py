"""The claims of the literature about batching, beside what one comparison measured.

Owns the claims, their thresholds, and the sentence that says why one is not reached or not
measured. Must not know runs: it is given figures by name of contender.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pageturner.lab.reporting.summary import figure_at

Figures = Mapping[str, Any]
CONTINUOUS = ("chunked", "adaptive_chunk", "prefill_first", "orca", "served_ratio")
SPEED = "output_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Claim:
    """verdict: "reached", "not reached" or "not measured"."""

    text: str
    source: str
    measured: str
    verdict: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """figures, fairness: by name of contender, the latter as difference of service and its bound.
    ideal: of run_timeline.ideal."""

    figures: Mapping[str, Figures]
    ideal: Mapping[str, float]
    fairness: Mapping[str, tuple[float, float]]

    def continuous(self) -> str | None:
        """The first of them that took part, the default before the others."""
        return next((name for name in CONTINUOUS if name in self.figures), None)

    def of(self, name: str, path: str) -> float:
        return float(figure_at(self.figures[name], path))


class Judgement(NamedTuple):
    """The measured figures of a claim in words, whether they reach it, and why not where they do
    not."""

    measured: str
    good: bool
    why: str


class ClaimRule(msgspec.Struct, frozen=True):
    """A claim and how it is judged.

    judge       name of a function in JUDGES. It gets the continuous policy that took part, "" for
                none, and returns None where something is missing
    contenders  those that must have taken part; needs: all that is needed, in words
    alone       whether it may be judged without a continuous policy
    """

    judge: str
    text: str
    source: str
    contenders: tuple[str, ...] = ("static",)
    needs: str = "static and a continuous policy"
    alone: bool = False

    def claim(self, found: Evidence) -> Claim:
        name = found.continuous() or ""
        there = set(self.contenders) <= set(found.figures) and (name or self.alone)
        judged = JUDGES[self.judge](found, name) if there else None
        if judged is None:
            why = f"it needs {self.needs} among the contenders"
            return Claim(self.text, self.source, "-", "not measured", why)
        if judged.good:
            return Claim(self.text, self.source, judged.measured, "reached")
        return Claim(self.text, self.source, judged.measured, "not reached", judged.why)


class _Table(msgspec.Struct, frozen=True):
    rules: list[ClaimRule]
    elsewhere: list[Claim]


_FILE = Path(__file__).with_name("claims.json").read_bytes()
TABLE = msgspec.json.decode(_FILE, type=_Table)


def claims(found: Evidence) -> list[Claim]:
    """All of them, in a fixed order."""
    return [*(rule.claim(found) for rule in TABLE.rules), *TABLE.elsewhere]


def _throughput(found: Evidence, name: str) -> Judgement:
    ratio = found.of(name, SPEED) / found.of("static", SPEED)
    ideal = found.ideal
    measured = (
        f"{name} {ratio:.2f}x; the lengths allow {ideal['steps']:.2f}x where all steps take as long,"
        f" {ideal['rows']:.2f}x where all rows do"
    )
    idle = 1 - found.of(name, "busy_s") / found.of(name, "seconds")
    if idle > 0.1:
        why = f"{name} stood idle for {idle:.0%} of the time: requests came no faster (--rate, --rate-scale)"
    elif max(ideal["steps"], ideal["rows"]) < 2.5:
        why = "the lengths are too alike: even ideally no more is to be had"
    else:
        why = "between the two ideals: steps of few rows are not as much faster as they have fewer rows"
    return Judgement(measured, ratio >= 2.5, why)


def _unbatched(found: Evidence, name: str) -> Judgement:
    ratio = found.of(name, SPEED) / found.of("unbatched", SPEED)
    why = "a batch shares reading the weights; where arithmetic is the limit, as on few cores, it shares less"
    return Judgement(f"{name} {ratio:.2f}x", ratio >= 2.8, why)


def _tail(found: Evidence, name: str) -> Judgement:
    mine, static = (found.of(one, "e2e_s.p99") for one in (name, "static"))
    measured = f"{name} {mine:.2f} s, static {static:.2f} s: {mine / static:.0%}"
    why = "when all arrive at once, the last one waits for all others under any policy"
    return Judgement(measured, mine <= static / 2, why)


def _waste(found: Evidence, name: str) -> Judgement:
    waste, whole = (found.of(name, path) for path in ("kv.waste", "kv.waste_if_whole"))
    measured = f"{name} {waste:.1%}; {whole:.0%} if prompt and max_tokens were reserved"
    why = "half a block of each sequence is empty on average: short sequences need smaller blocks"
    return Judgement(measured, waste < 0.04, why)


def _gaps(found: Evidence, name: str) -> Judgement:
    mine, other = (found.of(one, "itl_ms.max") for one in ("chunked", "prefill_first"))
    measured = f"{mine:,.0f} ms, prefill_first {other:,.0f} ms: {mine / other:.0%}"
    why = "it takes long prompts that arrive while others are answered (--mix stalls), or a smaller budget"
    return Judgement(measured, mine <= other / 4, why)


def _short(found: Evidence, name: str) -> Judgement:
    mine, static = (found.of(one, "short_e2e_s") for one in (name, "static"))
    measured = f"the shortest quarter: {name} {mine:.2f} s, static {static:.2f} s on average"
    why = "they waited for a place: all requests arrived at once, or the queue was long"
    return Judgement(measured, mine <= static / 2, why)


def _level(found: Evidence, name: str) -> Judgement:
    mine = found.of(name, "padding_share")
    measured = f"rows that are padding: {name} {mine:.0%}"
    if "static" in found.figures:
        measured += f"; static {found.of('static', 'padding_share'):.0%}"
    return Judgement(measured, mine == 0.0, "it pads")


def _sjf(found: Evidence, name: str) -> Judgement | None:
    each = (*CONTINUOUS, *found.figures)
    policy = next((one for one in each if {one, f"{one} + sjf"} <= set(found.figures)), None)
    if policy is None:
        return None
    mine, other = (found.of(one, "ttft_ms.mean") for one in (f"{policy} + sjf", policy))
    measured = f"{policy} + sjf {mine:,.0f} ms, fcfs {other:,.0f} ms: {mine / other - 1:+.0%}"
    why = "nobody has to wait in the queue, or lengths cannot be told from what is known before the answer"
    return Judgement(measured, mine <= 0.7 * other, why)


def _fair(found: Evidence, name: str) -> Judgement | None:
    names = [one for one in found.fairness if one.endswith(" + fair")]
    if not names:
        return None
    difference, bound = found.fairness[names[0]]
    beside = "".join(f"; {n} {d:,.0f}" for n, (d, _) in found.fairness.items() if n not in names)
    measured = f"{difference:,.0f} of {bound:,.0f} tokens{beside}"
    why = "a tenant that has requests waiting was passed over for longer than the bound allows"
    return Judgement(measured, difference <= bound, why)


JUDGES: dict[str, Callable[[Evidence, str], Judgement | None]] = {
    "throughput": _throughput,
    "unbatched": _unbatched,
    "tail": _tail,
    "waste": _waste,
    "gaps": _gaps,
    "short": _short,
    "level": _level,
    "sjf": _sjf,
    "fair": _fair,
}
