"""The lists of models of a router: those of all models that replicas are set apart for, as one.

Owns which replicas are asked and how their lists become one. Whether a client may see them is a
replica's affair: each is asked with the client's own key. Must not know how a single request is
passed on (proxy.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.http import http_client
from pageturner.http.decoding import decoded
from pageturner.http.http_client import ConnectionLost
from pageturner.http.responses import json_response
from pageturner.router.forwarding import forwarded_headers, told_error
from pageturner.router.proxy import Relay, Router
from pageturner.router.replica import ReplicaRequest
from pageturner.router.request_hints import RequestHints, no_prefix

LISTS = {
    "/v1/models": ("data", "id"),
    "/api/tags": ("models", "name"),
}  # path -> list, name of an entry
MAX_LISTS = 64  # of different models that are asked for; the lists of more are left out
LIST_SECONDS = 10.0


class ModelList:
    """GET of one of LISTS. Where no names are given it is passed on to any replica."""

    def __init__(self, router: Router, path: str) -> None:
        self._router, self._path = router, path
        self._relay = Relay(router, path, no_prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fleet = self._router.fleet
        if not fleet.models:
            await self._relay(scope, receive, send)
            return
        self._router.check_open()
        asked = list(dict.fromkeys(one.models[0] if one.models else "" for one in fleet.replicas))
        told = await asyncio.gather(*(self._ask(scope, model) for model in asked[:MAX_LISTS]))
        lists = [entries for entries in told if isinstance(entries, list)]
        refusals = [error for error in told if isinstance(error, ClientError)]
        if not lists:
            raise refusals[0]
        key, name = LISTS[self._path]
        entries = {str(entry.get(name)): entry for one in lists for entry in one}
        body: dict[str, Any] = {key: list(entries.values())}
        answer = json_response(({"object": "list"} if key == "data" else {}) | body)
        await answer(scope, receive, send)

    async def _ask(self, scope: Scope, model: str) -> list[dict[str, Any]] | ClientError:
        """The list of a replica that answers for this model; what it says instead."""
        fleet, key = self._router.fleet, LISTS[self._path][0]
        hints = RequestHints(model=model)
        replica = fleet.choose(hints, ())
        if replica is None:
            return ClientError(
                503, "no_replica", f"no replica for {model!r} is there: try again in a moment"
            )
        request = ReplicaRequest("GET", self._path, forwarded_headers(scope), hints=hints)
        try:
            async with (
                asyncio.timeout(LIST_SECONDS),
                fleet.exchange_with(replica, request) as exchange,
            ):
                status = exchange.status
                raw = await exchange.read_rest(http_client.MAX_REST, LIST_SECONDS)
        except (ConnectionLost, TimeoutError) as error:
            return ClientError(502, "replica_lost", f"no list of models: {error}")
        found = decoded(raw, dict[str, Any])
        if found is None:
            return ClientError(502, "replica_lost", "no list of models: it is no JSON object")
        entries = found.get(key)
        if status != 200 or not isinstance(entries, list):
            message = f"a replica does not list its models: {told_error(raw).message[:500]}"
            return ClientError(status if status >= 400 else 502, "models_refused", message)
        return [entry for entry in entries if isinstance(entry, dict)]
