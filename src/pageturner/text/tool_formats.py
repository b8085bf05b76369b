"""The ways in which models write calls of tools: one row of markup/calls.json for each format.

Owns the formats as data: the grammar that holds a model to one (tool_grammar.py) and the parser
that reads it (call_parser.py) are both made from these rows, whose examples are the tests of both.
Must not know either of them, tokens or requests.

A pattern is text in which a space stands for white space that may be there or not and `␣` for a
space, `$NAME` for the name of a tool, `$ARGS` for its arguments, `$PYTHON` for arguments as Python
has them, `$ID` for letters and digits and `$INDEX` for digits that nobody reads. In the pattern of
a parameter `$KEY` is its name, `$VALUE` its value and `$TYPE` the word for its type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JSON, PYTHON, GEMMA, TAGGED = "json", "python", "gemma", "tagged"
MARKUP = Path(__file__).parent / "markup"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The way in which one family of models writes calls.

    calls      patterns of one call; a model is held to the first one, and at the start of an answer
               to that with which it begins; all of them are read
    aliases    what other servers call the format
    signs      a chat template that does not write calls itself has this format if it has all words
               of one of these texts, and nothing of `without`
    more       patterns that may stand, where calls are read, between the arguments of a call and
               another object within the same marks
    heads      patterns that may stand in front of `opening` where calls are read
    opening    stands once before the calls of an answer, `between` between two of them, `closing`
               behind them
    marks      parts of the patterns that may be one control token each in a vocabulary
    at_start   calls are looked for where the answer begins: nothing but their form tells them from
               text
    anywhere   of those: they are looked for behind text too
    before     what the model writes in front of an answer that begins with text
    arguments  how arguments are written: as JSON, as in Python's calls, as Gemma does it or each in
               marks of its own, as `parameter` says; `types` are the words for their types there
    nested     a value that is an object or a list has its own members in marks, as `parameter` says;
               those of a list are called `item`
    quote      stands around Gemma's strings
    several    whether an answer may have more than one call
    direct     names that are called, where they are of no tool, to say that the answer follows or
               is the text in the arguments
    id_length  of the ids of its calls, where its templates take no others; 0: they take any
    """

    name: str
    calls: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    opening: str = ""
    between: str = ""
    closing: str = ""
    marks: tuple[str, ...] = ()
    at_start: bool = False
    anywhere: bool = False
    before: str = ""
    arguments: str = JSON
    parameter: str = ""
    nested: bool = False
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    quote: str = '<|"|>'
    several: bool = True
    direct: tuple[str, ...] = ()
    id_length: int = 0

    @property
    def in_list(self) -> bool:
        """Return whether the calls stand in one list, so that what follows a call is told by the
        list."""
        return bool(self.closing or self.between)


def to_json(value: Any) -> str:
    """JSON as models write it: letters of all alphabets stand as they are."""
    return json.dumps(value, ensure_ascii=False)


def rows(file: str) -> list[dict[str, Any]]:
    """The rows of a table of formats, without their examples."""
    table = json.loads((MARKUP / f"{file}.json").read_text(encoding="utf-8"))
    return [
        {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in row.items()
            if key != "examples"
        }
        for row in table
    ]


def aliases(file: str) -> dict[str, str]:
    """Return what other servers call the formats of a table."""
    return {alias: row["name"] for row in rows(file) for alias in row.get("aliases", ())}


FORMATS = tuple(ToolFormat(**row) for row in rows("calls"))
BY_NAME = {format.name: format for format in FORMATS}
NAMES = tuple(BY_NAME)
_ALIASES = aliases("calls")
COMMON = "hermes"  # what to try with a model whose template says nothing


def tool_format(name: str) -> ToolFormat:
    """The format of this name, which is one of NAMES or of another server's."""
    return BY_NAME[_ALIASES.get(name, name)]


def signed(template: str) -> ToolFormat | None:
    """The first format whose signs are in a template, which may be in its instructions alone."""
    return next((one for one in FORMATS if has_signs(one.signs, one.without, template)), None)


def has_signs(signs: tuple[str, ...], without: tuple[str, ...], template: str) -> bool:
    """Return whether a template has all words of one of these texts, and nothing of `without`."""
    if any(text in template for text in without):
        return False
    texts = (text.split() for text in signs)
    return any(all(word.replace("␣", " ") in template for word in words) for words in texts)
