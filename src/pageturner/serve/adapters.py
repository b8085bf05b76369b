"""The LoRA adapters of a server: their names, and what every engine process has to be told of them.

Owns which names there are and which content each stands for, and the pages that change them. Must not know
what is in a folder: the engine reads it, and says whether it is an adapter of this model.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from pageturner.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from pageturner.errors import ClientError, EngineFault
from pageturner.serve.limits import check_name
from pageturner.serve.open_streams import OpenStreams
from pageturner.serve.receiving import read_body
from pageturner.serve.supervisor import Supervisor
from pageturner.text.output_stream import OutputStream

MOST_BODY = 65536  # bytes: a path may be long
MOST_ADAPTERS = 10_000  # names
MOST_TOLD = 1000  # adapters with metrics of their own, the first ones
LOAD_TIMEOUT = 60.0  # seconds that a load may take; an engine may be starting meanwhile
STATUS = {"adapter_missing": 404, "adapter_memory": 503}  # of what cannot be loaded; else 400


@dataclass(slots=True)
class ServedAdapter:
    """An adapter by name. digest: of its content, "" until it was read; loaded: done when it was; number:
    which loading that is."""

    name: str
    path: str
    number: int
    loaded: asyncio.Future[AdapterLoaded]
    digest: str = ""
    nbytes: int = 0
    rank: int = 0
    base: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    requests: int = 0
    tokens: int = 0


class ServedAdapters:
    """Of one server. taken: the names of the model itself."""

    def __init__(self, supervisor: Supervisor, streams: OpenStreams, taken: tuple[str, ...]) -> None:
        self._supervisor, self._streams, self._taken = supervisor, streams, taken
        self._entries: dict[str, ServedAdapter] = {}
        self._numbers = itertools.count(1)
        self._paths: dict[str, str] = {}  # by digest, also of what streams that go on still use
        self.names: tuple[str, ...] = ()  # all that can be asked for, also those that are still being read
        self.known: frozenset[str] = frozenset()  # the same
        supervisor.when_live = self._tell_all
        supervisor.when_adapter = self._received

    def __iter__(self) -> Any:
        return iter(list(self._entries.values()))

    def find(self, name: str | None) -> ServedAdapter | None:
        """The adapter of a name; None for the model itself and for what is not there."""
        return self._entries.get(name) if name is not None else None

    async def digest(self, name: str | None) -> str:
        """What a request that names this model carries: "" where that is no adapter. Waits for one that is
        being read. ClientError where that fails."""
        entry = self.find(name)
        if entry is None:
            return ""
        if not entry.digest:
            await self._until_loaded(entry)
        return entry.digest

    # -- changes ---------------------------------------------------------------------------------------------
    def begin(self, name: str, path: str) -> ServedAdapter:
        """Have an adapter read. ClientError for a name that cannot be."""
        check_name("lora_name", name)
        if not name or not name.isprintable():
            raise ClientError(400, "invalid_value", "lora_name has printable characters", "lora_name")
        if name in self._taken or name in self._entries:
            what = "is the model itself" if name in self._taken else "has already been loaded"
            message = f"The lora adapter {name!r} {what}: unload it first, or take another name"
            raise ClientError(400, "adapter_exists", message, "lora_name")
        if len(self._entries) >= MOST_ADAPTERS:
            message = f"there are {MOST_ADAPTERS} adapters already: unload one first"
            raise ClientError(400, "too_many_adapters", message, "lora_name")
        entry = ServedAdapter(name, path, next(self._numbers), asyncio.get_running_loop().create_future())
        self._entries[name] = entry
        self._note_names()
        self._supervisor.tell(LoadAdapter(name, path, number=entry.number))
        return entry

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Have an adapter read and wait for it. in_place: in the stead of one of the same name."""
        if in_place and name in self._entries:
            self.unload(name)
        await self._until_loaded(self.begin(name, path))

    def unload(self, name: str) -> None:
        """Let nobody ask for an adapter any more; who is being answered with it goes on."""
        entry = self._entries.pop(name, None)
        if entry is None:
            message = f"The lora adapter {name!r} cannot be found."
            raise ClientError(404, "adapter_not_found", message, "lora_name")
        self._note_names()
        if not entry.loaded.done():
            entry.loaded.set_result(AdapterLoaded(name, code="adapter_unloaded", message="it was unloaded"))
        self._supervisor.tell(UnloadAdapter(name))
        used = {stream.request.adapter for stream in self._streams.unfinished.values()}
        used.update(one.digest for one in self._entries.values())
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

    # -- the engine ------------------------------------------------------------------------------------------
    def _received(self, news: AdapterLoaded) -> None:
        """The engine has read one, or could not."""
        entry = self._entries.get(news.name)
        if entry is None or entry.number != news.number or entry.loaded.done():
            return
        if news.code:
            del self._entries[news.name]
            self._note_names()
        else:
            entry.digest, entry.nbytes, entry.rank, entry.base = (
                news.digest,
                news.nbytes,
                news.rank,
                news.base,
            )
            self._paths[news.digest] = entry.path
        entry.loaded.set_result(news)

    def _tell_all(self) -> None:
        """An engine process has loaded its model and knows no adapter yet: neither those that have names nor
        those that open streams have."""
        known = {entry.digest for entry in self._entries.values()}
        for digest, path in self._paths.items():
            if digest not in known:
                self._supervisor.tell(LoadAdapter("", path, digest))
        for entry in self._entries.values():
            self._supervisor.tell(LoadAdapter(entry.name, entry.path, entry.digest, entry.number))

    # -- figures ---------------------------------------------------------------------------------------------
    def count(self, name: str | None, streams: list[OutputStream]) -> None:
        """A request for this model has ended."""
        if (entry := self.find(name)) is not None:
            entry.requests += 1
            entry.tokens += sum(len(stream.tokens) for stream in streams)

    def figures(self) -> dict[str, tuple[int, int]]:
        """By name: requests that ended, and the tokens of their answers."""
        told = list(self._entries.values())[:MOST_TOLD]
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


def load_listed(
    adapters: ServedAdapters, wanted: list[tuple[str, str]], broken: asyncio.Future[EngineFault]
) -> None:
    """Begin with those of --lora. One that is none ends the server, as a model that is none does."""

    def look(loaded: asyncio.Future[AdapterLoaded]) -> None:
        news = loaded.result()
        if news.code and news.code != "adapter_unloaded" and not broken.done():
            broken.set_result(EngineFault(news.code, f"--lora {news.name}: {news.message}"))

    for name, path in wanted:
        try:
            adapters.begin(name, path).loaded.add_done_callback(look)
        except ClientError as error:
            if not broken.done():
                broken.set_result(EngineFault("bad_setting", f"--lora {name}: {error.message}"))


class LoadBody(msgspec.Struct, kw_only=True):
    """Fields of /v1/load_lora_adapter, as in vLLM. load_inplace: in the stead of one of that name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, kw_only=True):
    """Fields of /v1/unload_lora_adapter, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterPages:
    """What changes the adapters of a server, for whoever `admit` lets in."""

    def __init__(self, adapters: ServedAdapters, admit: Callable[[HTTPRequest], None]) -> None:
        self._adapters, self._admit = adapters, admit

    async def load(self, request: HTTPRequest) -> Response:
        self._admit(request)
        body = _read(await read_body(request.receive, MOST_BODY), LoadBody)
        await self._adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: HTTPRequest) -> Response:
        self._admit(request)
        body = _read(await read_body(request.receive, MOST_BODY), UnloadBody)
        self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _read(raw: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, "invalid_json", f"the body is not what it should be: {error}") from error
