"""The arguments of a call as they come, as pieces of JSON: written as JSON already, as in a call of
Python, or as Gemma writes them.

Owns where the arguments end and what each of their characters becomes. It goes from character to
character, so the pieces in which a text comes change nothing. Must not know what stands around
arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Protocol

from pageturner.text.tool_formats import GEMMA, JSON, PYTHON

GEMMA_QUOTE = '<|"|>'
_PLAIN = re.compile(r'[^"\\]+')  # within a string of JSON
_QUIET = re.compile(r'[^"{}\[\]]+')  # outside of one


class Arguments(Protocol):
    """`done`: they have ended. `dead`: they are no arguments; only before the first piece of
    JSON."""

    done: bool
    dead: bool

    def push(self, text: str, start: int) -> tuple[str, int]:
        """The JSON that the text from `start` on becomes, and where the arguments end in it, or its
        length."""


def arguments_of(kind: str) -> Arguments:
    """The reader of arguments that are written in this way."""
    kinds: dict[str, Callable[[], Arguments]] = {
        JSON: JSONArguments,
        PYTHON: PythonArguments,
        GEMMA: GemmaArguments,
    }
    return kinds[kind]()


class JSONArguments:
    """An object of JSON, passed on as it stands."""

    def __init__(self) -> None:
        self.done = self.dead = False
        self._depth = 0
        self._string = self._escaped = False

    def push(self, text: str, start: int) -> tuple[str, int]:
        if self._depth == 0:
            if text[start] != "{":
                self.dead = True
                return "", start
            self._depth, at = 1, start + 1
        else:
            at = start
        while at < len(text) and not self.done:
            at = self._in_string(text, at) if self._string else self._outside(text, at)
        return text[start:at], at

    def _in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if plain := _PLAIN.match(text, at):
            return plain.end()
        self._escaped, self._string = text[at] == "\\", text[at] != '"'
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        if quiet := _QUIET.match(text, at):
            return quiet.end()
        if text[at] == '"':
            self._string = True
        else:
            self._depth += 1 if text[at] in "{[" else -1
            self.done = self._depth == 0
        return at + 1


_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def _text(text: str) -> str:
    """The text as it stands within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PythonArguments:
    """`name=value, name=value` up to the bracket that closes the call, which is not one of them.
    What a value is made of is translated: strings, True, False, None, lists, tuples and dicts."""

    def __init__(self) -> None:
        self.done = self.dead = False
        self._closers: list[str] = []  # of the brackets that are open
        self._quote = ""
        self._escape: str | None = None  # what of an escape has come
        self._word = ""
        self._begun = self._key = False

    def push(self, text: str, start: int) -> tuple[str, int]:
        made, at = [] if self._begun else ["{"], start
        self._begun = True
        while at < len(text) and not self.done:
            made.append(self._in_string(text[at]) if self._quote else self._outside(text[at]))
            at += not self.done
        return "".join(made), at

    def _in_string(self, one: str) -> str:
        if self._escape is not None:
            return self._escaped(one)
        if one == "\\":
            self._escape = ""
            return ""
        if one == self._quote:
            self._quote = ""
            return '"'
        return _text(one)

    def _escaped(self, one: str) -> str:
        assert self._escape is not None
        code = self._escape + one
        length = {"x": 3, "u": 5}.get(code[0])
        if length is None:
            self._escape = None
            return _text(_ESCAPES.get(code, code if code in "\\'\"" else "\\" + code))
        if len(code) > 1 and one not in "0123456789abcdefABCDEF":
            self._escape = None
            return _text("\\" + code)
        self._escape = None if len(code) == length else code
        return _text(chr(int(code[1:], 16))) if self._escape is None else ""

    def _outside(self, one: str) -> str:
        if one.isalnum() or one in "_.+-":
            self._word += one
            return ""
        if one == "=" and not self._closers:
            word, self._word = self._word, ""
            return f'"{_text(word)}": '
        word, self._word = _WORDS.get(self._word, self._word), ""
        if one in "'\"":
            self._quote = one
            return word + '"'
        if one in "([{":
            self._closers.append({"(": "]", "[": "]", "{": "}"}[one])
            return word + ("[" if one == "(" else one)
        if one in ")]}":
            if self._closers:
                return word + self._closers.pop()
            self.done = True
            return word + "}"
        return word + one


class GemmaArguments:
    """`{name:value,name:value}` with strings between marks and names without any."""

    def __init__(self) -> None:
        self.done = self.dead = False
        self._open: list[str] = []
        self._string = self._named = False
        self._held = ""  # what may be a mark
        self._word = ""

    def push(self, text: str, start: int) -> tuple[str, int]:
        made, at = [], start
        while at < len(text) and not self.done and not self.dead:
            made.append(self._one(text[at]))
            at += not self.dead
        return "".join(made), at

    def _one(self, one: str) -> str:
        if not self._open:
            self.dead = one != "{"
            self._open = ["{"]
            self._named = True
            return "{"
        held = self._held + one
        if held == GEMMA_QUOTE:
            self._held, self._string = "", not self._string
            return '"'
        if GEMMA_QUOTE.startswith(held):
            self._held = held
            return ""
        if self._held:
            made = self._plain(self._held[0])
            rest, self._held = self._held[1:] + one, ""
            return made + "".join(map(self._one, rest))
        return self._plain(one)

    def _plain(self, one: str) -> str:
        """A character that is no part of a mark."""
        if self._string:
            return _text(one)
        if one == ":" and self._named:
            word, self._word, self._named = self._word.strip(), "", False
            return f'"{_text(word)}":' if word else ":"
        if one not in "{}[],":
            self._word += one
            return ""
        word, self._word = self._word.strip(), ""
        word = _WORDS.get(word, word)  # its templates write null as Python does
        if one in "{[":
            self._open.append(one)
        elif one in "}]":
            self._open.pop()
            self.done = not self._open
        self._named = one in "{," and self._open[-1:] == ["{"]
        return word + one
