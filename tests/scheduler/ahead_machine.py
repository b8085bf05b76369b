"""The property machine of an engine that plans one step ahead: plan k+1 is made, and often begun, before k is
committed; a token may be unknown when it is planned.

The device does steps in order, each with the block tables as they were when it was launched, at some moment
between its launch and its commit. What it then writes and reads is held against the shadow. The token of step
k goes to step k+1 on the device: the plan only says that there is one. Steps are run again after later ones
were, as after an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pageturner.request import Failure
from pageturner.scheduler.types import Output, Plan, Result, Sequence, State
from support.schedulers import check

from .machine import Build, Machine, candidates, next_token, prompt_logprob
from .shadow import tables


@dataclass(slots=True)
class Launched:
    """One item as the device has it.

    begin    position of its first token
    length   tokens of its sequence, without drafts
    tokens   everything up to its end; unknown: but for the last one, which the step before gives
    tables   its block tables as they were
    """

    seq: Sequence
    begin: int
    length: int
    tokens: list[int]
    unknown: bool
    tables: list[list[int]]
    scored: range
    public: int
    output: Output = field(default_factory=Output)


@dataclass(slots=True)
class Step:
    """A plan that was launched."""

    plan: Plan
    items: list[Launched]
    before: Step | None
    done: bool = False


class AheadMachine(Machine):
    """One run, in which most steps are planned ahead."""

    def __init__(
        self, seed: int, build: Build, config: dict[str, Any] | None = None, **about: Any
    ) -> None:
        super().__init__(seed, build, {"policy": "chunked"} | (config or {}), **about)
        self.totals |= {"ahead": 0, "unknown": 0, "passed_over": 0, "joined_ahead": 0}
        self.eager = self.dice.choice((0.5, 0.95, 0.95))

    def _boot(self) -> None:
        super()._boot()
        self.under_way: list[Step] = []

    # -- the loop of the engine ------------------------------------------------------------------------------
    def step(self) -> bool:
        """One turn: what can be planned ahead is, then the first step under way is committed."""
        if not self.under_way:
            plan = self.plan()
            if not plan.items:
                return False
            self._launch(plan)
        if self.rng.random() < 0.05:
            self.abort()
            check(self.stack)
        if self.punctual and self.rng.random() < 0.3:
            self.expire()
        if self._foreseen() and self.rng.random() < self.eager:
            self._plan_ahead()
        if self.rng.random() < 0.05:
            self.abort()
            check(self.stack)
        self._commit()
        self.steps += 1
        return True

    def _foreseen(self) -> bool:
        """As the caller promises: nobody drafts, searches or scores its prompt in the step under way."""
        sequences = [item.sequence for item in self.under_way[0].plan.items]
        scores = any(seq.logits_from is not None for seq in sequences)
        return not scores and not any(
            seq.draft or seq.request.params.beam_width for seq in sequences
        )

    def _plan_ahead(self) -> None:
        self.now += 0.01
        queue = list(self.scheduler.waiting)
        self.rules.prepare(queue, self.now)
        plan = self.scheduler.plan_ahead(self.now)
        assert not plan.preempted, "somebody's blocks were taken under a step"
        for item in plan.items:
            assert item.sequence.state is State.RUNNING
            assert item.start + item.n <= self.peak(item.sequence), "past the end of a sequence"
        check(self.stack)
        if plan.items:
            self.totals["ahead"] += 1
            self.totals["joined_ahead"] += sum(item.sequence in queue for item in plan.items)
            self._launch(plan)

    def _launch(self, plan: Plan) -> None:
        """The device has it; nothing that happens to the sequences from here on reaches it."""
        items = []
        for item in plan.items:
            seq = item.sequence
            unknown = item.start == len(seq.tokens)
            assert item.start == seq.computed + seq.inflight - item.n, (
                "not where the step before ends"
            )
            assert item.start <= len(seq.tokens), "the token before the last is not known either"
            items.append(
                Launched(
                    seq,
                    item.start,
                    len(seq.tokens) + unknown,
                    [*seq.tokens, *seq.draft][: item.start + item.n],
                    unknown,
                    [list(table) for table in tables(self.pool, seq)],
                    item.scored,
                    seq.public,
                )
            )
        self.totals["unknown"] += sum(one.unknown for one in items)
        step = Step(plan, items, self.under_way[-1] if self.under_way else None)
        self.under_way.append(step)
        if self.rng.random() < 0.5:
            self._run(step)

    def _commit(self) -> None:
        step = self.under_way[0]
        self._run(step)
        if self.rng.random() < 0.2:
            self._run_again(step)
        plan = step.plan
        ignored = {item.sequence.request.id for item in plan.items} - set(self.streams)
        over = [item.sequence.state is not State.RUNNING for item in plan.items]
        self.totals["passed_over"] += sum(over)
        spans = [
            (item.sequence, item.start, item.n)
            for item, passed in zip(plan.items, over, strict=True)
            if not passed
        ]
        self.let_time_pass(plan)
        for one, passed in zip(step.items, over, strict=True):
            assert passed or one.seq.computed == one.begin, (
                "committed in another order than planned"
            )
        result = Result([one.output for one in step.items])
        events = self.scheduler.commit(plan, result, self.now)
        self.under_way.pop(0)
        self.take(events, ignored, spans)

    # -- the device ------------------------------------------------------------------------------------------
    def _run(self, step: Step) -> None:
        """In order: what was launched before it has been done."""
        if step.done:
            return
        if step.before is not None:
            self._run(step.before)
            chosen = {one.seq: one.output.tokens for one in step.before.items}
            for one in step.items:
                if one.unknown:
                    one.tokens += chosen[one.seq][:1] or [
                        0
                    ]  # of one that failed whatever lies there
        self.shadow.copy(*step.plan.copies)
        self._compute(step)
        step.done, step.before = True, None

    def _run_again(self, step: Step) -> None:
        """After an error: without its copies, perhaps behind the next one."""
        if self.rng.random() < 0.5:
            self._run(self.under_way[-1])
        told = [one.output for one in step.items]
        self._compute(step)
        assert [one.output for one in step.items] == told, (
            "running a step again gave something else"
        )

    def _compute(self, step: Step) -> None:
        for one in step.items:
            self.shadow.write_at(one.seq.request, one.begin, one.tokens, one.tables, one.public)
        for one in step.items:
            read = self.shadow.read_at(
                one.seq.request, one.begin, one.tokens, one.tables, one.public
            )
            one.output = self._answer(one, read)

    def _answer(self, one: Launched, read: list[int]) -> Output:
        seq = one.seq
        scored = [prompt_logprob(read[position - one.begin]) for position in one.scored]
        if len(one.tokens) < one.length:
            return Output(prompt_logprobs=scored)
        fails_at, generated = self.fails_at[seq.request.id], one.length - seq.prompt_len
        if generated == fails_at:
            return Output(failure=Failure("fake", "told to fail"))
        read = read[one.length - one.begin - 1 :]
        if seq.request.params.beam_width:
            return Output(candidates=candidates(read[0]))
        tokens: list[int] = []
        for chain, drafted in zip(read, [*one.tokens[one.length :], None], strict=True):
            tokens.append(next_token(chain, seq.index))
            if tokens[-1] != drafted or generated + len(tokens) == fails_at:
                break
        draft = self.propose_behind(seq, [*one.tokens[: one.length], *tokens])
        return Output(tokens, draft=draft, prompt_logprobs=scored)

    def drain_bound(self) -> int:
        """A plan made ahead may give nothing to the smallest rank, or be passed over: the next one is not."""
        return 2 * super().drain_bound() + len(self.streams) + 1
