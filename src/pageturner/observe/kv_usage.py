"""KV usage: what the blocks of a pool are used for, and where those of all owners go, in tokens.

Owns the account. Walks all blocks and tables: for gauges that are read now and then, not for every step.
"""

from __future__ import annotations

from collections.abc import Iterable

from pageturner.core.blocks import BlockPool
from pageturner.core.store import Store
from pageturner.core.types import Sequence


def kv_usage(sequences: Iterable[Sequence], block_size: int) -> dict[str, float]:
    """Where the full blocks of these owners go, in tokens.

    kv_reserved  what their blocks hold, each block once
    kv_used      positions of these that hold KV somebody needs, each once
    kv_wasted    the rest of them: what the last block of a sequence has not needed yet (MISSION: internal
                 waste; external waste is none, since any block serves anybody)
    kv_saved     positions that more than one sequence needs and that are there once: what sharing saves
    """
    fill, wanted = dict[int, int](), 0
    for seq in sequences:
        wanted += seq.computed
        for i, block in enumerate(seq.blocks):
            filled = min(block_size, max(0, seq.computed - i * block_size))
            fill[block] = max(fill.get(block, 0), filled)
    reserved, used = len(fill) * block_size, sum(fill.values())
    names = ("kv_reserved", "kv_used", "kv_wasted", "kv_saved")
    figures = (reserved, used, reserved - used, wanted - used)
    return {name: float(figure) for name, figure in zip(names, figures, strict=True)}


def pool_stats(pool: BlockPool) -> dict[str, float]:
    """Figures of the full blocks, and with a window those of the sliding ones by names with "recent_"."""
    return store_stats(pool.full) | (store_stats(pool.sliding, "recent_") if pool.window else {})


def store_stats(store: Store, prefix: str = "") -> dict[str, float]:
    """Gauges and counters. Shared blocks are in more than one table."""
    used, shared = store.num_blocks - store.available, sum(refs > 1 for refs in store.refs)
    names = ("blocks_used", "blocks_cached", "blocks_shared", "blocks_total", "evictions", "copies")
    figures = (used, len(store.cached), shared, store.num_blocks, store.evictions, store.copied)
    return {prefix + name: float(figure) for name, figure in zip(names, figures, strict=True)}
