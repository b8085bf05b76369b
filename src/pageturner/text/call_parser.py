"""The calls in an answer, found while it is written: text in pieces in, content and calls out.

Owns what of the text is content, the name of a call and its arguments. What it says depends on the
whole text alone and not on where it was cut into pieces. Text that begins like a call and does not
go on as one is content again; nothing is lost. Must not know tokens, ids of calls or the shape of
an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from pageturner.text.call_arguments import Arguments, arguments_of
from pageturner.text.tool_formats import ToolFormat

# -- syntax ----------------------------------------------------------------------------------------


SPACE, NAME, ARGUMENTS, ID = " ", "$NAME", "$ARGS", "$ID"
NAME_CHARACTERS = r"[A-Za-z0-9_.\-]"
_PARTS = re.compile(r"\$NAME|\$ARGS|\$ID| |[^ $]+")


@lru_cache(maxsize=256)
def parts_of(pattern: str, marks: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The pattern in parts: SPACE, NAME, ARGUMENTS, ID or text. Each mark is a part of its own."""
    split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
    parts: list[str] = []
    for part in _PARTS.findall(pattern):
        texts = split.split(part) if split and part not in (SPACE, NAME, ARGUMENTS, ID) else [part]
        parts += filter(None, texts)
    return tuple(parts)


def heads(format: ToolFormat) -> tuple[tuple[str, ...], ...]:
    """The parts of each pattern of a call that begin an answer's first call, up to its
    arguments."""
    return tuple(_head_of(parts_of(format.opening + call, format.marks)) for call in format.calls)


def trigger(format: ToolFormat) -> str:
    """The text that no answer has but in front of a call. "" where there is none."""
    if format.at_start or not format.calls:
        return ""
    first = parts_of(format.opening + format.calls[0], format.marks)[0]
    return "" if first in (SPACE, NAME, ARGUMENTS) else first


# -- parsers ---------------------------------------------------------------------------------------

LONGEST_NAME = 128
_IS_NAME = re.compile(NAME_CHARACTERS)


