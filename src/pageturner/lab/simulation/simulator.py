"""A discrete-event simulation around the engine's own scheduler: plan, let time pass, commit.

Owns simulated time and the order of what happens in it. Must not know how anything is scheduled
(that is scheduler/scheduler.py, the same as in the engine), placed (router/load_balancer.py) or
what a step costs (step_cost.py).

A request that arrives while a step is computed is taken when that step has ended, as the engine
does it. True lengths are known to `_Executor` alone: no scheduler, no placement can see them
(docs/adr/0006).
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any

from pageturner.kv.store_hooks import bring_up
from pageturner.lab.bench.prompt_alone import prompt_length
from pageturner.lab.bench.request_metrics import (
    CertainMisses,
    LatencyTargets,
    RequestClock,
    RequestMetrics,
)
from pageturner.lab.simulation.fast_forward import advance_alike, alike_steps
from pageturner.lab.simulation.fleet import (
    Roles,
    SimulatedFleet,
    SimulatedTiers,
    bring_prompt,
    fleet_of,
    fleets,
    tokens_there,
)
from pageturner.lab.simulation.replica_changes import Changes, StreamMoves
from pageturner.lab.simulation.step_cost import StepCost
from pageturner.lab.traffic.block_names import BlockNames
from pageturner.lab.traffic.traffic import END, Traffic, TrafficRequest
from pageturner.policies.drafts import PricedDrafts
from pageturner.policies.suffix_drafts import suffix_drafter
from pageturner.progress import Progress
from pageturner.request import Refused, Request, Resume
from pageturner.router.load_balancer import RoundRobin
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Item, Output, Plan, Result, Sequence
from pageturner.telemetry.work import work_of

MAX_LEAP = 512  # steps; an arrival in the middle makes the rest of the sums useless
CANCEL_INTERVAL = 256  # events from one question whether the run was cancelled to the next
MAX_AWAKE = 4096  # replicas with a scheduler; of more, idle ones keep the keys of their KV alone
COUNTERS = ("prompt_tokens", "cached_tokens", "preemptions", "recomputed_tokens")
STATE_COUNTERS = ("state_hits", "state_missed_tokens")  # where layers are recurrent
Watch = Callable[[int, float, float, Plan], None]  # gets replica, begin, end and plan of each step


@dataclass(frozen=True, slots=True)
class Coming:
    """A request on its way to a replica.

    clock     its times; at: seconds
    computed  its KV comes with it, to `replica` where that was chosen
    again     its replica has ended, and it was counted before
    """

    asked: TrafficRequest
    clock: RequestClock
    at: float
    computed: bool = False
    replica: int = -1
    again: bool = False

    def request(self, id: int) -> Request:
        """The request as an engine gets it, with the tokens that it has already."""
        made = self.asked.engine_request(id)
        if not self.clock.tokens:
            return made
        said = self.asked.answer_tokens(0, self.clock.tokens)
        return replace(made, resume=(Resume(0, tuple(said)),))

    def homeless(self, at: float) -> Coming:
        """The same request without a replica, from `at` on."""
        return replace(self, at=at, computed=False, replica=-1, again=True)


@dataclass(slots=True)
class _InFlight:
    """A request that is being answered, or whose prompt is computed. ends: tokens of its answer;
    output: the tokens that a step in the middle of the answer gives."""

    asked: TrafficRequest
    replica: int
    clock: RequestClock
    ends: int
    output: Output
    fleet: SimulatedFleet
    coming: Coming


class _Executor:
    """Gives every sequence that computed all it has its next token, and the last one where it
    ends."""

    def __init__(self, open: dict[int, _InFlight], *, drafts: bool) -> None:
        self._open = open
        self._drafts = drafts
        self._nothing = Output()
        self._end = Output([END])

    def run(self, plan: Plan, drafts: PricedDrafts | None) -> Result:
        """Compute a step; drafts: of its replica, for answers whose every token is known."""
        outputs = [self._output(item) for item in plan.items]
        if drafts is not None:
            pairs = zip(plan.items, outputs, strict=True)
            known = [pair for pair in pairs if self._is_known(pair[0].sequence)]
            if known:
                drafts.propose([item for item, _ in known], [output for _, output in known])
        return Result(outputs)

    def _is_known(self, seq: Sequence) -> bool:
        return not isinstance(self._open[seq.request.id].asked.answer, int)

    def _output(self, item: Item) -> Output:
        seq = item.sequence
        if seq.computed + item.n < len(seq.tokens):
            return self._nothing
        one = self._open[seq.request.id]
        left = one.ends - seq.generated - 1
        if isinstance(one.asked.answer, int):
            return self._end if left <= 0 else one.output
        if left <= 0:
            return Output([END])  # a draft may be written into it
        count = item.drafted
        if not count:
            return Output(one.asked.answer_tokens(seq.generated, 1))
        tokens = [*one.asked.answer_tokens(seq.generated, left), END]
        right = 0
        while right < min(count, left) and tokens[right] == seq.draft[right]:
            right += 1
        return Output(tokens[: right + 1])

    def middle(self, seq: Sequence, count: int) -> list[int]:
        """The next `count` tokens of an answer, of which none is the last."""
        return self._open[seq.request.id].asked.answer_tokens(seq.generated, count)

    def remaining(self, seq: Sequence) -> int:
        """Tokens that it certainly gets one by one before its last one; none before the first,
        whose time is noted at once."""
        one = self._open[seq.request.id]
        if self._drafts and self._is_known(seq):
            return 0
        return one.ends - seq.generated - 1 if one.clock.first >= 0 else 0


@dataclass(slots=True)
class _Replica:
    """One engine.

    ends   when each of the steps under way ends, several of them where alike steps are taken at
           once
    plan   the plan of the step under way, None for several
    event  the number of its newest event, -1 for none: older events in the queue are void
    """

    scheduler: Scheduler
    inbox: deque[Request] = field(default_factory=deque)
    plan: Plan | None = None
    begin: float = 0.0
    ends: list[float] = field(default_factory=list)
    event: int = -1
    tiers: SimulatedTiers | None = None
    drafts: PricedDrafts | None = None

    def add_counts(self, sums: Counter[str]) -> None:
        """Add what its scheduler and its tiers counted."""
        stats = self.scheduler.stats()
        for name in (*COUNTERS, *(name for name in STATE_COUNTERS if name in stats)):
            sums[name] += int(stats[name])
        sums["tier_tokens"] += self.tiers.found if self.tiers else 0

    def cached_keys(self) -> list[bytes] | None:
        """The keys of its cached KV, the next to be overwritten first. None where it holds more
        than cached blocks: pins, a window."""
        pool = self.scheduler.pool
        if not pool.plain or self.scheduler.has_work or self.scheduler.load[2]:
            return None
        keys = [pool.full.keys[block] for block in pool.full.cached]
        return [key for key in keys if key is not None]


@dataclass(slots=True)
class ReplicaUsage:
    """Sums over all replicas: seconds busy, steps, the share of KV blocks in use, integrated over
    busy time, and the most requests that one of them had at a time."""

    busy: float = 0.0
    steps: int = 0
    leaps: int = 0
    blocks: float = 0.0
    fullest: float = 0.0
    most_open: int = 0

    def add(self, seconds: float, steps: int, share: float) -> None:
        self.busy += seconds
        self.steps += steps
        self.blocks += seconds * share
        self.fullest = max(self.fullest, share)


def _no_targets() -> CertainMisses:
    """Counts no misses that could end a run."""
    return CertainMisses(LatencyTargets(share=float("-inf")), 0)


def _one_replica() -> list[SimulatedFleet]:
    return fleets(1, None, RoundRobin, lambda: None)


@dataclass(eq=False)
class Simulator:
    """Replicas, their placement, a cost. `run` once.

    scheduler   makes the scheduler of a replica when it gets its first request
    num_blocks  KV blocks of each replica
    fleets      the replicas that answer; with `roles` those that compute prompts stand before them
    speculation  how drafts are made, where traffic holds the tokens of its answers
    leaps       whether steps that are alike may be taken at once (fast_forward.py)
    tiers       makes the slower memory of a replica, behind its pool
    changes     decides which replicas end and begin; moves: the streams of those that end
    misses      counts who misses a target; the run ends when it is hopeless
    cancelled   is asked now and then whether the result is still wanted
    names       names of blocks, which every scheduler listens to, where traffic is known by its
                pieces
    """

    scheduler: Callable[[], Scheduler]
    cost: StepCost
    num_blocks: int
    fleets: Several[SimulatedFleet] = field(default_factory=_one_replica)
    roles: Roles | None = None
    speculation: str = "off"
    leaps: bool = True
    watch: Watch | None = None
    tiers: Callable[[BlockPool], SimulatedTiers] | None = None
    changes: Changes | None = None
    moves: StreamMoves = field(default_factory=StreamMoves)
    misses: CertainMisses = field(default_factory=_no_targets)
    cancelled: Callable[[], bool] | None = None
    names: BlockNames | None = None

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics()
        self.usage = ReplicaUsage()
        self._replicas: dict[int, _Replica] = {}
        self._kept: dict[int, list[bytes]] = {}  # cached KV of replicas that have no scheduler now
        self._past = Counter[str]()  # what the schedulers counted that are gone
        self._waiting: list[Coming] = []  # while no replica takes requests
        self._open: dict[int, _InFlight] = {}
        self._now = 0.0  # when the step ends that is taken in
        self._executor = _Executor(self._open, drafts=self._drafter() is not None)
        self._ids = itertools.count(1)
        self._events: list[tuple[float, int, int, Coming | None]] = []
        self._order = itertools.count()
        self._turns = 0

    def _drafter(self) -> PricedDrafts | None:
        return suffix_drafter(self.speculation, lambda: self._now)

    # -- time --------------------------------------------------------------------------------------
    def run(self, traffic: Traffic, *, progress: bool | None = None) -> None:
        """Run until everything is answered. The results are in `metrics` and `usage`."""
        coming = traffic.arrivals()
        following = next(coming, None)
        done = 0
        if self.changes is not None:
            self.changes.begin(self, following.arrival if following is not None else 0.0)
        with Progress("simulating", traffic.total, enabled=progress) as line:
            while self._goes_on(following) and not self._over():
                at = self._events[0][0] if self._events else float("inf")
                if following is not None:
                    at = min(at, following.arrival)
                if self.changes is not None and self.changes.at <= at:
                    self.misses.passes(self.changes.at)
                    self.changes.happen(self)
                    continue
                self.misses.passes(at)
                if following is not None and following.arrival == at:
                    self._arrive(_new(following))
                    following = next(coming, None)
                    continue
                _, event, number, coming_in = heapq.heappop(self._events)
                if coming_in is not None:
                    self._arrive(coming_in)
                    continue
                replica = self._replicas.get(number)
                if replica is not None and event == replica.event:
                    for ended in self._end(number, replica, at):
                        done += 1
                        for then in traffic.after(ended, at):
                            self._push(then.arrival, coming=_new(then))
                    self._begin(number, replica, at)
                    line.update(done, f"t = {at:.0f} s")
        if not self._over():
            for _ in self._waiting:
                self.metrics.refuse()

    def _goes_on(self, following: TrafficRequest | None) -> bool:
        if following is not None or self._events:
            return True
        return bool(self._waiting) and self.changes is not None and self.changes.returns

    @property
    def seen(self) -> int:
        """Requests that have arrived."""
        return len(self.metrics.ttft) + self.metrics.refused + len(self._open)

    def _over(self) -> bool:
        """Return whether the rest is of no interest to anybody."""
        self._turns += 1
        if self.misses.hopeless:
            return True
        return bool(self.cancelled and self._turns % CANCEL_INTERVAL == 0 and self.cancelled())

    def _push(self, at: float, number: int = -1, coming: Coming | None = None) -> int:
        """Put an event into the queue: of a replica, or a request that comes. Returns its
        number."""
        event = next(self._order)
        heapq.heappush(self._events, (at, event, number, coming))
        return event

    def _arrive(self, coming: Coming) -> None:
        asked, clock, now, roles = coming.asked, coming.clock, coming.at, self.roles
        if not (coming.computed or coming.again):
            self.metrics.arrived(now)
            self.misses.arrived(clock)
        fleet, ends, number = self.fleets[-1], asked.answer_length, coming.replica
        if not fleet.takes_requests and number < 0:
            self._waiting.append(coming.homeless(now))
            return
        request = coming.request(next(self._ids))
        if roles and not coming.computed and not clock.tokens and self.fleets[0].takes_requests:
            unknown = fleet.unknown(request)
            fleet = fleet if unknown < roles.least else self.fleets[0]
        if fleet is not self.fleets[-1]:  # its prompt alone is computed there
            ends = 1
            clock = RequestClock(now)
        fleet.hear(now, self._stats)
        if number < 0:
            number = fleet.choose(request)
        self.usage.most_open = max(self.usage.most_open, fleet.most_open)
        output = Output(asked.answer_tokens(0, 1))
        self._open[request.id] = _InFlight(asked, number, clock, ends, output, fleet, coming)
        replica = self._replica(number)
        if coming.computed:
            bring_prompt(replica.scheduler.pool, request, self._keys(asked))
        if self.names is not None:
            self.names.expect(request.id, asked)
        replica.inbox.append(request)
        if not replica.ends:
            self._begin(number, replica, now)
        elif len(replica.ends) > 1:  # of several steps only those that have begun are still taken
            del replica.ends[bisect_left(replica.ends, now) + 1 :]
            replica.event = self._push(replica.ends[-1], number)

    def _stats(self, number: int) -> Mapping[str, float] | None:
        replica = self._replicas.get(number)
        return replica.scheduler.stats() if replica is not None else None

    def _replica(self, number: int) -> _Replica:
        """The replica; where it had no scheduler a new one, with the KV that is kept of it."""
        replica = self._replicas.get(number)
        if replica is None:
            replica = self._replicas[number] = _Replica(self.scheduler(), drafts=self._drafter())
            pool = replica.scheduler.pool
            replica.tiers = self.tiers(pool) if self.tiers else None
            for key in self._kept.pop(number, ()):
                bring_up(pool.full, key)
        return replica

    # -- steps -------------------------------------------------------------------------------------
    def _begin(self, number: int, replica: _Replica, now: float) -> None:
        """Start what the scheduler plans; nothing while it has nothing to run."""
        scheduler = replica.scheduler
        while replica.inbox:
            request = replica.inbox.popleft()
            try:
                scheduler.add(request)
            except Refused:
                self._refuse(request.id)
        replica.begin = now
        replica.event = -1
        alike = alike_steps(scheduler, MAX_LEAP, self._executor.remaining) if self.leaps else None
        if alike is not None:
            replica.ends = self.cost.ends(now, alike.sequences, alike.context, alike.steps)
        else:
            plan = scheduler.plan(now)
            if not plan.items:
                if plan.wake is not None and scheduler.has_work:
                    replica.event = self._push(max(plan.wake, now), number)
                elif len(self._replicas) > MAX_AWAKE and replica.tiers is None:
                    self._sleep(number, replica)
                return
            replica.plan = plan
            seconds = self.cost.seconds(work_of(plan))
            replica.ends = [now + seconds + (replica.tiers.owed() if replica.tiers else 0.0)]
        replica.event = self._push(replica.ends[-1], number)

    def _sleep(self, number: int, replica: _Replica) -> None:
        """The replica has nothing to do: keep the keys of its KV alone, if that is possible."""
        keys = replica.cached_keys()
        if keys is not None:
            self._kept[number] = keys
            replica.add_counts(self._past)
            del self._replicas[number]

    def _end(self, number: int, replica: _Replica, now: float) -> list[TrafficRequest]:
        """Commit what was under way. Returns the requests whose answers ended with it."""
        if not replica.ends:
            return []  # an idle scheduler wanted to be asked again
        scheduler, plan, ends = replica.scheduler, replica.plan, replica.ends
        replica.plan = None
        replica.ends = []
        if plan is None:
            self._leapt(replica, ends)
            return []
        if self.watch is not None:
            self.watch(number, replica.begin, now, plan)
        self.usage.add(now - replica.begin, 1, scheduler.load[2] / self.num_blocks)
        ended = []
        self._now = now
        for event in scheduler.commit(plan, self._executor.run(plan, replica.drafts), now):
            one = self._open[event.id]
            if event.tokens:
                one.clock.gained(len(event.tokens), now)
            if event.finish == "error":
                ended.append(self._refuse(event.id))
            elif event.finish is not None and one.clock is not one.coming.clock:
                self._hand_over(one, event.cached, scheduler.budget, now)
                self._forget(event.id)
            elif event.finish is not None:
                self.metrics.add(one.clock)
                self.misses.ended(one.clock)
                self.moves.ended(one.clock, event.recomputed)
                if self.changes is not None:
                    self.changes.answered(number, one.clock, now)
                ended.append(self._forget(event.id))
        return ended

    def _leapt(self, replica: _Replica, ends: list[float]) -> None:
        scheduler, begin = replica.scheduler, replica.begin
        longest = max(map(sub, ends[1:], ends), default=0.0)
        for seq in advance_alike(scheduler, begin, ends, self._executor.middle):
            self._open[seq.request.id].clock.gained_each(ends, longest)
        self.usage.add(ends[-1] - begin, len(ends), scheduler.load[2] / self.num_blocks)
        self.usage.leaps += 1

    def _hand_over(self, one: _InFlight, cached: int, budget: int, now: float) -> None:
        """Its prompt is computed: the KV goes to a replica that answers, as far as that does not
        have it."""
        assert self.roles is not None
        fleet, coming = self.fleets[-1], one.coming
        if not fleet.takes_requests:
            self._push(now, coming=replace(coming, at=now, again=True))
            return
        request = coming.request(0)
        number = fleet.choose(request)
        pool = self._replica(number).scheduler.pool
        there = tokens_there(pool, request, self._keys(one.asked))
        length = prompt_length(one.asked.prompt)
        at = now + self.roles.on_the_way(self.cost, cached, length, budget, there)
        self._push(at, coming=replace(coming, at=at, computed=True, replica=number))

    def _keys(self, asked: TrafficRequest) -> list[bytes] | None:
        """The keys of its blocks; None: those that an engine would make."""
        return None if self.names is None else self.names.of(asked)

    def _refuse(self, id: int) -> TrafficRequest:
        self.metrics.refuse()
        self.misses.refused(self._open[id].coming.clock)
        return self._forget(id)

    def _forget(self, id: int) -> TrafficRequest:
        one = self._open.pop(id)
        if self.names is not None:
            self.names.forget(id)
        one.fleet.ended(one.replica, id)
        return one.asked

    # -- replicas that come and go -----------------------------------------------------------------
    @property
    def held(self) -> int:
        """Requests that no replica takes now."""
        return len(self._waiting)

    def take_away(self, number: int, now: float) -> None:
        """The replica ends, with all that it has; its streams go on elsewhere."""
        self._kept.pop(number, None)
        replica = self._replicas.pop(number, None)
        if replica is not None:
            if replica.plan is None and (done := replica.ends[: bisect_right(replica.ends, now)]):
                self._leapt(replica, done)
            replica.add_counts(self._past)
        at = now + self.moves.delay
        for id, one in [(id, one) for id, one in self._open.items() if one.replica == number]:
            self._forget(id)
            self.moves.leaves(one.coming.clock)
            self._push(at, coming=one.coming.homeless(at))
        for place, (then, event, _, coming) in enumerate(self._events):
            if coming is not None and coming.replica == number:  # its KV is on the way to nobody
                self._events[place] = (then, event, -1, coming.homeless(coming.at))
        fleet_of(self.fleets, number).forget(number)

    def bring_back(self, number: int, now: float) -> None:
        """The replica takes requests, with an empty cache."""
        fleet_of(self.fleets, number).open_again(number)
        waiting, self._waiting = self._waiting, []
        for coming in waiting:
            self._arrive(replace(coming, at=now))

    # -- figures -----------------------------------------------------------------------------------
    def figures(self) -> dict[str, Any]:
        """The load of all replicas together, and the sums that their schedulers counted."""
        sums = Counter(dict.fromkeys((*COUNTERS, "tier_tokens"), 0))
        sums.update(self._past)
        for replica in self._replicas.values():
            replica.add_counts(sums)
        usage, seconds = self.usage, max(self.metrics.end - self.metrics.begin, 1e-9)
        return dict(sums) | {
            "steps": usage.steps,
            "busy": usage.busy / (seconds * sum(len(fleet.loads) for fleet in self.fleets)),
            "kv_used": usage.blocks / usage.busy if usage.busy else 0.0,
            "kv_fullest": usage.fullest,
            "most_open": usage.most_open,
            "cached_share": sums["cached_tokens"] / (sums["prompt_tokens"] or 1.0),
        }


def _new(asked: TrafficRequest) -> Coming:
    return Coming(asked, RequestClock(asked.arrival), asked.arrival)
