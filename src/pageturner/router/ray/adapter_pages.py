"""The pages of the door that load and unload LoRA adapters at all replicas of a model.

Owns when such a change holds: every replica that is there has made it, and those that come later
learn of it with the first request (replica.py). Replicas check the admin key and the folder: their
answer is passed on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http.decoding import decode_body
from pageturner.http.http_client import ConnectionLost
from pageturner.http.receiving import read_body
from pageturner.router.ray.adapters import MAX_CHANGES
from pageturner.router.ray.choice import Ask
from pageturner.router.ray.fleet import ServeFleet

log = logging.getLogger("pageturner")
MAX_BODY = 64 * 1024  # bytes
HEADERS = (b"authorization", b"x-api-key", b"x-request-id", b"content-type")
# reasons by which one replica differs from the others
THERE, NOT_THERE = "adapter_exists", "adapter_not_found"
Said = tuple[int, bytes, str]  # what a replica answers: status, body, reason of a refusal
_numbers = itertools.count(-1, -1)  # of asks that no replica is chosen for


class _AdapterBody(msgspec.Struct):
    """Fields of both pages. model: which one an adapter is for, where there are several."""

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False
    model: str | None = None


class DoorAdapterPages:
    """fleets: by the name of the model. model_of: the model of an adapter that is there."""

    def __init__(
        self, fleets: Mapping[str, ServeFleet], model_of: Callable[[str], str | None]
    ) -> None:
        self._fleets, self._model_of = fleets, model_of

    async def load(self, request: HTTPRequest) -> Response:
        """Load an adapter at all replicas, or at none: where one cannot, those that could forget it
        again. What takes the place of another one is not undone; the answer says so."""
        ask, body = await _read(request)
        model = self._model_of(body.lora_name) or self._named(body)
        if body.lora_name in self._fleets:
            message = f"{body.lora_name!r} is the name of a model: take another name"
            raise ClientError(400, "adapter_exists", message, "lora_name")
        if not body.lora_path:
            raise ClientError(
                400, "invalid_value", "lora_path is a folder at every replica", "lora_path"
            )
        fleet = self._fleets[model]
        adapters = fleet.choice.adapters
        if adapters.full and adapters.find(body.lora_name) is None:
            message = f"{MAX_CHANGES} adapters were loaded since the start: unload one first"
            raise ClientError(400, "too_many_adapters", message, "lora_name")
        change = adapters.next(body.lora_name, body.lora_path)
        said = await _tell(fleet, "change_adapter", ask, change)
        done = [one for one in said if one[0] == 200]
        bad = [one for one in said if one[0] != 200 and not (done and one[2] == THERE)]
        if not bad:
            fleet.choice.adapters.note(change)
            return _answer(done[0])
        if done and body.load_inplace:
            message = f"{len(done)} of {len(said)} replicas took it, the others have the one before: {bad[0][2]}"
            raise ClientError(502, "adapter_partly", message + "; send it again")
        if done:
            await _tell(fleet, "drop_adapter", adapters.next(body.lora_name, ""))
        return _answer(bad[0])

    async def unload(self, request: HTTPRequest) -> Response:
        """Unload an adapter at all replicas; where one does not know it, it has nothing to
        forget."""
        ask, body = await _read(request)
        fleet = self._fleets[self._model_of(body.lora_name) or self._named(body)]
        adapters = fleet.choice.adapters
        known = adapters.find(body.lora_name) is not None
        change = adapters.next(body.lora_name, "")
        said = await _tell(fleet, "change_adapter", ask, change)
        bad = [one for one in said if one[0] != 200 and one[2] != NOT_THERE]
        if bad:
            return _answer(bad[0])
        fleet.choice.adapters.note(change)
        done = [one for one in said if one[0] == 200]
        if known and not done:
            return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
        return _answer((done or said)[0])

    def _named(self, body: _AdapterBody) -> str:
        """The model that a new adapter is for."""
        if body.model in self._fleets:
            assert body.model is not None
            return body.model
        if len(self._fleets) == 1 and body.model is None:
            return next(iter(self._fleets))
        message = f"say which model the adapter is for: model is one of {', '.join(self._fleets)}"
        raise ClientError(400, "invalid_value", message, "model")


async def _read(request: HTTPRequest) -> tuple[Ask, _AdapterBody]:
    raw = await read_body(request.receive, MAX_BODY)
    body = decode_body(raw, _AdapterBody, "the body cannot be read")
    headers = [(name, value) for name, value in request.headers.raw if name in HEADERS]
    return Ask(next(_numbers), "POST", request.url.path, headers, raw), body


async def _tell(fleet: ServeFleet, method: str, *arguments: Any) -> list[Said]:
    """Return what the replicas that are alive answer, at least one. ClientError."""
    try:
        told = await fleet.tell_all(method, *arguments)
    except ConnectionLost as lost:
        raise ClientError(
            503, "no_replica", f"the replicas cannot be told: {lost}; try again"
        ) from None
    for one in told:
        if isinstance(
            one, BaseException
        ):  # it died meanwhile: who takes its place learns of the change
            log.warning("%s at a replica: %s", method, str(one)[:300])
    said = [one for one in told if not isinstance(one, BaseException)]
    if not said:
        raise ClientError(503, "no_replica", "no replica could be told: try again in a moment")
    return said


def _answer(said: Said) -> Response:
    kind = "text/plain" if said[0] == 200 else "application/json"
    return Response(said[1], said[0], media_type=kind)


def with_loaded(models: list[dict[str, Any]], fleet: ServeFleet, base: str) -> list[dict[str, Any]]:
    """A model's list of models as it is at all its replicas: one that has just come may not know
    yet which adapters were loaded or unloaded before."""
    there = [one for one in models if not fleet.choice.adapters.unloaded(str(one.get("id", "")))]
    known = {one.get("id") for one in there}
    template = next((one for one in there if one.get("id") == base), {})
    more = [
        {
            **template,
            "id": one.name,
            "root": one.path,
            "parent": base,
            "created": one.version // 10**9,
        }
        for one in fleet.choice.adapters.loaded()
        if one.name not in known
    ]
    return [*there, *more]
