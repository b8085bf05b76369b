"""Programs: the requests of one agent as one job, in the queue and in the order of eviction.

The queue order is PLAS, program-level attained service (Luo et al., Autellix, 2025): the program
that was served least goes first. Service is all that was computed for its requests so far, in
tokens of a prompt; a token of the answer counts `output_weight` of these. Cached tokens, and those
computed again after a preemption, cost nothing. Left out of the paper: its levels, its preemption
of what runs, and ATLAS. In place of its promotion of starving programs stands the ageing of all
orders.

A program is known by the session of its requests (`X-Session-Id`), else by lineage: a prompt that
begins with all of a prompt before it, or with that and its answer, goes on with it. Lineage is
looked up by hashes at every GRAIN-th token, of a tenant's own requests only, and the longest
beginning counts. So shorter prompts, and prompts summed up by the client, begin programs of their
own.

From its second turn on a program that gave no session is kept like one that did
(kept_sessions.py), with its own gaps between turns: who is expected soon keeps its KV before who
is not. A first turn claims nothing, for most prompts are never continued.

Owns who belongs to which program, and what each was served. Must not know the queue nor blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from pageturner.request import BACKGROUND, Request, SessionHint
from pageturner.scheduler.types import Sequence

GRAIN = 32  # tokens
MAX_PROGRAMS = 4096  # remembered; the one that was heard of least recently goes first
FOREVER = 86_400.0  # seconds; session_keep bounds it


@dataclass(slots=True)
class _Turn:
    """An open request. name: of its program; known: whether that was there before; length, end: of
    the beginning of its prompt in whole GRAINs, and its hash."""

    name: str
    known: bool
    length: int
    end: int


class Programs:
    """The program of each request."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}
        self._ends: dict[tuple[str, str, int], str] = {}  # (tenant, salt, hash) -> program

    def name_of(self, seq: Sequence) -> str:
        """Return the name of its program."""
        return self._turn(seq).name

    def hint_of(self, seq: Sequence) -> SessionHint | None:
        """Return what is said of its KV: by itself, or that its program goes on."""
        request = seq.request
        if request.session or request.priority == BACKGROUND or not self._turn(seq).known:
            return request.session
        return SessionHint(self.name_of(seq), request.tenant, keep=FOREVER)

    def _turn(self, seq: Sequence) -> _Turn:
        request = seq.request
        turn = self._turns.get(request.id)
        if turn is None:
            turn = self._turns[request.id] = self._begin(seq)
        return turn

    def _begin(self, seq: Sequence) -> _Turn:
        request = seq.request
        if request.session:
            return _Turn(request.session.name, True, 0, 0)
        hashes = [0, *_chain(request.prompt, 0)]
        found = (self._ends.get(_key(request, one)) for one in reversed(hashes))
        name = next(filter(None, found), None)
        return _Turn(
            name or f"{request.tenant}//{request.id}",
            bool(name),
            GRAIN * (len(hashes) - 1),
            hashes[-1],
        )

    def ended(self, seq: Sequence, finish: str | None) -> None:
        """Remember how to find its program, however it ended."""
        turn = self._turns.pop(seq.request.id, None)
        if turn is None or seq.request.session:
            return
        behind = _chain(seq.tokens[turn.length : -1], turn.end)
        for end in filter(None, (turn.end, *behind[-1:])):
            key = _key(seq.request, end)
            self._ends.pop(key, None)
            self._ends[key] = turn.name
        while len(self._ends) > 2 * MAX_PROGRAMS:
            del self._ends[next(iter(self._ends))]


def _key(request: Request, end: int) -> tuple[str, str, int]:
    return request.tenant, f"{request.salt}/{request.adapter}", end


def _chain(tokens: Tokens[int], before: int) -> list[int]:
    """Return the hashes of all beginnings in whole GRAINs behind something of this hash."""
    hashes = []
    for end in range(GRAIN, len(tokens) + 1, GRAIN):
        before = hash((before, *tokens[end - GRAIN : end]))
        hashes.append(before)
    return hashes


class AttainedService:
    """The service of each program, which is the key of the order `programs`."""

    def __init__(self, output_weight: float, name_of: Callable[[Sequence], str]) -> None:
        self._output_weight = output_weight
        self._name_of = name_of
        self._served: dict[str, float] = {}

    def __getitem__(self, seq: Sequence) -> float:
        return self._served.get(self._name_of(seq), 0.0)

    def served(self, seq: Sequence, n: int, now: float) -> None:
        begin = max(seq.computed, seq.max_computed_tokens)
        end = min(seq.computed + n, len(seq.tokens))
        prompt = max(0, min(end, seq.prompt_len) - begin)
        cost = prompt + self._output_weight * max(0, end - begin - prompt)
        name = self._name_of(seq)
        before = self._served.pop(name, 0.0)
        self._served[name] = before + cost  # at the end of the line
        if len(self._served) > MAX_PROGRAMS:
            del self._served[next(iter(self._served))]
