"""Workloads: what is asked, how long the answers are, when it arrives.

Owns files (JSONL: prompt, max_tokens, arrival_s) and the built-in synthetic mix. Must not know servers or
engines.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pageturner.errors import EngineFault

# Common short words, one token each in most tokenizers.
_COMMON = """the of and to in is you that it he was for on are as with his they at be this have from or one
had by word but not what all were we when your can said there use an each which she do how
their if will up other about out many then them these so some her would make like him into
time has look two more write go see"""
WORDS = _COMMON.split()


class Job(msgspec.Struct, frozen=True):
    """One request of a workload. `arrival_s`: seconds from the start of the run; `forced_end`: where the
    answer ends, unknown to the scheduler; None: at `max_tokens`. `tenant`: who asks, for order fair."""

    prompt: str
    max_tokens: int
    arrival_s: float = 0.0
    forced_end: int | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Mix:
    """A synthetic workload: `count` prompts of about `input_len` words, each answered by `output_len` tokens.

    Lengths are drawn uniformly from a half to one and a half of these; the same seed gives the same workload.
    """

    count: int = 64
    input_len: int = 128
    output_len: int = 64
    seed: int = 0

    def jobs(self) -> list[Job]:
        dice = random.Random(self.seed)
        return [self._job(dice) for _ in range(self.count)]

    def _job(self, dice: random.Random) -> Job:
        words = dice.choices(WORDS, k=self._around(dice, self.input_len))
        return Job(" ".join(words), self._around(dice, self.output_len))

    @staticmethod
    def _around(dice: random.Random, mean: int) -> int:
        return max(1, dice.randint(mean // 2, mean + mean // 2))


def load(path: Path) -> list[Job]:
    """The jobs of a JSONL file, in file order. EngineFault names the line that cannot be read."""
    decoder = msgspec.json.Decoder(Job)
    jobs = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EngineFault("workload", f"cannot read the workload {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            job = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise EngineFault("workload", f"{path}:{number}: {error}") from error
        if job.max_tokens < 1 or job.arrival_s < 0:
            raise EngineFault("workload", f"{path}:{number}: max_tokens must be > 0 and arrival_s >= 0")
        jobs.append(job)
    if not jobs:
        raise EngineFault("workload", f"{path} holds no request")
    return jobs
