"""The HTTP surface of a server: which path does what, and what an error looks like.

Owns routes and error answers. Must not know how a request is answered (generate.py, pages.py and others).
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from pageturner.errors import ClientError
from pageturner.serve import replies
from pageturner.serve.admin import AdminPages
from pageturner.serve.chat import CHAT_COMPLETIONS
from pageturner.serve.completions import COMPLETIONS
from pageturner.serve.generate import GenerateEndpoint
from pageturner.serve.pages import ServerPages
from pageturner.serve.prefixes import PrefixPages
from pageturner.serve.service import Service
from pageturner.serve.timings import timeline_page


def create_app(service: Service) -> Starlette:
    """All routes. Errors of every kind have the same JSON shape."""

    async def refuse(_: HTTPRequest, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):
            path = "no such path: see docs/api.md" if error.status_code == 404 else str(error.detail)
            client = ClientError(error.status_code, error.detail.lower().replace(" ", "_"), path)
            headers.update(error.headers or {})
        else:
            assert isinstance(error, ClientError)
            client = error
        wait = service.retry_after(client)
        if wait is not None:
            headers["retry-after"] = str(wait)
            service.metrics.rejected[client.code] += 1
        content = replies.error(client.status, client.code, client.message, client.param)
        return Response(content, client.status, headers, "application/json")

    pages = ServerPages(service)
    prefixes = PrefixPages(service.prefixes, service.served, service.config.max_body_size)
    admin = AdminPages(service.dials, service.config.admin_key)
    routes = [
        Route("/v1/completions", GenerateEndpoint(service, COMPLETIONS), methods=["POST"]),
        Route("/v1/chat/completions", GenerateEndpoint(service, CHAT_COMPLETIONS), methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/prefixes", prefixes.make, methods=["POST"]),
        Route("/v1/prefixes", prefixes.list),
        Route("/v1/prefixes/{id}", prefixes.delete, methods=["DELETE"]),
        Route("/v1/admin/config", admin.config, methods=["GET", "POST"]),
        Route("/v1/requests/{id}/timeline", timeline_page(service.history)),
        Route("/health", pages.health),
        Route("/ping", pages.ping, methods=["GET", "POST"]),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
        Route("/load", pages.load),
        Route("/tokenize", pages.tokenize, methods=["POST"]),
        Route("/detokenize", pages.detokenize, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={ClientError: refuse, HTTPException: refuse})
