"""The scheduler: decides each step what is computed, and makes what was computed part of the sequences.

Owns the queue, the running sequences, the budget, preemption and the finish of a sequence. Must not know
what a token means, how it is computed, what time it is or who asked for it: the policy says whom to ask
for, the order who stands first, the pool who has which block.

A step moves `computed` towards `len(tokens)`. There are no phases: prefill, chunk, decode, recompute and
resume differ only in the size of that gap.
"""

from __future__ import annotations

import sys
from bisect import insort
from operator import attrgetter

from pageturner.core.admission import Reserve, refuse_impossible, refuse_queue_full, refuse_too_many
from pageturner.core.advance import cut, hit, move, news
from pageturner.core.audit import audit
from pageturner.core.batching import Policy, View
from pageturner.core.blocks import BlockPool
from pageturner.core.book import Book
from pageturner.core.causes import wait_reason_of
from pageturner.core.group import Group, Search, make_group
from pageturner.core.order import Order
from pageturner.core.sharing import behind_sources, held, source_of, take_over
from pageturner.core.types import Event, Failure, Item, Output, Plan, Request, Result, Sequence, State
from pageturner.observe.counters import Counters
from pageturner.policies.length_predictor import LengthPredictor
from pageturner.policies.pinned_prefixes import PinnedPrefixes
from pageturner.policies.step_time import StepTimeModel

UNLIMITED = sys.maxsize


