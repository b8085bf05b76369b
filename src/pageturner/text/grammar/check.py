"""The check of a grammar before anybody compiles it for a vocabulary: whether it is one, whether
something matches it, and whether it stays within what one token may cost.

Owns the bounds of llguidance, its messages and the codes that clients see for them. Must not know
where a grammar comes from. llguidance is imported when the first grammar is checked.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

from pageturner.errors import ClientError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FIELD = "structured_outputs"
MAX_CHARACTERS = 256 * 1024  # of a grammar
# llguidance's compiler calls itself for every rule and schema on its way down a chain of
# references, at up to 5 KiB of stack each, and does not look how much is left: 128 MiB are enough
# for so many.
MAX_NESTED = 8192
MAX_STATES = 50_000  # of a grammar's lexer, at about a kilobyte; copies of a matcher share it
# Ways in which an answer may go on at one place, at some microseconds for each pair of them. A
# property that may be left out is four.
MAX_WAYS = 5000
WALKED = 32  # bytes of an answer that are tried when a grammar is checked
LIKED = b'{["tfn-0123456789:,}]'  # the first of these that is possible is tried, else any
TOO_EXPENSIVE = "what the answer must match takes more work than one token may"
STACK_BYTES = 128 * 1024 * 1024  # of addresses; what is not needed is never touched
# Where only one text can follow, llguidance would name the tokens that its tokenizer makes of that
# text; we want every token that can follow, whatever the tokenizer thinks of a text's beginning.
OPTIONS = '%llguidance {"no_forcing": true}\n'
_ECHO = re.compile(r"^ *\d+ \| ", re.MULTILINE)  # from here on a message shows the grammar
_NOTES = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")
_OVERLAP = (
    "oneOf whose alternatives may both match cannot be held to the letter: use anyOf, or leave"
    " strict out"
)
# what a message about a schema says -> its code
_SCHEMA_CODES = (
    (re.compile("^Unsatisfiable|is unsatisfiable|are unsatisfiable"), "unsatisfiable_schema"),
    (
        re.compile(
            r"^Unimplemented|^Unknown format|^oneOf|not supported|only supported|not disjoint"
            r"|^Failed to generate|too many digits|stack level exceeded|not present in a registry|^Unable to"
        ),
        "unsupported_schema",
    ),
)


def bad(code: str, message: str) -> ClientError:
    """The refusal of what an answer must match."""
    return ClientError(400, code, f"{FIELD}: {message}", FIELD)


def code_of(wrong: str) -> str:
    """The code of this message about a schema."""
    found = (code for said, code in _SCHEMA_CODES if said.search(wrong))
    return next(found, "invalid_schema")


def checked(grammar: str, code: str) -> str:
    """The grammar, if it can be compiled and something matches it."""
    check_size(grammar, code)
    wrong = wrong_with(grammar)
    if wrong is None:
        return grammar
    if wrong == _MATCHES_NOTHING:
        code = "unsatisfiable_grammar"
    elif wrong.startswith(TOO_EXPENSIVE):
        code = "grammar_too_expensive"
    elif code == "invalid_schema":
        code = code_of(wrong)
    if wrong.startswith("oneOf"):
        wrong = _OVERLAP
    raise bad(code, wrong)


def check_size(text: str, code: str) -> None:
    """ClientError where it is longer than MAX_CHARACTERS."""
    if len(text) > MAX_CHARACTERS:
        raise bad(code, f"{len(text)} characters, at most {MAX_CHARACTERS} are taken")


def check_nesting(text: str, marks: str, code: str) -> None:
    """Nothing can be nested deeper than the number of marks that open a level."""
    levels = sum(map(text.count, marks))
    if levels > MAX_NESTED:
        raise bad(code, f"{levels} rules or schemas within it, at most {MAX_NESTED} are taken")


_MATCHES_NOTHING = "nothing matches it"


@lru_cache(maxsize=64)
def wrong_with(grammar: str) -> str | None:
    """None, or why it is no grammar. Compiles it for bytes as tokens, which takes a millisecond or
    a few, and leaves the interpreter to other threads meanwhile."""
    try:
        matcher = compiled(byte_tokens(), grammar)
    except ValueError as error:  # such as lone surrogates, which no UTF-8 can hold
        return str(error)
    if matcher.is_error():
        return message_of(matcher.get_error())
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        return _MATCHES_NOTHING
    return _walked(matcher)


def _walked(matcher: LLMatcher) -> str | None:
    """None, or that one of the first bytes of an answer takes more work than a byte may."""
    for _ in range(WALKED):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        possible = [byte for byte in (*LIKED, *range(33, 256)) if bits >> byte & 1]
        if not possible:
            break
        matcher.consume_token(possible[0])
    if not matcher.is_error():
        return None
    return f"{TOO_EXPENSIVE}: {message_of(matcher.get_error())}"


def forced(grammar: str, most: int, niceness: int) -> bytes:
    """Return what every answer begins with, at most so many bytes. llguidance alone would hold the
    interpreter for a microsecond for each of all."""
    text = b""
    matcher = compiled(byte_tokens(), grammar, niceness)
    while len(text) < most:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if bits.bit_count() != 1 or bits >> 256:
            break
        text += bytes([bits.bit_length() - 1])
        matcher.consume_token(text[-1])
    return text


@lru_cache(maxsize=1)
def byte_tokens() -> LLTokenizer:
    """A vocabulary of bytes, to look at grammars without a model."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def compiled(vocabulary: LLTokenizer, grammar: str, niceness: int = 0) -> LLMatcher:
    """The grammar for a vocabulary; it may be in error. Other threads go on meanwhile, and first
    where this one is nice. A thread that holds the interpreter must not be: all wait for it."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_STATES, max_items_in_row=MAX_WAYS)

    def work() -> LLMatcher:
        if niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)

    return _with_stack(work)


_starting = threading.Lock()  # the size of a stack is a setting of the whole process


def _with_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """Run it in a thread whose stack has room for MAX_NESTED levels."""
    pool = ThreadPoolExecutor(1, "compile")
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            made = pool.submit(work)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        finally:
            threading.stack_size(usual)
    with pool:
        return made.result()


def message_of(error: str) -> str:
    """The message of llguidance in one line, without the grammar and its place in it."""
    said = " ".join(_ECHO.split(error, maxsplit=1)[0].split())
    return _NOTES.sub("", _NOTES.sub("", said))[:400] or "it cannot be compiled"
