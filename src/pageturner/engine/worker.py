"""The engine process: `python -m pageturner.engine.worker --channel-fd N --ledger-fd M --config
JSON`, and with `--kv-fd K` a memory file for its KV, with `--device D` the device of the engine
process before it.

Owns the process: loading, its end of the channel, its exit. Must not know HTTP or text. An
exception that is not one sequence's own kills the process on purpose: the supervisor's recovery is
cheap, half-broken state is not.
"""

from __future__ import annotations

import argparse
import select
import signal
import socket
import sys
from dataclasses import replace

import msgspec

from pageturner import logs
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine import Engine
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.errors import EngineFault, lacks_memory
from pageturner.garbage import Collector
from pageturner.interrupt import end_with_parent
from pageturner.ipc.adapter_messages import LoadAdapter, UnloadAdapter
from pageturner.ipc.channel import (
    Abort,
    Aborted,
    BadFrame,
    Configure,
    Configured,
    Events,
    Failed,
    ForgetPrefixes,
    MessageDecoder,
    Ready,
    Stats,
    Submit,
    ToEngine,
    Unpin,
    encode,
)
from pageturner.ipc.ledger import OUT_OF_MEMORY_EXIT, Ledger
from pageturner.ipc.session_messages import ReleaseSession, RestoreSession
from pageturner.ipc.submit_repeats import restored
from pageturner.policies.scheduler_config import CHANGEABLE
from pageturner.request import Event, Request

STATS_EVERY = 0.25  # seconds
PREPARE_AFTER = 1.0  # seconds without work, once
ALIVE_EVERY = 0.25  # seconds; an engine that waits on purpose says so as often as that
SEND_TIMEOUT = 30.0  # an API process that does not read for so long is gone
RECEIVE_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20  # of the socket: one step's news never waits for the API process


class ChannelLoop:
    """Drives an Engine from a socket: submits and aborts in, events and stats out, until the other
    end closes."""

    def __init__(
        self, engine: Engine, sock: socket.socket, ledger: Ledger, config: EngineConfig
    ) -> None:
        self._engine = engine
        self._config = config
        self._sock = sock
        self._ledger = engine.ledger = ledger
        self._decoder = MessageDecoder(ToEngine)
        self._before: Request | None = None
        self._wanted: Configure | None = None
        self._next_stats = 0.0
        self._told_idle = False
        self._rest: float | None = PREPARE_AFTER
        self._garbage = Collector()
        sock.settimeout(SEND_TIMEOUT)

    def run(self) -> None:
        """Returns when the API process has closed the channel."""
        engine = self._engine
        self._garbage.take_over()
        while self._receive():
            self._configure()
            for news in engine.adapters.told():
                self._sock.sendall(encode(news))
            events = engine.step() if engine.has_work else []
            if events:
                self._sock.sendall(encode(Events(events)))
            self._stats()

    def _receive(self) -> bool:
        """Take what has arrived; wait for it when there is nothing else to do. False at the end."""
        fds = [self._sock.fileno(), *self._engine.connectors.wakeup_fds]
        told = select.select(fds, [], [], self._patience())[0]
        if not told and not self._engine.has_work:
            self._rest = None
            self._engine.prepare()
        if self._sock.fileno() not in told:
            return True
        data = self._sock.recv(RECEIVE_BYTES)
        if not data:
            return False
        refusals: list[Event] = []
        for message in self._decoder.feed(data):
            match message:
                case Submit(request=request):
                    if message.same_params or message.same_prompt:
                        request = restored(message, self._before)
                    self._before = request
                    refusals += self._engine.submit(request)
                case Abort(id=id):
                    self._sock.sendall(encode(Aborted(id, self._engine.abort(id))))
                case Unpin(id=id):
                    self._engine.unpin(id)
                case ForgetPrefixes():
                    self._engine.forget_prefixes()
                case ReleaseSession(name=name):
                    self._engine.release_session(name)
                case RestoreSession():
                    self._engine.stack.sessions.restore(message, self._engine.clock())
                case LoadAdapter() | UnloadAdapter():
                    self._engine.adapters.change(message)
                case Configure():
                    self._wanted = message
                    self._engine.wake = None
        if refusals:
            self._sock.sendall(encode(Events(refusals)))
        return True

    def _configure(self) -> None:
        """Go on with what is wanted, once that is safe."""
        if (wanted := self._wanted) is None:
            return
        settings = {name: getattr(wanted, name) for name in CHANGEABLE}
        if self._engine.reconfigure(replace(self._config, **settings), wanted.widest):
            self._wanted = None
            self._sock.sendall(encode(Configured(wanted)))

    def _patience(self) -> float | None:
        if not self._engine.has_work:  # has the batch that settings had to wait for just ended?
            return self._rest if self._wanted is None else 0.0
        wake = self._engine.wake
        return 0.0 if wake is None else min(max(wake - self._engine.clock(), 0.0), ALIVE_EVERY)

    def _stats(self) -> None:
        """About four times a second while there is work, and once when it is done."""
        idle = not self._engine.has_work
        self._told_idle &= idle
        now = self._engine.clock()
        if now < self._next_stats and not (idle and not self._told_idle):
            return
        self._told_idle = idle
        self._next_stats = now + STATS_EVERY
        accounts = self._engine.latency.read_some(self._ledger.asked, now)
        self._sock.sendall(
            encode(Stats(self._engine.stats(), self._engine.stack.sessions.news(), accounts))
        )
        self._garbage.look()


def ready(built: LoadedEngine) -> Ready:
    """Return what the API process must know of an engine that is ready."""
    return Ready(
        max_model_len=built.max_model_len,
        num_blocks=built.num_blocks,
        block_size=built.block_size,
        vocab_size=built.vocab_size,
        kv_bytes=built.kv_bytes,
        fingerprint=built.fingerprint,
        phases=built.phases,
        token_budget=built.engine.stack.config.token_budget,
        limits=built.limits,
        kv_blocks_taken_back=built.taken_back,
        device=built.device,
    )


def main() -> int:
    end_with_parent()
    logs.as_parent()
    parser = argparse.ArgumentParser(prog="pageturner.engine.worker")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--ledger-fd", type=int, required=True)
    parser.add_argument("--kv-fd", type=int, help="memory for KV, empty or of the engine before")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--device", help="where the engine before computed, if not as configured")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole group; the API process drains
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=arguments.channel_fd)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    ledger = Ledger(arguments.ledger_fd)
    try:
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        built = make_engine(
            replace(config, device=arguments.device or config.device),
            kv_fd=arguments.kv_fd,
            on_phase=ledger.begin_phase,
        )
    except EngineFault as fault:
        sock.sendall(encode(Failed(fault.code, fault.message)))
        return 1
    try:
        sock.sendall(encode(ready(built)))
        ChannelLoop(built.engine, sock, ledger, config).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the API process has gone; so do we
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        logs.say("the engine ends, for it finds no memory", "error")
        return OUT_OF_MEMORY_EXIT
    except BadFrame as error:
        logs.say(f"the engine ends, for the API process makes no sense: {error}", "error")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
