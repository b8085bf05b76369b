"""The settings that can be changed of an engine that runs.

Owns the fields and their bounds, and the present values. Must not know what they do, nor who may
change them (admin_state.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pageturner.config.settings import EngineConfig, check
from pageturner.errors import ClientError, EngineFault
from pageturner.ipc.channel import Configure
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.supervisor import Supervisor

log = logging.getLogger("pageturner")

CHANGEABLE = ("max_num_batched_tokens", "max_num_seqs", "policy", "order")
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
            kind = type(known[name].default)
            if type(value) is not kind:  # settings take '64K' too, JSON has numbers
                message = f"{name} is of type {kind.__name__}, not {value!r:.80}"
                raise ClientError(400, "invalid_value", message, name)
            try:
                check(known[name], value)
            except EngineFault as fault:
                raise ClientError(400, "invalid_value", fault.message, name) from fault
            if isinstance(value, int) and not 0 <= value <= MOST:
                message = f"{name} is 0 or more and {MOST} or less, not {value}"
                raise ClientError(400, "invalid_value", message, name)
        self.config = replace(self.config, **values)
        more = max(0, self.slots - self.widest)
        self.widest += more
        self.streams.raise_limit(more)
        wanted = {name: getattr(self.config, name) for name in CHANGEABLE}
        told = ", ".join(f"{name} {value}" for name, value in wanted.items())
        log.info("settings from here on: %s", told)
        self.supervisor.configure(Configure(**wanted, widest=self.widest))
