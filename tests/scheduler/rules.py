"""What each order and policy promises, written down once more and held against every plan of the machine.

Knows a plan, who ran and who waited before it, and the time; keeps its own memory of earlier plans.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from pageturner.policies.background import in_background
from pageturner.policies.orders import RENEWED
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.policies.work_pricing import FREE
from pageturner.scheduler.types import Plan, Sequence, State


class Rules:
    """AssertionError at the first plan that breaks the promise of its order or its policy."""

    def __init__(
        self, config: dict[str, Any], peak: Callable[[Sequence], int], stack: SchedulerStack
    ) -> None:
        self._config = config
        self._stack = stack
        self._peak = peak
        self._free: float | None = None  # since when a batch policy was seen without a batch
        self._batch: list[Sequence] = []
        self._without = 0  # steps without a prefill
        self._served: dict[str, float] = {}  # when a tenant had something computed
        self._figures: dict[
            Sequence, tuple[float, ...]
        ] = {}  # by which the order promises to go, before the plan

    def prepare(self, queue: list[Sequence], now: float) -> None:
        """Before a plan: what each who waits has to show. Orders that estimate may be late in long queues."""
        figure = {
            "sjf": self._work,
            "prefix": self._cached,
            "deadline": self._slack,
            "adaptive": self._work,
        }
        find = figure.get(self._config["order"])
        known = find is not None and len(queue) <= RENEWED
        self._figures = {seq: find(seq, now) for seq in queue} if find and known else {}

    def computed(self, plan: Plan, now: float) -> None:
        """Before its commit: who got something; not those who left meanwhile."""
        for item in plan.items:
            if item.sequence.state is State.RUNNING:
                self._served[item.sequence.request.tenant] = now

    def _work(self, seq: Sequence, now: float) -> tuple[float, ...]:
        answer = self._stack.predictor.length(seq) - seq.generated
        return (self._uncached(seq) + self._config["output_weight"] * answer,)

    def _cached(self, seq: Sequence, now: float) -> tuple[float, ...]:
        return (self._uncached(seq) - len(seq.tokens),)

    def _uncached(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._stack.pool.attachable(seq)

    def _slack(self, seq: Sequence, now: float) -> tuple[float, ...]:
        """(0, slack) while a target can be met."""
        request, pace, slack = seq.request, self._stack.step_times, inf
        prefill = pace.each * self._uncached(seq)
        if request.ttft_target is not None and not seq.generated:
            slack = request.arrival + request.ttft_target - now - prefill
        if request.deadline is not None:
            answer = self._stack.predictor.length(seq) - seq.generated
            slack = min(slack, request.deadline - now - prefill - answer * pace.step)
        return (0, slack) if 1e-9 < slack < inf else (1,) if slack < -1e-9 or slack == inf else ()

    def audit(self, plan: Plan, running: list[Sequence], queue: list[Sequence], now: float) -> None:
        """`running` in rank order and `queue` as they were before the plan, which is not committed yet."""
        joined = [item.sequence for item in plan.items if item.sequence in queue]
        self._audit_order(
            joined, [seq for seq in queue if seq not in joined and not self._dear(seq)], now
        )
        match self._config["policy"]:
            case "static" | "window":
                self._audit_batch(plan, joined, queue, now)
            case "chunked":
                self._audit_chunked(plan, running)
            case "orca":
                self._audit_whole(plan, running)
                self._audit_orca(plan, running, joined, queue)
            case "prefill_first":
                self._audit_whole(plan, running)
            case "served_ratio":
                self._audit_whole(plan, running)
                self._audit_served_ratio(plan, running, joined, queue)

    def _dear(self, seq: Sequence) -> bool:
        """Who may have to stand aside: for what its rows cost, or behind short prompts."""
        position = self._config.get("context_price", 0.0) / 1000
        return seq.request.row_price > 0 or len(seq.tokens) * position >= FREE

    def _audit_order(self, joined: list[Sequence], left: list[Sequence], now: float) -> None:
        """The ageing bound: nobody is let in past one that has waited so long and came before. Before that,
        nobody past one that the order promises to prefer; but who shares a prompt comes behind its first."""
        for seq in joined:
            for other in left:
                came_before = _arrival(other) < _arrival(seq)
                if self._aged(other, now):
                    fits = self._aged(seq, now) and not came_before
                    assert fits, (
                        f"{seq.request.id} overtook {other.request.id}, which had waited long enough"
                    )
                elif not self._aged(seq, now) and other.source not in (*joined, *left):
                    assert not self._prefers(other, seq, came_before), (
                        f"{seq.request.id} overtook {other.request.id}"
                    )

    def _aged(self, seq: Sequence, now: float) -> bool:
        request, order = seq.request, self._config["order"]
        since = request.arrival
        if order == "fair":
            since = max(since, self._served.get(request.tenant, -inf))
        return now >= since + (self._config["ageing"] if order != "fcfs" else 0.0)

    def _prefers(self, one: Sequence, other: Sequence, came_before: bool) -> bool:
        """Whether `one` goes before `other` by all that the order promises, both not aged."""
        mine, theirs = self._figures.get(one), self._figures.get(other)
        match self._config["order"]:
            case "priority":
                first, second = one.request.priority, other.request.priority
                return first < second or (first == second and came_before)
            case "fair":  # what it promises to tenants: promises.py
                return one.request.tenant == other.request.tenant and came_before
            case "adaptive" if mine and theirs:
                return (
                    came_before
                    and mine <= theirs
                    and one.request.priority <= other.request.priority
                )
            case "sjf" | "prefix" if mine and theirs:
                return mine < theirs or (mine == theirs and came_before)
            case "deadline" if mine and theirs:
                return mine < theirs or (mine == theirs == (1,) and came_before)
        return False

    def _audit_batch(
        self, plan: Plan, joined: list[Sequence], queue: list[Sequence], now: float
    ) -> None:
        """A batch starts full, or when it is due, and then at once; until it has ended nobody joins."""
        if any(seq.state is not State.FINISHED for seq in self._batch):
            assert not joined, "joined a batch under way"
            rows = len(plan.items) + sum(rows for rows, _ in plan.ballast)
            assert rows == sum(map(_slots, self._batch)), "a batch shrinks or grows"
            return
        self._batch = joined
        if not queue:
            return
        if self._free is None:
            self._free = now
        oldest = min(seq.request.arrival for seq in queue)
        if self._config["policy"] == "window":
            due = oldest + self._config["window_ms"] / 1000
        else:
            due = max(self._free, oldest) + self._config["static_patience"]
        size = min(self._config["static_batch"], self._most_running)
        assert len(joined) <= size
        assert bool(joined) == (len(queue) >= size or now >= due), (
            "a batch started too early or too late"
        )
        if joined:
            self._free = None
            longest = max(len(seq.tokens) for seq in joined)
            assert all(context == longest for _, context in plan.ballast), (
                "not padded to the longest"
            )
            assert plan.tokens == len(joined) * max(item.n for item in plan.items), "not padded"

    def _audit_whole(self, plan: Plan, running: list[Sequence]) -> None:
        """Only one prompt alone may go over the budget."""
        decoding = _decoding(running)
        prompts = [item for item in plan.items if item.sequence not in decoding]
        if len(prompts) > 1 and self._config["token_budget"]:
            assert plan.tokens <= self._config["token_budget"], (
                "prompts share a step over the budget"
            )

    def _audit_chunked(self, plan: Plan, running: list[Sequence]) -> None:
        """Who decodes waits for no more of a prompt than was said. The background is nobody's affair."""
        most = self._config.get("max_prefill_beside_decode", 0)
        decoding = _decoding(running)
        items = [item for item in plan.items if not in_background(item.sequence)]
        if most and any(item.sequence in decoding for item in items):
            prompts = sum(item.n for item in items if item.sequence not in decoding)
            assert prompts <= most, f"{prompts} tokens of prompts beside who decodes"

    def _audit_orca(
        self, plan: Plan, running: list[Sequence], joined: list[Sequence], queue: list[Sequence]
    ) -> None:
        """Who runs gets its token in every step; who joins computes its whole prompt in that step."""
        granted = {item.sequence for item in plan.items}
        assert granted == {*(seq for seq in running if _gap(seq)), *joined}, (
            "somebody who runs was left out"
        )
        for item in plan.items:
            assert item.n == _gap(item.sequence) or self._too_long(item.sequence), (
                "a prompt was split"
            )
        assert joined or not self._fits(running, queue), "nobody joined, though somebody fits"

    def _audit_served_ratio(
        self, plan: Plan, running: list[Sequence], joined: list[Sequence], queue: list[Sequence]
    ) -> None:
        """Who waits gets in by the ratio or after so many steps; a step is all prefill or all decode."""
        due = len(queue) > self._config["served_ratio"] * len(running)
        due = due or self._without >= self._config["served_steps"]
        assert due or not joined, "prefill too early"
        decoding = _decoding(running)
        granted = {item.sequence for item in plan.items}
        assert granted <= decoding or not granted & decoding, "prefill and decode in one step"
        if due and granted <= decoding:
            assert not self._fits(running, queue), "prefill too late"
        self._without = self._without + 1 if granted <= decoding else 0

    def _fits(self, running: list[Sequence], queue: list[Sequence]) -> bool:
        """Whether even the largest who waits has room beside all who run, everybody at its peak."""
        if not queue or len(running) + max(map(_slots, queue)) > self._most_running:
            return False
        states = min(self._config.get(name, 1 << 30) for name in ("states", "tails"))
        if 2 * (len(running) + max(map(_slots, queue))) > states:
            return False
        size = self._config["block_size"]
        blocks = sum(-(-self._peak(seq) // size) for seq in running)
        blocks += max(-(-self._peak(seq) // size) * _slots(seq) for seq in queue)
        return blocks <= min(self._config["num_blocks"] - self._stack.pins.blocks, self._recent)

    @property
    def _recent(self) -> int:
        """Recent blocks there are; without a window they are no limit."""
        blocks: int = (
            self._config["sliding"] if self._config["window"] else self._config["num_blocks"]
        )
        return blocks

    def _too_long(self, seq: Sequence) -> bool:
        """Whether its gap cannot be computed in one step, since the recent blocks do not hold all of it."""
        return len(seq.tokens) + len(seq.draft) > self._recent * self._config["block_size"]

    @property
    def _most_running(self) -> int:
        most: int = self._config["max_num_seqs"]
        return min(most, self._config["token_budget"] or most)


def _arrival(seq: Sequence) -> tuple[float, int]:
    return (seq.request.arrival, seq.request.id)


def _decoding(running: list[Sequence]) -> set[Sequence]:
    return {seq for seq in running if len(seq.tokens) - seq.computed == 1}


def _slots(seq: Sequence) -> int:
    """Running sequences that one who waits becomes."""
    return max(1, seq.request.params.beam_width)


def _gap(seq: Sequence) -> int:
    """What it had to compute before the plan."""
    return len(seq.tokens) + len(seq.draft) - seq.computed
