"""Seeded bugs of what plugs into the scheduler: policies, orders, reservations, and the door before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.scheduler import promises

from pageturner.policies import fairness
from pageturner.policies.batching import POLICIES, AdaptiveChunk
from pageturner.policies.orders import ORDERS, Adaptive, Context, Estimates
from pageturner.policies.reserves import RESERVES
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.slo_admission import SloAdmission
from pageturner.policies.step_time import StepTimeModel
from pageturner.request import Event, Refused, Request
from pageturner.scheduler.batching import Policy, View
from pageturner.scheduler.order import Order
from pageturner.scheduler.types import Sequence

from .bugs import Swap, bug, nothing

Asks = Any


# -- policies: what a bug does to the options, to the view, or to the asks
def told(swap: Swap, name: str, **options: Any) -> None:
    """A policy is built with other options than were given."""
    make = POLICIES[name]
    swap.entry(
        POLICIES, name, lambda given, step_times: make(replace(given, **options), step_times)
    )


def filtered(
    swap: Swap, name: str, look: Callable[[View], None], leave_out: Callable[[View], Any]
) -> None:
    """A policy whose view is changed once it asks, and some of whose asks never reach the scheduler."""
    make = POLICIES[name]

    def broken(options: SchedulerConfig, step_times: StepTimeModel) -> Policy:
        policy = make(options, step_times)

        def asks(v: View) -> Asks:
            left_out, inner, granted = leave_out(v), policy.asks(v), None
            try:
                while True:
                    ask = inner.send(granted)
                    look(v)
                    granted = 0 if ask[0] in left_out else (yield ask)
            except StopIteration:
                pass

        return replace(policy, asks=asks)

    swap.entry(POLICIES, name, broken)


ORCA = (
    "orca: a token for everybody in each step, and room for all of a request from its admission on"
)
WHOLE = "prefill_first: prompts in one piece, and only one alone over the budget"
RATIO = "served_ratio: prompts are let in by the ratio or after so many steps"
BATCHES = (
    "static, window: a batch starts full or when it is due, is padded, and nobody joins or leaves"
)
ADAPTIVE_CHUNK = "adaptive_chunk: steps settle at the target"
STEERED = {"promises": (promises.steps_keep_the_target, promises.few_enough_run)}


@bug(ORCA, config={"policy": "orca"})
def orca_keeps_no_room(swap: Swap) -> None:
    make = POLICIES["orca"]
    swap.entry(POLICIES, "orca", lambda *given: replace(make(*given), reserve=None))


@bug(ORCA, config={"policy": "orca"})
def orca_lets_decodes_wait(swap: Swap) -> None:
    filtered(swap, "orca", nothing, lambda v: v.decoding if v.waiting else ())


@bug(WHOLE, config={"policy": "prefill_first"})
def prompts_share_a_step_over_the_budget(swap: Swap) -> None:
    filtered(swap, "prefill_first", lambda v: v.lift(10**6), lambda v: ())


@bug(WHOLE, config={"policy": "prefill_first"})
def a_prompt_above_the_budget_never_joins(swap: Swap) -> None:
    filtered(
        swap,
        "prefill_first",
        nothing,
        lambda v: [s for s in v.waiting if v.need(s) > v.token_budget_left],
    )


@bug(RATIO, config={"policy": "served_ratio"})
def the_ratio_is_zero(swap: Swap) -> None:
    told(swap, "served_ratio", served_ratio=0.0)


@bug(RATIO, config={"policy": "served_ratio", "served_ratio": 9.0, "served_steps": 3})
def steps_are_never_counted(swap: Swap) -> None:
    told(swap, "served_ratio", served_steps=10**9)


@bug(BATCHES, config={"policy": "static"})
def static_has_no_patience(swap: Swap) -> None:
    told(swap, "static", static_patience=0.0)


@bug(BATCHES, config={"policy": "static"})
def a_full_batch_waits_for_one_more(swap: Swap) -> None:
    make = POLICIES["static"]

    def broken(given: SchedulerConfig, step_times: StepTimeModel) -> Policy:
        return make(replace(given, static_batch=given.static_batch + 1), step_times)

    swap.entry(POLICIES, "static", broken)


@bug(BATCHES, config={"policy": "window"})
def a_short_batch_waits_for_ever(swap: Swap) -> None:
    told(swap, "window", window_ms=1e12)


@bug(BATCHES, config={"policy": "static"})
def batches_without_padding(swap: Swap) -> None:
    swap.wrap(View.pad, nothing)


@bug(ADAPTIVE_CHUNK, config={"policy": "adaptive_chunk"}, **STEERED)
def adaptive_chunk_never_slows(swap: Swap) -> None:
    told(swap, "adaptive_chunk", tpot_ms=1e6)


@bug(ADAPTIVE_CHUNK, config={"policy": "adaptive_chunk"}, **STEERED)
def adaptive_chunk_ignores_its_first_values(swap: Swap) -> None:
    told(swap, "adaptive_chunk", knee_tokens=0, knee_seqs=0)


@bug(ADAPTIVE_CHUNK, config={"policy": "adaptive_chunk"}, **STEERED)
def adaptive_chunk_where_steps_take_no_time(swap: Swap) -> None:
    swap.wrap(StepTimeModel.took, nothing)


@bug(ADAPTIVE_CHUNK, config={"policy": "adaptive_chunk"}, **STEERED)
def adaptive_chunk_never_recovers(swap: Swap) -> None:
    lowest: dict[AdaptiveChunk, int] = {}

    def call(old: Any, policy: AdaptiveChunk, v: View) -> Asks:
        v.limit(lowest.get(policy, v.token_budget_left))
        yield from old(policy, v)
        lowest[policy] = min(lowest.get(policy, policy.budget()), policy.budget())

    swap.wrap(AdaptiveChunk.__call__, call)


DRAIN = "everything ends within a stated number of steps"


@bug(DRAIN, config={"policy": "chunked"})
def the_newest_is_never_asked(swap: Swap) -> None:
    filtered(swap, "chunked", nothing, lambda v: v.decoding[-1:])


@bug(DRAIN, config={"policy": "chunked"})
def somebody_is_never_let_in(swap: Swap) -> None:
    filtered(swap, "chunked", nothing, lambda v: [s for s in v.waiting if s.request.id % 7 == 3])


# -- orders: what a bug does to the key, to the context, or to what is noticed
Key = tuple[float, ...]


def rekeyed(swap: Swap, name: str, change: Callable[[Key], Key]) -> None:
    make = ORDERS[name]

    def broken(context: Context) -> Order:
        order = make(context)
        return replace(order, key=lambda seq, now: change(order.key(seq, now)))

    swap.entry(ORDERS, name, broken)


def knowing(swap: Swap, name: str, **fields: Any) -> None:
    """An order is built with another context than was given."""
    make = ORDERS[name]
    swap.entry(ORDERS, name, lambda context: make(replace(context, **fields)))


def backwards(key: Key) -> Key:
    """Of those not aged, (1, what the order goes by ..., arrival, id), the last goes first."""
    return key if key[0] != 1 else (1, *(-part for part in key[1:-2]), *key[-2:])


def by_arrival(key: Key) -> Key:
    return key if key[0] != 1 else (1, *key[-2:])


FCFS = "fcfs: first come, first served"
PRIORITY = "priority: the smallest class first, then by arrival"
AGEING = "ageing: nothing overtakes a request that has waited long enough, and before that the order holds"
SJF = "sjf: the least predicted work first"
PREFIX = "prefix: the longest cached prefix first"
DEADLINE = "deadline: the least slack first, and those that are lost behind the others"
ADAPTIVE = "adaptive: the batch is not all long ones, and waiting counts"
FAIR = "fair: the tenant that was served least goes first"


@bug(FCFS, config={"order": "fcfs"})
def last_come_first_served(swap: Swap) -> None:
    rekeyed(swap, "fcfs", lambda key: tuple(-part for part in key))


@bug(FCFS, config={"order": "fcfs"})
def fcfs_by_the_id_alone(swap: Swap) -> None:
    rekeyed(swap, "fcfs", lambda key: (-key[-1] % 3, *key))


@bug(PRIORITY, config={"order": "priority"})
def priority_reversed(swap: Swap) -> None:
    rekeyed(swap, "priority", backwards)


@bug(PRIORITY, config={"order": "priority"})
def priority_ignored(swap: Swap) -> None:
    rekeyed(swap, "priority", by_arrival)


@bug(AGEING, config={"order": "sjf"})
def nobody_ages(swap: Swap) -> None:
    knowing(swap, "sjf", ageing=1e12)


@bug(AGEING, config={"order": "sjf"})
def everybody_is_aged(swap: Swap) -> None:
    knowing(swap, "sjf", ageing=0.0)


@bug(AGEING, config={"order": "fair"}, promises=(promises.fair_ages,))
def tenants_never_age(swap: Swap) -> None:
    knowing(swap, "fair", ageing=1e12)


@bug(SJF, config={"order": "sjf"}, promises=(promises.shortest_first,))
def the_longest_job_first(swap: Swap) -> None:
    rekeyed(swap, "sjf", backwards)


@bug(SJF, config={"order": "sjf"}, promises=(promises.shortest_first,))
def sjf_without_the_answer(swap: Swap) -> None:
    knowing(swap, "sjf", output_weight=0.0)


@bug(SJF, config={"order": "sjf"})
def sjf_with_work_for_what_is_cached(swap: Swap) -> None:
    knowing(swap, "sjf", cached=lambda seq: 0)


@bug(PREFIX, config={"order": "prefix"}, promises=(promises.cached_prefixes_first,))
def the_shortest_prefix_first(swap: Swap) -> None:
    rekeyed(swap, "prefix", backwards)


@bug(PREFIX, config={"order": "prefix"}, promises=(promises.cached_prefixes_first,))
def prefixes_never_looked_up_again(swap: Swap) -> None:
    swap.wrap(Estimates.begin_step, nothing)


URGENT = (
    promises.prompts_take_time,
    promises.whole_answers_by_deadline,
    promises.deadlines_are_met,
)


@bug(DEADLINE, config={"order": "deadline"}, promises=URGENT)
def the_most_slack_first(swap: Swap) -> None:
    rekeyed(swap, "deadline", lambda key: backwards(key) if key[1:2] == (0,) else key)


@bug(DEADLINE, config={"order": "deadline"}, promises=URGENT)
def the_lost_come_first(swap: Swap) -> None:
    rekeyed(swap, "deadline", lambda key: (1, 0, -1e9, *key[2:]) if key[:2] == (1, 1) else key)


class Without:
    """What steps take, but for some figures."""

    def __init__(self, pace: StepTimeModel, **figures: float) -> None:
        self._pace, self._figures = pace, figures

    def __getattr__(self, name: str) -> Any:
        return self._figures[name] if name in self._figures else getattr(self._pace, name)


def unaware(swap: Swap, name: str, **figures: float) -> None:
    make = ORDERS[name]

    def broken(context: Context) -> Order:
        step_times: Any = Without(context.step_times, **figures)
        return make(replace(context, step_times=step_times))

    swap.entry(ORDERS, name, broken)


@bug(DEADLINE, config={"order": "deadline"}, promises=URGENT)
def deadlines_without_the_prompt(swap: Swap) -> None:
    unaware(swap, "deadline", each=0.0)


@bug(DEADLINE, config={"order": "deadline"}, promises=URGENT)
def deadlines_without_the_answer(swap: Swap) -> None:
    unaware(swap, "deadline", step=0.0)


MIXED = (promises.waiting_counts, promises.batches_are_mixed)


@bug(ADAPTIVE, config={"order": "adaptive"}, promises=MIXED)
def adaptive_backwards(swap: Swap) -> None:
    rekeyed(swap, "adaptive", backwards)


@bug(ADAPTIVE, config={"order": "adaptive"}, promises=MIXED)
def adaptive_forgets_what_runs(swap: Swap) -> None:
    def served(old: Any, order: Adaptive, seq: Sequence, *args: Any) -> None:
        old(order, seq, *args)
        order.ended(seq, None)

    swap.wrap(Adaptive.served, served)


SHARES = (
    promises.fair_in_one_step,
    promises.fair_shares,
    promises.fair_prompts_and_answers,
    promises.fair_nothing_saved_up,
)


@bug(FAIR, config={"order": "fair"}, promises=SHARES)
def fair_to_the_greedy(swap: Swap) -> None:
    rekeyed(swap, "fair", backwards)


@bug(FAIR, config={"order": "fair"}, promises=SHARES)
def fair_by_arrival(swap: Swap) -> None:
    rekeyed(swap, "fair", by_arrival)


@bug(FAIR, config={"order": "fair"}, promises=SHARES)
def fair_with_answers_for_nothing(swap: Swap) -> None:
    knowing(swap, "fair", output_weight=0.0)


@bug(FAIR, config={"order": "fair"}, promises=SHARES)
def fair_with_prompts_for_nothing(swap: Swap) -> None:
    def served(old: Any, tenants: fairness.Tenants, seq: Sequence, n: int, now: float) -> None:
        computed, seq.computed = seq.computed, max(seq.computed, seq.prompt_len)
        old(tenants, seq, n, now)
        seq.computed = computed

    swap.wrap(fairness.Tenants.served, served)


@bug(FAIR, config={"order": "fair"}, promises=SHARES)
def fair_saves_up_what_was_not_used(swap: Swap) -> None:
    def queued(old: Any, tenants: fairness.Tenants, seq: Sequence) -> None:
        known = {name: tenant.counter for name, tenant in tenants._tenants.items()}
        old(tenants, seq)
        tenants._tenants[seq.request.tenant].counter = known.get(seq.request.tenant, 0.0)

    swap.wrap(fairness.Tenants.queued, queued)


# -- reservations
PREDICTED = "predicted: room for what answers usually take"


@bug(PREDICTED, config={"admission": "predicted"}, promises=(promises.predicted_room,))
def predicted_keeps_no_room(swap: Swap) -> None:
    swap.entry(RESERVES, "predicted", RESERVES["none"])


@bug(PREDICTED, config={"admission": "predicted"}, promises=(promises.predicted_room,))
def predicted_keeps_room_for_all(swap: Swap) -> None:
    swap.entry(RESERVES, "predicted", RESERVES["full"])


# -- the door
DEADLINES = "who is past its deadline ends, at once and nobody else"
DOOR = "refused at the door only for what is true, and with a time that helps"


@bug(DEADLINES, punctual=True)
def deadlines_that_nobody_watches(swap: Swap) -> None:
    swap.wrap(SloAdmission.expired, lambda old, door, now: [])


@bug(DEADLINES, punctual=True)
def deadlines_seen_too_early(swap: Swap) -> None:
    swap.wrap(SloAdmission.expired, lambda old, door, now: old(door, now + 0.02))


@bug(DEADLINES, punctual=True)
def ends_that_are_not_told(swap: Swap) -> None:
    def expired(old: Any, door: SloAdmission, now: float) -> list[Event]:
        events: list[Event] = old(door, now)
        return events[:1]

    swap.wrap(SloAdmission.expired, expired)


@bug(DOOR, punctual=True)
def come_again_at_once(swap: Swap) -> None:
    def add(old: Any, door: SloAdmission, request: Request, now: float) -> None:
        try:
            old(door, request, now)
        except Refused as refused:
            raise Refused(refused.code, refused.message) from refused

    swap.wrap(SloAdmission.add, add)


@bug(DOOR, punctual=True, config={"max_queue": 3})
def taken_once_and_refused_then(swap: Swap) -> None:
    def add(old: Any, door: SloAdmission, request: Request, now: float) -> None:
        old(door, replace(request, resume=()), now)
        if request.resume:
            door.forget(request.id)
            door._stack.scheduler.abort(request.id)
            old(door, request, now)

    swap.wrap(SloAdmission.add, add)


@bug(DOOR, punctual=True)
def an_idle_engine_refuses(swap: Swap) -> None:
    def add(old: Any, door: SloAdmission, request: Request, now: float) -> None:
        if request.ttft_target is not None and door._stack.scheduler.load == (0, 0, 0):
            raise Refused("ttft_target_unreachable", "", 1.0)
        old(door, request, now)

    swap.wrap(SloAdmission.add, add)
