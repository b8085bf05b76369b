"""What arrives when, for the simulator: from traces, from generators, from sessions that wait for answers.

Owns how lengths and hash ids become prompts: runs of made-up tokens, equal where the trace says that prompts
are equal and nowhere else. Must not know schedulers or time: who simulates asks for the next arrival.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from pageturner.core.types import Request, SamplingParams
from pageturner.errors import EngineFault
from pageturner.lab.traces import HASH_TOKENS, Row

END = -1  # the token that ends every simulated answer
OWN = 1 << 40  # made-up tokens from here on belong to one prompt or answer only

Part = tuple[int, int]  # a token, and how often it stands there in a row


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be simulated. Lengths in tokens.

    prompt   runs of tokens
    answer   the token that the answer is made of
    known    the tokens themselves instead, of prompt and answer, where they are known
    output   how long it will be: known to who executes, and to nobody else
    cap      max_tokens; None: none
    turn     (session, which of its turns)
    """

    at: float
    prompt: tuple[Part, ...]
    answer: int
    output: int
    cap: int | None
    tenant: str = ""
    priority: int = 0
    turn: tuple[int, int] | None = None
    known: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def request(self, id: int) -> Request:
        """As a scheduler gets it."""
        params = SamplingParams(max_tokens=self.cap, stop_ids=(END,), forced_end=self.output)
        prompt = self.known[0] if self.known else _tokens(self.prompt)
        return Request(id, prompt, params, self.at, priority=self.priority, tenant=self.tenant)

    def tokens(self, begin: int, count: int) -> list[int]:
        """Of the answer, without its end."""
        if self.known is None:
            return [self.answer] * count
        return list(self.known[1][begin : begin + count])


def _tokens(parts: tuple[Part, ...]) -> tuple[int, ...]:
    tokens: list[int] = []
    for token, count in parts:
        tokens += [token] * count
    return tuple(tokens)


class Source(Protocol):
    """Where arrivals come from. `total`: how many there will be."""

    @property
    def total(self) -> int: ...

    def arrivals(self) -> Iterator[Arrival]:
        """Those that wait for nothing, by time."""

    def after(self, arrival: Arrival, end: float) -> Arrival | None:
        """What arrives because this one was answered at `end`."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals that wait for nothing."""

    each: list[Arrival]

    @property
    def total(self) -> int:
        return len(self.each)

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.each)

    def after(self, arrival: Arrival, end: float) -> Arrival | None:
        return None


