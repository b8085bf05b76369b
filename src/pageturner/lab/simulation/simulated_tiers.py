"""Slower memory for KV, simulated: which blocks are in host memory and in a file, and how long they take.

Owns the two tiers of a replica and the seconds that blocks take to come up. Must not know who asks for them:
it stands behind the same hooks of the store as kv/kv_tiers.py, and holds keys where that holds bytes.

A block goes down when it is evicted, for nothing, and comes up when a sequence begins with it, which nothing
hides: its seconds are added to the next step. The engine also writes what is sealed to its file, shares the
file with others on its machine, and lets others run meanwhile; so this is no better than that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pageturner.kv.store_hooks import add_block_hooks
from pageturner.lab.simulation.simulated_fleet import bring_up
from pageturner.scheduler.store import Store


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Tokens of KV that each tier of a replica holds, and seconds for which one of them comes up."""

    host_tokens: int = 0
    file_tokens: int = 0
    host_seconds: float = 0.0
    file_seconds: float = 0.0


class SimulatedTiers:
    """The tiers of one replica, whose blocks have so many tokens. found: tokens that came up."""

    def __init__(self, store: Store, sizes: TierSizes, block_size: int) -> None:
        self._store, self._size = store, block_size
        most = (sizes.host_tokens // block_size, sizes.file_tokens // block_size)
        self._most = most
        self._seconds = (sizes.host_seconds * block_size, sizes.file_seconds * block_size)
        self._tiers: tuple[OrderedDict[bytes, None], ...] = (OrderedDict(), OrderedDict())
        self._owed = 0.0
        self.found = 0
        add_block_hooks(store, lambda key, block: None, self._evict)
        store.on_miss = self._fetch

    def owed(self) -> float:
        """Seconds that have not been added to a step yet; now they are."""
        seconds, self._owed = self._owed, 0.0
        return seconds

    def _evict(self, key: bytes, block: int) -> None:
        self._put(0, key)

    def _put(self, tier: int, key: bytes) -> None:
        """Take in a block; the least recently used one goes a tier down for it."""
        keys = self._tiers[tier]
        keys[key] = None
        keys.move_to_end(key)
        if len(keys) > self._most[tier]:
            old, _ = keys.popitem(last=False)
            if tier + 1 < len(self._tiers):
                self._put(tier + 1, old)

    def _fetch(self, key: bytes) -> int | None:
        tier = next((i for i, keys in enumerate(self._tiers) if key in keys), None)
        if tier is None or not self._store.available:
            return None
        del self._tiers[tier][key]  # first: what is evicted for it goes down meanwhile
        block = bring_up(self._store, key)
        self._owed += self._seconds[tier]
        self.found += self._size
        return block
