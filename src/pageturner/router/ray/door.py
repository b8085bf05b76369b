"""The door of a Serve application: one HTTP surface before all its models.

Owns which model a request is for, and the pages that no model answers. What happens to a request
behind it, and to its stream when a replica dies, is router/proxy.py, as under `pageturner route`.
Needs no Ray but for the handles that it is given.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageturner.errors import ClientError
from pageturner.http import prometheus
from pageturner.http.api_keys import ApiKeys
from pageturner.http.decoding import decoded
from pageturner.http.error_responses import application
from pageturner.http.http_client import ConnectionLost
from pageturner.http.middleware import RequestMiddleware
from pageturner.http.origins import origin_rules, with_cors
from pageturner.http.prometheus import Exposition
from pageturner.http.receiving import again, read_body
from pageturner.http.responses import json_response, ping, version
from pageturner.router.app import retry_after
from pageturner.router.forwarding import RELAYED
from pageturner.router.proxy import NOT_FOUND, Relay, Router
from pageturner.router.ray.adapter_pages import DoorAdapterPages, with_loaded
from pageturner.router.ray.choice import Choice, choice_of
from pageturner.router.ray.fleet import ServeFleet
from pageturner.router.ray.settings import AppSettings
from pageturner.router.replica import ReplicaRequest
from pageturner.router.request_hints import NO_HINTS, no_prefix, prefix_digests

DOCUMENTS = ("/openapi.json", "/docs")
LISTS = {"/v1/models": "data", "/api/tags": "models"}  # path -> the field of its list
LIST_HEADERS = (b"authorization", b"x-api-key", b"x-request-id")


class _NamedModel(msgspec.Struct):
    model: str | None = None


class Door:
    """The deployment that Serve's HTTP proxy asks.

    handles  of the models' deployments, by name of the model; the first one answers who names none
    """

    def __init__(self, settings: AppSettings, handles: Mapping[str, Any]) -> None:
        self._config, self._host = settings.router_config, settings.host
        logging.basicConfig(stream=sys.stderr, level=self._config.log_level.upper())
        self._fleets = {
            name: ServeFleet(name, handle, choice_of(name), self._config)
            for name, handle in handles.items()
        }
        self._routers = {name: Router(fleet, self._config) for name, fleet in self._fleets.items()}
        for name, model in settings.models.items():
            self._fleets[name].choice.given(model.adapters)
        self._adapters = DoorAdapterPages(self._fleets, self._model_of)
        self._apps = {name: _app_of(router) for name, router in self._routers.items()}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what `serve.ingress` asks for."""
        return _without_id(self.app())

    def app(self) -> ASGIApp:
        """All routes."""
        own = [
            Route("/health", self.health),
            Route("/ping", ping, methods=["GET", "POST"]),
            Route("/metrics", self.metrics),
            Route("/version", version),
            Route("/load", self.load),
            *(Route(path, self.listed) for path in LISTS),
            Route("/v1/load_lora_adapter", self._adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._adapters.unload, methods=["POST"]),
        ]
        config = self._config
        first = next(iter(self._routers.values()))
        app = application(own, NOT_FOUND, retry_after, first.rejected)
        app.router.default = self._relay
        rules = origin_rules(self._host, config.allowed_hosts, config.allowed_origins)
        return with_cors(
            RequestMiddleware(app, ApiKeys(), config.max_body_size, rules), config.allowed_origins
        )

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the model that it names."""
        if (
            scope["type"] != "http"
        ):  # the lifespan of an application: nothing begins or ends with it
            return
        body = (
            await read_body(receive, self._config.max_body_size)
            if scope["method"] == "POST"
            else b""
        )
        path: str = scope["path"]
        named = (
            path.removeprefix("/v1/models/") if path.startswith("/v1/models/") else _model_in(body)
        )
        name = self._model_of(named or "")
        if name is None:
            if named and len(self._apps) > 1:
                message = f"no model {named[:128]!r} is here: there are {', '.join(self._apps)}"
                raise ClientError(404, "model_not_found", message, "model")
            name = next(iter(self._apps))  # which says itself what is wrong with another name
        await self._apps[name](scope, again(body, receive), send)

    def _model_of(self, named: str) -> str | None:
        """The model of this name, or of the adapter of this name."""
        if named in self._fleets:
            return named
        return next(
            (name for name, one in self._fleets.items() if one.choice.adapters.find(named)), None
        )

    # -- what no model answers ---------------------------------------------------------------------
    async def health(self, _: HTTPRequest) -> Response:
        """Tell the replicas as far as this door knows: it hears of replicas with the first request
        for a model."""
        there = {name: fleet.there for name, fleet in self._fleets.items()}
        return json_response({"status": "ok", "replicas": there})

    async def load(self, _: HTTPRequest) -> Response:
        return json_response({"server_load": sum(one.active for one in self._routers.values())})

    async def listed(self, request: HTTPRequest) -> Response:
        """Return what all models say of themselves, in one list."""
        path = request.url.path
        headers = [(name, value) for name, value in request.headers.raw if name in LIST_HEADERS]
        told = await asyncio.gather(
            *(_page(fleet, path, headers) for fleet in self._fleets.values())
        )
        whole = next((one for one in told if LISTS[path] in one), None)
        if whole is None:
            raise ClientError(503, "no_replica", "no model answers: try again in a moment")
        lists = [one.get(LISTS[path], []) for one in told]
        if path == "/v1/models":
            pairs = zip(self._fleets.items(), lists, strict=True)
            lists = [
                with_loaded(entries, fleet, name) if entries else []
                for (name, fleet), entries in pairs
            ]
        every = [entry for entries in lists for entry in entries]
        return json_response({**whole, LISTS[path]: every})

    async def metrics(self, _: HTTPRequest) -> Response:
        """Return what this door has counted, by model. A replica's own figures are in Ray's log and
        dashboard."""

        def of_each(count: Callable[[Router], int]) -> dict[str, int]:
            return {model: count(router) for model, router in self._routers.items()}

        def of_choices(counts: Callable[[Choice], Mapping[str, int]]) -> dict[tuple[str, str], int]:
            return {
                (model, how): n
                for model, fleet in self._fleets.items()
                for how, n in counts(fleet.choice).items()
            }

        exposition, prefix = Exposition(), "pageturner:router_"
        there = {model: fleet.there for model, fleet in self._fleets.items()}
        help = "Replicas that Serve sends requests to, once one was sent"
        exposition.gauge(prefix + "replicas", help, there, "model")
        active = of_each(lambda one: one.active)
        exposition.gauge(prefix + "open", "Requests under way", active, "model")
        for name, help, counts in (
            ("retries", "Requests tried once more", of_each(lambda one: one.retries)),
            ("moved", "Streams that went on at another replica", of_each(lambda one: one.moved)),
            ("cut", "Answers that broke off in their middle", of_each(lambda one: one.cut_short)),
        ):
            exposition.counter(prefix + name, help, counts, "model")
        help = "Requests for adapters, by whether their replica had it in memory"
        asked = of_choices(lambda choice: choice.multiplexed)
        exposition.counter(prefix + "adapter_requests", help, asked, "model", "how")
        help = "Prompts, by whether they went where their beginning is known"
        placed = of_choices(lambda choice: choice.placed)
        exposition.counter(prefix + "placed", help, placed, "model", "how")
        return Response(exposition.text(), media_type=prometheus.MEDIA_TYPE)


def _app_of(router: Router) -> Starlette:
    """Return what one model answers. Answers of /v1/responses are made, and not kept for later:
    they would have to be found again among replicas that come and go."""
    passed = [
        *RELAYED,
        ("POST", "/v1/responses", prefix_digests),
        *(("GET", path, no_prefix) for path in DOCUMENTS),
    ]
    routes = [Route(path, Relay(router, path, of), methods=[method]) for method, path, of in passed]
    return application(routes, NOT_FOUND, retry_after, router.rejected)


def _without_id(app: ASGIApp) -> ASGIApp:
    """The same without the id of a request in its answer: Serve's proxy says it, the same one."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, sent)

    return call


def _model_in(body: bytes) -> str | None:
    found = decoded(body, _NamedModel)
    return None if found is None else found.model


async def _page(fleet: ServeFleet, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return a page of one model; {} if the model has none now."""
    replica = fleet.choose(NO_HINTS, ())
    assert replica is not None
    try:
        async with fleet.exchange_with(replica, ReplicaRequest("GET", path, headers)) as answer:
            raw = await answer.read_rest()
    except ConnectionLost:
        return {}
    return (decoded(raw, dict[str, Any]) if answer.status == 200 else None) or {}
