"""Norms of queries and keys that each head has of its own.

Owns what they compute. Must not know what computes heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageturner.kernels.base import F32


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """LayerNorms without a bias, of each head with weights of its own (StableLM 2 12B).

    q    weights of queries [heads, head_dim]
    k    weights of keys [KV heads, head_dim]
    """

    q: F32
    k: F32
    eps: float

    def __call__(self, q: F32, k: F32) -> tuple[F32, F32]:
        """The norms of q [T, heads * head_dim] and k [T, KV heads * head_dim]."""
        return self._normed(q, self.q), self._normed(k, self.k)

    def _normed(self, x: F32, weights: F32) -> F32:
        heads = x.reshape(-1, *weights.shape).astype(np.float64)
        heads -= heads.mean(axis=-1, keepdims=True)
        heads /= np.sqrt(np.square(heads).mean(axis=-1, keepdims=True) + self.eps)
        return (heads.astype(np.float32) * weights).reshape(x.shape)
