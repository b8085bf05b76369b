"""A model's chat template: what turns a conversation into the text of a prompt.

Owns the way from messages to text, and how much work a template may be. Must not know tokens,
requests or HTTP, nor how the work of a template is counted (template_sandbox.py).
"""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NoReturn

from pageturner.errors import ClientError, lacks_memory, one_line

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

    name      what messages call it
    broken    "" or what is wrong with its source; such a template refuses every conversation
    tool_use  the template that the same model has for conversations with tools, if it has one
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
        self._limits = limits
        self.tool_use: ChatTemplate | None = None
        self.source, self.name = source, name
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template, self.broken = None, ""
        if len(source) > LONGEST:
            self.broken = f"{name} has {len(source):,} characters, over {LONGEST:,}"
            return
        self._template, why = _compiled(source)
        if why:
            self.broken = one_line(f"{name} cannot be read{why}")

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
        said = sum(len(text) for one in messages for text in texts_of(one.get("content")))
        try:
            budget = Budget(limits.steps, limits.characters + EACH_CHARACTER * said)
            text: str = spending(budget, lambda: template.render(given))
        except OverBudget as error:
            raise TemplateTooLong(str(error), self.name) from error
        except Exception as error:  # of whatever kind: the template decides what fails in it
            if lacks_memory(error):
                raise
            reason = f"{self.name} refuses these messages: {_printable(error)}"
            raise ClientError(400, "template_error", reason, "messages") from error
        if len(text) > limits.prompt:
            raise TemplateTooLong(f"it makes a prompt of {len(text)} characters", self.name)
        return text


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[Any, str]:
    """The template of a source, or None and why it cannot be read. Compiling is most of the work
    of a template that is read for the first time, and several ask for the same."""
    import jinja2
    from jinja2 import nodes

    from pageturner.text.template_sandbox import Budget, TemplateEnvironment, spending

    environment = TemplateEnvironment()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    limits = TemplateLimits()
    compiling = Budget(limits.steps, limits.characters)
    try:
        tree = spending(compiling, lambda: environment.parse(source))
        if tree.find(nodes.EvalContextModifier) is not None:
            raise jinja2.TemplateError(
                "autoescape, which is computed when it is read, is not supported"
            )
        return spending(compiling, lambda: environment.from_string(tree)), ""
    except Exception as error:  # of whatever kind: the source decides what fails in the compiler
        if lacks_memory(error):
            raise  # it may be read another time
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return None, f"{line}: {_printable(error)}"


