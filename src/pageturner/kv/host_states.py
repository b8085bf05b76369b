"""States of recurrent layers in host memory: those that leave their slots go there, and come back.

Owns what goes down and what comes up. Must not know which states are worth having (the store says
so), nor where the KV beside them is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pageturner.kv.kv_tiers import HostMemory
from pageturner.kv.store_hooks import add_block_hooks
from pageturner.scheduler.store import Store


class HostStates:
    """Keeps at most `nbytes` of the states [slots, bytes] of a store, behind its hooks. A state that
    is not what was written is computed again."""

    def __init__(self, store: Store, states: NDArray[np.uint8], nbytes: int) -> None:
        self._store, self._states = store, states
        self.host = HostMemory(nbytes // states.shape[1], states.shape[1])
        self._hits = self._stored = 0
        self._forgetting = False
        add_block_hooks(store, lambda key, slot: None, self._evict)
        store.on_miss, store.below = self._fetch, self.host.__contains__

    def _evict(self, key: bytes, slot: int) -> None:
        if self._forgetting or self._store.useless or not self.host.most:
            return

        def read(out: NDArray[np.uint8]) -> None:
            out[:] = self._states[slot]

        self.host.put(key, read, lambda gone, row: None)
        self._stored += 1

    def _fetch(self, key: bytes) -> int | None:
        """Bring the state of this key into a slot."""
        if not self._store.available:
            return None
        with self.host.taken(key) as data:
            if data is None:
                return None
            table: list[int] = []
            self._store.write(table, 0, 1)
            slot = table[0]
            self._states[slot] = data
            self._store.publish(table, 0, key)
            self._store.truncate(table, 0)
            self._hits += 1
            return slot

    def forget(self, others: Callable[[], None]) -> None:
        """Find nothing again. others: has the device forget it."""
        self._forgetting = True
        try:
            others()
        finally:
            self._forgetting = False
        self.host.forget()

    def stats(self) -> dict[str, float]:
        """The states that are there, and counters: found, stored, not what was written."""
        return {
            "state_host_blocks": float(len(self.host)),
            "state_host_hits": float(self._hits),
            "state_host_stored": float(self._stored),
            "state_host_errors": float(self.host.errors),
        }
