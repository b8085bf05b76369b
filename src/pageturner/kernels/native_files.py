"""Packed matrices of the native backend in files: what `--packed-cache` reads and writes.

Owns the names of errors, and what is written down of a matrix. The bytes are native/stored.cpp's.
"""

from __future__ import annotations

from typing import Any

from pageturner.kernels.base import Weight


class StoredWeights:
    """The part of `NativeOps` that models/packed_cache.py asks for as `WeightStore`."""

    _engine: Any

    def store_weight(self, weight: Weight, fd: int, offset: int) -> tuple[list[Any], int]:
        """Write a packed matrix to a file: what `fetch_weight` needs, and a checksum. OSError."""
        try:
            checksum = self._engine.store(weight, fd, offset)
        except RuntimeError as e:
            raise OSError(None, str(e)) from e
        return [weight.kind, weight.bits, *weight.shape, weight.ordered], checksum

    def fetch_weight(self, about: list[Any], fd: int, offset: int) -> tuple[Weight, int]:
        """A matrix that `store_weight` wrote, and its checksum. OSError; ValueError for nonsense."""
        kind, bits, n, k, ordered = about
        try:
            weight, checksum = self._engine.fetch(kind, bits, n, k, ordered, fd, offset)
        except RuntimeError as e:
            raise OSError(None, str(e)) from e
        return weight, checksum
