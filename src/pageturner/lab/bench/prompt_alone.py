"""The time that each request would take alone: on an empty replica, its beginning cached if an
earlier request had the same one.

Owns the bound that no number of replicas gets below. Must not know schedulers: a prompt alone is
computed in chunks of the token budget, or at once by policies that know none, and then a token a
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation.step_cost import StepCost
from pageturner.lab.traffic.traffic import Pieces, Prompt, Traffic, TrafficRequest
from pageturner.telemetry.work import StepWork

CHUNK = 16  # tokens that count as one piece of a prompt whose tokens are known


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A request without seconds. cached: what an unlimited cache would have of its prompt; answer:
    tokens."""

    arrival: float
    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True, slots=True)
class PromptAlone:
    """Tokens and seconds of one request."""

    prompt: int
    cached: int
    ttft: float
    tpot: float


class KnownBeginnings:
    """A tree of the prompts so far: how much of a new one an unlimited cache has. Where pieces of
    one content are cut differently it may say too much, never too little."""

    def __init__(self) -> None:
        self._root: _Known = _Known({}, {})

    def note(self, prompt: Prompt) -> int:
        """Tokens at the beginning of this prompt that were in one before; from now on all of them
        are."""
        at, found, fresh = self._root, 0, False
        for content, count in _pieces(prompt):
            if not fresh:
                most = at.longest.get(content, 0)
                found += min(count, most)
                fresh = most < count
                if fresh and at.longest and not isinstance(prompt, Pieces):
                    found += min(count, CHUNK) - 1  # a piece may begin as another one does
            at.longest[content] = max(count, at.longest.get(content, 0))
            at = at.after.setdefault((content, count), _Known({}, {}))
        return found


@dataclass(slots=True)
class _Known:
    """A place in the tree. longest: tokens of each content that may follow; after: where they
    lead."""

    longest: dict[object, int]
    after: dict[tuple[object, int], _Known]


def _pieces(prompt: Prompt) -> Iterator[tuple[object, int]]:
    if isinstance(prompt, Pieces):
        yield from prompt.parts
        return
    for begin in range(0, len(prompt), CHUNK):
        piece = prompt[begin : begin + CHUNK]
        yield hash(piece), len(piece)


def prefill_seconds(cost: StepCost, computed: int, length: int, budget: int) -> float:
    """Seconds until the first token of a prompt of which so much is computed; budget 0: all at
    once."""
    seconds, budget = 0.0, budget or length
    while computed < length:
        n = min(budget, length - computed)
        pairs = n * computed + n * (n + 1) // 2
        seconds += cost.seconds(StepWork(n, 1, int(computed + n == length), computed + n, pairs))
        computed += n
    return seconds


def all_requests(traffic: Traffic) -> Iterator[TrafficRequest]:
    """Yield all requests, those that wait for an answer too, each as if the one before it had been
    answered at once."""
    for first in traffic.arrivals():
        left = [first]
        while left:
            one = left.pop()
            yield one
            left += traffic.after(one, one.arrival)


def prompts_of(traffic: Traffic, *, caching: bool) -> list[PromptTokens]:
    """Each request, in the order in which they come."""
    known, found = KnownBeginnings(), []
    for one in all_requests(traffic):
        length = prompt_length(one.prompt)
        cached = min(known.note(one.prompt), length - 1) if caching else 0
        if caching and (said := _with_answer(one)) is not None:
            known.note(said)  # the next turn of a conversation finds the answer too
        found.append(PromptTokens(one.arrival, length, cached, one.answer_length))
    return found


def alone(prompts: Iterable[PromptTokens], cost: StepCost, *, budget: int) -> list[PromptAlone]:
    """Return the time that each of these requests takes alone. budget: tokens of a step, 0: no
    limit."""
    found = []
    for one in prompts:
        ttft = prefill_seconds(cost, one.cached, one.prompt, budget)
        context = one.prompt + 1
        tpot = cost.seconds(StepWork(1, 1, 1, context, context)) if one.answer > 1 else 0.0
        found.append(PromptAlone(one.prompt, one.cached, ttft, tpot))
    return found


def _with_answer(one: TrafficRequest) -> Prompt | None:
    """Return the tokens that are in the cache after a request, prompt and answer, as the prompt of
    the next turn has them; None for a prompt of text."""
    # its last token is the end
    count = min(one.answer_length, one.max_tokens or one.answer_length) - 1
    if isinstance(one.prompt, str) or count < 1:
        return None
    if isinstance(one.prompt, Pieces):
        return (
            Pieces((*one.prompt.parts, (one.answer, count)))
            if isinstance(one.answer, int)
            else None
        )
    return (*one.prompt, *one.answer_tokens(0, count))


def prompt_length(prompt: Prompt) -> int:
    """Return the length of a prompt in tokens; for text, in characters."""
    return prompt.length if isinstance(prompt, Pieces) else len(prompt)


@dataclass(frozen=True, slots=True)
class AloneVerdict:
    """The answer to whether the targets can be met at all. share: of the requests that meet them
    alone; at: the request at the wanted quantile, by TTFT."""

    share: float
    at: PromptAlone
    possible: bool


def judge(found: list[PromptAlone], targets: LatencyTargets) -> AloneVerdict:
    """Return the verdict on these requests before anything is simulated."""
    share = sum(targets.met(one.ttft, one.tpot) for one in found) / len(found)
    place = next(i for i in range(len(found)) if (i + 1) / len(found) >= targets.share)
    at = sorted(found, key=lambda one: one.ttft)[place]
    return AloneVerdict(share, at, share >= targets.share)
