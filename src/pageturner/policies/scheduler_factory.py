"""A scheduler from names: which policy, order and admission there are, and what they can be told.

Owns the defaults. Must not know what any of them does.
"""

from __future__ import annotations

from pageturner.core.blocks import BlockPool
from pageturner.core.scheduler import Scheduler
from pageturner.policies.batching import POLICIES, PolicyOptions
from pageturner.policies.length_predictor import LengthPredictor
from pageturner.policies.orders import ORDERS, Context
from pageturner.policies.reserves import RESERVES
from pageturner.policies.step_time import StepTimeModel


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    prefix_caching: bool = True,
    window: int = 0,
    sliding: int = 0,
    policy: str = "chunked",
    order: str = "fcfs",
    admission: str = "none",
    max_num_seqs: int = 64,
    token_budget: int = 512,
    max_model_len: int = 8192,
    max_queue: int = 1024,
    ageing: float = 30.0,
    static_batch: int = 16,
    static_patience: float = 10.0,
    window_ms: float = 100.0,
    served_ratio: float = 1.2,
    served_steps: int = 20,
    tpot_ms: float = 50.0,
    knee_tokens: int = 0,
    knee_seqs: int = 0,
    output_weight: float = 2.0,
) -> Scheduler:
    """A scheduler with its pool, by names. ValueError for a name or a size that does not exist."""
    kinds = (("policy", policy, POLICIES), ("order", order, ORDERS), ("admission", admission, RESERVES))
    for kind, name, names in kinds:
        if name not in names:
            raise ValueError(f"unknown {kind} {name!r}: one of {', '.join(names)}")
    pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching, window=window, sliding=sliding)
    options = PolicyOptions(
        static_batch, static_patience, window_ms, served_ratio, served_steps, tpot_ms, knee_tokens, knee_seqs
    )
    predictor, pace = LengthPredictor(), StepTimeModel()
    return Scheduler(
        pool,
        policy=POLICIES[policy](options),
        order=ORDERS[order](Context(ageing, output_weight, pool.attachable, predictor, pace)),
        admission=RESERVES[admission](predictor),
        predictor=predictor,
        pace=pace,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=max_model_len,
        max_queue=max_queue,
    )
