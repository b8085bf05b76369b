"""Other settings for a scheduler that runs: policy, order, budget and most sequences, between two steps.

Owns when that is safe, and what has to be told to whom. Must not know who wants it, nor why.

Nothing is lost: who runs goes on, and those above a smaller number end before anybody joins. A search wider
than that number, accepted before, runs when nobody else does. A batch of `static` or `window` ends first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.core.scheduler import UNLIMITED, Scheduler
from pageturner.policies.batching import POLICIES, PolicyOptions, Static
from pageturner.policies.orders import ORDERS, Context


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be changed; the numbers as Scheduler takes them, policy and order by their names."""

    token_budget: int
    max_num_seqs: int
    policy: str
    order: str

    @property
    def slots(self) -> int:
        """Most sequences that run at once."""
        return min(self.max_num_seqs, self.token_budget or self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Options:
    """What policies and orders are told beside, which cannot be changed."""

    policy: PolicyOptions = field(default_factory=PolicyOptions)
    ageing: float = 30.0
    output_weight: float = 2.0


def retune(scheduler: Scheduler, now: Settings, wanted: Settings, options: Options, widest: int) -> bool:
    """Go on with `wanted` instead of `now`. False if that has to wait: ask again after the next commit.

    widest  sequences of the widest search that is still taken; it never falls, so that what was accepted
            once can be submitted again. ValueError for what does not exist.
    """
    if wanted.policy not in POLICIES or wanted.order not in ORDERS:
        raise ValueError(f"no such policy or order: {wanted.policy}, {wanted.order}")
    if wanted.max_num_seqs < 1 or wanted.token_budget < 0:
        raise ValueError(f"max_num_seqs is at least 1, token_budget 0, not {wanted}")
    padded = isinstance(scheduler._policy, Static) and bool(scheduler._running)
    if scheduler._plan is not None or (padded and wanted.policy != now.policy):
        return False
    scheduler._budget = wanted.token_budget or UNLIMITED
    scheduler._max_running = wanted.slots
    scheduler._max_draft = scheduler._budget // wanted.slots - 1
    more = max(wanted.slots, widest) - scheduler._widest
    if more > 0:
        scheduler._widest += more
        scheduler._max_queue += more  # whoever bounds the queue outside counts those who run, too
    if wanted.policy != now.policy:
        scheduler._policy = POLICIES[wanted.policy](options.policy)
    if wanted.order != now.order:
        _reorder(scheduler, wanted.order, options)
    return True


def _reorder(scheduler: Scheduler, order: str, options: Options) -> None:
    """The new one is told of all who wait, the first to arrive first. Of who runs it hears when they are
    served."""
    pool, predictor, pace = scheduler._pool, scheduler._predictor, scheduler.pace
    context = Context(options.ageing, options.output_weight, pool.attachable, predictor, pace)
    scheduler._order = ORDERS[order](context)
    for seq in sorted(scheduler._waiting, key=lambda seq: (seq.request.arrival, seq.request.id)):
        scheduler._order.queued(seq)
