"""`pageturner serve`: from flags to a listening server, and from a signal to a clean end.

Owns the API process: port, engine, event loop, signals, exit code. The engine process is started
before anything that only the server needs is imported: both load at the same time.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pageturner import logs
from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags
from pageturner.config.settings import Config, EngineConfig, ServerConfig
from pageturner.errors import bad_setting
from pageturner.garbage import Collector
from pageturner.http import lifecycle
from pageturner.http.api_keys import KeyRing
from pageturner.server.engine_client.process import EngineProcess, engine_command
from pageturner.text.receipt_key import VARIABLE, read_key

if TYPE_CHECKING:
    import asyncio

    from starlette.applications import Starlette
    from starlette.types import ASGIApp

    from pageturner.formats.generation_config import GenerationDefaults
    from pageturner.formats.tokenizer import Tokenizer
    from pageturner.http.tls import Certificates
    from pageturner.http.tracing import Traces
    from pageturner.server.service import Service
    from pageturner.server.text_workers.text_jobs import PrefixBody
    from pageturner.server.text_workers.text_pool import TextPool
    from pageturner.text.chat_template import ChatTemplate

log = logging.getLogger("pageturner")

QUESTION = "What does HTTP stand for?"  # even very small models know it
FLUSH_SECONDS = 1.0  # for the last bytes of answers, at the end
TELL_START_EVERY = 3.0  # seconds
PHASES = {
    "": "the server's parts are imported",
    "find": "the model is looked for",
    "device": "the device is chosen",
    "load": "the weights are read and packed",
    "kv": "memory is reserved for KV",
    "pace": "the processor is measured",
}
LAST_WORDS = "the server shut down before the answer was complete"


class _StartNotes:
    """Says every few seconds what a start is waiting for. By a timer's signal: this process forks,
    and may have no threads then."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phase: Callable[[], str] = str
        signal.signal(signal.SIGALRM, self._say)
        signal.setitimer(signal.ITIMER_REAL, TELL_START_EVERY, TELL_START_EVERY)
        atexit.register(self.end)  # without its handler the signal would end a process that leaves

    def _say(self, *_: object) -> None:
        phase = self.phase()
        what = PHASES.get(phase, phase)
        text = logs.line(f"starting: {what} ({self.seconds:.0f} s)")
        os.write(sys.stderr.fileno(), f"{text}\n".encode())  # `print` may just be under way

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self) -> str:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return f"{self.seconds:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pageturner serve`."""
    add_flags(parser, "serve")
    configuration.add_flags(parser, "engine", "server", leave_out=("model",))


def main(arguments: argparse.Namespace) -> int:
    """Serve until told to stop. Returns the exit code."""
    flags = configuration.from_flags(arguments)
    if arguments.model is not None:
        flags["engine"]["model"] = arguments.model
    settings = configuration.load(arguments.config, flags)
    from pageturner.formats import hub

    logs.to_stderr(settings.server.log_level, settings.server.log_format)
    listener = lifecycle.bind(settings.server.host, settings.server.port)
    with contextlib.ExitStack() as stack:
        if not settings.server.ssl_certfile:
            from pageturner.server.waiting_room import waiting_room

            stack.enter_context(waiting_room(listener))
        model = hub.resolve(settings.engine.model)
    engine = replace(settings.engine, model=str(model.path))
    known = Config(engine, settings.server)
    return serve(known, model.name, lambda: load_texts(engine), listener=listener)


def names_of(given: str, own: str) -> tuple[str, ...]:
    """The names of a model: those of --served-model-name, else its own. EngineFault where one is
    empty."""
    if not given:
        return (own,)
    names = tuple(name.strip() for name in given.split(","))
    if not all(names):
        raise bad_setting(f"--served-model-name {given!r}: a name between commas is empty")
    return tuple(dict.fromkeys(names))


def listed_adapters(text: str) -> list[tuple[str, str]]:
    """Name and path of the adapters of --lora. EngineFault('bad_setting')."""
    found: dict[str, str] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise bad_setting(f"--lora {one!r}: it is NAME=PATH")
        if name in found:
            raise bad_setting(f"--lora: the name {name!r} is there twice")
        found[name] = path
    return list(found.items())


def with_keys(settings: Config) -> tuple[Config, KeyRing]:
    """The settings with the admin key, and the API keys in force: what flags do not say stands in
    the environment."""
    config = settings.server
    admin_key = config.admin_key or os.environ.get("PAGETURNER_ADMIN_KEY", "")
    listed = config.api_key
    if not listed and not config.api_key_file:
        listed = os.environ.get("PAGETURNER_API_KEY", "")
    keys = KeyRing(listed, config.api_key_file)
    return Config(settings.engine, replace(config, admin_key=admin_key)), keys


