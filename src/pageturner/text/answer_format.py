"""Reading the text of an answer: which formats of thoughts and calls it may hold.

Owns the choice of parsers. It is told once, when a request is read, and goes with the request. Must
not know the fields of a request nor the shape of an answer.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from pageturner.errors import ClientError
from pageturner.formats.tokenizer import Tokenizer
from pageturner.params import SamplingParams
from pageturner.text import reasoning, tool_formats
from pageturner.text.argument_rules import property_types
from pageturner.text.call_parser import (
    CallParser,
    Delta,
    Parser,
    PlainText,
    triggers,
)
from pageturner.text.chat_template import SOUGHT, SOUGHT_ARGUMENTS, ChatTemplate, habits_of
from pageturner.text.harmony import HarmonyParser
from pageturner.text.reasoning import ReasoningFormat, ThoughtsParser, reasoning_format
from pageturner.text.stop_strings import ContentStops
from pageturner.text.tool_formats import TAGGED, ToolFormat, tool_format
from pageturner.text.tool_grammar import check_tools, tool_grammar, with_thoughts
from pageturner.text.tools import ToolChoice

HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats in the answers of one request.

    tools      name of a format of calls, or ""
    reasoning  name of a format of thoughts, or ""
    thinking   the prompt has begun the thoughts already
    named      the client has said which tool is to be called
    shown      control tokens that are text here: the marks of both formats
    names      of the tools, where only a name tells a call from text or an answer; else ()
    types      of the properties of each tool, where a call does not say what is a text
    stop_ids   tokens that end the content, and neither thoughts nor a call
    """

    tools: str = ""
    reasoning: str = ""
    thinking: bool = False
    named: bool = False
    shown: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    types: dict[str, dict[str, str]] = field(default_factory=dict, hash=False)
    stop_ids: tuple[int, ...] = ()

    def parser(self) -> Parser:
        """A parser for the text of one choice."""
        if HARMONY in (self.tools, self.reasoning):
            return HarmonyParser()
        rest: Parser = PlainText()
        calls: tuple[str, ...] = ()
        if self.tools:
            format = tool_format(self.tools)
            names = self.names if format.at_start else ()
            direct = set(format.direct).difference(self.names)
            rest = CallParser(format, names, self.types, direct)
            if not format.at_start:
                calls = triggers(format)
        if self.reasoning:
            return ThoughtsParser(reasoning_format(self.reasoning), rest, self.thinking, calls)
        return rest

    def stops(self, stop: Sequence[str], include: bool) -> ContentStops | None:
        """The stops of one choice; None: nothing stops it."""
        if not (stop or self.stop_ids):
            return None
        return ContentStops(stop, self.stop_ids, include, self.parser())


class AnswerReader:
    """One choice of an answer as it is read.

    calls   that have begun
    thinks  there may be thoughts in it
    cut     its last characters were the beginning of a mark, and nothing else came
    """

    def __init__(self, format: AnswerFormat) -> None:
        self.calls = 0
        self.thinks = bool(format.reasoning) or format.tools == HARMONY
        self.cut = False
        self._tail = ""  # text that the parser holds
        self._offsets = array("Q")
        self._parser = format.parser()

    def note(self, *offsets: int) -> None:
        """Note where the next tokens begin in the text."""
        if self.thinks:
            self._offsets.extend(offsets)

    @property
    def reasoning_tokens(self) -> int:
        """The number of noted tokens that begin before the thoughts end: their marks count too."""
        return bisect_left(self._offsets, self._parser.thoughts_end)

    def read(self, text: str, last: bool, cut: bool = False) -> list[Delta]:
        """The deltas of these next characters; neighbours of one kind are one delta. cut: what ends
        here was not at its end, so that the beginning of a mark is no content."""
        found: list[Delta] = []
        deltas = self._parser.push(text)
        held = self._parser.held
        self._tail = (self._tail + text)[-held:] if held else ""
        self.cut = last and cut and bool(self._tail.strip())
        if last and not self.cut:
            deltas += self._parser.finish()
        for delta in deltas:
            self.calls += delta.kind == "call"
            if found and found[-1].kind == delta.kind != "call":
                found[-1] = Delta(delta.kind, found[-1].text + delta.text)
            else:
                found.append(delta)
        return found


def read(format: AnswerFormat, text: str, cut: bool = False) -> list[Delta]:
    """All that stands in a whole answer. cut: as `AnswerReader.read` has it."""
    return AnswerReader(format).read(text, True, cut)


def marks_of(tools: str, reasoning: str) -> tuple[str, ...]:
    """The texts of the two formats that may be control tokens."""
    marks = tool_format(tools).marks if tools else ()
    if HARMONY in (tools, reasoning):
        reasoning = HARMONY
    return tuple(dict.fromkeys((*marks, *(reasoning_format(reasoning).marks if reasoning else ()))))


def limits_of(format: ReasoningFormat, calls: bool) -> tuple[str, str]:
    """The marks that a model writes in front of its thoughts and behind them. calls: a call may
    follow."""
    if format.name != HARMONY:
        return format.begin, format.end
    if calls:  # what the next message is its grammar says
        return "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    return "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


def control_token(mark: str, tokenizer: Tokenizer) -> int | None:
    """The control token that this mark is in a vocabulary; None: it is plain text there."""
    ids = tokenizer.encode(mark, add_special=False, parse_special=True)
    control = len(ids) == 1 and (ids[0] in tokenizer.special_ids or ids[0] in tokenizer.eos_ids)
    return ids[0] if control else None


