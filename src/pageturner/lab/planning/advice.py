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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from pageturner.lab.reporting.summary import figure_at

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


class Recommendation(msgspec.Struct, frozen=True):
    """A wish that somebody may have, the figure that tells, how the number is written and the words
    around it.

    sign      1 where less is better
    without   policies that have it for nothing, because they let nobody in meanwhile
    stalling  told by long prompts among running answers, where these were reckoned
    """

    want: str
    path: str
    number: str
    words: str
    sign: int = 1
    without: tuple[str, ...] = ()
    stalling: bool = False

    def written(self, *values: float) -> str:
        """One figure, or from the first to the last of them."""
        ends = list(dict.fromkeys(self.number.format(value) for value in (values[0], values[-1])))
        return self.words.format(" to ".join(ends))


RECOMMENDATIONS = msgspec.json.decode(
    Path(__file__).with_name("wishes.json").read_bytes(), type=list[Recommendation]
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
class Ranking:
    """The contenders by one figure: all values of each, the best, and those tied with it, the
    default first."""

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
        own = _ranked(one, firm or measured, 0.0 if firm else chance)
        if own is None:
            continue
        beside = _ranked(one, measured, chance) if chance and firm else None
        agrees = beside is None or bool({*own.tied} & {*beside.tied})
        choose, figure, behind = _told(one, own)
        said = _measured(one, beside) if beside else ""
        found.append(Advice(one.want, choose, figure, behind, said, agrees))
    return found


def _ranked(one: Recommendation, known: Mapping[str, Known], chance: float) -> Ranking | None:
    each = {name: about.rounds for name, about in known.items() if about.policy not in one.without}
    return rank(each, one.path, one.sign, chance)


def rank(
    each: Mapping[str, Sequence[Figures]], path: str, sign: int, chance: float
) -> Ranking | None:
    """Rank contenders by a figure of their rounds; None where none of them has it. sign: 1 where
    less is better."""
    values = {
        name: [figure_at(figures, path) for figures in rounds] for name, rounds in each.items()
    }
    values = {name: mine for name, mine in values.items() if all(value == value for value in mine)}
    if not values:
        return None
    best = min(values, key=lambda name: sign * median(values[name]))
    tied = [name for name in values if alike(values[name], values[best], chance)]
    return Ranking(best, _default_first(tied), values)


def _default_first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: name != DEFAULT))


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


def _told(one: Recommendation, found: Ranking) -> tuple[tuple[str, ...], str, str]:
    """Return whom to choose, the figure of the best, and the best of the others."""
    best = found.middle(found.best)
    if one.sign < 0 and not best:
        return (), one.written(best), "-"
    others = [name for name in found.values if name not in found.tied]
    others.sort(key=lambda name: one.sign * found.middle(name))
    behind = f"{others[0]}: {one.written(found.middle(others[0]))}" if others else "-"
    return found.tied, one.written(best), behind


def _measured(one: Recommendation, found: Ranking) -> str:
    if one.sign < 0 and not found.middle(found.best):
        return "none of these"
    each = sorted(value for name in found.tied for value in found.values[name])
    return f"{named(found.tied)} ({one.written(*each)})"


def overall(advice: Sequence[Advice]) -> tuple[tuple[str, ...], int, int]:
    """The contenders that are best, or tied for it, in most of the wishes, the default first; in
    how many, and of how many."""
    told = [one for one in advice if one.choose]
    counts = Counter(name for one in told for name in one.choose)
    most = max(counts.values(), default=0)
    names = _default_first(name for name, count in counts.items() if count == most)
    return names, most, len(told)