def load_texts(config: EngineConfig) -> tuple[Tokenizer, GenerationDefaults]:
    from pageturner.formats.load_tokenizer import load_with_defaults

    return load_with_defaults(config.model, config.generation_config, config.load_format)


def serve(
    settings: Config,
    name: str,
    load: Callable[[], tuple[Tokenizer, GenerationDefaults]],
    command: Callable[[EngineConfig], list[str]] = engine_command,
    listener: socket.socket | None = None,
) -> int:
    """Bind where there is no `listener`, start the engine, serve.

    name     of the model, where --served-model-name says no other
    load     gives the tokenizer and the sampling defaults
    command  how the engine is started
    """
    notes = _StartNotes()
    logs.to_stderr(settings.server.log_level, settings.server.log_format)
    settings, api_keys = with_keys(settings)
    signing = settings.server.receipt_key_file
    receipt_key = read_key(signing, "" if signing else os.environ.get(VARIABLE, ""))
    names = names_of(settings.server.served_model_name, name)
    if settings.server.otlp_traces_endpoint:
        from pageturner.http.tracing import check_endpoint

        check_endpoint(settings.server.otlp_traces_endpoint)
    for adapter, path in listed_adapters(settings.server.lora):  # refused before anything begins
        if not Path(path).is_dir():
            message = f"--lora {adapter}: {path} is no folder: an adapter is a folder with adapter_config.json"
            raise bad_setting(message)
    certificates = None
    if settings.server.ssl_certfile or settings.server.ssl_keyfile:
        from pageturner.http.tls import certificates_of

        certificates = certificates_of(settings.server)
    if listener is None:
        listener = lifecycle.bind(settings.server.host, settings.server.port)
    # the API bounds its queue itself; after a restart the engine gets all unfinished requests at
    # once
    most = settings.engine.max_queue + settings.engine.max_num_seqs
    start = command(replace(settings.engine, max_queue=most))
    process = EngineProcess(start)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until there is something to drain
    try:
        from pageturner.server.prefixes import read_preload_file

        log.info("loading %s", names[0])
        lifecycle.give_large_blocks_back()
        file = settings.server.preload
        preloaded = read_preload_file(Path(file)) if file else []
        service, pool = assemble(
            settings,
            names,
            load,
            command=start,
            process=process,
            api_keys=api_keys,
            receipt_key=receipt_key,
        )
        life = _main(service, pool, listener, notes, preloaded, certificates)
        return lifecycle.run(life, service.memory.give_up)
    except BaseException:
        process.kill()
        raise


def assemble(
    settings: Config,
    names: tuple[str, ...],
    load: Callable[[], tuple[Tokenizer, GenerationDefaults]],
    *,
    command: list[str],
    process: EngineProcess,
    api_keys: KeyRing,
    receipt_key: bytes = b"",
    alone: bool = True,
) -> tuple[Service, TextPool]:
    """All parts of a server but what listens, for an engine process that was just started. It
    forks: call it before the event loop runs, unless this process has others too (not `alone`)."""
    import gc

    from pageturner.http.memory_reserve import MemoryReserve
    from pageturner.server.admission.limits import OPEN_REQUESTS
    from pageturner.server.admission.quota import Quota
    from pageturner.server.api.base.served_model import ServedModel
    from pageturner.server.engine_client.open_streams import OpenStreams
    from pageturner.server.engine_client.supervisor import Supervisor
    from pageturner.server.observability.admin import LiveSettings
    from pageturner.server.observability.metrics import Metrics
    from pageturner.server.receipts import Receipts
    from pageturner.server.service import Service
    from pageturner.server.text_workers.reading import TextReader, start_text_pool

    tokenizer, generation = load()
    template = _chat_template(tokenizer, settings.server)
    metrics, memory = Metrics(), MemoryReserve()
    most_entries = OPEN_REQUESTS * settings.server.max_logit_entries_per_request
    most = settings.engine.max_queue + settings.engine.max_num_seqs
    streams = OpenStreams(metrics, most, most_entries=most_entries)
    supervisor = Supervisor(
        process,
        command,
        streams,
        metrics,
        memory,
        timeout=settings.server.engine_timeout,
        max_restarts=settings.server.max_restarts,
    )
    if alone:
        gc.freeze()  # what start-up left behind lives for ever: never walk it again
    known = ServedModel(
        names[0],
        tokenizer,
        template,
        context=0,
        capacity=0,
        vocab_size=0,
        defaults=generation.sampling,
        names=names[1:],
        tool_call_parser=settings.server.tool_call_parser,
        reasoning_parser=settings.server.reasoning_parser,
        request_templates=settings.server.trust_request_chat_template,
        rerank_by=settings.server.rerank_by,
    )
    # it reads long requests; what only the engine knows is told with each of them
    pool = start_text_pool(known, settings.server, memory)
    service = Service(
        config=settings.server,
        model=names[0],
        aliases=names[1:],
        tokenizer=tokenizer,
        template=template,
        reader=TextReader(pool, settings.server.max_body_size),
        supervisor=supervisor,
        streams=streams,
        metrics=metrics,
        memory=memory,
        generation=generation,
        keys=api_keys,
        live_settings=LiveSettings(supervisor, streams, settings.engine),
        receipts=Receipts(Path(settings.engine.model), receipt_key, lambda: supervisor.fingerprint),
        quota=Quota(settings.engine.max_queue, settings.engine.slots),
    )
    return service, pool


