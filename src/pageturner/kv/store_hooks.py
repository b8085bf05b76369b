"""Several who are told by one store: its hooks hold one function each.

Owns how they are put one behind the other. Must not know who is told.
"""

from __future__ import annotations

from collections.abc import Callable

from pageturner.scheduler.store import Store

Hook = Callable[[bytes, int], None]


def add_block_hooks(store: Store, on_publish: Hook, on_evict: Hook) -> None:
    """Call these hooks of a store too, behind those that are called already."""
    store.on_publish, store.on_evict = (
        _both(store.on_publish, on_publish),
        _both(store.on_evict, on_evict),
    )


def _both(first: Hook, second: Hook) -> Hook:
    def hook(key: bytes, block: int) -> None:
        first(key, block)
        second(key, block)

    return hook
