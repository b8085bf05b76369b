"""The routes of a router: what it passes on, and what it answers itself.

Owns the table of what is passed on. Must not know how (proxy.py), nor who gets it (fleet.py,
keepers.py), nor what its own pages say.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from pageturner.errors import ClientError
from pageturner.http.error_responses import application
from pageturner.http.responses import ping, version
from pageturner.router.documents import RouterDocuments
from pageturner.router.forwarding import RELAYED
from pageturner.router.keepers import by_id, by_previous
from pageturner.router.member_pages import PATH as MEMBERS
from pageturner.router.member_pages import MemberPages
from pageturner.router.members import Members
from pageturner.router.model_lists import LISTS, ModelList
from pageturner.router.pages import RouterPages
from pageturner.router.proxy import ELSEWHERE, NOT_FOUND, Relay, Router
from pageturner.router.request_hints import no_prefix, prefix_digests

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
    routes += [
        Route("/", pages.home),
        Route("/v1/live", pages.live),
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
    return application(routes, NOT_FOUND, retry_after, router.rejected)


def retry_after(error: ClientError) -> int | None:
    """Return the seconds after which a refused request may be sent again; None: it may not."""
    return 1 if error.status in ELSEWHERE else None
