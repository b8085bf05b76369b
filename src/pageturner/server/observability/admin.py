"""`/v1/admin`: what can be changed of an engine that runs, and what it does, for whoever has the
admin key.

Owns the key, the fields and their bounds, and the present values. Must not know what they do, nor
what is told of what runs (admin_state.py).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.config.settings import EngineConfig, ServerConfig, check
from pageturner.errors import ClientError, EngineFault
from pageturner.http.api_keys import KeyRing, single_key
from pageturner.http.origins import origin_rules
from pageturner.http.receiving import read_body
from pageturner.http.responses import json_response
from pageturner.ipc.channel import Configure
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.supervisor import Supervisor

log = logging.getLogger("pageturner")

CHANGEABLE = ("max_num_batched_tokens", "max_num_seqs", "policy", "order")
MAX_BODY = 4096  # bytes
LOCKED = (
    "They can be changed here on a server of this machine that has --page-settings, or --admin-key."
)
MOST = 1 << 24  # tokens of a step, or sequences: more is a slip


@dataclass(slots=True)
class LiveSettings:
    """The changeable settings of an engine: as it was started, then as they were changed.

    widest  sequences of the widest search that was ever accepted
    """

    supervisor: Supervisor
    streams: OpenStreams
    config: EngineConfig
    widest: int = field(init=False)

    def __post_init__(self) -> None:
        self.widest = self.slots

    @property
    def slots(self) -> int:
        """Most sequences of one request now: those that may run at once."""
        return self.config.slots

    def as_dict(self) -> dict[str, Any]:
        """The settings, and whether the engine has them already."""
        values = {name: getattr(self.config, name) for name in CHANGEABLE}
        values["max_num_batched_tokens"] = self.config.token_budget
        return values | {"applied": self.supervisor.configured}

    def take_over(self) -> None:
        """An engine is ready: what was left to its machine is now as that has it."""
        if self.config.max_num_batched_tokens < 0 and (ready := self.supervisor.ready) is not None:
            self.config = replace(self.config, max_num_batched_tokens=ready.token_budget)

    def change(self, values: dict[str, Any]) -> None:
        """Have the engine go on with these. ClientError 400 names the one that cannot be; then none
        is changed."""
        known = {one.name: one for one in fields(EngineConfig) if one.name in CHANGEABLE}
        for name, value in values.items():
            if name not in known:
                message = f"unknown field {name!r}: what can be changed is {', '.join(CHANGEABLE)}"
                raise ClientError(400, "unknown_field", message, name)
            if type(value) is not type(
                known[name].default
            ):  # settings take '64K' too, JSON has numbers
                message = (
                    f"{name} is of type {type(known[name].default).__name__}, not {value!r:.80}"
                )
                raise ClientError(400, "invalid_value", message, name)
            try:
                check(known[name], value)
            except EngineFault as fault:
                raise ClientError(400, "invalid_value", fault.message, name) from fault
            if isinstance(value, int) and not 0 <= value <= MOST:
                raise ClientError(
                    400,
                    "invalid_value",
                    f"{name} is 0 or more and {MOST} or less, not {value}",
                    name,
                )
        self.config = replace(self.config, **values)
        more = max(0, self.slots - self.widest)
        self.widest += more
        self.streams.raise_limit(more)
        wanted = {name: getattr(self.config, name) for name in CHANGEABLE}
        log.info(
            "settings from here on: %s",
            ", ".join(f"{name} {value}" for name, value in wanted.items()),
        )
        self.supervisor.configure(Configure(**wanted, widest=self.widest))


class AdminPages:
    """config: GET tells the present values, POST takes some of them. state: what `tell_state` says.
    config.admin_key: opens them, "" where only API keys that are marked so do. With page_settings
    the page at `/` has a key of its own for the first; web pages of others cannot read it."""

    def __init__(
        self,
        settings: LiveSettings,
        config: ServerConfig,
        keys: KeyRing,
        tell_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._settings = settings
        self._tell_state = tell_state
        self._own = single_key(config.admin_key)
        self._keys = keys
        page_key = ""
        closed = keys.needed or config.admin_key or config.allowed_hosts or config.allowed_origins
        if config.page_settings and not closed and origin_rules(config.host, "", "").local:
            page_key = secrets.token_urlsafe(24)
        self._page_key = page_key
        self._of_page = single_key(page_key)

    def rule_of_page(self) -> str:
        """Return who may change the settings on the page, as web_pages.home_page takes it."""
        if self._page_key:
            return f"open {self._page_key}"
        return "key" if self._has_key() else LOCKED

    async def config(self, request: HTTPRequest) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not (self._page_key and self._of_page.find(given)):
            self.admit(request)
        if request.method == "POST":
            self._settings.change(_object(await read_body(request.receive, MAX_BODY)))
        return json_response(self._settings.as_dict())

    async def state(self, request: HTTPRequest) -> Response:
        self.admit(request)
        return json_response(self._tell_state())

    def admit(self, request: HTTPRequest) -> None:
        """ClientError unless the request has an admin key."""
        given = request.headers.get("authorization", "").encode()
        key = self._keys.find(given)
        if not self._has_key():
            raise ClientError(404, "not_found", "no admin key is set: start with --admin-key")
        if not ((self._own.needed and self._own.find(given)) or (key is not None and key.admin)):
            message = "send the admin key as 'Authorization: Bearer KEY'"
            raise ClientError(403, "invalid_admin_key", message)

    def _has_key(self) -> bool:
        return self._own.needed or any(one.admin for one in self._keys.keys.keys)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, "invalid_json", f"the body is no JSON object: {error}") from error
