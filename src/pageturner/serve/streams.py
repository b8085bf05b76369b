"""Every unfinished stream: its request, its tokens so far, its text, and who waits for it.

Owns the truth that outlives an engine process: with a Stream's request and tokens any engine can go on. Must
not know sockets, processes or the shape of an HTTP answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from pageturner.core.types import Event, Failure, Logprob, Request, Resume
from pageturner.errors import ClientError
from pageturner.serve.metrics import Metrics
from pageturner.serve.text import TextStream

MAX_BEHIND = 4096  # tokens that a client may leave unread before it is cut off


class Gap(Exception):
    """The engine skipped a position: it cannot be trusted any more."""


class Piece(NamedTuple):
    """What one token adds to the answer.

    token   None when a stream ends without one (failure, or text that was held back)
    n       tokens of the stream up to and including this one
    offset  characters decoded before this token (stop strings not considered)
    last    nothing comes after it; `stream.finish` or `stream.failure` says why
    """

    stream: Stream
    text: str
    token: int | None
    n: int
    offset: int
    last: bool


class Sink(Protocol):
    """Who takes the pieces of one answer. Never blocks."""

    def put(self, piece: Piece) -> None: ...


@dataclass(slots=True, eq=False)
class Stream:
    """One choice of one answer. `request` carries a resolved seed; `choice` is its index in the answer."""

    request: Request
    choice: int
    text: TextStream
    sink: Sink
    arrival: float
    eos_ids: tuple[int, ...] = ()  # stop ids that are no `stop_reason`: the sequence simply ended
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    failure: Failure | None = None
    cached: int = 0
    first_at: float = 0.0
    last_at: float = 0.0

    def resumable(self) -> Request:
        """The request with everything it has produced: what a new engine needs to go on."""
        if not self.tokens:
            return self.request
        return replace(self.request, resume=(Resume(0, tuple(self.tokens)),))

    def take(self, event: Event, now: float, metrics: Metrics) -> None:
        """Add what is new in `event`; `done` says whether that was all. Gap if tokens are missing."""
        known = len(self.request.prompt) + len(self.tokens) - event.position
        if known < 0:
            raise Gap(f"request {self.request.id}: position {event.position} came {-known} too early")
        self.cached = max(self.cached, event.cached)
        fresh = event.tokens[known:]
        for i, token in enumerate(fresh, known + 1):
            self._time(now, metrics)
            if event.logprobs:
                self.logprobs.append(event.logprobs[i - 1])
            self._push(token, event.finish if i == len(event.tokens) else None)
            if self.finish is not None:
                return
        if event.finish is not None and not fresh:
            self._end(event)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.failure is not None

    def fail(self, failure: Failure) -> None:
        """End the stream without its answer."""
        self.failure = failure
        self.sink.put(Piece(self, "", None, len(self.tokens), self.text.decoded, True))

    def _push(self, token: int, finish: str | None) -> None:
        """One token. A token that stopped the sequence is counted and not shown, as in vLLM."""
        self.tokens.append(token)
        offset = self.text.decoded
        text = "" if finish == "stop" else self.text.push(token)
        if self.text.stopped is None and finish is not None:
            text += self.text.finish()
            self.finish = finish
            if finish == "stop" and token not in self.eos_ids:
                self.stop_reason = token
        if self.text.stopped is not None:
            self.finish, self.stop_reason = "stop", self.text.stopped
        self.sink.put(Piece(self, text, token, len(self.tokens), offset, self.finish is not None))

    def _end(self, event: Event) -> None:
        """The engine ends a stream without a new token."""
        if event.failure is not None or event.finish in ("error", "abort"):
            self.fail(event.failure or Failure("aborted", "the engine gave up the request"))
            return
        text = self.text.finish()
        self.finish = event.finish
        self.sink.put(Piece(self, text, None, len(self.tokens), self.text.decoded, True))

    def _time(self, now: float, metrics: Metrics) -> None:
        if not self.tokens:
            self.first_at = now
            metrics.time_to_first_token.observe(now - self.arrival)
        else:
            metrics.tokens(now - self.last_at)
        self.last_at = now


class Streams:
    """The unfinished streams by request id, in order of arrival. Bounded."""

    def __init__(self, metrics: Metrics, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.unfinished: dict[int, Stream] = {}
        self.gained = 0  # tokens that reached any stream, ever: the supervisor's measure of progress
        self._metrics = metrics
        self._limit = limit
        self._clock = clock
        self._pace = 0.0  # seconds between two finished streams, smoothed
        self._last_finish = 0.0

    def add(self, streams: list[Stream]) -> None:
        """Take all of them or none. ClientError 429 when the queue is full."""
        if len(self.unfinished) + len(streams) > self._limit:
            raise ClientError(
                429, "queue_full", f"the server is full: {len(self.unfinished)} requests are unfinished"
            )
        for stream in streams:
            self.unfinished[stream.request.id] = stream

    def deliver(self, events: Iterable[Event]) -> list[int]:
        """News from the engine. Returns the ids that it need not go on with: a stop string ended them."""
        now, needless = self._clock(), []
        for event in events:
            stream = self.unfinished.get(event.id)
            if stream is None:  # cancelled, while this was on its way
                continue
            before = len(stream.tokens)
            stream.take(event, now, self._metrics)
            self.gained += len(stream.tokens) - before
            if stream.done:
                self._forget(stream, now)
                if event.finish is None:
                    needless.append(event.id)
        return needless

    def cancel(self, stream: Stream) -> bool:
        """Nobody waits for it any more. False if it had ended already."""
        if self.unfinished.pop(stream.request.id, None) is None:
            return False
        self._metrics.finished["abort"] += 1
        return True

    def fail(self, stream: Stream, failure: Failure) -> None:
        """End one stream with an error."""
        if stream.request.id in self.unfinished:
            stream.fail(failure)
            self._forget(stream, self._clock())

    def fail_all(self, failure: Failure) -> None:
        for stream in list(self.unfinished.values()):
            self.fail(stream, failure)

    def tokens(self) -> dict[int, int]:
        """Tokens so far of each unfinished stream."""
        return {id: len(stream.tokens) for id, stream in self.unfinished.items()}

    def retry_after(self) -> int:
        """Whole seconds until a place should be free, from the pace at which streams have been finishing."""
        return max(1, min(60, round(self._pace + 0.5)))

    def _forget(self, stream: Stream, now: float) -> None:
        del self.unfinished[stream.request.id]
        if self._last_finish:
            self._pace += 0.2 * (now - self._last_finish - self._pace)
        self._last_finish = now
        metrics, count = self._metrics, len(stream.tokens)
        metrics.finished[stream.finish or "error"] += 1
        metrics.latency.observe(now - stream.arrival)
        metrics.prompt_lengths.observe(len(stream.request.prompt))
        metrics.output_lengths.observe(count)
        metrics.most_tokens.observe(stream.request.params.max_tokens or 0)
        if count > 1:
            metrics.per_output_token.observe((stream.last_at - stream.first_at) / (count - 1))


class Inbox:
    """Pieces on their way to one client, in order. Bounded: who does not read is cut off.

    overflowed  set once the client is too far behind
    """

    def __init__(self, limit: int = MAX_BEHIND) -> None:
        self.overflowed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._pieces: deque[Piece] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        if len(self._pieces) >= self._limit:
            if not self.overflowed.done():
                self.overflowed.set_result(None)
            return
        self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Piece]:
        """Everything that has arrived, at least one piece."""
        while not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces


class Outcome:
    """Waits for the end of `count` streams and keeps their text: the answer that is not streamed."""

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.texts = [""] * count
        self.offsets: list[list[int]] = [[] for _ in range(count)]
        self._parts: list[list[str]] = [[] for _ in range(count)]
        self._open = count

    def put(self, piece: Piece) -> None:
        choice = piece.stream.choice
        self._parts[choice].append(piece.text)
        if piece.token is not None:
            self.offsets[choice].append(piece.offset)
        if not piece.last:
            return
        self.texts[choice] = "".join(self._parts[choice])
        self._open -= 1
        failed = piece.stream.failure is not None
        if (failed or self._open == 0) and not self.done.done():
            self.done.set_result(None)
