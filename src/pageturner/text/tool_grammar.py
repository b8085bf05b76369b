"""Grammars that hold an answer to the calls of its tools: from the first token on where a call is
required, else from the mark on that begins a call. Around calls every text is possible.

Owns how a format (tool_formats.py) becomes a grammar in llguidance's Lark dialect. Must not know
requests, nor how a grammar is compiled and followed (executor/grammar.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pageturner.errors import ClientError
from pageturner.text.argument_rules import ArgumentRules, Unwritable
from pageturner.text.call_parser import (
    ARGUMENTS,
    ID,
    INDEX,
    NAME,
    SPACE,
    first_text,
    parts_of,
    triggers,
)
from pageturner.text.grammar.check import OPTIONS, check_nesting, checked
from pageturner.text.grammar.json_schema import schema_text
from pageturner.text.harmony import ENDS
from pageturner.text.reasoning import ReasoningFormat
from pageturner.text.structured_outputs import literal_regex
from pageturner.text.tool_formats import JSON, ToolFormat, to_json
from pageturner.text.tools import Tool, ToolChoice

Control = Callable[[str], int | None]  # the control token that a mark is, if it is one
_ANYTHING = {"type": "object"}
_TERMINALS = r"""
WS: /[\x20\x0A\x0D\x09]{1,8}/
ID: /[A-Za-z0-9]{9}/
INDEX: /[0-9]{1,2}/
"""


def _text_without(name: str, *marks: str) -> str:
    """The terminal of this name: any text in which none of these marks is spelled. Whoever reads an
    answer reads its text, and cannot tell a mark that is a token of its own from one that is
    spelled."""
    spelled = "|".join(map(literal_regex, marks))
    return f"{name}: /(?s:.*)/ & ~(/(?s:.*)({spelled})(?s:.*)/)"


def no_control(mark: str) -> None:
    """The marks of a vocabulary in which all are plain text: none is a control token."""


def tool_grammar(format: ToolFormat, choice: ToolChoice, control: Control, answer: str = "") -> str:
    """The grammar that an answer with these tools must match. The schemas are taken as good:
    `check_tools`.

    answer  the grammar of an answer that is no call; "": any text
    """
    if not choice.required:
        choice = replace(choice, tools=(*choice.tools, *_direct(format, choice)))
    write = _Writer(format, choice, control)
    if not format.calls:
        return _harmony(write)
    calls = [f"call{i}: {write.parts(format.calls[0], i)}" for i in range(len(choice.tools))]
    names = " | ".join(f"call{i}" for i in range(len(choice.tools)))
    if choice.required:
        start = [f"start: {write.block()}"]
    elif answer:
        start = [f"start: %lark {{\n{answer}\n}} | {write.block()}"]
    elif format.at_start:
        start = _at_start(write)
    else:
        start = _anywhere(write)
    return "\n".join((OPTIONS, *start, f"call: {names}", *calls, write.arguments(), _TERMINALS))


def _direct(format: ToolFormat, choice: ToolChoice) -> Iterable[Tool]:
    """Calls by which the model says that it answers, which it may write as those of tools."""
    names = {tool.name for tool in choice.tools}
    return (Tool(name, _ANYTHING, False, {}) for name in format.direct if name not in names)


def check_tools(format: ToolFormat, choice: ToolChoice) -> None:
    """ClientError where a schema of a tool is none, or is more than a grammar can hold to the
    letter."""
    try:
        _check(format, choice)
    except ClientError as error:
        reason = error.message.partition(": ")[2] or error.message
        name = _culprit(format, choice)
        whose = f"the parameters of {name!r}" if name else "all of them together"
        raise _refused(error.code, f"{whose}: {reason}") from None


def _refused(code: str, reason: str) -> ClientError:
    return ClientError(400, code, f"tools: {reason}", "tools")


def _check(format: ToolFormat, choice: ToolChoice) -> None:
    grammar = tool_grammar(format, replace(choice, required=True), no_control)
    check_nesting(grammar, "{", "invalid_schema")
    checked(grammar, "invalid_schema")


def _culprit(format: ToolFormat, choice: ToolChoice) -> str:
    """The first tool whose schema is refused on its own."""
    for tool in choice.tools:
        try:
            _check(format, replace(choice, tools=(tool,)))
        except ClientError:
            return tool.name
    return ""


def with_thoughts(grammar: str, format: ReasoningFormat, thinking: bool, control: Control) -> str:
    """The same grammar for an answer that may think first. thinking: the prompt has begun the
    thoughts."""
    if not format.begin:
        return _harmony_answer(grammar, control)
    first, *rest = parts_of(format.begin.strip().replace(" ", "␣"), format.marks)
    last, *left = parts_of(format.end, format.marks)
    token, end = control(first), control(last)
    behind = " ".join(_mark(part, control) for part in rest)
    begins = "think_begin" if token is None else f"BEFORE? <[{token}]> {behind}"
    ends = "think_end" if end is None else f"THOUGHT <[{end}]>"
    ends = " ".join((ends, *(_mark(part, control) for part in left), "WSP?"))
    thoughts = ends if thinking else f"({begins} {ends})?"
    opens = _either((begin for begin, _ in format.answer), format, control)
    closes = _either((close for _, close in format.answer), format, control)
    start = " ".join(filter(None, (thoughts, opens, "answer", closes)))
    return (
        f"{OPTIONS}start: {start}\n"
        f"think_begin[lazy]: /[ \\t\\r\\n]{{0,4}}{literal_regex(format.begin.strip())}/\n"
        "BEFORE: /[ \\t\\r\\n]{1,4}/\n"
        f"think_end[lazy]: /(?s:.*){literal_regex(last)}/\n"
        f"{_text_without('THOUGHT', format.end)}\nWSP: /\\s{{1,8}}/\n"
        f"{_ANSWER}{grammar}\n}}\n"
    )


def _either(texts: Iterable[str], format: ReasoningFormat, control: Control) -> str:
    """One of the texts that begin with a control token, or none: the others are text anyway."""
    ways = []
    for text in dict.fromkeys(texts):
        parts = parts_of(text.replace(" ", "␣"), format.marks)
        if parts and control(parts[0]) is not None:
            ways.append(" ".join(_mark(part, control) for part in parts))
    return f"({' | '.join(ways)})?" if ways else ""


_ANSWER = "answer: %lark {\n"


def without_thoughts(grammar: str) -> str:
    """The grammar that `with_thoughts` was given, if it has made this."""
    before, _, answer = grammar.partition(_ANSWER)
    return (
        answer.removesuffix("\n}\n")
        if before.startswith(f"{OPTIONS}start: ") and answer
        else grammar
    )


def _harmony_answer(grammar: str, control: Control) -> str:
    """The rule of an answer on the final channel, behind thoughts on theirs."""
    channel, message, start = (
        _mark(text, control) for text in ("<|channel|>", "<|message|>", "<|start|>")
    )
    thoughts = f'({channel} ("analysis" | "commentary") {message} thought {start} "assistant")*'
    return (
        f'{OPTIONS}start: {thoughts} {channel} "final" {message} answer\n'
        f"{_message_end(control, 'thought')}\n{_ANSWER}{grammar}\n}}\n"
    )


def _mark(text: str, control: Control) -> str:
    token = control(text)
    return to_json(text) if token is None else f"<[{token}]>"


@dataclass(frozen=True, slots=True)
class _Writer:
    """Patterns of a format as symbols of a grammar."""

    format: ToolFormat
    choice: ToolChoice
    control: Control

    def parts(self, pattern: str, tool: int = 0, skip: int = 0) -> str:
        """The pattern, with the name and the arguments of a tool, without so many parts at its
        beginning."""
        return self.symbols(parts_of(pattern, self.format.marks)[skip:], tool)

    def symbols(self, parts: tuple[str, ...], tool: int = 0) -> str:
        made, text = [], ""
        for part in (*parts, ""):
            control = self.control(part) if part in self.format.marks else None
            if part == NAME:
                text += self.choice.tools[tool].name
            elif part and control is None and part not in _SYMBOLS:
                text += part
            else:
                made += [to_json(text)] if text else []
                text = ""
                made += [] if not part else [_SYMBOLS.get(part) or f"<[{control}]>"]
        return " ".join(made).replace(_ARGUMENTS, f"args{tool}")

    def more(self) -> str:
        """The calls behind the first one."""
        if not (self.choice.several and self.format.several):
            return ""
        return f"({self.parts(self.format.between) if self.format.in_list else 'WS?'} call)*"

    def block(self) -> str:
        """All calls of an answer."""
        opening, closing = self.parts(self.format.opening), self.parts(self.format.closing)
        return f"{opening} call {self.more()} {closing}"

    def arguments(self) -> str:
        """The rules of the arguments of each tool."""
        if self.format.arguments == JSON:
            return "\n".join(
                f"args{i}: %json {_schema(tool)}" for i, tool in enumerate(self.choice.tools)
            )
        rules = ArgumentRules(self.format, self.parts)
        try:
            made = [
                f"args{i}: {rules.arguments(tool.parameters, tool.strict)}"
                for i, tool in enumerate(self.choice.tools)
            ]
        except Unwritable as error:
            raise _refused(
                "unsupported_schema", f"{error} cannot be held in calls of this model"
            ) from None
        except (RecursionError, TypeError, AttributeError, ValueError):
            raise _refused("invalid_schema", "it is no JSON schema") from None
        return "\n".join((*made, rules.text()))


_ARGUMENTS = "$"
_SYMBOLS = {SPACE: "WS?", ARGUMENTS: _ARGUMENTS, ID: "ID", INDEX: "INDEX"}


def _schema(tool: Tool) -> str:
    """A tool's schema for llguidance. What is not strict is held as far as that can be."""
    try:
        return schema_text(tool.parameters, tool.strict)
    except (ValueError, RecursionError):
        raise _refused("invalid_schema", "it cannot be written as JSON") from None


