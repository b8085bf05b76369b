"""What stands beside the KV of an engine: slower tiers, and who is told of its blocks. From settings to both.

Owns the assembly, and that a tier which cannot be had is left out with a warning: serving goes on without it.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass

from pageturner import memory
from pageturner.config import EngineConfig
from pageturner.core.blocks import BlockPool
from pageturner.core.listener import Listener
from pageturner.errors import EngineFault
from pageturner.kernels.base import KV, KVSpec, Ops
from pageturner.runtime.kv_block_file import BlockFile
from pageturner.runtime.kv_events import KVEvents
from pageturner.runtime.kv_tiers import KVTiers
from pageturner.runtime.kv_transfer import KVTransfer


def wants_tiers(config: EngineConfig) -> bool:
    return bool(config.kv_host_memory or config.kv_file)


@dataclass(frozen=True, slots=True)
class KVStorage:
    """Where the KV of a model lies. spec: of one block of all layers."""

    ops: Ops
    kv: KV
    spec: KVSpec


class KVBeside:
    """Of one engine: `listeners` are told of its steps, `attach` comes when its pool is there."""

    def __init__(self, config: EngineConfig) -> None:
        check(config)
        self._config = config
        self.tiers: KVTiers | None = None
        self._events = KVEvents.of(config) if config.kv_events else None
        self._late = Listener(
            committed=lambda report: self.tiers.committed(report) if self.tiers else None,
            stats=lambda: self.tiers.stats() if self.tiers else {},
        )

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """To be told by the scheduler."""
        tiers = (self._late,) if wants_tiers(self._config) else ()
        return (*tiers, self._events.listener) if self._events else tiers

    def attach(self, pool: BlockPool, storage: KVStorage | None, model: str) -> None:
        """Go behind the hooks of the pool. model: as in its keys."""
        if storage is not None and wants_tiers(self._config):
            transfer = KVTransfer(storage.ops, storage.kv, pool.full, storage.spec)
            host, file = self._config.kv_host_memory, self._file(storage, transfer.nbytes, model)
            if host or file is not None:
                self.tiers = KVTiers(pool, transfer, model, host, file)
        if self._events is not None:
            self._events.attach(pool)

    def _file(self, storage: KVStorage, nbytes: int, model: str) -> BlockFile | None:
        config = self._config
        if not config.kv_file:
            return None
        identity = hashlib.blake2b(repr((model, storage.spec)).encode(), digest_size=32).digest()
        try:
            return BlockFile(config.kv_file, config.kv_file_size, identity, nbytes)
        except EngineFault as fault:
            warnings.warn(f"{fault.message}; serving goes on without it", RuntimeWarning, stacklevel=2)
            return None


def check(config: EngineConfig) -> None:
    """EngineFault for settings that cannot be."""
    if not wants_tiers(config):
        return
    if not config.enable_prefix_caching:
        message = "--kv-host-memory and --kv-file need the prefix cache: leave out --no-enable-prefix-caching"
        raise EngineFault("bad_setting", message)
    if config.backend in ("fake", "null"):
        raise EngineFault(
            "bad_setting", f"--backend {config.backend} has no KV for a tier: leave the tiers out"
        )
    free = memory.available()
    if free is not None and config.kv_host_memory > free:
        message = (
            f"--kv-host-memory asks for {config.kv_host_memory:,} bytes, and {free:,} are free: ask for less"
        )
        raise EngineFault("kv_memory", message)
