"""Does a Retry-After hold? Clients whom a full server refuses come back when they were told to, on loads
that `server/engine_client/retry_after.py` was not tuned on; printed is how many of them were let in, by load
and in all.

    python bench/retry_after.py [--seeds 5] [--seconds 240]

The queue of the server (`RetryAfter`) is the real one. The engine behind it is simulated step by step: a step
computes prompts in a budget and a token for each that runs, and takes longer the more it computes. The loads
differ in how requests arrive (Poisson, waves, a rush, a slow rise, crowds at once), how long they are
(alike, spread, a heavy tail, two kinds) and how many choices they have; some clients give up. Ends with 1
where fewer than nine of ten were let in over all loads.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sin

from pageturner.server.engine_client.retry_after import RetryAfter

BUDGET = 512  # tokens of a step
ENOUGH = 0.9
Lengths = Callable[[random.Random], tuple[int, int]]  # of prompt and answer, in tokens


@dataclass
class Server:
    """slots run at once, `limit` may be there in all; a step takes `base` seconds and `each` for a token."""

    slots: int
    limit: int
    base: float = 0.005
    each: float = 0.0002


@dataclass(slots=True)
class Choice:
    prompt: int
    answer: int


def poisson(chance: random.Random, rate: float) -> Iterator[float]:
    """So many requests a second."""
    now = 0.0
    while True:
        now += chance.expovariate(rate)
        yield now


def waves(chance: random.Random, rate: float) -> Iterator[float]:
    """Between nothing and twice the rate, one wave in 40 s."""
    return (at for at in poisson(chance, 2 * rate) if chance.random() < 0.5 + 0.5 * sin(at / 6.4))


def rush(chance: random.Random, rate: float) -> Iterator[float]:
    """Half the rate, and four times as much from second 60 to second 90."""
    most = 4 * rate
    return (at for at in poisson(chance, most) if 60 < at < 90 or chance.random() < 0.125)


def rise(chance: random.Random, rate: float) -> Iterator[float]:
    """From nothing to twice the rate in 200 s."""
    return (at for at in poisson(chance, 2 * rate) if chance.random() < at / 200)


def crowds(chance: random.Random, rate: float) -> Iterator[float]:
    """All of ten seconds at the same moment."""
    now = 0.0
    while True:
        now += chance.uniform(5, 15)
        yield from [now] * int(10 * rate)


def alike(chance: random.Random) -> tuple[int, int]:
    return 200, 100


def spread(chance: random.Random) -> tuple[int, int]:
    return chance.randint(10, 800), chance.randint(1, 300)


def heavy(chance: random.Random) -> tuple[int, int]:
    return min(4000, int(chance.lognormvariate(4.5, 1.2)) + 1), min(
        2000, int(40 * chance.paretovariate(1.2))
    )


def two_kinds(chance: random.Random) -> tuple[int, int]:
    return (3000, 10) if chance.random() < 0.2 else (50, 200)


ARRIVALS = (poisson, waves, rush, rise, crowds)
LENGTHS: tuple[Lengths, ...] = (alike, spread, heavy, two_kinds)
SERVERS = (Server(8, 40), Server(32, 160), Server(64, 1088), Server(4, 12))


def capacity(server: Server, lengths: Lengths) -> float:
    """Choices that end in a second when all slots are taken, roughly."""
    chance = random.Random(0)
    told = [lengths(chance) for _ in range(2000)]
    prompt, answer = (sum(one[i] for one in told) / len(told) for i in (0, 1))
    step = server.base + server.each * server.slots
    return server.slots / (answer * step + server.slots * prompt * server.each)


class Simulation:
    """One load. held: whether who came back when told was let in."""

    def __init__(
        self, seed: int, server: Server, arrivals: Iterator[float], lengths: Lengths
    ) -> None:
        self.held = Counter[bool]()
        self._chance = random.Random(seed)
        self._server = server
        self._arrivals = arrivals
        self._lengths = lengths
        self._places = RetryAfter(server.limit)
        self._waiting: deque[Choice] = deque()
        self._running: list[Choice] = []
        self._back: list[tuple[float, int, tuple[int, ...]]] = []  # when, a number, the request

    def run(self, seconds: float) -> Counter[bool]:
        now, number, coming = 0.0, 0, next(self._arrivals)
        while now < seconds:
            while min(coming, self._back[0][0] if self._back else coming) <= now:
                if self._back and self._back[0][0] <= coming:
                    at, id, request = heapq.heappop(self._back)
                    self._ask(at, id, request, again=True)
                else:
                    number += 1
                    self._ask(coming, number, self._new(), again=False)
                    coming = next(self._arrivals)
            now = self._step(now)
        return self.held

    def _new(self) -> tuple[int, ...]:
        """Lengths of prompt and answer, and how many choices: a few have several."""
        return (*self._lengths(self._chance), self._chance.choice((1, 1, 1, 1, 1, 1, 1, 2, 4)))

    def _ask(self, at: float, id: int, request: tuple[int, ...], again: bool) -> None:
        prompt, answer, choices = request
        taken = len(self._waiting) + len(self._running)
        wait = self._places.ask(id, taken, choices, at)
        if again:
            self.held[not wait] += 1
        if not wait:
            self._waiting += [Choice(prompt, answer) for _ in range(choices)]
        elif self._chance.random() > 0.1:  # the others give up
            late = self._chance.choice((0.0, 0.02, 0.3)) * self._chance.random()
            heapq.heappush(self._back, (at + wait + late, id, request))

    def _step(self, now: float) -> float:
        """One step. When it ended."""
        while self._waiting and len(self._running) < self._server.slots:
            self._running.append(self._waiting.popleft())
        if not self._running:
            return now + 0.01
        computed, room = 0, BUDGET
        for one in self._running:
            n = min(room, max(1, one.prompt))
            room, computed = room - n, computed + n
            if one.prompt > 0:
                one.prompt -= n
            else:
                one.answer -= n
        now += self._server.base + self._server.each * computed
        ended = [one for one in self._running if one.answer <= 0]
        self._running = [one for one in self._running if one.answer > 0]
        for _ in ended:
            self._places.ended(now)
        return now


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--load", type=float, default=1.3, help="of what the server can do")
    given = parser.parse_args()
    total, shares = Counter[bool](), []
    for server in SERVERS:
        for arrivals in ARRIVALS:
            for lengths in LENGTHS:
                held, rate = Counter[bool](), given.load * capacity(server, lengths) / 1.44
                for seed in range(1000, 1000 + given.seeds):
                    coming = arrivals(random.Random(seed), rate)
                    held += Simulation(seed, server, coming, lengths).run(given.seconds)
                total += held
                if held.total():
                    name = f"{server.slots:3} of {server.limit:4}  {arrivals.__name__:8} {lengths.__name__:10}"
                    shares.append(held[True] / held.total())
                    print(f"{name} {held[True] / held.total():7.1%} of {held.total()}", flush=True)
    share = total[True] / max(1, total.total())
    print(f"let in when told: {share:.1%} of {total.total()}; {min(shares):.1%} in the worst load")
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
