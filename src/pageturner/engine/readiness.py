"""What a request waits for before the scheduler may see it: its grammar, its adapter, its KV on a disk.

Owns who has to wait for what, and why one cannot run after all. Must not know the scheduler or the clock;
where they wait is the anteroom.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pageturner.executor.adapters import AdapterStore, AdapterTicket
from pageturner.executor.grammar import GrammarError, Grammars, Start
from pageturner.kv.kv_beside import KVBeside, KVWait
from pageturner.request import Refused, Request

MOST_READING = 1024  # in the anteroom, beyond which nobody more waits for a disk


@dataclass(frozen=True, slots=True)
class Wait:
    """part: of its account, while it waits; check: raises Refused where what `future` brings does not let it
    run."""

    part: str
    future: Any
    check: Callable[[Any], None]


class Readiness:
    """Of one engine. Without grammars no request may ask for any."""

    def __init__(self, grammars: Grammars | None, adapters: AdapterStore, beside: KVBeside) -> None:
        self._grammars, self._adapters, self._beside = grammars, adapters, beside

    def of(self, request: Request, waiting: int) -> Wait | None:
        """What it has to wait for, beside so many who wait already; None: it can run now. Refused."""
        wait = self._all_but_kv(request, waiting)
        if waiting >= MOST_READING:
            return wait
        ticket = self._beside.ticket(request)
        if ticket is None:
            return wait
        return Wait("kv_wait", ticket, KVWait.result) if wait is None else _and_kv(wait, ticket)

    def _all_but_kv(self, request: Request, waiting: int) -> Wait | None:
        wait = (
            self._grammar_of(request, waiting)
            if request.params.structured_outputs is not None
            else None
        )
        if not request.adapter:
            return wait
        ticket = self._adapters.ticket(request)
        if wait is not None:
            both = _GrammarThenAdapter(wait, ticket)
            return Wait(wait.part, both, _GrammarThenAdapter.check)
        if ticket.done():
            ticket.result()
            return None
        if (
            not request.resume
            and self._grammars is not None
            and waiting >= self._grammars.most_waiting
        ):
            ticket.cancel()
            raise Refused("queue_full", f"{waiting} requests are waiting for their adapters")
        return Wait("adapter_wait", ticket, AdapterTicket.result)

    def _grammar_of(self, request: Request, waiting: int) -> Wait:
        grammar = request.params.structured_outputs
        if self._grammars is None or grammar is None:
            raise Refused("structured_outputs_unsupported", "this engine has no vocabulary")
        if waiting >= self._grammars.most_waiting and not request.resume:
            raise Refused("queue_full", f"{waiting} requests are waiting for their grammars")
        return Wait(
            "grammar_wait", self._grammars.compiled(grammar), partial(_check_grammar, request)
        )


def _and_kv(wait: Wait, ticket: KVWait) -> Wait:
    """Both at once."""
    return Wait(wait.part, _AndKV(wait, ticket), _AndKV.check)


class _AndKV:
    """Something else, and KV."""

    def __init__(self, wait: Wait, ticket: KVWait) -> None:
        self._wait, self._ticket = wait, ticket

    def done(self) -> bool:
        return bool(self._wait.future.done()) and self._ticket.done()

    def cancel(self) -> bool:
        self._ticket.cancel()
        return bool(self._wait.future.cancel())

    def check(self) -> None:
        self._wait.check(self._wait.future)


class _GrammarThenAdapter:
    """Both, one behind the other."""

    def __init__(self, grammar: Wait, ticket: AdapterTicket) -> None:
        self._grammar, self._ticket = grammar, ticket
        self._refused: Refused | None = None

    def done(self) -> bool:
        if self._refused is not None:
            return True
        if not self._grammar.future.done():
            return False
        try:
            self._grammar.check(self._grammar.future)
        except Refused as refused:
            self._refused = refused
            self._ticket.cancel()
            return True
        return self._ticket.done()

    def cancel(self) -> bool:
        self._ticket.cancel()
        return bool(self._grammar.future.cancel())

    def check(self) -> None:
        if self._refused is not None:
            raise self._refused
        self._ticket.result()


def _check_grammar(request: Request, compiled: Future[Start]) -> None:
    """Refused where the grammar of a request does not let it run."""
    try:
        least, most = compiled.result().least, request.params.max_tokens
    except GrammarError as error:
        raise Refused("invalid_grammar", str(error)) from error
    if most is not None and most < least:
        message = (
            f"every answer to this grammar has {least} tokens or more, and max_tokens is {most}"
        )
        raise Refused("grammar_too_long", message + ": raise it")
