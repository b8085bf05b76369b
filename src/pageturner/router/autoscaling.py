"""The number of replicas that a model gets: by goodput, the share of requests that met their
targets.

Owns the rule. Standard library only: Serve hands this module on by value, to its controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GOAL = 0.99  # share of the requests with targets that are to meet them
FULL = 1.0  # requests under way for each place in a step: more have to wait
ROOM = (
    0.6  # of the load that a replica bears, how much each may have where one replica less would do
)
LIMIT = "limit"  # in the state of the policy


class GoodputPolicy:
    """One more replica while targets are missed by requests that share theirs with others, or while
    requests wait for a place; one less when no target is missed and the others would bear its
    requests.

    What a replica bears is learned: the places that were taken while targets were missed, as many
    as were taken since without a miss, and all of them before the first miss. Long prompts miss
    their targets with a few of many places taken.

    goal, full, room  see GOAL, FULL, ROOM
    """

    def __init__(self, goal: float = GOAL, full: float = FULL, room: float = ROOM) -> None:
        self._goal, self._full, self._room = goal, full, room

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: Serve's AutoscalingContext. Of each replica it has `answers`, those of the last
        minute that had targets, `met`, those that met them, `open`, requests under way, and `busy`,
        these for each place. Serve holds what is said to the bounds and delays of the deployment,
        and gives the state back."""
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        kept = context.policy_state or {}
        state = {LIMIT: kept[LIMIT]} if LIMIT in kept else {}  # Serve keeps things of its own there
        now = context.current_num_replicas
        taken = sum(told.get("busy", {}).values())
        if not told.get("busy"):
            return now, state
        answers = sum(told.get("answers", {}).values())
        share = sum(told.get("met", {}).values()) / answers if answers else 1.0
        # a request that has a replica for itself misses its target with any number of them
        missed = share < self._goal and sum(told.get("open", {}).values()) > now
        bears = state.get(LIMIT, self._full)
        if missed:
            bears = state[LIMIT] = min(bears, taken / now)
        elif share >= self._goal and LIMIT in state:
            bears = state[LIMIT] = min(max(bears, taken / now), self._full)
        if missed or taken > self._full * now or (context.total_queued_requests or 0) > 0:
            return now + 1, state
        if now > 1 and share >= self._goal and taken <= self._room * bears * (now - 1):
            return now - 1, state
        return now, state
