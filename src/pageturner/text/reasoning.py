"""Thoughts of a model apart from its answer, where both are one text with marks between them.

Owns the formats as data, how a chat template tells one, and where thoughts begin and end in a text.
Must not know calls of tools (call_parser.py), tokens or requests.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import lru_cache

from pageturner.text.call_arguments import beginning
from pageturner.text.call_parser import Delta, Parser, PlainText
from pageturner.text.tool_formats import aliases, has_signs, rows


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One row of markup/thoughts.json.

    begin, end  what stands before and behind thoughts
    signs       a chat template with all words of one of these texts has this format, if it has
                nothing of `without`
    marks       parts of both that may be one control token each in a vocabulary
    aliases     what other servers call the format
    answer      pairs of marks that may stand around what follows the thoughts
    always      an answer begins within thoughts, whether their mark is written or not
    """

    name: str
    begin: str
    end: str
    signs: tuple[str, ...]
    marks: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    answer: tuple[tuple[str, str], ...] = ()
    always: bool = False
    without: tuple[str, ...] = ()


FORMATS = tuple(ReasoningFormat(**row) for row in rows("thoughts"))
BY_NAME = {format.name: format for format in FORMATS}
NAMES = tuple(BY_NAME)
_ALIASES = aliases("thoughts")


@lru_cache(maxsize=8)
def recognised(template: str | None) -> ReasoningFormat | None:
    """The format that this chat template speaks of, or None."""
    if template is None:
        return None
    return next((one for one in FORMATS if has_signs(one.signs, one.without, template)), None)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name, which is one of NAMES or of another server's."""
    return BY_NAME[_ALIASES.get(name, name)]


def opened(format: ReasoningFormat, prompt: str) -> bool:
    """Return whether the answer begins within thoughts: the template has begun them for the model,
    or the model does not write their first mark."""
    text = prompt.rstrip()
    if format.always and not text.endswith(format.end):
        return True
    return bool(format.begin) and text.endswith(format.begin)


class ThoughtsParser:
    """The thoughts at the beginning of an answer, and the rest of it, which another parser reads.
    White space around the marks belongs to them. A call within thoughts that never end is a call.

    thinking  the prompt has begun the thoughts
    calls     the marks with which a call begins
    """

    def __init__(
        self, format: ReasoningFormat, rest: Parser, thinking: bool, calls: tuple[str, ...] = ()
    ) -> None:
        self._format = format
        self._rest = rest
        self._calls = calls
        self._held = ""
        self._state = self._beginning
        self._thinking = thinking
        self._pushed = self._ended = 0  # characters; those up to the end of the thoughts
        self._called = False  # a call has begun within thoughts
        self._answers = format.answer
        self._closes: tuple[str, ...] = ()  # what may stand behind content that has begun

    @property
    def thoughts_end(self) -> int:
        return self._pushed if self._state in (self._space, self._thoughts) else self._ended

    @property
    def held(self) -> int:
        return len(self._held) + self._rest.held

    def push(self, text: str) -> list[Delta]:
        if self._state == self._behind and not self._closes:
            return self._rest.push(text)
        found: list[Delta] = []
        self._held += text
        self._pushed += len(text)
        while self._held and self._state(found):
            pass
        return found

    def finish(self) -> list[Delta]:
        found: list[Delta] = []
        if self._state == self._thoughts and self._held.strip():
            found += self._unended()
        elif self._state == self._gap and self._thinking:
            found += self._rest.push(self._held.lstrip())
        elif self._state == self._behind or (self._outside and not self._thinking):
            found += self._rest.push(self._held)
        self._held = ""
        return found + self._rest.finish()

    @property
    def _outside(self) -> bool:
        return self._state in (self._beginning, self._gap)

    def _unended(self) -> list[Delta]:
        """Return what is held at the end of an answer that has not left its thoughts."""
        at = self._call_in(self._held)
        called = self._rest.push(self._held[at:])
        if not any(delta.kind == "call" for delta in called):
            self._rest = PlainText()
            return [Delta("reasoning", self._held)]
        self._ended, self._state = self._pushed - len(self._held) + at, self._behind
        said = self._held[:at].rstrip()
        if said:
            called.insert(0, Delta("reasoning", said))
        return called

    def _call_in(self, text: str) -> int:
        """The first place from which on the text may be a call."""
        places = sorted(
            found.start() for mark in self._calls for found in re.finditer(re.escape(mark), text)
        )
        return next((at for at in places if self._may_be_call(text[at:])), len(text))

    def _may_be_call(self, text: str) -> bool:
        if not self._called:
            first = copy.deepcopy(self._rest).push(text)[:1]
            self._called = bool(first) and first[0].kind == "call"
            return self._called or not first
        return True

    # Each state takes what it can from what is held. False: it needs more text.
    def _beginning(self, found: list[Delta]) -> bool:
        """Thoughts begin here or nowhere. A model that has none may write their end alone."""
        text, begin, end = self._held.lstrip(), self._format.begin.lstrip(), self._format.end
        if text.startswith(begin):
            self._held, self._state = text[len(begin) :], self._space
        elif begin.startswith(text) or (end.startswith(text) and text != end):
            return False
        elif self._thinking or text.startswith(end):
            self._held, self._state = text, self._thoughts
        else:
            self._state = self._gap
        return True

    def _space(self, found: list[Delta]) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._thoughts
        return bool(self._held)

    def _thoughts(self, found: list[Delta]) -> bool:
        text, end = self._held, self._format.end
        at = text.find(end)
        sure = at if at >= 0 else min(beginning(text, (end, *self._calls)), self._call_in(text))
        shown = text[:sure].rstrip()
        if shown:
            found.append(Delta("reasoning", shown))
        self._held = text[len(shown) :]
        if at < 0:
            return False
        self._held = self._held.partition(end)[2]
        self._state, self._ended = self._gap, self._pushed - len(self._held)
        self._thinking = True
        return True

    def _gap(self, found: list[Delta]) -> bool:
        """White space behind the thoughts, and the mark in front of what follows them."""
        text = self._held.lstrip()
        marks = [begin for begin, _ in self._answers]
        if not text and (self._thinking or marks):
            return False
        if any(mark.startswith(text) and mark != text for mark in marks):
            return False
        begin = next((mark for mark in marks if text.startswith(mark)), None)
        if begin is not None:
            closes = [close for mark, close in self._answers if mark in (begin, "") and close]
            self._answers, self._closes = (), tuple(closes)
        if begin:
            self._held, self._thinking = text[len(begin) :], True
            return bool(self._held)
        if self._thinking:
            self._held = text
        self._state = self._behind
        return True

    def _behind(self, found: list[Delta]) -> bool:
        """The content, without the marks behind it."""
        text, closes = self._held, self._closes
        places = [(at, mark) for mark in closes if (at := text.find(mark)) >= 0]
        at, close = min(places, default=(beginning(text, closes), ""))
        shown = text[:at].rstrip() if closes else text
        found += self._rest.push(shown)
        self._held = text[at + len(close) :] if close else text[len(shown) :]
        self._closes = tuple(mark for mark in closes if mark != close)
        return bool(close)


def in_thoughts(content: str, format: ReasoningFormat) -> bool:
    """Return whether a message of this content, which goes on, has begun thoughts and not ended
    them."""
    begun = content.rfind(format.begin) if format.begin else -1
    return begun >= 0 and format.end not in content[begun:]
