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

from pageturner.core.admission import Reserve, refuse_impossible, refuse_queue_full
from pageturner.core.batching import Policy, View
from pageturner.core.blocks import BlockPool
from pageturner.core.group import Group, make_group
from pageturner.core.order import Order
from pageturner.core.pins import Pins
from pageturner.core.sharing import held, source_of
from pageturner.core.stats import Counters
from pageturner.core.types import Event, Failure, Item, Output, Plan, Request, Result, Sequence, State

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
        self._budget = token_budget or UNLIMITED
        self._max_running = min(max_num_seqs, self._budget)
        self._max_draft = self._budget // self._max_running - 1  # so that all drafts together fit the budget
        self._max_model_len = max_model_len
        self._max_queue = max_queue
        self._groups: dict[int, Group] = {}
        self._waiting: dict[Sequence, None] = {}
        self._running: list[Sequence] = []  # by rank, smallest first
        self.pins = Pins(pool)
        self._leaving: list[Sequence] = []  # aborted under a plan, which still uses their blocks
        self._plan: Plan | None = None
        self._granted: set[Sequence] = set()
        self._admissions = 0
        self._counters = Counters()

    # -- requests --------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request. Refused with queue_full, empty_prompt, prompt_too_long, kv_too_small,
        nothing_to_generate, n_unsupported or pin_too_large; ValueError for an id that is here already."""
        if request.id in self._groups or request.id in self.pins:
            raise ValueError(f"request {request.id} is here already")
        if not request.resume:
            refuse_queue_full(len(self._waiting), self._max_queue)
        group = make_group(request)
        for seq in group.sequences:
            seq.limit = self._most(seq)
            refuse_impossible(seq, seq.limit, self._max_model_len, self._capacity)
            if request.pin:
                others = [self._peak(one) for group in self._groups.values() for one in group.sequences]
                self.pins.promise(seq, self._peak(seq), max(others, default=0))
        self._groups[request.id] = group
        source = source_of(request, self._groups)
        for seq in group.sequences:
            seq.source = source
            self._waiting[seq] = None
            if request.resume:
                seq.reached = len(seq.tokens) - 1

    def abort(self, id: int) -> bool:
        """Forget the request: no event, its blocks go back now, or with the commit of the plan under way,
        which may be run again until then. False if there is no such request."""
        group = self._groups.pop(id, None)
        if group is None:
            return False
        self.pins.forget(id)
        for seq in group.sequences:
            if seq.state is State.RUNNING:
                self._running.remove(seq)
                self._leaving.append(seq)
            self._waiting.pop(seq, None)
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
        return (
            len(self._waiting),
            len(self._running),
            self._pool.whole.num_blocks - self._pool.whole.available,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    # -- plan ------------------------------------------------------------------------------------------------
    def plan(self, now: float) -> Plan:
        """The next step. One with items must be committed before the next is asked for."""
        if self._plan is not None:
            raise RuntimeError("the last plan was not committed")
        plan = Plan()
        if not self._groups:
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
            plan.copies, plan.recent_copies = self._pool.whole.copies, self._pool.recent.copies
            plan.ballast = view.ballast
            self._plan = plan
        else:
            plan.wake = view.wake
        return plan

    def _view(self, now: float) -> View:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self._running:
            (decoding if len(seq.tokens) - seq.computed == 1 else prefilling).append(seq)
        joins = self._max_running - len(self._running)
        waiting = sorted(self._waiting, key=lambda seq: self._order.key(seq, now)) if joins else []
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
            together=lambda tokens: self._pool.together(tokens, self.pins.blocks),
            reserve=self._reserve,
        )

    def _grant(self, plan: Plan, view: View, seq: Sequence, n: int) -> int:
        """Answer one ask: the tokens granted, with their blocks."""
        if seq in self._granted:
            return 0
        n = min(n, view.left)
        if n <= 0:
            return 0
        if seq.state is State.RUNNING:
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
            self._preempt(plan, victim)
            if victim is seq:
                return 0
        return n

    def _victim(self, asking: Sequence) -> Sequence | None:
        """The largest rank above the asking one that has nothing in this plan, else the asking one itself;
        never the smallest rank of all, so that somebody always gets on."""
        for seq in reversed(self._running):
            if seq is asking:
                break
            if seq not in self._granted:
                return seq
        return None if asking is self._running[0] else asking

    def _preempt(self, plan: Plan, seq: Sequence) -> None:
        seq.reached = max(seq.reached, seq.computed)
        self._pool.release(seq)
        seq.draft = []
        seq.state = State.WAITING
        self._running.remove(seq)
        self._waiting[seq] = None
        plan.preempted.append(seq.request.id)
        self._counters.preemptions += 1

    def _admit(self, plan: Plan, view: View, seq: Sequence, n: int) -> int:
        """Let a waiting sequence run if all it is promised fits beside what the others were promised."""
        if plan.preempted or len(self._running) >= self._max_running or not self._fits(seq, n, view.reserve):
            return 0
        attached = self._pool.attach(seq)
        n = min(n, seq.pending, self._pool.longest(seq.computed))
        if not self._pool.extend(seq, n):
            raise AssertionError("a sequence that fits did not fit")
        self._count_admission(seq, attached)
        if seq.rank is None:
            seq.rank = (seq.request.priority, self._admissions)
            self._admissions += 1
        seq.state = State.RUNNING
        del self._waiting[seq]
        insort(self._running, seq, key=_rank)
        return n

    def _fits(self, seq: Sequence, n: int, reserve: Reserve) -> bool:
        """Whether all it is promised, n tokens in this step, fits beside what the others are promised."""
        pool, most, whole, recent = self._pool, max(n, self._budget), 0, 0
        for one in (seq, *self._running):
            more = pool.claims(one, reserve(one, self._peak(one), pool.block_size), most)
            whole, recent, most = whole + more[0], recent + more[1], self._budget
            if whole > pool.whole.available or recent > pool.recent.available:
                return False
        return True

    def _count_admission(self, seq: Sequence, attached: int) -> None:
        """What the cache gave is a hit only as far as it was never computed for this sequence before."""
        if seq.rank is None and not seq.request.resume:
            self._counters.prompt_tokens += seq.prompt_len
        hit = max(0, attached - seq.reached)
        seq.reached += hit
        seq.cached += hit
        self._counters.cached_tokens += hit

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
        self._pool.settle()
        self._counters.steps += 1
        self._counters.step_tokens += plan.tokens
        events: list[Event] = []
        ended = False
        for item, output in zip(plan.items, result.outputs, strict=True):
            seq = item.sequence
            if seq.state is not State.RUNNING:
                continue
            self._order.served(seq, item.n)
            event = self._advance(seq, item, output)
            if event is not None:
                events.append(event)
                ended = ended or event.finish is not None
        if ended:
            self._running = [seq for seq in self._running if seq.state is State.RUNNING]
        self._let_go()
        return events

    def _advance(self, seq: Sequence, item: Item, output: Output) -> Event | None:
        """Take in what one item gave. Only the KV of accepted tokens counts as computed."""
        if output.failure is not None:
            return self._fail(seq, output.failure)
        n, position, scored, drafted = item.n, len(seq.tokens), item.scored, item.drafted
        if len(output.prompt_logprobs) != len(scored):
            raise ValueError(f"{len(output.prompt_logprobs)} prompt logprobs for {len(scored)} positions")
        if scored:
            seq.scored = scored.stop
        if seq.computed + n < position:
            if output.tokens:
                raise ValueError("tokens for a sequence that is not computed to its end")
            self._move(seq, seq.computed + n)
            self._pool.seal(seq)
            self._pool.trim(seq)
            return _news(seq, position, [], output, None, scored) if scored else None
        if not output.tokens or len(output.tokens) > seq.computed + n - position + 1:
            raise ValueError(f"{len(output.tokens)} tokens from {n} computed")
        if drafted:
            self._counters.count_draft(drafted, len(output.tokens) - 1)
        tokens, finish = self._cut(seq, output.tokens)
        seq.tokens += tokens
        self._move(seq, len(seq.tokens) - 1)
        self._counters.generated_tokens += len(tokens)
        self._pool.seal(seq)
        if finish is not None:
            self._finish(seq)
        else:
            seq.draft = output.draft and self._bounded(seq, output.draft)
            self._pool.trim(seq)
        return _news(seq, position, tokens, output, finish, scored)

    def _move(self, seq: Sequence, end: int) -> None:
        """The KV up to `end` is there. What of it had been there before was computed once more."""
        if seq.computed < seq.reached:
            again = min(end, seq.reached) - seq.computed
            seq.recomputed += again
            self._counters.recomputed_tokens += again
        seq.computed = end

    def _bounded(self, seq: Sequence, draft: list[int]) -> list[int]:
        """What of a draft can be of use: at most its share of the budget, nothing past the sequence's end."""
        return draft[: min(self._max_draft, seq.limit - len(seq.tokens) - 1)]

    def _cut(self, seq: Sequence, tokens: list[int]) -> tuple[list[int], str | None]:
        """The tokens up to the end of the sequence, and why it ends there, if it does."""
        params, limit = seq.request.params, seq.limit
        for length, token in enumerate(tokens, len(seq.tokens) + 1):
            if token in params.stop_ids and length - seq.prompt_len >= params.min_tokens:
                return tokens[: length - len(seq.tokens)], "stop"
            if length >= limit:
                return tokens[: length - len(seq.tokens)], "length"
        return tokens, None

    def _fail(self, seq: Sequence, failure: Failure) -> Event:
        self._finish(seq, failure)
        return Event(
            seq.request.id, seq.index, len(seq.tokens), (), (), "error", failure, seq.cached, seq.recomputed
        )

    def _finish(self, seq: Sequence, failure: Failure | None = None) -> None:
        seq.state = State.FINISHED
        if seq.request.pin and failure is None:
            self.pins.keep(seq)
        else:
            self.pins.forget(seq.request.id)
            self._pool.release(seq)
        if self._groups[seq.request.id].done:
            del self._groups[seq.request.id]

    def _let_go(self) -> None:
        for seq in self._leaving:
            self._pool.release(seq)
        self._leaving = []

    # -- sizes -----------------------------------------------------------------------------------------------
    @property
    def _capacity(self) -> int:
        return (self._pool.whole.num_blocks - self.pins.blocks) * self._pool.block_size

    def _most(self, seq: Sequence) -> int:
        """The most tokens it may hold. Without max_tokens: what the context allows, and the pool as it is."""
        if (max_tokens := seq.request.params.max_tokens) is None:
            return min(self._max_model_len, max(self._capacity, seq.prompt_len) + 1)
        return min(self._max_model_len, seq.prompt_len + max_tokens)

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
        return figures | self._pool.stats() | account | self._counters.as_dict()

    def check(self) -> None:
        """AssertionError unless everything it holds is consistent. Exact and slow: for tests."""
        assert self._running == sorted(self._running, key=_rank), "running sequences are not in rank order"
        known = [seq for group in self._groups.values() for seq in group.sequences]
        states = {State.RUNNING: set(self._running), State.WAITING: set(self._waiting)}
        for state, members in states.items():
            assert members == {seq for seq in known if seq.state is state}, f"{state} sequences differ"
        for seq in self._waiting:
            assert (seq.blocks, seq.computed, seq.draft) == ([], 0, []), "a waiting sequence holds something"
        for seq in self._running:
            assert seq.computed < len(seq.tokens) < seq.limit, "a sequence ran past its end"
            assert self._plan or len(seq.blocks) == self._pool.blocks_for(seq.computed), "spare blocks"
        self._pool.check([*self._running, *self._leaving, *self.pins.sequences])


def _news(
    seq: Sequence, position: int, tokens: list[int], output: Output, finish: str | None, scored: range
) -> Event:
    request, logprobs = seq.request, tuple(output.logprobs[: len(tokens)])
    told = (tuple(output.prompt_logprobs), scored.start + 1) if scored else ()
    return Event(
        request.id,
        seq.index,
        position,
        tuple(tokens),
        logprobs,
        finish,
        None,
        seq.cached,
        seq.recomputed,
        *told,
    )


def _rank(seq: Sequence) -> tuple[int, int]:
    assert seq.rank is not None
    return seq.rank
