"""Seeded bugs of sessions: claims, their bounds and their order, who may begin."""

from __future__ import annotations

from typing import Any

from tests.scheduler import session_bench

from pageturner.policies.eviction_order import EvictionOrder
from pageturner.policies.kept_sessions import KeptSessions
from pageturner.policies.session_claims import KeptConversation
from pageturner.policies.session_starts import SessionStarts
from pageturner.policies.session_worth import Gaps, worth

from .bugs import Swap, bug, nothing

KEPT = "what a session keeps is found"
BOUNDED = "sessions keep no more than they may"
CHEAP = "who is silent is given up before who is not"
WAITS = "one session too many waits, and not for ever"


@bug(KEPT, promises=(session_bench.kept_is_found,))
def nothing_is_claimed(swap: Swap) -> None:
    swap.wrap(KeptSessions._claim, nothing)


@bug(KEPT, promises=(session_bench.kept_is_found,))
def what_is_claimed_goes_first(swap: Swap) -> None:
    swap.wrap(EvictionOrder.oldest, lambda old, order: list(order)[-1])


@bug(BOUNDED, promises=(session_bench.claims_are_bounded,))
def nothing_is_given_up_at_the_end_of_a_turn(swap: Swap) -> None:
    swap.wrap(KeptSessions._bound, nothing)


@bug(BOUNDED, promises=(session_bench.claims_are_bounded,))
def sessions_may_keep_everything(swap: Swap) -> None:
    swap.wrap(KeptSessions.most, lambda old, sessions: 1 << 30)


@bug(CHEAP, promises=(session_bench.silence_makes_cheap,))
def silence_costs_nothing(swap: Swap) -> None:
    def as_if_it_had_just_ended(old: Any, one: KeptConversation, now: float, *rest: float) -> float:
        return float(old(one, one.ended, *rest))

    swap.wrap(worth, as_if_it_had_just_ended)


@bug(CHEAP, promises=(session_bench.silence_makes_cheap,))
def the_dearest_goes_first(swap: Swap) -> None:
    swap.wrap(KeptSessions.worth, lambda old, sessions, one: -old(sessions, one))


@bug(WAITS, promises=(session_bench.one_too_many_waits,))
def everybody_may_begin(swap: Swap) -> None:
    swap.wrap(SessionStarts.held, lambda *_: set())


@bug(WAITS, promises=(session_bench.one_too_many_waits,))
def everybody_is_waited_for_as_long_as_it_keeps(swap: Swap) -> None:
    swap.wrap(Gaps.awaited_until, lambda old, gaps, one: one.ended + 1e6)
