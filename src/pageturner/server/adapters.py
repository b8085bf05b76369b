"""The LoRA adapters of a server: their names, and what every engine process has to be told of them.

Owns which names there are and which content each stands for. Must not know who may change them
(observability/admin_state.py), nor what is in a folder: the engine reads it, and says whether it is
an adapter of this model.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pageturner.errors import ClientError, EngineFault, bad_setting
from pageturner.ipc.adapter_messages import (
    AdapterLoaded,
    AdaptersInMemory,
    LoadAdapter,
    UnloadAdapter,
)
from pageturner.server.admission.limits import check_name
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.supervisor import EngineListener, Supervisor
from pageturner.text.output_stream import OutputStream

MAX_ADAPTERS = 10_000  # names
MAX_TOLD = 1000  # adapters with metrics of their own, the first ones
UNUSED_EVERY = 0.5  # seconds between two looks at who still has an adapter that was unloaded
LOAD_TIMEOUT = 60.0  # seconds that a load may take; an engine may be starting meanwhile
STATUS = {"adapter_missing": 404, "adapter_memory": 503}  # of what cannot be loaded; else 400


@dataclass(slots=True)
class ServedAdapter:
    """An adapter by name. digest: of its content, "" until it was read; loaded: done when it was;
    number: which loading that is."""

    name: str
    path: str
    number: int
    loaded: asyncio.Future[AdapterLoaded]
    digest: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    requests: int = 0
    tokens: int = 0


class ServedAdapters:
    """The adapters of one server. taken: the names of the model itself; aside: streams that the
    engine does not have now and will have again."""

    def __init__(
        self,
        supervisor: Supervisor,
        streams: OpenStreams,
        taken: tuple[str, ...],
        aside: Callable[[], Iterable[OutputStream]] = tuple,
    ) -> None:
        self._supervisor, self._streams, self._taken = supervisor, streams, taken
        self._streams_aside = aside
        self._entries: dict[str, ServedAdapter] = {}
        # by a name that nobody can ask for: those that are read to take the place of one
        self._aside: dict[str, ServedAdapter] = {}
        # digest -> such a name: unloaded, and still answered with
        self._leaving: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._paths: dict[str, str] = {}  # by digest, also of what streams that go on still use
        # all that can be asked for, also those that are still being read
        self.names: tuple[str, ...] = ()
        self.known: frozenset[str] = frozenset()  # the same
        self._in_memory: frozenset[str] = frozenset()  # digests
        supervisor.listeners.append(EngineListener(self._tell_all, received=self._received))

    def __iter__(self) -> Any:
        return iter(list(self._entries.values()))

    def find(self, name: str | None) -> ServedAdapter | None:
        """The adapter of a name; None for the model itself and for what is not there."""
        return self._entries.get(name) if name is not None else None

    async def digest(self, name: str | None) -> str:
        """Return what a request that names this model carries: "" where that is no adapter. Waits
        for one that is being read. ClientError where that fails."""
        entry = self.find(name)
        if entry is None:
            return ""
        if not entry.digest:
            await self._until_loaded(entry)
        return entry.digest

    @property
    def in_memory(self) -> list[str]:
        """Return the names of the adapters that the engine holds in memory, as it last reported."""
        return [entry.name for entry in self._entries.values() if entry.digest in self._in_memory]

    # -- changes -----------------------------------------------------------------------------------
    def begin(self, name: str, path: str) -> ServedAdapter:
        """Have an adapter read. ClientError for a name that cannot be."""
        check_name("lora_name", name)
        if not name or not name.isprintable():
            raise ClientError(
                400, "invalid_value", "lora_name has printable characters", "lora_name"
            )
        if name in self._taken or name in self._entries:
            what = "is the model itself" if name in self._taken else "has already been loaded"
            message = f"The lora adapter {name!r} {what}: unload it first, or take another name"
            raise ClientError(400, "adapter_exists", message, "lora_name")
        self._entries[name] = entry = self._new(name, path, len(self._entries))
        self._note_names()
        self._supervisor.tell(LoadAdapter(name, path, number=entry.number))
        return entry

    def _new(self, name: str, path: str, there: int) -> ServedAdapter:
        """An adapter beside so many others."""
        if there >= MAX_ADAPTERS:
            message = f"there are {MAX_ADAPTERS} adapters already: unload one first"
            raise ClientError(400, "too_many_adapters", message, "lora_name")
        answer = asyncio.get_running_loop().create_future()
        return ServedAdapter(name, path, next(self._numbers), answer)

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Have an adapter read and wait for it. in_place: in the stead of one of the same name,
        which stays until the other one is there, and if that cannot be had."""
        if not (in_place and name in self._entries):
            await self._until_loaded(self.begin(name, path))
            return
        entry = self._new(name, path, len(self._aside) + len(self._entries))
        self._aside[_unaskable(entry)] = entry
        self._supervisor.tell(LoadAdapter(_unaskable(entry), path, number=entry.number))
        await self._until_loaded(entry)

    def unload(self, name: str) -> None:
        """Let nobody ask for an adapter any more; who is being answered with it goes on, also those
        of the background that stand aside: the engine keeps it until the last of them has ended."""
        entry = self._entries.pop(name, None)
        if entry is None:
            raise ClientError(
                404, "adapter_not_found", f"The lora adapter {name!r} cannot be found.", "lora_name"
            )
        self._note_names()
        _settle(entry)
        for aside, one in [(aside, one) for aside, one in self._aside.items() if one.name == name]:
            del self._aside[aside]
            _settle(one)
            self._supervisor.tell(UnloadAdapter(aside))
        self._keep_while_used(entry)
        self._supervisor.tell(UnloadAdapter(name))
        self._forget_paths()

    def _keep_while_used(self, entry: ServedAdapter) -> None:
        """Have the engine keep an adapter as long as an open stream uses it, under a name that
        clients cannot request."""
        if not entry.digest or entry.digest in self._leaving or not self._in_use(entry.digest):
            return
        self._leaving[entry.digest] = _unaskable(entry)
        self._supervisor.tell(LoadAdapter(_unaskable(entry), entry.path, entry.digest))
        task = asyncio.get_running_loop().create_task(self._until_unused(entry.digest))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_unused(self, digest: str) -> None:
        while self._in_use(digest):
            await asyncio.sleep(UNUSED_EVERY)
        self._supervisor.tell(UnloadAdapter(self._leaving.pop(digest)))
        self._forget_paths()

    def _in_use(self, digest: str) -> bool:
        return digest in self._used()

    def _used(self) -> set[str]:
        """Digests that streams have."""
        used = {stream.request.adapter for stream in self._streams.unfinished.values()}
        return used.union(stream.request.adapter for stream in self._streams_aside())

    def _forget_paths(self) -> None:
        used = self._used().union(one.digest for one in self._entries.values())
        self._paths = {digest: path for digest, path in self._paths.items() if digest in used}

    def _note_names(self) -> None:
        self.names = tuple(self._entries)
        self.known = frozenset(self.names)

    async def _until_loaded(self, entry: ServedAdapter) -> None:
        try:
            news = await asyncio.wait_for(asyncio.shield(entry.loaded), LOAD_TIMEOUT)
        except TimeoutError:
            message = f"the adapter {entry.name!r} is still being loaded: try again in a moment"
            raise ClientError(503, "adapter_loading", message) from None
        if news.code:
            raise ClientError(STATUS.get(news.code, 400), news.code, news.message, "lora_path")

    # -- the engine --------------------------------------------------------------------------------
    def _received(self, news: object) -> None:
        """Handle news from the engine: an adapter was loaded or failed to load, or other adapters
        are in memory."""
        if isinstance(news, AdaptersInMemory):
            self._in_memory = frozenset(news.digests)
            return
        if not isinstance(news, AdapterLoaded):
            return
        if (instead := self._aside.get(news.name)) is not None:
            self._replace(instead, news)
            return
        entry = self._entries.get(news.name)
        if entry is None or entry.number != news.number or entry.loaded.done():
            return
        if news.code:
            del self._entries[news.name]
            self._note_names()
        else:
            self._note(entry, news)
        entry.loaded.set_result(news)

    def _note(self, entry: ServedAdapter, news: AdapterLoaded) -> None:
        entry.digest = news.digest
        self._paths[news.digest] = entry.path

    def _replace(self, entry: ServedAdapter, news: AdapterLoaded) -> None:
        """The adapter that was to take the place of another one is there, or cannot be had: then
        the other one stays. The engine learns of the change by the channel, so behind every request
        for the other one."""
        if entry.number != news.number:
            return
        del self._aside[news.name]
        if not news.code:
            before = self._entries[entry.name]
            entry.requests, entry.tokens = before.requests, before.tokens
            self._note(entry, news)
            _settle(before)
            self._entries[entry.name] = entry
            if before.digest != entry.digest:
                self._keep_while_used(before)
            self._supervisor.tell(LoadAdapter(entry.name, entry.path, entry.digest, entry.number))
            self._supervisor.tell(UnloadAdapter(news.name))
            self._forget_paths()
        entry.loaded.set_result(news)

    def _tell_all(self) -> None:
        """Tell a new engine process, which has just loaded its model, all adapters: the named ones,
        and those that open streams still use."""
        self._in_memory = frozenset()
        known = {entry.digest for entry in self._entries.values()}
        for digest, path in self._paths.items():
            if digest not in known:
                self._supervisor.tell(LoadAdapter(self._leaving.get(digest, ""), path, digest))
        for entry in self._entries.values():
            self._supervisor.tell(LoadAdapter(entry.name, entry.path, entry.digest, entry.number))
        for aside, entry in self._aside.items():
            self._supervisor.tell(LoadAdapter(aside, entry.path, number=entry.number))

    # -- figures -----------------------------------------------------------------------------------
    def count(self, name: str | None, streams: list[OutputStream]) -> None:
        """A request for this model has ended."""
        if (entry := self.find(name)) is not None:
            entry.requests += 1
            entry.tokens += sum(len(stream.tokens) for stream in streams)

    def figures(self) -> dict[str, tuple[int, int]]:
        """Return by name: requests that ended, and the tokens of their answers."""
        told = list(self._entries.values())[:MAX_TOLD]
        return {entry.name: (entry.requests, entry.tokens) for entry in told}

    def at_work(self) -> tuple[list[str], list[str]]:
        """Names of adapters that open streams have: those of the latest step, and all others."""
        names = {entry.digest: entry.name for entry in self._entries.values()}
        now, running = self._supervisor.placed()[1], Counter[str]()
        waiting = Counter[str]()
        for id, stream in self._streams.unfinished.items():
            if name := names.get(stream.request.adapter):
                (running if id in now else waiting)[name] += 1
        return sorted(running), sorted(set(waiting) - set(running))


