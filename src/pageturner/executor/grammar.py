"""Structured output: grammars, compiled in threads, and which tokens they allow next in each
sequence.

Owns the matchers. Which tokens may come next is a function of (grammar, tokens of the answer) and
of nothing else. A matcher only caches that: it is advanced by new tokens, rolled back where tokens
were taken back, and made anew where it was dropped. So nobody has to tell it of preemption,
restarts, forks or rejected drafts. A step waits MASK_SECONDS for masks and for nothing else of a
grammar: a sequence whose mask is late gains no token in that step, and the others do. Must not know
how a grammar came about (text/structured_outputs.py), the queue, or logits.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.edits import Allowed
from pageturner.request import Failure
from pageturner.scheduler.types import Output, Sequence
from pageturner.text.grammar.check import TOO_EXPENSIVE, message_of
from pageturner.text.grammar.compiler import Matcher

# grammars compiled at once; as many slow ones hold up other new grammars, and nothing else
COMPILERS = 4
MASKERS = 2  # sequences whose masks are computed at once
MASK_SECONDS = 0.05  # that a step waits for masks when its layers are computed
MAX_COMPILED_BYTES = 64 << 20  # of the grammars that are kept, as far as that can be told
# A compiled grammar, and what its lexer learns of a vocabulary.
GRAMMAR_BYTES = 1 << 20
BYTES_PER_CHARACTER = 512

Mask = NDArray[
    np.uint8
]  # a bit for each token of the vocabulary, lowest first; set: it may come next
Masks = Mapping[Sequence, Mask]
Instead = Mapping[Sequence, Output]  # what a sequence gives in a step that has no mask for it
NO_MASKS: Masks = {}
_NOTHING: Mask = np.zeros(1, np.uint8)
_FULL = "too many states"  # of the lexer that the copies of a matcher share: a new one begins anew
_TOO_MUCH = re.compile("max is|[Tt]oo many")  # else no token goes on


def allowed(masks: Masks, sequences: list[Sequence], vocabulary: int) -> Allowed | None:
    """The masks of these sequences, one row each, of a model of so many tokens. A mask that is
    shorter allows nothing behind its end; a sequence without a grammar may have any token. None if
    none has a grammar."""
    held = [
        r
        for r, sequence in enumerate(sequences)
        if sequence.request.params.structured_outputs is not None
    ]
    if not held:
        return None
    words = np.full((len(sequences), -(-vocabulary // 64)), -1, np.int64).view(np.uint64)
    rows = words.view(np.uint8)
    for r in held:
        mask = masks[sequences[r]][: rows.shape[1]]
        rows[r, : len(mask)] = mask
        rows[r, len(mask) :] = 0
    return words


@dataclass(slots=True)
class Start:
    """`matcher` stands before the first token; every sequence gets a copy. Copies share a cache of
    bounded size: when it is full, all of them report an error, and the grammar is compiled anew.
    least: no answer has fewer tokens."""

    grammar: str
    matcher: Matcher
    least: int = 0


@dataclass(slots=True)
class _Place:
    """The place of one sequence in its grammar: `matcher`, a copy of that of `start`, has consumed
    `tokens`."""

    start: Start
    matcher: Matcher
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def behind(cls, tokens: list[int], start: Start) -> _Place:
        """A copy of the matcher that has consumed these tokens."""
        place = cls(start, start.matcher.deep_copy())
        place.move(tokens)
        return place

    def move(self, tokens: list[int]) -> bool:
        """Make `tokens` what was consumed, by rolling back what differs and consuming the rest.
        False where the matcher cannot be rolled back so far."""
        known = len(self.tokens)
        if tokens[:known] != self.tokens:
            pairs = zip(tokens, self.tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if not self.matcher.rollback(known - same):
                return False
            known = same
        done = known + self.matcher.try_consume_tokens(tokens[known:])
        self.tokens = tokens[:done]
        return True

    def mask(self, tokens: list[int]) -> Mask | None:
        """Return what may come behind the rows; nothing if the grammar does not allow these tokens
        themselves. None if the matcher reports an error: no token of this vocabulary goes on, or
        a bound is reached."""
        bits = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            return None
        return np.frombuffer(bits, np.uint8) if len(self.tokens) == len(tokens) else _NOTHING


@dataclass(slots=True)
class _Masked:
    """The masks behind the answers of a job, and the place of the last one. error: what the matcher
    reports where it cannot say the first mask; a later one is left to the next step."""

    place: _Place
    masks: list[Mask] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class _Job:
    """The masks of one sequence in one step: of the sequence, and behind each of its draft tokens.

    renewed  whether the grammar was compiled anew for these answers
    """

    start: Start
    answers: list[list[int]]
    future: Future[_Masked]
    renewed: bool = False


def _find(place: _Place | None, start: Start, answers: list[list[int]]) -> _Masked:
    """The masks behind these answers, from the place that the sequence has had."""
    if place is None or place.start is not start:
        place = _Place.behind(answers[0], start)
    found = _Masked(place)
    for tokens in answers:
        mask = found.place.mask(tokens) if found.place.move(tokens) else None
        if mask is None:
            found.place = _Place.behind(tokens, start)
            mask = found.place.mask(tokens)
        if mask is None and not found.masks:
            found.error = found.place.matcher.get_error()
        found.masks.append(_NOTHING if mask is None else mask)
    return found


class Grammars:
    """Compiled grammars, and the masks of the sequences that have one.

    compile       makes a matcher of a grammar, in any thread; GrammarError where that cannot be
    least         tokens that every answer to a grammar has, or more
    most_waiting  requests that may wait for their grammars at once
    most_places   sequences whose places are remembered: more than run at once, so that none is
                  forgotten
    """

    def __init__(
        self,
        compile: Callable[[str], Matcher],
        *,
        least: Callable[[str], int] = lambda _: 0,
        most_waiting: int = 1024,
        most_places: int = 128,
    ) -> None:
        self.most_waiting = most_waiting
        self._compile = compile
        self._least = least
        self._most_places = most_places
        self._compiled: OrderedDict[str, Future[Start]] = OrderedDict()
        self._jobs: OrderedDict[tuple[int, int], _Job] = OrderedDict()
        self._compilers = ThreadPoolExecutor(COMPILERS, "grammar")
        self._maskers = ThreadPoolExecutor(MASKERS, "mask")

    def compiled(self, grammar: str) -> Future[Start]:
        """The grammar, compiled at some time; known ones are there already."""
        future = self._compiled.pop(grammar, None)
        if future is not None and future.done():
            lost = future.cancelled() or isinstance(future.exception(), MemoryError)
            future = None if lost else future
        if future is None:
            future = self._compilers.submit(self._start, grammar)
        self._compiled[grammar] = future
        size = sum(map(_bytes_of, self._compiled))
        for known, other in list(self._compiled.items()):
            if size > MAX_COMPILED_BYTES and other is not future and other.done():
                del self._compiled[known]
                size -= _bytes_of(known)
        return future

    def _start(self, grammar: str) -> Start:
        return Start(grammar, self._compile(grammar), self._least(grammar))

    def begin(self, sequences: list[Sequence]) -> Callable[[], tuple[Masks, Instead]]:
        """Start computing the masks of those sequences that have a grammar, in threads; call the
        result to wait for them, MASK_SECONDS at most. A sequence whose mask is late gives an output
        that says so."""
        rows: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in sequences:
            if sequence.request.params.structured_outputs is not None:
                rows.setdefault((sequence.request.id, sequence.index), []).append(sequence)
        if not rows:
            return no_masks
        jobs = {key: self._job(key, each) for key, each in rows.items()}
        for key, job in list(self._jobs.items()):
            # a place holds its grammar in memory, also one that is kept no longer
            gone = job.start.grammar not in self._compiled
            if key not in rows and (gone or len(self._jobs) > self._most_places):
                del self._jobs[key]
        return partial(_collect, rows, jobs)

    def _job(self, key: tuple[int, int], rows: list[Sequence]) -> _Job | None:
        """The job of one sequence in this step; None while its grammar is compiled, or while what
        was begun for other answers goes on."""
        grammar = rows[0].request.params.structured_outputs or ""
        answers = [row.tokens[row.prompt_len :] for row in rows]
        last = self._jobs.get(key)
        place: _Place | None = None
        full = False
        compiled = self._compiled.get(grammar)
        if last is not None and last.start.grammar == grammar:
            if not last.future.done():
                return last if last.answers == answers else None
            found = last.future.result()
            full = _FULL in found.error
            if last.answers == answers and (last.renewed or not full):
                return last
            place = found.place
            if full and compiled and compiled.done() and compiled.result() is place.start:
                del self._compiled[grammar]
        if place is None or full:
            compiled = self.compiled(grammar)
            if not compiled.done():
                return None
            start = compiled.result()
        else:
            start = place.start
        job = _Job(start, answers, self._maskers.submit(_find, place, start, answers), full)
        self._jobs[key] = job
        self._jobs.move_to_end(key)
        return job


def _collect(
    rows: dict[tuple[int, int], list[Sequence]], jobs: dict[tuple[int, int], _Job | None]
) -> tuple[Masks, Instead]:
    wait([job.future for job in jobs.values() if job is not None], MASK_SECONDS)
    masks: dict[Sequence, Mask] = {}
    instead: dict[Sequence, Output] = {}
    for key, job in jobs.items():
        each = rows[key]
        output = Output(late=True)
        masks |= dict.fromkeys(each, _NOTHING)
        if job is not None and job.future.done():
            found = job.future.result()
            masks |= zip(each, found.masks, strict=True)
            if not _TOO_MUCH.search(found.error):
                continue
            if job.renewed or _FULL not in found.error:
                message = f"{TOO_EXPENSIVE}: {message_of(found.error)}"
                output = Output(failure=Failure("grammar_too_expensive", message))
        instead[each[0]] = output
    return masks, instead


def _bytes_of(grammar: str) -> int:
    return GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(grammar)


def no_masks() -> tuple[Masks, Instead]:
    """No sequence of the step has a grammar."""
    return NO_MASKS, {}
