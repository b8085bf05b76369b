"""A whole server in this process, with an engine that says what it is told to: no sockets, no model.

Owns how it is put together: streams, supervisor, endpoints as they are, with a text pool that works in this
process and engine processes that are none. Must not know what is wrong with what anybody sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from pageturner.config import settings as config
from pageturner.formats.generation_config import GenerationDefaults
from pageturner.http.api_keys import KeyRing
from pageturner.http.memory_reserve import MemoryReserve
from pageturner.http.middleware import RequestMiddleware
from pageturner.ipc.channel import (
    Abort,
    Aborted,
    Configure,
    Configured,
    Events,
    MessageDecoder,
    Ready,
    Stats,
    Submit,
    ToEngine,
    encode,
)
from pageturner.ipc.ledger import Ledger
from pageturner.ipc.submit_repeats import restored
from pageturner.request import Event, Request, Timings
from pageturner.server.admission.quota import Quota
from pageturner.server.app import create_app
from pageturner.server.engine_client import supervisor
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.process import BUFFER_BYTES, RunDelay
from pageturner.server.engine_client.supervisor import Supervisor
from pageturner.server.observability.admin import LiveSettings
from pageturner.server.observability.metrics import Metrics
from pageturner.server.receipts import Receipts
from pageturner.server.service import Service
from pageturner.server.text_workers import text_jobs
from pageturner.server.text_workers.reading import TextReader
from pageturner.server.text_workers.text_worker import Job
from pageturner.telemetry.work import MachineLimits, WorkTotals
from pageturner.text.chat_template import ChatTemplate
from server.bytes_tokenizer import TEMPLATE, VOCAB, BytesTokenizer, prompt_logprob, token_at

ADMIN = "secret-of-the-admin"
JSON = (b"content-type", b"application/json")
PATIENCE = 20.0  # seconds after which what has not ended hangs
READY = Ready(
    max_model_len=2048,
    num_blocks=256,
    block_size=16,
    vocab_size=VOCAB,
    kv_bytes=1 << 20,
    fingerprint="fake",
    phases={"load": 0.01},
    limits=MachineLimits(20.0, 100.0, 50.0),
)
Script = Callable[
    ["StubEngine", list[Request]], None
]  # what an engine says to the requests that it has


class Found(AssertionError):
    """Something that must not be."""


class StubKV:
    def discard(self) -> None: ...


class StubEngine:
    """Stands for an EngineProcess, and for what is in it. `script`: of the first one; the next are honest."""

    script: Script | None = None
    made = 0

    def __init__(self, command: list[str], kv: Any = None) -> None:
        self.sock, self.theirs = socket.socketpair()
        for end in (self.sock, self.theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.ledger, fd = Ledger.create()
        os.close(fd)
        self.kv, self.pid, self.code = kv or StubKV(), 1, None
        self.run_delay = RunDelay(dict)
        self.script = StubEngine.script if not StubEngine.made else None
        StubEngine.made += 1
        self.decoder = MessageDecoder(ToEngine)
        self.before: Request | None = None
        self.requests: dict[int, Request] = {}
        self.outgoing = bytearray()
        self.answers = asyncio.get_running_loop().create_task(self.run())

    # -- as the supervisor sees it ---------------------------------------------------------------------------
    def send(self, frame: bytes, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):
            self.sock.send(frame)

    stopped = False

    def exit_code(self) -> int | None:
        return self.code

    def kill(self) -> None:
        if self.code is None:
            self.code = -11
            self.answers.cancel()
            self.theirs.close()

    def wait(self, timeout: float | None = None) -> int:
        return self.code or 0

    # -- as an engine ----------------------------------------------------------------------------------------
    async def run(self) -> None:
        self.say(encode(READY))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self.theirs, 1 << 18):
                self.take(data)
        self.kill()

    def take(self, data: bytes) -> None:
        for message in self.decoder.feed(data):
            match message:
                case Submit():
                    request = self.before = restored(message, self.before)
                    self.requests[request.id] = request
                case Abort(id=id):
                    self.requests.pop(id, None)
                    self.say(encode(Aborted(id, timings())))
                case Configure():
                    self.say(encode(Configured(message)))
        batch = list(self.requests.values())
        if not batch:
            return
        self.ledger.begin(time.monotonic(), [request.id for request in batch])
        self.ledger.finish(time.monotonic())
        script, self.script = self.script, None
        if script is not None:
            script(self, batch)
        else:
            for message in honest(batch):
                self.say(encode(message))
        self.requests.clear()

    def say(self, data: bytes) -> None:
        if not self.outgoing:
            asyncio.get_running_loop().call_soon(self._write)
        self.outgoing += data

    def _write(self) -> None:
        try:
            del self.outgoing[: self.theirs.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()
        if self.outgoing:
            asyncio.get_running_loop().call_later(0.001, self._write)


def timings() -> Timings:
    now = time.monotonic()
    return Timings(
        now - 0.01,
        now,
        {"prefill": 0.004, "decode": 0.006},
        ((now - 0.01, now, "decode", 1),),
        (("decode", 1, 0.001),),
    )


def honest(requests: list[Request]) -> list[Any]:
    """What an engine says of requests until all have ended."""
    said: list[Any] = []
    for request in requests:
        params, prompt = request.params, request.prompt
        if params.prompt_logprobs is not None and len(prompt) > 1:
            first = request.logits_from or 0
            scored = tuple(
                prompt_logprob(token, params.prompt_logprobs) for token in prompt[first + 1 :]
            )
            event = Event(
                request.id, 0, len(prompt), prompt_logprobs=scored, prompt_position=first + 1
            )
            said.append(Events([event]))
        if params.pooling:
            row = array("q", [1 << 24, 1]).tobytes()
            last = max(len(prompt) - 1, 0) if params.pooling == "last" else 0
            said.append(
                Events(
                    [
                        Event(
                            request.id,
                            0,
                            0,
                            prompt_position=1 + last,
                            pooled=(len(prompt) - last, row),
                        )
                    ]
                )
            )
        done = len(request.resume[0].tokens) if request.resume else 0
        most = min(params.max_tokens or 8, 12)
        for n in range(done, max(most, done + 1)):
            token = token_at(prompt, n, request.index)
            k = params.logprobs
            top = tuple(((token + j) % 256, -0.5 - j) for j in range(k or 0))
            last = n + 1 >= most
            event = Event(
                request.id,
                0,
                len(prompt) + n,
                (token,),
                () if k is None else ((-0.5, top),),
                "length" if last else None,
                cached=1,
                timings=timings() if last else None,
            )
            said.append(Events([event]))
    values = {
        "running": 1.0,
        "waiting": 0.0,
        "steps": 3.0,
        "generated_tokens": 5.0,
        "blocks_total": 256.0,
    }
    said.append(
        Stats(
            values
            | {"accepted_tokens_at_0": 1.0}
            | WorkTotals(0.1, 0.05, weight_bytes=1e9).as_dict()
        )
    )
    return said


# -- the server ----------------------------------------------------------------------------------------------
class LocalPool:
    """Stands for a TextPool."""

    def __init__(self, served: Callable[[], Any]) -> None:
        self._served = served

    async def run(self, job: Job, raw: bytes, key: str) -> bytes:
        return text_jobs.do(job.name, raw, self._served())


@dataclass(slots=True)
class AppAnswer:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> AppAnswer:
    """What an application answers. Found where that is no whole answer within PATIENCE seconds."""
    answer, sent = AppAnswer(), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.sleep(3600)
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            check(not answer.status, "two answers to one request")
            answer.status, answer.headers = message["status"], message["headers"]
        else:
            check(answer.status and not answer.ended, "a body outside of an answer")
            answer.body += message.get("body", b"")
            answer.ended = not message.get("more_body", False)

    raw_path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": raw_path,
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [
            (b"host", b"localhost"),
            *([] if b"content-type" in dict(headers or []) else [JSON]),
            *(headers or []),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    try:
        async with asyncio.timeout(PATIENCE):
            await app(scope, receive, send)
    except TimeoutError:
        raise Found(f"no answer to {method} {path} within {PATIENCE:g} s") from None
    check(answer.status, "no answer")
    return answer


def check(holds: object, what: str) -> None:
    if not holds:
        raise Found(what)


def check_answer(answer: AppAnswer, *, broken: tuple[int, ...] = ()) -> str:
    """An answer that may be given, and in a word which. broken: statuses from 500 on that are right here."""
    check(answer.ended, "an answer without an end")
    if answer.status == 200:
        return "answer"
    error = json.loads(bytes(answer.body))["error"]
    reason, message = error["reason"], error["message"]
    check(reason != "internal_error", "a bare 500")
    check(answer.status < 500 or answer.status in broken, f"a {answer.status}: {message}")
    check(len(message) < 3000, "a message of more than 3,000 characters")
    return str(reason)


class Listening(logging.Handler):
    """Notes what went wrong without anybody having foreseen it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.noted.append(where(record.exc_info[1]))

    def raised(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.noted.append(where(error) if error else str(context.get("message")))


def where(error: BaseException) -> str:
    """An exception and its last place of ours, in one line."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(at)
        at = at.tb_next
    ours = [
        frame for frame in frames if "pageturner" in frame.tb_frame.f_code.co_filename
    ] or frames
    place = ours[-1].tb_frame.f_code if ours else None
    line = f"{Path(place.co_filename).name}:{ours[-1].tb_lineno}" if place else "?"
    return f"{type(error).__name__} at {line}: {str(error)[:120]!r}"


@contextlib.asynccontextmanager
async def listening(cut_off: str = "") -> AsyncIterator[Listening]:
    """Found, if something was raised that nobody caught, or was caught as what should not be."""
    handler, loop, logger = Listening(), asyncio.get_running_loop(), logging.getLogger("pageturner")
    loop.set_exception_handler(handler.raised)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
    if handler.noted:
        raise Found(handler.noted[0])


@contextlib.asynccontextmanager
async def server(
    script: Script | None = None, timeout: float = 30.0, keys: str = ""
) -> AsyncIterator[tuple[Any, Service]]:
    """The application of a server whose first engine follows the script, once that one is ready."""
    StubEngine.script, StubEngine.made = script, 0
    before = supervisor.EngineProcess
    supervisor.EngineProcess = StubEngine  # type: ignore[assignment,misc]
    settings = config.load(None, {"server": {"admin_key": ADMIN, "developer": True}})
    metrics, tokenizer, memory = Metrics(), BytesTokenizer(), MemoryReserve()
    streams = OpenStreams(metrics, 512)
    first: Any = StubEngine([])
    watcher = Supervisor(first, [], streams, metrics, memory, timeout=timeout, max_restarts=4)
    watcher.attach()
    pool: Any = LocalPool(lambda: service.served())  # noqa: PLW0108
    service = Service(
        config=settings.server,
        model="m",
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE, "<|bos|>", "<|end|>"),
        reader=TextReader(pool, settings.server.max_body_size),
        supervisor=watcher,
        streams=streams,
        metrics=metrics,
        memory=memory,
        generation=GenerationDefaults(),
        keys=KeyRing(keys, ""),
        live_settings=LiveSettings(watcher, streams, settings.engine),
        receipts=Receipts(Path(__file__), b"", lambda: watcher.fingerprint),
        quota=Quota(settings.engine.max_queue, settings.engine.slots),
    )
    app = RequestMiddleware(create_app(service), service.keys, settings.server.max_body_size)
    try:
        async with asyncio.timeout(PATIENCE):
            while watcher.ready is None and not (watcher.broken and watcher.broken.done()):
                await asyncio.sleep(0)
        yield app, service
    finally:
        await watcher.close()
        supervisor.EngineProcess = before  # type: ignore[misc]
        await asyncio.sleep(0)


Case = Callable[[], Awaitable[str]]


def in_loop(case: Callable[[], Awaitable[str]], cut_off: str = "") -> str:
    """What one case comes to, in an event loop of its own, with all that is raised in it. cut_off: the
    reason for which an answer may break off without an end."""

    async def whole() -> str:
        async with listening(cut_off):
            return await case()

    return asyncio.run(whole())
