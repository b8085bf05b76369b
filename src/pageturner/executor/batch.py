"""Packing, from a plan to the int32 arrays of a step. The only place that turns sequences into
arrays.

Must not know any backend, policy or sampling parameter.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pageturner.kernels.base import I32, Batch, StateTables
from pageturner.kernels.recurrent import CHUNK, RecurrentCache
from pageturner.scheduler.store import GONE
from pageturner.scheduler.types import Plan, Sequence

Rows = Mapping[Sequence, int]
NO_ROWS: Rows = {}


def i32(values: list[int]) -> I32:
    """Several times as fast as numpy's own conversion, and it touches little: a step finds cold
    caches."""
    return np.frombuffer(array("i", values), np.int32) if values else np.empty(0, np.int32)


class BlockRows:
    """The block ids of sequences as bytes of int32: few of them change from one plan to the next,
    and making them anew takes longer than all else of a step."""

    def __init__(self) -> None:
        self._kept: dict[Sequence, tuple[list[int], bytes]] = {}

    def of(self, plan: Plan) -> list[bytes]:
        before = self._kept
        self._kept = {}
        for item in plan.items:
            blocks = item.sequence.blocks
            found = before.get(item.sequence)
            if found is None or found[0] != blocks:
                found = list(blocks), i32(blocks).tobytes()
            self._kept[item.sequence] = found
        return [row for _, row in self._kept.values()]


def pack(
    plan: Plan,
    block_size: int,
    scratch_block: int,
    before: Rows = NO_ROWS,
    kept: BlockRows | None = None,
) -> Batch:
    """The rows of a plan, items first and in order, then its ballast.

    Logits rows, in item order: for each item that reaches its last token, that row and one for each
    draft token. Then, again in item order, the rows for prompt logprobs. Ballast is packed as
    anonymous sequences that read `scratch_block` and write nowhere (slot -1).

    before: the row of the step under way that chooses a sequence's next token; `tokens` has -1 -
    row for it. kept: what the plans before left
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts: list[int] = []
    wanted: list[int] = []
    scored: list[int] = []
    for item in plan.items:
        sequence, start, blocks = item.sequence, item.start, item.sequence.blocks
        end = start + item.n
        first = len(tokens) - start  # of a row = its position + first
        if item.n == 1:
            known = start < len(sequence.tokens)
            tokens.append(sequence.tokens[start] if known else -1 - before[sequence])
            positions.append(start)
            slots.append(blocks[start // block_size] * block_size + start % block_size)
        else:
            tokens += sequence.tokens[start:end]
            if end > len(sequence.tokens):
                tokens += sequence.draft[: end - len(sequence.tokens)]
            positions += range(start, end)
            slots += [
                blocks[p // block_size] * block_size + p % block_size for p in range(start, end)
            ]
        starts.append(len(tokens))
        contexts.append(end)
        if item.wants_logits:
            wanted += range(len(tokens) - 1 - item.drafted, len(tokens))
        if sequence.request.logits_from is not None:
            scored += [first + position for position in item.scored]
    for rows, context in plan.ballast:
        tokens += [0] * rows
        positions += range(context - rows, context)
        slots += [-1] * rows
        starts.append(len(tokens))
        contexts.append(context)
    rows_of_blocks = (kept or BlockRows()).of(plan) + [b""] * len(plan.ballast)
    width = -(-max(contexts, default=1) // block_size)
    block_table = _table(rows_of_blocks, width, scratch_block)
    wanted += scored
    of_rows, of_sequences = (i32(tokens), i32(positions)), (i32(starts), i32(contexts))
    return Batch(*of_rows, *of_sequences, block_table, i32(slots), i32(wanted))


def _table(rows: list[bytes], width: int, scratch_block: int) -> I32:
    """[S, width] blocks; what a row lacks is `scratch_block`."""
    scratch = i32([scratch_block]).tobytes()
    whole = [row[: 4 * width] + scratch * (width - len(row) // 4) for row in rows]
    return np.frombuffer(bytearray().join(whole), np.int32).reshape(len(rows), width)


def state_tables(plan: Plan, cache: RecurrentCache, scratch: tuple[int, int]) -> StateTables:
    """The slots and blocks that the recurrent layers of a step read and write
    (kernels.base.StateTables). Ballast has a state and a tail that nobody needs, `scratch`."""
    reads: list[int] = []
    writes: list[int] = []
    tails: list[int] = []
    for s, item in enumerate(plan.items):
        states, tail, end = item.sequence.states, item.sequence.tail, item.start + item.n
        first, last = item.start // CHUNK, (end - 1) // CHUNK
        reads.append(states[first])
        for chunk in range(first + 1, end // CHUNK + 1):
            if states[chunk] != GONE:
                writes += (s, chunk, states[chunk])
        tails += (tail[first], tail[last] if last > first else GONE)
    for _ in plan.ballast:
        reads.append(scratch[0])
        tails += (scratch[1], GONE)
    return StateTables(i32(reads), i32(writes).reshape(-1, 3), i32(tails).reshape(-1, 2), cache)


def pack_sliding(batch: Batch, plan: Plan, block_size: int, scratch_block: int) -> Batch:
    """The same step for layers with a window, whose KV lies in `Sequence.sliding`. Places that were
    given back read `scratch_block`, or would: no kernel looks at what the window hides."""
    block_table = np.full_like(batch.block_table, scratch_block)
    for row, item in zip(block_table, plan.items, strict=False):
        released = item.sequence.sliding.released
        sliding = item.sequence.sliding[: len(row)]
        row[released : len(sliding)] = sliding[released:]
    owner = np.repeat(np.arange(len(block_table), dtype=np.int32), np.diff(batch.query_start))
    slots = (
        block_table[owner, batch.positions // block_size] * block_size
        + batch.positions % block_size
    )
    slots[batch.slots < 0] = -1
    return replace(batch, block_table=block_table, slots=slots)
