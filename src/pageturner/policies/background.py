"""Requests in the background: they take only what others leave of a step.

A request of the priority BACKGROUND stands behind all others in every order, however long it has waited, and
the batching policy is asked about the others as if it were not there. Behind them the background gets

    nothing                     in a step with a prompt of others, or while one of them waits to join
    a quarter of their tokens   in a step in which they only decode, and one token at least: they get slower
                                by less than that, and the background is not forgotten
    an IDLE_SHARE of a step     when nobody else is there: whoever comes waits for such a short step at most

Its sequences keep their places and their KV meanwhile. Who must leave for others to have room is decided by
the server, which knows everybody that is to come (server/engine_client/background.py).

Owns these shares. Must not know where requests come from, nor what any policy or order does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pageturner.request import BACKGROUND
from pageturner.scheduler.batching import Asks, Policy, View, WaitCause
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.order import Key, Order
from pageturner.scheduler.types import Sequence, State

BESIDE = 4  # tokens of others for one of the background, where they only decode
IDLE_SHARE = 1 / 16  # of the token budget, for a step that has nobody else in it
MOST_IDLE = 32  # tokens of such a step, however large the budget is


class BackgroundWork:
    """What is in the background of one scheduler. policy: the batching policy of the background itself."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._here: set[int] = set()  # ids

    @property
    def listener(self) -> Listener:
        return Listener(queued=self._queued, ended=self._ended)

    def _queued(self, seq: Sequence) -> None:
        if in_background(seq):
            self._here.add(seq.request.id)

    def _ended(self, seq: Sequence, finish: str | None) -> None:
        self._here.discard(seq.request.id)

    # -- the order -------------------------------------------------------------------------------------------
    def wrap_order(self, order: Order) -> Order:
        """The same order, which never hears of the background: that stands behind it, by arrival."""
        told, key = order.listener, order.key

        def queued(seq: Sequence) -> None:
            if told.queued and not in_background(seq):
                told.queued(seq)

        def served(seq: Sequence, n: int, now: float) -> None:
            if told.served and not in_background(seq):
                told.served(seq, n, now)

        def ended(seq: Sequence, finish: str | None) -> bool | None:
            return told.ended(seq, finish) if told.ended and not in_background(seq) else None

        def place(seq: Sequence, now: float) -> Key:
            if in_background(seq):
                return (1.0, seq.request.arrival, seq.request.id)
            return (0.0, *key(seq, now)) if self._here else key(seq, now)

        def begin_step(running: Iterable[Sequence], now: float) -> None:
            order.begin_step(_others(running) if self._here else running, now)

        listener = replace(
            told,
            queued=told.queued and queued,
            served=told.served and served,
            ended=told.ended and ended,
        )
        return Order(place, begin_step, listener)

    # -- the policy ------------------------------------------------------------------------------------------
    def wrap_policy(self, policy: Policy) -> Policy:
        """The same policy for everybody else, and behind them the background."""
        inner = policy.asks

        def asks(v: View) -> Asks:
            return self._asks(inner(v), v) if self._here else inner(v)

        return replace(policy, asks=asks)

    def _asks(self, front: Asks, v: View) -> Asks:
        lists = v.decoding, v.prefilling, v.waiting
        budget, back = (
            v.token_budget_left,
            tuple([seq for seq in one if in_background(seq)] for one in lists),
        )
        v.decoding, v.prefilling, v.waiting = map(_others, lists)
        prompts = bool(v.prefilling)
        yield from front
        joining = _others(lists[2])
        waits = any(seq.state is State.WAITING for seq in joining)
        prompts = prompts or any(seq.state is State.RUNNING for seq in joining)
        refused = v.refused
        if awaited := _awaited(v, (*back[0], *back[1])):
            yield awaited, awaited.pending
        v.limit(_share(budget, v.granted, prompts=prompts or (waits and v.granted > 0)))
        v.decoding, v.prefilling, v.waiting = back[0], back[1], [] if waits else back[2]
        if v.token_budget_left:
            yield from self._policy.asks(v)
        v.decoding, v.prefilling, v.waiting = lists
        v.refused = refused or v.refused


def in_background(seq: Sequence) -> bool:
    return seq.request.priority == BACKGROUND


def _others(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [seq for seq in sequences if not in_background(seq)]


def _awaited(v: View, running: Iterable[Sequence]) -> Sequence | None:
    """One of the background whose prompt somebody else waits for, to share its KV: its turn is theirs."""
    if v.refused is None or v.refused[1] is not WaitCause.PROMPT:
        return None
    return next((seq for seq in running if seq.request.id == v.refused[2]), None)


def _share(budget: int, granted: int, *, prompts: bool) -> int:
    """Tokens that the background may have beside so many that others were granted."""
    if prompts and granted:
        return 0
    if granted:
        return max(1, granted // BESIDE)
    return max(1, min(MOST_IDLE, int(budget * IDLE_SHARE)))
