"""Thoughts of a model apart from its answer, where both are one text with marks between them.

Owns the formats as data, how a chat template tells one, and where thoughts begin and end in a text.
Must not know calls of tools (call_parser.py), tokens or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pageturner.text.call_parser import Delta, Parser, beginning
from pageturner.text.harmony import MARKS


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """begin, end  what stands before and behind thoughts
    markers     a chat template with one of these texts has this format
    marks       parts of both that may be one control token each in a vocabulary
    """

    name: str
    begin: str
    end: str
    markers: tuple[str, ...]
    marks: tuple[str, ...]


FORMATS = (
    ReasoningFormat("harmony", "", "", ("<|channel|>",), MARKS),  # see harmony.py
    ReasoningFormat(
        "gemma", "<|channel>thought", "<channel|>", ("<|channel>",), ("<|channel>", "<channel|>")
    ),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",), ("[THINK]", "[/THINK]")),
    ReasoningFormat(
        "think", "<think>", "</think>", ("<think>", "</think>"), ("<think>", "</think>")
    ),
)
BY_NAME = {format.name: format for format in FORMATS}
NAMES = tuple(BY_NAME)


@lru_cache(maxsize=8)
def recognised(template: str | None) -> ReasoningFormat | None:
    """The format that this chat template speaks of, or None."""
    if template is None:
        return None
    return next((one for one in FORMATS if any(mark in template for mark in one.markers)), None)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name, which is one of NAMES."""
    return BY_NAME[name]


def opened(format: ReasoningFormat, prompt: str) -> bool:
    """Return whether the prompt ends within thoughts: its template has begun them for the model."""
    return bool(format.begin) and prompt.rstrip().endswith(format.begin)


class ThoughtsParser:
    """The thoughts at the beginning of an answer, and the rest of it, which another parser reads.
    White space around the marks belongs to them.

    thinking  the prompt has begun the thoughts
    """

    def __init__(self, format: ReasoningFormat, rest: Parser, thinking: bool) -> None:
        self._format = format
        self._rest = rest
        self._held = ""
        self._state = self._beginning
        self._thinking = thinking
        self._pushed = self._ended = 0  # characters; those up to the end of the thoughts

    @property
    def thoughts_end(self) -> int:
        return self._pushed if self._state in (self._space, self._thoughts) else self._ended

    @property
    def held(self) -> int:
        return len(self._held) + self._rest.held

    def push(self, text: str) -> list[Delta]:
        if self._state == self._behind:
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
            found.append(Delta("reasoning", self._held))
        elif self._state == self._beginning and not self._thinking:
            found += self._rest.push(self._held)
        self._held = ""
        return found + self._rest.finish()

    # Each state takes what it can from what is held. False: it needs more text.
    def _beginning(self, found: list[Delta]) -> bool:
        """Thoughts begin here or nowhere."""
        text, begin = self._held.lstrip(), self._format.begin
        if text.startswith(begin):
            self._held, self._state = text[len(begin) :], self._space
        elif begin.startswith(text):
            return False
        elif self._thinking:
            self._held, self._state = text, self._thoughts
        else:
            self._pass_on(found)
        return True

    def _space(self, found: list[Delta]) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._thoughts
        return bool(self._held)

    def _thoughts(self, found: list[Delta]) -> bool:
        text, end = self._held, self._format.end
        at = text.find(end)
        shown = text[:at] if at >= 0 else text[: beginning(text, (end,))]
        shown = shown.rstrip()
        if shown:
            found.append(Delta("reasoning", shown))
        self._held = text[len(shown) :]
        if at < 0:
            return False
        self._held = self._held.partition(end)[2]
        self._state, self._ended = self._gap, self._pushed - len(self._held)
        return True

    def _gap(self, found: list[Delta]) -> bool:
        """White space behind the thoughts."""
        self._held = self._held.lstrip()
        if self._held:
            self._pass_on(found)
        return False

    def _pass_on(self, found: list[Delta]) -> None:
        self._state = self._behind
        found += self._rest.push(self._held)
        self._held = ""

    def _behind(self, found: list[Delta]) -> bool:
        return False


def in_thoughts(content: str, format: ReasoningFormat) -> bool:
    """Return whether a message of this content, which goes on, has begun thoughts and not ended
    them."""
    begun = content.rfind(format.begin) if format.begin else -1
    return begun >= 0 and format.end not in content[begun:]
