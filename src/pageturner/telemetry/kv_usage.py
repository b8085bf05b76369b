"""KV usage: what the blocks of a pool are used for, and where those of all owners go, in tokens.

Owns the account. It costs a look at each sequence, never at each block: the store counts
references.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import Store
from pageturner.scheduler.types import Sequence


def kv_usage(sequences: Iterable[Sequence], store: Store, block_size: int) -> dict[str, float]:
    """Return where the full blocks of these owners go, in tokens. They own all blocks of the store
    that are used.

    kv_reserved  what their blocks hold, each block once
    kv_used      positions of these that hold KV somebody needs, each once
    kv_wasted    the rest of them: what the last block of a sequence has not needed yet (MISSION:
                 internal waste; external waste is none, since any block serves anybody)
    kv_saved     positions that more than one sequence needs and that are there once: what sharing
                 saves
    """
    needed, blocks = 0, 0
    # shared block -> positions of it that each sequence needs
    partial = defaultdict[int, list[int]](list)
    for seq in sequences:
        needed += seq.computed
        blocks += len(seq.blocks)
        place, filled = divmod(seq.computed, block_size)
        if place < len(seq.blocks) and store.refs[seq.blocks[place]] > 1:
            partial[seq.blocks[place]].append(filled)
    # a shared block saves as much as it holds for each reference but one; of those that are not
    # full for everybody, what is not needed must be taken off again
    saved = store.extra_refs * block_size
    for block, fills in partial.items():
        saved -= sum(block_size - filled for filled in fills)
        if len(fills) == store.refs[block]:
            saved += block_size - max(fills)
    reserved, used = (blocks - store.extra_refs) * block_size, needed - saved
    return {
        "kv_reserved": reserved,
        "kv_used": used,
        "kv_wasted": reserved - used,
        "kv_saved": saved,
    }


def pool_stats(pool: BlockPool) -> dict[str, float]:
    """Figures of the full blocks, and those of the sliding ones and of the states of recurrent
    layers, where there are any, by names with "recent_" and "state_"."""
    figures = store_stats(pool.full)
    if pool.window:
        figures |= store_stats(pool.sliding, "recent_")
    if pool.states.num_blocks:
        figures |= store_stats(pool.states, "state_")
        figures["state_hits"] = pool.state_hits
        figures["state_missed_tokens"] = pool.state_missed_tokens
    return figures


def store_stats(store: Store, prefix: str = "") -> dict[str, float]:
    """Gauges and counters. Shared blocks are in more than one table."""
    used, shared = store.num_blocks - store.available, store.shared
    names = ("blocks_used", "blocks_cached", "blocks_shared", "blocks_total", "evictions", "copies")
    figures = (used, len(store.cached), shared, store.num_blocks, store.evictions, store.copied)
    return {prefix + name: figure for name, figure in zip(names, figures, strict=True)}
