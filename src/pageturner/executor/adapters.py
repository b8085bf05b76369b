"""The LoRA adapters of an engine: which there are, which of them are in memory, and who waits for
one.

Owns the bound of adapters in memory, which of them goes when another is wanted (the one that was
used longest ago, of those that no request has), and the threads that read them. Must not know the
scheduler, the channel or what is in a folder (models/lora.py). All but the reading happens in the
thread that steps, between steps.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pageturner.errors import ClientError, EngineFault, one_line
from pageturner.ipc.adapter_messages import (
    AdapterLoaded,
    AdaptersInMemory,
    LoadAdapter,
    UnloadAdapter,
)
from pageturner.kernels.adapters import Adapter
from pageturner.models.decoder import Decoder
from pageturner.models.lora import load_adapter, read_folder
from pageturner.request import Refused, Request

PASSES = 64  # later requests for adapters in memory that may go before one that waits for a place
NICENESS = 10  # of the threads that read: a step goes first


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter as it was read: in the backend's form, and what is told of it."""

    adapter: Adapter
    digest: str
    rank: int
    base: str


def read_adapter(decoder: Decoder | None, path: Path, digest: str = "") -> LoadedAdapter:
    """Read, check and pack an adapter. EngineFault, also where it has another content than `digest`
    says."""
    if decoder is None:
        raise EngineFault(
            "adapter_unsupported", "this engine has no model that an adapter could be for"
        )
    folder = read_folder(path)
    if digest and folder.digest != digest:
        raise EngineFault(
            "adapter_changed",
            f"{path} has changed since it was loaded: load it again, under another name or after unloading",
        )
    weights = load_adapter(folder, decoder.spec)
    pairs = [pair for layer in weights.layers for pair in layer.values()]
    pairs += [pair for pair in (weights.embed, weights.head) if pair is not None]
    try:
        packed = decoder.pack_adapter(weights)
    except MemoryError as error:
        why = f": {error}" if str(error) else ""
        raise EngineFault("adapter_memory", f"{path}: there is no memory for it{why}") from error
    return LoadedAdapter(packed, folder.digest, max(pair.rank for pair in pairs), folder.base)


def _loaded(work: Future[LoadedAdapter], where: str = "") -> LoadedAdapter:
    """Return what was read. EngineFault whatever the folder holds: no other request is to suffer
    from it."""
    try:
        return work.result()
    except EngineFault:
        raise
    except Exception as error:
        raise EngineFault(
            "adapter_unreadable", one_line(f"{where}{type(error).__name__}: {error}")
        ) from error


class AdapterTicket:
    """A request that waits until its adapter is in memory, or takes it at once. What the anteroom
    asks of a future, it answers."""

    def __init__(self, store: AdapterStore, request: Request, number: int) -> None:
        self.id, self.digest, self.number = request.id, request.adapter, number
        self.fault: EngineFault | None = None
        self._store = store

    def done(self) -> bool:
        """Return whether the request has its adapter now, or never will."""
        return self.fault is not None or self._store.advance(self)

    def cancel(self) -> bool:
        self._store.leave(self)
        return True

    def result(self) -> None:
        """Refused where the adapter could not be loaded."""
        if self.fault is not None:
            raise Refused(self.fault.code, self.fault.message)


