"""The backlog of an engine: tokens yet to compute, as its length predictor sees it.

Owns the sum over the sequences that wait or run. Routers place requests by it. Must not know who
asks.
"""

from __future__ import annotations

from collections.abc import Collection

from pageturner.policies.length_predictor import LengthPredictor
from pageturner.scheduler.types import Sequence

MAX_LOOKED_AT = (
    64  # sequences, evenly among all: a prediction takes some 30 us, and this is asked 4 times a s
)


def backlog(sequences: Collection[Sequence], predictor: LengthPredictor) -> dict[str, float]:
    """Figures of an engine with these sequences.

    backlog_sequences  how many there are
    backlog_tokens     of their prompts not yet computed, and of their answers predicted (the
                       median) and not yet there
    backlog_answer     predicted length of one answer of theirs; absent where there is none
    """
    every = list(sequences)
    if not every:
        return {"backlog_sequences": 0.0, "backlog_tokens": 0.0}
    step = -(-len(every) // MAX_LOOKED_AT)
    seen = every[::step]
    lengths = [_answer(seq, predictor) for seq in seen]
    left = sum(
        max(0, seq.prompt_len - seq.computed) + length - seq.generated
        for seq, length in zip(seen, lengths, strict=True)
    )
    return {
        "backlog_sequences": float(len(every)),
        "backlog_tokens": left * len(every) / len(seen),
        "backlog_answer": sum(lengths) / len(seen),
    }


def _answer(seq: Sequence, predictor: LengthPredictor) -> float:
    """Return the predicted answer length of a sequence; embeddings have only a prompt."""
    return predictor.length(seq) if seq.limit > seq.prompt_len else 0.0
