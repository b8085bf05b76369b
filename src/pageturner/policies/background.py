"""Requests in the background: they take only what others leave of a step.

A request of the priority BACKGROUND stands behind all others in every order, however long it has
waited, and the batching policy is asked about the others as if it were not there. Behind them the
background gets

    nothing                     in a step with a prompt of others, or while one of them waits to
                                join
    a quarter of their tokens   in a step in which they only decode, and one token at least: they
                                get slower by less than that, and the background is not forgotten
    an IDLE_SHARE of a step     when nobody else is there: whoever comes waits for such a short step
                                at most

Its sequences keep their places and their KV meanwhile. Who must leave for others to have room is
decided by the server, which knows everybody that is to come (server/engine_client/background.py).

Owns these shares. Must not know where requests come from, nor what any policy or order does;
policy_stack.py asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pageturner.request import BACKGROUND
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.order import Key, Order
from pageturner.scheduler.types import Sequence

BESIDE = 4  # tokens of others for one of the background, where they only decode
IDLE_SHARE = 1 / 16  # of the token budget, for a step that has nobody else in it
MAX_IDLE = 32  # tokens of such a step, however large the budget is


class BackgroundWork:
    """The background requests of one scheduler."""

    def __init__(self) -> None:
        self._here: set[int] = set()  # their ids

    @property
    def listener(self) -> Listener:
        return Listener(queued=self._queued, ended=self._ended)

    @property
    def present(self) -> bool:
        """True while any background request is here."""
        return bool(self._here)

    def _queued(self, seq: Sequence) -> None:
        if in_background(seq):
            self._here.add(seq.request.id)

    def _ended(self, seq: Sequence, finish: str | None) -> None:
        self._here.discard(seq.request.id)

    def wrap_order(self, order: Order) -> Order:
        """Return the same order, which never hears of the background: that stands behind it, by
        arrival."""

        def key(seq: Sequence, now: float) -> Key:
            if in_background(seq):
                return (1.0, seq.request.arrival, seq.request.id)
            return (0.0, *order.key(seq, now)) if self._here else order.key(seq, now)

        def begin_step(running: Iterable[Sequence], now: float) -> None:
            order.begin_step([seq for seq in running if not in_background(seq)], now)

        inner = order.listener
        heard = {
            name: _foreground_only(getattr(inner, name)) for name in ("queued", "served", "ended")
        }
        return Order(key, begin_step, replace(inner, **heard))


def in_background(seq: Sequence) -> bool:
    return seq.request.priority == BACKGROUND


def _foreground_only(hear: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return hear and (lambda seq, *rest: None if in_background(seq) else hear(seq, *rest))


def background_tokens(budget: int, granted: int, *, prompts: bool) -> int:
    """Return how many tokens the background may have in a step in which others were granted so
    many."""
    if prompts and granted:
        return 0
    if granted:
        return max(1, granted // BESIDE)
    return max(1, min(MAX_IDLE, int(budget * IDLE_SHARE)))
