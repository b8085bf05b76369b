"""Built-in workloads, each of which shows one thing that batching policies and queue orders do differently.

Owns their lengths, times and tenants; the same seed gives the same requests. Must not know engines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pageturner.lab.workload import WORDS, Job

TENANTS = 10  # of `tenants`: the first sends as often as ten of the others


@dataclass(frozen=True, slots=True)
class Mix:
    """about: what is in it and what it shows. jobs(count, seed): the requests, by arrival; the true length of
    each answer is `forced_end`, and `max_tokens` is left for the client to choose."""

    about: str
    jobs: Callable[[int, int], list[Job]]


def _job(dice: random.Random, prompt: int, output: int, at: float = 0.0, tenant: str = "") -> Job:
    return Job(" ".join(dice.choices(WORDS, k=prompt)), output, at, output, tenant)


def _tailed(dice: random.Random, median: int, least: int, most: int) -> int:
    """Many short and a few long, as in recorded traffic: log-normal, sigma 0.9."""
    return min(most, max(least, round(math.exp(dice.gauss(math.log(median), 0.9)))))


def _lengths(dice: random.Random) -> tuple[int, int]:
    return _tailed(dice, 80, 12, 512), _tailed(dice, 40, 6, 256)


def _mixed(count: int, seed: int) -> list[Job]:
    dice = random.Random(seed)
    return [_job(dice, *_lengths(dice)) for _ in range(count)]


def _uniform(count: int, seed: int) -> list[Job]:
    dice = random.Random(seed)
    return [_job(dice, 64, 48) for _ in range(count)]


def _bursts(count: int, seed: int) -> list[Job]:
    """Eight at a time, two seconds apart on average."""
    dice, at, jobs = random.Random(seed), 0.0, []
    for number in range(count):
        if number and number % 8 == 0:
            at += dice.expovariate(1 / 2.0)
        jobs.append(_job(dice, *_lengths(dice), at))
    return jobs


def _stalls(count: int, seed: int) -> list[Job]:
    """Every fourth has a prompt of 1,000 words; the others are in the middle of their answers then."""
    dice = random.Random(seed)
    sizes = [(1000, 16) if number % 4 == 3 else (24, 96) for number in range(count)]
    return [_job(dice, *size, 0.25 * number) for number, size in enumerate(sizes)]


def _tenants(count: int, seed: int) -> list[Job]:
    """All at once, the requests of the loud tenant in front."""
    dice = random.Random(seed)
    loud = count * 10 // (10 + TENANTS - 1)
    names = ["loud"] * loud + [f"quiet {1 + number % (TENANTS - 1)}" for number in range(count - loud)]
    return [_job(dice, _tailed(dice, 48, 12, 200), _tailed(dice, 32, 6, 128), tenant=name) for name in names]


MIXES = {
    "mixed": Mix("prompts and answers of very different lengths, all at once", _mixed),
    "uniform": Mix("short prompts and answers of equal lengths, all at once", _uniform),
    "bursts": Mix("mixed lengths in bursts of eight", _bursts),
    "stalls": Mix("long prompts that arrive while others are being answered", _stalls),
    "tenants": Mix("ten tenants, of which one sends ten times as much as each other", _tenants),
}
