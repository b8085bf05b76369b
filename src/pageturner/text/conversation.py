"""A conversation as clients send it, made into what chat templates of text models know.

Owns the roles, the content as one string, how calls of tools and their results stand in a
message, and which control tokens of a prompt are text. Must not know how a template is rendered,
how it is found out what one wants (chat_template.py), nor which tools there are (tools.py).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from pageturner.errors import ClientError
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text import reasoning
from pageturner.text.answer_format import recognised
from pageturner.text.call_arguments import type_name
from pageturner.text.chat_template import (
    EMPTY,
    NULL,
    RESPONSES,
    ROLES,
    TEXT,
    THOUGHTS,
    TOOL,
    USER,
    ChatTemplate,
    TemplateHabits,
    TemplateTooLong,
    continued_prompt,
    habits_of,
    texts_of,
)
from pageturner.text.tool_formats import (
    COMMON,
    GEMMA,
    PYTHON,
    TAGGED,
    ToolFormat,
    to_json,
    tool_format,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# parts of a content that are text, as the APIs call them, and where that stands
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
RAW = "raw_arguments"  # the one argument of a call whose arguments are no JSON object
NAMES_OF_ROLES = {"developer": "system", "function": "tool"}  # what others call them


def prompt_text(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    variables: dict[str, Any],
    *,
    generate: bool = True,
    goes_on: bool = False,
) -> str:
    """The prompt that a template makes of a conversation, as clients send it.

    variables  its other variables, as `variables` makes them
    generate   an answer begins behind it
    goes_on    the answer goes on with the last message, which is the assistant's: with its
               thoughts where it has no content
    """
    refused: ClientError | None = None
    tools = variables.get("tools")
    for turns in _turns(read_messages(messages)):
        said = template_messages(turns, template, bool(tools))
        for more in _further_variables(tools):
            given = {**more, **variables}
            try:
                if goes_on:
                    return _continued(template, said, given)
                text = template.render(said, generate=generate, **given)
                _check_roles(said, text)
                if tools and not _SHOWS_TOOLS.search(template.source):
                    return _told(template, messages, variables, generate) or text
                return text
            except ClientError as error:
                if isinstance(error, TemplateTooLong) or error.code != "template_error":
                    raise
                refused = refused or error
    assert refused is not None
    text = ""
    if tools and not goes_on:
        text = _told(template, messages, variables, generate)
    if not text:
        raise refused
    return text


# variables whose texts are others' than the template's
_SHOWN = ("tools", "xml_tools", "documents")
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")  # nothing that could be a mark of a template


def _check_roles(messages: list[dict[str, Any]], text: str) -> None:
    """ClientError for a role that is not one of ROLES, if the template leaves its messages out."""
    for message in messages:
        told = texts_of(message["content"])
        if message["role"] not in ROLES and not all(one.strip() in text for one in told):
            roles = ", ".join((*ROLES, "developer"))
            raise _wrong(
                f"the chat template has no role {message['role']!r}: the usual ones are {roles}"
            )


_SHOWS_TOOLS = re.compile(r"\b(xml_)?tools\b|\bfunctions\b")


def _told(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    variables: dict[str, Any],
    generate: bool,
) -> str:
    """The prompt with a text about the tools in the system message, or in the user's first one, for
    a template that does not show them; "": it refuses these too, or leaves them out."""
    format = recognised(template.source) or tool_format(COMMON)
    shown = "\n".join(map(to_json, variables["tools"]))
    text = f"You may call these functions:\n<tools>\n{shown}\n</tools>\nA call is written so:\n"
    text += written(format, [("function_name", {"argument": "value"})])
    first = messages[0]
    rest = messages
    if first.get("role") in ("system", "developer"):
        text = f"{_text(first.get('content'))}\n\n{text}"
        rest = messages[1:]
    ways = [[{"role": "system", "content": text}, *rest]]
    if rest and rest[0].get("role") == USER:
        user = f"{text}\n\n{_text(rest[0].get('content'))}"
        ways.append([{**rest[0], "content": user}, *rest[1:]])
    others = {
        name: value for name, value in variables.items() if name not in ("tools", "xml_tools")
    }
    for told in ways:
        with contextlib.suppress(ClientError):
            made = prompt_text(template, told, others, generate=generate)
            if shown in made:
                return made
    return ""


def marked_prompt(
    render: Callable[..., str],
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    variables: dict[str, Any],
) -> tuple[str, str]:
    """The prompt of a conversation in which the control tokens of contents are text, and the
    character that stands within each of them; "" where there are none. So are those of tools,
    documents and arguments of calls; the assistant's contents may hold what a model has said. Where
    the template does more with a content than to write it, its control tokens cannot be told from
    the template's own.

    render     `prompt_text` of a template with these variables
    """
    plain = render(messages)
    control = control_texts(tokenizer)
    shown = {name: variables[name] for name in _SHOWN if name in variables}
    told = [_told_in(message) for message in messages]
    if control is None or not any(map(control.search, _strings([told, shown]))):
        return plain, ""
    mark = chr(0xF0000 + secrets.randbits(15))  # which nobody can know
    within = partial(_marked, control, mark)
    turns = [{**message, **within(one)} for message, one in zip(messages, told, strict=True)]
    for given in ({**variables, **within(shown)}, variables):
        marked = render(turns, variables=given)
        if mark not in plain and marked.replace(mark, "") == plain:
            return marked, mark
    return plain, ""


def prompt_tokens(tokenizer: Tokenizer, text: str, mark: str, special: bool) -> list[int]:
    """The tokens of a prompt as `marked_prompt` has it: between two control tokens of the
    template, what has a mark in it is text. special: as `add_special` of the tokenizer."""
    encode = tokenizer.encode
    control = control_texts(tokenizer)
    if not mark or control is None:
        return encode(text, add_special=special, parse_special=True)
    tokens = encode("", add_special=special, parse_special=False)
    waiting = ""
    for piece in control.split(text):
        if mark not in piece:
            waiting += piece
            continue
        if waiting:
            tokens += encode(waiting, add_special=False, parse_special=True)
        tokens += encode(piece.replace(mark, ""), add_special=False, parse_special=False)
        waiting = ""
    if waiting:
        tokens += encode(waiting, add_special=False, parse_special=True)
    return tokens


@lru_cache(maxsize=8)
def control_texts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The texts of the control tokens of a vocabulary, as one group; None: it has none."""
    texts = map(tokenizer.text_of, {*tokenizer.special_ids, *tokenizer.eos_ids})
    known = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    if not known:
        return None
    return re.compile(f"({'|'.join(map(re.escape, known))})")