def _chat_template(tokenizer: Tokenizer, config: ServerConfig) -> ChatTemplate | None:
    """The one that is given, or the model's own, within what may be rendered in the event loop. The
    tokenizer learns of it, and of the template for judging documents."""
    from pageturner.server.text_workers.reading import AT_ONCE_LIMITS
    from pageturner.text.chat_template import ChatTemplate, habits_of
    from pageturner.text.judging import read_template
    from pageturner.text.template_choice import give_template

    tokenizer.rerank_template = read_template(config.rerank_template) or tokenizer.rerank_template
    if family := give_template(tokenizer, config.chat_template):
        message = "the model's files have no chat template: its family's is taken, %s; --chat-template says"
        log.info(f"{message} otherwise", family)
    made = []
    for source in dict.fromkeys((tokenizer.chat_template, tokenizer.template_for(tools=True))):
        if source:
            bos, eos = tokenizer.bos_token, tokenizer.eos_token
            made.append(ChatTemplate(source, bos, eos, AT_ONCE_LIMITS))
            for tools in (False, True):  # so that no request waits for it
                habits_of(made[-1], tools)
    if not made:
        return None
    template, *named = made
    if template.broken:
        log.warning("%s; chats are refused, completions are not", template.broken)
    template.tool_use = next(iter(named), None)
    return template


async def _main(
    service: Service,
    pool: TextPool,
    listener: socket.socket,
    notes: _StartNotes,
    preloaded: list[PrefixBody],
    certificates: Certificates | None,
) -> int:
    """The event loop's whole life: serve until a signal or until the engine is given up, drain,
    leave."""
    import asyncio

    from pageturner.http.http_limits import limits_of
    from pageturner.request import Failure
    from pageturner.server.adapters import load_listed
    from pageturner.server.api.batches.batch_pages import BatchPages
    from pageturner.server.api.batches.batches import Batches
    from pageturner.server.app import create_app
    from pageturner.server.engine_client.supervisor import EngineListener

    supervisor, config, loop = service.supervisor, service.config, asyncio.get_running_loop()
    batches = BatchPages(service)
    routes = create_app(service, batches)
    traces = _traces(service)
    if config.batch_dir:
        batches.batches = Batches(service, routes, traces)
    supervisor.attach()
    assert supervisor.broken is not None
    announce = _announcer(service, lifecycle.url_of(listener, tls=bool(certificates)), notes)
    preload = _preloader(service, preloaded)
    supervisor.listeners += [EngineListener(ready=announce), EngineListener(ready=preload)]
    load_listed(service.adapters, listed_adapters(service.config.lora), supervisor.broken)
    kept = batches.batches
    resuming = loop.create_task(kept.start()) if kept else None
    stop = lifecycle.drain_on_signals(service, config.shutdown_timeout, supervisor.kill_nowait)
    read_again = [service.keys.reload] if config.api_key_file else []
    lifecycle.reload_on_signal(*read_again, *([certificates.reload] if certificates else []))
    app = _with_admission(service, routes, traces)
    limits = limits_of(config)
    server = lifecycle.http_server(
        app, limits, service.metrics.rejected, service.memory, certificates
    )
    collecting = loop.create_task(lifecycle.collect_garbage(Collector()))
    serving = loop.create_task(server.serve(sockets=[listener]))
    await asyncio.wait({stop, serving, supervisor.broken}, return_when=asyncio.FIRST_COMPLETED)
    if kept and resuming:
        resuming.cancel()
        await kept.close()
    await lifecycle.drain(service, config.shutdown_timeout, hopeless=supervisor.broken.done)
    # now: a signal to the whole group has ended the engine too
    leaving = loop.create_task(supervisor.close())
    await pool.close()
    service.streams.fail_all(Failure("shutting_down", LAST_WORDS))
    await lifecycle.until_idle(service, FLUSH_SECONDS)
    server.should_exit = True
    await serving
    if traces is not None:
        await traces.close()
    await leaving
    collecting.cancel()
    if supervisor.broken.done():
        raise supervisor.broken.result()
    return 0


