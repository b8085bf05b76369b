"""Finds the request that kills the engine, by halving, so that it fails alone.

Owns strikes and suspects; pure data in, ids out. Must not know processes or sockets.

A crash is a strike for every request of the step that was executing. A request is suspect when a
crash strikes it a second time without it having gained a token in between. Then half of the
suspects run without the other half and without anything else: if they crash again they are halved
again, and if each of them gains a token the next half follows. A suspect that crashes the engine
when it was let in alone is the culprit.

A death that no request explains, by a signal of an operator or for want of memory, is no strike.
But it may be a request that takes the memory, again and again, and it must not do so for ever. So
PATIENCE such deaths in a row are free for each request that was being computed; those that follow
before it has gained a token are strikes. Alone, it fails with the one after the next. The pauses
between two starts grow meanwhile (restarts.py), so that nothing short ends it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from pageturner.ipc.ledger import OUT_OF_MEMORY_EXIT
from pageturner.request import Failure
from pageturner.server.engine_client.open_streams import NO_MEMORY

POISON = Failure(
    "poisoned_request", "this request repeatedly brought the engine down and was given up"
)
# exit codes of what no request can do to an engine: an operator does it, the system, or the lack of
# memory
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FROM_OUTSIDE = (OUT_OF_MEMORY_EXIT, *(-number for number in SIGNALS))
PATIENCE = 4  # deaths that no request explains, in a row without a token, that are no strike


def failure_of(code: int) -> Failure:
    """Return how a request fails that was alone whenever the engine ended with this exit code."""
    return NO_MEMORY if code == OUT_OF_MEMORY_EXIT else POISON


class Quarantine:
    """`tokens` is always: id -> tokens so far, of every unfinished request. strikes: dealt so
    far."""

    def __init__(self) -> None:
        self.strikes = 0
        self._killed: dict[int, tuple[int, int]] = {}  # id -> tokens, deaths with so many
        self._struck: dict[int, int] = {}  # id -> tokens it had at its last strike
        self._trial: list[int] = []  # suspects let in last, not cleared yet
        self._rest: list[
            list[int]
        ] = []  # groups of suspects that wait for their trial, hottest first
        self._admitted: set[int] = set()  # what may run while there are suspects

    @property
    def active(self) -> bool:
        """Return whether suspects are being tried, so that everything else has to wait."""
        return bool(self._trial or self._rest)

    @property
    def suspects(self) -> list[int]:
        """Return the requests on trial now, then those whose trial is to come."""
        return self._trial + [id for group in self._rest for id in group]

    def allows(self, id: int) -> bool:
        """Return whether the request may be submitted now."""
        return not self.active or id in self._admitted

    def killed(self, executing: Sequence[int], tokens: Mapping[int, int]) -> int | None:
        """The engine was killed from outside while it computed `executing`. As `crash`, for those
        with whom patience has ended."""
        before, self._killed = self._killed, {}
        for id in tokens:
            at, deaths = before.get(id, (tokens[id], 0))
            deaths = (deaths if at == tokens[id] else 0) + (id in executing)
            if deaths:
                self._killed[id] = (tokens[id], deaths)
        tried = [id for id in executing if self._killed.get(id, (0, 0))[1] > PATIENCE]
        return self.crash(tried, tokens) if tried else None

    def crash(self, executing: Sequence[int], tokens: Mapping[int, int]) -> int | None:
        """The engine died while it computed `executing`. The id of the culprit, if it is found."""
        struck = [id for id in executing if id in tokens]
        self.strikes += len(struck)
        again = [id for id in struck if self._struck.get(id) == tokens[id]]
        self._struck = {id: at for id, at in self._struck.items() if id in tokens}
        self._struck.update((id, tokens[id]) for id in struck)
        isolated = self._trial
        suspects = [id for id in again if id in isolated] if isolated else again
        if not suspects:
            self._admit([id for id in isolated if id in tokens])
            return None
        if len(suspects) == 1 and suspects in (isolated, struck):
            self._admit([])
            self._rest = []
            self._struck.pop(suspects[0], None)
            return suspects[0]
        self._try(suspects)
        return None

    def settle(self, tokens: Mapping[int, int]) -> bool:
        """Look whether the trial is over. True when more may be submitted than before."""
        if not self.active:
            return False
        self._trial = [id for id in self._trial if id in tokens and tokens[id] == self._struck[id]]
        if self._trial:
            return False
        groups = [[id for id in group if id in tokens] for group in self._rest]
        self._rest = [group for group in groups if group]
        cleared = self._admitted
        self._try(self._rest.pop(0) if self._rest else [])
        self._admitted |= cleared
        return True

    def _try(self, suspects: list[int]) -> None:
        """Let one half in; the other one is next, before groups that are less suspect."""
        half = (len(suspects) + 1) // 2
        if suspects[half:]:
            self._rest.insert(0, suspects[half:])
        self._admit(suspects[:half])

    def _admit(self, trial: list[int]) -> None:
        self._trial = trial
        self._admitted = set(trial)
