"""Beam search: a group of several sequences, of whose continuations the best go on.

Owns how candidates become beams and answers. Must not know blocks, budgets or queues: it says which
sequence goes on as which, and the scheduler shares their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from pageturner.request import Event, Failure, Logprob, Request
from pageturner.scheduler.group import NOTHING, Branch, Change
from pageturner.scheduler.types import Item, Output, Sequence

NO_ANSWER = Failure(
    "nothing_allowed", "the constraints of this request together leave no token to choose"
)


@dataclass(slots=True)
class Hypothesis:
    """A finished beam. score: the sum of its logprobs, divided by its length ** length_penalty."""

    tokens: list[int]
    logprobs: list[Logprob]
    finish: str
    score: float


class BeamSearch:
    """Beam search as in Transformers: `beam_width` sequences, of whose continuations the best go
    on.

    Each sequence that is computed to its end offers candidates, then waits; when all have, the best
    go on. Nothing is told before the end. Every choice of the prompt is a request of its own, as
    those of sampling are, and gets the hypothesis of its index; the first one here does the work
    for all. Ties go to the better sequence, then to the smaller token.
    """

    def __init__(self, request: Request) -> None:
        self._params, self._width = request.params, request.params.beam_width
        self.sequences = [Sequence(request, index=k) for k in range(self._width)]
        self.sequences[0].tokens = list(request.prompt)
        self._choices = {request.id: request}
        self._ranked = [self.sequences[0]]  # those with tokens, the best first
        self._scores = {self.sequences[0]: 0.0}
        self._logprobs: dict[Sequence, list[Logprob]] = {self.sequences[0]: []}
        self._offers: dict[Sequence, Output] = {}
        self._best: list[Hypothesis] = []  # at most `width`, the best first

    @property
    def ids(self) -> list[int]:
        """The requests that wait for its news."""
        return list(self._choices)

    def join(self, request: Request) -> bool:
        """One more choice of the same prompt, searched in the same way."""
        if request.params != self._params:
            return False
        self._choices[request.id] = request
        return True

    def leave(self, id: int) -> None:
        """Nobody waits for this choice any more."""
        del self._choices[id]

    def take(self, item: Item, output: Output) -> Change:
        """Take what may come behind one sequence; when all are computed to their ends, who goes on
        as what."""
        if not item.wants_logits:
            return NOTHING
        self._offers[item.sequence] = output
        if len(self._offers) < len(self._ranked):
            return NOTHING
        if branches := self._next_beams():
            return Change([], [], branches, None)
        return Change([], self._events(), [], "stop")

    def _next_beams(self) -> list[Branch]:
        """Return which sequence goes on as which; empty when the search is over. Sequences without
        a branch are free."""
        length = self._ranked[0].generated + 1
        full = len(self._ranked[0].tokens) + 1 >= self._ranked[0].limit
        going: list[tuple[float, Sequence, int, float]] = []
        for place, (score, seq, token, value) in enumerate(self._continuations()):
            ends = token in self._params.stop_ids and length >= self._params.min_tokens
            if not (ends or full):
                going.append((score, seq, token, value))
            elif place < self._width:  # the others are there so that enough go on
                finish = "stop" if ends else "length"
                self._keep(seq, token, value, finish, score / length**self._params.length_penalty)
        going = going[: self._width]
        if not going or self._over(going[0][0], length):
            return []
        return self._branch(going)

    def _continuations(self) -> list[tuple[float, Sequence, int, float]]:
        """(score, sequence, token, its logprob), best first: enough that `width` go on though some
        end."""
        most = (1 + max(1, len(self._params.stop_ids))) * self._width
        found = [
            (-self._scores[seq] - value, rank, token, value)
            for rank, seq in enumerate(self._ranked)
            for token, value in self._offers[seq].candidates
        ]
        found.sort()
        return [
            (-worst, self._ranked[rank], token, value) for worst, rank, token, value in found[:most]
        ]

    def _keep(self, seq: Sequence, token: int, value: float, finish: str, score: float) -> None:
        logprobs = [*self._logprobs[seq], self._logprob(seq, value)]
        tokens = [*seq.tokens[seq.prompt_len :], token]
        self._best.append(Hypothesis(tokens, logprobs, finish, score))
        self._best.sort(key=attrgetter("score"), reverse=True)
        del self._best[self._width :]

    def _logprob(self, seq: Sequence, value: float) -> Logprob:
        told = self._offers[seq].logprobs
        return (value, told[0][1] if told else ())

    def _over(self, best: float, length: float) -> bool:
        """Return whether no sequence that goes on may still become better than the worst
        hypothesis: by the best score so far, at this length or, never stopping early, at the
        longest."""
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if len(self._best) < self._width:
            return False
        if early is True:
            return True
        first = self._ranked[0]
        if early == "never" and penalty > 0:
            length = first.limit - first.prompt_len
        return self._best[-1].score >= best / float(length**penalty)

    def _branch(self, going: list[tuple[float, Sequence, int, float]]) -> list[Branch]:
        parents = {seq for _, seq, _, _ in going}
        free = [seq for seq in self.sequences if seq not in parents]
        branches, scores, logprobs = [], {}, {}
        for score, seq, token, value in going:
            child = seq if seq in parents else free.pop(0)
            parents.discard(seq)
            branches.append(Branch(seq, child, token))
            scores[child] = score
            logprobs[child] = [*self._logprobs[seq], self._logprob(seq, value)]
        self._ranked, self._scores, self._logprobs = list(scores), scores, logprobs
        self._offers.clear()
        return branches

    def _events(self) -> list[Event]:
        """The events of the end, for each choice the hypothesis of its index. Where there are fewer
        answers than choices, as a grammar may have it, the last ones are empty; where there is
        none, all fail."""
        if not self._best:
            return self.fail(NO_ANSWER)
        return [self._answer(choice) for choice in self._choices.values()]

    def fail(self, failure: Failure) -> list[Event]:
        """The events of its end without an answer."""
        events = [self._event(choice, "error") for choice in self._choices.values()]
        for event in events:
            event.failure = failure
        return events

    def _event(self, choice: Request, finish: str) -> Event:
        first = self.sequences[0]
        return Event(
            id=choice.id,
            index=choice.index,
            position=first.prompt_len,
            finish=finish,
            cached=first.cached,
        )

    def _answer(self, choice: Request) -> Event:
        event = self._event(choice, "stop")
        if choice.index < len(self._best):
            best = self._best[choice.index]
            event.tokens, event.finish = tuple(best.tokens), best.finish
            event.logprobs = tuple(best.logprobs) if self._params.logprobs is not None else ()
        return event
