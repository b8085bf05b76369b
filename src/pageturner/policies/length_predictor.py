"""A predictor of answer lengths: quantiles, learnt from the answers that have finished.

Owns the cells that count lengths and what they know of a request: its tenant, its prompt's length,
beginning and end, and the most tokens it may have. Must not know who asks or what for. A client's
own word does not count: whatever it says or sends, the cells of other tenants move only through the
shared ones, and these weigh little beside a tenant's own.

A prediction goes from the general to the particular. Each cell mixes what it counted with what the
cell before it says, as if that were `TRUST` further answers (a Dirichlet prior):

    P = (counts + TRUST P') / (n + TRUST)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import exp, log, log2
from typing import TypeVar

from pageturner.scheduler.listener import Listener
from pageturner.scheduler.types import Sequence

PER_OCTAVE = 4  # buckets of lengths for each doubling
BUCKETS = 17 * PER_OCTAVE  # up to 131,072 tokens
TRUST = 4.0
MEMORY = 100.0  # answers that a cell remembers: beyond it all its counts are halved
SHARED, OWN, TENANTS = (
    512,
    192,
    64,
)  # most cells in a table: everybody's, a tenant's; and most tenants. The
# least recently fed goes first, so a tenant that sends ever new prompts drives out cells of its own
# only
HEAD, TAIL = (
    32,
    4,
)  # tokens of a prompt's beginning and end that tell one kind of request from another
PRIOR_MEDIAN, PRIOR_SIGMA = (
    150.0,
    1.3,
)  # log-normal: between the medians of recorded chats, code and reasoning
CAUTIOUS = 0.9  # the quantile that calibration reports beside the median

T = TypeVar("T")
Shares = list[float]  # of each bucket; they sum to 1


def _bucket(length: int) -> int:
    return min(BUCKETS - 1, int(PER_OCTAVE * log2(length)))


def _log_normal() -> Shares:
    """The prior, a mass for each bucket."""
    middles = ((i + 0.5) / PER_OCTAVE * log(2) for i in range(BUCKETS))
    masses = [exp(-0.5 * ((middle - log(PRIOR_MEDIAN)) / PRIOR_SIGMA) ** 2) for middle in middles]
    return [mass / sum(masses) for mass in masses]


def quantile(shares: Shares, q: float, beyond: int) -> float:
    """The length L with P(length <= L | length > beyond) = q; within a bucket the mass lies evenly
    over the logarithm of the length. beyond: tokens that are there already."""
    place = PER_OCTAVE * log2(beyond) if beyond > 1 else 0.0
    first = min(BUCKETS - 1, int(place))
    begun = min(1.0, place - first)
    rest = sum(shares[first:]) - begun * shares[first]
    left = q * rest + begun * shares[first]
    for i in range(first, BUCKETS):
        if left <= shares[i]:
            return (
                float(2 ** ((i + left / shares[i]) / PER_OCTAVE))
                if shares[i]
                else float(beyond + 1)
            )
        left -= shares[i]
    return float(2 ** (BUCKETS / PER_OCTAVE))


@dataclass(slots=True)
class Cell:
    """Lengths that were counted, by bucket; what lies far back counts less."""

    total: float = 0.0
    counts: dict[int, float] = field(default_factory=dict)

    def add(self, weights: list[tuple[int, float]]) -> None:
        if self.total >= MEMORY:
            self.total /= 2
            self.counts = {i: count / 2 for i, count in self.counts.items()}
        self.total += 1.0
        for i, weight in weights:
            self.counts[i] = self.counts.get(i, 0.0) + weight


class Fed(dict[Hashable, T]):
    """A dict of what is known by key, the least recently fed first, with no more than `most`
    entries."""

    def __init__(self, most: int, make: Callable[[], T]) -> None:
        self._most, self._make = most, make

    def feed(self, key: Hashable) -> T:
        """Return what is known of this key, which is the most recently fed now."""
        found = self.pop(key, None) or self._make()
        self[key] = found
        if len(self) > self._most:
            del self[next(iter(self))]
        return found


class LengthPredictor:
    """Learns from each sequence that ended by itself; predicts those that have not. Lengths in
    tokens."""

    def __init__(self) -> None:
        self._prior = _log_normal()
        self._shared = Fed(SHARED, Cell)
        # of each tenant: shapes, templates
        self._tenants = Fed(TENANTS, lambda: (Fed(OWN, Cell), Fed(OWN, Cell)))
        self._seen = self._below_half = self._below_cautious = 0
        self._error = 0.0

    @property
    def listener(self) -> Listener:
        return Listener(ended=self._ended, stats=self.stats)

    def _ended(self, seq: Sequence, finish: str | None) -> None:
        if finish in ("stop", "length") and not seq.request.params.beam_width:
            self.learn(seq)

    def length(self, seq: Sequence, q: float = 0.5) -> float:
        """The q-quantile of the answer's whole length, given what is generated; at most what it may
        have."""
        most, have = seq.limit - seq.prompt_len, seq.generated
        return max(min(quantile(self._shares(seq), q, have), float(most)), have + 1.0)

    def learn(self, seq: Sequence) -> None:
        """A sequence has ended. One that was cut at its limit would have been longer: its weight is
        spread over all longer lengths, as they are expected."""
        length = seq.generated
        if length < 1:
            return
        shares, cut = self._shares(seq), length >= seq.limit - seq.prompt_len
        first = _bucket(length)
        if cut:
            rest = sum(shares[first:])
            weights = (
                [(i, shares[i] / rest) for i in range(first, BUCKETS)] if rest else [(first, 1.0)]
            )
        else:
            weights = [(first, 1.0)]
            self._judge(shares, length)
        own = self._tenants.feed(seq.request.tenant)
        for table, kinds in zip((self._shared, *own), _kinds(seq), strict=True):
            for kind in kinds:
                table.feed(kind).add(weights)

    def stats(self) -> dict[str, float]:
        """Return how true the predictions were, each made before its answer was learnt. Answers cut
        at their limit do not count, since nobody knows their length.

        predicted           answers judged
        predicted_below_50  share of them not longer than the predicted median; 0.5 is calibrated
        predicted_below_90  the same for the 90 % quantile
        predicted_log_error mean |ln(length / predicted median)|
        """
        seen = max(1, self._seen)
        return {
            "predicted": float(self._seen),
            "predicted_below_50": self._below_half / seen,
            "predicted_below_90": self._below_cautious / seen,
            "predicted_log_error": self._error / seen,
        }

    def _judge(self, shares: Shares, length: int) -> None:
        median = quantile(shares, 0.5, 0)
        self._seen += 1
        self._below_half += length <= median
        self._below_cautious += length <= quantile(shares, CAUTIOUS, 0)
        self._error += abs(log(length / median))

    def _shares(self, seq: Sequence) -> Shares:
        """The mixture of all cells, the particular ones first: each leaves a share to the one
        before it."""
        tables = (self._shared, *self._tenants.get(seq.request.tenant, ()))
        known = zip(tables, _kinds(seq), strict=False)
        cells = [table.get(kind) for table, kinds in known for kind in kinds]
        mixed, left = [0.0] * BUCKETS, 1.0
        for cell in reversed(cells):
            if cell is not None:
                share = left / (cell.total + TRUST)
                for i, count in cell.counts.items():
                    mixed[i] += share * count
                left = TRUST * share
        return [mass + left * prior for mass, prior in zip(mixed, self._prior, strict=True)]


def _kinds(seq: Sequence) -> tuple[tuple[Hashable, ...], ...]:
    """Return the kinds of request that a sequence is, the general before the particular: among
    everybody's; among its tenant's by shape, which is the prompt's length, coarse and fine, and
    most tokens; by the prompt's ends."""
    request, size = seq.request, log2(seq.prompt_len)
    most = int(log2(seq.limit - seq.prompt_len))
    shape = int(size), most
    end, begin = hash(request.prompt[-TAIL:]), hash(request.prompt[:HEAD])
    return (
        ("all", shape),
        ("all", shape, (int(4 * size), most)),
        (("end", end), ("begin", begin, shape)),
    )
