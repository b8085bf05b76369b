"""The pages that a router answers itself: its health and figures, the page at `/`, and `/v1/live`:
the replicas, the batch of each, and the streams that moved.

Owns what is told of them. Must not know how the page draws it, nor what a replica tells of its
batch: that is asked for with the client's own key, and passed on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http import http_client, prometheus
from pageturner.http.http_client import ConnectionLost
from pageturner.http.prometheus import Exposition
from pageturner.http.responses import json_response
from pageturner.http.web_pages import home_page
from pageturner.router.proxy import Router
from pageturner.router.replica import Replica

MAX_LIVE = 4 * 1024 * 1024  # bytes of what a replica tells
LOCKED = "A router has no such settings: they are those of each replica."


class RouterPages:
    """The pages of one router. They tell no more than /metrics does, but which streams moved."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def health(self, _: HTTPRequest) -> Response:
        router = self._router
        if router.draining:
            raise ClientError(503, "shutting_down", "the router is shutting down")
        there = sum(replica.healthy for replica in router.fleet.replicas)
        if not there:
            raise ClientError(503, "no_replica", "no replica is there")
        return json_response(
            {"status": "ok", "healthy": there, "replicas": len(router.fleet.replicas)}
        )

    async def load(self, _: HTTPRequest) -> Response:
        return json_response({"server_load": self._router.active})

    async def metrics(self, _: HTTPRequest) -> Response:
        return Response(_exposition(self._router), media_type=prometheus.MEDIA_TYPE)

    async def home(self, _: HTTPRequest) -> Response:
        return home_page(LOCKED)

    async def live(self, request: HTTPRequest) -> Response:
        if "replica" in request.query_params:
            return await self._of_replica(request)
        router = self._router
        replicas = [
            {
                "address": str(one.address),
                "healthy": one.healthy,
                "trouble": one.trouble,
                "aside": one.breaker.aside,
                "open": one.open,
                "models": one.models,
            }
            for one in router.fleet.replicas
        ]
        told = {"replicas": replicas, "moved": router.moved, "moves": list(router.moves)}
        return json_response(told | {"active": router.active, "now_s": time.monotonic()})

    async def _of_replica(self, request: HTTPRequest) -> Response:
        query, router = request.query_params, self._router
        addresses = {str(one.address): one.address for one in router.fleet.replicas}
        address, since = addresses.get(query["replica"]), query.get("since", "0")
        if address is None or not since.isascii() or not since.isdigit():
            raise ClientError(
                400, "invalid_value", "replica: an address of /v1/live; since: digits"
            )
        key = request.headers.get("authorization", "").encode("latin-1")
        headers = [(b"authorization", key)] if key else []
        path, patience = f"/v1/live?since={since}", router.config.health_timeout
        try:
            status, body = await http_client.get(address, path, patience, MAX_LIVE, headers)
        except ConnectionLost as lost:
            raise ClientError(502, "replica_lost", f"the replica does not tell: {lost}") from None
        return Response(body, status, media_type="application/json")


def _exposition(router: Router) -> bytes:
    """Return what the router has counted, as Prometheus reads it."""
    exposition, fleet = Exposition(), router.fleet
    replicas = {str(replica.address): replica for replica in fleet.replicas}

    def of_each(value: Callable[[Replica], float]) -> dict[str, float]:
        return {name: value(replica) for name, replica in replicas.items()}

    def counts(counter: Callable[[Replica], Counter[str]]) -> dict[tuple[str, ...], float]:
        return {
            (name, key): n
            for name, replica in replicas.items()
            for key, n in counter(replica).items()
        }

    prefix = "pageturner:router_"
    gauges: list[tuple[str, str, Callable[[Replica], float]]] = [
        ("replica_up", "1 while it takes requests", lambda one: one.healthy),
        ("replica_open", "Requests of ours that it has", lambda one: one.open),
        (
            "replica_others",
            "Answers under way there for others, when last asked",
            lambda one: one.others,
        ),
        (
            "replica_predicted_tokens",
            "Tokens that it has yet to compute",
            lambda one: one.tokens.tokens,
        ),
        (
            "replica_aside",
            "1 while it is put aside for its failures",
            lambda one: one.breaker.aside,
        ),
    ]
    for name, help, value in gauges:
        exposition.gauge(prefix + name, help, of_each(value), "replica")
    help = "Answers begun, refusals too"
    answers = counts(lambda one: one.answers)
    exposition.counter(prefix + "answers", help, answers, "replica", "status")
    help = "Requests whose replica was gone, silent, or broke off"
    exposition.counter(prefix + "losses", help, counts(lambda one: one.losses), "replica", "reason")
    help = "Times that it was put aside for its failures"
    aside = of_each(lambda one: one.breaker.times_aside)
    exposition.counter(prefix + "replica_put_aside", help, aside, "replica")
    help = "Prompts, by whether they went where their beginning is known"
    exposition.counter(prefix + "placed", help, fleet.balancer.placed, "how")
    help = "Requests that the router refused itself"
    exposition.counter(prefix + "rejections", help, router.rejected, "reason")
    withheld = router.retry_budget.withheld
    for name, help, count in (
        ("ejected", "Replicas put aside for their latency", fleet.ejected),
        ("retries", "Requests tried on one more replica", router.retries),
        ("retries_withheld", "Requests that were not tried again, because too many were", withheld),
        ("moved", "Streams that went on at another replica", router.moved),
        ("cut", "Answers that broke off after their first byte", router.cut_short),
    ):
        exposition.counter(prefix + name, help, count)
    return exposition.text()
