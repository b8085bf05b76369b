"""The arguments of a call as they come, as pieces of JSON: written as JSON already, as in a call of
Python, as Gemma writes them, or each between marks of its own.

Owns where the arguments end and what each of their characters becomes. It goes from character to
character, so the pieces in which a text comes change nothing. Must not know what stands around
arguments.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from pageturner.text.tool_formats import GEMMA, PYTHON, TAGGED, ToolFormat, to_json

_PLAIN = re.compile(r'[^"\\]+')  # within a string of JSON
_QUIET = re.compile(r'[^"{}\[\]]+')  # outside of one
_WORD = re.compile(r'[^"{}\[\],\s]+')  # a number, true, false or null


class Arguments(Protocol):
    """`done`: they have ended. `dead`: they are no arguments; only before the first piece of
    JSON."""

    done: bool
    dead: bool

    def push(self, text: str, start: int) -> tuple[str, int]:
        """The JSON that the text from `start` on becomes, and where the arguments end in it, or its
        length."""


def arguments_of(
    kind: str, format: ToolFormat, types: Mapping[str, str], end: str = ""
) -> Arguments:
    """The reader of arguments that are written in this way. types: of the properties of the tool,
    in words of JSON Schema; end: the text behind all of them."""
    if kind == TAGGED:
        return TaggedArguments(format, types, end)
    if kind == GEMMA:
        return GemmaArguments(format.quote)
    if kind == PYTHON:
        return PythonArguments()
    return JSONArguments()


class JSONArguments:
    """An object of JSON, passed on as it stands. anything: any value of JSON, of which a number or
    a word ends in front of what follows it."""

    def __init__(self, anything: bool = False) -> None:
        self.done = self.dead = False
        self._depth = 0
        self._anything = anything
        self._begun = self._string = self._escaped = False

    def push(self, text: str, start: int) -> tuple[str, int]:
        at = start
        if not self._begun and at < len(text):
            self._begun = True
            self.dead = text[at] != "{" and not self._anything
        while at < len(text) and not self.done and not self.dead:
            at = self._in_string(text, at) if self._string else self._outside(text, at)
        return text[start:at], at

    def _in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if plain := _PLAIN.match(text, at):
            return plain.end()
        self._escaped, self._string = text[at] == "\\", text[at] != '"'
        self.done = not self._string and not self._depth
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        if not self._depth and text[at] in "]}, \t\r\n":
            self.done = True
            return at
        if quiet := (_WORD, _QUIET)[self._depth > 0].match(text, at):
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
    return to_json(text)[1:-1]


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

    def __init__(self, quote: str) -> None:
        self.done = self.dead = False
        self._quote = quote
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
        if held == self._quote:
            self._held, self._string = "", not self._string
            return '"'
        if self._quote.startswith(held):
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


class TaggedArguments:
    """Each argument between marks of its own, as in `<parameter=city>Paris</parameter>`. A text is
    passed on as it comes, any other value when it is whole: its type says which it is.

    types  of the properties, in words of JSON Schema; those within others by their paths
    tail   the text behind all arguments
    """

    def __init__(self, format: ToolFormat, types: Mapping[str, str], tail: str) -> None:
        self.done = self.dead = False
        self._types = types
        self._tail = tail
        self._nested = format.nested
        head, _, self._close = format.parameter.partition("$VALUE")
        self._begins = head
        self._trims = head.endswith("\n")
        self._open = head.partition("$KEY")[0].replace("␣", " ")
        pattern = re.escape(head.rstrip("\n")).replace(r"\$KEY", "(?P<key>[^/<>][^<>]{0,127}?)")
        pattern = pattern.replace(r"\$TYPE", r"(?P<type>\w{0,16})")
        self._head = re.compile(pattern.replace("\\ ", r"\s{0,8}").replace("␣", " "))
        self._end = ""  # of the argument that has begun; "": none has
        self._made = ""
        self._next = "{"  # stands in front of the next argument
        self._text = False  # the argument is one
        self._newline = False  # which may stand in front of the value
        self._seen = 0

    def push(self, text: str, start: int) -> tuple[str, int]:
        at = start
        before = -1
        while at != before and not self.done and not self.dead:
            before = at
            if self._end:
                at = self._value(text, at)
            else:
                at = self._between(text, at)
        made = self._made
        self._made = ""
        return made, at

    def _between(self, text: str, at: int) -> int:
        """Read what stands in front of a value."""
        at = len(text) - len(text[at:].lstrip())
        begins = text.startswith(self._open, at) and len(text) - at < _LONGEST_HEAD
        if text.startswith(self._tail, at):
            self._finish()
        elif found := self._head.match(text, at):
            self._begin(found["key"], found.groupdict().get("type"))
            at = found.end()
        elif not begins and not any(one.startswith(text[at:]) for one in (self._open, self._tail)):
            self.dead = self._next == "{"
            self._finish()
        return at

    def _finish(self) -> None:
        self.done = not self.dead
        self._made += ("{" * (self._next == "{") + "}") * self.done

    def _begin(self, key: str, word: str | None) -> None:
        if key[:1] == key[-1:] == '"':
            key = key[1:-1]
        self._made += f"{self._next}{to_json(key)}: "
        self._next = ", "
        self._newline = self._trims
        self._seen = 0
        self._key = key
        self._end = self._close.lstrip("\n").replace("$KEY", key)
        self._kinds = self._types.get(key, "")
        if word is not None:
            self._kinds = "string" * (word in ("true", "string"))
        self._text = self._kinds == "string"
        self._made += '"' * self._text

    def _value(self, text: str, at: int) -> int:
        if self._newline and at < len(text):
            self._newline = False
            at += text[at] == "\n"
        end = text.find(self._end, max(at, at + self._seen - len(self._end)))
        if self._nested:
            end = self._end_of(text, at, self._key)
        if end < 0 and not self._text:
            self._seen = len(text) - at
            return at
        whole = end >= 0
        if not whole:
            end = at + beginning(text[at:], (self._end,))
        value = text[at:end]
        if self._trims:
            value = value.removesuffix("\n")
        if self._text:
            self._made += _text(value) + '"' * whole
        else:
            self._made += self._as_json(value, self._key)
        if not whole:
            return at + len(value)
        end += len(self._end)
        self._end = ""
        return end

    def _end_of(self, text: str, at: int, key: str) -> int:
        """The end of a value that may have values of the same name in it; -1: it is not there."""
        begins = self._begins.replace("$KEY", key)
        mark = self._close.replace("$KEY", key)
        end = text.find(mark, at)
        while end >= 0 and text.count(begins, at, end) > text.count(mark, at, end):
            end = text.find(mark, end + 1)
        return end

    def _as_json(self, text: str, path: str) -> str:
        """The JSON of a value, which may have others in it."""
        kinds = self._types.get(path, "")
        if self._nested and text.lstrip().startswith(self._open):
            members = self._members(text.strip(), path)
            if members is not None and (
                kinds == "array" or (not kinds and members.keys() == {ITEM})
            ):
                return _list(members.get(ITEM, []))
            if members is not None:
                values = (
                    (key, of[0] if len(of) == 1 else _list(of)) for key, of in members.items()
                )
                return f"{{{', '.join(f'{to_json(key)}: {one}' for key, one in values)}}}"
        if kinds in _EMPTY and not text.strip():
            return _EMPTY[kinds]
        return as_json(text, kinds)

    def _members(self, text: str, path: str) -> dict[str, list[str]] | None:
        """The JSON of the values in a value, by name; None: it is not made of such."""
        found: dict[str, list[str]] = {}
        while text:
            head = self._head.match(text)
            end = -1
            if head is not None:
                end = self._end_of(text, head.end(), head["key"])
            if head is None or end < 0:
                return None
            key = head["key"]
            value = self._as_json(text[head.end() : end], f"{path}/{key}")
            found.setdefault(key, []).append(value)
            text = text[end + len(self._close.replace("$KEY", key)) :].lstrip()
        return found


def _list(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


ITEM = "item"  # the name of what a list has in it
_EMPTY = {"array": "[]", "object": "{}"}
_LONGEST_HEAD = 512  # characters in front of a value


def beginning(text: str, marks: tuple[str, ...]) -> int:
    """The place from which the end of the text may be the beginning of one of the marks, or the
    length of the text."""
    longest = max(map(len, marks), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


def as_json(text: str, kinds: str) -> str:
    """The JSON of a value that stands as text. kinds: its types, joined by commas; "": any."""
    bare = text.strip()
    made = bare
    try:
        value = json.loads(bare, parse_constant=ast.literal_eval)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(bare)
            made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return to_json(text)
    name = type_name(value)
    fits = name in kinds or (name == "integer" and "number" in kinds)
    if fits or (not kinds and name != "string"):
        return made
    return to_json(text)


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}


def type_name(value: Any) -> str:
    """Return what JSON Schema calls the type of a value."""
    if value is None:
        return "null"
    return _TYPES.get(type(value), "array")
