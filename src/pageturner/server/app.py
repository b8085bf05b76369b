"""The HTTP surface of a server: which path does what, and what an error looks like.

Owns routes and error answers. Must not know how a request is answered (generate.py, pages.py and
others).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pageturner.http.error_responses import error_handlers
from pageturner.http.responses import ping, version
from pageturner.server.about import AboutPages
from pageturner.server.adapters import AdapterPages
from pageturner.server.api.anthropic.messages import MESSAGES
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.generate import GenerateEndpoint
from pageturner.server.api.batches.batch_pages import BatchPages
from pageturner.server.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from pageturner.server.api.ollama.ollama_embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from pageturner.server.api.ollama.ollama_pages import (
    OllamaEmbedEndpoint,
    OllamaEndpoint,
    OllamaPages,
)
from pageturner.server.api.openai.chat import CHAT_COMPLETIONS
from pageturner.server.api.openai.completions import COMPLETIONS
from pageturner.server.api.openai.embeddings import EMBEDDINGS
from pageturner.server.api.openai.infill import INFILL
from pageturner.server.api.openai.rerank import RERANK, SCORE
from pageturner.server.api.openapi.openapi import OpenApiPages
from pageturner.server.api.responses.response_store import ResponseStore
from pageturner.server.api.responses.responses_pages import ResponsesPages
from pageturner.server.observability.admin import AdminPages
from pageturner.server.observability.admin_state import server_state
from pageturner.server.observability.live import page_routes
from pageturner.server.observability.running_timelines import RunningTimelines
from pageturner.server.observability.timings import timeline_page
from pageturner.server.pages import ServerPages
from pageturner.server.prefixes import PrefixPages
from pageturner.server.service import Service
from pageturner.server.sessions import SessionPages
from pageturner.server.stream_migration import moving_routes


def create_app(service: Service, batches: BatchPages | None = None) -> Starlette:
    """All routes. Errors of every kind have the same JSON shape."""
    batches = batches or BatchPages(service)
    responses = ResponsesPages(service, store := ResponseStore(service.config.response_memory))
    pages, about, documents = ServerPages(service), AboutPages(service), OpenApiPages(service)
    prefixes = PrefixPages(
        service.prefixes,
        service.reader,
        service.served,
        service.config.max_body_size,
        service.config.max_pinned_share,
        service.quota,
        service.adapters.digest,
    )
    tell_state = partial(server_state, service)
    admin = AdminPages(service.live_settings, service.config, service.keys, tell_state)
    adapters = AdapterPages(service.adapters, admin.admit)
    routes = [
        *moving_routes(service, admin.admit, responses, store),
        *page_routes(service, admin),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{id:path}", pages.model),
        Route("/v1/prefixes", prefixes.create, methods=["POST"]),
        Route("/v1/prefixes", prefixes.list),
        Route("/v1/prefixes/{id}", prefixes.delete, methods=["DELETE"]),
        *SessionPages(service.sessions).routes,
        Route("/v1/admin/config", admin.config, methods=["GET", "POST"]),
        Route("/v1/admin/state", admin.state),
        Route("/v1/requests/{id}/timeline", timeline_page(service.history, _running(service).find)),
        Route("/health", pages.health),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/metrics", pages.metrics),
        Route("/version", version),
        Route("/load", pages.load),
        Route("/tokenize", pages.tokenize, methods=["POST"]),
        Route("/detokenize", pages.detokenize, methods=["POST"]),
        Route("/apply-template", pages.apply_template, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/{id}", responses.get),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items),
        *batches.routes(),
        Route("/v1/messages/count_tokens", pages.count_tokens, methods=["POST"]),
        *_generating_routes(service),
        *_ollama(service),
        Route("/tokenizer_info", about.tokenizer_info),
        Route("/reset_prefix_cache", about.reset_prefix_cache, methods=["POST"]),
        Route("/server_info", about.server_info),
        Route("/props", about.props),
        Route("/slots", about.slots),
        Route("/openapi.json", documents.openapi),
        Route("/docs", documents.docs),
    ]
    return _app_of(routes, service)


def _running(service: Service) -> RunningTimelines:
    return RunningTimelines(service.supervisor, service.streams, service.history)


def _ollama(service: Service) -> list[Route]:
    """Ollama's API, but for its embeddings."""
    pages = OllamaPages(service)
    return [
        Route("/api/chat", OllamaEndpoint(service, OLLAMA_CHAT), methods=["POST"]),
        Route("/api/generate", OllamaEndpoint(service, OLLAMA_GENERATE), methods=["POST"]),
        Route("/api/tags", pages.tags),
        Route("/api/ps", pages.running),
        Route("/api/show", pages.show, methods=["POST"]),
        Route("/api/pull", pages.pull, methods=["POST"]),
        Route("/api/version", pages.version),
    ]


def _app_of(routes: list[Route], service: Service) -> Starlette:
    """The application with these routes."""
    counters = service.metrics.rejected, service.metrics.refuse
    errors = error_handlers(_not_found(routes), service.retry_after, *counters)
    app = Starlette(routes=[*routes, *other_methods(routes)], exception_handlers=errors)
    app.router.redirect_slashes = False  # to an address that a proxy in front need not have
    return app


def _generating_routes(service: Service) -> list[Route]:
    """The shapes of several servers, at the paths where each has them."""
    shapes: list[tuple[Dialect, *tuple[str, ...]]] = [
        (COMPLETIONS, "/v1/completions"),
        (CHAT_COMPLETIONS, "/v1/chat/completions"),
        (EMBEDDINGS, "/v1/embeddings"),
        (MESSAGES, "/v1/messages"),
        (INFILL, "/infill"),
        (RERANK, "/v1/rerank", "/v2/rerank", "/v1/reranking"),
        (SCORE, "/v1/score"),
    ]
    spoken: dict[str, GenerateEndpoint | OllamaEmbedEndpoint] = {
        "/api/embed": OllamaEmbedEndpoint(service, OLLAMA_EMBED),
        "/api/embeddings": OllamaEmbedEndpoint(service, OLLAMA_EMBEDDINGS),
    }
    for dialect, *paths in shapes:
        spoken |= dict.fromkeys(paths, GenerateEndpoint(service, dialect))
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in spoken.items()]


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
