"""The parts that the handlers of a server's requests share.

Owns the parts that a server is made of, as one value, and what can be asked of all of them
together. Must not know routes, nor how requests are read and answered.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import ceil

from pageturner.config.settings import ServerConfig
from pageturner.errors import ClientError
from pageturner.formats.generation_config import GenerationDefaults
from pageturner.formats.tokenizer import Tokenizer
from pageturner.http.api_keys import ANYBODY, ApiKey, KeyRing
from pageturner.http.memory_reserve import MemoryReserve
from pageturner.ipc.channel import Ready
from pageturner.server.adapters import ServedAdapters
from pageturner.server.admission.limits import RequestLimits
from pageturner.server.admission.quota import Quota
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.engine_client.background import BackgroundPlaces
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.supervisor import Supervisor
from pageturner.server.observability.admin import LiveSettings
from pageturner.server.observability.metrics import Metrics
from pageturner.server.observability.timings import RequestHistory
from pageturner.server.prefixes import Prefixes
from pageturner.server.receipts import Receipts
from pageturner.server.sessions import ServedSessions
from pageturner.server.text_workers.reading import TextReader
from pageturner.text.chat_template import ChatTemplate

MAX_KEYS = 256  # that have metrics of their own, the first ones


@dataclass(slots=True)
class Service:
    """Everything that a request handler needs. `draining`: no new requests; `active`: answers under
    way; `aliases`: other names of the model."""

    config: ServerConfig
    model: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    reader: TextReader
    supervisor: Supervisor
    streams: OpenStreams
    metrics: Metrics
    memory: MemoryReserve
    generation: GenerationDefaults
    keys: KeyRing
    live_settings: LiveSettings
    receipts: Receipts
    quota: Quota
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: int = 0
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    prefixes: Prefixes = field(init=False)
    background: BackgroundPlaces = field(init=False)
    sessions: ServedSessions = field(init=False)
    adapters: ServedAdapters = field(init=False)
    history: RequestHistory = field(default_factory=RequestHistory)

    def __post_init__(self) -> None:
        def tenants() -> int:  # their file may be read again
            return max(1, len({key.tenant for key in self.keys.keys}))

        self.prefixes = Prefixes(self.supervisor, self.tokenizer, self.ids, tenants)
        self.background = BackgroundPlaces(
            self.supervisor, self.streams, self.metrics, self.ids, lambda: self.live_settings.slots
        )
        self.adapters = ServedAdapters(
            self.supervisor, self.streams, self.names, lambda: self.background.aside
        )
        most = self.live_settings.config.max_sessions
        self.sessions = ServedSessions(self.supervisor, self.quota, most)

    def served(self) -> ServedModel:
        """Return what can be asked for. ClientError 503 before the engine was ever ready."""
        ready = self.supervisor.ready
        if ready is None:
            raise ClientError(
                503, "loading", "the model is still being loaded: try again in a moment"
            )
        return ServedModel(
            model=self.model,
            tokenizer=self.tokenizer,
            template=self.template,
            context=ready.max_model_len,
            capacity=ready.num_blocks * ready.block_size,
            vocab_size=min(ready.vocab_size, self.tokenizer.vocab_size),
            slots=self.live_settings.slots,
            block_size=ready.block_size,
            developer=self.config.developer,
            defaults=self.generation.sampling,
            limits=self._limits(ready),
            pinned=self.prefixes.pinned(ready.block_size),
            names=(*self.aliases, *self.adapters.names),
            adapters=self.adapters.known,
            tool_call_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
            request_templates=self.config.trust_request_chat_template,
            rerank_by=self.config.rerank_by,
        )

    def _limits(self, ready: Ready) -> RequestLimits:
        config = self.config
        return RequestLimits(
            prompts=config.max_prompts_per_request,
            choices=self.streams.limit,
            context=ready.max_model_len,
            vocabulary=min(ready.vocab_size, self.tokenizer.vocab_size),
            values=config.max_json_values,
            entries=config.max_logit_entries_per_request,
            logprobs=config.max_logprobs_per_request,
            text=config.max_tokenize_size,
        )

    def numbered_keys(self) -> Iterator[tuple[int, ApiKey]]:
        """The keys that hold now, from 1 on in the order in which they are written down; 0: nobody
        needs one."""
        keys = self.keys.keys
        return iter(enumerate(keys, 1) if keys else ((0, ANYBODY),))

    def key_costs(self) -> dict[str, tuple[int, int]]:
        """Return by number of a key that has asked for something: what it has open may cost, what
        all cost."""
        accounts = ((number, self.quota.account(key)) for number, key in self.numbered_keys())
        return {
            str(number): (account.open_cost, account.used)
            for number, account in islice(accounts, MAX_KEYS)
            if account is not None
        }

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model; answers have the first."""
        return (self.model, *self.aliases)

    def answers_as(self, asked: str | None) -> str:
        """The model that an answer names: the adapter that was asked for, else the model's first
        name."""
        adapter = self.adapters.find(asked)
        return self.model if adapter is None else adapter.name

    def check_open(self) -> None:
        if self.draining:
            raise ClientError(503, "shutting_down", "the server is shutting down: ask another one")

    @property
    def healthy(self) -> bool:
        return self.supervisor.healthy and not self.draining

    def retry_after(self, error: ClientError) -> int | None:
        """Whole seconds for the Retry-After header of this answer."""
        if error.retry_after:
            return max(1, ceil(error.retry_after))
        return {429: self.streams.retry_after(), 503: 5 if self.draining else 1}.get(error.status)
