"""The ways in which models write calls of tools: one row for each format, and which row a chat
template belongs to.

Owns the formats as data: the grammar that holds a model to one (tool_grammar.py) and the parser
that reads it (call_parser.py) are both made from these rows. Must not know either of them, tokens
or requests.

A pattern is text in which a space stands for white space that may be there or not, `$NAME` for the
name of a tool, `$ARGS` for its arguments and `$ID` for letters and digits that nobody reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

JSON, PYTHON, GEMMA = "json", "python", "gemma"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The way in which one family of models writes calls.

    calls      patterns of one call; a model is held to the first one, and at the start of an answer
               to that with which it begins; all of them are read
    markers    a chat template with all of these texts, or one of the hints, and none of `without`
               has this format; none has it where there are no markers
    opening    stands once before the calls of an answer, `between` between two of them, `closing`
               behind them
    marks      parts of the patterns that may be one control token each in a vocabulary
    at_start   calls are only looked for where the answer begins: nothing but their form tells them
               from text
    arguments  how arguments are written: as JSON, as in Python's calls, or as Gemma does it
    several    whether an answer may have more than one call
    id_length  of the ids of its calls, where its templates take no others; 0: they take any
    """

    name: str
    calls: tuple[str, ...]
    markers: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    opening: str = ""
    between: str = ""
    closing: str = ""
    marks: tuple[str, ...] = ()
    at_start: bool = False
    arguments: str = JSON
    several: bool = True
    id_length: int = 0

    @property
    def in_list(self) -> bool:
        """Return whether the calls stand in one list, so that what follows a call is told by the
        list."""
        return bool(self.closing or self.between)


DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
FUNCTION = '{ "name" : "$NAME" , "arguments" : $ARGS }'

# The first row whose markers are in a template is its format.
FORMATS = (
    ToolFormat(
        "harmony",
        calls=(),  # its channels are no pattern: harmony.py
        markers=("<|channel|>", "commentary"),
        marks=("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"),
        several=False,
    ),
    ToolFormat(
        "gemma",
        calls=("<|tool_call>call:$NAME$ARGS<tool_call|>",),
        markers=("<|tool_call>",),
        marks=("<|tool_call>", "<tool_call|>", '<|"|>'),
        arguments=GEMMA,
    ),
    ToolFormat(
        "deepseek_v3",
        calls=(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME ```json $ARGS ```<｜tool▁call▁end｜>",
        ),
        markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        opening="<｜tool▁calls▁begin｜> ",
        between=" ",
        closing=" <｜tool▁calls▁end｜>",
        marks=DEEPSEEK_MARKS,
    ),
    ToolFormat(
        "deepseek_v31",
        calls=("<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGS<｜tool▁call▁end｜>",),
        markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        opening="<｜tool▁calls▁begin｜> ",
        between=" ",
        closing=" <｜tool▁calls▁end｜>",
        marks=DEEPSEEK_MARKS,
    ),
    ToolFormat(
        "mistral",
        calls=("[TOOL_CALLS]$NAME[ARGS]$ARGS", "[TOOL_CALLS]$NAME[CALL_ID]$ID[ARGS]$ARGS"),
        markers=("[ARGS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    ToolFormat(
        "mistral_list",
        calls=(FUNCTION, '{ "name" : "$NAME" , "arguments" : $ARGS , "id" : "$ID" }'),
        markers=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS] [ ",
        between=" , ",
        closing=" ]",
        marks=("[TOOL_CALLS]",),
        id_length=9,
    ),
    ToolFormat(
        "granite",
        calls=(FUNCTION,),
        markers=("<|tool_call|>",),
        opening="<|tool_call|> [ ",
        between=" , ",
        closing=" ]",
        marks=("<|tool_call|>",),
    ),
    ToolFormat(
        "hermes",
        calls=(f"<tool_call> {FUNCTION} </tool_call>",),
        markers=("<tool_call>",),
        without=("<function=", "<arg_key>", "<tool_calls>", "minimax"),
        marks=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "pythonic_tokens",
        calls=("$NAME($ARGS)",),
        markers=("<|tool_call_start|>",),
        hints=("<|tool_list_start|>",),  # LFM2: its templates do not write calls themselves
        opening="<|tool_call_start|> [ ",
        between=" , ",
        closing=" ] <|tool_call_end|>",
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
        arguments=PYTHON,
    ),
    ToolFormat(
        "pythonic",
        calls=("$NAME($ARGS)",),
        markers=("func_name1(",),
        opening="[ ",
        between=" , ",
        closing=" ]",
        at_start=True,
        arguments=PYTHON,
    ),
    ToolFormat(
        "json",  # no template asks for it; some small models write it whatever their template asks for
        calls=(f"<tool_call> {FUNCTION} </tool_call>", f"```json {FUNCTION} ```", FUNCTION),
        marks=("<tool_call>", "</tool_call>"),
        at_start=True,
        several=False,
    ),
    ToolFormat(
        "llama3",
        calls=(
            '{ "name" : "$NAME" , "parameters" : $ARGS }',
            '{ "type" : "function" , "name" : "$NAME" , "parameters" : $ARGS }',
            '<|python_tag|> { "name" : "$NAME" , "parameters" : $ARGS }',
            '<|python_tag|> { "type" : "function" , "name" : "$NAME" , "parameters" : $ARGS }',
        ),
        markers=("dictionary of argument name",),
        without=("<｜tool▁call▁begin｜>",),
        marks=("<|python_tag|>",),
        at_start=True,
        several=False,
    ),
)
BY_NAME = {format.name: format for format in FORMATS}
NAMES = tuple(BY_NAME)
COMMON = "hermes"  # what to try with a model whose template says nothing


@lru_cache(maxsize=8)
def recognised(template: str | None) -> ToolFormat | None:
    """The format that this chat template speaks of. None where it has none that is known, or where
    it does nothing with tools."""
    if template is None or not re.search(r"\b(xml_)?tools\b", template):
        return None
    return next((one for one in FORMATS if _fits(one, template)), None)


def _fits(format: ToolFormat, template: str) -> bool:
    wanted = bool(format.markers) and all(mark in template for mark in format.markers)
    wanted |= any(mark in template for mark in format.hints)
    return wanted and not any(mark in template for mark in format.without)


def tool_format(name: str) -> ToolFormat:
    """The format of this name, which is one of NAMES."""
    return BY_NAME[name]
