"""The scheduler: decides each step what is computed, and makes what was computed part of the
sequences.

Owns the queue, the running sequences, the budget, preemption and the finish of a sequence. Must not
know what a token means, how it is computed, what time it is or who asked for it: the policy says
which sequences get tokens, the order which is first, the pool which has which block, a group what
becomes of its sequences.

A step moves `computed` towards `len(tokens)`. There are no phases: prefill, chunk, decode,
recompute and resume differ only in the size of that gap.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from pageturner.request import Event, Failure, Request
from pageturner.scheduler.admission import (
    Reserve,
    refuse_impossible,
    refuse_queue_full,
    refuse_too_many,
)
from pageturner.scheduler.batching import Policy, View, WaitCause, wait_reason_of
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.group import Group, Requests
from pageturner.scheduler.listener import Listener, Listeners, StepReport
from pageturner.scheduler.order import Order
from pageturner.scheduler.sharing import (
    apply_branches,
    awaited_prefix,
    order_after_prefix_owner,
    source_of,
)
from pageturner.scheduler.types import (
    AdmissionEstimate,
    Item,
    Output,
    Plan,
    Result,
    Sequence,
    State,
)


class Scheduler:
    """add and abort at any moment; plan, run, commit in turn, or plan one step ahead of the commit.
    A token_budget of 0 means no limit. One below max_num_seqs also limits how many run: each
    decoding sequence needs a token in each step. max_queue: most sequences waiting; resumed ones
    are exempt.

    Others read, and change nothing of: pool, policy, listeners, running (by rank), waiting (in no
    order), budget (tokens in a step), slots (sequences that run at once).
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: Policy,
        order: Order,
        reserve: Reserve,
        make_group: Callable[[Request], Group],
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        max_queue: int,
        listeners: tuple[Listener, ...] = (),
    ) -> None:
        if max_num_seqs < 1 or token_budget < 0 or max_model_len < 2 or max_queue < 1:
            least = "max_num_seqs and max_queue must be at least 1, max_model_len 2, token_budget 0"
            raise ValueError(least)
        self.pool, self.policy, self._order, self._reserve = pool, policy, order, reserve
        self._listeners, self.listeners = listeners, Listeners((*listeners, order.listener))
        self._limit_steps(max_num_seqs, token_budget)
        self._max_beam_width = self.slots  # sequences of the widest search that is taken
        self._max_model_len, self._max_queue = max_model_len, max_queue
        self._requests = Requests(make_group)
        self.waiting: dict[Sequence, None] = {}
        self.running: list[Sequence] = []  # by rank, smallest first
        self._leaving: list[Sequence] = []  # aborted under a plan, which still uses their blocks
        self._plans: list[Plan] = []  # under way, in order; at most two
        # a plan made ahead would have had to preempt: the next one is not made ahead
        self._lookahead_out_of_blocks = False
        self._granted, self._admissions = set[Sequence](), 0

    def _limit_steps(self, max_num_seqs: int, token_budget: int) -> None:
        self.budget = token_budget or sys.maxsize
        self.slots = min(max_num_seqs, self.budget)

    def add(self, request: Request) -> None:
        """Queue a request. Refused with queue_full, empty_prompt, prompt_too_long, kv_too_small,
        nothing_to_generate, n_unsupported or by a listener; ValueError for an id that is here
        already."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is here already")
        if self._requests.join(request):
            return
        if not request.resume:
            refuse_queue_full(len(self.waiting), self._max_queue)
        refuse_too_many(request.params.beam_width, self._max_beam_width)
        group = self._requests.make(request)
        first = group.sequences[0]
        self._refuse_impossible(group)
        for tell in self.listeners.arriving:
            tell(first)
        first.source = source_of(request, self._requests.groups)
        self._requests.groups[request.id], self.waiting[first] = group, None
        if request.resume:
            first.max_computed_tokens = len(first.tokens) - 1
        for tell in self.listeners.queued:
            tell(first)

    def _refuse_impossible(self, group: Group) -> None:
        """Set the most tokens that each of its sequences may have: without max_tokens what the
        context allows, and its share of the pool as it is. Refused where they can never run."""
        first = group.sequences[0]
        max_tokens, share = first.request.params.max_tokens, self.pool.share(len(group.sequences))
        most = max(share, first.prompt_len) + 1
        if max_tokens is not None:
            most = first.prompt_len + max_tokens
        for seq in group.sequences:
            seq.limit = min(self._max_model_len, most)
        refuse_impossible(first, first.limit, self._max_model_len, share)

    def abort(self, id: int) -> bool:
        """Forget the request: no event, its blocks go back now, or with the commit of the plan
        under way, which may be run again until then. False if there is no such request."""
        if id not in self._requests:
            return False
        for seq in self._requests.leave(id):
            self.waiting.pop(seq, None)
            for tell in self.listeners.ended:
                tell(seq, None)
            if seq.state is State.RUNNING:
                self.running.remove(seq)
                self._leaving.append(seq)
            seq.state, seq.estimate = State.FINISHED, None
        if not self._plans:
            self._release_leaving()
        return True

    def end(self, id: int, failure: Failure) -> list[Event]:
        """End a request that is here, with all its choices. At most one plan may be under way."""
        assert len(self._plans) < 2, "a request was ended under two plans"
        group = self._requests.group_of(id)
        for seq in group.sequences:
            self.waiting.pop(seq, None)
        events = group.fail(failure)
        self._end(group, "error")
        self.running = [seq for seq in self.running if seq.state is State.RUNNING]
        return events

    # -- what others may read ----------------------------------------------------------------------
    def __contains__(self, id: int) -> bool:
        return id in self._requests

    @property
    def has_work(self) -> bool:
        return bool(self._requests.groups or self._plans)

    @property
    def reserve(self) -> Reserve:
        """The rule by which KV is promised to a sequence that joins."""
        return self.policy.reserve or self._reserve

    @property
    def load(self) -> tuple[int, int, int]:
        """Sequences that wait and that run, and blocks in use."""
        used = self.pool.full.num_blocks - self.pool.full.available
        return len(self.waiting), len(self.running), used

    def queue(self, now: float) -> list[Sequence]:
        """Return the waiting sequences, the first to go first, as known in the last step."""
        return self._order.peek(self.waiting, now)

    def peak(self, seq: Sequence) -> int:
        """Positions whose KV it can ever need: the last token of a sequence is never computed."""
        return seq.limit - 1

    def stats(self) -> dict[str, float]:
        """Gauges and counters of all listeners, and its own."""
        figures = {"running": float(len(self.running)), "waiting": float(len(self.waiting))}
        for tell in self.listeners.stats:
            figures |= {name: float(value) for name, value in tell().items()}
        return figures

    # -- plan --------------------------------------------------------------------------------------
    def plan(self, now: float) -> Plan:
        """The next step. One with items must be committed before the next is asked for."""
        if self._plans:
            raise RuntimeError("the last plan was not committed")
        self._lookahead_out_of_blocks = False
        return self._make_plan(Plan(at=now))

    def plan_ahead(self, now: float) -> Plan:
        """The step behind the one under way, in which no sequence may have a draft, search or score
        a prompt: each item gives one token at the most. It preempts no sequence. The commit ignores
        the items of sequences that have ended by then. Without items where it cannot be made:
        commit, and ask for a plan."""
        if len(self._plans) != 1:
            raise RuntimeError("one plan ahead of one that is under way")
        if self._lookahead_out_of_blocks or not self.policy.steady:
            return Plan(at=now)
        return self._make_plan(Plan(at=now))

    def _make_plan(self, plan: Plan) -> Plan:
        if not self._requests.groups:
            return plan
        view = self._view(plan.at)
        self._granted.clear()
        asks = self.policy.asks(view)
        with suppress(StopIteration):
            seq, n = next(asks)
            while True:
                seq, n = asks.send(self._grant(plan, view, seq, n))
        if plan.items:
            plan.copies = self.pool.begin()
            plan.ballast = view.ballast
            self._plans.append(plan)
        else:
            plan.wake = view.wake
        if self.waiting:
            plan.wait_reason = wait_reason_of(view, plan)
        return plan

    def _view(self, now: float) -> View:
        decoding, prefilling = list[Sequence](), list[Sequence]()
        for seq in self.running:
            gap = seq.pending if seq.inflight else len(seq.tokens) - seq.computed
            if gap:  # else it waits for the others of its search, or it will have ended
                (decoding if gap == 1 else prefilling).append(seq)
        free_slots = max(0, self.slots - len(self.running))
        waiting: list[Sequence] = []
        if free_slots:
            queue = self._order.arrange(self.waiting, self.running, now)
            waiting = order_after_prefix_owner(queue)
        return View(
            now=now,
            decoding=decoding,
            prefilling=prefilling,
            waiting=waiting,
            token_budget_left=self.budget,
            free_slots=free_slots,
            context=self._max_model_len,
            need=self._need,
            peak=self.peak,
            slots=lambda seq: len(self._requests.mates(seq)),
            max_concurrent=self.pool.side_by_side,
        )

    def _grant(self, plan: Plan, view: View, seq: Sequence, n: int) -> int:
        """Answer one ask: the tokens granted, with their blocks."""
        n = min(n, view.token_budget_left)
        if n <= 0 or seq in self._granted or seq.state is State.FINISHED:
            return 0
        if seq.state is State.WAITING:
            n = self._admit(plan, view, seq, n)
        else:
            if not seq.blocks:
                self._attach(seq)
            n = self._make_room(plan, seq, min(n, seq.pending, self.budget))
        if n:
            plan.items.append(Item(seq, n, seq.computed + seq.inflight))
            seq.inflight += n
            self._granted.add(seq)
            view.token_budget_left, view.granted = view.token_budget_left - n, view.granted + n
        return n

    def _make_room(self, plan: Plan, seq: Sequence, n: int) -> int:
        """Blocks for as many of n tokens as there is room; if not for one, others give theirs."""
        while not self.pool.extend(seq, n):
            if room := self.pool.room(seq):
                n = min(n, room)
            elif self._plans:
                self._lookahead_out_of_blocks = True
                return 0
            elif (victim := self._victim(seq)) is None:
                return 0
            else:
                self._preempt(plan, victim, self.running[0] if victim is seq else seq)
                if seq.state is not State.RUNNING:
                    return 0
        return n

    def _victim(self, asking: Sequence) -> Sequence | None:
        """The largest rank above the asking one that has nothing in this plan, else the asking one
        itself; never the smallest rank of all, so that one sequence always gets on."""
        mates = self._requests.mates
        for seq in reversed(self.running):
            if seq.rank == asking.rank:
                break
            if self._granted.isdisjoint(mates(seq)):
                return seq
        if asking.rank == self.running[0].rank or not self._granted.isdisjoint(mates(asking)):
            return None
        return asking

    def _preempt(self, plan: Plan, seq: Sequence, other: Sequence) -> None:
        group = self._requests.groups[seq.request.id]
        for one in group.sequences:
            one.max_computed_tokens = max(one.max_computed_tokens, one.computed)
            self.pool.release(one)
            one.draft, one.estimate, one.state = [], None, State.WAITING
            self.running.remove(one)
        first = group.sequences[0]
        self.waiting[first] = None
        for tell in (*self.listeners.preempted, *self.listeners.queued):
            tell(first)
        plan.preempted[seq.request.id] = other.request.id

    def _admit(self, plan: Plan, view: View, seq: Sequence, n: int) -> int:
        """Let a waiting sequence and its group run, or note why they cannot."""
        mates = self._requests.mates(seq)
        if refused := self._refusal(plan, mates, n):
            view.refused = (seq, *refused)
            return 0
        self._attach(seq)
        n = min(n, seq.pending, self.pool.longest_step(seq.computed))
        if len(mates) > 1:  # some of the sliding blocks are for the others
            n = min(n, self.pool.room(seq))
        if not self.pool.extend(seq, n):
            raise AssertionError("a sequence that fits did not fit")
        del self.waiting[seq]
        self._admissions += seq.rank is None
        rank = seq.rank or (seq.request.priority, self._admissions)
        for one in mates:
            one.rank, one.state = rank, State.RUNNING
            insort(self.running, one, key=attrgetter("rank"))
        return n

    def _refusal(self, plan: Plan, joining: list[Sequence], n: int) -> tuple[WaitCause, int] | None:
        """Return what the joining sequences lack, and the request that has it; None: nothing."""
        if self.policy.awaits_prefixes:
            owner = awaited_prefix(joining[0], self.running, self.pool)
            if owner is not None:
                return WaitCause.PROMPT, owner.request.id
        if plan.preempted:
            return WaitCause.PREEMPTION, 0
        if len(self.running) + len(joining) > max(self.slots, len(joining)):
            return WaitCause.SLOTS, 0
        if self._fits(joining, n):
            return None
        largest = max(self.running, key=lambda one: len(one.blocks), default=None)
        return WaitCause.BLOCKS, largest.request.id if largest else 0

    def _fits(self, joining: list[Sequence], n: int) -> bool:
        """Return whether all they are promised, n tokens now, fits beside the promises of others."""
        pool, reserve, full, sliding = self.pool, self.reserve, 0, 0
        running = len(self.running) + len(self._leaving)
        if not pool.has_states_for(len(joining), running, len(self._granted)):
            return False
        available, sharing = pool.full.available, pool.full.sharing
        for one in (*joining, *self.running, *self._leaving):
            known = one.estimate
            # an estimate holds while nothing has happened that would change it
            if (
                known
                and known.max_tokens >= len(one.tokens)
                and known.num_blocks == len(one.blocks)
                and known.sharing == sharing
            ):
                full += known.blocks_needed
            else:
                first, mate = one is joining[0], one.state is State.WAITING
                step = max(n, self.budget) if first else 1 if mate else self.budget
                promised, until = reserve(one, self.peak(one), pool.block_size)
                more = pool.blocks_needed(one, promised, step, len(joining) - 1 if first else 0)
                if one.blocks and not pool.window:
                    one.estimate = AdmissionEstimate(until, len(one.blocks), sharing, more[0])
                full, sliding = full + more[0], sliding + more[1]
            if full > available or sliding > pool.sliding.num_blocks - len(pool.sliding.held):
                return False
        return True

    def _attach(self, seq: Sequence) -> None:
        """Give a sequence the cached KV that it begins with. The sequences of one search take it
        one by one, when they get on, so that each finds what the ones before it have computed."""
        fresh = max(0, self.pool.attach(seq) - seq.max_computed_tokens)  # never computed before
        seq.max_computed_tokens += fresh
        seq.cached += fresh
        for tell in self.listeners.attached:
            tell(seq, fresh)

    def _need(self, seq: Sequence) -> int:
        if seq.state is State.RUNNING:
            return min(seq.pending, self.budget)
        cached = self.pool.attachable(seq)
        return min(seq.pending - cached, self.pool.longest_step(cached))

    # -- commit ------------------------------------------------------------------------------------
    def commit(self, plan: Plan, result: Result, now: float) -> list[Event]:
        """Make the step part of the sequences. One event for each that gained tokens or ended."""
        if not self._plans or plan is not self._plans[0]:
            if plan.items:
                raise ValueError("not the first plan under way")
            return []
        if len(result.outputs) != len(plan.items):
            raise ValueError(f"{len(result.outputs)} outputs for {len(plan.items)} items")
        self._plans.pop(0)
        self.pool.release_held(bool(self._plans))
        report, served = StepReport(now - plan.at, plan.tokens), self.listeners.served
        for item, output in zip(plan.items, result.outputs, strict=True):
            seq = item.sequence
            if seq.state is State.RUNNING:
                for tell in served:
                    tell(seq, item.n, now)
                self._take(self._requests.groups[seq.request.id], item, output, report)
        if any(event.finish is not None for event in report.events):
            self.running = [seq for seq in self.running if seq.state is State.RUNNING]
        self._release_leaving()
        report.generated = sum(len(event.tokens) for event in report.events)
        for tell_step in self.listeners.committed:
            tell_step(report)
        return report.events

    def _take(self, group: Group, item: Item, output: Output, report: StepReport) -> None:
        """Take in what one item gave. Only the KV of accepted tokens counts as computed."""
        if output.failure is not None:
            report.events += group.fail(output.failure)
            return self._end(group, "error")
        seq = item.sequence
        if output.late:
            seq.inflight -= item.n
            return
        known, end = len(seq.tokens), seq.computed + item.n
        if seq.computed < seq.max_computed_tokens:
            report.recomputed += seq.recompute(min(end, known))
        change = group.take(item, output)
        report.events += change.events
        if seq.request.logits_from is not None and (scored := item.scored):
            seq.scored = scored.stop
        if end > known:  # there were drafts
            report.drafts.append((end - known, len(output.tokens) - 1))
            end = known + len(change.tokens) - 1
        seq.computed, seq.inflight = end, seq.inflight - item.n
        seq.tokens += change.tokens
        self.pool.cache_full_blocks(seq)
        if change.finish is not None:
            return self._end(group, change.finish)
        seq.draft = output.draft
        if seq.draft:  # only what can be of use: its share of the budget, nothing past the end
            share = self.budget // max(len(self.running), min(self.slots, 8)) - 1
            seq.draft = seq.draft[: max(0, min(share, seq.limit - len(seq.tokens) - 1))]
        self.pool.trim(seq)
        if change.branches:
            apply_branches(change.branches, group.sequences, self.pool)

    def _end(self, group: Group, finish: str) -> None:
        for seq in group.sequences:
            seq.state, seq.estimate = State.FINISHED, None
            kept = [tell(seq, finish) for tell in self.listeners.ended]
            if not any(kept):
                self.pool.release(seq)
        self._requests.remove(group)

    def _release_leaving(self) -> None:
        while self._leaving:
            self.pool.release(self._leaving.pop(0))

    def reconfigure(
        self,
        max_num_seqs: int,
        token_budget: int,
        policy: Policy | None,
        order: Order | None,
        max_beam_width: int,
    ) -> bool:
        """Go on with these; None: as it is. False if that has to wait: ask again after the next
        commit.

        Running sequences go on; those above a smaller number end before others join; a wider search
        runs alone. max_beam_width: sequences of the widest search still taken, which never falls:
        one may come again."""
        if self._plans or (policy is not None and self.running and not self.policy.interruptible):
            return False
        self._limit_steps(max_num_seqs, token_budget)
        more = max(0, max(self.slots, max_beam_width) - self._max_beam_width)
        self._max_beam_width += more
        self._max_queue += more  # the bound outside counts running requests, too
        for seq in self.running:
            seq.estimate = None
        self.policy = policy or self.policy
        if order is not None:  # it hears of running sequences when they are served
            self._order, self.listeners = order, Listeners((*self._listeners, order.listener))
            for seq in sorted(self.waiting, key=lambda seq: (seq.request.arrival, seq.request.id)):
                if order.listener.queued:
                    order.listener.queued(seq)
        return True
