"""Logprobs of prompts: logits of many rows, some of them at a time.

Must not know what becomes of them.
"""

from __future__ import annotations

import numpy as np

from pageturner.executor import sampler
from pageturner.kernels.base import Array, Ops
from pageturner.models.decoder import Decoder
from pageturner.request import PromptLogprob
from pageturner.scheduler.types import Item

SCORED_ROWS = (
    64  # prompt positions whose logits are in memory at once: 39 MB with a vocabulary of 152k
)


def score_prompts(
    decoder: Decoder, ops: Ops, items: list[Item], hidden: Array, first: int
) -> dict[int, list[PromptLogprob | None]]:
    """Item -> logprobs of the prompt tokens behind its `scored` positions. The rows of these are
    rows from `first` on of hidden [R, d], those of items whose rows are pooled among them."""
    wanted = [
        (
            row,
            i,
            item.sequence.tokens[position + 1],
            item.sequence.request.params.prompt_logprobs or 0,
        )
        for row, (i, item, position) in enumerate(
            ((i, item, position) for i, item in enumerate(items) for position in item.scored), first
        )
        if not item.sequence.request.params.pooling
    ]
    scores: dict[int, list[PromptLogprob | None]] = {}
    for start in range(0, len(wanted), SCORED_ROWS):
        part = wanted[start : start + SCORED_ROWS]
        rows = np.array([w[0] for w in part], np.int32)
        names = [items[i].sequence.request.adapter for _, i, _, _ in part]
        logits = decoder.logits(ops.take_rows(hidden, rows), decoder.adapters_of(names))
        found = sampler.score(ops, logits, [w[2] for w in part], [w[3] for w in part])
        for (_, i, _, _), score in zip(part, found, strict=True):
            scores.setdefault(i, []).append(score)
    return scores
