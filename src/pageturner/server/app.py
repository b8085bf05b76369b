"""The HTTP surface of a server: which path does what, and what an error looks like.

Owns routes and error answers. Must not know how a request is answered (generate.py, pages.py and
others).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pageturner.http.error_responses import application
from pageturner.http.responses import ping, version
from pageturner.http.stream_marks import RESPONSES
from pageturner.server.about import AboutPages
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.generate import GenerateEndpoint
from pageturner.server.api.batches.batch_pages import BatchPages
from pageturner.server.api.ollama.ollama_pages import (
    OllamaEmbedEndpoint,
    OllamaEndpoint,
    OllamaPages,
)
from pageturner.server.api.openapi.openapi import OpenApiPages
from pageturner.server.api.responses.response_store import ResponseStore
from pageturner.server.api.responses.responses_pages import ResponsesPages
from pageturner.server.observability.admin_state import AdminPages
from pageturner.server.observability.live import LivePage
from pageturner.server.observability.running_timelines import TimelinePages
from pageturner.server.pages import ServerPages
from pageturner.server.service import Service
from pageturner.server.stream_migration import moving_routes
from pageturner.server.text_workers.text_jobs import SPOKEN

# of the dialects that ask for nothing at times; all others only generate
ENDPOINTS: dict[str, Callable[[Service, Dialect], ASGIApp]] = {
    "/api/chat": OllamaEndpoint,
    "/api/generate": OllamaEndpoint,
    "/api/embed": OllamaEmbedEndpoint,
    "/api/embeddings": OllamaEmbedEndpoint,
}


def create_app(service: Service, batches: BatchPages | None = None) -> Starlette:
    """All routes. Errors of every kind have the same JSON shape."""
    batches = batches or BatchPages(service)
    responses = ResponsesPages(service, store := ResponseStore(service.config.response_memory))
    pages, about, documents = ServerPages(service), AboutPages(service), OpenApiPages(service)
    admin, ollama = AdminPages(service), OllamaPages(service)
    live = LivePage(service, admin)
    routes = [
        *moving_routes(service, admin.admit, responses, store),
        Route("/", live.home),
        Route("/v1/live", live.live),
        Route("/v1/load_lora_adapter", admin.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", admin.unload_adapter, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{id:path}", pages.model),
        Route("/v1/prefixes", pages.keep_prefix, methods=["POST"]),
        Route("/v1/prefixes", pages.prefixes),
        Route("/v1/prefixes/{id}", pages.delete_prefix, methods=["DELETE"]),
        Route("/v1/sessions", pages.sessions),
        Route("/v1/sessions/{id}", pages.session, methods=["GET", "DELETE"]),
        Route("/v1/admin/config", admin.config, methods=["GET", "POST"]),
        Route("/v1/admin/state", admin.state),
        Route("/v1/requests/{id}/timeline", TimelinePages(service).timeline),
        Route("/health", pages.health),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/metrics", pages.metrics),
        Route("/version", version),
        Route("/load", pages.load),
        Route("/tokenize", pages.tokenize, methods=["POST"]),
        Route("/detokenize", pages.detokenize, methods=["POST"]),
        Route("/apply-template", pages.apply_template, methods=["POST"]),
        Route(RESPONSES, responses, methods=["POST"]),
        Route("/v1/responses/{id}", responses.get),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items),
        *batches.routes(),
        Route("/v1/messages/count_tokens", pages.count_tokens, methods=["POST"]),
        *_generating_routes(service),
        Route("/api/tags", ollama.tags),
        Route("/api/ps", ollama.running),
        Route("/api/show", ollama.show, methods=["POST"]),
        Route("/api/pull", ollama.pull, methods=["POST"]),
        Route("/api/version", ollama.version),
        Route("/tokenizer_info", about.tokenizer_info),
        Route("/reset_prefix_cache", about.reset_prefix_cache, methods=["POST"]),
        Route("/server_info", about.server_info),
        Route("/props", about.props),
        Route("/slots", about.slots),
        Route("/openapi.json", documents.openapi),
        Route("/docs", documents.docs),
    ]
    return application(
        [*routes, *other_methods(routes)],
        _not_found(routes),
        service.retry_after,
        service.metrics.rejected,
        service.metrics.refuse,
    )


def _generating_routes(service: Service) -> list[Route]:
    """The shapes of several servers, at the paths where each has them."""
    paths = {path: dialect for path, dialect in SPOKEN.items() if path != RESPONSES}
    return [
        Route(path, ENDPOINTS.get(path, GenerateEndpoint)(service, dialect), methods=["POST"])
        for path, dialect in paths.items()
    ]


class OtherMethods:
    """The answer of a path to methods that it does not have: which ones it has."""

    def __init__(self, methods: set[str]) -> None:
        self._allowed = {"allow": ", ".join(sorted(methods | {"OPTIONS"}))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "OPTIONS":
            path, method = scope["path"][:100], scope["method"]
            raise HTTPException(
                405, f"{path} takes {self._allowed['allow']}, not {method}", self._allowed
            )
        await Response(status_code=204, headers=self._allowed)(scope, receive, send)


def other_methods(routes: list[Route]) -> list[Route]:
    """A route for each path of these, behind them, that takes what none of them does."""
    methods: dict[str, set[str]] = {}
    for route in routes:
        methods.setdefault(route.path, set()).update(route.methods or ())
    return [Route(path, OtherMethods(known)) for path, known in methods.items()]


def _not_found(routes: list[Route]) -> Callable[[str], str]:
    """Return what is said of a path that is not there."""
    public = sorted(
        {one.path.replace(":path}", "}") for one in routes if "/admin/" not in one.path}
    )

    def sentence(path: str) -> str:
        within = f"/v1{path}"  # a client whose base URL lacks it
        near = [within]
        if within not in public:
            near = difflib.get_close_matches(path[:100], public, 1, 0.8)
        if near:
            return f"no such path: did you mean {near[0]}? (/docs has all of them)"
        family = path[:100].split("/", 2)[1] + "/"
        alike = [one for one in public if one.startswith(f"/{family}")] or public
        return f"no such path: there are {', '.join(alike)}"

    return sentence
