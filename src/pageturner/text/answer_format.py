"""How the text of an answer is read: which formats of thoughts and calls it may hold.

Owns the choice of parsers. It is told once, when a request is read, and goes with the request. Must not know
the fields of a request nor the shape of an answer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass

from pageturner.formats.tokenizer import Tokenizer
from pageturner.text.call_parser import CallParser, Delta, Parser, PlainText
from pageturner.text.harmony import HarmonyParser
from pageturner.text.reasoning import ReasoningFormat, ThoughtsParser, reasoning_format
from pageturner.text.tool_formats import tool_format

HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What stands in the answers of one request.

    tools      name of a format of calls, or ""
    reasoning  name of a format of thoughts, or ""
    thinking   the prompt has begun the thoughts already
    named      the client has said which tool is to be called
    shown      control tokens that are text here: the marks of both formats
    names      of the tools, where nothing but a name tells a call from text; else ()
    """

    tools: str = ""
    reasoning: str = ""
    thinking: bool = False
    named: bool = False
    shown: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def parser(self) -> Parser:
        """For the text of one choice."""
        if HARMONY in (self.tools, self.reasoning):
            return HarmonyParser()
        rest: Parser = (
            CallParser(tool_format(self.tools), self.names) if self.tools else PlainText()
        )
        if self.reasoning:
            return ThoughtsParser(reasoning_format(self.reasoning), rest, self.thinking)
        return rest


class AnswerReader:
    """One choice of an answer as it is read.

    calls   that have begun
    thinks  there may be thoughts in it
    """

    def __init__(self, format: AnswerFormat) -> None:
        self.calls = 0
        self.thinks = bool(format.reasoning) or format.tools == HARMONY
        self._offsets = array("Q")
        self._parser = format.parser()

    def note(self, *offsets: int) -> None:
        """Where the next tokens begin in the text."""
        if self.thinks:
            self._offsets.extend(offsets)

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens that were noted those that begin before the thoughts end: their marks count too."""
        return bisect_left(self._offsets, self._parser.thoughts_end)

    def read(self, text: str, last: bool) -> list[Delta]:
        """What these next characters say; neighbours of one kind are one delta."""
        found: list[Delta] = []
        for delta in self._parser.push(text) + (self._parser.finish() if last else []):
            self.calls += delta.kind == "call"
            if found and found[-1].kind == delta.kind != "call":
                found[-1] = Delta(delta.kind, found[-1].text + delta.text)
            else:
                found.append(delta)
        return found


def read(format: AnswerFormat, text: str) -> list[Delta]:
    """All that stands in a whole answer."""
    parser = format.parser()
    return parser.push(text) + parser.finish()


def marks_of(tools: str, reasoning: str) -> tuple[str, ...]:
    """The texts of the two formats that may be control tokens."""
    marks = tool_format(tools).marks if tools else ()
    if HARMONY in (tools, reasoning):
        reasoning = HARMONY
    return tuple(dict.fromkeys((*marks, *(reasoning_format(reasoning).marks if reasoning else ()))))


def limits_of(format: ReasoningFormat, calls: bool) -> tuple[str, str]:
    """What a model writes in front of its thoughts and behind them. calls: a call may follow."""
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
    """Those of the marks that are control tokens in a vocabulary."""
    found = (control_token(mark, tokenizer) for mark in marks)
    return tuple(token for token in found if token is not None)
