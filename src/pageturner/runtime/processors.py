"""What forbids or reshapes logits before a token is chosen. A function of parameters and tokens so far,
nothing else.

Must not keep state: preemption, crash recovery and forking rely on every mask being recomputable.
"""

from __future__ import annotations

import numpy as np

from pageturner.core.types import Sequence
from pageturner.kernels.base import F32


def apply(logits: F32, sequences: list[Sequence]) -> None:
    """Write masks into logits [R, V], row r belonging to sequences[r]."""
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.min_tokens > sequence.generated and params.stop_ids:
            logits[row, list(params.stop_ids)] = -np.inf