def _anywhere(write: _Writer) -> list[str]:
    """A call is told from text by a mark that begins it. From there on it is held."""
    format, choice = write.format, write.choice
    patterns = [format.opening] if format.opening else []
    patterns += [call for call in format.calls if first_text(parts_of(call)) in triggers(format)]
    begun: dict[str, tuple[str, str]] = {}
    for pattern in patterns:
        parts = parts_of(pattern, format.marks)
        mark, token = parts[0], write.control(parts[0])
        if token is None:
            mark = first_text(parts)
        skip = len(list(itertools.takewhile(mark.startswith, itertools.accumulate(parts))))
        if mark in begun:
            continue
        if pattern == format.opening:
            rest = (
                f"{write.symbols(parts[skip:])} call {write.more()} {write.parts(format.closing)}"
            )
        else:
            ways = (write.symbols(parts[skip:], i) for i in range(len(choice.tools)))
            rest = f"({' | '.join(ways)})" + (f" {write.more()}" if format.opening else "")
        n = len(begun) or ""
        begun[mark] = f"until{n}" if token is None else f"FREE <[{token}]>", rest
    rules, starts = [_text_without("FREE", *begun)], []
    for i, (mark, (until, rest)) in enumerate(begun.items()):
        n = i or ""
        starts.append(f"{until} begun{n}")
        rules += [f"begun{n}: {rest}", f"until{n}[lazy]: FREE /{literal_regex(mark)}/"]
    start = " | ".join(starts)
    again = choice.several and not format.in_list
    return [f"start: ({start})* FREE" if again else f"start: FREE | {start}", *rules]


