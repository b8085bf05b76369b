"""Keeps an engine process alive, and every open stream with it.

Owns the engine process, the channel to it, and the decision that it is dead or stuck. Must not know
HTTP or text. Each process (epoch) has a socket of its own: what an old one still had to say is lost
with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from pageturner.errors import EngineFault
from pageturner.http.memory_reserve import MemoryReserve
from pageturner.ipc.adapter_messages import AdapterLoaded, AdaptersInMemory
from pageturner.ipc.channel import (
    Abort,
    Aborted,
    Configure,
    Configured,
    Events,
    Failed,
    FromEngine,
    MessageDecoder,
    Ready,
    Stats,
    Submit,
    ToEngine,
    encode,
)
from pageturner.ipc.submit_repeats import shortened
from pageturner.request import EXPIRED, Failure, Request
from pageturner.server.engine_client import quarantine
from pageturner.server.engine_client.engine_checks import check_events, check_ready
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.process import EngineProcess, on_device
from pageturner.server.engine_client.restarts import GAVE_UP, MAX_BACKOFF, STEADY, Restarts
from pageturner.server.observability.metrics import Metrics
from pageturner.text.output_stream import OutputStream

log = logging.getLogger("pageturner")

REFERENCE_TIMEOUT = 1800.0  # seconds for one step of the numpy reference
SIGNAL_GRACE_S = 0.02  # seconds in which a signal that ended the engine, if it is for the whole group, is here too
EXIT_TIMEOUT = 2.0  # seconds that an engine gets to leave after its channel was closed
RECEIVE_BYTES = 1 << 18
SLOW = 0.1  # seconds without the end of a step; only behind them a file of each thread is read
PATIENCE = 4.0  # times as long, at most, for an engine that others keep from running
SUBMITTED_AT_ONCE = 64  # streams; then others go on

GRACE = 1.0  # seconds behind a deadline until a stream ends that no engine ended


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class EngineListener:
    """A part of the server that has to do with the engine process.

    live      an engine process has loaded its model: tell it now what it must know before its
              requests
    ready     the engine process has been given its requests
    received  takes what the engine says of adapters, and in Stats of sessions
    """

    live: Callable[[], None] = _nothing
    ready: Callable[[], None] = _nothing
    received: Callable[[AdapterLoaded | AdaptersInMemory | Stats], None] = lambda message: None


class Supervisor:
    """One engine process at a time, restarted when it dies or stops moving, for ever once one was
    ready.

    ready    what the engine said when it had loaded; None until the first one has
    first    the first engine process, started already; `command` starts the next ones, on the same
             device
    process  the present engine process
    epoch    number of the present engine process, from 1
    broken   set to an EngineFault when no engine ever was ready: the server must end
    listeners  called in the order of this list
    max_restarts  that bring nothing, in a row, until those who wait are told to ask again later
    """

    def __init__(
        self,
        first: EngineProcess,
        command: list[str],
        streams: OpenStreams,
        metrics: Metrics,
        memory: MemoryReserve,
        *,
        timeout: float = 30.0,
        max_restarts: int = 16,
    ) -> None:
        self.ready: Ready | None = None
        self.epoch = 0
        self.broken: asyncio.Future[EngineFault] | None = None
        self._command = command
        self._streams = streams
        self._metrics = metrics
        self._memory = memory
        self._timeout = timeout
        self._quarantine = quarantine.Quarantine()
        self._restarts = Restarts(max_restarts)
        self._last_end = ""  # of an engine process: how it came
        self._gained = 0  # tokens of all streams at the last restart
        self._wanted: Configure | None = None  # other settings than those that it is started with
        self.configured = True  # the present engine process has said that it uses them
        self._submitted: set[int] = set()  # ids that this process was given
        self._live = False  # this process has said Ready
        self._busy_since = self._heard_at = 0.0
        self._awake_since = 0.0  # when this process was last found to have been stopped
        self._partial_since = 0.0  # when a message began of which more is to come
        self._ready_at = 0.0
        self._closing = False
        self.listeners: list[EngineListener] = []
        self._restart_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._adopt(first)

    # -- life --------------------------------------------------------------------------------------
    def _adopt(self, process: EngineProcess) -> None:
        """Begin an epoch with a process that was just started."""
        self.epoch += 1
        self.process = process
        self._decoder = MessageDecoder(FromEngine)
        self._before: Request | None = None  # that was submitted with others
        self._submitted.clear()
        self._live = False
        self._spawned_at = time.monotonic()

    def attach(self) -> None:
        """Begin to listen and to watch, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self.broken = self._loop.create_future()
        self._loop.add_reader(self.process.sock, self._receive)
        self._watch_task = self._loop.create_task(self._watch())

    async def close(self) -> None:
        """Let the engine go: it leaves when its channel closes; what lingers is killed."""
        self._closing = True
        for task in (self._watch_task, self._restart_task):
            if task is not None:
                task.cancel()
        self._detach()
        deadline = time.monotonic() + EXIT_TIMEOUT
        while self.process.exit_code() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End the engine process now."""
        self.process.kill()
        self.process.wait()

    def kill_nowait(self) -> None:
        """End it without waiting until it has ended."""
        self.process.kill()

    @property
    def healthy(self) -> bool:
        """The engine has loaded and is not stuck, nor the last of a row that ended for nothing."""
        live = self._live and not self._closing and not self.crash_loop
        return live and self.stalled_s < self._timeout / 2

    @property
    def crash_loop(self) -> str:
        """Return what is wrong, where one engine after the other ends for nothing; "" where none
        does."""
        if not self._restarts.looping or (self._live and self._moved(time.monotonic())):
            return ""
        return (
            f"the engine has ended {self._restarts.futile} times in a row without getting anywhere, at last"
            f" with {self._last_end}; it is started again at most {MAX_BACKOFF:g} s later: see the log"
        )

    def _moved(self, now: float) -> bool:
        """Return whether anything came of this engine process."""
        return self._streams.gained > self._gained or now - self._ready_at > STEADY

    @property
    def suspects(self) -> list[int]:
        """Requests that may have brought the engine down, and are being tried."""
        return self._quarantine.suspects

    def placed(self) -> tuple[frozenset[int], frozenset[int]]:
        """Requests that the engine process was given, and those of its latest step."""
        return frozenset(self._submitted), frozenset(self.process.ledger.read()[-1])

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the present engine's kernels; "" before one was ready."""
        return self.ready.fingerprint if self.ready else ""

    # -- requests ----------------------------------------------------------------------------------
    def check_open(self, streams: list[OutputStream], leaving: int = 0) -> None:
        """Refuse streams that cannot be opened now: ClientError 429 when the queue is full, 503 in
        a crash loop of the engine. leaving: how many open streams would make room for them."""
        if not self._live:
            self._restarts.refuse_in_a_loop()
        self._streams.check_room(streams, leaving)

    def open(self, streams: list[OutputStream]) -> None:
        """Take new streams that `check_open` let pass. They wait for an engine that is being
        restarted."""
        if not self._work():
            self._busy_since = time.monotonic()
        self._streams.add(streams)
        self._before = None
        self._submit_all(iter(streams))

    def cancel(self, stream: OutputStream) -> None:
        """Forget it and tell the engine to abort it; its blocks are free before the engine's next
        step."""
        if self._streams.cancel(stream):
            self._abort(stream.request.id)
            self._settle()

    def tell(self, message: ToEngine) -> None:
        """Tell the present engine process, if it has loaded, what the next one need not know."""
        if self._live:
            self._send(message)

    def configure(self, wanted: Configure) -> None:
        """Other settings for this engine process and all that come after it."""
        self._wanted, self.configured = wanted, False
        self.tell(wanted)

    def _submit(self, stream: OutputStream) -> None:
        id = stream.request.id
        open = id in self._streams.unfinished and id not in self._submitted
        if self._live and open and self._quarantine.allows(id):
            self._submitted.add(id)
            stream.times.submitted_at = stream.times.submitted_at or time.monotonic()
            stream.times.engines += 1
            before, self._before = self._before, (own := stream.resumable())
            self._send(Submit(own) if before is None else shortened(own, before))

    def _abort(self, id: int) -> None:
        if self._live and id in self._submitted:
            self._send(Abort(id))

    def _submit_all(self, streams: Iterator[OutputStream] | None = None) -> None:
        """Submit these streams, or all, a slice in each round of the event loop."""
        streams = streams or iter(list(self._streams.unfinished.values()))
        for stream in islice(streams, SUBMITTED_AT_ONCE):
            self._submit(stream)
        if (more := next(streams, None)) is not None:
            asyncio.get_running_loop().call_soon(self._submit_all, chain((more,), streams))

    def _settle(self) -> None:
        """Let more in, once the suspects that were let in have proved themselves."""
        while self._quarantine.settle(self._streams.tokens()):
            self._submit_all()

    # -- channel -----------------------------------------------------------------------------------
    def _send(self, message: ToEngine) -> None:
        assert self._loop is not None
        self.process.send(encode(message), self._loop)

    def _receive(self) -> None:
        if self._memory.give_way():  # what is half taken in cannot be taken in again
            self._streams.make_room()
        self._heard_at = now = time.monotonic()
        try:
            data = self.process.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.on_engine_death("its channel closed")
            return
        if not self._decoder.partial:
            self._partial_since = now
        try:
            for message in self._decoder.feed(data):
                self._partial_since = now
                self._handle(message)
        except MemoryError:  # nobody's fault: as if it had been killed from outside
            self.kill_nowait()
            self.on_engine_death("there was no memory to take in what it said")
        except Exception as error:  # whatever it was: what follows cannot be read any more
            self.on_engine_death(
                f"it does not make sense: {type(error).__name__}: {error}", condemned=True
            )

    def _handle(self, message: object) -> None:
        match message:
            case Events(events=events) if self.ready is not None:
                check_events(events, self.ready.vocab_size)
                for id in self._streams.deliver(events):
                    self._abort(id)
                if self._quarantine.active:
                    self._settle()
            case Aborted(id=id, timings=timings):
                self._streams.settle_timings(id, timings)
            case Stats(values=values, accounts=accounts):
                self._streams.accounts = accounts
                self._metrics.engine_stats(values)
                self._forward(message)
            case Ready():
                check_ready(message)
                self._started(message)
            case AdapterLoaded() | AdaptersInMemory():
                self._forward(message)
            case Configured(settings=settings):
                self.configured = settings == self._wanted
            case Failed(code=code, message=reason) if self.ready is None:
                self._give_up(EngineFault(code, reason))
            case Failed(code=code, message=reason):
                self._restarts.could_not_start(code, reason)

    def _forward(self, message: AdapterLoaded | AdaptersInMemory | Stats) -> None:
        for listener in self.listeners:
            listener.received(message)

    def _started(self, ready: Ready) -> None:
        self._command = on_device(self._command, ready.device)
        self.ready = ready
        self._metrics.utilisation.limits = ready.limits
        if "reference" in ready.fingerprint:  # a step of the slow backend may well take minutes
            self._timeout = max(self._timeout, REFERENCE_TIMEOUT)
        self._live = True
        self._busy_since = self._ready_at = time.monotonic()
        self._restarts.started(self._ready_at - self._spawned_at)
        if self._wanted is not None:
            self.configure(self._wanted)
        for listener in self.listeners:
            listener.live()
        unfinished = len(self._streams.unfinished)
        if self.epoch > 1:
            self._metrics.resumed += unfinished
            log.warning(
                "engine process %d is ready, with %d blocks of KV taken back; %d open streams go on",
                self.epoch,
                ready.kv_blocks_taken_back,
                unfinished,
            )
        self._submit_all()
        self._settle()
        for listener in self.listeners:
            listener.ready()

    # -- death and recovery ------------------------------------------------------------------------
    def _work(self) -> bool:
        """Return whether the engine has something that it should be doing."""
        return not self._submitted.isdisjoint(self._streams.unfinished)

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has had work and ended no step, seen by a process that was
        awake."""
        if not self._live:
            return 0.0
        begun, finished, begun_at, finished_at, _ = self.process.ledger.read()
        if begun > finished:
            return self._since(begun_at)
        if not self._work():
            return 0.0
        return self._since(max(finished_at, self._busy_since, self._heard_at))

    def _since(self, then: float) -> float:
        """Return the seconds since then in which this process was awake and the engine could run. A machine that is
        busy with other things must not look like an engine that hangs; but it gets no more than PATIENCE times as
        long."""
        begin = max(then, self._awake_since)
        passed = time.monotonic() - begin
        return max(passed - self.process.run_delay.since(begin), passed / PATIENCE)

    async def _watch(self) -> None:
        """Notice an engine that is there and does not move."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(min(0.25, self._timeout / 4))
            # it was this process that stood still
            if time.monotonic() - asleep > 0.75 * self._timeout:
                self._awake_since = time.monotonic()
            if not self._live or self._decoder.partial or self.stalled_s > SLOW:
                self.process.run_delay.sample(time.monotonic())
            self._memory.give_way()
            self._submitted.intersection_update(self._streams.unfinished)  # forget the finished
            for stream in self._streams.overdue(GRACE):
                self._streams.fail(stream, EXPIRED)
                self._abort(stream.request.id)
            if self._restart_task is not None and not self._restart_task.done():
                continue
            loading = 0.0 if self._live else self._since(self._spawned_at)
            if self.process.exit_code() is not None:
                self.on_engine_death("it exited")
            elif self.stalled_s > self._timeout:
                self.on_engine_death(f"no step finished for {self._timeout:g} s", condemned=True)
            elif self._decoder.partial and self._since(self._partial_since) > self._timeout:
                self.on_engine_death("the rest of a message did not come", condemned=True)
            elif loading > self._restarts.start_timeout(self._timeout):
                self.on_engine_death(f"it was not ready after {loading:.1f} s", condemned=True)

    def _detach(self) -> None:
        self._live = False
        if self._loop is not None and self.process.sock.fileno() >= 0:
            self._loop.remove_reader(self.process.sock)
            self._loop.remove_writer(self.process.sock)
        self.process.sock.close()

    def on_engine_death(self, reason: str, condemned: bool = False) -> None:
        """The engine is dead, or must die. condemned: because the supervisor says so."""
        restarting = self._restart_task is not None and not self._restart_task.done()
        if self._closing or self._given_up or restarting:
            return
        assert self._loop is not None
        was_live = self._live
        self._detach()
        self._restart_task = self._loop.create_task(self._restart(reason, was_live, condemned))

    async def _restart(self, reason: str, was_live: bool, condemned: bool) -> None:
        """Kill what is left, find out whose fault it was, start the next."""
        stopped = self.process.stopped
        await asyncio.sleep(SIGNAL_GRACE_S)
        code, lingered = await self._reap(0.0 if condemned else EXIT_TIMEOUT)
        cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        log.error(
            "engine process %d is lost (%s; %s) with %d open streams",
            self.epoch,
            reason,
            cause,
            len(self._streams.unfinished),
        )
        if self.ready is None:
            self._give_up(
                EngineFault("engine_start", f"the engine process ended while it started: {cause}")
            )
            return
        self._last_end = f"{cause} {self._restarts.start_failed}".rstrip()
        self._metrics.engine_lost()
        self._streams.engine_lost()
        own = not stopped and (condemned or lingered or code not in quarantine.FROM_OUTSIDE)
        suspecting = self._quarantine.active and was_live and own
        moved = was_live and not condemned and self._moved(time.monotonic())
        found = was_live and self._blame(own, quarantine.failure_of(code))
        self._restarts.lost(found or suspecting or moved or self._streams.gained > self._gained)
        self._gained = self._streams.gained
        if self._restarts.looping:
            self._streams.fail_all(self._restarts.unavailable)
        await asyncio.sleep(self._restarts.pause)
        if (
            not was_live or self._restarts.futile > 1
        ):  # it may be this memory that there is no living with
            self.process.kv.discard()
        self._adopt(await self._next_process())
        assert self._loop is not None
        self._loop.add_reader(self.process.sock, self._receive)

    async def _next_process(self) -> EngineProcess:
        """Started, as soon as this machine lets it be."""
        while True:
            try:
                return EngineProcess(self._command, self.process.kv)
            except OSError as error:
                log.error("no engine process can be started: %s", error)
                await asyncio.sleep(MAX_BACKOFF)

    async def _reap(self, patience: float) -> tuple[int, bool]:
        """Wait until it is gone, for the next one may need its memory; after `patience` seconds
        kill it. Its exit code, and whether that was necessary: its channel closes a while before it
        is gone."""
        deadline = time.monotonic() + patience
        while self.process.exit_code() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        lingered = self.process.exit_code() is None
        self.process.kill()
        while (code := self.process.exit_code()) is None:
            await asyncio.sleep(0.005)
        return code, lingered

    def _blame(self, own: bool, failure: Failure) -> bool:
        """Record the requests of the executing step after a crash. True if that identifies a
        culprit, which then fails with this failure."""
        begun, finished, _, _, executing = self.process.ledger.read()
        if (
            begun == finished
        ):  # it died between two steps: whoever it had been given may have caused it
            executing = sorted(self._submitted)
        note = self._quarantine.crash if own else self._quarantine.killed
        culprit = note(executing, self._streams.tokens())
        self._metrics.strikes = self._quarantine.strikes
        if culprit is None:
            return False
        log.error("request %d brings the engine down: it fails, the others go on", culprit)
        self._metrics.poisoned += failure is quarantine.POISON
        self._streams.fail(self._streams.unfinished[culprit], failure)
        return True

    @property
    def _given_up(self) -> bool:
        return self.broken is not None and self.broken.done()

    def _give_up(self, fault: EngineFault) -> None:
        self._streams.fail_all(GAVE_UP)
        if self.broken is not None and not self.broken.done():
            self.broken.set_result(fault)
