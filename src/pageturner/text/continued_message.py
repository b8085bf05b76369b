"""A conversation whose last message goes on: the prompt ends where the content of that message does.

Owns how that place is found in what a template writes: by a mark behind the content. Must not know where the
messages come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pageturner.errors import ClientError
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.reasoning import ReasoningFormat

FIELD = "continue_final_message"
MARK = "ENDxOFxTHExCONTENT"  # of letters, which templates leave as they are


def continued_prompt(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], **variables: Any
) -> str:
    """What the template writes of these messages up to the end of the last one's content. ClientError where
    that is no message of the assistant, or where the template does not write its content as it is.

    messages  as `template_messages` makes them
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        message = f"{FIELD}: the last message must be the assistant's, and text alone"
        raise ClientError(400, "invalid_value", message, "messages")
    whole = template.render(messages, generate=False, **variables)
    mark = MARK
    while mark in whole:
        mark += "x"
    marked = template.render(
        [*messages[:-1], {**last, "content": last["content"] + mark}], generate=False, **variables
    )
    before, found, _ = marked.rpartition(mark)
    for prompt in (
        before,
        before.rstrip(),
    ):  # many templates take white space at the end of content away
        if found and whole.startswith(prompt):
            return prompt
    message = f"{FIELD}: the chat template does not write the content of the last message as it is"
    raise ClientError(400, "template_error", message, FIELD)


def in_thoughts(content: str, format: ReasoningFormat) -> bool:
    """Whether a message of this content, which goes on, has begun thoughts and not ended them."""
    begun = content.rfind(format.begin) if format.begin else -1
    return begun >= 0 and format.end not in content[begun:]
