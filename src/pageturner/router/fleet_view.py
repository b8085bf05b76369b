"""The page at `/` of a router, and its `/v1/live`: the replicas, the batch of each, and the streams
that moved.

Owns what is told of them. Must not know how the page draws it, nor what a replica tells of its
batch: that is asked for with the client's own key, and passed on.
"""

from __future__ import annotations

import time

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http import http_client
from pageturner.http.http_client import ConnectionLost
from pageturner.http.responses import json_response
from pageturner.http.web_pages import home_page
from pageturner.router.proxy import Router

MAX_LIVE = 4 * 1024 * 1024  # bytes of what a replica tells
LOCKED = "A router has no such settings: they are those of each replica."


class FleetView:
    """The answers that the page of a router asks for. They tell no more than /metrics does, but which streams
    moved."""

    def __init__(self, router: Router) -> None:
        self._router = router

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
            async with http_client.connect(address, patience, patience) as exchange:
                asked = http_client.request_bytes(address, "GET", path, headers, b"")
                await exchange.send(asked)
                body = await exchange.read_rest(MAX_LIVE)
        except ConnectionLost as lost:
            raise ClientError(502, "replica_lost", f"the replica does not tell: {lost}") from None
        return Response(body, exchange.status, media_type="application/json")