def _at_start(write: _Writer) -> list[str]:
    """Nothing but its form tells a call from text: an answer that begins as a call does, up to the
    name of a tool, is one. In some formats a call may stand behind text too."""
    format, choice = write.format, write.choice
    heads: list[str] = []
    firsts: list[str] = []
    texts: list[str] = []
    for call in format.calls:
        parts = parts_of(format.opening + call, format.marks)
        if ARGUMENTS not in parts:
            continue
        control = write.control(parts[0]) if parts[0] in format.marks else None
        spelled = parts[0]
        parts = parts if control is None else parts[1:]
        cut = parts.index(NAME) + 2  # with what ends the name
        behind_text = format.anywhere and spelled != NAME
        for i, tool in enumerate(choice.tools):
            head = f"HEAD{len(heads)}"
            heads.append(f"{head}: /\\s*{_regex(parts[:cut], tool)}/")
            text = head if control is None else rf"/\s*{literal_regex(spelled)}/ {head}"
            if behind_text:
                text = f"/(?s:.*)/ {head if control is None else f'/{literal_regex(spelled)}/'}"
            texts.append(text)
            if control is not None:
                head = f"{'TEXT ' if behind_text else ''}<[{control}]> {head}"
            elif behind_text:
                heads.append(f"{head.lower()}[lazy]: TEXT {head}")
                head = head.lower()
            firsts.append(f"{head} {write.symbols(parts[cut:], i)}")
    return [
        f"start: TEXT | first {write.more()} {write.parts(format.closing)}",
        f"TEXT: /(?s:.*)/ & ~(HEADS /(?s:.*)/)\nHEADS: {' | '.join(texts)}",
        "first: " + " | ".join(firsts),
        *heads,
    ]


