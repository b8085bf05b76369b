"""What a chat template does with the calls of an assistant: found by giving it one.

Templates of one family differ: most write arguments themselves and want an object, some put a text between
two others and fail with an object, or write it as Python does; some know nothing of calls, and their models
have them in the content. Owns that trial. Must not know the messages of a request (conversation.py).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from pageturner.errors import ClientError
from pageturner.text.chat_template import ChatTemplate

MAX_KNOWN = 8  # templates
_ARGUMENTS = {"sought_name": "sought_value"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "sought",
        "description": "Seeks.",
        "parameters": {"type": "object", "properties": {"sought_name": {"type": "string"}}},
    },
}
_TEXT = json.dumps(_ARGUMENTS)
_ID, _OTHER = "abcdefghi", "abcdefghj"  # which Mistral's templates take


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """text_arguments  it wants arguments as a text of JSON, not as an object
    no_content      a message that only calls must have no content at all, not an empty one
    writes_calls    it writes `tool_calls`; else they are lost unless the content has them
    short_ids       it takes no ids of calls but those of nine letters and digits
    one_call        it writes one call of a message, or refuses several
    """

    text_arguments: bool = False
    no_content: bool = False
    writes_calls: bool = True
    short_ids: bool = False
    one_call: bool = False


_known: OrderedDict[str, TemplateHabits] = OrderedDict()


def habits_of(source: str) -> TemplateHabits:
    """Those of the template with this source; the last few are remembered."""
    habits = _known.get(source)
    return learn(ChatTemplate(source)) if habits is None else habits


def learn(template: ChatTemplate) -> TemplateHabits:
    """Find out how this template does it, and remember it."""
    habits = _known[template.source] = _found(template)
    while len(_known) > MAX_KNOWN:
        _known.popitem(last=False)
    return habits


def _found(template: ChatTemplate) -> TemplateHabits:
    refused = True
    for text_arguments, no_content in product((False, True), repeat=2):
        call = partial(_written, template, _TEXT if text_arguments else _ARGUMENTS, no_content)
        written = call(_ID)
        refused &= written is None
        if written is None or "sought_value" not in written or "{'sought_name'" in written:
            continue
        if not text_arguments or _TEXT in written:
            return TemplateHabits(
                text_arguments,
                no_content,
                short_ids=call("call_0") is None,
                one_call=(call(_ID, _OTHER) or "").count("sought_value") < 2,
            )
    return TemplateHabits(
        writes_calls=refused
    )  # of a template that refuses all of it nothing is known


def _written(template: ChatTemplate, arguments: Any, no_content: bool, *ids: str) -> str | None:
    """What it makes of a message with calls of these ids and arguments; None: it refuses them."""
    function = {"name": "sought", "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None if no_content else "", "tool_calls": calls},
        *({"role": "tool", "content": "y", "tool_call_id": id, "name": "sought"} for id in ids),
    ]
    try:
        return template.render(messages, tools=[_TOOL])
    except ClientError:
        return None
