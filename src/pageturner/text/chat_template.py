"""A model's chat template: what turns a conversation into the text of a prompt.

Owns the way from messages to text, and how much work a template may be. Must not know tokens,
requests or HTTP, nor how the work of a template is counted (template_sandbox.py).
"""

from __future__ import annotations

import copy
import datetime
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NoReturn

from pageturner.errors import ClientError, one_line

LONGEST = 1 << 18  # characters of a template's source; real ones have up to 30,000

MODELS_OWN = "the model's chat template"
EACH_CHARACTER = (
    64  # characters that may be made of each character of a conversation, beside the allowance
)


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """The limits of one rendering: rounds of loops and calls; characters made on the way, those of
    the conversation counted apart; characters of the prompt itself."""

    steps: int = 1_000_000
    characters: int = 32 * 1024 * 1024
    prompt: int = 64 * 1024 * 1024


class TemplateTooLong(ClientError):
    """The template did not end within its limits. It may within larger ones."""

    def __init__(self, why: str, name: str = MODELS_OWN) -> None:
        message = f"{name} is too much work for these messages: {why}"
        super().__init__(400, "template_error", message, "messages")


class ChatTemplate:
    """A chat template, in a sandbox: it comes out of a file, or a request, that anyone may have
    written.

    name    what messages call it
    broken  "" or what is wrong with its source; such a template refuses every conversation
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        limits: TemplateLimits = TemplateLimits(),
        *,
        name: str = MODELS_OWN,
    ) -> None:
        import jinja2
        from jinja2 import nodes

        from pageturner.text.template_sandbox import Budget, TemplateEnvironment, spending

        environment = TemplateEnvironment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._limits = limits
        self.source, self.name = source, name
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template, self.broken = None, ""
        if len(source) > LONGEST:
            self.broken = f"{name} has {len(source):,} characters, over {LONGEST:,}"
            return
        compiling = Budget(limits.steps, limits.characters)
        try:
            tree = spending(compiling, lambda: environment.parse(source))
            if tree.find(nodes.EvalContextModifier) is not None:
                raise jinja2.TemplateError(
                    "autoescape, which is computed when it is read, is not supported"
                )
            self._template = spending(compiling, lambda: environment.from_string(tree))
        except (
            Exception
        ) as error:  # of whatever kind: the source decides what fails in the compiler
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            self.broken = one_line(f"{name} cannot be read{line}: {_printable(error)}")

    def within(self, limits: TemplateLimits) -> ChatTemplate:
        """The same template with other limits."""
        other = copy.copy(self)
        other._limits = limits
        return other

    def render(
        self, messages: Sequence[dict[str, Any]], *, generate: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation. ClientError when the template will not take it."""
        from pageturner.text.template_sandbox import Budget, OverBudget, spending

        if self._template is None:
            raise ClientError(400, "template_error", self.broken, "messages")
        template, limits = self._template, self._limits
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        given |= {"messages": messages, "add_generation_prompt": generate}
        said = sum(
            map(len, (one["content"] for one in messages if isinstance(one.get("content"), str)))
        )
        try:
            budget = Budget(limits.steps, limits.characters + EACH_CHARACTER * said)
            text: str = spending(budget, lambda: template.render(given))
        except OverBudget as error:
            raise TemplateTooLong(str(error), self.name) from error
        except Exception as error:  # of whatever kind: the template decides what fails in it
            reason = f"{self.name} refuses these messages: {_printable(error)}"
            raise ClientError(400, "template_error", reason, "messages") from error
        if len(text) > limits.prompt:
            raise TemplateTooLong(f"it makes a prompt of {len(text)} characters", self.name)
        return text


def _printable(error: Exception) -> str:
    """The message of an error, if that can be sent: a source may hold lone surrogates."""
    return str(error).encode("utf-8", "replace").decode()[:2000]


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


# -- habits of templates ---------------------------------------------------------------------------


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
    """The habits of the template with this source; the last few are remembered."""
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
    # of a template that refuses all of it nothing is known
    return TemplateHabits(writes_calls=refused)


def _written(template: ChatTemplate, arguments: Any, no_content: bool, *ids: str) -> str | None:
    """The text that it makes of a message with calls of these ids and arguments; None: it refuses
    them."""
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


# -- a last message that goes on -------------------------------------------------------------------

CONTINUE_FIELD = "continue_final_message"
CONTENT_MARK = "ENDxOFxTHExCONTENT"  # of letters, which templates leave as they are


def continued_prompt(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], **variables: Any
) -> str:
    """The text that the template writes of these messages up to the end of the last one's content.
    ClientError where that is no message of the assistant, or where the template does not write its
    content as it is.

    messages  as `template_messages` makes them
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        message = f"{CONTINUE_FIELD}: the last message must be the assistant's, and text alone"
        raise ClientError(400, "invalid_value", message, "messages")
    whole = template.render(messages, generate=False, **variables)
    mark = CONTENT_MARK
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
    message = f"{CONTINUE_FIELD}: the chat template does not write the content of the last message as it is"
    raise ClientError(400, "template_error", message, CONTINUE_FIELD)
