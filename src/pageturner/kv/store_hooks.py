"""A store of blocks as slower memory uses it: several who are told by its hooks, which hold one
function each, and blocks that come up.

Owns how hooks are put one behind the other, and how a block gets into a store. Must not know who is
told, nor where a block comes from.
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


def bring_up(
    store: Store, key: bytes, write: Callable[[int], None] = lambda block: None
) -> int | None:
    """Make a block findable whose bytes come from elsewhere, as if it had been computed here and
    released. None where no block can be taken now. write: puts the bytes into the block."""
    if not store.available:
        return None
    table: list[int] = []
    store.write(table, 0, 1)
    block = table[0]
    write(block)
    store.publish(table, 0, key)
    store.truncate(table, 0)
    return block