class Scheduler:
    """add and abort at any moment; plan, run, commit in turn. All lengths in tokens.

    max_num_seqs   most sequences running at once. A budget smaller than that lowers it to the budget, so that
                   every decoding sequence gets its token in every step, whatever the budget
    token_budget   most tokens in a step; 0: no limit
    max_model_len  most tokens in a sequence, prompt and answer
    max_queue      most sequences waiting; resumed requests are exempt
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        policy: Policy,
        order: Order,
        admission: Reserve,
        predictor: LengthPredictor,
        pace: StepTimeModel,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        max_queue: int,
    ) -> None:
        if max_num_seqs < 1 or token_budget < 0 or max_model_len < 2 or max_queue < 1:
            raise ValueError("max_num_seqs and max_queue must be at least 1, max_model_len 2, token_budget 0")
        self._pool = pool
        self._policy = policy
        self._order = order
        self._reserve = admission
        self._predictor, self.pace = predictor, pace
        self._budget = token_budget or UNLIMITED
        self._max_running = self._widest = min(max_num_seqs, self._budget)  # widest: a search taken
        self._max_draft = self._budget // self._max_running - 1  # so that all drafts together fit the budget
        self._max_model_len = max_model_len
        self._max_queue = max_queue
        self._book = Book()
        self._waiting: dict[Sequence, None] = {}
        self._running: list[Sequence] = []  # by rank, smallest first
        self.pins = PinnedPrefixes(pool)
        self._leaving: list[Sequence] = []  # aborted under a plan, which still uses their blocks
        self._plan: Plan | None = None
        self._granted: set[Sequence] = set()
        self._admissions = 0
        self._counters = Counters()

    # -- requests --------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. Refused with queue_full, empty_prompt, prompt_too_long, kv_too_small,
        nothing_to_generate, n_unsupported or pin_too_large; ValueError for an id that is here already."""
        if request.id in self._book or request.id in self.pins:
            raise ValueError(f"request {request.id} is here already")
        if self._book.joins(request):
            return
        if not request.resume:
            refuse_queue_full(len(self._waiting), self._max_queue)
        group = make_group(request)
        first = self._refuse_impossible(group)
        first.source = source_of(request, self._book.groups)
        self._book.groups[request.id] = group
        self._waiting[first] = None
        if request.resume:
            first.reached = len(first.tokens) - 1
        self._order.queued(first)

    def _refuse_impossible(self, group: Group) -> Sequence:
        """Its first sequence, whose limit is that of all, if it can run at all."""
        first, ways = group.sequences[0], len(group.sequences)
        refuse_too_many(ways, self._widest)
        share = self._pool.share(ways, self.pins.blocks)
        for seq in group.sequences:
            seq.limit = self._most(seq, share)
        refuse_impossible(first, first.limit, self._max_model_len, share)
        if first.request.pin:
            largest = max((self._largest(one) for one in self._book.groups.values()), default=0)
            self.pins.promise(first, self._peak(first), largest)
        return first

    def abort(self, id: int) -> bool:
        """Forget the request: no event, its blocks go back now, or with the commit of the plan under way,
        which may be run again until then. False if there is no such request."""
        if id not in self._book:
            return False
        self.pins.forget(id)
        for seq in self._book.leave(id):
            if seq.state is State.RUNNING:
                self._running.remove(seq)
                self._leaving.append(seq)
            self._waiting.pop(seq, None)
            self._order.ended(seq)
            seq.state = State.FINISHED
        if self._plan is None:
            self._let_go()
        return True

    @property
    def slots(self) -> int:
        """Most sequences that run at once."""
        return self._max_running

    @property
    def load(self) -> tuple[int, int, int]:
        """Sequences that wait and that run, and blocks in use."""
        used = self._pool.full.num_blocks - self._pool.full.available
        return len(self._waiting), len(self._running), used

    @property
    def has_work(self) -> bool:
        return bool(self._book.groups)

    # -- plan ------------------------------------------------------------------------------------------------
    def plan(self, now: float) -> Plan:
        """The next step. One with items must be committed before the next is asked for."""
        if self._plan is not None:
            raise RuntimeError("the last plan was not committed")
        plan = Plan(at=now)
        if not self._book.groups:
            return plan
        view = self._view(now)
        self._granted.clear()
        asks = self._policy(view)
        try:
            seq, n = next(asks)
            while True:
                seq, n = asks.send(self._grant(plan, view, seq, n))
        except StopIteration:
            pass
        if plan.items:
            plan.copies, plan.sliding_copies = self._pool.full.copies, self._pool.sliding.copies
            plan.ballast = view.ballast
            self._plan = plan
        else:
            plan.wake = view.wake
        plan.wait_reason = wait_reason_of(view, plan, self._running, self._waiting, self._pool)
        return plan

    def _view(self, now: float) -> View:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self._running:
            gap = len(seq.tokens) - seq.computed
            if gap:  # else it waits for the others of its search
                (decoding if gap == 1 else prefilling).append(seq)
        joins = max(0, self._max_running - len(self._running))
        waiting = behind_sources(self._order.arrange(self._waiting, self._running, now)) if joins else []
        return View(
            now=now,
            decoding=decoding,
            prefilling=prefilling,
            waiting=waiting,
            left=self._budget,
            joins=joins,
            context=self._max_model_len,
            need=self._need,
            peak=self._peak,
            slots=lambda seq: len(self._book.mates(seq)),
            together=lambda tokens: self._pool.together(tokens, self.pins.blocks),
            reserve=self._reserve,
            pace=self.pace,
            most=self._max_running,
        )

    def _grant(self, plan: Plan, view: View, seq: Sequence, n: int) -> int:
        """Answer one ask: the tokens granted, with their blocks."""
        view.asked, n = seq, min(n, view.left)
        if n <= 0 or seq in self._granted:
            return 0
        if seq.state is State.RUNNING:
            if not seq.blocks:
                self._attach(seq)
            n = self._extend(plan, seq, min(n, seq.pending, self._budget))
        elif seq.state is State.WAITING and not (view.patient and held(seq, self._running, self._pool)):
            n = self._admit(plan, view, seq, n)
        else:
            n = 0
        if n:
            plan.items.append(Item(seq, n))
            self._granted.add(seq)
            view.left -= n
            view.granted += n
        return n

    def _extend(self, plan: Plan, seq: Sequence, n: int) -> int:
        """Blocks for n tokens, or for as many as there is room for; if not for one, others make room."""
        while not self._pool.extend(seq, n):
            room = self._pool.room(seq)
            if room:
                n = min(n, room)
                continue
            victim = self._victim(seq)
            if victim is None:
                return 0
            self._preempt(plan, victim, self._running[0] if victim is seq else seq)
            if seq.state is not State.RUNNING:
                return 0
        return n

    def _victim(self, asking: Sequence) -> Sequence | None:
        """The largest rank above the asking one that has nothing in this plan, else the asking one itself, if
        that is so; never the smallest rank of all, so that somebody always gets on."""
        for seq in reversed(self._running):
            if seq.rank == asking.rank:
                break
            if self._granted.isdisjoint(self._book.mates(seq)):
                return seq
        if asking.rank == self._running[0].rank or not self._granted.isdisjoint(self._book.mates(asking)):
            return None
        return asking

    def _preempt(self, plan: Plan, seq: Sequence, other: Sequence) -> None:
        group = self._book.groups[seq.request.id]
        for one in group.sequences:
            one.reached = max(one.reached, one.computed)
            self._pool.release(one)
            one.draft = []
            one.state = State.WAITING
            self._running.remove(one)
        self._waiting[group.sequences[0]] = None
        self._order.queued(group.sequences[0])
        plan.preempted[seq.request.id] = other.request.id
        self._counters.preemptions += 1

    def _admit(self, plan: Plan, view: View, seq: Sequence, n: int) -> int:
        """Let a waiting sequence run, and those of its search with it, if all they are promised fits beside
        what the others were promised."""
        mates = self._book.mates(seq)
        if plan.preempted or len(self._running) + len(mates) > max(self._max_running, len(mates)):
            return 0
        if not self._fits(mates, n, view.reserve):
            return 0
        self._attach(seq)
        n = min(n, seq.pending, self._pool.longest(seq.computed))
        if len(mates) > 1:  # some of the recent blocks are for the others
            n = min(n, self._pool.room(seq))
        if not self._pool.extend(seq, n):
            raise AssertionError("a sequence that fits did not fit")
        rank = seq.rank
        if rank is None:
            rank = (seq.request.priority, self._admissions)
            self._admissions += 1
        del self._waiting[seq]
        for one in mates:
            one.rank, one.state = rank, State.RUNNING
            insort(self._running, one, key=attrgetter("rank"))
        return n

    def _fits(self, joining: list[Sequence], n: int, reserve: Reserve) -> bool:
        """Whether all they are promised, n tokens in this step, fits beside what the others are promised."""
        pool, full, sliding = self._pool, 0, 0
        for one in (*joining, *self._running):
            first, mate = one is joining[0], one.state is State.WAITING
            step = max(n, self._budget) if first else 1 if mate else self._budget
            beside = len(joining) - 1 if first else 0
            more = pool.claims(one, reserve(one, self._peak(one), pool.block_size), step, beside)
            full, sliding = full + more[0], sliding + more[1]
            if full > pool.full.available or sliding > pool.sliding.num_blocks:
                return False
        return True

    def _attach(self, seq: Sequence) -> None:
        """Give it what is there of its KV. Those of one search take it one by one, when they get on, so that
        each finds what the ones before it have computed."""
        attached = self._pool.attach(seq)
        if seq.rank is None and not seq.request.resume:
            self._counters.prompt_tokens += seq.prompt_len
        self._counters.cached_tokens += hit(seq, attached)

    # -- commit ----------------------------------------------------------------------------------------------
    def commit(self, plan: Plan, result: Result, now: float) -> list[Event]:
        """Make the step part of the sequences. One event for each sequence that gained tokens or ended."""
        if plan is not self._plan:
            if plan.items:
                raise ValueError("not the plan under way")
            return []
        if len(result.outputs) != len(plan.items):
            raise ValueError(f"{len(result.outputs)} outputs for {len(plan.items)} items")
        self._plan = None
        self.pace.took(plan.tokens, now - plan.at)
        self._pool.settle()
        self._counters.steps += 1
        self._counters.step_tokens += plan.tokens
        events: list[Event] = []
        for item, output in zip(plan.items, result.outputs, strict=True):
            seq = item.sequence
            if seq.state is not State.RUNNING:
                continue
            self._order.served(seq, item.n, now)
            group = self._book.groups[seq.request.id]
            if output.failure is not None:
                events += self._fail(group, output.failure)
            elif isinstance(group, Search):
                events += self._search(group, item, output)
            elif (event := self._advance(seq, item, output)) is not None:
                events.append(event)
        if any(event.finish is not None for event in events):
            self._running = [seq for seq in self._running if seq.state is State.RUNNING]
        self._let_go()
        return events

    def _search(self, group: Search, item: Item, output: Output) -> list[Event]:
        """Take in what one item of a search gave. When all are computed to their ends, who goes on shares
        the blocks of what it goes on from, and those of all others go back."""
        seq, at_end = item.sequence, item.wants_logits
        self._counters.recomputed_tokens += move(seq, seq.computed + item.n)
        self._pool.seal(seq)
        self._pool.trim(seq)
        if not at_end or not group.offer(seq, output):
            return []
        if branches := group.turn():
            take_over(branches, group.sequences, self._pool)
            return []
        return self._end(group, group.events())

    def _advance(self, seq: Sequence, item: Item, output: Output) -> Event | None:
        """Take in what one item gave. Only the KV of accepted tokens counts as computed."""
        n, position, scored, drafted = item.n, len(seq.tokens), item.scored, item.drafted
        if len(output.prompt_logprobs) != len(scored):
            raise ValueError(f"{len(output.prompt_logprobs)} prompt logprobs for {len(scored)} positions")
        if scored:
            seq.scored = scored.stop
        if seq.computed + n < position:
            if output.tokens:
                raise ValueError("tokens for a sequence that is not computed to its end")
            self._counters.recomputed_tokens += move(seq, seq.computed + n)
            self._pool.seal(seq)
            self._pool.trim(seq)
            return news(seq, position, [], output, None, scored) if scored else None
        if not output.tokens or len(output.tokens) > seq.computed + n - position + 1:
            raise ValueError(f"{len(output.tokens)} tokens from {n} computed")
        if drafted:
            self._counters.count_draft(drafted, len(output.tokens) - 1)
        tokens, finish = cut(seq, output.tokens)
        seq.tokens += tokens
        self._counters.recomputed_tokens += move(seq, len(seq.tokens) - 1)
        self._counters.generated_tokens += len(tokens)
        self._pool.seal(seq)
        if finish is not None:
            self._predictor.learn(seq)
            self._finish(seq)
        else:
            seq.draft = output.draft and self._bounded(seq, output.draft)
            self._pool.trim(seq)
        return news(seq, position, tokens, output, finish, scored)

    def _bounded(self, seq: Sequence, draft: list[int]) -> list[int]:
        """What of a draft can be of use: at most its share of the budget, nothing past the sequence's end."""
        return draft[: min(self._max_draft, seq.limit - len(seq.tokens) - 1)]

    def _fail(self, group: Group, failure: Failure) -> list[Event]:
        if isinstance(group, Search):
            return self._end(group, group.failed(failure))
        seq = group.sequences[0]
        self._finish(seq, failure)
        return [news(seq, len(seq.tokens), [], Output(), "error", range(0), failure)]

    def _end(self, group: Search, events: list[Event]) -> list[Event]:
        """A search is over for all of its choices."""
        for seq in group.sequences:
            self._finish(seq)
        self._counters.generated_tokens += sum(len(event.tokens) for event in events)
        return events

    def _finish(self, seq: Sequence, failure: Failure | None = None) -> None:
        seq.state = State.FINISHED
        self._order.ended(seq)
        if seq.request.pin and failure is None:
            self.pins.keep(seq)
        else:
            self.pins.forget(seq.request.id)
            self._pool.release(seq)
        self._book.strike(seq.request.id)

    def _let_go(self) -> None:
        for seq in self._leaving:
            self._pool.release(seq)
        self._leaving = []

    # -- sizes -----------------------------------------------------------------------------------------------
    def _most(self, seq: Sequence, share: int) -> int:
        """The most tokens it may hold. Without max_tokens: what the context allows, and its share of the pool
        as it is."""
        if (max_tokens := seq.request.params.max_tokens) is None:
            return min(self._max_model_len, max(share, seq.prompt_len) + 1)
        return min(self._max_model_len, seq.prompt_len + max_tokens)

    def _largest(self, group: Group) -> int:
        """Positions that all of its sequences can ever need, in whole blocks."""
        blocks = self._pool.blocks_for(self._peak(group.sequences[0]))
        return len(group.sequences) * blocks * self._pool.block_size

    def _peak(self, seq: Sequence) -> int:
        """Positions whose KV it can ever need: the last token of a sequence is never computed."""
        return seq.limit - 1

    def _need(self, seq: Sequence) -> int:
        if seq.state is State.RUNNING:
            return min(seq.pending, self._budget)
        cached = self._pool.attachable(seq)
        return min(seq.pending - cached, self._pool.longest(cached))

    # -- figures ---------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, float]:
        """Gauges and counters by the names of channel.Stats, and the pool's own. kv_contiguous: tokens that
        servers without pages would reserve for who runs now, the longest sequence for each."""
        running, account = len(self._running), self._pool.account([*self._running, *self.pins.sequences])
        figures = {"running": float(running), "waiting": float(len(self._waiting))}
        figures |= {"pinned": float(len(self.pins)), "kv_contiguous": float(running * self._max_model_len)}
        return figures | self._pool.stats() | account | self._counters.as_dict() | self._predictor.stats()

    def check(self) -> None:
        """AssertionError unless everything it holds is consistent. Exact and slow: for tests."""
        audit(self._book, self._running, self._waiting)
        for seq in self._running:
            assert self._plan or len(seq.blocks) == self._pool.blocks_for(seq.computed), "spare blocks"
        self._pool.check([*self._running, *self._leaving, *self.pins.sequences])
