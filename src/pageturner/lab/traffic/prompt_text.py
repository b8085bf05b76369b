"""Prompts as text: words of a wanted length, equal where traffic says that prompts are equal.

Owns the words. Must not know who sends them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace

from pageturner.formats.tokenizer import Tokenizer
from pageturner.lab.traffic.traffic import OWN, Pieces, TrafficRequest

# Common short words, one token each in most tokenizers.
_COMMON = """the of and to in is you that it he was for on are as with his they at be this have from or one
had by word but not what all were we when your can said there use an each which she do how
their if will up other about out many then them these so some her would make like him into
time has look two more write go see"""
WORDS = _COMMON.split()


class PromptWriter:
    """Text of a wanted length, from a place that the seed decides, so that prefixes never match by
    accident.

    text       what prompts are cut from; "": common words, each about one token
    tokenizer  counts exactly; None: a token is taken for 3/4 of a word of `text`, or for one common
               word
    """

    def __init__(self, text: str = "", tokenizer: Tokenizer | None = None, seed: int = 0) -> None:
        self._words = text.split() or WORDS
        self._share = 0.75 if text else 1.0
        self._tokenizer = tokenizer
        self._seed = seed

    def seeded(self, seed: int) -> PromptWriter:
        """The same with another seed: none of its prompts begins like one of this writer."""
        other = copy(self)
        other._seed = seed
        return other

    def written(self, requests: Iterable[TrafficRequest]) -> list[TrafficRequest]:
        """The same requests with text for prompts."""
        return [
            replace(one, prompt=self.prompt(one.prompt)) if isinstance(one.prompt, Pieces) else one
            for one in requests
        ]

    def prompt(self, pieces: Pieces) -> str:
        """Text whose pieces are equal where contents are. What stands behind the last shared piece,
        less than a token of rounding in the traces at hand, is left away."""
        shared = [(-1 - content, count) for content, count in pieces.parts if content < OWN]
        own = [((content - OWN) // 2, count) for content, count in pieces.parts if content >= OWN]
        return " ".join(self.make(key, count) for key, count in shared or own)

    def make(self, key: int, tokens: int) -> str:
        """About `tokens` tokens; the same key gives the same text."""
        words = self._from(key)
        if self._tokenizer is None:
            return " ".join(itertools.islice(words, max(1, round(tokens * self._share))))
        text = " ".join(itertools.islice(words, tokens + 1))
        ids = self._tokenizer.encode(text, add_special=False, parse_special=False)
        return self._tokenizer.decode(ids[:tokens]).rstrip("\ufffd")

    def _from(self, key: int) -> Iterator[str]:
        dice = random.Random(f"{self._seed} {key}")
        if self._words is WORDS:
            return (dice.choice(WORDS) for _ in itertools.count())
        start = dice.randrange(len(self._words))
        return (self._words[(start + i) % len(self._words)] for i in itertools.count())
