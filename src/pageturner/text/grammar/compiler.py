"""Grammars compiled for the vocabulary of one model.

Owns how llguidance is told of a vocabulary. Must not know sequences, nor when a grammar is
compiled.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pageturner.errors import refusing
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text.grammar.check import STACK_BYTES, compiled, forced, message_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Matcher: TypeAlias = "LLMatcher"  # a place in a grammar; llguidance is imported with the first one
NICENESS = 10  # of threads that compile: the kernels need the processors more
# Bytes of addresses for a stack and a vocabulary, and for a grammar twice
ROOM = STACK_BYTES + (128 << 20)
LONGEST_TOKEN = (
    1024  # bytes; llguidance takes none that is longer, and its text can be had by shorter ones
)
COUNTED = 1024  # bytes of a text whose tokens are counted, which holds the interpreter


class GrammarError(Exception):
    """A grammar that cannot be compiled for this vocabulary."""


class Compiler:
    """Compiles grammars for the vocabulary of one model, which is loaded when the first one comes.
    For any thread. Compiling leaves the interpreter to others; loading the vocabulary, once, does
    not, for 0.2 to 1.3 s. It cannot be ended, but is bounded: its time hardly depends on
    the vocabulary, and a server lets no grammar in whose check, which compiles it too, took longer
    than a limit (server/text_workers/text_pool.py)."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._pieces: frozenset[bytes] = frozenset()
        self._longest = 0  # bytes of a piece

    def __call__(self, grammar: str) -> Matcher:
        """The place before the first token. GrammarError where there is none, MemoryError where
        there is no room: llguidance ends the process when it gets no memory."""
        from llguidance import LLTokenizer, TokenizerWrapper

        try:
            mmap.mmap(-1, ROOM).close()
        except OSError as error:
            raise MemoryError(str(error)) from error
        with self._lock:
            if self._vocabulary is None:
                words = _Words(self._load())
                self._pieces = frozenset(words.tokens)
                self._longest = max(map(len, self._pieces))
                with refusing(
                    lambda why: GrammarError(f"the model's vocabulary takes no grammar: {why}")
                ):
                    self._vocabulary = LLTokenizer(
                        TokenizerWrapper(words), eos_token=list(words.eos_ids)
                    )
        matcher = compiled(self._vocabulary, grammar, NICENESS)
        if matcher.is_error():
            raise GrammarError(message_of(matcher.get_error()))
        return matcher

    def least(self, grammar: str) -> int:
        """A number of tokens that no answer has fewer of: those that write what every answer begins
        with, or the first COUNTED bytes of it. 0 where a grammar counts tokens or names them."""
        if "<[" in grammar or "max_tokens" in grammar:
            return 0
        text, fewest = forced(grammar, COUNTED, NICENESS), [0]  # tokens that write so many bytes
        for end in range(1, len(text) + 1):
            counts = [
                fewest[start] + 1
                for start in range(max(0, end - self._longest), end)
                if text[start:end] in self._pieces
            ]
            fewest.append(min(counts, default=end))
        # the last token may say more than what is certain
        return min(fewest[-1 - self._longest : -1], default=-1) + 1


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
