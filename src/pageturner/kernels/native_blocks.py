"""Whole KV blocks of the native backend as bytes.

Owns how they are read and written. Must not know what is in a block: all its layers lie side by side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.base import I32, KV


class NativeBlocks:
    """A part of NativeOps."""

    def block_bytes(self, kv: KV) -> int:
        """Bytes of one block, all layers."""
        return int(kv.memory.shape[1])

    def read_blocks(self, kv: KV, blocks: I32, out: NDArray[np.uint8]) -> None:
        """Copy the bytes of whole blocks to `out` [blocks, block_bytes]."""
        for block, row in zip(blocks.tolist(), out, strict=True):
            row[:] = kv.memory[block]

    def write_blocks(self, kv: KV, blocks: I32, data: NDArray[np.uint8]) -> None:
        """Give blocks the bytes that read_blocks found in others. ValueError for other numbers of bytes."""
        kv.memory[blocks] = data
