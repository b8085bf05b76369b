"""From a plan to the int32 arrays of a step. The only place that turns sequences into arrays.

Must not know any backend, policy or sampling parameter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pageturner.core.types import Plan
from pageturner.kernels.base import I32, Batch


def pack(plan: Plan, block_size: int, scratch_block: int) -> Batch:
    """The rows of a plan, items first and in order, then its ballast.

    Every item that reaches the end of its tokens gets one logits row, in item order; behind these come the
    rows of `scored` prompt positions, in item order too. Ballast is packed as anonymous sequences that read
    `scratch_block` and write nowhere (slot -1).
    """
    tokens: list[int] = []
    tables: list[list[int]] = []
    lengths: list[int] = []
    contexts: list[int] = []
    wanted: list[int] = []
    scored: list[int] = []
    for item in plan.items:
        sequence, n = item.sequence, item.n
        start = sequence.computed
        if n == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + n]
        tables.append(sequence.blocks)
        lengths.append(n)
        contexts.append(start + n)
        if item.wants_logits:
            wanted.append(len(tokens) - 1)
        if sequence.request.logits_from is not None:
            first = len(tokens) - n - start  # of a row = its position + first
            scored += [first + position for position in item.scored]
    real = len(tokens)
    for rows, context in plan.ballast:
        tokens += [0] * rows
        tables.append([scratch_block])
        lengths.append(rows)
        contexts.append(context)
    wanted += scored
    return _arrays(
        tokens, tables, lengths, contexts, wanted, real, len(plan.items), block_size, scratch_block
    )


def pack_recent(batch: Batch, plan: Plan, block_size: int, scratch_block: int) -> Batch:
    """The same step for layers with a window, whose KV lies in `Sequence.recent`. Places that were given back
    read `scratch_block`, or would: no kernel looks at what the window hides."""
    block_table = np.full_like(batch.block_table, scratch_block)
    for row, item in zip(block_table, plan.items, strict=False):
        gone, recent = item.sequence.gone, item.sequence.recent[: len(row)]
        row[gone : len(recent)] = recent[gone:]
    slots = _slots(block_table, batch.query_start, batch.positions, block_size)
    slots[batch.slots < 0] = -1
    return replace(batch, block_table=block_table, slots=slots)


def _slots(block_table: I32, query_start: I32, positions: I32, block_size: int) -> I32:
    """Where each row's K and V go."""
    owner = np.repeat(np.arange(len(block_table), dtype=np.int32), np.diff(query_start))
    slots = block_table[owner, positions // block_size] * block_size + positions % block_size
    return slots.astype(np.int32, copy=False)


def _arrays(
    tokens: list[int],
    tables: list[list[int]],
    lengths: list[int],
    contexts: list[int],
    wanted: list[int],
    real: int,
    items: int,
    block_size: int,
    scratch_block: int,
) -> Batch:
    """Vectorised over rows: a decode step of 64 sequences costs tens of microseconds."""
    rows_of = np.array(lengths, np.int32)
    context_len = np.array(contexts, np.int32)
    query_start = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(rows_of, out=query_start[1:])
    width = max((int(context_len.max()) + block_size - 1) // block_size, 1) if lengths else 1
    block_table = np.full((len(tables), width), scratch_block, np.int32)
    for row, blocks in zip(block_table[:items], tables, strict=False):
        used = blocks[:width]
        row[: len(used)] = used
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), rows_of)
    first = context_len - rows_of - query_start[:-1]  # position of a row = its index + first[owner]
    positions = np.arange(len(tokens), dtype=np.int32) + first[owner]
    slots = _slots(block_table, query_start, positions, block_size)
    slots[real:] = -1
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        block_table=block_table,
        slots=slots,
        logit_rows=np.array(wanted, np.int32),
    )
