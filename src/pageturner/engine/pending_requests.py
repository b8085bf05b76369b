"""Pending requests: what a request waits for before the scheduler may see it (grammar, adapter,
KV).

Owns which requests wait, what each waits for, and why one cannot run after all. The scheduler only
ever sees requests that can run. Must not know the scheduler or the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pageturner.engine.bisect_step import NO_MEMORY
from pageturner.executor.adapters import AdapterStore, AdapterTicket
from pageturner.executor.grammar import Grammars, Start
from pageturner.kv.kv_connectors import KVConnectors
from pageturner.request import Refused, Request
from pageturner.text.grammar.compiler import GrammarError

SHORTEST = 'start: "a"'  # of grammars
MAX_WAITING_FOR_KV = 1024  # pending requests beyond which no further request waits for KV


@dataclass(frozen=True, slots=True)
class _Wait:
    """One thing that a request waits for.

    part    the part of the request's latency account while it waits
    future  a Future, or a ticket with `done` and `cancel`
    check   called with the future when that is done; raises Refused if the request cannot run
    """

    part: str
    future: Any
    check: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request and what it waits for, in order."""

    request: Request
    waits: list[_Wait]

    def ready(self) -> bool:
        """Return whether all that it waits for is there. Refused."""
        for wait in self.waits:
            if not wait.future.done():
                return False
            wait.check(wait.future)
        return True


class PendingRequests:
    """The pending requests of one engine by id, in order of arrival. Without grammars no request
    may ask for structured output."""

    def __init__(
        self, grammars: Grammars | None, adapters: AdapterStore, beside: KVConnectors
    ) -> None:
        self._grammars, self._adapters, self._beside = grammars, adapters, beside
        self._pending: dict[int, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: Request) -> str | None:
        """Let a request wait, and return for which part of its latency account. None: it can run
        now. Refused if it never can, or if too many wait already."""
        waits = self._waits(request)
        if not waits:
            return None
        self._pending[request.id] = _Pending(request, waits)
        return waits[0].part

    def pop_ready(self) -> list[tuple[Request, Refused | None]]:
        """Remove and return the requests that wait for nothing more, and why one cannot run after
        all."""
        found: list[tuple[Request, Refused | None]] = []
        for id, one in list(self._pending.items()):
            try:
                if not one.ready():
                    continue
                found.append((one.request, None))
            except Refused as refused:
                found.append((one.request, refused.with_traceback(None)))
                self.remove(id)
            self._pending.pop(id, None)
        return found

    def remove(self, id: int) -> None:
        """Forget a request that may be pending, and cancel what no other request waits for."""
        gone = self._pending.pop(id, None)
        if gone is None:
            return
        others = [wait.future for one in self._pending.values() for wait in one.waits]
        for wait in gone.waits:
            if all(wait.future is not other for other in others):
                wait.future.cancel()

    def _waits(self, request: Request) -> list[_Wait]:
        waiting, waits = len(self), list[_Wait]()
        if request.params.structured_outputs is not None:
            waits.append(self._grammar_wait(request))
        if request.adapter and (wait := self._adapter_wait(request, bool(waits))):
            waits.append(wait)
        if waiting < MAX_WAITING_FOR_KV and (kv := self._beside.ticket(request)):
            # it can run whatever came of it
            waits.append(_Wait("kv_wait", kv, lambda ticket: None))
        return waits

    def prepare(self) -> None:
        """Have the vocabulary of grammars loaded, which holds the interpreter."""
        if self._grammars is not None:
            self._grammars.compiled(SHORTEST)

    def _grammar_wait(self, request: Request) -> _Wait:
        grammar = request.params.structured_outputs
        if self._grammars is None or grammar is None:
            raise Refused("structured_outputs_unsupported", "this engine has no vocabulary")
        if self._crowded(request):
            raise Refused("queue_full", f"{len(self)} requests are waiting for their grammars")
        compiled = self._grammars.compiled(grammar)
        return _Wait("grammar_wait", compiled, partial(_check_grammar, request))

    def _crowded(self, request: Request) -> bool:
        grammars = self._grammars
        return grammars is not None and len(self) >= grammars.most_waiting and not request.resume

    def _adapter_wait(self, request: Request, behind_grammar: bool) -> _Wait | None:
        ticket = self._adapters.ticket(request)
        if not behind_grammar and ticket.done():
            ticket.result()
            return None
        if not behind_grammar and self._crowded(request):
            ticket.cancel()
            raise Refused("queue_full", f"{len(self)} requests are waiting for their adapters")
        return _Wait("adapter_wait", ticket, AdapterTicket.result)


def _check_grammar(request: Request, compiled: Future[Start]) -> None:
    """Raise Refused where the compiled grammar does not let the request run."""
    try:
        least, most = compiled.result().least, request.params.max_tokens
    except GrammarError as error:
        raise Refused("invalid_grammar", str(error)) from error
    except MemoryError as error:
        raise Refused(NO_MEMORY.code, NO_MEMORY.message, NO_MEMORY.retry_after) from error
    if most is not None and most < least:
        message = (
            f"every answer to this grammar has {least} tokens or more, and max_tokens is {most}"
        )
        raise Refused("grammar_too_long", message + ": raise it")
