"""`/openapi.json` and `/docs` of a router: the document of a replica, without what is not passed
on.

Owns which operations are left and what the router adds to them. Its own operations, by which
replicas register, stand in member_operations.json. Must not know how a document is made, nor how
requests are passed on (proxy.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.config.settings import RouterConfig
from pageturner.errors import ClientError
from pageturner.http import http_client
from pageturner.http.decoding import decoded
from pageturner.http.error_responses import TYPES
from pageturner.http.http_client import ConnectionLost
from pageturner.http.web_pages import docs_page
from pageturner.router.fleet import Fleet
from pageturner.router.member_pages import PATH as MEMBERS

MEMBER_OPERATIONS = Path(__file__).with_name("member_operations.json")
KEPT_SECONDS = 10.0  # for which a document is told again: anybody may ask
OWN = ("/health", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/docs")
MORE_ERRORS = (502, 504)  # of what is passed on


class RouterDocuments:
    """The documents of a router: its OpenAPI document and pages. relayed: method and path of each
    route that is passed on."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, relayed: Collection[tuple[str, str]]
    ) -> None:
        self._fleet, self._config = fleet, config
        self._relayed = {(method.lower(), path.replace(":path}", "}")) for method, path in relayed}
        self._made: tuple[float, bytes] | None = None

    async def openapi(self, _: HTTPRequest) -> Response:
        """ClientError where no replica has a document."""
        now = time.monotonic()
        if self._made is None or now - self._made[0] > KEPT_SECONDS:
            self._made = now, msgspec.json.encode(self._left_of(await self._ask()))
        return Response(self._made[1], media_type="application/json")

    async def docs(self, _: HTTPRequest) -> Response:
        return docs_page()

    async def _ask(self) -> dict[str, Any]:
        replica = next((one for one in self._fleet.replicas if one.healthy), None)
        if replica is None:
            raise ClientError(503, "no_replica", "no replica is there: try again in a moment")
        try:
            status, body = await http_client.get(
                replica.address, "/openapi.json", self._config.health_timeout
            )
        except ConnectionLost as error:
            raise ClientError(502, "replica_lost", f"no document: {error}") from None
        made = decoded(body, dict[str, Any])
        if status != 200 or made is None or not isinstance(made.get("paths"), dict):
            raise ClientError(502, "replica_lost", "the replica has no document")
        return made

    def _left_of(self, document: dict[str, Any]) -> dict[str, Any]:
        paths: dict[str, dict[str, Any]] = {}
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if path in OWN:
                    paths.setdefault(path, {})[method] = operation
                elif (method, path) in self._relayed:
                    paths.setdefault(path, {})[method] = _through_a_router(operation)
        if not self._config.register_key:  # nobody can register
            return {**document, "paths": paths}
        own = msgspec.json.decode(MEMBER_OPERATIONS.read_bytes())
        paths[MEMBERS] = own["path"]
        components = dict(document.get("components", {}))
        for kind, more in own["components"].items():
            components[kind] = {**more, **components.get(kind, {})}
        return {**document, "paths": paths, "components": components}


def _through_a_router(operation: dict[str, Any]) -> dict[str, Any]:
    errors = operation.get("responses", {})
    like = errors.get("500", {}).get("content", {})
    more = {
        str(status): {"description": TYPES.get(status, "BadGateway"), "content": like}
        for status in MORE_ERRORS
    }
    return {**operation, "responses": {**errors, **more}}
