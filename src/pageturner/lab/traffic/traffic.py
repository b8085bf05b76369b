"""Traffic: what is asked, how long each answer is, and when it comes. One model of it for all of
the lab.

Owns a request of traffic, the two ways in which requests follow each other (open loop, sessions),
and how they become text for a server, requests for an engine, or arrivals of a simulation. Must not
know where traffic comes from: files (traffic_files.py), generators (traffic_generators.py) and step
logs (recorded_runs.py) all make it.

No oracle (docs/adr/0006): where an answer ends (`output`) is known to whoever produces the tokens,
and never to a scheduler, which sees the same `max_tokens` that a client would send.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from pageturner.errors import EngineFault
from pageturner.params import SamplingParams
from pageturner.request import Request, SessionHint

STOP = 0  # the token that ends a made-up answer of a real engine; most tokenizers have a special one there
END = -1  # the token that ends every simulated answer; no prompt holds it
OWN = 1 << 40  # content of this number and above belongs to one prompt or answer alone


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt of which only lengths are known, and what it shares with others: (content, tokens)
    in order. Equal contents are equal tokens and equal text; different ones have nothing in
    common."""

    parts: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(count for _, count in self.parts)


Prompt = str | tuple[int, ...] | Pieces  # text, tokens, or what is known of them


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One request of some traffic. Lengths in tokens.

    output      where the answer ends; None: at max_tokens, whatever the model says
    max_tokens  what the engine is told; None: no limit
    arrival     seconds from the start
    answer      its tokens where they are known, else the one token that a simulated answer is made
                of
    turn        (session, number of the turn), of a session
    session     what its turn says of the KV
    """

    prompt: Prompt
    output: int | None
    max_tokens: int | None
    arrival: float = 0.0
    tenant: str = ""
    priority: int = 0
    answer: tuple[int, ...] | int = STOP
    turn: tuple[int, int] | None = None
    session: SessionHint | None = None

    @property
    def answer_length(self) -> int:
        """The length of the answer, whoever ends it."""
        length = self.max_tokens if self.output is None else self.output
        if length is None:
            raise EngineFault(
                "workload", "an answer must end somewhere: by itself, or at its max_tokens"
            )
        return length

    @property
    def text(self) -> str:
        """The prompt, which must be text."""
        if isinstance(self.prompt, str):
            return self.prompt
        raise EngineFault("workload", "this traffic has no text: it holds tokens or lengths alone")

    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt, which must not be text: that is encoded first."""
        match self.prompt:
            case Pieces(parts):
                tokens: list[int] = []
                for content, count in parts:
                    tokens += [content] * count
                return tuple(tokens)
            case str():
                raise EngineFault("workload", "this traffic is text: encode it first")
            case known:
                return known

    def answer_tokens(self, begin: int, count: int) -> list[int]:
        """The tokens of a simulated answer, without its end."""
        if isinstance(self.answer, int):
            return [self.answer] * count
        return list(self.answer[begin : begin + count])

    def engine_request(self, id: int, stop: int = END) -> Request:
        """The request as an engine gets it. `stop` is the token that its answer ends with at
        `output`."""
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        if self.output is not None:
            params = replace(params, ignore_eos=False, stop_ids=(stop,), forced_end=self.output)
        prompt = self.prompt_tokens()
        return Request(
            id,
            prompt,
            params,
            self.arrival,
            priority=self.priority,
            tenant=self.tenant,
            session=self.session,
        )


class Traffic(Protocol):
    """Requests in the order in which they come. total: how many there will be."""

    @property
    def total(self) -> int: ...

    def arrivals(self) -> Iterator[TrafficRequest]:
        """The requests that wait for no answer, by time."""

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        """The requests that arrive because this one was answered at `end`."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at their own times, whatever becomes of those before them. name: what is shown
    meanwhile."""

    requests: list[TrafficRequest]
    name: str = ""

    @property
    def total(self) -> int:
        return len(self.requests)

    def arrivals(self) -> Iterator[TrafficRequest]:
        return iter(self.requests)

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        return []

    def faster(self, rate: float) -> OpenLoop:
        """The same at so many times its rate."""
        return replace(
            self, requests=[replace(one, arrival=one.arrival / rate) for one in self.requests]
        )

    def engine_requests(self) -> list[Request]:
        """The requests for a real engine, numbered from 1."""
        return [one.engine_request(number, STOP) for number, one in enumerate(self.requests, 1)]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """think: seconds after the answer before it. prompt: tokens, all that was said before
    included."""

    think: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations whose turns wait for answers: the prompt of a turn is the prompt before it, the
    answer to that, and something new. A prompt that is shorter was summed up by the client: all of
    it is new.

    starts   seconds at which each session begins
    cap      max_tokens of every turn
    """

    starts: list[float]
    turns: list[list[SessionTurn]]
    cap: int

    @property
    def total(self) -> int:
        return sum(map(len, self.turns))

    def arrivals(self) -> Iterator[TrafficRequest]:
        order = sorted(range(len(self.starts)), key=lambda session: self.starts[session])
        return (self._request(session, 0, self.starts[session], ()) for session in order)

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        (session, number), prompt, answer = request.turn or (0, 0), request.prompt, request.answer
        assert isinstance(prompt, Pieces)
        assert isinstance(answer, int)
        if number + 1 == len(self.turns[session]):
            return []
        said = min(request.answer_length, self.cap) - 1  # its last token is the end
        before = (*prompt.parts, (answer, said)) if said else prompt.parts
        return [
            self._request(session, number + 1, end + self.turns[session][number + 1].think, before)
        ]

    def _request(
        self, session: int, number: int, at: float, before: tuple[tuple[int, int], ...]
    ) -> TrafficRequest:
        turn = self.turns[session][number]
        new = OWN + 2 * (session * 100_000 + number)
        more = turn.prompt - sum(count for _, count in before)
        parts = (*before, (new, more)) if more > 0 else ((new, turn.prompt),)
        return TrafficRequest(
            prompt=Pieces(parts),
            output=turn.output,
            max_tokens=self.cap,
            arrival=at,
            answer=new + 1,
            turn=(session, number),
        )


# -- prompts in another form -----------------------------------------------------------------------


def encoded(
    requests: Iterable[TrafficRequest], encode: Callable[[str], Iterable[int]]
) -> list[TrafficRequest]:
    """Text becomes tokens."""
    return [replace(one, prompt=tuple(encode(one.text))) for one in requests]


def in_vocabulary(traffic: OpenLoop, vocab: int) -> OpenLoop:
    """Made-up tokens, or digests of a step log, become tokens of a model: equal ones stay equal."""
    return replace(
        traffic, requests=[replace(one, prompt=_known(one, vocab)) for one in traffic.requests]
    )


def _known(one: TrafficRequest, vocab: int) -> tuple[int, ...]:
    tokens = one.prompt_tokens()
    known = {token: random.Random(token).randrange(1, vocab) for token in set(tokens)}
    return tuple(known[token] for token in tokens)
