"""What the engine notes of a step that it begins: who is suspected if it does not come back."""

from __future__ import annotations

from pageturner.ipc.ledger import Ledger
from pageturner.scheduler.types import Item, Sequence


def note_begin(ledger: Ledger | None, now: float, items: list[Item]) -> None:
    """Only these are suspects now, and the time of a hang begins anew."""
    if ledger is not None:
        ledger.begin(now, [item.sequence.request.id for item in items])


def note_rows(ledger: Ledger | None, items: list[Item]) -> None:
    """For whoever watches each step."""
    if ledger is not None and ledger.watched:
        ledger.note([(i.sequence.request.id, i.n, _of_prompt(i.sequence)) for i in items])


def _of_prompt(sequence: Sequence) -> bool:
    """Whether what it is about to compute was computed before, or is of its prompt."""
    return sequence.computed < max(sequence.prompt_len, sequence.reached)
