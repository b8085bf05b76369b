"""Many steps at once, where each of them is the same: every running sequence gains a token, nothing
else.

Owns when that is so, as far as a scheduler can know, and does them. For simulators: an engine has
to compute every step anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import sub

from pageturner.scheduler.listener import StepReport
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Sequence


@dataclass(frozen=True, slots=True)
class AlikeSteps:
    """So many steps of the same sequences, which have computed `context` tokens before."""

    steps: int
    sequences: int
    context: int


def alike_steps(
    scheduler: Scheduler, most: int, remaining: Callable[[Sequence], int]
) -> AlikeSteps | None:
    """Return how many of the next steps, at least 2 and at most `most`, only give every running
    sequence a token if nothing arrives meanwhile. None where the policy is not `steady`.

    remaining  tokens that a sequence will certainly get before its last one
    """
    running, pool = scheduler.running, scheduler.pool
    may_join = scheduler.waiting and len(running) < scheduler.slots
    if not running or may_join or not pool.plain or not scheduler.policy.steady:
        return None
    context = 0
    for seq in running:
        if seq.draft or len(seq.tokens) - seq.computed != 1 or seq.request.params.beam_width:
            return None
        most = min(most, remaining(seq), seq.limit - len(seq.tokens) - 1)
        if most < 2:
            return None
        context += seq.computed
        place = seq.computed // pool.block_size
        if place < len(seq.blocks) and pool.full.refs[seq.blocks[place]] > 1:
            return None  # the first step would copy a block

    def blocks_taken(steps: int) -> int:
        return sum(pool.blocks_for(seq.computed + steps) - len(seq.blocks) for seq in running)

    while most > 1 and blocks_taken(most) > pool.full.available:
        most //= 2
    return AlikeSteps(most, len(running), context) if most > 1 else None


def advance_alike(
    scheduler: Scheduler,
    begin: float,
    ends: list[float],
    tokens: Callable[[Sequence, int], list[int]],
) -> list[Sequence]:
    """Do so many steps, which end at these times, in each of which every running sequence gains a
    token and nothing else happens, as `alike_steps` says. tokens: what one gains. Returns who
    gained."""
    steps, report = (
        len(ends),
        StepReport(ends[0] - begin, len(scheduler.running), len(scheduler.running)),
    )
    for seq in scheduler.running:
        if not scheduler.pool.extend(seq, steps):
            raise AssertionError("steps that were said to fit did not fit")
        seq.tokens += tokens(seq, steps)
        for tell in scheduler.listeners.served:
            tell(seq, steps, ends[-1])
        report.recomputed += seq.recompute(seq.computed + steps)
        seq.computed += steps
        scheduler.pool.cache_full_blocks(seq)
    scheduler.pool.release_held()
    report.alike = list(map(sub, ends, [begin, *ends]))
    for tell_step in scheduler.listeners.committed:
        tell_step(report)
    return scheduler.running
