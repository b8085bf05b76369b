"""The calls in an answer, found while it is written: text in pieces in, content and calls out.

Owns what of the text is content, the name of a call and its arguments. What it says depends on the
whole text alone and not on where it was cut into pieces. Text that begins like a call and does not
go on as one is content again; nothing is lost. Must not know tokens, ids of calls or the shape of
an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from pageturner.text.call_arguments import Arguments, JSONArguments, arguments_of, beginning
from pageturner.text.tool_formats import GEMMA, JSON, PYTHON, ToolFormat

# -- syntax ----------------------------------------------------------------------------------------


_PLACES = (" ", "$NAME", "$ARGS", "$ID", "$INDEX", "$PYTHON", "$OBJECT")
SPACE, NAME, ARGUMENTS, ID, INDEX, PYTHON_ARGUMENTS, OBJECT = _PLACES
NAME_CHARACTERS = r"[A-Za-z0-9_.\-]"
_BODIES = (ARGUMENTS, PYTHON_ARGUMENTS, OBJECT)
_PARTS = re.compile(r"\$[A-Z]+| |[^ $]+")
_AS_OBJECT = re.compile(r'\{ "\w+" : .*\$ARGS[^}]*\}')


@lru_cache(maxsize=1024)
def parts_of(pattern: str, marks: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The pattern in parts: SPACE, NAME and the like, or text. Each mark is a part of its own."""
    split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
    parts: list[str] = []
    for part in _PARTS.findall(pattern):
        texts = [part]
        if split and part not in _PLACES:
            texts = split.split(part)
        parts += (text.replace("␣", " ") for text in texts if text)
    return tuple(parts)


def _ways(format: ToolFormat) -> list[_Way]:
    """The ways to read an answer's first call. A call that has a mark of its own may stand without
    the mark in front of all calls."""
    calls = _read_as(format)
    opens = [head + format.opening for head in ("", *format.heads)]
    made = [_Way(parts_of(open + call, format.marks)) for open in opens for call in calls]
    if format.opening:
        bare = (parts_of(call, format.marks) for call in calls)
        made += [_Way(parts, bare=True) for parts in bare if parts[0] in format.marks]
    return made


def _read_as(format: ToolFormat) -> tuple[str, ...]:
    """The patterns of calls as they are read: an object of JSON has its keys in any order."""
    return tuple(dict.fromkeys(_AS_OBJECT.sub(OBJECT, call) for call in format.calls))


def triggers(format: ToolFormat) -> tuple[str, ...]:
    """The texts that an answer has in front of a call alone, that of the first pattern first. ():
    there are none."""
    if format.at_start and not format.anywhere:
        return ()
    firsts = (first_text(way.parts) or way.parts[0].replace(OBJECT, "{") for way in _ways(format))
    return tuple(dict.fromkeys(first for first in firsts if first not in _PLACES))


def first_text(parts: tuple[str, ...]) -> str:
    """The text with which a pattern begins."""
    return "".join(itertools.takewhile(lambda part: part not in _PLACES, parts))


# -- parsers ---------------------------------------------------------------------------------------

LONGEST_NAME = 128
_WORDS = {
    NAME: re.compile(NAME_CHARACTERS),
    ID: re.compile(NAME_CHARACTERS),
    INDEX: re.compile("[0-9]"),
}


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


