"""The fields of a chat that say how it is rendered and how its answer is read: templates, tools, thoughts.

Owns what those fields mean together. Must not know the rest of a chat's fields (chat.py), nor how an answer
is written (chat_answer.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pageturner.params import SamplingParams
from pageturner.serve import answer_grammar
from pageturner.serve.body import RequestBody
from pageturner.serve.call import ServedModel
from pageturner.text import conversation
from pageturner.text.answer_format import AnswerFormat


def template_variables(body: RequestBody) -> dict[str, Any]:
    """What a chat template is given beside the messages."""
    shown = answer_grammar.tool_choice(body).shown
    return conversation.variables(shown, body.reasoning_effort, body.chat_template_kwargs)


def read_answer(
    params: SamplingParams, body: RequestBody, prompt: str, served: ServedModel
) -> tuple[SamplingParams, AnswerFormat | None]:
    """How the answers to this prompt are read, and the parameters with a grammar that lets them think,
    unless the client has said that they shall not and the template has not begun them all the same."""
    formats = answer_grammar.formats_of(served)
    answer = formats.answer(answer_grammar.tool_choice(body), prompt)
    params = answer_grammar.with_budget(params, body, answer, served)
    begun = answer is not None and answer.thinking
    if template_variables(body).get("enable_thinking") is False and not begun:
        return params, answer
    grammar = formats.behind_thoughts(params.structured_outputs, answer)
    return replace(params, structured_outputs=grammar), answer
