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

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import refusing
from pageturner.formats.tokenizer import Tokenizer
from pageturner.kernels.edits import Allowed
from pageturner.request import Failure
from pageturner.scheduler.types import Output, Sequence
from pageturner.text.grammar_check import TOO_EXPENSIVE, compiled, message_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# grammars compiled at once; as many slow ones hold up other new grammars, and nothing else
COMPILERS = 4
COMPILER_NICENESS = 10  # of their threads: the kernels need the processors more
MASKERS = 2  # sequences whose masks are computed at once
MASK_SECONDS = 0.05  # that a step waits for masks when its layers are computed
MAX_COMPILED_BYTES = 256 << 20  # of the grammars that are kept, as far as that can be told
# A compiled grammar, and what its lexer learns of a vocabulary.
GRAMMAR_BYTES = 1 << 20
BYTES_PER_CHARACTER = 256

Mask = NDArray[
    np.uint8
]  # a bit for each token of the vocabulary, lowest first; set: it may come next
Masks = Mapping[Sequence, Mask]
Instead = Mapping[Sequence, Output]  # what a sequence gives in a step that has no mask for it
NO_MASKS: Masks = {}
LONGEST_TOKEN = (
    1024  # bytes; llguidance takes none that is longer, and its text can be had by shorter ones
)
_NOTHING: Mask = np.zeros(1, np.uint8)
_FULL = "too many states"  # of the lexer that the copies of a matcher share: a new one begins anew
_TOO_MUCH = re.compile("max is|[Tt]oo many")  # else no token goes on


class GrammarError(Exception):
    """A grammar that cannot be compiled for this vocabulary."""


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


class Matcher(Protocol):
    """A place in a grammar: what we use of llguidance's LLMatcher."""

    def deep_copy(self) -> Matcher: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def compute_ff_bytes(self) -> bytes: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class Compiler:
    """Compiles grammars for the vocabulary of one model, which is loaded when the first one comes.
    For any thread. Compiling leaves the interpreter to others; loading the vocabulary, once, does
    not always. It cannot be ended, but is bounded: its time hardly depends on the vocabulary, and a
    server lets no grammar in whose check, which compiles it too, took longer than a limit
    (server/text_workers/text_pool.py)."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._pieces: frozenset[bytes] = frozenset()

    def __call__(self, grammar: str) -> Matcher:
        """The place before the first token. GrammarError where there is none."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._vocabulary is None:
                words = _Words(self._load())
                self._pieces = frozenset(words.tokens)
                with refusing(
                    lambda why: GrammarError(f"the model's vocabulary takes no grammar: {why}")
                ):
                    self._vocabulary = LLTokenizer(
                        TokenizerWrapper(words), eos_token=list(words.eos_ids)
                    )
        matcher = compiled(self._vocabulary, grammar)
        if matcher.is_error():
            raise GrammarError(message_of(matcher.get_error()))
        return matcher

    def least(self, matcher: Matcher) -> int:
        """A number of tokens that no answer has fewer of: those that write what every answer begins
        with."""
        text, longest = matcher.compute_ff_bytes(), max(map(len, self._pieces))
        fewest = [0] + [len(text)] * len(text)  # tokens that write so many bytes
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - longest), end)
            counts = [fewest[start] + 1 for start in starts if text[start:end] in self._pieces]
            fewest[end] = min(counts, default=len(text))
        # the last token may say more than what is certain
        return (
            min(fewest[start] + 1 for start in range(max(0, len(text) - longest), len(text)))
            if text
            else 0
        )


