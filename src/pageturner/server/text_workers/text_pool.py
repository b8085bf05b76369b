"""The text workers as the server sees them: jobs in lanes, a turn for each key, a deadline for each
job.

Owns who waits for a worker, whose turn it is, and the end of a worker that takes too long, whose
client has left, or that has died: each costs the job that it had, and no other. Must not know what
the jobs do.

There are two lanes of one worker each. Jobs of a few kB have one of their own, so that they never
wait behind large ones; one that turns out to be long after all is begun again in the other lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pageturner.errors import ClientError
from pageturner.http.memory_reserve import MemoryReserve, out_of_memory
from pageturner.server.text_workers.fork_server import ForkServer, LastingForkServer
from pageturner.server.text_workers.text_jobs import GRAMMAR
from pageturner.server.text_workers.text_worker import (
    DOING,
    DONE,
    GREETING,
    HEAD,
    HELLO,
    LAST,
    REFUSED,
    Job,
    JobRefusal,
    frame,
    too_much_memory,
)

SMALL_JOB = 64 * 1024  # bytes of a body
SMALL_SECONDS = 0.5  # that a job may take in the lane of the small ones
GRAMMAR_SECONDS = (
    2.0  # of a processor, to check a grammar: the engine compiles it once more, for as long
)
LOOK_SECONDS = 0.05  # at least between two looks at what a check has taken
WEIGHT = 64 * 1024  # bytes that a job counts for beside those of its body
START_SECONDS = 10.0  # until a worker has said hello; then its fork server is taken for stuck
SENT_AT_ONCE = 128 * 1024  # bytes of a body
MAX_TOLD = 64 * 1024  # bytes of what a worker says beside outcomes
_SHUTTING_DOWN = ClientError(503, "shutting_down", "the server is shutting down: ask another one")


def _processor_seconds(pid: int) -> float:
    """Return what all threads of a process have taken, by the clock that Linux has for it; 0 of one
    that is gone, which its socket tells."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
    except OSError:
        return 0.0


class _WorkerEnded(Exception):
    """The worker ended in the middle of a job."""


class _WorkerBroke(_WorkerEnded):
    """The worker sent an invalid or unexpected message."""


@dataclass(eq=False, slots=True)
class _TextJob:
    """A job of one key: what is told of it, the body that it is about, and where its outcome goes.

    most    bytes of that
    left    set when nobody wants that any more
    deaths  of workers that had it
    """

    key: str
    job: bytes
    raw: bytes
    most: int
    outcome: asyncio.Future[bytes]
    deaths: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=time.monotonic)


class _Worker:
    """The server's end of one worker process. doing: what it last said that it is about; starved:
    it cannot have the memory that one job may have."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, starved: bool
    ) -> None:
        self.reader, self._writer, self.pid = reader, writer, pid
        self.starved = starved
        self.doing = ""
        self.ended = False
        self._number = 0  # of its present job: what it says of another one is not meant for that
        self._most = 0

    @classmethod
    async def start(cls, sock: socket.socket) -> _Worker:
        """The one at the other end. _WorkerEnded when it ended, TimeoutError when it says
        nothing."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        try:
            async with asyncio.timeout(START_SECONDS):
                if HEAD.unpack(await reader.readexactly(HEAD.size)) != (HELLO, 0, GREETING.size):
                    raise EOFError
                pid, starved = GREETING.unpack(await reader.readexactly(GREETING.size))
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError):
                raise _WorkerEnded from None
            raise
        return cls(reader, writer, pid, starved)

    async def begin(self, one: _TextJob, memory: MemoryReserve) -> bytes | None:
        """Give it a job, a bit at a time; then as `told`."""
        self.doing, raw = "", memoryview(one.raw)
        self._number, self._most = (self._number + 1) % (1 << 32), max(one.most, MAX_TOLD)
        with contextlib.suppress(OSError):  # which `told` will see
            self._writer.write(
                frame(0, one.job, self._number) + HEAD.pack(0, self._number, len(raw))
            )
            for start in range(0, len(raw), SENT_AT_ONCE):
                self._writer.write(raw[start : start + SENT_AT_ONCE])
                await self._writer.drain()
        return await self.told(memory)

    async def told(self, memory: MemoryReserve) -> bytes | None:
        """The next that it says of its job: the outcome, or None for something on the way.
        ClientError as the job raised it, _WorkerEnded when it has died, or must; MemoryError where
        there is none to hear it."""
        try:
            kind, number, size = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            if number != self._number or size > self._most:
                raise ValueError
            if not memory.allows(size):
                raise MemoryError
            content = await self.reader.readexactly(size)
            if kind == DOING:
                self.doing = content.decode()
                return None
            if kind & ~LAST not in (DONE, REFUSED):
                raise ValueError
            refusal = (
                None if kind & ~LAST == DONE else msgspec.msgpack.decode(content, type=JobRefusal)
            )
            if refusal is not None and not (
                400 <= refusal.status < 600 and refusal.code.isidentifier()
            ):
                raise ValueError
        except (OSError, EOFError):
            self.close()
            raise _WorkerEnded from None
        except (ValueError, msgspec.DecodeError, RecursionError):
            self.close()
            raise _WorkerBroke from None
        if kind & LAST:
            self.close()
        if refusal is not None:
            raise refusal.error()
        return content

    def close(self) -> None:
        self.ended = True
        self._writer.close()