def control_tokens(marks: tuple[str, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The marks that are control tokens in a vocabulary."""
    found = (control_token(mark, tokenizer) for mark in marks)
    return tuple(token for token in found if token is not None)


# -- formats of a template ------------------------------------------------------------------------

_ABOUT_TOOLS = re.compile(r"\b(xml_)?(tools?|functions|tool_calls?)\b")
_NO_TOOLS = re.compile(r"raise_exception\([^)]*\bno tools\b")
_MAY_BEGIN = re.compile(rf"[\[{{<`]|{SOUGHT}")


@lru_cache(maxsize=8)
def recognised(template: str | None) -> ToolFormat | None:
    """The format in which this chat template writes calls: the first one that reads what it made of
    a call, else the one that it speaks of, else the common one. None where it does nothing with
    tools."""
    if template is None or not _ABOUT_TOOLS.search(template) or _NO_TOOLS.search(template):
        return None
    written = habits_of(ChatTemplate(template), tools=True).written
    found = (one for one in tool_formats.FORMATS if not one.at_start and _reads(one, written))
    at_start = (one for one in tool_formats.FORMATS if one.at_start and _begins(one, written))
    format = next(found, None) or tool_formats.signed(template) or next(at_start, None)
    return format or tool_format(tool_formats.COMMON)


def _reads(format: ToolFormat, text: str) -> bool:
    """Return whether the call of the trial is read from this text."""
    if not format.calls or SOUGHT not in text:
        return False
    parser = CallParser(format, (SOUGHT,))
    deltas = parser.push(text) + parser.finish()
    made = "".join(delta.text for delta in deltas if delta.kind == "arguments")
    try:
        return bool(json.loads(made) == json.loads(SOUGHT_ARGUMENTS))
    except ValueError:
        return False


def _begins(format: ToolFormat, text: str) -> bool:
    """Return whether it is read from some place of the text on."""
    return any(_reads(format, text[place.start() :]) for place in _MAY_BEGIN.finditer(text))


# -- formats of a model ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """source: of the model's chat template, None: it has none. The parsers: names of formats;
    "auto": as the template says; "none": thoughts are content."""

    tokenizer: Tokenizer
    source: str | None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    @property
    def tools(self) -> ToolFormat | None:
        """The format in which the model calls tools."""
        if self.tool_call_parser != "auto":
            return tool_formats.tool_format(self.tool_call_parser)
        return recognised(self.source)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format in which it thinks."""
        if self.reasoning_parser == "none":
            return None
        if self.reasoning_parser != "auto":
            return reasoning.reasoning_format(self.reasoning_parser)
        return reasoning.recognised(self.source)

    def grammar(self, choice: ToolChoice, answer: str | None, how: str) -> str:
        """The grammar that an answer with these tools must match. ClientError for what is wrong
        with them.

        answer  the grammar of an answer that is no call; None: any text
        how     the setting that names the format of calls, for who has to be told of it
        """
        format = self.tools
        if format is None:
            message = (
                f"the model's chat template does nothing with tools: {how} {tool_formats.COMMON},"
                f" which many models write, or one of {', '.join(tool_formats.NAMES)}"
            )
            raise ClientError(400, "unsupported_parameter", message, "tools")
        check_tools(format, choice)
        if answer is not None and format.name == HARMONY:
            message = "this model cannot have tools and a response_format: send one, or tool_choice required"
            raise ClientError(400, "unsupported_parameter", message, "response_format")
        return tool_grammar(format, choice, self.control, answer or "")

    def answer(self, choice: ToolChoice, prompt: str) -> AnswerFormat | None:
        """The way to read the text of the answers to this prompt; None: all of it is content."""
        thoughts, calls = self.reasoning, self.tools if choice.tools else None
        if thoughts is None and calls is None:
            return None
        formats = calls.name if calls else "", thoughts.name if thoughts else ""
        answer = AnswerFormat(
            tools=formats[0],
            reasoning=formats[1],
            thinking=thoughts is not None and reasoning.opened(thoughts, prompt),
            named=choice.named,
            shown=control_tokens(marks_of(*formats), self.tokenizer),
        )
        if calls is not None and (calls.at_start or calls.direct):
            answer = replace(answer, names=tuple(tool.name for tool in choice.tools))
        if calls is not None and calls.arguments == TAGGED:
            types = {tool.name: property_types(tool.parameters) for tool in choice.tools}
            answer = replace(answer, types=types)
        return answer

    def divided(
        self, params: SamplingParams, answer: AnswerFormat | None, variables: Mapping[str, Any]
    ) -> tuple[SamplingParams, AnswerFormat | None]:
        """The parameters and the format of an answer, each with its part of the work. Stop tokens,
        all but the ends of sequence, are looked for in the text and not by the engine, which knows
        no content. A grammar in the parameters lets the model think first, unless the client has
        disabled thinking and the template has not begun it all the same.

        variables  of the chat template
        """
        if answer is None:
            return params, answer
        ends = () if params.ignore_eos else self.tokenizer.eos_ids
        own = tuple(token for token in params.stop_ids if token not in ends)
        if own and not params.beam_width:
            answer = replace(answer, stop_ids=own)
            ended = tuple(token for token in params.stop_ids if token in ends)
            params = replace(params, stop_ids=ended)
        thinks = bool(answer.reasoning) and answer.tools != HARMONY
        wanted = answer.thinking or variables.get("enable_thinking") is not False
        if params.structured_outputs is not None and thinks and wanted:
            thoughts = reasoning.reasoning_format(answer.reasoning)
            grammar = with_thoughts(
                params.structured_outputs, thoughts, answer.thinking, self.control
            )
            params = replace(params, structured_outputs=grammar)
        return params, answer

    def control(self, mark: str) -> int | None:
        """The control token that a mark is, if it is one."""
        return control_token(mark, self.tokenizer)
