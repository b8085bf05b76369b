"""How much each replica has yet to compute, in predicted tokens.

Owns what is known of one replica between two of its reports: what it said (its engine's own length predictor
counts: prompts not yet computed, answers by their predicted lengths), and what it was given since. Router and
simulator use the same. Pure data: must not know HTTP, time, nor how a replica is chosen (placement.py).

A report grows old within milliseconds where answers are short. So it is counted down: of what a replica said
it had for n requests, one n-th goes with each of them that ends.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_GUESS = 128.0  # tokens of an answer, before any replica has told what it expects
LATELY = 0.05  # how much one more request changes what a usual one is
Share = tuple[int, int]  # (round in which a request was given to a replica, its tokens)


@dataclass(slots=True)
class TokenLoad:
    """One replica. told, of: tokens that it has at its last report, for so many requests; answer: tokens of
    an answer as its predictor expects them, 0 where it does not say."""

    told: float = 0.0
    of: int = 0
    answer: float = 0.0
    _asking: int = 0  # of requests begun before a report that is under way
    _fresh: int = 0  # of those begun since
    _round: int = 0
    _reported: int = -1  # the last round whose requests a report includes

    @property
    def tokens(self) -> float:
        """That it has yet to compute."""
        return max(0.0, self.told + self._asking + self._fresh)

    def began(self, tokens: int) -> Share:
        """It is given a request of so many tokens. What is returned goes to `ended` once."""
        self._fresh += tokens
        return self._round, tokens

    def ended(self, share: Share) -> None:
        """It has that request no more."""
        begun, tokens = share
        if begun == self._round:
            self._fresh -= tokens
        elif begun > self._reported:
            self._asking -= tokens
        elif self.of > 0:
            self.told -= self.told / self.of
            self.of -= 1
            self.told = self.told if self.of else 0.0

    def ask(self) -> None:
        """It is asked for a report now: what it is given from here on may be missing in it."""
        self._asking += self._fresh
        self._fresh = 0
        self._round += 1

    def report(self, tokens: float, requests: int, answer: float) -> None:
        """What it said. answer: 0 where it does not say."""
        self.told, self.of = tokens, requests
        self.answer = answer or self.answer  # an idle one expects none
        self._asking, self._reported = 0, self._round - 1


@dataclass(slots=True)
class UsualRequest:
    """Placement compares requests: loads are counted in requests of the usual size. tokens: of one."""

    tokens: float = 0.0

    def add(self, tokens: float) -> None:
        """One more came."""
        self.tokens = tokens if not self.tokens else self.tokens + LATELY * (tokens - self.tokens)

    def requests(self, tokens: float) -> float:
        """So many tokens, in requests."""
        return tokens / self.tokens if self.tokens else 0.0


def expected_tokens(prompt: float, cached: float, answer: float, most: int) -> int:
    """What a request is expected to cost: of its prompt what is probably not cached, and an answer of the
    expected length, at most what it may have (`most`; 0: as many as it likes)."""
    answer = answer or FIRST_GUESS
    return round(max(0.0, prompt - cached) + (min(answer, most) if most else answer))
