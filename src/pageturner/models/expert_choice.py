"""The choice of experts by their scores and a bias, and within groups of them.

Owns which experts are chosen and what they weigh. Must not know what computes scores or experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageturner.kernels.base import F32, I32


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The `top_k` experts of the largest scores plus `bias` [experts], ties by id; of `groups` of
    as many experts each only in those `kept` whose `best` largest sum to most (DeepSeek-V2, arXiv
    2405.04434, section 2.1.3; V3, arXiv 2412.19437, section 2.1.2). Weights are divided by their sum
    and `extra`."""

    top_k: int
    normalise: bool
    bias: F32 | None = None
    groups: int = 1
    kept: int = 1
    best: int = 1
    extra: float = 0.0

    def __call__(self, scores: F32) -> tuple[I32, F32]:
        """Ids, ascending, and weights, both [T, top_k], of scores [T, experts]. Weights are made of
        the scores alone."""
        wanted = scores.copy() if self.bias is None else scores + self.bias
        groups = wanted.reshape(len(wanted), self.groups, -1)
        merits = np.sort(groups)[:, :, -self.best :].sum(axis=2)
        left_out = np.argsort(-merits, kind="stable")[:, self.kept :]
        np.put_along_axis(groups, left_out[:, :, None], np.float32(-np.inf), 1)
        best = np.argsort(-wanted, kind="stable")[:, : self.top_k]
        ids = np.sort(best).astype(np.int32)
        weights = np.take_along_axis(scores, ids, 1)
        if self.normalise:
            weights /= np.add.accumulate(weights, axis=1)[:, -1:] + np.float32(self.extra)
        return ids, weights
