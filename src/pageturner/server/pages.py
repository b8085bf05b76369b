"""The small endpoints that a server answers at once: health, models, metrics, tokens of a text,
prefixes and sessions.

Owns their fields and what they say. Must not know how anything is generated.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http.prometheus import MEDIA_TYPE
from pageturner.http.receiving import read_body
from pageturner.http.request_info import RequestInfo
from pageturner.http.responses import json_response
from pageturner.server.admission.metered import metered
from pageturner.server.api.base.body import RequestBody
from pageturner.server.api.base.call import check_model
from pageturner.server.observability import metrics
from pageturner.server.service import Service
from pageturner.server.text_workers.text_jobs import PrefixBody, unpack_prefix

log = logging.getLogger("pageturner")


def predicted_load(engine: Mapping[str, float], active: int) -> dict[str, float]:
    """Return what routers count a server by: tokens that it has yet to compute, and those of one
    answer, predicted by its engine. {} where the engine has said nothing yet. active: answers under
    way, some of them so new that the engine's last figures do not have them."""
    if "backlog_tokens" not in engine:
        return {}
    answer, known = engine.get("backlog_answer", 0.0), engine["backlog_sequences"]
    tokens = engine["backlog_tokens"]
    each = tokens / known if known else answer
    return {
        "predicted_tokens": round(tokens + each * max(0.0, active - known)),
        "answer_tokens": answer,
    }


class ServerPages:
    """The endpoints that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = itertools.count(1)  # of prefixes that are given no id

    async def health(self, _: HTTPRequest) -> Response:
        if self._service.healthy:
            return json_response({"status": "ok"})
        self._service.check_open()
        self._service.served()
        if trouble := self._service.supervisor.crash_loop:
            raise ClientError(503, "crash_loop", trouble)
        raise ClientError(
            503, "no_engine", "the engine is not there: it is being restarted, or it is stuck"
        )

    async def load(self, _: HTTPRequest) -> Response:
        service = self._service
        told = {"server_load": service.active, "role": service.live_settings.config.role}
        return json_response(told | predicted_load(service.metrics.engine, service.active))

    async def models(self, _: HTTPRequest) -> Response:
        adapters = [entry.name for entry in self._service.adapters if entry.digest]
        return _list_of(map(self._model, (*self._service.names, *adapters)))

    async def model(self, request: HTTPRequest) -> Response:
        """Return one model. Names may have slashes, as on the Hugging Face hub."""
        name = request.path_params["id"]
        check_model(RequestBody(model=name), self._service.served())
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        service, ready = self._service, self._service.supervisor.ready
        adapter = service.adapters.find(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created if adapter is None else adapter.created,
            "owned_by": "pageturner",
            "root": service.model if adapter is None else adapter.path,
            "parent": None if adapter is None else service.model,
            "max_model_len": None if ready is None else ready.max_model_len,
            "permission": [],
        }

    async def metrics(self, _: HTTPRequest) -> Response:
        service, ready = self._service, self._service.supervisor.ready
        cache = {"block_size": "0", "num_gpu_blocks": "0"}
        if ready is not None:
            cache = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        costs = service.key_costs()
        told = (service.adapters.figures(), service.adapters.at_work())
        most = service.live_settings.config.max_loras
        adapters = metrics.AdapterFigures(most, *told)
        text = metrics.render(
            service.metrics, service.model, service.healthy, cache, costs, adapters
        )
        return Response(text, media_type=MEDIA_TYPE)

    async def tokenize(self, request: HTTPRequest) -> Response:
        return await self._page("tokenize", request)

    async def detokenize(self, request: HTTPRequest) -> Response:
        return await self._page("detokenize", request)

    async def apply_template(self, request: HTTPRequest) -> Response:
        return await self._page("apply_template", request)

    async def count_tokens(self, request: HTTPRequest) -> Response:
        return await self._page("count_tokens", request)

    async def _page(self, name: str, request: HTTPRequest) -> Response:
        service, served = self._service, self._service.served()
        with metered(service.quota, request.scope, request.receive) as (_, receive):
            raw = await read_body(receive, service.config.max_body_size)
            content = await service.reader.page(name, raw, served, request.scope, receive)
        return Response(content, media_type="application/json")

    # -- prefixes ----------------------------------------------------------------------------------
    async def keep_prefix(self, request: HTTPRequest) -> Response:
        service, served, tenant = self._service, self._service.served(), _tenant(request)
        with metered(service.quota, request.scope, request.receive) as (work, receive):
            raw = await read_body(receive, service.config.max_body_size)
            read = await service.reader.page("prefix", raw, served, request.scope, receive)
            known = unpack_prefix(read)
            id = known.id or f"prefix-{next(self._numbers)}"
            adapter = await service.adapters.digest(known.adapter)
            share = service.config.max_pinned_share
            service.prefixes.check_share(len(known.tokens), tenant, served, share)
            service.quota.charge(work, len(known.tokens))
            prefix = await service.prefixes.add(id, known.tokens, known.salt, tenant, adapter)
        return json_response(prefix.as_dict())

    async def prefixes(self, request: HTTPRequest) -> Response:
        """Return what the tenant has, and what is everybody's."""
        seen = ("", _tenant(request))
        return _list_of(one.as_dict() for one in self._service.prefixes if one.tenant in seen)

    async def delete_prefix(self, request: HTTPRequest) -> Response:
        id = request.path_params["id"]
        self._service.prefixes.remove(id, _tenant(request))
        return json_response({"id": id, "object": "prefix", "deleted": True})

    # -- sessions ----------------------------------------------------------------------------------
    async def sessions(self, request: HTTPRequest) -> Response:
        """Return those of the tenant."""
        sessions = self._service.sessions
        return _list_of(map(sessions.as_dict, sessions.of(_tenant(request))))

    async def session(self, request: HTTPRequest) -> Response:
        sessions = self._service.sessions
        one = sessions.find(request.path_params["id"], _tenant(request))
        if request.method == "DELETE":
            sessions.release(one)
            return json_response({"id": one.id, "object": "session", "deleted": True})
        return json_response(sessions.as_dict(one))


def _tenant(request: HTTPRequest) -> str:
    info: RequestInfo = request.scope["pageturner"]
    return info.tenant


def _list_of(entries: Iterable[dict[str, Any]]) -> Response:
    return json_response({"object": "list", "data": list(entries)})


async def preload(service: Service, bodies: list[PrefixBody]) -> None:
    """Keep all of these prefixes; what cannot be kept is said in the log, and the server serves."""
    prefixes = service.prefixes
    for number, body in enumerate(bodies, 1):
        id = body.id or f"preload-{number}"
        try:
            raw = msgspec.json.encode(body)
            read = await service.reader.run("prefix", raw, service.served(), "preload")
            known = unpack_prefix(read)
            adapter = await service.adapters.digest(known.adapter)
            await prefixes.add(id, known.tokens, body.cache_salt, adapter=adapter)
        except ClientError as error:
            log.warning("preload: the prefix %s is not kept: %s", id, error.message)
    if bodies:
        ready = sum(prefix.status == "ready" for prefix in prefixes)
        log.info("preload: %d of %d prefixes are kept", ready, len(bodies))
