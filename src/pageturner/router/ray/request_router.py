"""The request router that Serve runs in front of a model's replicas: ours decides, Serve does the
rest.

Owns how our choice (choice.py) is told to Serve: who is best, then the others, which get the
request when the best one takes no more. Must not know the rules. Serve hands this module on by
value: what has to be one for a process lives in choice.py.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pageturner.router.ray.choice import Ask, Choice, choice_of


def _ask_of(request: PendingRequest | None) -> Ask | None:
    """Return our routing hints in a request, if it has any."""
    args = [] if request is None else request.args
    return next((one for one in args if isinstance(one, Ask)), None)


class PlacementRouter(RequestRouter):
    """Prefix-aware and by predicted tokens, as `pageturner route` and `pageturner simulate`
    place."""

    _numbers: dict[str, int]
    _choice: Choice

    def initialize_state(
        self, deployment: str, placement: str = "prefix_aware", prefix_chunks: int = 100_000
    ) -> None:
        """Take the values of RequestRouterConfig.request_router_kwargs."""
        self._choice = choice_of(deployment)
        self._choice.set_up(placement, prefix_chunks)
        self._numbers = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._choice.update([one.replica_id.unique_id for one in replicas])
        for (
            one
        ) in replicas:  # Serve says anew who is there whenever one has reported something else
            self._told(one.replica_id.unique_id, one)
        super().update_replicas(replicas)

    def _told(self, id: str, replica: RunningReplica) -> None:
        stats = replica.routing_stats or {}
        self._choice.told(
            id,
            stats.get("said", 0),
            stats.get("active", 0),
            stats.get("adapters", ()),
            stats.get("changes"),
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first."""
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        for id, replica in by_id.items():
            self._told(id, replica)
        ask = _ask_of(pending_request) or Ask(0, "", "", [], b"")
        return [[by_id[id]] for id in self._choice.order(ask, list(by_id))]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        ask = _ask_of(pending_request)
        if ask is not None:
            self._numbers[pending_request.metadata.internal_request_id] = ask.number
            self._choice.began(ask, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        number = self._numbers.pop(internal_request_id, None)
        if number is not None:
            self._choice.ended(number)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._choice.update([id for id in self._choice.replicas if id != replica_id.unique_id])
