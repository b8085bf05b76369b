"""Blocks that must not be read: tests fill them with NaN, so that any read of one shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from pageturner.kernels.reference_arrays import PagedKV


def poison_blocks(kv: Any, blocks: list[int]) -> None:
    """Fill blocks with NaN in every layer. kv: storage of the reference or of the native backend."""
    if isinstance(kv, PagedKV):
        for array in (kv.blocks(kv.k), kv.blocks(kv.v)):
            array[:, blocks] = np.nan
    else:
        kv.memory[blocks] = 0xFF  # a NaN in each of the KV types, and as the scale of int8
