"""Every unfinished stream, and who waits for its text.

Owns what must outlive an engine process: with the request of a stream and its tokens so far any
engine can go on. Must not know sockets, processes or the shape of an HTTP answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pageturner.errors import ClientError
from pageturner.http.memory_reserve import MESSAGE, OUT_OF_MEMORY
from pageturner.request import Event, Failure, Timings
from pageturner.server.admission.limits import UNKNOWN
from pageturner.server.engine_client.retry_after import RetryAfter
from pageturner.server.observability.metrics import FIRST_TOKEN, Metrics
from pageturner.text.output_stream import OutputPiece, OutputStream, StreamTimes
from pageturner.text.parameters import entries

MAX_BEHIND = 4096  # tokens that a client may leave unread before it is cut off
MANY_LOGPROBS = 512  # positions of an answer; more are a burden where there is no memory
MAX_STOPPED = 1024  # streams that await the engine's timings; with more the oldest go without
NO_MEMORY = Failure(OUT_OF_MEMORY, MESSAGE, 1.0)
TIMINGS_TIMEOUT = 1.0  # seconds for which an answer waits for them


@dataclass(slots=True)
class StoppedStream:
    """A stream that a stop string ended, until the engine has answered the Abort with its timings.

    settled  done when the engine has answered, or never will; None: nobody waits for that
    """

    times: StreamTimes
    settled: asyncio.Future[None] | None = None

    def settle(self, timings: Timings | None) -> None:
        self.times.timings = timings or self.times.timings
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)


class OpenStreams:
    """The unfinished streams by request id, in order of arrival. Bounded: `limit` streams, which
    together have at most so many entries that reshape logits."""

    def __init__(
        self,
        metrics: Metrics,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        most_entries: int = UNKNOWN,
    ) -> None:
        self.unfinished: dict[int, OutputStream] = {}
        self.accounts: dict[int, Timings] = {}  # of those that are asked for (running_timelines.py)
        # tokens and prompt logprobs that reached any stream: the supervisor's progress
        self.gained = 0
        self._stopped: OrderedDict[int, StoppedStream] = OrderedDict()
        self._metrics = metrics
        self._places = RetryAfter(limit)
        self._most_entries = most_entries
        # of all unfinished streams: what reshapes their logits lies in both processes
        self._entries = 0
        self._clock = clock

    def raise_limit(self, more: int) -> None:
        """Let so many more streams be open at once."""
        self._places.limit += more

    @property
    def limit(self) -> int:
        """Most streams that may be open at once."""
        return self._places.limit

    def check_room(self, streams: list[OutputStream], leaving: int = 0) -> None:
        """ClientError 429 when the queue is full for these, though so many would leave for them."""
        first, now, taken = streams[0].request, self._clock(), len(self.unfinished) - leaving
        held = self._entries + sum(map(_entries, streams))
        if held > self._most_entries and self._entries > 0:  # alone one request always fits
            full = "logit_bias, allowed_token_ids and their like fill what the server keeps of them"
            wait = self.retry_after()
        else:
            full = "the server is full"
            known_by = hash((first.tenant, len(first.prompt), first.prompt[-64:]))
            wait = self._places.ask(known_by, taken, len(streams), now)
        if wait:
            for stream in streams:
                self._metrics.goodput.turned_away(stream, now)
            raise ClientError(
                429, "queue_full", f"{full}: {taken} requests are unfinished", retry_after=wait
            )

    def add(self, streams: list[OutputStream]) -> None:
        """Add streams for which `check_room` has found room."""
        self._entries += sum(map(_entries, streams))
        for stream in streams:
            self.unfinished[stream.request.id] = stream

    def deliver(self, events: Iterable[Event]) -> list[int]:
        """Add what a step brought to the streams. Returns the ids of those that a stop string has
        ended, which the engine must be told to abort."""
        now, stopped = self._clock(), []
        for event in events:
            stream = self.unfinished.get(event.id)
            if stream is None:  # cancelled meanwhile, or stopped, and the engine was quicker
                if event.timings is not None:
                    self.settle_timings(event.id, event.timings)
                continue
            before, last_at = len(stream.tokens), stream.times.last_at
            self.gained -= len(stream.prompt_logprobs)
            try:
                stream.add_event(event, now)
            except MemoryError:  # nobody knows how far it got
                stream.fail(NO_MEMORY)
            self.gained += len(stream.prompt_logprobs)
            self._count_tokens(stream, before, now, last_at)
            if stream.done:
                self._finished(stream, now)
                if event.finish is None:
                    stopped.append(event.id)
                    self._stopped[event.id] = StoppedStream(stream.times)
                    if len(self._stopped) > MAX_STOPPED:
                        self._stopped.popitem(last=False)[1].settle(None)
        return stopped

    def settle_timings(self, id: int, timings: Timings | None) -> None:
        """The engine has answered the Abort of this request. timings: where its time went."""
        if (stopped := self._stopped.pop(id, None)) is not None:
            stopped.settle(timings)
            self._metrics.phases.add_times(stopped.times)

    def engine_lost(self) -> None:
        """The engine process is gone: accounts that it had not sent yet will never come."""
        while self._stopped:
            self._stopped.popitem()[1].settle(None)

    async def wait_for_timings(self, streams: Iterable[OutputStream]) -> None:
        """Wait until the engine has sent the timings of these streams, which have ended: at most
        TIMINGS_TIMEOUT seconds."""
        waiting = []
        for stream in streams:
            if (stopped := self._stopped.get(stream.request.id)) is not None:
                stopped.settled = stopped.settled or asyncio.get_running_loop().create_future()
                waiting.append(stopped.settled)
        if waiting:
            await asyncio.wait(waiting, timeout=TIMINGS_TIMEOUT)

    def _count_tokens(self, stream: OutputStream, before: int, now: float, last_at: float) -> None:
        """Count the tokens that one event brought: those that came together have no gap between
        them."""
        fresh = len(stream.tokens) - before
        self.gained += fresh
        if fresh and not before:
            self._metrics.histograms.observe(FIRST_TOKEN, now - stream.times.arrival)
        for k in range(0 if before else 1, fresh):
            self._metrics.tokens(0.0 if k else now - last_at)

    def cancel(self, stream: OutputStream) -> bool:
        """Forget a stream whose client has left. False if it had ended already."""
        if self.unfinished.pop(stream.request.id, None) is None:
            return False
        self._entries -= _entries(stream)
        self._places.ended(self._clock())
        self._metrics.finished["abort"] += 1
        self._metrics.goodput.left(stream, self._clock())
        return True

    def fail(self, stream: OutputStream, failure: Failure) -> None:
        """End one stream with an error."""
        if stream.request.id in self.unfinished:
            stream.fail(failure)
            self._finished(stream, self._clock())

    def overdue(self, grace: float) -> list[OutputStream]:
        """Return those whose deadline passed so many seconds ago, which the engine should have
        ended."""
        now = self._clock() - grace
        due = (stream for stream in self.unfinished.values() if stream.request.deadline is not None)
        return [stream for stream in due if (stream.request.deadline or 0.0) < now]

    def make_room(self) -> None:
        """Fail the streams whose answers take most memory, because there is too little. Clients can
        send them again."""
        for stream in list(self.unfinished.values()):
            if len(stream.prompt_logprobs) + len(stream.logprobs) > MANY_LOGPROBS:
                self.fail(stream, NO_MEMORY)

    def fail_all(self, failure: Failure) -> None:
        for stream in list(self.unfinished.values()):
            self.fail(stream, failure)

    def tokens(self) -> dict[int, int]:
        """Tokens so far of each unfinished stream, those of its prompt that have their logprobs
        included."""
        return {
            id: len(stream.tokens) + len(stream.prompt_logprobs)
            for id, stream in self.unfinished.items()
        }

    def retry_after(self) -> int:
        """Whole seconds until one should have finished, for who was refused for other reasons than
        places."""
        return max(1, min(60, round(self._places.pace(self._clock()) + 0.5)))

    def _finished(self, stream: OutputStream, now: float) -> None:
        del self.unfinished[stream.request.id]
        self._entries -= _entries(stream)
        self._places.ended(now)
        self._metrics.ended(stream, now)


def _entries(stream: OutputStream) -> int:
    return entries(stream.request.params)


class PieceQueue:
    """Pieces on their way to one client, in order. Bounded: who does not read is cut off.

    overflowed  set once the client is too far behind
    """

    def __init__(self, limit: int = MAX_BEHIND) -> None:
        self.overflowed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._pieces: deque[OutputPiece] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: OutputPiece) -> None:
        if len(self._pieces) >= self._limit:
            if not self.overflowed.done():
                self.overflowed.set_result(None)
            return
        self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get_all(self) -> list[OutputPiece]:
        """Everything that has arrived, at least one piece."""
        while not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces
