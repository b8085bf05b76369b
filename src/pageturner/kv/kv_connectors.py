"""Connectors of an engine's KV, made from settings: slower tiers, published events, and remote
prefill.

Owns the assembly, and that a tier which cannot be had is left out with a warning: serving goes on
without it.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from pageturner import memory
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.executor.kv_memory import state_share
from pageturner.kv.kv_block_file import BlockFile
from pageturner.kv.kv_events import KVEvents, Sender
from pageturner.kv.kv_link import LEAST_KEY, LinkEnd, LinkIdentity
from pageturner.kv.kv_tiers import KVTiers
from pageturner.kv.kv_transfer import KVStorage, KVTransfer, StateTransfer, Transfer
from pageturner.kv.prefill_server import PrefillServer, Submits
from pageturner.kv.remote_prefill import CAUSES, RemotePrefill
from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.listener import Listener


def wants_tiers(config: EngineConfig) -> bool:
    """Return whether a block must be whole: with layers that forget nothing."""
    return bool(
        config.kv_host_memory or config.kv_file or config.prefill_listen or config.prefill_from
    )


class KVWait(Protocol):
    """KV that a request waits for."""

    def done(self) -> bool: ...
    def cancel(self) -> bool: ...
    def result(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KVWaits:
    """Several that one request waits for."""

    parts: list[KVWait]

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def cancel(self) -> bool:
        cancelled = [part.cancel() for part in self.parts]
        return all(cancelled)

    def result(self) -> None:
        """Whatever came of them, the request can run."""


class KVConnectors:
    """All connectors of one engine: `listeners` are told of its steps, `attach` comes when its pool
    is there."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self._config = config = config or EngineConfig()
        check(config)
        self._key = prefill_key(config)
        self.tiers: KVTiers | None = None
        self.state_tiers: KVTiers | None = None
        self.remote_prefill: RemotePrefill | None = None
        self.prefill_server: PrefillServer | None = None
        self._events: KVEvents | None = None
        if config.kv_events:
            sender = Sender(config.kv_events, config.kv_events_replay, config.kv_events_topic)
            self._events = KVEvents(sender)
        self._late = Listener(
            committed=lambda report: self.tiers.committed(report) if self.tiers else None,
            stats=self._stats,
            ended=lambda sequence, finish: (
                self.prefill_server.ended(sequence, finish) if self.prefill_server else None
            ),
        )

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The listeners that the scheduler must have."""
        tiers = (self._late,) if wants_tiers(self._config) else ()
        return (*tiers, self._events.listener) if self._events else tiers

    @property
    def busy(self) -> bool:
        """There is something to do for other engines."""
        return self.prefill_server is not None and self.prefill_server.busy

    @property
    def wakeup_fds(self) -> list[int]:
        """Files that can be read when `busy` may have become true."""
        return [self.prefill_server.bell] if self.prefill_server else []

    def step(self, engine: Submits) -> None:
        """Before each step."""
        if self.prefill_server is not None:
            self.prefill_server.step(engine)

    def ticket(self, request: Request) -> KVWait | None:
        """Return the KV that a request should wait for; None: nothing."""
        asked = [tiers.ticket(request) for tiers in self._both]
        if waits := [wait for wait in asked if wait is not None]:
            return KVWaits([*waits])
        return self.remote_prefill.ticket(request) if self.remote_prefill else None

    def forget(self, others: Callable[[], None]) -> None:
        """Find nothing again that is only kept because somebody might. others: has the device
        forget it."""
        for tiers in self._both:
            others = partial(tiers.forget, others)
        others()

    def close(self) -> None:
        """Leave the file to others, and the port."""
        for tiers in self._both:
            tiers.close()
        if self.prefill_server is not None:
            self.prefill_server.close()

    @property
    def _both(self) -> list[KVTiers]:
        return [tiers for tiers in (self.state_tiers, self.tiers) if tiers is not None]

    def _stats(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for tiers in self._both:
            figures |= tiers.stats()
        if self.prefill_server is not None:
            figures |= {name: self.prefill_server.counts[name] for name in SENT}
        if self.remote_prefill is not None:
            figures |= {name: self.remote_prefill.counts[name] for name in RECEIVED}
        return figures

    def attach(self, pool: BlockPool, storage: KVStorage | None, model: str, vocab: int) -> None:
        """Go behind the hooks of the pool. model: as in its keys; vocab: token ids are below it."""
        if storage is not None and wants_tiers(self._config):
            transfer = KVTransfer(storage, pool, model)
            transfers: list[Transfer] = [transfer]
            share = 0.0
            if storage.states is not None:
                states = StateTransfer(storage.states, pool, model)
                transfers.append(states)
                share = state_share(states.nbytes, transfer.nbytes, pool.block_size)
                self.state_tiers = self._tiers(states, share, states.form, suffix=".states")
            self.tiers = self._tiers(transfer, 1.0 - share, storage.spec)
            self._attach_prefill(transfers, vocab)
        if self._events is not None:
            self._events.attach(pool)

    def _attach_prefill(self, transfers: Sequence[Transfer], vocab: int) -> None:
        config, pool = self._config, transfers[0].pool
        weights, _, build = transfers[0].model.partition("-")
        form = ", ".join(transfer.form for transfer in transfers)
        end = LinkEnd(self._key, LinkIdentity(weights, build, form, pool.block_size))
        if config.prefill_from:
            addresses = [
                address_of(one, "--prefill-from") for one in config.prefill_from.split(",")
            ]
            least, seconds = config.prefill_tokens, config.prefill_timeout
            self.remote_prefill = RemotePrefill(addresses, end, transfers, least, seconds)
        if config.prefill_listen:
            address = address_of(config.prefill_listen, "--prefill-listen")
            self.prefill_server = PrefillServer(address, end, transfers, vocab)

    def _tiers(
        self, transfer: Transfer, share: float, form: object, suffix: str = ""
    ) -> KVTiers | None:
        """Tiers with such a share of the memory and of a file. form: all that the bytes of a block
        depend on, beside the model."""
        config, file = self._config, None
        if config.kv_file:
            named = repr((transfer.model, form)).encode()
            identity = hashlib.blake2b(named, digest_size=32).digest()
            size = int(config.kv_file_size * share)
            try:
                file = BlockFile(config.kv_file + suffix, size, identity, transfer.nbytes)
            except EngineFault as fault:
                message = f"{fault.message}; serving goes on without it"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
        host = int(config.kv_host_memory * share)
        return KVTiers(transfer, host, file) if host or file is not None else None


SENT = ["kv_sent_blocks", "kv_sent_bytes", "prefill_guests"]
SENT += ["prefill_links_failed", "prefill_peers_refused"]
RECEIVED = ["kv_received_blocks", "kv_received_bytes", "prefill_asked"]
RECEIVED += [f"prefill_fallback_{cause}" for cause in CAUSES]
KEY_VARIABLE = "PAGETURNER_PREFILL_KEY"


def address_of(text: str, flag: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. EngineFault."""
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise bad_setting(f"{flag} takes HOST:PORT, as 10.0.0.7:8100, not {text!r}")
    return host.strip("[]"), int(port)


def prefill_key(config: EngineConfig) -> bytes:
    """Return the key that both ends of a link know; b"" where there is none to be. EngineFault."""
    needed = {
        "both": ("", True),
        "prefill": ("--prefill-listen", config.prefill_listen),
        "decode": ("--prefill-from", config.prefill_from),
    }
    flag, given = needed[config.role]
    if not given:
        raise bad_setting(f"--role {config.role} needs {flag} HOST:PORT")
    if not (config.prefill_listen or config.prefill_from):
        return b""
    for one in filter(None, config.prefill_from.split(",")):
        address_of(one, "--prefill-from")
    if config.prefill_listen:
        address_of(config.prefill_listen, "--prefill-listen")
    key = os.environ.get(KEY_VARIABLE, "").encode()
    if config.prefill_key_file:
        try:
            key = Path(config.prefill_key_file).read_bytes()[:4096].strip()
        except OSError as error:
            raise EngineFault(
                "prefill_key", f"--prefill-key-file cannot be read ({error.strerror})"
            ) from None
    if len(key) < LEAST_KEY:
        raise EngineFault(
            "prefill_key",
            f"prefill elsewhere needs a key of {LEAST_KEY} bytes or more: --prefill-key-file FILE, or"
            f" {KEY_VARIABLE} in the environment of both engines",
        )
    return key


def check(config: EngineConfig) -> None:
    """EngineFault for settings that cannot be."""
    if not wants_tiers(config):
        return
    if not config.enable_prefix_caching:
        raise bad_setting(
            "tiers and prefill elsewhere need the prefix cache: leave out --no-enable-prefix-caching"
        )
    if config.backend in ("fake", "null"):
        raise bad_setting(f"--backend {config.backend} has no KV to keep or send: leave that out")
    free = memory.available()
    if free is not None and config.kv_host_memory > free:
        raise EngineFault(
            "kv_memory",
            f"--kv-host-memory asks for {config.kv_host_memory:,} bytes, and {free:,} are free:"
            " ask for less",
        )
