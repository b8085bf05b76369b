"""Seeded bugs of the scheduler: what is lost, repeated, started, taken from whom, and let in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pageturner.request import Event, Request
from pageturner.scheduler import sharing
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Item, Output, Plan, Result, Sequence, State

from .bugs import Swap, bug, nothing

INVARIANT = "batching never changes an answer"
ONCE = "a token is never lost or repeated"
ENDS = "a sequence ends where its request says"
RESUMED = "who was taken once goes on at its next token"
DRAFTS = "drafts change no answer"
ALONE = "who fails or leaves takes nobody with it, and leaves nothing behind"
RANK = "who gives way has the largest rank, and the smallest never does"
GRANTS = "a step keeps the budget and the number of sequences"
COUNTS = "what came from the cache, and what was computed twice, is counted once"
SEARCH = "a beam search gives what it gives alone"
SCORED = "prompt logprobs come once each"


def committed(swap: Swap, change: Callable[[Plan, Result], None]) -> None:
    """What a step gave is changed before it is taken in."""

    def commit(old: Any, scheduler: Scheduler, plan: Plan, result: Result, now: float) -> Any:
        change(plan, result)
        return old(scheduler, plan, result, now)

    swap.wrap(Scheduler.commit, commit)


def behind(swap: Swap, change: Callable[[Item, Output, int], None]) -> None:
    """Sequences that go on are changed behind a commit; told what was computed of each before it."""

    def commit(old: Any, scheduler: Scheduler, plan: Plan, result: Result, now: float) -> Any:
        before = [item.sequence.computed for item in plan.items]
        events = old(scheduler, plan, result, now)
        for item, output, computed in zip(plan.items, result.outputs, before, strict=True):
            if item.sequence.state is State.RUNNING and not item.sequence.request.params.beam_width:
                change(item, output, computed)
        return events

    swap.wrap(Scheduler.commit, commit)


def asked(swap: Swap, change: Callable[[Request], Request]) -> None:
    """The scheduler takes in another request than it was given."""
    swap.wrap(Scheduler.add, lambda old, scheduler, request: old(scheduler, change(request)))


def params(request: Request, **fields: Any) -> Request:
    return replace(request, params=replace(request.params, **fields))


# -- answers
@bug(INVARIANT)
def answers_of_two_that_run_together_are_exchanged(swap: Swap) -> None:
    def change(plan: Plan, result: Result) -> None:
        told = [output for output in result.outputs if output.tokens]
        if len(told) == 2:
            told[0].tokens, told[1].tokens = told[1].tokens[:1], told[0].tokens[:1]

    committed(swap, change)


@bug(INVARIANT)
def a_step_of_many_reads_one_position_further(swap: Swap) -> None:
    def change(item: Item, output: Output, computed: int) -> None:
        if len(item.sequence.tokens) - item.sequence.computed > 1:
            item.sequence.computed += 1

    behind(swap, change)


@bug(ONCE)
def the_last_event_of_a_step_is_lost(swap: Swap) -> None:
    def commit(old: Any, *args: Any) -> list[Event]:
        events: list[Event] = old(*args)
        return events[:-1] if len(events) > 2 else events

    swap.wrap(Scheduler.commit, commit)


@bug(ONCE)
def a_token_that_was_told_is_forgotten(swap: Swap) -> None:
    def change(item: Item, output: Output, computed: int) -> None:
        if len(output.tokens) > 1:
            item.sequence.tokens.pop()

    behind(swap, change)


@bug(ENDS)
def stop_ids_ignored(swap: Swap) -> None:
    asked(swap, lambda request: params(request, stop_ids=()))


@bug(ENDS)
def min_tokens_ignored(swap: Swap) -> None:
    asked(swap, lambda request: params(request, min_tokens=0))


@bug(ENDS)
def one_token_too_many(swap: Swap) -> None:
    asked(
        swap, lambda request: params(request, max_tokens=(request.params.max_tokens or 10**6) + 1)
    )


@bug(RESUMED)
def resumed_without_its_tokens(swap: Swap) -> None:
    def change(request: Request) -> Request:
        return replace(request, resume=tuple(replace(one, tokens=()) for one in request.resume))

    asked(swap, change)


@bug(RESUMED, config={"max_queue": 3})
def resumed_refused_by_a_full_queue(swap: Swap) -> None:
    def add(old: Any, scheduler: Scheduler, request: Request) -> None:
        old(scheduler, replace(request, resume=()))
        if request.resume:
            scheduler.abort(request.id)
            old(scheduler, request)

    swap.wrap(Scheduler.add, add)


@bug(SCORED)
def prompt_logprobs_repeated_after_a_preemption(swap: Swap) -> None:
    def plan(old: Any, scheduler: Scheduler, now: float) -> Plan:
        made: Plan = old(scheduler, now)
        for item in made.items:
            if item.sequence.recomputed:
                item.sequence.scored = 0
        return made

    swap.wrap(Scheduler.plan, plan)


@bug(SCORED)
def a_prompt_logprob_is_lost(swap: Swap) -> None:
    def commit(old: Any, *args: Any) -> list[Event]:
        return [replace(event, prompt_logprobs=event.prompt_logprobs[1:]) for event in old(*args)]

    swap.wrap(Scheduler.commit, commit)


# -- drafts
@bug(DRAFTS)
def rejected_drafts_count_as_computed(swap: Swap) -> None:
    def change(item: Item, output: Output, computed: int) -> None:
        if computed + item.n > len(item.sequence.tokens):
            item.sequence.computed = min(computed + item.n, len(item.sequence.blocks) * 1000)

    behind(swap, change)


@bug(DRAFTS)
def drafts_taken_unverified(swap: Swap) -> None:
    def change(plan: Plan, result: Result) -> None:
        for item, output in zip(plan.items, result.outputs, strict=True):
            if item.drafted and output.tokens:
                output.tokens[:] = [*item.sequence.draft[: item.drafted], output.tokens[-1]]

    committed(swap, change)


@bug(DRAFTS)
def draft_past_the_end_of_the_sequence(swap: Swap) -> None:
    def change(item: Item, output: Output, computed: int) -> None:
        item.sequence.draft = list(output.draft)

    behind(swap, change)


@bug(DRAFTS, load="crowded")
def draft_kept_over_a_preemption(swap: Swap) -> None:
    def release(old: Any, pool: BlockPool, seq: Sequence) -> None:
        draft = seq.draft
        old(pool, seq)
        if draft:
            seq.tokens += draft[:1]

    swap.during(Scheduler.plan, BlockPool.release, release)


# -- who fails or leaves
@bug(ALONE)
def failures_ignored(swap: Swap) -> None:
    def change(plan: Plan, result: Result) -> None:
        for output in result.outputs:
            if output.failure is not None:
                output.failure, output.tokens = None, [0]

    committed(swap, change)


@bug(ALONE)
def one_failure_ends_its_neighbour(swap: Swap) -> None:
    def change(plan: Plan, result: Result) -> None:
        for output, other in zip(result.outputs, result.outputs[1:], strict=False):
            if other.failure is not None:
                output.failure = other.failure

    committed(swap, change)


@bug(ALONE)
def blocks_of_who_leaves_are_lost(swap: Swap) -> None:
    swap.during(Scheduler.abort, BlockPool.release, nothing)


@bug(ALONE)
def blocks_of_who_ends_are_lost(swap: Swap) -> None:
    swap.during(Scheduler.commit, BlockPool.release, nothing)


@bug(ALONE)
def blocks_go_back_under_a_plan(swap: Swap) -> None:
    plans: dict[Scheduler, Plan] = {}

    def plan(old: Any, scheduler: Scheduler, now: float) -> Plan:
        plans[scheduler] = old(scheduler, now)
        return plans[scheduler]

    def abort(old: Any, scheduler: Scheduler, id: int) -> bool:
        done: bool = old(scheduler, id)
        for item in plans[scheduler].items if scheduler in plans else ():
            if item.sequence.request.id == id and item.sequence.blocks:
                scheduler.pool.release(item.sequence)
        return done

    swap.wrap(Scheduler.plan, plan)
    swap.wrap(Scheduler.abort, abort)


# -- who gives way, who is let in
@bug(RANK)
def the_smallest_rank_gives_way(swap: Swap) -> None:
    swap.wrap(Scheduler._victim, lambda old, scheduler, asking: scheduler.running[0])


@bug(RANK, load="long")
def who_was_granted_already_gives_way(swap: Swap) -> None:
    def victim(old: Any, scheduler: Scheduler, asking: Sequence) -> Sequence | None:
        largest = scheduler.running[-1]
        return largest if largest.rank != asking.rank else old(scheduler, asking)

    swap.wrap(Scheduler._victim, victim)


@bug(RANK)
def preempted_and_aborted(swap: Swap) -> None:
    def plan(old: Any, scheduler: Scheduler, now: float) -> Plan:
        made: Plan = old(scheduler, now)
        for id in made.preempted:
            scheduler.abort(id)
        return made

    swap.wrap(Scheduler.plan, plan)


@bug(GRANTS)
def one_more_runs(swap: Swap) -> None:
    def init(old: Any, scheduler: Scheduler, *args: Any, max_num_seqs: int, **options: Any) -> None:
        old(scheduler, *args, max_num_seqs=max_num_seqs + 1, **options)

    swap.wrap(Scheduler.__init__, init)


@bug(GRANTS)
def the_budget_is_larger_than_it_says(swap: Swap) -> None:
    def init(old: Any, scheduler: Scheduler, *args: Any, token_budget: int, **options: Any) -> None:
        old(scheduler, *args, token_budget=token_budget and token_budget + 3, **options)

    swap.wrap(Scheduler.__init__, init)


# -- counts
@bug(COUNTS, load="crowded")
def recomputation_counted_as_a_hit(swap: Swap) -> None:
    def attach(old: Any, pool: BlockPool, seq: Sequence) -> int:
        seq.max_computed_tokens = 0
        gained: int = old(pool, seq)
        return gained

    swap.wrap(BlockPool.attach, attach)


@bug(COUNTS, load="crowded")
def hits_forgotten_by_a_preemption(swap: Swap) -> None:
    def release(old: Any, pool: BlockPool, seq: Sequence) -> None:
        old(pool, seq)
        seq.cached = 0

    swap.during(Scheduler.plan, BlockPool.release, release)


# -- searches
@bug(SEARCH, searches=0.5)
def beams_that_are_dropped_keep_their_blocks(swap: Swap) -> None:
    swap.during(sharing.apply_branches, BlockPool.release, nothing)


@bug(SEARCH, searches=0.5)
def length_penalty_ignored(swap: Swap) -> None:
    asked(swap, lambda request: params(request, length_penalty=0.0))


@bug(SEARCH, searches=0.5)
def searches_end_too_early(swap: Swap) -> None:
    asked(swap, lambda request: params(request, early_stopping=True))
