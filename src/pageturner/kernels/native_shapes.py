"""Heads of activations, as the native backend takes them apart and puts them together; no arithmetic.

Owns the order of options in bind.cpp's `attention`. Must not know how anything is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pageturner.kernels.base import F32, AttentionShape


def vector(values: tuple[float, ...]) -> F32 | None:
    """None for no values."""
    return np.array(values, np.float32) if values else None


def attention_options(shape: AttentionShape) -> tuple[Any, ...]:
    """What `attention` takes behind the batch."""
    slopes, sinks = vector(shape.slopes), vector(shape.sinks)
    return shape.heads, shape.scale, shape.window, shape.soft_cap, slopes, shape.chunked, sinks


def first_of_heads(x: F32, shape: AttentionShape) -> F32:
    """With a latent KV the columns [T, heads * latent] of x [T, heads * head_dim] that are values; else x."""
    if not shape.latent:
        return x
    heads = x.reshape(len(x), shape.heads, shape.head_dim)[:, :, : shape.latent]
    return np.ascontiguousarray(heads).reshape(len(x), -1)


def joined(x: F32, y: F32, heads: int) -> F32:
    """Of each head its columns of x [T, heads * A], and behind them those of y [T, heads * B]."""
    parts = [a.reshape(len(a), heads, -1) for a in (x, y)]
    return np.concatenate(parts, axis=2).reshape(len(x), -1)