class AdapterStore:
    """Adapters by the digest of their content; names are what the API process calls them.

    decoder  that they are for; None: there can be none
    most  adapters in memory, and being read for requests
    """

    def __init__(self, decoder: Decoder | None, most: int) -> None:
        self._decoder, self._most = decoder, most
        self._packed = {} if decoder is None else decoder.adapters
        self._names: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._hot: OrderedDict[str, Adapter] = OrderedDict()  # who was used longest ago comes first
        self._users: Counter[str] = Counter()
        self._using: dict[int, str] = {}
        self._tickets: dict[int, AdapterTicket] = {}  # of those who wait
        self._numbers = itertools.count()
        self._starving: AdapterTicket | None = None  # waits for a place, the longest
        self._passed = 0  # by so many since
        self._reading: dict[str, Future[LoadedAdapter]] = {}  # for requests
        self._registering: list[tuple[LoadAdapter, Future[LoadedAdapter]]] = []
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._counts: Counter[str] = Counter()
        self._told: frozenset[str] = frozenset()  # which are in memory

    # -- what there is -----------------------------------------------------------------------------
    def change(self, message: LoadAdapter | UnloadAdapter) -> None:
        """There is an adapter of this name from here on, or once it has been read: `news` tells of
        that. Or nobody will ask for one any more: what requests have stays until they have
        ended."""
        if isinstance(message, UnloadAdapter):
            self._registering = [one for one in self._registering if one[0].name != message.name]
            self._forget_unless_wanted(self._names.pop(message.name, ""))
            return
        path = Path(message.path)
        if message.digest:
            self._paths[message.digest] = path
            if message.name:
                self._rename(message.name, message.digest)
            return
        work = self._pool("register").submit(read_adapter, self._decoder, path)
        self._registering.append((message, work))

    def load(self, name: str, path: Path) -> str:
        """The digest of an adapter that is there when this returns. EngineFault."""
        self._take_in(LoadAdapter(name, str(path)), read_adapter(self._decoder, path))
        return self._names[name]

    @property
    def busy(self) -> bool:
        """True if `news` will have something to tell."""
        return bool(self._registering)

    def news(self) -> list[AdapterLoaded]:
        """Return of the adapters that were to be registered what became of them since the last
        question."""
        told = []
        for message, work in [one for one in self._registering if one[1].done()]:
            self._registering.remove((message, work))
            try:
                told.append(self._take_in(message, _loaded(work, f"{message.path}: ")))
            except EngineFault as fault:
                told.append(
                    AdapterLoaded(
                        message.name, message.number, code=fault.code, message=fault.message
                    )
                )
        return told

    def told(self) -> list[AdapterLoaded | AdaptersInMemory]:
        """`news`, and which are in memory, where that has changed since the last question."""
        told: list[AdapterLoaded | AdaptersInMemory] = [*self.news()]
        if self._hot.keys() != self._told:
            self._told = frozenset(self._hot)
            told.append(AdaptersInMemory(list(self._hot)))
        return told

    def _take_in(self, message: LoadAdapter, loaded: LoadedAdapter) -> AdapterLoaded:
        digest, nbytes = loaded.digest, int(loaded.adapter.nbytes)
        self._paths[digest] = Path(message.path)
        self._rename(message.name, digest)
        if digest not in self._hot and len(self._hot) + len(self._reading) < self._most:
            self._put(loaded)
        return AdapterLoaded(message.name, message.number, digest, nbytes, loaded.rank, loaded.base)

    def _rename(self, name: str, digest: str) -> None:
        before, self._names[name] = self._names.get(name, ""), digest
        if before != digest:
            self._forget_unless_wanted(before)

    def _forget_unless_wanted(self, digest: str) -> None:
        wanted = digest in self._names.values() or self._users[digest]
        if digest and not wanted and all(one.digest != digest for one in self._tickets.values()):
            self._paths.pop(digest, None)
            self._drop(digest)

    # -- requests ----------------------------------------------------------------------------------
    def ticket(self, request: Request) -> AdapterTicket:
        """Return a ticket for a request that wants an adapter. Refused where that is not there."""
        if request.adapter not in self._paths:
            raise Refused(
                "adapter_not_found",
                "the adapter is not there: it was never loaded, or has been unloaded",
            )
        ticket = AdapterTicket(self, request, next(self._numbers))
        self._tickets[request.id] = ticket
        return ticket

    def release(self, id: int) -> None:
        """A request has ended, or will never run."""
        digest = self._using.pop(id, "")
        if digest:
            self._users[digest] -= 1
            self._users += Counter()  # without those that nobody has
            self._forget_unless_wanted(digest)

    def advance(self, ticket: AdapterTicket) -> bool:
        """Let a ticket have what it waits for, if that can be now. True too where it never can."""
        digest = ticket.digest
        if ticket.id in self._using:
            return True
        if digest in self._hot:
            if self._must_wait(ticket):
                return False
        else:
            work = self._reading.get(digest)
            if work is None and self._make_place(ticket):
                path = self._paths[digest]
                self._reading[digest] = self._pool("read").submit(
                    read_adapter, self._decoder, path, digest
                )
                self._counts["adapter_loads"] += 1
            if work is None or not work.done():
                return False
            if not self._read(ticket, self._reading.pop(digest)):
                self.leave(ticket)
                return True
        self._hot.move_to_end(digest)
        self._users[digest] += 1
        self._using[ticket.id] = digest
        del self._tickets[ticket.id]
        self._served(ticket)
        if self._starving is not None and ticket.number > self._starving.number:
            self._passed += 1
        return True

    def leave(self, ticket: AdapterTicket) -> None:
        """It waits no longer."""
        if self._tickets.pop(ticket.id, None) is not None:
            self._served(ticket)
            self._forget_unless_wanted(ticket.digest)

    def _served(self, ticket: AdapterTicket) -> None:
        """It has a place or wants none: others need not wait for it."""
        if self._starving is ticket:
            self._starving, self._passed = None, 0

    def _must_wait(self, ticket: AdapterTicket) -> bool:
        """Return whether so many went before an older one that waits for a place, that this one
        must not: else those in memory could keep their places for ever."""
        starving = self._starving
        return starving is not None and self._passed >= PASSES and ticket.number > starving.number

    def _make_place(self, ticket: AdapterTicket) -> bool:
        if len(self._hot) + len(self._reading) >= self._most:
            idle = next((digest for digest in self._hot if not self._users[digest]), None)
            if idle is None:
                if self._starving is None or self._starving.number > ticket.number:
                    self._starving, self._passed = ticket, 0
                return False
            self._drop(idle)
            self._counts["adapter_evictions"] += 1
        self._served(ticket)
        return True

    def _read(self, ticket: AdapterTicket, work: Future[LoadedAdapter]) -> bool:
        """Put what was read into memory; False where it could not be."""
        try:
            self._put(_loaded(work))
        except EngineFault as fault:
            ticket.fault = fault
        return ticket.fault is None

    def _put(self, loaded: LoadedAdapter) -> None:
        self._hot[loaded.digest] = self._packed[loaded.digest] = loaded.adapter

    def _drop(self, digest: str) -> None:
        self._hot.pop(digest, None)
        self._packed.pop(digest, None)

    def _pool(self, name: str) -> ThreadPoolExecutor:
        """Return the threads for one purpose: reading for requests does not wait for those that are
        only registered."""
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(1, f"adapters-{name}", _be_nice)
        return self._pools[name]

    def stats(self) -> dict[str, float]:
        """Gauges and counters of `channel.Stats`; none where there are no adapters."""
        if not (self._paths or self._counts):
            return {}
        return {
            "adapters": len(self._names),
            "adapters_in_memory": len(self._hot),
            "adapter_bytes": sum(int(one.nbytes) for one in self._hot.values()),
            "adapters_waiting": len(self._tickets),
            "adapter_loads": self._counts["adapter_loads"],
            "adapter_evictions": self._counts["adapter_evictions"],
        }


class NamedAdapters:
    """The adapters of an engine by the names that its callers give them."""

    def __init__(self, store: AdapterStore, folders: Mapping[str, str | os.PathLike[str]]) -> None:
        self._store = store
        self._digests: dict[str, str] = {}
        for name, folder in folders.items():
            self.load(name, folder)

    def load(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Another adapter, or another one of a name. EngineFault where it is not for the model."""
        if not name:
            raise ClientError(400, "invalid_value", "an adapter has a name", "lora")
        self._digests[name] = self._store.load(name, Path(folder))

    def unload(self, name: str) -> None:
        """Forget one. What is being answered with it goes on."""
        self.digest(name)
        del self._digests[name]
        self._store.change(UnloadAdapter(name))

    def digest(self, name: str) -> str:
        """Return the digest of an adapter's content; "" of "", which is the model as it is.
        ClientError for one not there."""
        if name and name not in self._digests:
            known = ", ".join(map(repr, self._digests)) or "none"
            raise ClientError(
                404, "model_not_found", f"no adapter {name!r}: there are {known}", "lora"
            )
        return self._digests[name] if name else ""


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