def _regex(parts: tuple[str, ...], tool: Tool) -> str:
    """The beginning of a call of this tool."""
    texts = [tool.name if part == NAME else part for part in parts]
    return "".join(r"\s*" if text == SPACE else literal_regex(text) for text in texts)


def _harmony(write: _Writer) -> str:
    """Messages on channels, the last of which may go to a function, or must. Its name stands behind
    the channel or, as their template writes it in messages behind another one, in front of it.
    There are thoughts once, at the beginning: so a budget ends them."""
    channel, message, constrain, begin = (
        _mark(text, write.control)
        for text in ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>")
    )
    as_json = (
        f'(WS? {constrain} "json" | WS "json"?)? {message}'  # never "json" as part of the name
    )
    more = f'{message} behind {begin} "assistant"'
    rules = ["before: thoughts said* | said+"]
    rules += [f'thoughts: {channel} "analysis" {more}', f'said: {channel} "commentary" {more}']
    for i, tool in enumerate(write.choice.tools):
        to = f"to=functions.{tool.name}"
        rules.append(f"call{i}: {channel} {to_json(f'commentary {to}')} {as_json} args{i}")
        rules.append(f'late{i}: {to_json(f" {to}")} {channel} "commentary" {as_json} args{i}')
    calls, late = (
        " | ".join(f"{name}{i}" for i in range(len(write.choice.tools)))
        for name in ("call", "late")
    )
    last = "" if write.choice.required else f' | {channel} ("final" | "commentary") {message} SAID'
    start = [f"start: last | before (last | {late})", f"last: {calls}{last}"]
    behind = _message_end(write.control, "behind")
    return "\n".join((OPTIONS, *start, *rules, behind, write.arguments(), _TERMINALS))


def _message_end(control: Control, name: str) -> str:
    """The rule of this name: the text of a message of harmony and the mark behind it. SAID is text
    alone."""
    token, said = control("<|end|>"), _text_without("SAID", *ENDS)
    if token is not None:
        return f"{name}: SAID <[{token}]>\n{said}"
    return f"{name}[lazy]: SAID /{literal_regex('<|end|>')}/\n{said}"