def texts_of(content: Any) -> list[str]:
    """The texts of a message's content: a string, a list of text parts, or None."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or ()]


def _printable(error: Exception) -> str:
    """The message of an error, if that can be sent: a source may hold lone surrogates."""
    return str(error).encode("utf-8", "replace").decode()[:2000]


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


# -- habits of templates ---------------------------------------------------------------------------


MAX_KNOWN = 16  # templates with tools, and without
TRIAL_LIMITS = TemplateLimits(steps=50_000, characters=1 << 20, prompt=1 << 18)
ROLES = ("system", "user", "assistant", "tool")
NULL, EMPTY, TEXT = "null", "empty", "text"  # contents of a message that calls
TOOL, RESPONSES, USER = "tool", "tool_responses", "user"  # forms of the results of calls

SOUGHT = "sought"
_ARGUMENTS = {"sought_name": "sought_value"}
SOUGHT_ARGUMENTS = json.dumps(_ARGUMENTS)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": SOUGHT,
            "description": "Seeks.",
            "parameters": {
                "type": "object",
                "properties": {"sought_name": {"type": "string", "description": "Sought."}},
            },
        },
    }
]
_ID, _OTHER = "abcdefghi", "abcdefghj"  # which Mistral's templates take
_CONTENTS = {NULL: None, EMPTY: "", TEXT: "sought_text"}
_PARTS = [{"type": "text", "text": "sought_a"}, {"type": "text", "text": "sought_b"}]
_OBJECT = re.compile(r"""["']text["'] ?: ?["']sought""")  # a part that is written as an object


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """lists           roles whose content may be a list of text parts: it writes all of them
    only_lists      roles whose content is lost where it is a string
    null            an answer that says nothing may have no content at all
    calls           the contents beside which it writes calls: NULL, EMPTY or TEXT
    text_arguments  it wants arguments as a text of JSON, not as an object
    short_ids       it takes no ids of calls but those of nine letters and digits
    one_call        it writes one call of a message, or refuses several
    results         the form in which it writes the result of a call: TOOL, RESPONSES or USER
    written         a conversation with a call of SOUGHT
    """

    lists: frozenset[str] = frozenset()
    only_lists: frozenset[str] = frozenset()
    null: bool = False
    calls: frozenset[str] = frozenset((EMPTY, TEXT))
    text_arguments: bool = False
    short_ids: bool = False
    one_call: bool = False
    results: str = TOOL
    written: str = ""


_known: OrderedDict[tuple[str, bool], TemplateHabits] = OrderedDict()


def habits_of(template: ChatTemplate, tools: bool) -> TemplateHabits:
    """The habits of this template in conversations with tools, or without, found out by rendering
    short ones with it; those of the last few templates are remembered."""
    habits = _known.get((template.source, tools))
    if habits is None:
        shown = _TOOLS if tools else None
        habits = _found(partial(_write, template.within(TRIAL_LIMITS), shown))
        _known[template.source, tools] = habits
        while len(_known) > MAX_KNOWN:
            _known.popitem(last=False)
    return habits


def _found(write: _Write) -> TemplateHabits:
    nothing = write(_USER, _says("assistant", None), _USER)
    empty = write(_USER, _says("assistant", ""), _USER)
    habits = TemplateHabits(null=bool(nothing) and _nothings(nothing) <= _nothings(empty))
    called = _says("assistant", "sought_text")
    for arguments in (_ARGUMENTS, SOUGHT_ARGUMENTS):
        written = {
            kind: _write_calls(write, _calling(content, arguments, _ID))
            for kind, content in _CONTENTS.items()
        }
        if any(written.values()):  # else it refuses all of it, and nothing is known
            habits = replace(habits, calls=_kinds(written, arguments))
        if habits.calls and any(written.values()):
            content = _CONTENTS[min(habits.calls)]
            called = _calling(content, arguments, _ID)
            both = _write_calls(write, _calling(content, arguments, _ID, _OTHER))
            habits = replace(
                habits,
                text_arguments=arguments is SOUGHT_ARGUMENTS,
                written=written[min(habits.calls)],
                short_ids=not _write_calls(write, _calling(content, arguments, "call_0")),
                one_call=both.count("sought_value") < 2 or both.count("sought_result") == 1,
            )
            break
    habits = replace(habits, results=_results(write, called))
    lists = {role for role in ROLES if _takes(write, role, called, _PARTS)}
    only = {role for role in lists if not _takes(write, role, called, "sought_a sought_b")}
    return replace(habits, lists=frozenset(lists), only_lists=frozenset(only))


def _kinds(written: dict[str, str], arguments: Any) -> frozenset[str]:
    """The contents beside which calls with these arguments are written as they should be."""
    kinds = frozenset(
        kind
        for kind, text in written.items()
        if "sought_value" in text
        and "{'sought_name': 'sought_value'" not in text
        and (arguments is _ARGUMENTS or SOUGHT_ARGUMENTS in text)
        and (kind != NULL or _better(text, written[EMPTY]))
    )
    if NULL in kinds and len(written[NULL]) < len(written[EMPTY]):
        kinds -= {EMPTY}  # which is a turn of its own there
    return kinds


def _better(null: str, empty: str) -> bool:
    """Return whether a message without content is written as well as one of an empty content."""
    return "sought_value" not in empty or _nothings(null) <= _nothings(empty)


def _results(write: _Write, called: dict[str, Any]) -> str:
    """The form in which a result is written. A template that writes messages of any role, and knows
    of `tool_responses`, is meant to get those."""
    plain = write(_USER, called, _result(_ID))
    other = write(_USER, called, {**_result(_ID), "role": "sought_role"})
    written = "sought_result" in plain
    if written and other.replace("sought_role", TOOL) != plain:
        return TOOL
    responses = [{"name": SOUGHT, "response": "sought_result"}]
    beside = write(_USER, {**called, RESPONSES: responses})
    if "sought_result" in beside:
        return RESPONSES
    if plain and not written:
        return USER
    return TOOL


def _takes(write: _Write, role: str, called: dict[str, Any], content: Any) -> bool:
    """Return whether all texts of this content are in the text, and none as an object."""
    if role == TOOL:
        result = {**_result(_ID), "content": content}
        text = write(_USER, called, result)
    elif role == "user":
        text = write(_says(role, content))
    elif role == "assistant":
        text = write(_USER, _says(role, content), _USER)
    else:
        text = write(_says(role, content), _USER)
    return "sought_a" in text and "sought_b" in text and not _OBJECT.search(text)


def _says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _calling(content: Any, arguments: Any, *ids: str) -> dict[str, Any]:
    function = {"name": SOUGHT, "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return _says("assistant", content, tool_calls=calls)


def _result(id: str) -> dict[str, Any]:
    return _says(TOOL, "sought_result", tool_call_id=id, name=SOUGHT)


def _nothings(text: str) -> int:
    """Count the words of a text that say that something is nothing."""
    return len(re.findall("None|null", text))


_USER = _says("user", "sought_user")


def _write(template: ChatTemplate, tools: Any, *messages: dict[str, Any]) -> str:
    """The text that it makes of these; "": it refuses them."""
    try:
        return template.render(messages, tools=tools)
    except ClientError:
        return ""


_Write = Callable[..., str]  # `_write` with a template and its tools


def _write_calls(write: _Write, called: dict[str, Any]) -> str:
    """The text that it makes of a message with calls, and their results."""
    return write(_USER, called, *(_result(call["id"]) for call in called["tool_calls"]))


# -- a last message that goes on -------------------------------------------------------------------

CONTINUE_FIELD = "continue_final_message"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # which templates call them
CONTENT_MARK = "ENDxOFxTHExCONTENT"  # of letters, which templates leave as they are


def continued_prompt(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    *,
    thoughts: bool = False,
    **variables: Any,
) -> str:
    """The text that the template writes of these messages up to the end of the last one's content.
    ClientError where that is no message of the assistant, or where the template does not write its
    content as it is.

    messages  as `template_messages` makes them
    thoughts  up to the end of its thoughts instead
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        message = f"{CONTINUE_FIELD}: the last message must be the assistant's, and text alone"
        raise ClientError(400, "invalid_value", message, "messages")
    last = {**last, "content": last["content"] or ""}
    whole = template.render([*messages[:-1], last], generate=False, **variables)
    mark = CONTENT_MARK
    while mark in whole:
        mark += "x"
    names: tuple[str, ...] = ("content",)
    if thoughts:
        names = THOUGHTS
    last |= {name: _marked(last.get(name) or "", mark) for name in names}
    marked = template.render([*messages[:-1], last], generate=False, **variables)
    before, found, _ = marked.rpartition(mark)
    for prompt in (
        before,
        before.rstrip(),
    ):  # many templates take white space at the end of content away
        if found and whole.startswith(prompt):
            return prompt
    message = (
        f"{CONTINUE_FIELD}: the chat template does not write the {names[0]} of the last message"
    )
    raise ClientError(400, "template_error", f"{message} as it is", CONTINUE_FIELD)


def _marked(content: Any, mark: str) -> Any:
    """The content with this mark at its end."""
    if isinstance(content, str):
        return content + mark
    *before, part = content
    return [*before, {**part, "text": part["text"] + mark}]
