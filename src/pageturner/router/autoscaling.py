"""How many replicas a model gets: by goodput, the share of requests that met their targets.

Owns the rule. Standard library only: Serve hands this module on by value, to its controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GOAL = 0.99  # share of the requests with targets that are to meet them
FULL = 1.0  # requests under way for each place in a step: more have to wait
ROOM = 0.6  # of its places that are taken at most where one replica less would do


class GoodputPolicy:
    """One more replica while targets are missed, or while requests wait for a place where nobody said a
    target; one less when the others would have room for its requests and no target is missed.

    goal, full, room  see GOAL, FULL, ROOM
    """

    def __init__(self, goal: float = GOAL, full: float = FULL, room: float = ROOM) -> None:
        self._goal, self._full, self._room = goal, full, room

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Serve's AutoscalingContext. Serve holds what is said to the bounds and delays of the
        deployment."""
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        now = context.current_num_replicas
        met, busy = list(told.get("met", {}).values()), list(told.get("busy", {}).values())
        if not busy:
            return now, {}
        share, taken = min(met, default=1.0), sum(busy)
        queued = context.total_queued_requests or 0
        # a missed target with idle replicas is no matter of their number
        if (share < self._goal and taken > self._room * 0.5 * now) or taken > self._full * now or queued > 0:
            return now + 1, {}
        if now > 1 and share >= self._goal and taken <= self._room * (now - 1):
            return now - 1, {}
        return now, {}