def _unaskable(entry: ServedAdapter) -> str:
    """Return a name that only the engine uses: names that clients can request are printable."""
    return f"{entry.name}\n{entry.number}"


def _settle(entry: ServedAdapter) -> None:
    """End the wait of requests for an adapter that has gone."""
    if not entry.loaded.done():
        told = AdapterLoaded(entry.name, code="adapter_unloaded", message="it was unloaded")
        entry.loaded.set_result(told)


def load_listed(
    adapters: ServedAdapters, wanted: list[tuple[str, str]], broken: asyncio.Future[EngineFault]
) -> None:
    """Load the adapters of --lora. An invalid one stops the server, as an invalid model does."""

    def look(loaded: asyncio.Future[AdapterLoaded]) -> None:
        news = loaded.result()
        if news.code and news.code != "adapter_unloaded" and not broken.done():
            broken.set_result(EngineFault(news.code, f"--lora {news.name}: {news.message}"))

    for name, path in wanted:
        try:
            adapters.begin(name, path).loaded.add_done_callback(look)
        except ClientError as error:
            if not broken.done():
                broken.set_result(bad_setting(f"--lora {name}: {error.message}"))


class LoadBody(msgspec.Struct, kw_only=True):
    """Fields of /v1/load_lora_adapter, as in vLLM. load_inplace: in the stead of one of that
    name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, kw_only=True):
    """Fields of /v1/unload_lora_adapter, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None
