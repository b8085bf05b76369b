"""The fields of a chat that say how it is rendered and how its answer is read: templates, tools,
thoughts.

Owns what those fields mean together, and the text of a prompt. Must not know the rest of a chat's
fields (chat.py), nor how an answer is written (chat_answer.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pageturner.params import SamplingParams
from pageturner.server.api.base import answer_grammar
from pageturner.server.api.base.body import RequestBody, bad_request
from pageturner.server.api.base.served_model import ServedModel
from pageturner.text import conversation, reasoning
from pageturner.text.answer_format import AnswerFormat
from pageturner.text.chat_template import (
    ChatTemplate,
    TemplateLimits,
    TemplateTooLong,
    texts_of,
)
from pageturner.text.template_choice import HOW_TO_GIVE

GIVEN = "the chat_template of this request"
# what a template is given in any case
RESERVED = frozenset({"messages", "add_generation_prompt", "generate", "self"})


def template_variables(body: RequestBody) -> dict[str, Any]:
    """Return the variables that a chat template gets beside the messages."""
    shown = answer_grammar.tool_choice(body).shown
    return conversation.variables(shown, body.reasoning_effort, body.chat_template_kwargs)


def with_request_template(body: RequestBody, served: ServedModel) -> ServedModel:
    """The model with the template that the request brings, where this server takes one, or with
    its own for tools. TemplateTooLong outside of a text worker: nobody knows how long it takes to
    compile."""
    if body.chat_template is None:
        if answer_grammar.tool_choice(body).shown:
            return served.for_tools
        return served
    if not served.request_templates:
        message = (
            "chat_template is taken by a server that was started with --trust-request-chat-template"
        )
        raise bad_request("unsupported_parameter", message, "chat_template")
    if not served.in_worker:
        raise TemplateTooLong("a text worker compiles it", GIVEN)
    bos, eos = served.tokenizer.bos_token, served.tokenizer.eos_token
    template = ChatTemplate(body.chat_template, bos, eos, TemplateLimits(), name=GIVEN)
    if template.broken:
        raise bad_request("template_error", template.broken, "chat_template")
    return replace(served, template=template)


def chat_prompt(body: RequestBody, served: ServedModel) -> tuple[str, str]:
    """The text of the prompt: the conversation through the template, and the mark of the control
    tokens in it that are text. served: as `with_request_template` has it."""
    if not body.messages:
        raise bad_request("missing_field", "messages is missing or empty", "messages")
    if body.suffix:
        raise bad_request(
            "unsupported_parameter", "suffix is not supported in chats: leave it out", "suffix"
        )
    if served.template is None:
        raise bad_request("no_chat_template", f"{HOW_TO_GIVE}. Or use /v1/completions", "messages")
    variables = template_variables(body)
    for name in variables.keys() & RESERVED:
        raise bad_request(
            "invalid_value", f"chat_template_kwargs may not set {name}", "chat_template_kwargs"
        )
    goes_on = body.continue_final_message is True
    if goes_on and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other: send one"
        raise bad_request("invalid_value", message, "continue_final_message")
    generate = body.add_generation_prompt is not False
    render = partial(
        conversation.prompt_text,
        served.template,
        variables=variables,
        generate=generate,
        goes_on=goes_on,
    )
    if body.parse_special:
        return render(body.messages), ""
    return conversation.marked_prompt(render, body.messages, served.tokenizer, variables)


def echoes(body: RequestBody) -> tuple[str, ...]:
    """The assistant's message that the answer goes on with, where the answer is to begin with
    it."""
    last = (body.messages or [{}])[-1]
    if not body.echo or last.get("role") != "assistant":
        return ()
    return ("".join(texts_of(last.get("content"))),)


def read_answer(
    params: SamplingParams, body: RequestBody, prompt: str, served: ServedModel
) -> tuple[SamplingParams, AnswerFormat | None]:
    """Return the parameters and the format by which answers to this prompt are read."""
    formats = answer_grammar.formats_of(served)
    answer = formats.answer(answer_grammar.tool_choice(body), prompt)
    if answer is not None and body.continue_final_message:
        answer = replace(answer, thinking=_still_thinking(prompt, answer))
    params = answer_grammar.with_budget(params, body, answer, served)
    return formats.divided(params, answer, template_variables(body))


def _still_thinking(prompt: str, answer: AnswerFormat) -> bool:
    """Return whether the message to be continued is inside an unfinished reasoning block."""
    format = reasoning.reasoning_format(answer.reasoning) if answer.reasoning else None
    return format is not None and reasoning.in_thoughts(prompt, format)
