"""`pageturner batch IN.jsonl OUT.jsonl`: answers every line of a file, and goes on where it was.

Owns the command: its flags, its progress, how it stops. It asks an engine of its own, which it
starts as a server does but for the listening, or the server at --url. Must not know how lines are
run (batch_runner.py).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner import logs
from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags
from pageturner.config.settings import Config, EngineConfig, ServerConfig
from pageturner.errors import EngineFault
from pageturner.http.receiving import BOM
from pageturner.progress import Progress
from pageturner.server.api.batches.batch_journal import (
    BatchRecord,
    FileRecord,
    Journal,
    JournalError,
)
from pageturner.server.api.batches.batch_lines import custom_id_of
from pageturner.server.api.batches.batch_remote import AHEAD, AskedServer
from pageturner.server.api.batches.batch_runner import Ask, BatchPaths, BatchRunner

if TYPE_CHECKING:
    from pageturner.formats.generation_config import GenerationDefaults
    from pageturner.formats.tokenizer import Tokenizer
    from pageturner.server.engine_client.process import EngineProcess
    from pageturner.server.service import Service
    from pageturner.server.text_workers.text_pool import TextPool


ID = "batch_of_this_file"  # there is only one in the journal of a command
LOOK = 0.1  # seconds between two looks at how far it is
LATELY = 10.0  # seconds over which the rate is told
STOPPED = 130
AGAIN = "the same command goes on from there"
Load = Callable[[], "tuple[Tokenizer, GenerationDefaults]"]
Command = Callable[[EngineConfig], list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pageturner batch`."""
    add_flags(parser, "batch")
    configuration.add_flags(parser, "engine", leave_out=("model",))


def main(arguments: argparse.Namespace) -> int:
    """Run it. Returns the exit code: 0 when the output is written, 130 when it was stopped."""
    if arguments.window < 0:
        raise EngineFault("bad_setting", "--window is 1 or more")
    logs.to_stderr("warning", arguments.log_format)
    if _answered(arguments):
        logs.say(
            f"{arguments.output} has the answers already, so nothing is done: take it away to ask again"
        )
        return 0
    if arguments.url:
        key = arguments.api_key or os.environ.get("OPENAI_API_KEY", "")
        server = AskedServer(arguments.url, key, arguments.window)
        with FileBatch(arguments, f"the server {server.address}") as job:
            return asyncio.run(_remote(job, server))
    from pageturner.formats import hub
    from pageturner.formats.load_tokenizer import load_with_defaults
    from pageturner.server.engine_client.process import engine_command

    flags = configuration.from_flags(arguments)
    if arguments.model:
        flags["engine"]["model"] = arguments.model
    settings = configuration.load(arguments.config, flags)
    model = hub.resolve(settings.engine.model)
    engine = replace(settings.engine, model=str(model.path))
    settings = Config(engine, replace(settings.server, log_level="warning"))
    return run(
        arguments,
        settings,
        model.name,
        lambda: load_with_defaults(engine.model, engine.generation_config, engine.load_format),
        engine_command,
    )


def run(
    arguments: argparse.Namespace, settings: Config, name: str, load: Load, command: Command
) -> int:
    """Run it with an engine of its own."""
    from pageturner.http.api_keys import KeyRing
    from pageturner.server import server
    from pageturner.server.engine_client.process import EngineProcess

    with FileBatch(arguments, f"the model {name}") as job:
        if job.done:
            return job.told()
        start = command(
            replace(
                settings.engine, max_queue=settings.engine.max_queue + settings.engine.max_num_seqs
            )
        )
        process = EngineProcess(start)
        try:
            service, pool = server.assemble(
                settings, (name,), load, command=start, process=process, api_keys=KeyRing("", "")
            )
            return asyncio.run(_local(job, service, pool, process, arguments.window))
        finally:
            process.kill()


async def _local(
    job: FileBatch, service: Service, pool: TextPool, process: EngineProcess, window: int
) -> int:
    from pageturner.server.api.batches.batches import SelfAsked
    from pageturner.server.app import create_app

    service.supervisor.attach()
    # there is nobody else: its steps may be long
    asked = SelfAsked(service, create_app(service), priority=0)
    slots = service.live_settings.slots
    most = window or slots + slots // AHEAD

    def room(under_way: int) -> int:
        return most - under_way if service.supervisor.ready else 0

    broken = service.supervisor.broken
    try:
        return await job.run(asked.ask, room, broken)
    finally:
        await pool.close()
        await service.supervisor.close()


async def _remote(job: FileBatch, server: AskedServer) -> int:
    if job.done:
        return job.told()
    await server.look()
    return await job.run(server.ask, server.room, server.gone)


def _answered(arguments: argparse.Namespace) -> bool:
    """Return whether an earlier run has finished these lines: its journal is gone, and each line
    has its answer."""
    output = Path(arguments.output)
    if Path(arguments.journal or f"{output}.journal").exists() or not output.exists():
        return False
    try:
        asked, found = _ids(Path(arguments.input)), _ids(output)
        if arguments.errors and Path(arguments.errors).exists():
            found |= _ids(Path(arguments.errors))
    except OSError:
        return False  # it is told where the file is opened for good
    return bool(asked) and asked == found


