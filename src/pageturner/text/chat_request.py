"""A conversation for `LLM.chat`, understood: its prompt, what its answer is held to, and how that
is read.

Owns how messages, tools and thoughts go together where no server reads them. Must not know how an
answer is computed, nor requests of HTTP (server/api/openai/chat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pageturner.errors import ClientError
from pageturner.formats.tokenizer import Tokenizer
from pageturner.params import SamplingParams
from pageturner.text import answer_format, tools
from pageturner.text.answer_format import AnswerFormat, ChatFormats
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import marked_prompt, prompt_text, prompt_tokens, variables
from pageturner.text.template_choice import HOW_TO_GIVE
from pageturner.text.tools import NOT_ASKED, ToolChoice


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The parts of an answer."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The fields of a chat beside its messages, as in /v1/chat/completions; the parsers as the
    flags of a server of these names."""

    tools: Sequence[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """prompt: its tokens; answer: how the text of its answers is read, None: all of it is
    content."""

    prompt: list[int]
    params: SamplingParams
    answer: AnswerFormat | None


def chat_prompt(
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    given: dict[str, Any] | None = None,
    *,
    goes_on: bool = False,
) -> tuple[str, str]:
    """The prompt that the model's chat template makes of a conversation, as `marked_prompt` has
    it.

    given    its other variables
    goes_on  the answer goes on with the last message, which is the assistant's
    """
    if not messages or not all(isinstance(one, dict) for one in messages):
        message = "messages is a list of at least one {'role': ..., 'content': ...}"
        raise ClientError(
            400, "invalid_value" if messages else "missing_field", message, "messages"
        )
    source = tokenizer.template_for(bool(given and given.get("tools")))
    if source is None:
        raise ClientError(400, "no_chat_template", HOW_TO_GIVE)
    template = ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
    render = partial(prompt_text, template, variables=given or {}, goes_on=goes_on)
    return marked_prompt(render, list(messages), tokenizer, given or {})


def read_chat(
    messages: Sequence[dict[str, Any]],
    params: SamplingParams,
    tokenizer: Tokenizer,
    asked: ChatSettings,
) -> ChatRequest:
    """Read a conversation. ClientError for what is wrong with it."""
    choice = tools.read(list(asked.tools or ()), asked.tool_choice, asked.parallel_tool_calls)
    given = variables(choice.shown, asked.reasoning_effort, asked.chat_template_kwargs)
    text, mark = chat_prompt(messages, tokenizer, given)
    formats = ChatFormats(
        tokenizer,
        tokenizer.template_for(bool(choice.shown)),
        asked.tool_call_parser,
        asked.reasoning_parser,
    )
    params = _held(params, choice, formats)
    params, answer = formats.divided(params, formats.answer(choice, text), given)
    prompt = prompt_tokens(tokenizer, text, mark, special=False)
    return ChatRequest(prompt, params, answer)


def _held(params: SamplingParams, choice: ToolChoice, formats: ChatFormats) -> SamplingParams:
    """The parameters with the grammar of the tools."""
    if choice is NOT_ASKED:
        return params
    if params.structured_outputs is not None:
        message = "structured_outputs and tools both say what the answer must match: give one"
        raise ClientError(400, "invalid_value", message, "structured_outputs")
    return replace(
        params, structured_outputs=formats.grammar(choice, None, "name its tool_call_parser")
    )


def read_answer(answer: AnswerFormat | None, text: str, finish: str | None) -> ReadAnswer:
    """The text of an answer, taken apart. finish: why it ended."""
    if answer is None:
        return ReadAnswer(text)
    content, thoughts = "", ""
    calls: list[ToolCall] = []
    for kind, said in answer_format.read(answer, text, finish != "stop"):
        if kind == "content":
            content += said
        elif kind == "reasoning":
            thoughts += said
        elif kind == "call":
            calls.append(ToolCall(said, ""))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + said)
    return ReadAnswer(content, thoughts, tuple(calls))
