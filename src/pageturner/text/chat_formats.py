"""How one model writes calls and thoughts, and what its answers are held to because of that.

Owns the choice of formats, by chat template or by name, for servers and `LLM` alike. Must not know the fields
of a request, nor how a grammar is written (tool_grammar.py) or a text is read (answer_format.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.errors import ClientError
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text import reasoning, tool_formats
from pageturner.text.answer_format import (
    HARMONY,
    AnswerFormat,
    control_token,
    control_tokens,
    marks_of,
)
from pageturner.text.reasoning import ReasoningFormat
from pageturner.text.tool_formats import ToolFormat
from pageturner.text.tool_grammar import check_tools, tool_grammar, with_thoughts
from pageturner.text.tools import ToolChoice


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """source: of the model's chat template, None: it has none. The parsers: names of formats; "auto": as the
    template says; "none": thoughts are content."""

    tokenizer: Tokenizer
    source: str | None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    @property
    def tools(self) -> ToolFormat | None:
        """In which the model calls tools."""
        if self.tool_call_parser != "auto":
            return tool_formats.tool_format(self.tool_call_parser)
        return tool_formats.recognised(self.source)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """In which it thinks."""
        if self.reasoning_parser == "none":
            return None
        if self.reasoning_parser != "auto":
            return reasoning.reasoning_format(self.reasoning_parser)
        return reasoning.recognised(self.source)

    def grammar(self, choice: ToolChoice, answer: str | None, how: str) -> str:
        """What an answer with these tools must match. ClientError for what is wrong with them.

        answer  the grammar of an answer that is no call; None: any text
        how     the setting that names the format of calls, for who has to be told of it
        """
        format = self.tools
        if format is None:
            names = ", ".join(name for name in tool_formats.NAMES if name != tool_formats.COMMON)
            message = (
                f"the model's chat template does not say how it calls tools: {how} {tool_formats.COMMON},"
                f" which many models write, or one of {names}"
            )
            raise ClientError(400, "unsupported_parameter", message, "tools")
        check_tools(format, choice)
        if answer is not None and format.name == HARMONY:
            message = "this model cannot have tools and a response_format: send one, or tool_choice required"
            raise ClientError(400, "unsupported_parameter", message, "response_format")
        return tool_grammar(format, choice, self.control, answer or "")

    def answer(self, choice: ToolChoice, prompt: str) -> AnswerFormat | None:
        """How the text of the answers to this prompt is read; None: all of it is content."""
        thoughts, calls = self.reasoning, self.tools if choice.tools else None
        if thoughts is None and calls is None:
            return None
        names = calls.name if calls else "", thoughts.name if thoughts else ""
        return AnswerFormat(
            tools=names[0],
            reasoning=names[1],
            thinking=thoughts is not None and reasoning.opened(thoughts, prompt),
            named=choice.named,
            shown=control_tokens(marks_of(*names), self.tokenizer),
            names=tuple(tool.name for tool in choice.tools) if calls and calls.at_start else (),
        )

    def behind_thoughts(self, grammar: str | None, format: AnswerFormat | None) -> str | None:
        """The grammar of an answer that may think before it: thoughts are any text."""
        if grammar is None or format is None or not format.reasoning or format.tools == HARMONY:
            return grammar
        thoughts = reasoning.reasoning_format(format.reasoning)
        return with_thoughts(grammar, thoughts, format.thinking, self.control)

    def control(self, mark: str) -> int | None:
        """The control token that a mark is, if it is one."""
        return control_token(mark, self.tokenizer)
