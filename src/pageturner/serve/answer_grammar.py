"""What an answer must match, whatever field asks for it: `response_format`, `structured_outputs`, `tools`.

Owns how these fields go together, and in which formats this server's model writes calls and thoughts. Must
not know how a grammar is written (text/), nor how a conversation becomes a prompt (chat.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pageturner.params import SamplingParams
from pageturner.serve.body import RequestBody, bad_request
from pageturner.text import output_format, reasoning, tool_formats, tools
from pageturner.text.answer_format import (
    HARMONY,
    AnswerFormat,
    control_token,
    control_tokens,
    limits_of,
    marks_of,
)
from pageturner.text.parameters import check_number
from pageturner.text.reasoning import ReasoningFormat
from pageturner.text.tool_formats import ToolFormat
from pageturner.text.tool_grammar import Control, check_tools, tool_grammar, with_thoughts
from pageturner.text.tools import ToolChoice

if TYPE_CHECKING:
    from pageturner.serve.call import ServedModel

FLAG = "start the server with --tool-call-parser"


def asks(body: RequestBody) -> bool:
    """Whether these fields ask for a grammar."""
    called = bool(body.tools) and body.tool_choice != "none"
    return called or output_format.asks(body.response_format, body.structured_outputs)


def asked(body: RequestBody) -> bytes | None:
    """A name for what they ask for, the same for the same fields; None: they ask for nothing."""
    if not asks(body):
        return None
    fields = (
        body.response_format, body.structured_outputs, body.tools, body.tool_choice, body.parallel_tool_calls,
        body.chat_template,
    )  # fmt: skip
    return hashlib.blake2b(msgspec.json.encode(fields), digest_size=16).digest()


def grammar_of(body: RequestBody, served: ServedModel) -> str | None:
    """The grammar that they ask for, or None. ClientError for what is wrong with them."""
    choice = tool_choice(body)
    if not choice.tools:
        return output_format.grammar_of(body.response_format, body.structured_outputs)
    if body.structured_outputs:
        message = "structured_outputs and tools both say what the answer must match: send one"
        raise bad_request("invalid_value", message, "structured_outputs")
    format = tool_format_of(served)
    if format is None:
        names = ", ".join(tool_formats.NAMES)
        message = f"it is not known how this model calls tools: {FLAG}, one of {names}"
        raise bad_request("unsupported_parameter", message, "tools")
    check_tools(format, choice)
    answer = None if choice.required else output_format.grammar_of(body.response_format, None)
    if answer is not None and format.name == HARMONY:
        message = "this model cannot have tools and a response_format: send one, or tool_choice required"
        raise bad_request("unsupported_parameter", message, "response_format")
    return tool_grammar(format, choice, _control(served), answer or "")


def tool_choice(body: RequestBody) -> ToolChoice:
    """What the fields about tools ask for."""
    return tools.read(body.tools, body.tool_choice, body.parallel_tool_calls)


def tool_format_of(served: ServedModel) -> ToolFormat | None:
    """In which the model of this server calls tools."""
    if served.tool_call_parser != "auto":
        return tool_formats.tool_format(served.tool_call_parser)
    return tool_formats.recognised(served.template and served.template.source)


def reasoning_format_of(served: ServedModel) -> ReasoningFormat | None:
    """In which it thinks."""
    if served.reasoning_parser == "none":
        return None
    if served.reasoning_parser != "auto":
        return reasoning.reasoning_format(served.reasoning_parser)
    return reasoning.recognised(served.template and served.template.source)


def answer_format(choice: ToolChoice, prompt: str, served: ServedModel) -> AnswerFormat | None:
    """How the text of the answers to this prompt is read; None: all of it is content."""
    thoughts, calls = reasoning_format_of(served), tool_format_of(served) if choice.tools else None
    if thoughts is None and calls is None:
        return None
    names = calls.name if calls else "", thoughts.name if thoughts else ""
    return AnswerFormat(
        tools=names[0],
        reasoning=names[1],
        thinking=thoughts is not None and reasoning.opened(thoughts, prompt),
        named=choice.named,
        shown=control_tokens(marks_of(*names), served.tokenizer),
        names=tuple(tool.name for tool in choice.tools) if calls and calls.at_start else (),
    )


def behind_thoughts(grammar: str | None, format: AnswerFormat | None, served: ServedModel) -> str | None:
    """The grammar of an answer that may think before it: thoughts are any text."""
    if grammar is None or format is None or not format.reasoning or format.tools == HARMONY:
        return grammar
    thoughts = reasoning.reasoning_format(format.reasoning)
    return with_thoughts(grammar, thoughts, format.thinking, _control(served))


def with_budget(
    params: SamplingParams, body: RequestBody, format: AnswerFormat | None, served: ServedModel
) -> SamplingParams:
    """The parameters with the budget of thoughts that the client sets, under one of its two names."""
    names = ("thinking_token_budget", "max_reasoning_tokens")
    name = next((name for name in names if getattr(body, name) is not None), None)
    if name is None:
        return params
    check_number("max_thinking_tokens", getattr(body, name), name)
    if format is None or not format.reasoning:
        message = "it is not known how this model thinks: start the server with --reasoning-parser"
        raise bad_request("unsupported_parameter", message, name)
    begin, end = limits_of(reasoning.reasoning_format(format.reasoning), bool(format.tools))
    encode = partial(served.tokenizer.encode, add_special=False, parse_special=True)
    return replace(
        params,
        max_thinking_tokens=getattr(body, name),
        thinking_begin=() if format.thinking else tuple(encode(begin)),
        thinking_end=tuple(encode(end)),
    )


def takes_budget(body: RequestBody, served: ServedModel) -> bool:
    """Whether the thoughts of an answer to this can have a budget."""
    if reasoning_format_of(served) is None:
        return False
    calls = tool_format_of(served) if tool_choice(body).tools else None
    return calls is None or calls.name != HARMONY


def _control(served: ServedModel) -> Control:
    return lambda mark: control_token(mark, served.tokenizer)


def refuse_tools(body: RequestBody) -> None:
    """ClientError where an API that has neither messages, calls nor thoughts is given what is about them."""
    given = {
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "max_reasoning_tokens": body.max_reasoning_tokens is not None,
        "thinking_token_budget": body.thinking_token_budget is not None,
        "chat_template": body.chat_template is not None,
        "continue_final_message": bool(body.continue_final_message),
    }
    for name in (name for name, asked in given.items() if asked):
        raise bad_request("unsupported_parameter", f"{name} is for chats: /v1/chat/completions", name)
