"""Pooling, from the hidden rows of a prompt to what is sent of them: sums that are exact, however
it is computed.

A step gives the sum of the rows that it computed, as whole numbers: their sum is the same in any
order and in any parts, so the pooled row does not depend on chunks, company, preemption or
restarts. Must not know what becomes of it (text/pooled_sum.py).
"""

from __future__ import annotations

import numpy as np

from pageturner.kernels.base import F32, Array, Ops
from pageturner.models.decoder import Decoder
from pageturner.request import POOLED_UNIT
from pageturner.scheduler.types import Item

LARGEST = 2.0**19  # of a number: a sum of as many rows stays below 2 ** 63 units

Pooled = tuple[int, bytes]  # as Event.pooled


def pool(decoder: Decoder, ops: Ops, items: list[Item], hidden: Array) -> dict[int, Pooled | None]:
    """Item -> how many positions of its prompt were computed, and the sum of those of their rows
    that count, for items whose request has a pooling; None: they are not numbers. Rows of hidden
    [R, d] before the final norm: first those of items at their ends, in order, then those of
    `scored` positions."""
    if not any(item.sequence.request.params.pooling for item in items):
        return {}
    found: dict[int, Pooled | None] = {}
    last, scored = 0, sum(item.drafted + 1 for item in items if item.wants_logits)
    for i, item in enumerate(items):
        rows = dict(zip(item.scored, range(scored, scored + len(item.scored)), strict=True))
        if item.wants_logits:
            rows[item.sequence.prompt_len - 1] = last
            last += item.drafted + 1
        scored += len(item.scored)
        if item.sequence.request.params.pooling and rows:
            counted = [row for position, row in rows.items() if _counts(position, item)]
            values = (
                decoder.normed(ops.take_rows(hidden, np.array(counted, np.int32)))
                if counted
                else None
            )
            found[i] = _sum(values, len(rows))
    return found


def _counts(position: int, item: Item) -> bool:
    """Return whether the row of this position is part of the pooled one."""
    kind = item.sequence.request.params.pooling
    return kind == "mean" or position == (0 if kind == "cls" else item.sequence.prompt_len - 1)


def _sum(values: F32 | None, positions: int) -> Pooled | None:
    if values is None:
        return positions, b""
    if not (np.abs(values) < LARGEST).all():
        return None
    units = np.rint(values.astype(np.float64) / POOLED_UNIT).astype(np.int64)
    return positions, units.sum(axis=0).tobytes()