def _ids(path: Path) -> set[str]:
    """Return the custom_ids of the lines of a file, skipping lines without a valid one."""
    with path.open("rb") as file:
        found = {custom_id_of(line.removeprefix(BOM)) for line in file}
    return {id for id in found if id is not None}


class FileBatch:
    """A batch whose lines are in a file of the user's, with a journal beside the file of its
    answers."""

    def __init__(self, arguments: argparse.Namespace, answerer: str) -> None:
        self._input, self._output = Path(arguments.input), Path(arguments.output)
        self._errors = Path(arguments.errors) if arguments.errors else None
        self._path = Path(arguments.journal or f"{arguments.output}.journal")
        self._answerer = answerer
        self._most = ServerConfig().max_body_size
        self._stop = False

    def __enter__(self) -> FileBatch:
        digest = self._digest()
        if not self._path.exists() and self._output.exists():
            message = f"{self._output} is there already: take it away, or name another file for the answers"
            raise EngineFault("bad_setting", message)
        try:
            self._journal = Journal(self._path)
            try:
                self.record = self._found(digest)
            except BaseException:
                self._journal.close()
                raise
        except JournalError as error:
            raise EngineFault(error.code, error.message) from error
        self.done = self.record.ended
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.done:
            self._journal.remove()
        else:
            self._journal.close()

    def _digest(self) -> str:
        try:
            with self._input.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise EngineFault(
                "bad_setting", f"cannot read {self._input}: {error.strerror}"
            ) from error

    def _found(self, digest: str) -> BatchRecord:
        known = {"input": digest, "answered by": self._answerer}
        record = self._journal.batch(ID)
        if record is None:
            new = BatchRecord(ID, input=str(self._input), metadata=known)
            return self._journal.create(new)
        for what, value in known.items():
            if (record.metadata or {}).get(what) != value:
                message = f"{self._path} was begun with another {what}: remove it to begin anew"
                raise EngineFault("bad_setting", message)
        return record

    def _written(self, record: BatchRecord, ok: bool) -> tuple[Path, FileRecord] | None:
        path = self._output if ok else self._errors
        return None if path is None else (path, FileRecord(f"file-{ok}", "", "", str(path), 0, 0))

    # -- running -----------------------------------------------------------------------------------
    async def run(
        self, ask: Ask, room: Callable[[int], int], hopeless: asyncio.Future[EngineFault] | None
    ) -> int:
        """Run until all lines are answered, the user stops it, or no server can answer any more."""
        paths = BatchPaths(lambda _: self._input, self._written, apart=self._errors is not None)
        runner = BatchRunner(self._journal, paths, ask, room, self._most)
        self._catch_signals()
        runner.begin(self.record)
        over = asyncio.ensure_future(runner.wait(ID))
        try:
            with Progress("batch", 0) as bar:
                await self._watch(runner, over, hopeless, bar)
        finally:
            over.cancel()
            await runner.close()
        self.record = self._journal.batch(ID) or self.record
        self.done = self.record.ended
        if hopeless is not None and hopeless.done():
            raise hopeless.result()
        if trouble := runner.trouble or runner.broken:
            raise EngineFault("batch_stopped", f"{trouble}; {self._how_far()}; {AGAIN}")
        return self.told()

    async def _watch(
        self,
        runner: BatchRunner,
        over: asyncio.Future[None],
        hopeless: asyncio.Future[Any] | None,
        bar: Progress,
    ) -> None:
        pace = Pace()
        while not (
            over.done()
            or self._stop
            or runner.trouble
            or (hopeless is not None and hopeless.done())
        ):
            await asyncio.wait({over}, timeout=LOOK)
            if over.done():
                return
            found = await runner.do(self._journal.batch, ID)
            self.record = found or self.record
            record = self.record
            if record.status == "validating":
                bar.total = max(1, record.total)
                bar.update(0, f"looking at lines: {record.total:,}")
            else:
                done, bar.total = record.answered + record.failed, record.total
                bar.update(done, pace.told(done, record.total, record.failed))

    def _catch_signals(self) -> None:
        """Stop cleanly on the first Ctrl-C, and at once on the second."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self._stop = True
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)

    def told(self) -> int:
        """Say how it ended. Returns the exit code."""
        if not self.done:
            logs.say(f"stopped: {self._how_far()}; {AGAIN}", "warning")
            return STOPPED
        record = self.record
        if record.status != "completed":
            why = record.problems[-1]["message"] if record.problems else record.status
            logs.say(why, "error")
            return 1
        logs.say(f"{self._how_far()}, in {self._output}")
        return 1 if record.failed and not record.answered else 0

    def _how_far(self) -> str:
        record = self.record
        failed = f", {record.failed:,} of them by an error" if record.failed else ""
        return f"{record.answered + record.failed:,} of {record.total:,} lines answered{failed}"


class Pace:
    """Progress estimate: recent lines per second, and the time left."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def told(self, done: int, total: int, failed: int) -> str:
        now = time.monotonic()
        self._seen = [one for one in self._seen if one[0] > now - LATELY] + [(now, done)]
        (begin, before), errors = self._seen[0], f", {failed:,} errors" if failed else ""
        if now - begin < 2 * LOOK or done == before:
            return errors.lstrip(", ")
        rate = (done - before) / (now - begin)
        return f"{rate:.1f}/s, {_clock((total - done) / rate)} left{errors}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
