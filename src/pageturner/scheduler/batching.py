"""Batching policies: which sequence gets how many tokens in a step, and why no further one was
admitted.

A policy is a generator. It asks for (sequence, n) and is told how many tokens were granted: fewer
if the budget or the memory ends, 0 if it did not fit. It must not touch a sequence, a block or a
queue; what it wants beyond asking it says through its View. The default policy is here, the others
in policies/batching.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from sys import maxsize

from pageturner.scheduler.admission import Reserve
from pageturner.scheduler.types import Plan, Sequence, State, WaitReason


class WaitCause(Enum):
    """The thing that the request at the head of the queue lacks. The value is what a user reads."""

    SLOTS = "slots"  # as many sequences run as may
    BUDGET = "budget"  # the tokens of this step are spent
    BLOCKS = "blocks"  # the KV that it is promised does not fit
    PREEMPTION = "preemption"  # this step preempted a sequence, so it admits none
    PROMPT = "prompt"  # a running request computes a prefix that this one will reuse
    POLICY = "policy"  # the batching policy did not ask for it


@dataclass(slots=True)
class View:
    """One step as a policy sees it. The lists are snapshots; asking does not change them.

    decoding    running sequences with only the newest token to compute, smallest rank first
    prefilling  running sequences with more than that to compute, smallest rank first
    waiting     waiting sequences in queue order; empty when no sequence may join
    token_budget_left  tokens of the budget that are not granted yet
    free_slots  how many waiting sequences may join at most
    context     most tokens in a sequence
    need        tokens left to compute behind a sequence's cached prefix, were there no budget
    peak        positions whose KV a sequence will hold at the very most
    slots       running sequences that a waiting one becomes
    max_concurrent  how many sequences of so many tokens fit side by side
    granted     tokens granted so far
    reserved    of token_budget_left, what running sequences need that ask later
    wake        set by a policy that lets this step pass: when to ask it again
    refused     the last waiting sequence that got nothing, what it lacks, and the request that has
                it (0: not one request)
    """

    now: float
    decoding: list[Sequence]
    prefilling: list[Sequence]
    waiting: list[Sequence]
    token_budget_left: int
    free_slots: int
    context: int
    need: Callable[[Sequence], int]
    peak: Callable[[Sequence], int]
    slots: Callable[[Sequence], int]
    max_concurrent: Callable[[int], int]
    granted: int = 0
    reserved: float = 0.0
    wake: float | None = None
    ballast: list[tuple[int, int]] = field(default_factory=list)
    refused: tuple[Sequence, WaitCause, int] | None = None

    def lift(self, n: int) -> None:
        """Allow this step at least `n` more tokens, over the budget if need be: for what cannot be
        split."""
        self.token_budget_left = max(self.token_budget_left, n)

    def limit(self, n: int) -> None:
        """Allow this step at most `n` more tokens."""
        self.token_budget_left = min(self.token_budget_left, n)

    def pad(self, rows: int, context: int) -> None:
        """Have `rows` rows of padding computed that see `context` positions."""
        self.ballast.append((rows, context))
        self.token_budget_left -= rows


Asks = Generator[tuple[Sequence, int], int, None]


@dataclass(frozen=True, slots=True)
class Policy:
    """A batching policy, and what others must know of it.

    mixes          prompts and decoding sequences share a step; else a step with a prompt decodes no
                   sequence
    forecastable   a waiting sequence joins as soon as there is room: the time until then can be
                   foretold
    steady         with no sequence to admit it gives every running one its token, and remembers
                   nothing
    bounded        no step is over the token budget: prompts come in pieces
    interruptible  another policy may take its place while sequences run
    awaits_prefixes  a sequence waits for KV that another one is just computing and that it could
                     share
    reserve        its own promise of KV in the place of the engine's admission rule
    budget         the most tokens that it lets a step have at present
    """

    asks: Callable[[View], Asks]
    mixes: bool = True
    forecastable: bool = True
    steady: bool = False
    bounded: bool = False
    interruptible: bool = True
    awaits_prefixes: bool = True
    reserve: Reserve | None = None
    budget: Callable[[], int] = lambda: maxsize


def chunked(v: View, max_prefill_tokens: int = maxsize) -> Asks:
    """Give every decoding sequence its token, then chunks of prefill, `max_prefill_tokens` at most
    beside."""
    for s in v.decoding:
        yield s, s.pending
    v.limit(max_prefill_tokens if v.granted else v.token_budget_left)
    for s in v.prefilling:
        yield s, s.pending
    for s in v.waiting:
        if not (yield s, s.pending):
            return


def wait_reason_of(view: View, plan: Plan) -> WaitReason:
    """Return what the waiting requests wait for behind a finished plan. A policy asks in queue
    order and stops at the first that it cannot let in, so the reason of this head holds for all."""
    if plan.preempted:
        return WaitReason(WaitCause.PREEMPTION.value, 0, next(iter(plan.preempted.values())))
    head = next((seq for seq in view.waiting if seq.state is State.WAITING), None)
    if head is None:
        return WaitReason(WaitCause.SLOTS.value)
    asked = view.refused is not None and view.refused[0] is head
    if plan.items and (
        view.token_budget_left <= 0 or (not asked and view.need(head) > view.token_budget_left)
    ):
        largest = max(plan.items, key=lambda item: item.n).sequence
        return WaitReason(WaitCause.BUDGET.value, head.request.id, largest.request.id)
    if view.refused is None or not asked:
        return WaitReason(WaitCause.POLICY.value, head.request.id)
    return WaitReason(view.refused[1].value, head.request.id, view.refused[2])
