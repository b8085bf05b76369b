"""A server inside of another program's process: its engine, its routes, no port and no signals.

Owns the order in which the parts of a server begin and end there. Must not know who asks (a port of
`pageturner serve`, a replica of Ray Serve), nor change what belongs to the whole process: its
signals, its garbage collector, its event loop.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from pageturner.config.settings import Config
from pageturner.errors import EngineFault
from pageturner.formats import hub
from pageturner.http import lifecycle
from pageturner.http.middleware import RequestMiddleware
from pageturner.request import Failure
from pageturner.server import server
from pageturner.server.adapters import load_listed
from pageturner.server.app import create_app
from pageturner.server.engine_client.process import EngineProcess, engine_command
from pageturner.server.engine_client.supervisor import EngineListener

LAST_BYTES = 1.0  # seconds for the last bytes of answers, at the end


class EmbeddedServer:
    """One server, started in the running event loop, whose thread must last as long as the server
    does.

    app      takes its requests (ASGI). Whoever calls it has judged where they come from
    service  what they share
    """

    def __init__(self, settings: Config) -> None:
        """Begin to load. EngineFault('bad_setting') and the like."""
        model = hub.resolve(settings.engine.model)
        engine = replace(settings.engine, model=str(model.path))
        settings, keys = server.with_keys(Config(engine, settings.server))
        config = settings.server
        adapters = server.listed_adapters(config.lora)
        command = engine_command(replace(engine, max_queue=engine.max_queue + engine.max_num_seqs))
        process = EngineProcess(command)
        try:
            self.service, self._pool = server.assemble(
                settings,
                server.names_of(config.served_model_name, model.name),
                lambda: server.load_texts(engine),
                command=command,
                process=process,
                api_keys=keys,
                alone=False,
            )
        except BaseException:
            process.kill()
            process.wait()
            process.sock.close()
            raise
        self.app = RequestMiddleware(create_app(self.service), keys, config.max_body_size)
        supervisor = self.service.supervisor
        supervisor.attach()
        assert supervisor.broken is not None
        self._broken = supervisor.broken
        self._ready = asyncio.get_running_loop().create_future()
        supervisor.listeners.append(EngineListener(ready=self._on_ready))
        load_listed(self.service.adapters, adapters, self._broken)

    def _on_ready(self) -> None:
        self.service.live_settings.take_over()
        if not self._ready.done():
            self._ready.set_result(None)

    async def until_ready(self) -> None:
        """Wait until the model is loaded. Raises the EngineFault for which it never will be."""
        await asyncio.wait({self._ready, self._broken}, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    def check(self) -> None:
        """EngineFault where no engine will come again, or none is there now."""
        if self._broken.done():
            raise self._broken.result()
        if not self.service.supervisor.healthy:
            trouble = self.service.supervisor.crash_loop
            raise EngineFault(
                "no_engine",
                trouble or "the engine is not there: it is being restarted, or it is stuck",
            )

    @property
    def targets_met(self) -> tuple[int, int]:
        """The number of the last minute's requests with targets, those that met them all, and how
        many there were."""
        return self.service.metrics.goodput.counted(time.monotonic())

    async def close(self, patience: float) -> None:
        """Take no new requests, give those under way `patience` seconds, and end the engine."""
        await lifecycle.drain(self.service, patience, hopeless=self._broken.done)
        await self._pool.close()
        self.service.streams.fail_all(Failure("shutting_down", server.LAST_WORDS))
        await lifecycle.until_idle(self.service, LAST_BYTES)
        await self.service.supervisor.close()
