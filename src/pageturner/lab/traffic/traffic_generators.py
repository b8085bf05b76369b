"""Made-up traffic: arrival times, prompts of random words or tokens, sessions, and the built-in
mixes.

Owns lengths, times and tenants; the same seed gives the same requests. Must not know engines.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from pageturner.errors import bad_setting
from pageturner.lab.traffic.prompt_text import WORDS
from pageturner.lab.traffic.traffic import OpenLoop, Sessions, SessionTurn, TrafficRequest
from pageturner.lab.traffic.traffic_files import TraceRow, TraceScaling, trace_requests


def around(dice: random.Random, mean: int) -> int:
    """A length spread evenly from half to one and a half of the mean; 1 or more."""
    return max(1, dice.randint(mean // 2, mean + mean // 2))


# -- when ------------------------------------------------------------------------------------------


def arrival_times(rate: float, cv: float, seed: int) -> Iterator[float]:
    """Times whose gaps are from a Gamma distribution with a mean of 1 / rate seconds and this
    coefficient of variation: 1 is a Poisson process, more comes in bursts."""
    if not (rate > 0 and cv > 0):
        raise bad_setting(f"a rate and its variation are more than 0, not {rate} and {cv}")
    dice = random.Random(seed)
    shape, at = 1 / cv**2, 0.0
    while True:
        at += dice.gammavariate(shape, 1 / (rate * shape))
        yield at


def at_times(requests: Iterable[TrafficRequest], times: Iterable[float]) -> list[TrafficRequest]:
    """The same requests at other times."""
    return [replace(one, arrival=at) for one, at in zip(requests, times, strict=False)]


def poisson(requests: list[TrafficRequest], rate: float, seed: int) -> list[TrafficRequest]:
    """The same requests with exponential gaps of mean 1 / rate seconds between them."""
    return at_times(requests, arrival_times(rate, 1.0, seed))


def with_times(rows: list[TraceRow], rate: float, cv: float, seed: int) -> list[TraceRow]:
    """A trace with made-up times in place of its own, which some traces lack."""
    at = arrival_times(rate, cv, seed)
    return [msgspec.structs.replace(row, arrival_s=next(at)) for row in rows]


def burst_times(count: int, rate: float, seed: int, burst: int = 1) -> list[float]:
    """`count` times from 0 on at `rate` a second, `burst` of them together; rate 0: all at once."""
    dice, at, times = random.Random(seed), 0.0, []
    for number in range(1, count + 1):
        times.append(at)
        at += dice.expovariate(rate / burst) if rate and number % burst == 0 else 0.0
    return times


# -- what ------------------------------------------------------------------------------------------


def word_prompts(
    count: int = 64, input_len: int = 128, output_len: int = 64, seed: int = 0
) -> list[TrafficRequest]:
    """Prompts of about `input_len` random words, each answered by about `output_len` tokens, all at
    once."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = " ".join(dice.choices(WORDS, k=around(dice, input_len)))
        found.append(TrafficRequest(prompt, output=None, max_tokens=around(dice, output_len)))
    return found


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts of random tokens of a vocabulary; mean lengths in tokens."""

    prompt: int
    output: int
    vocab: int

    def at(self, times: Iterable[float], seed: int, *, name: str = "", long: int = 0) -> OpenLoop:
        """One request at each of these times, in seconds. long: tokens of the first prompt and of
        every twelfth from there on; 0: they are as long as the others."""
        dice = random.Random(seed)
        found = []
        for number, at in enumerate(times):
            length, output = around(dice, self.prompt), around(dice, self.output)
            length = long if long and number % 12 == 0 else length
            prompt = tuple(dice.randrange(1, self.vocab) for _ in range(length))
            found.append(TrafficRequest(prompt, output, max_tokens=2 * self.output, arrival=at))
        return OpenLoop(found, name)


@dataclass(frozen=True, slots=True)
class SyntheticTraffic:
    """`count` requests, or sessions, of which only lengths are made up: for simulations.

    rate  requests, or sessions that begin, a second
    cv    coefficient of variation of the gaps between requests
    """

    count: int
    rate: float
    prompt: int = 512
    output: int = 128
    cv: float = 1.0
    cap: int = 4096
    seed: int = 0

    def open_loop(self) -> OpenLoop:
        dice = random.Random(self.seed)
        lengths = [
            (around(dice, self.prompt), around(dice, self.output)) for _ in range(self.count)
        ]
        made = trace_requests([TraceRow(*pair) for pair in lengths], TraceScaling(cap=self.cap))
        return OpenLoop(at_times(made, arrival_times(self.rate, self.cv, self.seed)))

    def sessions(self, turns: int, think: float) -> Sessions:
        """Each turn adds such a prompt to what was said, after a pause of `think` seconds on
        average (exponential)."""
        dice = random.Random(self.seed)
        starts, each = [], []
        at = 0.0
        for _ in range(self.count):
            at += dice.expovariate(self.rate)
            starts.append(at)
            length, talk = 0, []
            for _ in range(turns):
                length += around(dice, self.prompt)
                output = around(dice, self.output)
                pause = dice.expovariate(1 / think) if think else 0.0
                talk.append(SessionTurn(pause, length, output))
                length += min(output, self.cap)
            each.append(talk)
        return Sessions(starts, each, self.cap)


# -- built-in mixes, each of which shows one thing that policies and orders do differently ---------

TENANTS = 10  # of `tenants`: the first sends as often as ten of the others


@dataclass(frozen=True, slots=True)
class NamedMix:
    """about: what is in it and what it shows. make(count, seed): the requests, by arrival."""

    about: str
    make: Callable[[int, int], list[TrafficRequest]]


def _words(
    dice: random.Random, prompt: int, output: int, at: float = 0.0, tenant: str = ""
) -> TrafficRequest:
    text = " ".join(dice.choices(WORDS, k=prompt))
    return TrafficRequest(text, output=output, max_tokens=output, arrival=at, tenant=tenant)


def _tailed(dice: random.Random, median: int, least: int, most: int) -> int:
    """Many short and a few long, as in recorded traffic: log-normal, sigma 0.9."""
    return min(most, max(least, round(math.exp(dice.gauss(math.log(median), 0.9)))))


def _lengths(dice: random.Random) -> tuple[int, int]:
    return _tailed(dice, 80, 12, 512), _tailed(dice, 40, 6, 256)


def _mixed(count: int, seed: int) -> list[TrafficRequest]:
    dice = random.Random(seed)
    return [_words(dice, *_lengths(dice)) for _ in range(count)]


def _uniform(count: int, seed: int) -> list[TrafficRequest]:
    dice = random.Random(seed)
    return [_words(dice, 64, 48) for _ in range(count)]


def _bursts(count: int, seed: int) -> list[TrafficRequest]:
    """Eight at a time, two seconds apart on average."""
    dice, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        if number and number % 8 == 0:
            at += dice.expovariate(1 / 2.0)
        found.append(_words(dice, *_lengths(dice), at))
    return found


def _stalls(count: int, seed: int) -> list[TrafficRequest]:
    """Every fourth has a prompt of 1,000 words; the others are in the middle of their answers
    then."""
    dice = random.Random(seed)
    sizes = [(1000, 16) if number % 4 == 3 else (24, 96) for number in range(count)]
    return [_words(dice, *size, 0.25 * number) for number, size in enumerate(sizes)]


def _tenants(count: int, seed: int) -> list[TrafficRequest]:
    """All at once, the requests of the loud tenant in front."""
    dice = random.Random(seed)
    loud = count * 10 // (10 + TENANTS - 1)
    quiet = (f"quiet {1 + number % (TENANTS - 1)}" for number in range(count - loud))
    names = itertools.chain(["loud"] * loud, quiet)
    return [
        _words(dice, _tailed(dice, 48, 12, 200), _tailed(dice, 32, 6, 128), tenant=name)
        for name in names
    ]


MIXES = {
    "mixed": NamedMix("prompts and answers of very different lengths, all at once", _mixed),
    "uniform": NamedMix("short prompts and answers of equal lengths, all at once", _uniform),
    "bursts": NamedMix("mixed lengths in bursts of eight", _bursts),
    "stalls": NamedMix("long prompts that arrive while others are being answered", _stalls),
    "tenants": NamedMix(
        "ten tenants, of which one sends ten times as much as each other", _tenants
    ),
}
