"""The contender to choose for each purpose, and whether a measurement bears it out.

Owns what people may want, the figure that tells, and when two are called tied. Must not know how a
figure was made, nor how it is shown.

A measurement on a machine that others use too is a draw: whoever is first today is third tomorrow.
So advice is made of simulated figures where there are some, which are the same again, and the
measurement says beside it whether it agrees. What lies within the spread of its rounds is tied, and
there is no winner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

ALIKE = 0.05  # two figures that differ by no more than this share are told as one
BY_CHANCE = 0.1  # the same of a single run, whose spread nobody knows
DEFAULT = "chunked"
TIED = "tied: "
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Known:
    """One contender: its policy, and its figures in each round."""

    policy: str
    rounds: Sequence[Figures]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A wish that somebody may have, the figure that tells, how the number is written and the words
    around it.

    sign      1 where less is better
    without   policies that have it for nothing, because they let nobody in meanwhile
    stalling  told by long prompts among running answers, where these were reckoned
    """

    want: str
    of: Callable[[Figures], float]
    number: str
    words: str
    sign: int = 1
    without: tuple[str, ...] = ()
    stalling: bool = False

    def written(self, *values: float) -> str:
        """One figure, or from the first to the last of them."""
        ends = list(dict.fromkeys(self.number.format(value) for value in (values[0], values[-1])))
        return self.words.format(" to ".join(ends))


def _unfair(figures: Figures) -> float:
    return float(figures["tenants"]["difference"]) if "tenants" in figures else float("nan")


RECOMMENDATIONS = (
    Recommendation(
        "most throughput", lambda f: f["output_tokens_per_s"], "{:,.0f}", "{} tokens/s", -1
    ),
    Recommendation(
        "most answers within the targets", lambda f: f["goodput_per_s"], "{:.2f}", "{} a second", -1
    ),
    Recommendation(
        "earliest first token", lambda f: f["ttft_ms"]["mean"], "{:,.0f}", "mean TTFT {} ms"
    ),
    Recommendation(
        "steadiest stream while others are let in",
        lambda f: f["itl_ms"]["max"],
        "{:,.0f}",
        "longest gap {} ms",
        without=("static", "window", "unbatched"),
        stalling=True,
    ),
    Recommendation(
        "earliest end of the slowest",
        lambda f: f["e2e_s"]["p99"],
        "{:.1f}",
        "p99 of end-to-end {} s",
    ),
    Recommendation(
        "short answers early",
        lambda f: f["short_e2e_s"],
        "{:.1f}",
        "the shortest quarter after {} s",
    ),
    Recommendation(
        "a fair share for each tenant",
        _unfair,
        "{:,.0f}",
        "{} tokens between two who wait, at most",
    ),
)


@dataclass(frozen=True, slots=True)
class Advice:
    """choose: all that are tied for the best, the default first, none where nobody does it; figure:
    of the best; behind: the best of the others. measured: the same by measurement alone, in words,
    "" where nothing was measured beside; agrees: whether it leaves room for this choice."""

    want: str
    choose: tuple[str, ...]
    figure: str
    behind: str
    measured: str = ""
    agrees: bool = True

    @property
    def chosen(self) -> str:
        return named(self.choose) if self.choose else "none of these"


@dataclass(frozen=True, slots=True)
class _Ranking:
    best: str
    tied: tuple[str, ...]
    values: dict[str, list[float]]

    def middle(self, name: str) -> float:
        return median(self.values[name])


def named(tied: Sequence[str]) -> str:
    """One is the choice; of more than one none is."""
    return tied[0] if len(tied) == 1 else TIED + ", ".join(tied)


def advise(
    measured: Mapping[str, Known],
    reckoned: Mapping[str, Known],
    stalls: Mapping[str, Known],
    chance: float,
) -> list[Advice]:
    """The advice for each wish that these figures tell of. reckoned, stalls: by name as measured,
    or empty. chance: by which share figures in `measured` differ for reasons of their own, 0 where
    they were not measured."""
    found = []
    for one in RECOMMENDATIONS:
        firm = stalls if one.stalling and stalls else reckoned
        own = _rank(one, firm or measured, 0.0 if firm else chance)
        if own is None:
            continue
        beside = _rank(one, measured, chance) if chance and firm else None
        agrees = beside is None or bool({*own.tied} & {*beside.tied})
        told = _told(one, own)
        found.append(Advice(*told, _measured(one, beside) if beside else "", agrees))
    return found


def _rank(one: Recommendation, known: Mapping[str, Known], chance: float) -> _Ranking | None:
    """The contender that does it best, and those tied with it."""
    values = {
        name: [one.of(figures) for figures in about.rounds]
        for name, about in known.items()
        if about.policy not in one.without
    }
    values = {name: each for name, each in values.items() if all(value == value for value in each)}
    if not values:
        return None
    best = min(values, key=lambda name: one.sign * median(values[name]))
    tied = [name for name in values if alike(values[name], values[best], chance)]
    return _Ranking(best, tuple(sorted(tied, key=lambda name: name != DEFAULT)), values)


def chance_of(rounds: int, taken: float) -> float:
    """The share by which measured figures differ by chance. taken: of the machine, by others."""
    return max(BY_CHANCE if rounds == 1 else ALIKE, taken / rounds)


def alike(mine: Sequence[float], best: Sequence[float], chance: float) -> bool:
    """Return whether a figure in all rounds of two contenders does not tell them apart. chance: of
    chance_of, 0 for figures without any."""
    one, other = median(mine), median(best)
    if abs(one - other) <= max(ALIKE, chance) * max(abs(one), abs(other)):
        return True
    return chance > 0 and min(mine) <= max(best) and min(best) <= max(mine)


def _told(one: Recommendation, found: _Ranking) -> tuple[str, tuple[str, ...], str, str]:
    best = found.middle(found.best)
    if one.sign < 0 and not best:
        return one.want, (), one.written(best), "-"
    others = [name for name in found.values if name not in found.tied]
    others.sort(key=lambda name: one.sign * found.middle(name))
    behind = f"{others[0]}: {one.written(found.middle(others[0]))}" if others else "-"
    return one.want, found.tied, one.written(best), behind


def _measured(one: Recommendation, found: _Ranking) -> str:
    _, tied, _, _ = _told(one, found)
    if not tied:
        return "none of these"
    each = sorted(value for name in tied for value in found.values[name])
    return f"{named(tied)} ({one.written(*each)})"


def overall(advice: Sequence[Advice]) -> tuple[tuple[str, ...], int, int]:
    """The contenders that are best, or tied for it, in most of the wishes, the default first; in
    how many, and of how many."""
    told = [one for one in advice if one.choose]
    counts = Counter(name for one in told for name in one.choose)
    most = max(counts.values(), default=0)
    names = [name for name, count in counts.items() if count == most]
    return tuple(sorted(names, key=lambda name: name != DEFAULT)), most, len(told)
