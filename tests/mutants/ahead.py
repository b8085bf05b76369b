"""Seeded bugs of plans made one step ahead: what begins where, what is held, and what is sealed."""

from __future__ import annotations

from typing import Any

from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.store import Store
from pageturner.scheduler.types import Plan, Sequence

from .bugs import Swap, bug

AHEAD = "a step planned ahead gives what it would have given later"
HELD = "what a step under way may use is given to nobody"


@bug(AHEAD, ahead=True)
def the_token_under_way_is_computed_once_more(swap: Swap) -> None:
    def plan_ahead(old: Any, scheduler: Scheduler, now: float) -> Plan:
        made: Plan = old(scheduler, now)
        for item in made.items:
            if item.start and item.start == len(item.sequence.tokens):
                item.start -= 1
        return made

    swap.wrap(Scheduler.plan_ahead, plan_ahead)


@bug(AHEAD, ahead=True)
def a_plan_ahead_goes_on_behind_the_last_token(swap: Swap) -> None:
    def pending(old: Any, seq: Sequence) -> int:
        seq.limit += 1
        found: int = old(seq)
        seq.limit -= 1
        return found

    swap.wrap(Sequence.pending, pending)


@bug(AHEAD, ahead=True)
def blocks_are_sealed_while_they_are_computed(swap: Swap) -> None:
    def cache_full_blocks(old: Any, pool: BlockPool, seq: Sequence) -> None:
        computed = seq.computed
        seq.computed = min(computed + seq.inflight, len(seq.tokens))
        old(pool, seq)
        seq.computed = computed

    swap.wrap(BlockPool.cache_full_blocks, cache_full_blocks)


@bug(HELD, ahead=True)
def blocks_of_a_step_under_way_are_trimmed(swap: Swap) -> None:
    def trim(old: Any, pool: BlockPool, seq: Sequence) -> None:
        inflight, seq.inflight = seq.inflight, 0
        old(pool, seq)
        seq.inflight = inflight

    swap.wrap(BlockPool.trim, trim)


@bug(HELD, ahead=True)
def what_is_dropped_under_a_step_is_given_out_at_once(swap: Swap) -> None:
    def retire(old: Any, store: Store, block: int) -> None:
        under_way, store.under_way = store.under_way, False
        old(store, block)
        store.under_way = under_way

    swap.wrap(Store._retire, retire)


@bug(HELD, ahead=True)
def blocks_of_a_step_under_way_go_with_an_abort(swap: Swap) -> None:
    def abort(scheduler: Scheduler, id: int) -> None:
        for kind in scheduler.pool.kinds:
            under_way, kind.store.under_way = kind.store.under_way, False
            for seq in scheduler._leaving:
                kind.store.truncate(kind.table(seq), 0)
            kind.store.under_way = under_way

    swap.after(Scheduler.abort, abort)