@dataclass(frozen=True, slots=True)
class Turn:
    """Of a session: seconds after the answer before it, and lengths of the whole prompt and of the answer."""

    think: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Sessions:
    """Closed loop: a turn's prompt is the turn's before, its answer, and something new. Where a prompt is
    shorter than that, its beginning was summed up, and is new altogether.

    starts   when each session begins
    """

    starts: list[float]
    turns: list[list[Turn]]
    cap: int

    @property
    def total(self) -> int:
        return sum(map(len, self.turns))

    def arrivals(self) -> Iterator[Arrival]:
        order = sorted(range(len(self.starts)), key=lambda session: self.starts[session])
        return (self._arrival(session, 0, self.starts[session], ()) for session in order)

    def after(self, arrival: Arrival, end: float) -> Arrival | None:
        assert arrival.turn is not None
        session, number = arrival.turn
        if number + 1 == len(self.turns[session]):
            return None
        said = min(arrival.output, self.cap) - 1  # its last token is the end
        before = (*arrival.prompt, (arrival.answer, said)) if said else arrival.prompt
        return self._arrival(session, number + 1, end + self.turns[session][number + 1].think, before)

    def _arrival(self, session: int, number: int, at: float, before: tuple[Part, ...]) -> Arrival:
        turn = self.turns[session][number]
        new = OWN + 2 * (session * 100_000 + number)
        more = turn.prompt - sum(count for _, count in before)
        prompt = (*before, (new, more)) if more > 0 else ((new, turn.prompt),)
        return Arrival(at, prompt, new + 1, turn.output, self.cap, turn=(session, number))


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace becomes arrivals.

    length, rate  lengths are multiplied, arrival times divided
    cap           max_tokens of every request; longer answers are cut there
    context       most tokens of prompt and cap together; longer requests are left out; 0: no limit
    think         most seconds between an answer and the next turn
    """

    length: float = 1.0
    rate: float = 1.0
    cap: int = 4096
    context: int = 0
    think: float = 60.0

    def tokens(self, length: int) -> int:
        return max(1, round(length * self.length))

    def fits(self, row: Row) -> bool:
        return not self.context or self.tokens(row.prompt_tokens) + self.cap <= self.context


def from_trace(rows: list[Row], scaling: Scaling, where: str) -> tuple[Source, int]:
    """The arrivals of a trace, and how many of its requests were left out as too long. EngineFault for times
    that are missing, negative or out of order."""
    if rows[0].session_id is not None:
        return _sessions(rows, scaling, where)
    check_times(rows, where)
    kept = [(number, row) for number, row in enumerate(rows) if scaling.fits(row)]
    if not kept:
        message = f"no request of {where} fits {scaling.context:,} tokens beside a cap of {scaling.cap:,}"
        raise EngineFault("workload", message)
    each = [_arrival(number, row, scaling) for number, row in kept]
    return OpenLoop(each), len(rows) - len(each)


def _arrival(number: int, row: Row, scaling: Scaling) -> Arrival:
    own, length = OWN + 2 * number, scaling.tokens(row.prompt_tokens)
    prompt = _hashed(row.hash_ids, length, scaling.tokens(HASH_TOKENS), own)
    output = scaling.tokens(row.output_tokens)
    return Arrival((row.arrival_s or 0.0) / scaling.rate, prompt, own + 1, output, scaling.cap, row.tenant)


def _hashed(ids: list[int], length: int, block: int, own: int) -> tuple[Part, ...]:
    """A prompt of equal blocks for equal ids; what they do not reach to is its own."""
    parts = []
    for id in ids:
        if length <= 0:
            break
        parts.append((id, min(block, length)))
        length -= block
    return (*parts, (own, length)) if length > 0 else tuple(parts)


def check_times(rows: list[Row], where: str) -> None:
    """EngineFault for times that are missing, negative or out of order."""
    before = 0.0
    for number, row in enumerate(rows, 1):
        at = row.arrival_s
        if at is None:
            message = f"{where}: request {number} has no arrival time: give --rate, and times are made up"
            raise EngineFault("workload", message)
        if not 0 <= at < float("inf"):
            raise EngineFault(
                "workload", f"{where}: request {number} arrives at {at} s: 0 or later is possible"
            )
        if at < before:
            message = f"{where}: request {number} arrives at {at:g} s, the one before it at {before:g} s"
            raise EngineFault("workload", f"{message}: sort the trace by arrival_s")
        before = at


def _sessions(rows: list[Row], scaling: Scaling, where: str) -> tuple[Source, int]:
    names: dict[str, list[Row]] = {}
    for number, row in enumerate(rows, 1):
        if row.session_id is None or (row.think_s is not None and not row.think_s >= 0):
            message = f"{where}: request {number} has no session, or a negative think_s"
            raise EngineFault("workload", message)
        names.setdefault(row.session_id, []).append(row)
    turns, starts, out = [], [], 0
    for each in names.values():
        fit = list(itertools.takewhile(scaling.fits, sorted(each, key=lambda row: row.turn)))
        out += len(each) - len(fit)
        if not fit:
            continue
        starts.append(fit[0].session_start_s / scaling.rate)
        turns.append(
            [
                Turn(
                    min(row.think_s or 0.0, scaling.think),
                    scaling.tokens(row.prompt_tokens),
                    scaling.tokens(row.output_tokens),
                )
                for row in fit
            ]
        )
    if not turns:
        raise EngineFault("workload", f"no request of {where} fits {scaling.context:,} tokens")
    return Sessions(starts, turns, scaling.cap), out


# -- generators ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Made-up traffic: `count` requests of lengths spread evenly from half to one and a half of the means.

    rate  requests a second
    cv    coefficient of variation of the gaps: 1 is a Poisson process, more comes in bursts (Gamma)
    """

    count: int
    rate: float
    prompt: int = 512
    output: int = 128
    cv: float = 1.0
    cap: int = 4096
    seed: int = 0

    def source(self) -> OpenLoop:
        dice = random.Random(self.seed)
        rows = [
            Row(self._around(dice, self.prompt), self._around(dice, self.output)) for _ in range(self.count)
        ]
        scaling = Scaling(cap=self.cap)
        each = [_arrival(number, row, scaling) for number, row in enumerate(rows)]
        at = times(self.rate, self.cv, self.seed)
        return OpenLoop([replace(one, at=next(at)) for one in each])

    def sessions(self, turns: int, think: float) -> Sessions:
        """`count` sessions that begin at `rate`; each turn adds such a prompt to what was said, after a pause
        of `think` seconds on average (exponential)."""
        dice = random.Random(self.seed)
        starts, each = [], []
        at = 0.0
        for _ in range(self.count):
            at += dice.expovariate(self.rate)
            starts.append(at)
            length, talk = 0, []
            for _ in range(turns):
                length += self._around(dice, self.prompt)
                output = self._around(dice, self.output)
                pause = dice.expovariate(1 / think) if think else 0.0
                talk.append(Turn(pause, length, output))
                length += min(output, self.cap)
            each.append(talk)
        return Sessions(starts, each, self.cap)

    @staticmethod
    def _around(dice: random.Random, mean: int) -> int:
        return max(1, dice.randint(mean // 2, mean + mean // 2))


def times(rate: float, cv: float, seed: int) -> Iterator[float]:
    """Times whose gaps are from a Gamma distribution: mean 1 / rate seconds, and this variation."""
    if not (rate > 0 and cv > 0):
        raise EngineFault("bad_setting", f"a rate and its variation are more than 0, not {rate} and {cv}")
    dice = random.Random(seed)
    shape, at = 1 / cv**2, 0.0
    while True:
        at += dice.gammavariate(shape, 1 / (rate * shape))
        yield at


def name_of(path: Path) -> str:
    """What a trace is called."""
    return path.name.split(".")[0]


def faster(source: OpenLoop, rate: float) -> OpenLoop:
    """The same at so many times its rate."""
    return OpenLoop([replace(arrival, at=arrival.at / rate) for arrival in source.each])


def spaced(rows: list[Row], rate: float, cv: float, seed: int) -> list[Row]:
    """A trace with made-up times in place of its own, which some traces lack."""
    at = times(rate, cv, seed)
    return [msgspec.structs.replace(row, arrival_s=next(at)) for row in rows]
