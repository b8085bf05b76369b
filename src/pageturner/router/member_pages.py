"""`/v1/router/replicas`: replicas register with a router, say again that they are there, and leave.

Owns the key, the fields, and what is told of all replicas. Must not know where other replicas come
from (members.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError
from pageturner.http.api_keys import single_key
from pageturner.http.decoding import decode_body
from pageturner.http.receiving import read_body
from pageturner.http.responses import json_response
from pageturner.router.fleet import Fleet
from pageturner.router.members import Members

PATH = "/v1/router/replicas"
MAX_BODY = 64 * 1024  # bytes


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST and DELETE. url: of the replica, as the router reaches it; models: for which
    alone it answers."""

    url: str
    models: list[str] = []


class MemberPages:
    """The endpoint of one router."""

    def __init__(self, fleet: Fleet, members: Members, key: str) -> None:
        self._fleet, self._members, self._key = fleet, members, single_key(key)

    async def answer(self, request: HTTPRequest) -> Response:
        self._admit(request)
        if request.method == "GET":
            return json_response({"object": "list", "data": self._told()})
        raw = await read_body(request.receive, MAX_BODY)
        wanted = 'the body is {"url": "http://HOST:PORT", "models": [...]}'
        body = decode_body(raw, Registration, wanted)
        if request.method == "DELETE":
            self._members.unregister(body.url)
            return json_response({"url": body.url, "deleted": True})
        member = self._members.register(body.url, body.models)
        expires = self._members.config.register_ttl
        return json_response({"url": str(member.address), "expires_in": expires})

    def _admit(self, request: HTTPRequest) -> None:
        if not self._key.needed:
            raise ClientError(
                404, "not_found", "replicas cannot register: start with --register-key"
            )
        if self._key.find(request.headers.get("authorization", "").encode()) is None:
            message = "send the key of --register-key as 'Authorization: Bearer KEY'"
            raise ClientError(403, "invalid_register_key", message)

    def _told(self) -> list[dict[str, Any]]:
        left = {str(one.address): seconds for one, seconds in self._members.registered.items()}
        return [
            {
                "url": str(one.address),
                "models": list(one.models),
                "healthy": one.healthy,
                "open": one.open,
                "predicted_tokens": round(one.tokens.tokens),
                "aside": one.breaker.aside,
                "expires_in": left.get(str(one.address)),
            }
            for one in self._fleet.replicas
        ]
