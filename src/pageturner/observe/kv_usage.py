"""KV usage: where the blocks of all owners go, in tokens.

Owns the account. Walks all block tables: for gauges that are read now and then, not for every step.
"""

from __future__ import annotations

from collections.abc import Iterable

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