def _with_admission(service: Service, routes: Starlette, traces: Traces | None) -> ASGIApp:
    """The routes behind what every request meets first."""
    from pageturner.http.middleware import RequestMiddleware
    from pageturner.http.origins import origin_rules, with_cors
    from pageturner.server.api.batches.batch_pages import MAX_AROUND_FILE

    config = service.config
    rules = origin_rules(config.host, config.allowed_hosts, config.allowed_origins)
    uploads = {"/v1/files": config.max_file_size + MAX_AROUND_FILE}
    counts = service.metrics.http
    counts.learn(routes.routes)
    app = RequestMiddleware(
        routes, service.keys, config.max_body_size, rules, uploads, traces, counts
    )
    return with_cors(app, config.allowed_origins)


def _traces(service: Service) -> Traces | None:
    """Return traces for the collector of --otlp-traces-endpoint."""
    if not service.config.otlp_traces_endpoint:
        return None
    from pageturner.http.middleware import OPEN_PATHS
    from pageturner.http.tracing import start_traces
    from pageturner.server.observability.answer_spans import AnswerSpans

    source = AnswerSpans(lambda id: service.history.owner(id)[0], service.streams.wait_for_timings)
    return start_traces(service.config.otlp_traces_endpoint, "pageturner", OPEN_PATHS, source)


def _preloader(service: Service, bodies: list[PrefixBody]) -> Callable[[], None]:
    """Once: engines that come later are given what is there."""
    import asyncio

    from pageturner.server.pages import preload

    tasks: list[asyncio.Task[None]] = []

    def begin() -> None:
        if bodies and not tasks:
            work = preload(service, bodies)
            tasks.append(asyncio.get_running_loop().create_task(work))

    return begin


def _announcer(service: Service, url: str, notes: _StartNotes) -> Callable[[], None]:
    notes.phase = lambda: service.supervisor.process.ledger.phase

    def announce() -> None:
        service.live_settings.take_over()
        ready = service.supervisor.ready
        if ready is None or service.supervisor.epoch > 1:
            return
        if service.generation.sampling:
            log.info("sampling defaults: %s", service.generation)
        if service.tokenizer.vocab_size > ready.vocab_size:
            log.warning(
                "the tokenizer has %d tokens, the model %d: prompts with the others are refused",
                service.tokenizer.vocab_size,
                ready.vocab_size,
            )
        total = notes.end()
        log.info(
            "listening on %s; model %s, context %d, KV memory for %d tokens (%.2f GiB), %s tokens a step;"
            " ready in %s s%s",
            url,
            service.model,
            ready.max_model_len,
            ready.num_blocks * ready.block_size,
            ready.kv_bytes / 2**30,
            ready.token_budget or "any number of",
            total,
            _parts(float(total), ready.phases),
        )
        if ready.device:
            log.info("device: %s", ready.device)
        log.info("chat and live view: %s/ ; to try: %s", url, _curl(service, url))

    return announce


def _parts(total: float, phases: dict[str, float]) -> str:
    """The phases of a start that took a while, and the rest, which is processes and imports:
    together they are the total."""
    shown = {phase: round(seconds, 2) for phase, seconds in phases.items() if seconds >= 0.01}
    rest = {"processes and imports": total - sum(shown.values())}
    return f" ({', '.join(f'{name} {part:.2f}' for name, part in (rest | shown).items())})"


def _curl(service: Service, url: str) -> str:
    """A command that asks for an answer, to copy into a shell."""
    key = ' -H "Authorization: Bearer $KEY"' if service.keys.needed else ""
    path, asked = "completions", '"prompt": "Once upon a time"'
    if service.template is not None:
        path, asked = (
            "chat/completions",
            f'"messages": [{{"role": "user", "content": "{QUESTION}"}}]',
        )
    fields = f'{{{asked}, "max_tokens": 60, "temperature": 0}}'
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{fields}'"
