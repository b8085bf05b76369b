"""Structured output: grammars, compiled in threads, and which tokens they allow next in each
sequence.

Owns the matchers. Which tokens may come next is a function of (grammar, tokens of the answer) and
of nothing else. A matcher only caches that: it is advanced by new tokens, rolled back where tokens
were taken back, and made anew where it was dropped. So nobody has to tell it of preemption,
restarts, forks or rejected drafts. Must not know how a grammar came about
(text/structured_outputs.py), the queue, or logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import refusing
from pageturner.formats.tokenizer import Tokenizer
from pageturner.kernels.edits import Allowed
from pageturner.scheduler.types import Sequence
from pageturner.text.structured_outputs import compiled, message_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILERS = (
    4  # grammars compiled at once; as many slow ones hold up other new grammars, and nothing else
)
MAX_COMPILED = 64

Mask = NDArray[
    np.uint8
]  # a bit for each token of the vocabulary, lowest first; set: it may come next
Masks = Mapping[Sequence, Mask]
NO_MASKS: Masks = {}
LONGEST_TOKEN = (
    1024  # bytes; llguidance takes none that is longer, and its text can be had by shorter ones
)
_NOTHING: Mask = np.zeros(1, np.uint8)


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
    """The place of one sequence in its grammar: `matcher`, a copy of `origin`, has consumed
    `tokens`."""

    grammar: str
    origin: Matcher
    matcher: Matcher
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def behind(cls, tokens: list[int], start: Start) -> _Place:
        """A copy of the matcher that has consumed these tokens."""
        place = cls(start.grammar, start.matcher, start.matcher.deep_copy())
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
        its cache is full."""
        bits = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            return None
        return np.frombuffer(bits, np.uint8) if len(self.tokens) == len(tokens) else _NOTHING


class Grammars:
    """Compiled grammars, and the masks of the sequences that have one.

    compile       makes a matcher of a grammar, in any thread; GrammarError where that cannot be
    least         tokens that every answer has that begins at this place, or more
    most_waiting  requests that may wait for their grammars at once
    most_places   sequences whose places are remembered: more than run at once, so that none is
                  forgotten
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
        # of the masking thread alone
        self._places: OrderedDict[tuple[int, int], _Place] = OrderedDict()
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="mask")

    def compiled(self, grammar: str) -> Future[Start]:
        """The grammar, compiled at some time; known ones are there already."""
        future = self._compiled.pop(grammar, None)
        if future is None or future.cancelled():
            future = self._compilers.submit(self._start, grammar)
        self._compiled[grammar] = future
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def _start(self, grammar: str) -> Start:
        matcher = self._compile(grammar)
        return Start(grammar, matcher, self._least(matcher))

    def begin(self, sequences: list[Sequence]) -> Callable[[], Masks]:
        """Start computing the masks of those sequences that have a grammar, in a thread; call the
        result to wait for them."""
        wanted = [
            (sequence, self.compiled(grammar))
            for sequence in sequences
            if (grammar := sequence.request.params.structured_outputs) is not None
        ]
        return self._masker.submit(self._masks, wanted).result if wanted else _no_masks

    def _masks(self, wanted: list[tuple[Sequence, Future[Start]]]) -> Masks:
        return {sequence: self._mask(sequence, start) for sequence, start in wanted}

    def _mask(self, sequence: Sequence, compiled: Future[Start]) -> Mask:
        start, tokens = compiled.result(), sequence.tokens[sequence.prompt_len :]
        key = (sequence.request.id, sequence.index)
        place = self._places.pop(key, None)
        if place is None or place.grammar != start.grammar or not place.move(tokens):
            place = _Place.behind(tokens, start)
        mask = place.mask(tokens)
        if mask is None:
            if place.origin is start.matcher:
                start.matcher = self._compile(start.grammar)
            place = _Place.behind(tokens, start)
            mask = place.mask(tokens)
        self._places[key] = place
        while len(self._places) > self._most_places:
            self._places.popitem(last=False)
        return _NOTHING if mask is None else mask


def _no_masks() -> Masks:
    return NO_MASKS
