"""Causes: what those who wait are waiting for, read off a plan.

Owns the names of the causes. Must not know time: whoever keeps it says for how long a cause held.

A policy asks for the waiting in queue order and stops at the first that it cannot let in. So one cause holds
for all who wait: that of this first sequence, the head of the queue; the others wait behind it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from pageturner.core.batching import View
from pageturner.core.blocks import BlockPool
from pageturner.core.sharing import held
from pageturner.core.types import Plan, Sequence, State, WaitReason


class WaitCause(Enum):
    """What the head of the queue lacks. The value is what a user reads."""

    SLOTS = "slots"  # as many sequences run as may
    BUDGET = "budget"  # the tokens of this step are spent
    BLOCKS = "blocks"  # the KV that it is promised does not fit
    PREEMPTION = "preemption"  # a step that takes blocks from somebody lets nobody in
    PROMPT = "prompt"  # another one computes what it will share
    POLICY = "policy"  # the batching policy did not ask for it


def wait_reason_of(
    view: View, plan: Plan, running: list[Sequence], waiting: Collection[Sequence], pool: BlockPool
) -> WaitReason | None:
    """What those who wait behind a finished plan are waiting for; None when nobody waits."""
    if not waiting:
        return None
    if plan.preempted:
        return WaitReason(WaitCause.PREEMPTION.value, 0, next(iter(plan.preempted.values())))
    head = next((seq for seq in view.waiting if seq.state is State.WAITING), None)
    if head is None:
        return WaitReason(WaitCause.SLOTS.value)
    cause, by = _lacks(head, view, plan, running, pool)
    return WaitReason(cause.value, head.request.id, by)


def _lacks(
    head: Sequence, view: View, plan: Plan, running: list[Sequence], pool: BlockPool
) -> tuple[WaitCause, int]:
    """What it lacks, and the request that has it, if that is one: 0 where it is not."""
    asked = view.asked is head
    if plan.items and (view.left <= 0 or (not asked and view.need(head) > view.left)):
        return WaitCause.BUDGET, max(plan.items, key=lambda item: item.n).sequence.request.id
    if not asked:
        return WaitCause.POLICY, 0
    source = held(head, running, pool) if view.patient else None
    if source is not None:
        return WaitCause.PROMPT, source.request.id
    if view.slots(head) > view.most - len(running):
        return WaitCause.SLOTS, 0
    return WaitCause.BLOCKS, max(running, key=lambda seq: len(seq.blocks)).request.id if running else 0
