"""A conversation as clients send it, made into what chat templates of text models know.

Owns the roles, the content as one string, and how calls of tools and their results stand in a
message. Must not know how a template is rendered (chat_template.py), how it is found out what one
wants (template_habits.py), nor which tools there are (tools.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pageturner.errors import ClientError
from pageturner.text.call_arguments import GEMMA_QUOTE
from pageturner.text.chat_template import TemplateHabits, habits_of
from pageturner.text.tool_formats import GEMMA, JSON, PYTHON, ToolFormat, recognised

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
NAMES_OF_ROLES = {"developer": "system", "function": "tool"}  # what others call them


def template_messages(messages: list[dict[str, Any]], source: str = "") -> list[dict[str, Any]]:
    """The messages as a chat template wants them. ClientError names the one that is wrong.

    source  of the template: a few take the results of calls with the message that called
    """
    read = [_message(message, i) for i, message in enumerate(messages)]
    if source and any(message.get("tool_calls") for message in read):
        read = _as_wanted(read, habits_of(source), recognised(source))
    return _with_responses(read) if "tool_responses" in source else read


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
    behind each other: what the system says later stands in the user's turn. For messages whose
    content is text."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role, text = message.get("role"), message.get("content")
        later = role == "system" and any(one["role"] != "system" for one in made)
        if later:
            message = {**message, "role": "user", "content": f"<system>\n{text}\n</system>"}
        before = made[-1] if made else {}
        if message["role"] in ("system", "user") and before.get("role") == message["role"]:
            made[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return made


def _message(message: dict[str, Any], i: int) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(f"messages[{i}].role must be a string", "invalid_type")
    role = NAMES_OF_ROLES.get(role, role)
    if role not in ROLES:
        roles = ", ".join((*ROLES, "developer"))
        raise _wrong(f"messages[{i}].role is {role[:40]!r}, and the roles are {roles}")
    read = {**message, "role": role, "content": _content(message.get("content"), i)}
    if message.get("tool_calls") in (
        None,
        [],
    ):  # an empty list too: to some templates that is a call
        read.pop("tool_calls", None)
    else:
        read["tool_calls"] = _calls(message["tool_calls"], i)
    thoughts = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(thoughts, str):
        read["reasoning_content"] = read["reasoning"] = read["thinking"] = thoughts
    return read


def _content(content: Any, i: int) -> str:
    """One string: templates of text models know nothing else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"messages[{i}].content must be a string or a list of parts", "invalid_type")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _wrong(
                f"messages[{i}].content: only text parts are supported", "unsupported_parameter"
            )
        texts.append(text)
    return "\n".join(texts)


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
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(f"{place}.function.arguments must be the text of a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _as_wanted(
    messages: list[dict[str, Any]], habits: TemplateHabits, format: ToolFormat | None
) -> list[dict[str, Any]]:
    """The messages as a template with these habits takes the calls in them, and their results."""
    made, names = [], dict[str, str]()
    for message in _one_call_each(messages) if habits.one_call else messages:
        calls = message.get("tool_calls")
        names |= {str(call.get("id")): call["function"]["name"] for call in calls or ()}
        if calls and not habits.writes_calls and format is not None:
            text = written(
                format, ((one["function"]["name"], one["function"]["arguments"]) for one in calls)
            )
            message = {**message, "content": message["content"] + text}
        elif calls:
            message = {**message, "tool_calls": [_call_as_wanted(call, habits) for call in calls]}
            if habits.no_content and not message["content"]:
                message["content"] = None
        elif message["role"] == "tool" and (id := message.get("tool_call_id")):
            message = {**message, "tool_call_id": _short(str(id)) if habits.short_ids else id}
            if (
                not message.get("name") and str(id) in names
            ):  # some templates ask for it, clients do not
                message["name"] = names[str(id)]
        made.append(message)
    return made


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message with several calls as one message for each of them, with its result behind it."""
    made: list[dict[str, Any]] = []
    waiting: dict[str, int] = {}  # id of a call -> where its result goes
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            for k, call in enumerate(calls):
                made.append(
                    {**message, "content": "" if k else message["content"], "tool_calls": [call]}
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
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        made["function"] = {**function, "arguments": arguments}
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
        if message["role"] != "tool" or not before.get("tool_calls"):
            made.append(message)
            continue
        names = {call.get("id"): call["function"]["name"] for call in before["tool_calls"]}
        name = message.get("name") or names.get(message.get("tool_call_id")) or "unknown"
        response = {"name": name, "response": _object(message["content"])}
        made[-1] = {**before, "tool_responses": [*before.get("tool_responses", []), response]}
    return made


def _object(text: str) -> Any:
    """The answer of a tool: an object if it is one, else the text."""
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
    head, _, tail = _close(format.calls[0]).partition("$ARGS")
    write = {JSON: _json, PYTHON: _of_python, GEMMA: _gemma}[format.arguments]
    ones = [head.replace("$NAME", name) + write(arguments) + tail for name, arguments in calls]
    return _close(format.opening) + _close(format.between).join(ones) + _close(format.closing)


def _close(pattern: str) -> str:
    """The pattern without white space that need not be there."""
    return pattern.replace(" ", "").replace(",", ", ").replace(":", ": ").replace("call: ", "call:")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _of_python(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_gemma(one)}" for name, one in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return _json(value)