@dataclass(slots=True)
class _Way:
    """One way to read what comes: the parts of a pattern, and how far it has got in them. bare: the
    mark in front of all calls is not there, nor that behind them."""

    parts: tuple[str, ...]
    bare: bool = False
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
            elif part in _WORDS:
                if _WORDS[part].match(one) and self.offset < LONGEST_NAME:
                    self.offset += 1
                    self.name += one if part == NAME else ""
                    return True
                if not self.offset:
                    return False
                self.offset = 0
            else:
                return part not in _BODIES and self._text(part, one)
            self.part += 1
        return False

    def _text(self, part: str, one: str) -> bool:
        if part[self.offset] != one:
            return False
        self.offset += 1
        if self.offset == len(part):
            self.part, self.offset = self.part + 1, 0
        return True

    def body(self, one: str) -> str:
        """The body of the call, if it begins with this character behind all that stands in front of
        it; else ""."""
        left = self.parts[self.part :]
        if left and left[0] in _WORDS and self.offset and not _WORDS[left[0]].match(one):
            left = left[1:]
        if left[:1] == (SPACE,) and not one.isspace():
            left = left[1:]
        return next((part for part in left[:1] if part in _BODIES), "")

    @property
    def tail(self) -> tuple[str, ...]:
        """The parts behind the body."""
        return self.parts[next(i for i, part in enumerate(self.parts) if part in _BODIES) + 1 :]

    @property
    def complete(self) -> bool:
        """Return whether the pattern may end here. White space at its end is not waited for."""
        return self.part == len(self.parts)


_NAMED = ("name", "tool_name", "function", "function_name", "tool")
_GIVEN = ("arguments", "parameters", "args", "params", "input")
_KEYS = (*_NAMED, *_GIVEN, "id", "type", "tool_call_id", "call_id", "index", "strict")
_KEY = re.compile(r'[\s,]{0,64}"([A-Za-z_]{1,32})"\s{0,16}:\s{0,64}(?=\S)')
_LONGEST_KEY = 192  # characters that _KEY may take
_ENDS = re.compile(r"[\s,]*\}")


class _Object:
    """A call that is one object of JSON, its keys in any order; `{"type": "function", "function":
    {...}}` too, and arguments that are a text or not there. bare: nothing but its keys tells it
    from other objects, so it must have arguments. As `Arguments` it gives those of the call, and
    none before it is sure that this is one, of the tool `name`."""

    def __init__(self, names: tuple[str, ...], bare: bool) -> None:
        self._names = names
        self._bare = bare
        self.name = ""
        self.done = self.dead = False
        self._called = False
        self._depth = 0
        self._waiting = ""  # arguments that came in front of the name
        self._value: JSONArguments | None = None
        self._key = self._read = self._made = ""
        self._streams = False

    def push(self, text: str, start: int) -> tuple[str, int]:
        at = start
        if not self._depth:
            self._depth = 1
            at += 1
        before = -1
        while before != at and not self.done and not self.dead:
            before = at
            if self._value is not None:
                at = self._in(text, at)
            if self._value is None and not self.dead:
                at = self._between(text, at)
        made = self._made
        self._made = ""
        return made, at

    def _between(self, text: str, at: int) -> int:
        if end := _ENDS.match(text, at):
            self._depth -= 1
            self.done = not self._depth
            if self.done and not self._called:
                self.dead = self._bare and not self._waiting
                self._call(self._waiting or "{}")
            return end.end()
        key = _KEY.match(text, at)
        if key is None:
            may_come = len(text) - at < _LONGEST_KEY and _KEY_BEGUN.fullmatch(text, at) is not None
            self.dead = not may_come and not self._called
            self.done = not may_come and self._called
            return at
        self._key = key[1]
        opens = text[key.end()] == "{"
        if self._key == "function" and opens and self._depth == 1:
            self._depth = 2
            return key.end() + 1
        self.dead = self._bare and not self._called and self._key not in _KEYS
        self._streams = self._key in _GIVEN and opens and bool(self.name) and not self._called
        if self._streams:
            self._call("")
        self._value = JSONArguments(anything=True)
        self._read = ""
        return key.end()

    def _in(self, text: str, at: int) -> int:
        assert self._value is not None
        made, end = self._value.push(text, at)
        self._made += made * self._streams
        self._read += made * (not self._called)
        if self._value.done:
            self._value = None
            if not self._called:
                self._take()
        return end

    def _take(self) -> None:
        """Take a whole value that was not passed on."""
        try:
            read = json.loads(self._read)
            if self._key in _GIVEN:
                self._waiting = self._read
                if isinstance(read, str):
                    self._waiting = read.strip() or "{}"
                    read = json.loads(self._waiting)
                if read is None:
                    self._waiting = "{}"
                self.dead = not isinstance(read, dict | None)
        except (ValueError, RecursionError):
            self.dead = True
            return
        if self._key in _NAMED:
            self.name = str(read)
            named = _IS_NAMED.fullmatch(self.name) is not None
            self.dead = not named or (bool(self._names) and self.name not in self._names)

    def _call(self, arguments: str) -> None:
        self.dead |= not self.name
        self._called = not self.dead
        self._made += arguments * self._called


