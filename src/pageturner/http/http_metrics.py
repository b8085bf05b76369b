"""The metrics of HTTP: how many by handler, method and class of status, and how long they took.

Owns these counts, under the names that servers on FastAPI have for them, vLLM's among them. Must
not know what a request asks. A handler is named by its route, never by what a client wrote: labels
stay few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import BaseRoute, Route

from pageturner.http.prometheus import Exposition, Histogram

BUCKETS = (0.1, 0.5, 1.0)  # seconds; those of prometheus-fastapi-instrumentator
NOWHERE = "none"  # the handler of a path that leads nowhere
METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])


@dataclass(slots=True)
class HttpMetrics:
    """requests: by handler, method and class of status; seconds: by handler and method, until the
    last byte of the answer."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    _routes: dict[Hashable, list[Route]] = field(default_factory=dict)

    def learn(self, routes: Iterable[BaseRoute]) -> None:
        """Learn the names of the handlers."""
        for route in routes:
            if isinstance(route, Route):
                self._routes.setdefault(route.endpoint, []).append(route)

    def count(self, scope: Any, status: int, seconds: float) -> None:
        """Count a request that ended after so many seconds."""
        handler, method = self._handler(scope), scope["method"]
        method = method if method in METHODS else "other"
        self.requests[handler, method, f"{status // 100}xx"] += 1
        key = (handler, method)
        if key not in self.seconds:
            self.seconds[key] = Histogram(BUCKETS)
        self.seconds[key].observe(seconds)

    def _handler(self, scope: Any) -> str:
        routes = self._routes.get(scope.get("endpoint"), [])
        if len(routes) == 1:
            return routes[0].path
        matching = (route.path for route in routes if route.path_regex.match(scope["path"]))
        return next(matching, NOWHERE)

    def text(self) -> bytes:
        """Return the text that Prometheus reads. These metrics are of the program, and not of a
        model: they have no labels of one."""
        exposition = Exposition()
        labels = ("handler", "method")
        exposition.counter("http_requests", "Requests", self.requests, *labels, "status")
        help = "From the head of a request to the last byte of its answer"
        exposition.histogram("http_request_duration_seconds", help, self.seconds, *labels)
        return exposition.text()
