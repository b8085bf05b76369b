"""Batching policies: who gets how many tokens in this step, and why nobody more was let in.

A policy is a generator. It asks for (sequence, n) and is told how many tokens were granted: fewer if the
budget or the memory ends, 0 if it did not fit. It must not touch a sequence, a block or a queue; what it
wants beyond asking it says through its View. The default policy is here, the others in policies/batching.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from sys import maxsize

from pageturner.core.admission import Reserve
from pageturner.core.types import Plan, Sequence, State, WaitReason


class WaitCause(Enum):
    """What the request at the head of the queue lacks. The value is what a user reads."""

    SLOTS = "slots"  # as many sequences run as may
    BUDGET = "budget"  # the tokens of this step are spent
    BLOCKS = "blocks"  # the KV that it is promised does not fit
    PREEMPTION = "preemption"  # a step that takes blocks from somebody lets nobody in
    PROMPT = "prompt"  # another one computes what it will share
    POLICY = "policy"  # the batching policy did not ask for it


@dataclass(slots=True)
class View:
    """What a policy sees of one step. The lists are snapshots; asking does not change them.

    decoding    running, only the newest token to compute; smallest rank first
    prefilling  running, more than that to compute; smallest rank first
    waiting     in queue order; empty when nobody may join
    left        tokens of the budget not granted yet
    granted     tokens granted so far
    joins       how many waiting sequences may join at most
    context     most tokens in a sequence
    need        tokens a sequence would compute in a step without a budget, given what is cached
    peak        positions whose KV a sequence will hold at the very most
    slots       running sequences that a waiting one becomes
    together    how many sequences of so many tokens fit side by side
    wake        what a policy that lets this step pass sets: when to ask it again
    refused     the last waiting sequence that was asked for and got nothing, what it lacks, and the request
                that has what it lacks (0: not one request)
    """

    now: float
    decoding: list[Sequence]
    prefilling: list[Sequence]
    waiting: list[Sequence]
    left: int
    joins: int
    context: int
    need: Callable[[Sequence], int]
    peak: Callable[[Sequence], int]
    slots: Callable[[Sequence], int]
    together: Callable[[int], int]
    granted: int = 0
    wake: float | None = None
    ballast: list[tuple[int, int]] = field(default_factory=list)
    refused: tuple[Sequence, WaitCause, int] | None = None

    def lift(self, n: int) -> None:
        """Allow this step at least `n` more tokens, over the budget if need be: for what cannot be split."""
        self.left = max(self.left, n)

    def limit(self, n: int) -> None:
        """Allow this step at most `n` more tokens."""
        self.left = min(self.left, n)

    def pad(self, rows: int, context: int) -> None:
        """Have `rows` rows of padding computed that see `context` positions."""
        self.ballast.append((rows, context))
        self.left -= rows


Asks = Generator[tuple[Sequence, int], int, None]


@dataclass(frozen=True, slots=True)
class Policy:
    """A batching policy, and what others must know of it.

    asks             the generator
    mixes            prompts and decoding sequences share a step; else a step with a prompt decodes nobody
    forecastable     who waits joins as soon as there is room, so the time until then can be foretold
    steady           with nobody to let in it gives every sequence its token, and remembers nothing of it
    interruptible    another policy may take its place while sequences run
    awaits_prefixes  who could share KV that another one is just computing waits for it
    reserve          its own promise of KV in the place of the engine's admission rule
    budget           most tokens that it lets a step have at present
    """

    asks: Callable[[View], Asks]
    mixes: bool = True
    forecastable: bool = True
    steady: bool = False
    interruptible: bool = True
    awaits_prefixes: bool = True
    reserve: Reserve | None = None
    budget: Callable[[], int] = lambda: maxsize


def chunked(v: View) -> Asks:
    """Stall-free: a token for every decoding sequence, then chunks of prefill in the rest of the budget."""
    for s in v.decoding:
        yield s, s.pending
    for s in v.prefilling:
        yield s, s.pending
    for s in v.waiting:
        if not (yield s, s.pending):
            return


def wait_reason_of(view: View, plan: Plan) -> WaitReason:
    """What those who wait behind a finished plan are waiting for. A policy asks in queue order and stops at
    the first that it cannot let in, so one reason holds for all: that of this head; the others are behind."""
    if plan.preempted:
        return WaitReason(WaitCause.PREEMPTION.value, 0, next(iter(plan.preempted.values())))
    head = next((seq for seq in view.waiting if seq.state is State.WAITING), None)
    if head is None:
        return WaitReason(WaitCause.SLOTS.value)
    asked = view.refused is not None and view.refused[0] is head
    if plan.items and (view.left <= 0 or (not asked and view.need(head) > view.left)):
        largest = max(plan.items, key=lambda item: item.n).sequence
        return WaitReason(WaitCause.BUDGET.value, head.request.id, largest.request.id)
    if view.refused is None or not asked:
        return WaitReason(WaitCause.POLICY.value, head.request.id)
    _, cause, by = view.refused
    return WaitReason(cause.value, head.request.id, by)
