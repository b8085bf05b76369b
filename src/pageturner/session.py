"""Sessions: the three verbs of paged memory in the caller's hand: append, fork, free.

Owns which tokens a session has and when the memory behind them may go. Must not know how anything
is scheduled or computed: the engine's owner (LLM) answers, and keeps the KV of an answer pinned
until told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pageturner.params import SamplingParams


class SessionOwner(Protocol):
    """The owner of the engine: LLM."""

    def encode(self, text: str) -> list[int]: ...
    def advance(
        self, sessions: Sequence[Session], params: SamplingParams | None = None
    ) -> list[Any]: ...
    def unpin(self, id: int) -> None: ...
    def pinned(self, id: int) -> tuple[int, int]: ...


@dataclass(slots=True)
class _Pin:
    """KV that stays as long as a session holds it."""

    id: int
    holders: int = 1


class Session:
    """Tokens that grow, and the KV of those that were computed, which stays in memory until `free`.

    `tokens` are the prompt and everything appended and generated, `lora` is the adapter of its
    answers. Memory is shared with every session that was forked from this one, block by block,
    until they part. Also a context manager, which frees it.
    """

    def __init__(self, owner: SessionOwner, tokens: Sequence[int], lora: str = "") -> None:
        self.tokens = list(tokens)
        self.lora = lora
        self._owner = owner
        self._pin: _Pin | None = None
        self._freed = False

    def append(self, more: str | Sequence[int]) -> Session:
        """Go on with a text or tokens; their KV is computed with the next answer. Returns the
        session."""
        self.check_open()
        self.tokens += self._owner.encode(more) if isinstance(more, str) else more
        return self

    def fork(self, k: int = 1) -> list[Session]:
        """k more sessions that begin with all of this one and share its memory."""
        self.check_open()
        forks = []
        for _ in range(k):
            fork = Session(self._owner, self.tokens, self.lora)
            fork._pin = self._pin
            if self._pin is not None:
                self._pin.holders += 1
            forks.append(fork)
        return forks

    def generate(self, params: SamplingParams | None = None) -> Any:
        """One answer (a Completion), which becomes part of the session. `LLM.advance` does it for
        many at once. ClientError where it cannot run."""
        return self._owner.advance([self], params)[0]

    def free(self) -> None:
        """Let the memory go; nothing can be done with the session any more. Twice is once."""
        self._let_go()
        self._freed = True

    @property
    def stats(self) -> dict[str, int]:
        """tokens, and the blocks that keep the KV of their beginning: all, and those that others
        share."""
        kept, shared = (0, 0) if self._pin is None else self._owner.pinned(self._pin.id)
        others = self._pin is not None and self._pin.holders > 1
        return {
            "tokens": len(self.tokens),
            "blocks": kept,
            "blocks_shared": kept if others else shared,
        }

    def add_answer(self, tokens: Sequence[int], pin: int | None) -> None:
        """Add an answer that came; `pin` is the id under which its KV stays, None if it does not.
        Called by the owner."""
        self.tokens += tokens
        if pin is not None:
            self._let_go()
            self._pin = _Pin(pin)

    def check_open(self) -> None:
        """ValueError if it was freed."""
        if self._freed:
            raise ValueError("the session was freed: fork it before that, or begin a new one")

    def _let_go(self) -> None:
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.holders -= 1
            if pin.holders == 0:
                self._owner.unpin(pin.id)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
