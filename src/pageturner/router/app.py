"""The routes of a router: what it passes on, and the pages that it answers itself.

Owns the table of what is passed on. Must not know how (proxy.py), nor who gets it (fleet.py,
keepers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from pageturner.errors import ClientError
from pageturner.http import prometheus
from pageturner.http.error_responses import error_handlers
from pageturner.http.prometheus import Exposition
from pageturner.http.responses import json_response, ping, version
from pageturner.router.documents import RouterDocuments
from pageturner.router.fleet_view import FleetView
from pageturner.router.forwarding import RELAYED
from pageturner.router.keepers import by_id, by_previous
from pageturner.router.member_pages import PATH as MEMBERS
from pageturner.router.member_pages import MemberPages
from pageturner.router.members import Members
from pageturner.router.model_lists import LISTS, ModelList
from pageturner.router.proxy import ELSEWHERE, NOT_FOUND, Relay, Router
from pageturner.router.replica import Replica
from pageturner.router.request_hints import no_prefix, prefix_digests


class RouterPages:
    """The pages that the router answers itself."""

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

    prefix, where = "pageturner:router_", ("replica",)
    for name, help, values in (
        ("replica_up", "1 while it takes requests", of_each(lambda one: one.healthy)),
        ("replica_open", "Requests of ours that it has", of_each(lambda one: one.open)),
        (
            "replica_others",
            "Answers under way there for others, when last asked",
            of_each(lambda one: one.others),
        ),
        (
            "replica_predicted_tokens",
            "Tokens that it has yet to compute",
            of_each(lambda one: one.tokens.tokens),
        ),
        (
            "replica_aside",
            "1 while it is put aside for its failures",
            of_each(lambda one: one.breaker.aside),
        ),
    ):
        exposition.gauge(prefix + name, help, values, *where)
    help = "Answers begun, refusals too"
    exposition.counter(
        prefix + "answers", help, counts(lambda one: one.answers), "replica", "status"
    )
    help = "Requests whose replica was gone, silent, or broke off"
    exposition.counter(prefix + "losses", help, counts(lambda one: one.losses), "replica", "reason")
    help = "Times that it was put aside for its failures"
    aside = of_each(lambda one: one.breaker.times_aside)
    exposition.counter(prefix + "replica_put_aside", help, aside, *where)
    exposition.counter(prefix + "ejected", "Replicas put aside for their latency", fleet.ejected)
    help = "Prompts, by whether they went where their beginning is known"
    exposition.counter(prefix + "placed", help, fleet.balancer.placed, "how")
    help = "Requests that the router refused itself"
    exposition.counter(prefix + "rejections", help, router.rejected, "reason")
    exposition.counter(prefix + "retries", "Requests tried on one more replica", router.retries)
    help = "Requests that were not tried again, because too many were"
    exposition.counter(prefix + "retries_withheld", help, router.retry_budget.withheld)
    exposition.counter(prefix + "moved", "Streams that went on at another replica", router.moved)
    exposition.counter(
        prefix + "cut", "Answers that broke off after their first byte", router.cut_short
    )
    return exposition.text()


# of answers that one replica keeps
KEPT = (
    ("GET", "/v1/responses/{id}"),
    ("DELETE", "/v1/responses/{id}"),
    ("POST", "/v1/responses/{id}/cancel"),
    ("GET", "/v1/responses/{id}/input_items"),
)


def create_app(router: Router, members: Members | None = None) -> Starlette:
    """All routes. Errors of the router have the shape of the servers'. members: takes
    registrations."""
    pages = RouterPages(router)
    routes = [
        Route(path, Relay(router, path, of), methods=[method]) for method, path, of in RELAYED
    ]
    routes += [Route(path, ModelList(router, path), methods=["GET"]) for path in LISTS]
    made = Relay(router, "/v1/responses", prefix_digests, by_previous)
    routes.append(Route("/v1/responses", made, methods=["POST"]))
    for method, path in KEPT:
        routes.append(Route(path, Relay(router, path, no_prefix, by_id), methods=[method]))
    relayed = {(method, route.path) for route in routes for method in route.methods or ()}
    documents = RouterDocuments(router.fleet, router.config, relayed)
    view = FleetView(router)
    routes += [
        Route("/", view.home),
        Route("/v1/live", view.live),
        Route("/health", pages.health),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/metrics", pages.metrics),
        Route("/version", version),
        Route("/load", pages.load),
        Route("/openapi.json", documents.openapi),
        Route("/docs", documents.docs),
    ]
    if members is not None:
        pages_of_members = MemberPages(router.fleet, members, router.config.register_key)
        routes.append(Route(MEMBERS, pages_of_members.answer, methods=["GET", "POST", "DELETE"]))
    app = Starlette(
        routes=routes, exception_handlers=error_handlers(NOT_FOUND, retry_after, router.rejected)
    )
    app.router.redirect_slashes = False  # to wherever the client says that it is
    return app


def retry_after(error: ClientError) -> int | None:
    """Return the seconds after which a refused request may be sent again; None: it may not."""
    return 1 if error.status in ELSEWHERE else None
