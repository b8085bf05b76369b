"""UniBoost: first come, first served, but short requests are taken for earlier than they came.

The order is that of the boosted arrival, arrival - b(s), where s is the work that is known:
seconds for what no cache gives of the prompt, and for what was generated before a preemption.
Nothing is predicted. The boost is that of gamma-Boost (Yu and Scully, Strongly tail-optimal
scheduling in the light-tailed M/G/1, 2024):

    b(s) = ln(1 / (1 - exp(-gamma s))) / gamma

It falls from much for a short request to nothing for a long one. A small gamma makes the order
that of the shortest first, a large one first come, first served. Li et al. (Beyond Prediction:
Tail-Aware Scheduling for LLM Inference, ICML 2026) put what was attained in the place of the size,
and call it UniBoost. Here gamma follows from the ageing bound. Left out: their preemption of what
runs, by the KV that it holds, for an order never decides who is preempted.

Owns the boost. Must not know the queue.
"""

from __future__ import annotations

from math import expm1, log

BOOSTS = 6.0  # gamma times the ageing bound
LEAST_WORK = 1e-3  # seconds


def boost(work: float, ageing: float) -> float:
    """Return by how many seconds a request of so many seconds of work is taken for earlier."""
    if not ageing:
        return 0.0
    gamma = BOOSTS / ageing
    return -log(-expm1(-gamma * max(work, LEAST_WORK))) / gamma