class _Words:
    """A vocabulary as llguidance asks for it. Control tokens are no text: what they are spelled
    like never makes one of them possible; those that end an answer are possible where the grammar
    may end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_ids = tokenizer.eos_ids
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        tokens = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
        self.tokens = [token if len(token) <= LONGEST_TOKEN else b"" for token in tokens]
        self.special_token_ids = sorted({*tokenizer.special_ids, *tokenizer.eos_ids})

    def __call__(self, text: str) -> list[int]:
        """Asked for only where a grammar would have its text tokenised, which ours forbid."""
        raise NotImplementedError


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
class _Found:
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
    future: Future[_Found]
    renewed: bool = False


def _find(place: _Place | None, start: Start, answers: list[list[int]]) -> _Found:
    """The masks behind these answers, from the place that the sequence has had."""
    if place is None or place.start is not start:
        place = _Place.behind(answers[0], start)
    found = _Found(place)
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
    least         tokens that every answer has that begins at this place, or more
    most_waiting  requests that may wait for their grammars at once
    most_places   sequences whose places are remembered: more than run at once, so that none is
                  forgotten

    compiled_bytes  an estimate of what the grammars that are kept hold
    """

    def __init__(
        self,
        compile: Callable[[str], Matcher],
        *,
        least: Callable[[Matcher], int] = lambda _: 0,
        most_waiting: int = 1024,
        most_places: int = 128,
    ) -> None:
        self.most_waiting = most_waiting
        self._compile = compile
        self._least = least
        self._most_places = most_places
        self._compiled: OrderedDict[str, Future[Start]] = OrderedDict()
        self.compiled_bytes = 0
        self._jobs: OrderedDict[tuple[int, int], _Job] = OrderedDict()
        self._compilers = ThreadPoolExecutor(COMPILERS, "grammar", _give_way)
        self._maskers = ThreadPoolExecutor(MASKERS, "mask")

    def compiled(self, grammar: str) -> Future[Start]:
        """The grammar, compiled at some time; known ones are there already."""
        future = self._forget(grammar)
        if future is None or future.cancelled():
            future = self._compilers.submit(self._start, grammar)
        self._compiled[grammar] = future
        self.compiled_bytes += _bytes_of(grammar)
        for known, other in list(self._compiled.items()):
            if self.compiled_bytes > MAX_COMPILED_BYTES and other is not future and other.done():
                self._forget(known)
        return future

    def _forget(self, grammar: str) -> Future[Start] | None:
        future = self._compiled.pop(grammar, None)
        if future is not None:
            self.compiled_bytes -= _bytes_of(grammar)
        return future

    def _start(self, grammar: str) -> Start:
        matcher = self._compile(grammar)
        return Start(grammar, matcher, self._least(matcher))

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
        kept = max(self._most_places, len(rows))
        for key, job in list(self._jobs.items()):
            # the last places of a grammar that is not kept hold it in memory
            gone = key not in rows and job.start.grammar not in self._compiled
            if gone or len(self._jobs) > kept:
                del self._jobs[key]
        return partial(_collect, rows, jobs)

    def _job(self, key: tuple[int, int], rows: list[Sequence]) -> _Job | None:
        """The job of one sequence in this step; None while its grammar is compiled, or while what
        was begun for other answers goes on."""
        grammar = rows[0].request.params.structured_outputs or ""
        answers = [row.tokens[row.prompt_len :] for row in rows]
        last, place, full = self._jobs.get(key), None, False
        if last is not None and last.start.grammar == grammar:
            if not last.future.done():
                return last if last.answers == answers else None
            place = last.future.result().place
            full = _FULL in last.future.result().error
            if last.answers == answers and (last.renewed or not full):
                return last
        start = last.start if last is not None and place and not full else None
        if start is None:
            known = self._compiled.get(grammar)
            if full and last and known and known.done() and known.result() is last.start:
                self._forget(grammar)
            compiled = self.compiled(grammar)
            if not compiled.done():
                return None
            start = compiled.result()
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
        each, output = rows[key], Output(late=True)
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


def _give_way() -> None:
    """Let the threads of the kernels go first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILER_NICENESS)


def no_masks() -> tuple[Masks, Instead]:
    """No sequence of the step has a grammar."""
    return NO_MASKS, {}
