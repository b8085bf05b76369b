"""What the steps of a loaded model need, and the work of a packed step.

Owns the way from weights, KV types and arrays to observe/work.py. Must not know what is done with the counts.
"""

from __future__ import annotations

import numpy as np

from pageturner.kernels.base import Batch
from pageturner.models.decoder import Decoder
from pageturner.observe.work import Needs, StepWork


def needs_of(decoder: Decoder, kv_dtype: str) -> Needs:
    """By the weights as they are packed. Windows count as far as sequences can be longer than they are."""
    spec, sizes = decoder.spec, decoder.sizes
    layers, ending, experts, last = (sizes[name] for name in ("layers", "ending", "experts", "last_experts"))
    chosen = spec.experts.top_k / spec.experts.count if spec.experts else 1.0
    pair = 4.0 * spec.heads * spec.head_dim  # query times key, weight times value
    position = decoder.kv_spec(1, 1, kv_dtype).bytes_per_token / spec.layers
    whole, recent = spec.layers - decoder.windowed, decoder.windowed
    return Needs(
        int8=2.0 * (layers.int8 + chosen * experts.int8),
        fp32=2.0 * (layers.fp32 + chosen * experts.fp32),
        layers=layers.nbytes,
        ending_int8=2.0 * (ending.int8 + chosen * last.int8),
        ending_fp32=2.0 * (ending.fp32 + chosen * last.fp32),
        ending=ending.nbytes,
        pair=pair * whole,
        position=position * whole,
        experts=experts.nbytes + last.nbytes,
        chosen=chosen,
        recent_pair=pair * recent,
        recent_position=position * recent,
        window=decoder.window if recent else 0,
    )


def work_of(batch: Batch) -> StepWork:
    """Of all rows, padding too; a block that several sequences share counts for each of them."""
    rows = len(batch.tokens)
    # for so few numbers Python's sum is faster than numpy's
    context, pairs = sum(batch.context_len.tolist()), sum(batch.positions.tolist()) + rows
    return StepWork(rows, len(batch.context_len), len(batch.logit_rows), context, pairs)


def recent_of(batch: Batch, window: int) -> StepWork | None:
    """The same as layers see it that see `window` positions; None where that hides nothing."""
    if not window or max(batch.context_len.tolist()) <= window:
        return None
    starts = batch.query_start
    context = sum(np.minimum(batch.context_len, starts[1:] - starts[:-1] + (window - 1)).tolist())
    pairs = sum(np.minimum(batch.positions, window - 1).tolist()) + len(batch.positions)
    return work_of(batch)._replace(context=context, pairs=pairs)
