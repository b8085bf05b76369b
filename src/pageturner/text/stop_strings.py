"""Stops: where the text of an answer ends because a stop string is complete.

Owns what is shown, held back and cut away, and that stops of an answer which is more than content
count in the content alone: they cut neither thoughts nor a call. Must not know where text comes
from, nor which formats there are (answer_format.py).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pageturner.text.call_parser import Delta, Parser


class StopStrings:
    """Text in, text out, cut at the first stop string.

    Nothing is given out that a stop string could still take back: where the end of the text may be
    the beginning of one, it is held back. The stop string that ends first wins; of those that end
    together the longest.

    stop     at least one string, none of them empty
    include  the stop string stays in the text
    found    the stop string that ended the text, or None; then nothing more may be pushed
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def push(self, new: str, token: int = -1, free: bool = False) -> str:
        """The text that is certain now, with `new` behind what came before. free: it stops
        nothing."""
        if free:
            return new
        text = self._held + new
        complete, certain = [], len(text)
        for (
            stop
        ) in self._stop:  # once a token: only where its first character stands is it looked at
            first = stop[0]
            at = text.find(first)
            while at >= 0:
                if text.startswith(stop, at):
                    complete.append((at + len(stop), at, stop))
                    break
                if stop.startswith(text[at:]):
                    certain = min(certain, at)
                    break
                at = text.find(first, at + 1)
        if complete:
            end, start, self.found = min(complete)
            self._held = ""
            return text[: end if self._include else start]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text that was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


class ContentStops:
    """Tokens and their text in, text out, cut at the first stop in the content.

    Text is given out when it is certain, as StopStrings does it; the parser says of which part it
    is. It takes one character at a time, so what it decides is one run of text, and content only
    at the beginning of it. No stop string begins in front of a call and ends behind it.

    ids    stop tokens
    found  the stop string or stop token that ended the text, or None
    """

    def __init__(
        self, stop: Sequence[str], ids: tuple[int, ...], include: bool, parser: Parser
    ) -> None:
        self.found: str | int | None = None
        self._strings = StopStrings(stop, include)
        self._ids = ids
        self._include = include
        self._parser = parser
        self._free = 0  # characters that stop nothing
        self._places: deque[tuple[int, int]] = deque()  # of stop tokens: a character, and its id
        self._held = ""  # text that the parser has not decided about
        self._pushed = 0  # characters

    def push(self, new: str, token: int = -1, free: bool = False) -> str:
        """The text that is certain now, with `new` behind what came before. token: whose text this
        is; free: it stops nothing."""
        shown = ""
        end = self._pushed + len(new)
        if free:
            self._free = end
        elif token in self._ids and new:
            self._places.append((end - 1 if self._include else self._pushed, token))
        elif token in self._ids and self._in_content():
            shown = self.flush()
            self.found = self.found or token
        for one in new:
            self._held += one
            self._pushed += 1
            shown += self._decided(self._parser.push(one), self._parser.held)
            if self.found is not None:
                break
        return shown

    def flush(self) -> str:
        """The text that was held back, when no more text comes. What stands behind the last content
        is the beginning of a mark, or none: who reads the text says which."""
        shown = self._decided(self._parser.finish(), 0)
        return shown + self._strings.flush()

    def _decided(self, deltas: list[Delta], held: int) -> str:
        """Take the text that is held but for its last characters."""
        begin = self._pushed - len(self._held)
        text = self._held[: len(self._held) - held]
        self._held = self._held[len(text) :]
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        at = 0
        shown = ""
        if not text.startswith(content):  # white space in front of it belongs to a mark
            at = text.rfind(content)
            shown = self._strings.flush() + text[:at]
        shown += self._content(content, begin + at)
        rest = text[at + len(content) :]
        if self.found is not None or not rest:
            return shown
        return shown + self._strings.flush() + rest

    def _content(self, content: str, begin: int) -> str:
        """Take content, of which the first character is that of this number."""
        while self._places and self._places[0][0] < begin:
            self._places.popleft()
        end = len(content)
        token = None
        if self._places and self._places[0][0] < begin + end:
            place, token = self._places[0]
            end = place - begin + self._include
        free = min(max(self._free - begin, 0), len(content))
        shown = content[:free] + self._strings.push(content[free:end])
        self.found = self._strings.found
        if self.found is None and token is not None:
            self.found = token
            shown += self._strings.flush()
        return shown

    def _in_content(self) -> bool:
        """Return whether a character that is in no mark would be content here."""
        return any(one.kind == "content" for one in copy.deepcopy(self._parser).push("\0"))
