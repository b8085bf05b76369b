"""`/v1/admin/state`: what a server is doing now, for whoever has the admin key.

Owns which figures are told and how many. Must not know how they come about, and tells nothing of
what was said: no prompt, no text, no key. What is told of a request is what the API process knows
of it.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from pageturner.server.service import Service
from pageturner.text.output_stream import OutputStream

MAX_STREAMS = 1000  # are told one by one, the oldest first
MAX_NAME = 128  # characters of what a client calls itself or its request
POOL = (
    "blocks_total",
    "blocks_used",
    "blocks_cached",
    "pinned",
)  # of the engine's gauges, if they are there


def server_state(service: Service) -> dict[str, Any]:
    """Everything, ready for JSON."""
    unfinished, now = service.streams.unfinished, time.monotonic()
    given, in_step = service.supervisor.placed()
    told = [
        _stream(service, stream, place_of(id, given, in_step), now)
        for id, stream in islice(unfinished.items(), MAX_STREAMS)
    ]
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
        "max_model_len": None if ready is None else ready.max_model_len,
        "block_size": None if ready is None else ready.block_size,
        "kv_bytes": None if ready is None else ready.kv_bytes,
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


def _stream(service: Service, stream: OutputStream, place: str, now: float) -> dict[str, Any]:
    """One choice of one answer."""
    request, times = stream.request, stream.times
    name, tenant = service.history.owner(request.id)
    return {
        "id": request.id,
        "request": name[:MAX_NAME],
        "tenant": (tenant or request.tenant)[:MAX_NAME],
        "choice": stream.choice,
        "state": place,
        "prompt_tokens": len(request.prompt),
        "output_tokens": len(stream.tokens),
        "max_tokens": request.params.max_tokens,
        "cached_tokens": stream.cached,
        "priority": request.priority,
        "engines": times.engines,
        "age_s": round(now - times.arrival, 3),
        "since_last_token_s": round(now - times.last_at, 3) if times.last_at else None,
        "deadline_in_s": None if request.deadline is None else round(request.deadline - now, 3),
    }
