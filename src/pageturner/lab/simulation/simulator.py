"""A discrete-event simulation around the engine's own scheduler: plan, let time pass, commit.

Owns simulated time and the order of what happens in it. Must not know how anything is scheduled (that is
scheduler/scheduler.py, the same as in the engine), placed (router/placement.py) or what a step costs
(step_cost.py).

A request that arrives while a step is computed is taken when that step has ended, as the engine does it. True
lengths are known to `_Executor` alone: no scheduler, no placement can see them (docs/adr/0006).
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

from pageturner.lab.bench.prompt_alone import prompt_length
from pageturner.lab.bench.request_metrics import CertainMisses, RequestClock, RequestMetrics
from pageturner.lab.simulation.fast_forward import advance_alike, alike_steps
from pageturner.lab.simulation.simulated_fleet import (
    Roles,
    SimulatedFleet,
    bring_prompt,
    fleet_of,
    tokens_there,
)
from pageturner.lab.simulation.simulated_passage import Coming, ReplicaUsage
from pageturner.lab.simulation.simulated_tiers import SimulatedTiers
from pageturner.lab.simulation.simulated_turnover import (
    COUNTERS,
    MOST_AWAKE,
    Changes,
    KeptReplica,
    StreamMoves,
    asleep,
    count,
)
from pageturner.lab.simulation.step_cost import StepCost
from pageturner.lab.traffic.block_names import BlockNames
from pageturner.lab.traffic.traffic import END, Traffic, TrafficRequest
from pageturner.progress import Progress
from pageturner.request import Refused, Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Output, Plan, Result, Sequence
from pageturner.telemetry.work import work_of

LONGEST_LEAP = 512  # steps; an arrival in the middle makes the rest of the sums useless
LINE_EVERY = 10.0  # seconds, where there is no terminal
TURNS = 256  # events from one question whether it was cancelled to the next
Watch = Callable[[int, float, float, Plan], None]  # told replica, begin, end and plan of each step


@dataclass(slots=True)
class _InFlight:
    """A request that is being answered, or whose prompt is computed. ends: tokens of its answer; output: what
    a step in the middle of the answer gives."""

    asked: TrafficRequest
    replica: int
    clock: RequestClock
    ends: int
    output: Output
    fleet: SimulatedFleet
    coming: Coming


class _Executor:
    """Gives every sequence that computed all it has its next token, and the last one where it ends."""

    def __init__(self, open: dict[int, _InFlight]) -> None:
        self._open = open
        self._nothing, self._end = Output(), Output([END])

    def run(self, plan: Plan) -> Result:
        return Result([self._output(item.sequence, item.n) for item in plan.items])

    def _output(self, seq: Sequence, n: int) -> Output:
        if seq.computed + n < len(seq.tokens):
            return self._nothing
        one = self._open[seq.request.id]
        if seq.generated + 1 >= one.ends:
            return self._end
        if isinstance(one.asked.answer, int):
            return one.output
        return Output(one.asked.answer_tokens(seq.generated, 1))

    def middle(self, seq: Sequence, count: int) -> list[int]:
        """The next `count` tokens of an answer, of which none is the last."""
        return self._open[seq.request.id].asked.answer_tokens(seq.generated, count)

    def remaining(self, seq: Sequence) -> int:
        """How many tokens it gets before its last one; none before the first, whose time is noted at once."""
        one = self._open[seq.request.id]
        return one.ends - seq.generated - 1 if one.clock.first >= 0 else 0


@dataclass(slots=True)
class _Replica:
    """One engine. ends: when each of the steps under way ends, several of them where steps that are alike are
    taken at once; plan: of the step under way, None for several."""

    scheduler: Scheduler
    inbox: deque[Request] = field(default_factory=deque)
    plan: Plan | None = None
    begin: float = 0.0
    ends: list[float] = field(default_factory=list)
    epoch: int = 0  # of its newest event: older ones in the queue are void
    tiers: SimulatedTiers | None = None


class Simulator:
    """Replicas, their placement, a cost. `run` once.

    scheduler  makes one for a replica when it gets its first request; num_blocks: that each has
    replicas   those that answer, one where nothing is said; with `roles` those that compute prompts stand
               before them
    leaps      whether steps that are alike may be taken at once (lab/simulation/fast_forward.py)
    tiers      makes the slower memory of a replica, behind its pool
    changes    says which replicas end and begin; moves: what becomes of the streams of those that end
    misses     counts who misses a target; the run ends when it is hopeless
    cancelled  asked now and then whether anybody still wants to know
    names      of blocks, which every scheduler listens to, where the traffic is known by its pieces
    """

    def __init__(
        self,
        scheduler: Callable[[], Scheduler],
        cost: StepCost,
        *,
        num_blocks: int,
        replicas: Several[SimulatedFleet] = (),
        roles: Roles | None = None,
        leaps: bool = True,
        watch: Watch | None = None,
        tiers: Callable[[BlockPool], SimulatedTiers] | None = None,
        changes: Changes | None = None,
        moves: StreamMoves | None = None,
        misses: CertainMisses | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        names: BlockNames | None = None,
    ) -> None:
        self._make = scheduler
        self._cost = cost
        self._blocks = num_blocks
        self.fleets = tuple(replicas) or (SimulatedFleet(0, [0], lambda loads, hints, length: 0),)
        self._roles = roles
        self._most = LONGEST_LEAP if leaps else 0
        self._watch = watch
        self._tiers = tiers
        self._changes = changes
        self.moves = moves or StreamMoves()
        self._misses = misses
        self._cancelled = cancelled
        self._names = names
        self._replicas: dict[int, _Replica] = {}
        self._kept: dict[int, KeptReplica] = {}  # of those that have no scheduler now
        self._past = Counter[str]()  # what the schedulers counted that are gone
        self._waiting: list[Coming] = []  # while no replica takes requests
        self._open: dict[int, _InFlight] = {}
        self._executor = _Executor(self._open)
        self._ids = itertools.count(1)
        self._events: list[tuple[float, int, int, int, Coming | None]] = []
        self._order = itertools.count()
        self._turns = 0
        self.metrics = RequestMetrics()
        self.usage = ReplicaUsage()

    # -- time ------------------------------------------------------------------------------------------------
    def run(self, traffic: Traffic, *, progress: bool | None = None) -> None:
        """Until everything is answered. What came of it is in `metrics` and `usage`."""
        coming = traffic.arrivals()
        following = next(coming, None)
        done = 0
        if self._changes is not None:
            self._changes.begin(self, following.arrival if following is not None else 0.0)
        with Progress("simulating", traffic.total, enabled=progress, lines=LINE_EVERY) as line:
            while self._goes_on(following) and not self._over():
                if self._changes is not None and self._changes.at <= self._next(following):
                    self._pass(self._changes.at)
                    self._changes.happen(self)
                    continue
                if following is not None and (
                    not self._events or following.arrival <= self._events[0][0]
                ):
                    self._pass(following.arrival)
                    self._arrive(self._new(following))
                    following = next(coming, None)
                    continue
                now, _, number, epoch, coming_in = heapq.heappop(self._events)
                self._pass(now)
                if coming_in is not None:
                    self._arrive(coming_in)
                    continue
                replica = self._replicas.get(number)
                if replica is not None and epoch == replica.epoch:
                    for ended in self._end(number, replica, now):
                        done += 1
                        for then in traffic.after(ended, now):
                            self._push(then.arrival, -1, 0, self._new(then))
                    self._begin(number, replica, now)
                    line.update(done, f"t = {now:.0f} s")
        if not self._over():
            for _ in self._waiting:
                self.metrics.refuse()

    def _next(self, following: TrafficRequest | None) -> float:
        """When something happens that is no change; inf: nothing will."""
        at = following.arrival if following is not None else float("inf")
        return min(at, self._events[0][0]) if self._events else at

    def _goes_on(self, following: TrafficRequest | None) -> bool:
        if following is not None or self._events:
            return True
        return bool(self._waiting) and self._changes is not None and self._changes.returns

    @property
    def seen(self) -> int:
        """Requests that have arrived."""
        return len(self.metrics.ttft) + self.metrics.refused + len(self._open)

    def _over(self) -> bool:
        """Whether the rest is of no interest to anybody."""
        self._turns += 1
        if self._misses is not None and self._misses.hopeless:
            return True
        return self._turns % TURNS == 0 and self._cancelled()

    def _push(self, at: float, number: int, epoch: int, coming: Coming | None) -> None:
        heapq.heappush(self._events, (at, next(self._order), number, epoch, coming))

    def _new(self, asked: TrafficRequest) -> Coming:
        return Coming(asked, RequestClock(asked.arrival), asked.arrival)

    def _pass(self, now: float) -> None:
        if self._misses is not None:
            self._misses.passes(now)

    def _arrive(self, coming: Coming) -> None:
        asked, clock, now, roles = coming.asked, coming.clock, coming.at, self._roles
        if not (coming.computed or coming.again):
            self.metrics.arrived(now)
            if self._misses is not None:
                self._misses.arrived(clock)
        fleet, ends = self.fleets[-1], asked.answer_length
        if not fleet.takes_requests and coming.replica < 0:
            self._waiting.append(replace(coming, computed=False, again=True))
            return
        request, number = coming.request(next(self._ids)), coming.replica
        apart = roles is not None and not coming.computed and not clock.tokens
        if (
            roles
            and apart
            and self.fleets[0].takes_requests
            and fleet.unknown(request) >= roles.least
        ):
            fleet, ends, clock = self.fleets[0], 1, RequestClock(now)  # of its prompt alone
        fleet.hear(now, self._stats)
        if number < 0:
            number = fleet.choose(request)
        self.usage.most_open = max(self.usage.most_open, fleet.most_open)
        output = Output(asked.answer_tokens(0, 1))
        self._open[request.id] = _InFlight(asked, number, clock, ends, output, fleet, coming)
        replica = self._replicas.get(number) or self._made(number)
        if coming.computed:
            bring_prompt(replica.scheduler.pool, request, self._keys(asked))
        if self._names is not None:
            self._names.expect(request.id, asked)
        replica.inbox.append(request)
        if not replica.ends:
            self._begin(number, replica, now)
        elif len(replica.ends) > 1:
            self._interrupt(number, replica, now)

    def _stats(self, number: int) -> Mapping[str, float] | None:
        replica = self._replicas.get(number)
        return replica.scheduler.stats() if replica is not None else None

    def _made(self, number: int) -> _Replica:
        """A replica that had no scheduler, with what is kept of it."""
        kept = self._kept.pop(number, None)
        replica = self._replicas[number] = _Replica(self._make(), epoch=kept.epoch if kept else 0)
        replica.tiers = self._tiers(replica.scheduler.pool) if self._tiers else None
        if kept is not None:
            kept.wake(replica.scheduler)
        return replica

    def _interrupt(self, number: int, replica: _Replica, now: float) -> None:
        """A request has arrived: of several steps under way only those that have begun are still taken."""
        del replica.ends[bisect_left(replica.ends, now) + 1 :]
        replica.epoch += 1
        self._push(replica.ends[-1], number, replica.epoch, None)

    # -- steps -----------------------------------------------------------------------------------------------
    def _begin(self, number: int, replica: _Replica, now: float) -> None:
        """Start what the scheduler says; nothing while it has nothing to run."""
        scheduler = replica.scheduler
        while replica.inbox:
            request = replica.inbox.popleft()
            try:
                scheduler.add(request)
            except Refused:
                self._refuse(request.id)
        replica.begin = now
        replica.epoch += 1
        alike = alike_steps(scheduler, self._most, self._executor.remaining) if self._most else None
        if alike is not None:
            replica.ends = self._cost.ends(now, alike.sequences, alike.context, alike.steps)
        else:
            plan = scheduler.plan(now)
            if not plan.items:
                if plan.wake is not None and scheduler.has_work:
                    self._push(max(plan.wake, now), number, replica.epoch, None)
                elif len(self._replicas) > MOST_AWAKE and replica.tiers is None:
                    self._sleep(number, replica)
                return
            replica.plan = plan
            seconds = self._cost.seconds(work_of(plan))
            replica.ends = [now + seconds + (replica.tiers.owed() if replica.tiers else 0.0)]
        self._push(replica.ends[-1], number, replica.epoch, None)

    def _sleep(self, number: int, replica: _Replica) -> None:
        """It has nothing to do: keep less of it, if that is possible."""
        kept = asleep(replica.scheduler, replica.epoch)
        if kept is not None:
            self._kept[number] = kept
            count(self._past, replica.scheduler)
            del self._replicas[number]

    def _end(self, number: int, replica: _Replica, now: float) -> list[TrafficRequest]:
        """Commit what was under way. Returns the requests whose answers ended with it."""
        if not replica.ends:
            return []  # an idle scheduler wanted to be asked again
        scheduler, plan, ends = replica.scheduler, replica.plan, replica.ends
        replica.plan, replica.ends = None, []
        if plan is None:
            self._leapt(replica, ends)
            return []
        if self._watch is not None:
            self._watch(number, replica.begin, now, plan)
        self.usage.add(now - replica.begin, 1, scheduler.load[2] / self._blocks)
        ended = []
        for event in scheduler.commit(plan, self._executor.run(plan), now):
            one = self._open[event.id]
            if event.tokens:
                one.clock.gained(len(event.tokens), now)
            if event.finish == "error":
                ended.append(self._refuse(event.id))
            elif event.finish is not None and one.clock is not one.coming.clock:
                self._hand_over(self._open[event.id], event.cached, scheduler.budget, now)
                self._forget(event.id)
            elif event.finish is not None:
                self.metrics.add(one.clock)
                if self._misses is not None:
                    self._misses.ended(one.clock)
                self.moves.ended(one.clock, event.recomputed)
                if self._changes is not None:
                    self._changes.answered(number, one.clock, now)
                ended.append(self._forget(event.id))
        return ended

    def _leapt(self, replica: _Replica, ends: list[float]) -> None:
        scheduler, begin = replica.scheduler, replica.begin
        longest = max(map(sub, ends[1:], ends), default=0.0)
        for seq in advance_alike(scheduler, begin, ends, self._executor.middle):
            self._open[seq.request.id].clock.gained_each(ends, longest)
        self.usage.add(ends[-1] - begin, len(ends), scheduler.load[2] / self._blocks)
        self.usage.leaps += 1

    def _hand_over(self, one: _InFlight, cached: int, budget: int, now: float) -> None:
        """Its prompt is computed: the KV goes to a replica that answers, as far as that does not have it."""
        assert self._roles is not None
        fleet, coming = self.fleets[-1], one.coming
        if not fleet.takes_requests:
            self._push(now, -1, 0, replace(coming, at=now, again=True))
            return
        request = coming.request(0)
        number = fleet.choose(request)
        replica = self._replicas.get(number) or self._made(number)
        there = tokens_there(replica.scheduler.pool, request, self._keys(one.asked))
        length = prompt_length(one.asked.prompt)
        at = now + self._roles.on_the_way(self._cost, cached, length, budget, there)
        self._push(at, -1, 0, replace(coming, at=at, computed=True, replica=number))

    def _keys(self, asked: TrafficRequest) -> list[bytes] | None:
        """Of its blocks; None: those that an engine would make."""
        return None if self._names is None else self._names.of(asked)

    def _refuse(self, id: int) -> TrafficRequest:
        self.metrics.refuse()
        if self._misses is not None:
            self._misses.refused(self._open[id].coming.clock)
        return self._forget(id)

    def _forget(self, id: int) -> TrafficRequest:
        one = self._open.pop(id)
        if self._names is not None:
            self._names.forget(id)
        one.fleet.ended(one.replica, id)
        return one.asked

    # -- replicas that come and go ---------------------------------------------------------------------------
    @property
    def held(self) -> int:
        """Requests that no replica takes now."""
        return len(self._waiting)

    def take_away(self, number: int, now: float) -> None:
        """The replica ends, with all that it has; its streams go on elsewhere."""
        replica = self._replicas.pop(number, None)
        if replica is not None:
            if replica.plan is None and (done := replica.ends[: bisect_right(replica.ends, now)]):
                self._leapt(replica, done)
            count(self._past, replica.scheduler)
            self._past["tier_tokens"] += replica.tiers.found if replica.tiers else 0
            self._kept[number] = KeptReplica((), replica.epoch)
        elif number in self._kept:
            self._kept[number] = KeptReplica((), self._kept[number].epoch)
        at = now + self.moves.delay
        for id, one in [(id, one) for id, one in self._open.items() if one.replica == number]:
            self._forget(id)
            self.moves.leaves(one.coming.clock)
            self._push(
                at, -1, 0, replace(one.coming, at=at, computed=False, replica=-1, again=True)
            )
        for place, (then, order, _, _, coming) in enumerate(self._events):
            if coming is not None and coming.replica == number:  # its KV is on the way to nobody
                coming = replace(coming, computed=False, replica=-1, again=True)
                self._events[place] = (then, order, -1, 0, coming)
        fleet_of(self.fleets, number).forget(number)

    def bring_back(self, number: int, now: float) -> None:
        """The replica takes requests, with an empty cache."""
        fleet_of(self.fleets, number).open_again(number)
        waiting, self._waiting = self._waiting, []
        for coming in waiting:
            self._arrive(replace(coming, at=now))

    # -- figures ---------------------------------------------------------------------------------------------
    def figures(self) -> dict[str, Any]:
        """Of the replicas: how busy, how full, and what their schedulers counted, all together."""
        sums = Counter(dict.fromkeys(COUNTERS, 0))
        sums.update(self._past)
        for replica in self._replicas.values():
            count(sums, replica.scheduler)
            sums["tier_tokens"] += replica.tiers.found if replica.tiers else 0
        usage, seconds = self.usage, max(self.metrics.end - self.metrics.begin, 1e-9)
        return dict(sums) | {
            "steps": usage.steps,
            "busy": usage.busy / (seconds * sum(len(fleet.loads) for fleet in self.fleets)),
            "kv_used": usage.blocks / usage.busy if usage.busy else 0.0,
            "kv_fullest": usage.fullest,
            "most_open": usage.most_open,
            "cached_share": sums["cached_tokens"] / (sums["prompt_tokens"] or 1.0),
            "tier_tokens": sums["tier_tokens"],
        }