def _marked(control: re.Pattern[str], mark: str, value: Any) -> Any:
    """A value of JSON with this character within each control token of its texts. It may be nested
    deeper than calls may be."""
    made: Any = [value]
    waiting = [made]
    while waiting:
        within = waiting.pop()
        for place, one in within.items() if isinstance(within, dict) else enumerate(within):
            if isinstance(one, str):
                one = control.sub(lambda found: found[0][0] + mark + found[0][1:], one)
            elif isinstance(one, list | tuple | dict):
                one = dict(one) if isinstance(one, dict) else list(one)
                waiting.append(one)
            within[place] = one
    return made[0]


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value of JSON but the names of its members."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list | tuple | dict):
            waiting += one.values() if isinstance(one, dict) else one


def _told_in(message: dict[str, Any]) -> dict[str, Any]:
    """The parts of a message in which control tokens are text."""
    names: tuple[str, ...] = ("content",)
    if message.get("role") == "assistant":
        names = ("tool_calls", "function_call")
    return {name: message[name] for name in names if message.get(name)}


def _turns(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages, and forms of them for templates that refuse them."""
    yield messages
    yield alternating(messages)
    if messages[0]["role"] == "system":
        yield alternating([{**messages[0], "role": USER}, *messages[1:]])


def _continued(template: ChatTemplate, said: list[dict[str, Any]], given: dict[str, Any]) -> str:
    *before, last = said
    thoughts = str(last.get(THOUGHTS[0]) or "")
    if not thoughts or _text(last["content"]):
        return continued_prompt(template, said, **given)
    given = {"enable_thinking": True, "thinking": True, **given}
    try:
        return continued_prompt(template, said, thoughts=True, **given)
    except ClientError:
        format = reasoning.recognised(template.source)
        if format is None or not format.begin:
            raise
    # the template leaves out thoughts: the model would begin them here
    text = template.render(before, **given)
    if not reasoning.opened(format, text):
        text += f"{format.begin}\n"
    return text + thoughts


def _further_variables(tools: Any) -> Iterator[dict[str, Any]]:
    """The variables that a template may need beside the usual ones: each but the first is for one
    that refuses the conversation without it."""
    yield {}
    if not tools:
        yield {"tools": []}
    yield {
        "functions": json.dumps(tools or [], indent=4, ensure_ascii=False),
        "datetime": datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
    }


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that clients send, in one form. ClientError names the one that is wrong."""
    return [_message(message, i) for i, message in enumerate(messages)]


def template_messages(
    messages: list[dict[str, Any]], template: ChatTemplate | None = None, tools: bool = False
) -> list[dict[str, Any]]:
    """The messages, as `read_messages` has them, as this chat template takes them; None: as most
    take them. tools: it is shown some."""
    habits = TemplateHabits()
    format = None
    if template is not None:
        habits = habits_of(template, tools)
        format = recognised(template.source)
    made = _with_calls(messages, habits, format)
    if habits.results == RESPONSES:
        made = _with_responses(made)
    elif habits.results == USER:
        made = _as_users(made)
    return [_with_content(message, habits) for message in made]


def variables(
    tools: Sequence[dict[str, Any]], effort: str | None, given: dict[str, Any] | None
) -> dict[str, Any]:
    """The variables that a chat template gets beside the messages.

    tools   that are shown to the model
    effort  `reasoning_effort`; it is also the switch of templates that have one
    given   by the client for the template itself: this goes first
    """
    names = ("tools", "xml_tools")  # SmolLM3 calls them so
    made: dict[str, Any] = {name: list(tools) for name in names} if tools else {}
    if effort is not None:
        if effort not in EFFORTS:
            message = f"reasoning_effort is one of {', '.join(EFFORTS)}"
            raise ClientError(400, "invalid_value", message, "reasoning_effort")
        thinks = effort != "none"
        made |= {"enable_thinking": thinks, "thinking": thinks}
        made |= {"reasoning_effort": effort} if thinks else {}
    return {**made, **(given or {})}


def alternating(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with one system message, at its beginning, and no two of the user's
    behind each other: what the system says later stands in the user's turn."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        text = _text(message["content"])
        if role == "system" and any(one["role"] != "system" for one in made):
            role = USER
            text = f"<system>\n{text}\n</system>"
        if made and role in ("system", USER) and made[-1]["role"] == role:
            before = made.pop()
            text = f"{_text(before['content'])}\n\n{text}"
            message = before
        if role in ("system", USER):
            message = {**message, "role": role, "content": text}
        made.append(message)
    return made


def _message(message: dict[str, Any], i: int) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(f"messages[{i}].role must be a string", "invalid_type")
    role = NAMES_OF_ROLES.get(role, role)
    if not _ROLE.fullmatch(role):
        raise _wrong(f"messages[{i}].role is {role[:40]!r}, and a role is one word")
    content = message.get("content")
    nothing = "content" not in message or (content is None and role != "tool")
    if nothing and role != "assistant":
        raise _wrong(f"messages[{i}].content is missing", "missing_field")
    read = {**message, "role": role, "content": _content(content, i)}
    legacy = read.pop("function_call", None)
    calls = read.pop("tool_calls", None)
    if isinstance(legacy, dict):  # which has no id: the name of the function stands for it
        calls = [{"id": legacy.get("name"), "function": legacy}]
    elif legacy is not None:
        raise _wrong(f"messages[{i}].function_call must be an object", "invalid_type")
    if calls not in (None, []):  # to some templates an empty list is a call
        read["tool_calls"] = _calls(calls, i)
    if message["role"] == "function":
        read.setdefault("tool_call_id", message.get("name"))
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if isinstance(thoughts, str):
        read |= dict.fromkeys(THOUGHTS, thoughts)
    return read


def _content(content: Any, i: int) -> Any:
    """A string, a list of text parts, or None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"messages[{i}].content must be a string or a list of parts", "invalid_type")
    parts = []
    for part in content:
        text = None
        if isinstance(part, dict):
            text = part.get(_TEXTS.get(str(part.get("type")), ""))
        if not isinstance(text, str):
            raise _wrong(
                f"messages[{i}].content: only text parts are supported", "unsupported_parameter"
            )
        parts.append({"type": "text", "text": text})
    return parts


def _text(content: Any) -> str:
    """The whole text of a content."""
    return "".join(texts_of(content))


def _with_content(message: dict[str, Any], habits: TemplateHabits) -> dict[str, Any]:
    """The message with its content in a form that the template takes."""
    role = message["role"]
    content = message["content"]
    if content is None and (message.get("tool_calls") or (habits.null and role == "assistant")):
        return message
    if not isinstance(content, list) or role not in habits.lists:
        content = _text(content)
        if role in habits.only_lists:
            content = [{"type": "text", "text": content}]
    return {**message, "content": content}


def _calls(calls: Any, i: int) -> list[dict[str, Any]]:
    """Calls of an assistant's message. Templates write arguments themselves, so they get an
    object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _wrong(f"messages[{i}].tool_calls must be a list of calls", "invalid_type")
    return [_call(call, f"messages[{i}].tool_calls[{k}]") for k, call in enumerate(calls)]


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(f"{place}.function must have a name", "invalid_type")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        read = _object(arguments) if arguments.strip() not in ("", "null") else {}
        # a call that was cut, or is malformed: the model sees what it wrote
        arguments = {RAW: arguments} if isinstance(read, str) else read
    if not isinstance(arguments, dict):
        raise _wrong(f"{place}.function.arguments must be the text of a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_calls(
    messages: list[dict[str, Any]], habits: TemplateHabits, format: ToolFormat | None
) -> list[dict[str, Any]]:
    """The messages as a template with these habits takes the calls in them, and their results."""
    made, names = [], dict[str, str]()
    for message in _one_call_each(messages) if habits.one_call else messages:
        calls = message.get("tool_calls")
        names |= {str(call.get("id")): call["function"]["name"] for call in calls or ()}
        if calls:
            message = _calling(message, habits, format)
        elif message["role"] == TOOL and (id := message.get("tool_call_id")):
            message = {**message, "tool_call_id": _short(str(id)) if habits.short_ids else id}
            if (
                not message.get("name") and str(id) in names
            ):  # some templates ask for it, clients do not
                message["name"] = names[str(id)]
        made.append(message)
    return made


def _calling(
    message: dict[str, Any], habits: TemplateHabits, format: ToolFormat | None
) -> dict[str, Any]:
    """A message with calls. They stand in its content where the template would leave them out."""
    content = message["content"]
    calls = message["tool_calls"]
    kinds: dict[str, Any] = {TEXT: content}
    if content is None:
        kinds = {NULL: None, EMPTY: ""}
    elif not content:
        kinds = {EMPTY: "", NULL: None}
    kind = next((kind for kind in kinds if kind in habits.calls), None)
    if kind is None:
        functions = (call["function"] for call in calls)
        text = written(
            format or tool_format(COMMON), ((one["name"], one["arguments"]) for one in functions)
        )
        return {**message, "content": _text(content) + text}
    calls = [_call_as_wanted(call, habits) for call in calls]
    return {**message, "content": kinds[kind], "tool_calls": calls}


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message with several calls as one message for each of them, with its result behind it."""
    made: list[dict[str, Any]] = []
    waiting: dict[str, int] = {}  # id of a call -> where its result goes
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            for k, call in enumerate(calls):
                made.append(
                    {**message, "content": None if k else message["content"], "tool_calls": [call]}
                )
                waiting[str(call.get("id"))] = len(made)
        elif (place := waiting.pop(str(message.get("tool_call_id")), None)) is not None:
            made.insert(place, message)
            waiting = {id: at + (at > place) for id, at in waiting.items()}
        else:
            made.append(message)
    return made


def _call_as_wanted(call: dict[str, Any], habits: TemplateHabits) -> dict[str, Any]:
    made, function = dict(call), call["function"]
    if habits.text_arguments:
        made["function"] = {**function, "arguments": to_json(function["arguments"])}
    if habits.short_ids:
        made["id"] = _short(str(call.get("id", "")))
    return made


def _short(id: str) -> str:
    """Nine letters and digits, the same for the same id: its own where it is so short already."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]


def _with_responses(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of calls as `tool_responses` of the message that called."""
    made: list[dict[str, Any]] = []
    for message in messages:
        before = made[-1] if made else {}
        if message["role"] != TOOL or not before.get("tool_calls"):
            made.append(message)
            continue
        response = {
            "name": message.get("name") or "unknown",
            "response": _object(_text(message["content"])),
        }
        made[-1] = {**before, RESPONSES: [*before.get(RESPONSES, []), response]}
    return made


def _as_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of calls as messages of the user, one for all that stand together."""
    made: list[dict[str, Any]] = []
    before = ""
    for message in messages:
        if message["role"] == TOOL:
            text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if before == TOOL:
                text = f"{made.pop()['content']}\n{text}"
            made.append({"role": USER, "content": text})
        else:
            made.append(message)
        before = message["role"]
    return made


def _object(text: str) -> Any:
    """The answer of a tool, or the arguments of a call: an object if it is one, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _wrong(message: str, code: str = "invalid_value") -> ClientError:
    return ClientError(400, code, message, "messages")


# -- calls in content ------------------------------------------------------------------------------


def written(format: ToolFormat, calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """These calls, each a name and its arguments, in the first pattern of this format; "" where it
    has none. White space stands behind commas and colons alone."""
    if not format.calls:
        return ""
    ones = [
        _filled(
            format.calls[0], NAME=name, ID=f"call{i:05d}", INDEX=str(i), ARGS=_given(format, given)
        )
        for i, (name, given) in enumerate(calls)
    ]
    return _filled(format.opening) + _filled(format.between).join(ones) + _filled(format.closing)


def _filled(pattern: str, **places: str) -> str:
    """The pattern with these texts in its places, without white space that need not be there."""
    text = pattern.replace(" , ", ",␣").replace(" : ", ":␣").replace(" ", "").replace("␣", " ")
    return re.sub(r"\$([A-Z]+)", lambda place: places[place[1]], text)


def _given(format: ToolFormat, arguments: dict[str, Any]) -> str:
    if format.arguments == PYTHON:
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    if format.arguments == GEMMA:
        return _gemma(arguments, format.quote)
    if format.arguments != TAGGED:
        return to_json(arguments)
    made = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else to_json(value)
        word = format.types.get(type_name(value), format.types.get("", ""))
        made.append(_filled(format.parameter, KEY=name, VALUE=text, TYPE=word))
    return "".join(made)


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        pairs = (f"{name}:{_gemma(one, quote)}" for name, one in sorted(value.items()))
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(one, quote) for one in value) + "]"
    return to_json(value)