class Delta(NamedTuple):
    """A new part of an answer. text: of the content or of the thoughts, the name of the call that
    begins, or more of the arguments of the call that began last."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class Parser(Protocol):
    """Text in, deltas out. `finish` when no more text comes. thoughts_end: how many characters have
    come up to the end of the last thoughts; 0: there were none. held: characters at the end of
    which it is not known yet what they are."""

    @property
    def thoughts_end(self) -> int: ...
    @property
    def held(self) -> int: ...
    def push(self, text: str) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


class PlainText:
    """Everything is content."""

    thoughts_end = held = 0

    def push(self, text: str) -> list[Delta]:
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        return []


def beginning(text: str, marks: tuple[str, ...]) -> int:
    """The place from which the end of the text may be the beginning of one of the marks, or the
    length of the text."""
    longest = max(map(len, marks), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


@dataclass(slots=True)
class _Way:
    """One way to read what comes: the parts of a pattern, and how far it has got in them. call: the
    number of the pattern of the call that begins here."""

    parts: tuple[str, ...]
    call: int = 0
    part: int = 0
    offset: int = 0
    name: str = ""

    def take(self, one: str) -> bool:
        """Return whether this character can come next."""
        while self.part < len(self.parts):
            part = self.parts[self.part]
            if part == SPACE:
                if one.isspace():
                    return True
            elif part in (NAME, ID):
                if _IS_NAME.match(one) and self.offset < LONGEST_NAME:
                    self.offset += 1
                    self.name += one if part == NAME else ""
                    return True
                if not self.offset:
                    return False
                self.offset = 0
            else:
                return self._text(part, one)
            self.part += 1
        return False

    def _text(self, part: str, one: str) -> bool:
        if part[self.offset] != one:
            return False
        self.offset += 1
        if self.offset == len(part):
            self.part, self.offset = self.part + 1, 0
        return True

    @property
    def complete(self) -> bool:
        """Return whether the pattern may end here. White space, a name or an id at its end is not
        waited for."""
        return self.part == len(self.parts)


class CallParser:
    """Content and calls of an answer in one format. names: of the tools that can be called; ():
    any."""

    thoughts_end = 0

    def __init__(self, format: ToolFormat, names: tuple[str, ...] = ()) -> None:
        self._format = format
        self._names = names
        self._trigger = trigger(format)
        self._heads = heads(format)
        self._patterns = [parts_of(call, format.marks) for call in format.calls]
        self._calls = 0
        self._held = ""  # text of which it is not known yet what it is
        self._ways: list[_Way] = []
        self._arguments: Arguments | None = None
        self._tails: list[tuple[str, ...]] = []  # of the patterns that the current call may have
        self._state = self._start if format.at_start else self._content

    @property
    def held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> list[Delta]:
        found: list[Delta] = []
        self._held += text
        while self._held and self._state(found):
            pass
        return found

    def finish(self) -> list[Delta]:
        found: list[Delta] = []
        if self._state == self._head or (
            self._state in (self._content, self._start, self._never)
            and (not self._calls or not self._held.isspace())
        ):  # a call that never came to its arguments is text
            self._give(found, self._held)
        self._held = ""
        return found

    # Each state takes what it can from what is held. False: it needs more text.
    def _content(self, found: list[Delta]) -> bool:
        """Outside of calls. White space in front of a call belongs to the call."""
        text = self._held
        at = text.find(self._trigger)
        if at >= 0:
            self._give(found, text[:at].rstrip())
            self._held = text[at:]
            return self._enter(self._heads)
        certain = len(text[: beginning(text, (self._trigger,))].rstrip())
        self._give(found, text[:certain])
        self._held = text[certain:]
        return False

    def _start(self, found: list[Delta]) -> bool:
        """State: the beginning of an answer in which a call can stand nowhere else."""
        if self._held.isspace():
            return False
        return self._enter(self._heads)

    def _never(self, found: list[Delta]) -> bool:
        """State: no call can come any more."""
        self._give(found, self._held)
        self._held = ""
        return False

    def _enter(self, heads: tuple[tuple[str, ...], ...]) -> bool:
        space = len(self._held) - len(self._held.lstrip()) if self._format.at_start else 0
        self._ways, self._at = [_Way(head, i) for i, head in enumerate(heads)], space
        self._state = self._head
        return True

    def _head(self, found: list[Delta]) -> bool:
        """State: from the first mark of a call to its arguments. Held until these begin."""
        while self._at < len(self._held):
            for index, way in enumerate(self._ways):
                if _at_arguments(way, self._held[self._at]) and self._arguments_begin(found, index):
                    return True
            one = self._held[self._at]
            self._ways = [way for way in self._ways if way.take(one)]
            if not self._ways:
                return self._no_call(found)
            self._at += 1
        return False

    def _arguments_begin(self, found: list[Delta], index: int) -> bool:
        way = self._ways[index]
        arguments = arguments_of(self._format.arguments)
        made, end = arguments.push(self._held, self._at)
        if arguments.dead or (self._names and way.name not in self._names):
            return False
        self._calls += 1
        found += [Delta("call", way.name), Delta("arguments", made)]
        self._arguments, self._held = arguments, self._held[end:]
        self._tails = [
            parts[parts.index(ARGUMENTS) + 1 :]
            for parts in self._patterns
            if _head_of(parts) == _head_of(self._patterns[way.call])
        ]
        self._state = self._in_arguments
        if arguments.done:
            self._behind_arguments()
        return True

    def _no_call(self, found: list[Delta]) -> bool:
        """The held text that looked like a call is content; a call may still begin within it."""
        self._state = self._never if self._format.at_start else self._content
        if not self._format.at_start:
            self._give(found, self._held[:1])
            self._held = self._held[1:]
        return True

    def _in_arguments(self, found: list[Delta]) -> bool:
        assert self._arguments is not None
        made, end = self._arguments.push(self._held, 0)
        if made:
            found.append(Delta("arguments", made))
        self._held = self._held[end:]
        if self._arguments.done:
            self._behind_arguments()
        return True

    def _behind_arguments(self) -> None:
        """The rest of the call, and behind it the end of the list or the next call of it."""
        format = self._format
        ends = [*parts_of(format.closing, format.marks)]
        ways = []
        for tail in self._tails:
            ways.append(_Way((*tail, *ends)))
            if format.in_list:
                for i, call in enumerate(format.calls):
                    parts = parts_of(format.between + call, format.marks)
                    ways.append(_Way((*tail, *_head_of(parts)), i))
        self._ways, self._at, self._state = ways, 0, self._tail

    def _tail(self, found: list[Delta]) -> bool:
        """State: behind the arguments of a call."""
        if any(way.complete and not _waits(way) for way in self._ways):
            return self._call_ends()
        while self._at < len(self._held):
            one = self._held[self._at]
            for index, way in enumerate(self._ways):
                if (
                    NAME in way.parts
                    and _at_arguments(way, one)
                    and self._arguments_begin(found, index)
                ):
                    return True
            self._ways = [way for way in self._ways if way.take(one)]
            if not self._ways:  # not as it should end: what is left is text
                return self._call_ends(taken=0)
            self._at += 1
            if any(way.complete and not _waits(way) for way in self._ways):
                return self._call_ends()
        return False

    def _call_ends(self, taken: int | None = None) -> bool:
        self._held = self._held[self._at if taken is None else taken :]
        self._state = self._never if self._format.at_start else self._content
        return bool(self._held)

    def _give(self, found: list[Delta], text: str) -> None:
        if text:
            found.append(Delta("content", text))


def _waits(way: _Way) -> bool:
    return NAME in way.parts


def _at_arguments(way: _Way, one: str) -> bool:
    """Return whether the arguments begin with this character: all parts of the head are there."""
    left = way.parts[way.part :]
    if left and left[0] in (NAME, ID) and way.offset and not _IS_NAME.match(one):
        left = left[1:]
    if left == (SPACE,):
        return not one.isspace()
    return not left


def _head_of(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a pattern in front of the arguments."""
    return parts[: parts.index(ARGUMENTS)]