_KEY_BEGUN = re.compile(r'[\s,]*("[A-Za-z_]{0,32}("\s*(:\s*)?)?)?')
_IS_NAMED = re.compile(NAME_CHARACTERS + "{1,128}")


class CallParser:
    """Content and calls of an answer in one format. names: of the tools that can be called; ():
    any. types: of the properties of each tool, where nothing else says what a text is. direct:
    names of calls that are content: the first text among their arguments, if there is one."""

    thoughts_end = 0

    def __init__(
        self,
        format: ToolFormat,
        names: tuple[str, ...] = (),
        types: Mapping[str, Mapping[str, str]] | None = None,
        direct: Collection[str] = (),
    ) -> None:
        self._format = format
        self._names = names
        self._types = types or {}
        self._direct = direct
        self._answer = ""  # arguments of a call that is content
        self._triggers = triggers(format)
        # bodies that begin with a brace
        self._braced = (ARGUMENTS, OBJECT) if format.arguments in (JSON, GEMMA) else (OBJECT,)
        self._calls = 0
        self._held = ""  # text of which it is not known yet what it is
        self._at = 0  # how much of it was read
        self._ways: list[_Way] = []
        self._tails: dict[tuple[str, ...], bool] = {}  # of the ways that the call may take
        self._ended = 0  # how much is certainly read of them
        self._follows = False  # a call in the same list
        self._body: Arguments | None = None
        self._name = ""  # of the call, where it stands in front of the body
        self._called = False  # it is a call for sure
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
        if self._state == self._in_body and self._follows:
            self._held = ""
        while self._held and self._undecided:  # a call that never came to its arguments is text
            self._no_call(found)
            while self._held and self._state(found):
                pass
        if self._state == self._tail and self._ended:
            self._call_ends()
        outside = self._state in (self._content, self._start, self._never)
        if outside and (not self._calls or not self._held.isspace()):
            self._give(found, self._held)
        self._held = ""
        self._give_answer(found)
        return found

    @property
    def _undecided(self) -> bool:
        if self._state == self._in_body:
            return not self._called
        return self._state == self._head

    # Each state takes what it can from what is held. False: it needs more text.
    def _content(self, found: list[Delta]) -> bool:
        """Outside of calls. White space in front of a call belongs to the call."""
        text = self._held
        places = [at for mark in self._triggers if (at := text.find(mark)) >= 0]
        if places:
            before = text[: min(places)].rstrip()
            self._give(found, before)
            self._held = text[len(before) :]
            return self._enter()
        certain = len(text[: beginning(text, self._triggers)].rstrip())
        self._give(found, text[:certain])
        self._held = text[certain:]
        return False

    def _start(self, found: list[Delta]) -> bool:
        """State: the beginning of an answer in which a call can stand nowhere else."""
        text = self._held.lstrip()
        before = self._format.before
        if not text or (before and before.startswith(text)):
            return False
        if before and text.startswith(before):
            self._held = text[len(before) :]
            self._state = self._content
            return True
        return self._enter()

    def _never(self, found: list[Delta]) -> bool:
        """State: no call can come any more."""
        self._give(found, self._held)
        self._held = ""
        return False

    def _enter(self) -> bool:
        self._at = len(self._held) - len(self._held.lstrip())
        self._ways = _ways(self._format)
        self._state = self._head
        return True

    def _head(self, found: list[Delta]) -> bool:
        """State: from the first mark of a call to its body. Held until this begins."""
        while self._at < len(self._held):
            if self._body_begins():
                return True
            one = self._held[self._at]
            self._ways = [way for way in self._ways if way.take(one)]
            if not self._ways:
                return self._no_call(found)
            self._at += 1
        return False

    def _body_begins(self) -> bool:
        one = self._held[self._at]
        ways = [(place, way) for way in self._ways if (place := way.body(one))]
        if one != "{":
            ways = [(place, way) for place, way in ways if place not in self._braced]
        for place, way in ways:
            self._name = way.name
            if place == PYTHON_ARGUMENTS:  # Llama's built-in tools are called as `search.call(...)`
                self._name = way.name.removesuffix(".call")
            if place == OBJECT:
                self._body = _Object(self._names, self._format.at_start)
            elif not self._names or self._name in self._names:
                self._body = self._arguments(place, way.tail)
            else:
                continue
            self._called = False
            self._tails = {way.tail: way.bare for _, way in ways}
            self._follows = self._state == self._tail
            self._state = self._in_body
            return True
        return False

    def _arguments(self, place: str, tail: tuple[str, ...]) -> Arguments:
        kind = self._format.arguments
        if place == PYTHON_ARGUMENTS:
            kind = PYTHON
        end = "".join(tail).strip().partition(SPACE)[0]
        return arguments_of(kind, self._format, self._types.get(self._name, {}), end)

    def _no_call(self, found: list[Delta]) -> bool:
        """The held text that looked like a call is content; a call may still begin within it."""
        self._leave()
        if self._triggers:
            self._give(found, self._held[:1])
            self._held = self._held[1:]
        return True

    def _leave(self) -> None:
        self._state = self._never
        if self._triggers:
            self._state = self._content

    def _in_body(self, found: list[Delta]) -> bool:
        body = self._body
        assert body is not None
        made, self._at = body.push(self._held, self._at)
        if body.dead:
            return self._no_call(found)
        if made and not self._called:
            if isinstance(body, _Object):
                self._name = body.name
            self._called = True
            if self._name not in self._direct:
                found.append(Delta("call", self._name))
        if made and self._name in self._direct:
            self._answer += made
        elif made:
            found.append(Delta("arguments", made))
        if self._called:
            self._held = self._held[self._at :]
            self._at = 0
        if body.done:
            self._calls += 1
            self._give_answer(found)
            self._behind_body()
        return body.done

    def _behind_body(self) -> None:
        """The rest of the call, and behind it the end of the list or the next call of it."""
        format = self._format
        self._ways = []
        for tail, bare in self._tails.items():
            ends = parts_of(format.closing * (not bare), format.marks)
            if bare or tail or ends or not format.between:
                self._ways.append(_Way((*tail, *ends)))
            if format.in_list:
                for call in _read_as(format):
                    parts = parts_of(format.between + call, format.marks)
                    self._ways.append(_Way((*tail, *parts), bare))
            for pattern in format.more:
                self._ways.append(_Way((*parts_of(pattern), OBJECT, *tail), bare))
        self._at = self._ended = 0
        self._state = self._tail

    def _tail(self, found: list[Delta]) -> bool:
        """State: behind the body of a call."""
        while True:
            if any(way.complete for way in self._ways):
                self._ended = self._at
                self._ways = [way for way in self._ways if not way.complete]
            if not self._ways:
                return self._call_ends()
            if self._at == len(self._held):
                return False
            if self._body_begins():
                return True
            one = self._held[self._at]
            self._ways = [way for way in self._ways if way.take(one)]
            self._at += 1

    def _call_ends(self) -> bool:
        """Return whether text is left: all of it, where the call does not end as it should."""
        self._held = self._held[self._ended :]
        self._leave()
        return bool(self._held)

    def _give_answer(self, found: list[Delta]) -> None:
        with contextlib.suppress(ValueError):  # it was cut
            values = json.loads(self._answer or "{}").values()
            texts = (text for text in values if isinstance(text, str))
            found += [Delta("content", text) for text in itertools.islice(texts, 1)]
        self._answer = ""

    def _give(self, found: list[Delta], text: str) -> None:
        if text:
            found.append(Delta("content", text))
