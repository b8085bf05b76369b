"""Recorded traffic: lengths and arrival times of real requests, made into a workload for a small engine.

Owns the schema of a trace (JSONL, plain or gzip: prompt_tokens, output_tokens, arrival_s, hash_ids), its
scaling, and prompts of the asked length. The no-oracle rule: the server is told one cap, the same for all,
and never how long an answer will be (docs/adr/0006).
"""

from __future__ import annotations

import gzip
import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pageturner.errors import EngineFault
from pageturner.lab.workload import WORDS, Job

HASH_TOKENS = 512  # of the prompt, for each of the `hash_ids`


class Row(msgspec.Struct, frozen=True):
    """One request of a trace; unknown keys are ignored."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    hash_ids: list[int] = []
    session_id: str | None = None
    turn: int = 0
    think_s: float | None = None
    session_start_s: float = 0.0
    client_id: int | None = None

    @property
    def tenant(self) -> str:
        return "" if self.client_id is None else str(self.client_id)


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def load(path: Path, most: int = 0) -> list[Row]:
    """What can be replayed of `read`. EngineFault for sessions."""
    rows = read(path, most)
    if rows[0].session_id is not None:
        message = f"{path} holds sessions, whose turns wait for answers: that is not replayed yet"
        raise EngineFault("workload", message)
    return rows


def read(path: Path, most: int = 0) -> list[Row]:
    """The first `most` rows of a trace (0: all). EngineFault names the line that cannot be read."""
    decoder = msgspec.json.Decoder(Row)
    rows: list[Row] = []
    try:
        opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
        with opened as file:
            for number, line in enumerate(itertools.islice(file, most or None), 1):
                row = decoder.decode(line)
                if row.prompt_tokens < 1 or row.output_tokens < 1:
                    raise EngineFault("workload", f"{path}:{number}: lengths are 1 or more")
                rows.append(row)
    except msgspec.DecodeError as error:
        raise EngineFault("workload", f"{path}:{len(rows) + 1}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise EngineFault("workload", f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise EngineFault("workload", f"{path} holds no request")
    return rows


class Prompts:
    """Text of a wanted length, from a place that the seed decides, so that prefixes never match by accident.

    text       what prompts are cut from; "": common words, each about one token
    tokenizer  counts exactly; None: a token is taken for 3/4 of a word of `text`, or for one common word
    """

    def __init__(self, text: str = "", tokenizer: Tokenizer | None = None, seed: int = 0) -> None:
        self._words = text.split() or WORDS
        self._share = 0.75 if text else 1.0
        self._tokenizer = tokenizer
        self._seed = seed

    def make(self, key: int, tokens: int) -> str:
        """About `tokens` tokens; the same key gives the same text."""
        words = self._from(key)
        if self._tokenizer is None:
            return " ".join(itertools.islice(words, max(1, round(tokens * self._share))))
        text = " ".join(itertools.islice(words, tokens + 1))
        ids = self._tokenizer.encode(text, add_special=False, parse_special=False)
        return self._tokenizer.decode(ids[:tokens]).rstrip("\ufffd")

    def shared(self, blocks: list[int], block: int, tokens: int) -> str:
        """A prompt made of blocks that other prompts share: equal ids, equal text."""
        parts = []
        for id in blocks:
            parts.append(self.make(-1 - id, min(block, tokens)))
            tokens -= block
            if tokens <= 0:
                break
        return " ".join(parts)

    def _from(self, key: int) -> Iterator[str]:
        dice = random.Random(f"{self._seed} {key}")
        if self._words is WORDS:
            return (dice.choice(WORDS) for _ in itertools.count())
        start = dice.randrange(len(self._words))
        return (self._words[(start + i) % len(self._words)] for i in itertools.count())


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace becomes a workload.

    length_scale  lengths are multiplied by it, and stay 1 or more
    rate_scale    arrival times are divided by it
    cap           max_tokens of every request; longer answers are cut there, as a client's would be
    context       what the server takes, prompt and cap together: longer requests are left out; 0: unknown
    oracle        the server is told the true length instead of the cap
    """

    length_scale: float = 1.0
    rate_scale: float = 1.0
    cap: int = 512
    context: int = 0
    oracle: bool = False

    def jobs(self, rows: list[Row], prompts: Prompts) -> tuple[list[Job], int, int]:
        """The jobs, how many requests were left out as too long, and how many answers the cap cuts."""
        jobs: list[Job] = []
        cut = 0
        for number, row in enumerate(rows):
            size, answer = self._scaled(row.prompt_tokens), self._scaled(row.output_tokens)
            room = min(answer, self.cap) if self.oracle else self.cap
            if self.context and size + room > self.context:
                continue
            cut += answer > self.cap
            block = self._scaled(HASH_TOKENS)
            text = prompts.shared(row.hash_ids, block, size) if row.hash_ids else prompts.make(number, size)
            at = (row.arrival_s or 0.0) / self.rate_scale
            jobs.append(Job(text, room, at, None if self.oracle else answer, row.tenant))
        return jobs, len(rows) - len(jobs), cut

    def _scaled(self, length: int) -> int:
        return max(1, round(length * self.length_scale))
