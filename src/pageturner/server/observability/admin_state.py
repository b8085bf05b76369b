"""`/v1/admin`: what can be changed of a server and what it is doing now, for whoever has the admin
key.

Owns the key, and which figures are told and how many. Must not know what settings do (admin.py),
nor how figures come about, and tells nothing of what was said: no prompt, no text, no key. What is
told of a request is what the API process knows of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from pageturner.errors import ClientError
from pageturner.http.api_keys import single_key
from pageturner.http.decoding import decode_body
from pageturner.http.origins import origin_rules
from pageturner.http.receiving import read_body
from pageturner.http.responses import json_response
from pageturner.server.adapters import LoadBody, UnloadBody
from pageturner.server.observability.admin import LOCKED
from pageturner.server.service import Service
from pageturner.text.output_stream import OutputStream

T = TypeVar("T")

MAX_BODY = 4096  # bytes
MAX_ADAPTER_BODY = 65536  # bytes: a path may be long
MAX_STREAMS = 1000  # are told one by one, the oldest first
MAX_NAME = 128  # characters of what a client calls itself or its request
POOL = (
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "pinned",
)  # of the engine's gauges, if they are there


class AdminPages:
    """The pages that change a server or tell what it does. The admin key opens them, "" where only
    API keys that are marked so do. With page_settings the page at `/` has a key of its own for the
    settings; web pages of others cannot read it."""

    def __init__(self, service: Service) -> None:
        self._service, self._keys, config = service, service.keys, service.config
        self._own = single_key(config.admin_key)
        self._page_key = ""
        closed = (
            self._keys.needed or config.admin_key or config.allowed_hosts or config.allowed_origins
        )
        if config.page_settings and not closed and origin_rules(config.host, "", "").local:
            self._page_key = secrets.token_urlsafe(24)
        self._of_page = single_key(self._page_key)

    def rule_of_page(self) -> str:
        """Return who may change the settings on the page, as web_pages.home_page takes it."""
        if self._page_key:
            return f"open {self._page_key}"
        return "key" if self._has_key() else LOCKED

    async def config(self, request: HTTPRequest) -> Response:
        """GET tells the present values, POST takes some of them."""
        settings = self._service.live_settings
        if not (self._page_key and self._of_page.find(_given(request))):
            self.admit(request)
        if request.method == "POST":
            raw = await read_body(request.receive, MAX_BODY)
            settings.change(decode_body(raw, dict[str, Any], "the body is no JSON object"))
        return json_response(settings.as_dict())

    async def state(self, request: HTTPRequest) -> Response:
        self.admit(request)
        return json_response(server_state(self._service))

    async def load_adapter(self, request: HTTPRequest) -> Response:
        body = await self._about_adapter(request, LoadBody)
        adapters = self._service.adapters
        await adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: HTTPRequest) -> Response:
        body = await self._about_adapter(request, UnloadBody)
        self._service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _about_adapter(self, request: HTTPRequest, kind: type[T]) -> T:
        self.admit(request)
        raw = await read_body(request.receive, MAX_ADAPTER_BODY)
        return decode_body(raw, kind, "the body is not what it should be")

    def admit(self, request: HTTPRequest) -> None:
        """ClientError unless the request has an admin key."""
        key = self._keys.find(_given(request))
        if not self._has_key():
            raise ClientError(404, "not_found", "no admin key is set: start with --admin-key")
        own = self._own.needed and self._own.find(_given(request))
        if not (own or (key is not None and key.admin)):
            raise ClientError(
                403, "invalid_admin_key", "send the admin key as 'Authorization: Bearer KEY'"
            )

    def _has_key(self) -> bool:
        return self._own.needed or any(one.admin for one in self._keys.keys)


def _given(request: HTTPRequest) -> bytes:
    return request.headers.get("authorization", "").encode()


def server_state(service: Service) -> dict[str, Any]:
    """Everything, ready for JSON."""
    unfinished, now = service.streams.unfinished, time.monotonic()
    given, _ = service.supervisor.placed()
    told = [_stream(stream, about, now) for stream, about in described(service, MAX_STREAMS, now)]
    return {
        "engine": _engine(service),
        "queue": {
            "unfinished": len(unfinished),
            "limit": service.streams.limit,
            "running": int(service.metrics.engine.get("running", 0)),
            "waiting": int(service.metrics.engine.get("waiting", 0)),
            "held": sum(id not in given for id in unfinished),
        },
        "settings": service.live_settings.as_dict(),
        "keys": _keys(service),
        "requests": told,
        "requests_left_out": len(unfinished) - len(told),
    }


def _engine(service: Service) -> dict[str, Any]:
    """The process, and the memory that it says it has."""
    supervisor, metrics, ready = service.supervisor, service.metrics, service.supervisor.ready
    return {
        "pid": supervisor.process.pid,
        "epoch": supervisor.epoch,
        "healthy": supervisor.healthy,
        "still_for_s": round(supervisor.stalled_s, 3),
        "draining": service.draining,
        "restarts": metrics.restarts,
        "poisoned_requests": metrics.poisoned,
        "suspects": supervisor.suspects[:MAX_STREAMS],
        **{
            name: getattr(ready, name, None) for name in ("max_model_len", "block_size", "kv_bytes")
        },
        "pool": {name: int(metrics.engine[name]) for name in POOL if name in metrics.engine},
    }


def _keys(service: Service) -> list[dict[str, Any]]:
    """Return what each key that has asked for something has open and has used; costs in tokens
    (price.py)."""
    told, now = [], time.monotonic()
    for number, key in islice(service.numbered_keys(), MAX_STREAMS):
        if (account := service.quota.account(key)) is not None:
            bucket = account.bucket
            told.append(
                {
                    "key": number,
                    "tenant": key.tenant,
                    "requests": len(account.under_way),
                    "open_cost": account.open_cost,
                    "max_cost": key.max_cost or None,
                    "used": account.used,
                    "tokens_left": None if bucket is None else int(bucket.held(now)),
                }
            )
    return told


def place_of(id: int, given: frozenset[int], in_step: frozenset[int]) -> str:
    """Return where a request is. given: to the engine process; in_step: its latest step."""
    if id not in given:
        return "held"  # until there is an engine, or until suspects have been tried
    return "running" if id in in_step else "waiting"


def described(
    service: Service, most: int, now: float
) -> Iterator[tuple[OutputStream, dict[str, Any]]]:
    """Yield the oldest choices under way, with what everybody who may look is told of each."""
    given, in_step = service.supervisor.placed()
    for id, stream in islice(service.streams.unfinished.items(), most):
        request = stream.request
        name, tenant = service.history.owner(id)
        yield (
            stream,
            {
                "id": id,
                "request": name[:MAX_NAME],
                "tenant": (tenant or request.tenant)[:MAX_NAME],
                "choice": stream.choice,
                "state": place_of(id, given, in_step),
                "prompt_tokens": len(request.prompt),
                "output_tokens": len(stream.tokens),
                "cached_tokens": stream.cached,
                "age_s": round(now - stream.times.arrival, 3),
            },
        )


def _stream(stream: OutputStream, about: dict[str, Any], now: float) -> dict[str, Any]:
    """One choice of one answer, as the admin key shows it."""
    request, last_at = stream.request, stream.times.last_at
    return about | {
        "max_tokens": request.params.max_tokens,
        "priority": request.priority,
        "engines": stream.times.engines,
        "since_last_token_s": round(now - last_at, 3) if last_at else None,
        "deadline_in_s": None if request.deadline is None else round(request.deadline - now, 3),
    }