class _Lane:
    """One worker and who waits for it.

    forks    starts the worker
    seconds  that a job may take
    next     where one is begun again that takes longer; None: it is refused
    """

    def __init__(
        self,
        forks: LastingForkServer,
        seconds: float,
        memory: MemoryReserve,
        next: _Lane | None = None,
    ) -> None:
        self._forks = forks
        self._seconds = seconds
        self._memory = memory
        self._next = next
        # whose turn is next comes first
        self._waiting: OrderedDict[str, deque[_TextJob]] = OrderedDict()
        self._worker: _Worker | None = None
        self._busy: asyncio.Task[None] | None = None
        self._mean = 0.05  # seconds of a job

    @property
    def jobs(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def weight(self) -> int:
        return sum(map(_weight, self._waiting.values()))

    @property
    def wait(self) -> float:
        """Seconds until the jobs that are here have ended, as far as that can be told."""
        return (self.jobs + 1) * self._mean

    def largest(self) -> tuple[int, str]:
        """Weight of the key that has most waiting, and the key."""
        return max(((_weight(jobs), key) for key, jobs in self._waiting.items()), default=(0, ""))

    def drop_newest(self, key: str) -> _TextJob:
        one = self._waiting[key][-1]
        self.forget(one)
        return one

    def forget(self, one: _TextJob) -> None:
        """Let it wait no longer, if it does."""
        jobs = self._waiting.get(one.key)
        if jobs is not None and one in jobs:
            jobs.remove(one)
            if not jobs:
                del self._waiting[one.key]

    def add(self, one: _TextJob) -> None:
        self._waiting.setdefault(one.key, deque()).append(one)
        if self._busy is None or self._busy.done():
            self._busy = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        if self._busy is not None:
            self._busy.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._busy
        if self._worker is not None:
            self._worker.close()
        while self._waiting:
            one = self.drop_newest(next(iter(self._waiting)))
            _fail(one, _SHUTTING_DOWN)

    async def _work(self) -> None:
        """Give out jobs until nobody waits."""
        while self._waiting:
            key, jobs = self._waiting.popitem(last=False)
            one = jobs.popleft()
            if jobs:
                self._waiting[key] = jobs  # behind all others
            began = time.monotonic()
            try:
                outcome = await self._do(one)
                if not one.outcome.done():
                    one.outcome.set_result(outcome)
            except ClientError as error:
                _fail(one, error)
            except _WorkerEnded as ended:
                self._died(one, ended)
            except MemoryError:  # of the server itself
                self._drop_worker()
                _fail(one, out_of_memory())
            except TimeoutError:
                self._too_long(one)
            except BaseException:  # cancelled, because the server ends
                _fail(one, _SHUTTING_DOWN)
                raise
            self._mean += 0.2 * (time.monotonic() - began - self._mean)

    async def _do(self, one: _TextJob) -> bytes:
        """The outcome. TimeoutError when it takes too long, _WorkerEnded when its worker has
        died."""
        worker = await self._ready_worker()
        deadline = time.monotonic() + self._seconds
        left = asyncio.ensure_future(one.left.wait())
        told = asyncio.ensure_future(worker.begin(one, self._memory))
        try:
            while True:
                await self._until({told, left}, worker, deadline)
                if not told.done():
                    raise ClientError(
                        400, "client_left", "the client left before its request was read"
                    )
                if (outcome := told.result()) is not None:
                    return outcome
                told = asyncio.ensure_future(worker.told(self._memory))
        finally:
            left.cancel()
            if not told.done():
                told.cancel()
                self._forks.kill(worker.pid)
                worker.close()

    async def _until(
        self, news: set[asyncio.Future[Any]], worker: _Worker, deadline: float
    ) -> None:
        """Wait for the first of `news`. TimeoutError at the deadline, or when the check of a
        grammar has had its time of a processor: by the clock a busy machine would refuse what a
        quiet one takes."""
        checked = _processor_seconds(worker.pid) if worker.doing == GRAMMAR else None
        while True:
            patience = deadline - time.monotonic()
            if checked is not None:
                unspent = checked + GRAMMAR_SECONDS - _processor_seconds(worker.pid)
                patience = min(patience, max(unspent, LOOK_SECONDS) if unspent > 0 else 0.0)
            done, _ = await asyncio.wait(
                news, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            if patience <= 0:
                raise TimeoutError

    async def _ready_worker(self) -> _Worker:
        """Return the worker, or a new one if it has ended. Raises _WorkerEnded if none can be
        started."""
        worker, self._worker = self._worker, None
        if worker is not None and worker.reader.at_eof():
            worker.close()
        if worker is None or worker.ended:
            worker = await self._new_worker()
        self._worker = worker
        return worker

    async def _new_worker(self) -> _Worker:
        try:
            sock, fork_server = self._forks.fork()
            try:
                return await _Worker.start(sock)
            except TimeoutError:
                self._forks.replace(fork_server)
                raise _WorkerEnded from None
        except OSError:
            raise _WorkerEnded from None

    def _too_long(self, one: _TextJob) -> None:
        if self._next is not None:
            self._next.add(one)
        elif self._worker is not None and self._worker.doing == GRAMMAR:
            message = (
                f"to check what the answer must match took more than {GRAMMAR_SECONDS:g} s: use fewer"
                " patterns, properties, alternatives or repetitions"
            )
            _fail(one, ClientError(400, "grammar_too_expensive", message, "structured_outputs"))
        else:
            message = f"reading this request took more than {self._seconds:g} s: make it smaller"
            _fail(one, ClientError(400, "too_expensive", message))

    def _drop_worker(self) -> None:
        """End the worker: what it still says is of a job that nobody waits for."""
        if self._worker is not None:
            self._forks.kill(self._worker.pid)
            self._worker.close()

    def _died(self, one: _TextJob, ended: _WorkerEnded) -> None:
        """Handle the death of a job's worker. The job gets a second worker, because something else
        may have killed the first; then it is refused."""
        if isinstance(ended, _WorkerBroke) and self._worker is not None:
            self._forks.kill(self._worker.pid)
            message = "the process that read this request broke: ask again"
            return _fail(one, ClientError(503, "busy", message, None, 1.0))
        one.deaths += 1
        if one.deaths > 1:
            return _fail(one, self._why_it_ended())
        self._waiting.setdefault(one.key, deque()).appendleft(one)
        self._waiting.move_to_end(one.key, last=False)

    def _why_it_ended(self) -> ClientError:
        if self._worker is None:
            message = "there is no process to read this request: ask again"
            return ClientError(503, "busy", message, None, 1.0)
        starved = self._worker.starved
        if self._worker.doing == GRAMMAR and not starved:
            message = "what the answer must match took more memory than one request may have: make it smaller"
            return ClientError(400, "grammar_too_expensive", message, "structured_outputs")
        return too_much_memory(starved)


class TextPool:
    """Jobs are done by text workers, one at a time in each of two lanes.

    start    makes the fork server, at once and whenever it was lost
    seconds  that one job may take
    memory   of the server; None: it has a reserve of its own
    most     bytes of the jobs that may wait in a lane, of all keys together, each with WEIGHT
             beside its body
    """

    def __init__(
        self,
        start: Callable[[], ForkServer],
        *,
        seconds: float,
        most: int,
        memory: MemoryReserve | None = None,
    ) -> None:
        memory = memory or MemoryReserve()
        self._forks = LastingForkServer(start)
        self._most = most
        self._large = _Lane(self._forks, seconds, memory)
        self._small = _Lane(self._forks, min(SMALL_SECONDS, seconds), memory, self._large)

    async def run(self, job: Job, raw: bytes, key: str) -> bytes:
        """Its outcome. Keys take turns. ClientError: what the job says; 503 busy when too many
        wait; 400 too_expensive or grammar_too_expensive. Cancelled, it costs nobody anything any
        more."""
        told = msgspec.msgpack.encode(job)
        one = _TextJob(key, told, raw, job.most, asyncio.get_running_loop().create_future())
        lane = self._small if len(raw) <= SMALL_JOB else self._large
        self._make_room(lane, one)
        lane.add(one)
        try:
            return await one.outcome
        finally:
            one.left.set()
            for each in (self._small, self._large):
                each.forget(one)

    def kill(self) -> None:
        """End all workers now. None is started again."""
        self._forks.close()

    async def close(self) -> None:
        """Stop all workers. Waiting jobs fail because the server shuts down."""
        self.kill()
        await self._small.close()
        await self._large.close()

    def _make_room(self, lane: _Lane, one: _TextJob) -> None:
        """The tenant that has most waiting loses the newest of it, where it would be too much.
        ClientError 503 when that is who asks."""
        own = _weight([one])
        while lane.jobs and lane.weight + own > self._most:
            weight, key = lane.largest()
            error = ClientError(
                503,
                "busy",
                "too many requests wait to be read: ask again",
                None,
                max(1.0, lane.wait),
            )
            if key == one.key or weight <= own:
                raise error
            _fail(lane.drop_newest(key), error)


def _weight(jobs: Iterable[_TextJob]) -> int:
    return sum(len(one.raw) + WEIGHT for one in jobs)


def _fail(one: _TextJob, error: ClientError) -> None:
    if not one.outcome.done():
        one.outcome.set_exception(error)
        one.outcome.exception()  # nobody may be there any more to ask for it
