"""Who computes what the native backend is asked: its threads on their cores, and the other ranks.

Owns the calls that say so. Must not know what is computed.
"""

from __future__ import annotations

import os
from typing import Any


class NativeThreads:
    """A part of NativeOps."""

    _engine: Any

    def pin_threads(self, cores: list[int] | None = None) -> None:
        """Keep each helping thread on one of these cores, or of those that this process may use; the caller
        stays free."""
        self._engine.pin_threads(cores or sorted(os.sched_getaffinity(0)))

    def join(self, ranks: Any) -> None:
        """From here on layers are slices, whose sums are over `ranks` (kernels/comm.py)."""
        self._engine.join(ranks)

    def join_stages(self, ranks: Any) -> None:
        """From here on layers are those of one stage, whose rows come from `ranks` and go to them."""
        self._engine.join_stages(ranks)
