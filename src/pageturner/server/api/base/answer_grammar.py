"""The grammar that an answer must match, from whichever field asks for it: `response_format`,
`structured_outputs` or `tools`.

Owns how these fields go together, and in which formats this server's model writes calls and
thoughts. Must not know how a grammar is written (text/), nor how a conversation becomes a prompt
(chat.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial

import msgspec

from pageturner.params import SamplingParams
from pageturner.server.api.base.body import RequestBody, bad_request
from pageturner.server.api.base.served_model import ServedModel
from pageturner.text import output_format, reasoning, tools
from pageturner.text.answer_format import AnswerFormat, ChatFormats, limits_of
from pageturner.text.parameters import check_number
from pageturner.text.tools import ToolChoice

FLAG = "start the server with --tool-call-parser"


def asks(body: RequestBody) -> bool:
    """Return whether any of these fields needs a grammar."""
    called = bool(body.tools) and body.tool_choice != "none"
    return called or output_format.asks(body.response_format, body.structured_outputs)


def asked(body: RequestBody) -> bytes | None:
    """A name for what they ask for, the same for the same fields; None: they ask for nothing."""
    if not asks(body):
        return None
    fields = (
        body.response_format,
        body.structured_outputs,
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        body.chat_template,
    )
    return hashlib.blake2b(msgspec.json.encode(fields), digest_size=16).digest()


def grammar_of(body: RequestBody, served: ServedModel) -> str | None:
    """The grammar that they ask for, or None. ClientError for what is wrong with them."""
    choice = tool_choice(body)
    if not choice.tools:
        return output_format.grammar_of(body.response_format, body.structured_outputs)
    if body.structured_outputs:
        message = "structured_outputs and tools both say what the answer must match: send one"
        raise bad_request("invalid_value", message, "structured_outputs")
    answer = None if choice.required else output_format.grammar_of(body.response_format, None)
    return formats_of(served).grammar(choice, answer, FLAG)


def tool_choice(body: RequestBody) -> ToolChoice:
    """Return the tool choice that the fields about tools ask for."""
    return tools.read(body.tools, body.tool_choice, body.parallel_tool_calls)


def formats_of(served: ServedModel) -> ChatFormats:
    """Return the formats in which the served model writes tool calls and reasoning."""
    source = None if served.template is None else served.template.source
    return ChatFormats(served.tokenizer, source, served.tool_call_parser, served.reasoning_parser)


def with_budget(
    params: SamplingParams, body: RequestBody, format: AnswerFormat | None, served: ServedModel
) -> SamplingParams:
    """The parameters with the budget of thoughts that the client sets, under one of its two
    names."""
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


def takes_budget(served: ServedModel) -> bool:
    """Return whether a reasoning budget can be set for this model."""
    return formats_of(served).reasoning is not None


def refuse_tools(body: RequestBody) -> None:
    """ClientError where an API that has neither messages, calls nor thoughts is given what is about
    them."""
    given = {
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "max_reasoning_tokens": body.max_reasoning_tokens is not None,
        "thinking_token_budget": body.thinking_token_budget is not None,
        "chat_template": body.chat_template is not None,
        "continue_final_message": bool(body.continue_final_message),
    }
    for name in (name for name, asked in given.items() if asked):
        raise bad_request(
            "unsupported_parameter", f"{name} is for chats: /v1/chat/completions", name
        )
