"""Many steps at once, where each of them is the same: every running sequence gains a token, nothing else.

Owns when that is so, as far as the scheduler can know, and what it does to it: exactly what planning and
committing one step after another would. For simulators: an engine has to compute every step anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pageturner.core.advance import move
from pageturner.core.scheduler import Scheduler
from pageturner.core.types import Sequence

# Policies that, with nobody to let in, give every sequence its token and remember nothing of it.
POLICIES = ("chunked", "prefill_first", "orca")


@dataclass(frozen=True, slots=True)
class Alike:
    """So many steps of the same sequences, which have computed `context` tokens before."""

    steps: int
    sequences: int
    context: int


def steps_alike(scheduler: Scheduler, most: int, remaining: Callable[[Sequence], int]) -> Alike | None:
    """How many of the next steps, at least 2 and at most `most`, only give every running sequence a token if
    nothing arrives meanwhile. For schedulers with one of POLICIES.

    remaining  tokens that a sequence will certainly get before its last one
    """
    running, pool = scheduler._running, scheduler._pool
    may_join = scheduler._waiting and len(running) < scheduler._max_running
    if not running or may_join or scheduler._plan is not None or pool.window:
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
    available = pool.full.available
    while most > 1 and _blocks(scheduler, most) > available:
        most //= 2
    return Alike(most, len(running), context) if most > 1 else None


def leap(
    scheduler: Scheduler, begin: float, ends: list[float], tokens: Callable[[Sequence, int], list[int]]
) -> list[Sequence]:
    """Do so many of `steps_alike` steps, which end at these times. tokens: what a sequence gains in as many.
    Returns who gained."""
    pool, order, counters, steps = scheduler._pool, scheduler._order, scheduler._counters, len(ends)
    for seq in scheduler._running:
        if not pool.extend(seq, steps):
            raise AssertionError("steps that were said to fit did not fit")
        seq.tokens += tokens(seq, steps)
        order.served(seq, steps, ends[-1])
        counters.recomputed_tokens += move(seq, seq.computed + steps)
        pool.seal(seq)
    for before, after in pairwise([begin, *ends]):
        scheduler.pace.took(len(scheduler._running), after - before)
    pool.settle()
    gained = steps * len(scheduler._running)
    counters.steps += steps
    counters.step_tokens += gained
    counters.generated_tokens += gained
    return scheduler._running


def _blocks(scheduler: Scheduler, steps: int) -> int:
    """Blocks that so many steps take."""
    pool = scheduler._pool
    return sum(pool.blocks_for(seq.computed + steps) - len(seq.blocks) for seq in scheduler._running)
