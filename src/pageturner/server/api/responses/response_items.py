"""Convert the tools and input items of a /v1/responses request to chat fields.

Owns its tools and its items of input. Must not know its other fields (responses.py), nor how
answers are written (response_writer.py).
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pageturner.server.api.base.body import NOT_JSON, bad_request
from pageturner.server.api.base.translate import (
    Fields,
    content_of,
    string_in,
    tool_call,
    tool_result,
    value_of,
)
from pageturner.text.tools import LONGEST_NAME, MAX_TOOLS

log = logging.getLogger("pageturner")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = frozenset({"input_text", "output_text", "text"})
CALLS, OUTPUTS = (
    ("function_call", "custom_tool_call"),
    ("function_call_output", "custom_tool_call_output"),
)
# types of tools that OpenAI runs, or its models alone know, and clients offer unasked: no model
# gets them
HOSTED = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "local_shell",
        "image_generation",
        "tool_search",
    }
)
PAST = frozenset({"web_search_call", "image_generation_call", "tool_search_call", "compaction"})
REFERENCE = "item_reference"  # type of an item that stands for another
MAX_REFERENCES = 1024
NAMESPACE = "namespace"  # type of a tool that holds others
INPUT = "input"  # the one argument of a custom tool
SEALED = "pageturner:"  # begins an encrypted_content of ours, which nobody has encrypted
ENCRYPTED = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """Options for writing the items of an answer.

    custom     names of tools whose calls are plain text instead of JSON
    spaces     tools in a namespace: the name that the model sees -> (namespace, own name)
    summary    reasoning goes in the summary of its item, for clients that show only summaries
    encrypted  reasoning also goes in `encrypted_content`, for clients that send back only that
    """

    custom: frozenset[str] = frozenset()
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    summary: bool = False
    encrypted: bool = False


class _ToolHead(msgspec.Struct):
    """The fields of a tool that are read before it is validated."""

    type: Any = None
    name: Any = None
    format: Any = None
    tools: msgspec.Raw = msgspec.Raw()


def options_of(fields: Fields) -> ItemOptions:
    """Return how the answer to a request is written. Errors in the tools are reported later, by the
    code that validates them."""
    wanted = value_of(fields, "reasoning", dict[str, Any], {})
    custom, spaces = set[str](), dict[str, tuple[str, str]]()
    for space, head in _each_head(fields):
        name = _full_name(space, str(head.name))
        spaces |= {name: (space, str(head.name))} if space else {}
        custom |= {name} if head.type == "custom" else set()
    return ItemOptions(
        custom=frozenset(custom),
        spaces=spaces,
        summary=bool(wanted.get("summary") or wanted.get("generate_summary")),
        encrypted=ENCRYPTED in value_of(fields, "include", list[str], []),
    )


def offered_tools(fields: Fields) -> msgspec.Raw:
    """The tools that the model is offered, for the answer to repeat: without those that nobody here
    could run, and without the grammars that nothing is held to."""
    told: list[Any] = []
    for raw, head in _heads(fields.get("tools")):
        if isinstance(head.type, str) and head.type in HOSTED:
            continue
        free = head.type == "custom" and _syntax(head.format) == "lark"
        told.append({**msgspec.json.decode(raw), "format": {"type": "text"}} if free else raw)
    return msgspec.Raw(msgspec.json.encode(told))


def _each_head(fields: Fields) -> Iterator[tuple[str, _ToolHead]]:
    """Each tool, with its namespace or ""."""
    for _, head in _heads(fields.get("tools")):
        if head.type != NAMESPACE:
            yield "", head
        else:
            yield from ((str(head.name), inner) for _, inner in _heads(head.tools))


def _heads(raw: msgspec.Raw | None) -> list[tuple[msgspec.Raw, _ToolHead]]:
    """The tools of a list; none where it is no such list, or a longer one than any that is
    taken."""
    try:
        tools = msgspec.json.decode(raw or b"[]", type=list[msgspec.Raw])
        if len(tools) > MAX_TOOLS:
            return []
        return [(raw, msgspec.json.decode(raw, type=_ToolHead)) for raw in tools]
    except NOT_JSON:
        return []


def _full_name(space: str, name: str) -> str:
    """Return the name that the model sees for a tool in a namespace, cut to the maximum length."""
    return f"{space.removesuffix('__')}__{name}"[-LONGEST_NAME:] if space else name


# -- tools -----------------------------------------------------------------------------------------
def tool_fields(fields: Fields) -> dict[str, Any]:
    """`tools` and `tool_choice` of a chat."""
    ours: dict[str, Any] = {}
    given = value_of(fields, "tools", list[dict[str, Any]], [])
    if hosted := {str(tool["type"]) for tool in given if _hosted(tool)}:
        log.info(
            "tools that nothing here runs are not offered to the model: %s",
            ", ".join(sorted(hosted)),
        )
    if tools := [one for i, tool in enumerate(given) for one in _tools(tool, f"tools[{i}]")]:
        ours["tools"] = tools
    choice = value_of(fields, "tool_choice", str | dict[str, Any])
    if choice is not None:
        ours["tool_choice"] = choice if isinstance(choice, str) else _choice(choice)
    return ours


def _hosted(tool: dict[str, Any]) -> bool:
    """Return whether this is a tool hosted by OpenAI, which this server cannot run."""
    return str(tool.get("type")) in HOSTED


def _tools(tool: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """The functions that one entry of `tools` is: none, itself, or those in a namespace."""
    if _hosted(tool):
        return
    inner = tool.get("tools")
    if tool.get("type") != NAMESPACE or not isinstance(inner, list):
        yield _tool(tool, place)
        return
    for i, one in enumerate(inner):
        if not isinstance(one, dict):
            raise bad_request("invalid_type", f"{place}.tools[{i}] must be an object", "tools")
        name = _full_name(str(tool.get("name", "")), str(one.get("name")))
        yield _tool({**one, "name": name}, f"{place}.tools[{i}]")


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    named = {name: tool[name] for name in ("name", "description") if name in tool}
    if kind == "function":
        more = {name: tool[name] for name in ("parameters", "strict") if name in tool}
        return {"type": "function", "function": {**named, **more}}
    if kind == "custom":
        return {"type": "function", "function": {**named, **_text_tool(tool)}}
    raise bad_request(
        "unsupported_parameter",
        f"{place}: tools of type {str(kind)[:40]!r} are not supported, only function and custom",
        "tools",
    )


def _text_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A custom tool as a function of one text. Its calls are held to a regex; a Lark grammar is
    only told to the model, because within JSON it would be another one."""
    schema: dict[str, Any] = {"type": "string"}
    syntax, more = _syntax(tool.get("format")), {}
    if syntax is not None:
        definition = str(tool["format"].get("definition", ""))
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
        description = (
            f"{tool.get('description') or ''}\n\nThe {INPUT} matches this {syntax} grammar:"
        )
        more = {"description": f"{description}\n{definition}".strip(), "strict": syntax == "regex"}
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT]}
    return {**more, "parameters": {**parameters, "additionalProperties": False}}


def _syntax(form: Any) -> str | None:
    """The syntax of the grammar of a custom tool; None: any text."""
    if form is None or (isinstance(form, dict) and form.get("type", "text") == "text"):
        return None
    if (
        isinstance(form, dict)
        and form.get("type") == "grammar"
        and form.get("syntax") in ("lark", "regex")
    ):
        return str(form["syntax"])
    raise bad_request(
        "invalid_value", "tools: a format is text, or a grammar in lark or regex", "tools"
    )


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """`tool_choice` of a chat."""
    if choice.get("type") in ("function", "custom"):
        return _named(choice)
    tools = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(tools, list):
        named = [_named(tool) for tool in tools if isinstance(tool, dict) and not _hosted(tool)]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named},
        }
    form = '{"type": "function", "name": ...}'
    message = f"tool_choice is none, auto, required, {form} or of the type allowed_tools"
    raise bad_request("unsupported_parameter", message, "tool_choice")


def _named(one: dict[str, Any]) -> dict[str, Any]:
    name, space = one.get("name"), one.get("namespace")
    full = _full_name(space, name) if isinstance(space, str) and isinstance(name, str) else name
    return {"type": "function", "function": {"name": full}}


# -- what went before ------------------------------------------------------------------------------
class _ItemHead(msgspec.Struct):
    """The fields of an item that are read before it is validated."""

    type: Any = None
    id: Any = None


def with_references(items: bytes, find: Callable[[str], bytes]) -> bytes:
    """A JSON list of items with those in it that it only names. find: the item of an id, as
    JSON."""
    if REFERENCE.encode() not in items:
        return items
    try:
        told = msgspec.json.decode(items, type=list[msgspec.Raw])
        heads = [msgspec.json.decode(raw, type=_ItemHead) for raw in told]
    except NOT_JSON:
        return items  # what is wrong with it is said by who reads it
    named = [
        head.id if head.type == REFERENCE and isinstance(head.id, str) else None for head in heads
    ]
    if sum(id is not None for id in named) > MAX_REFERENCES:
        raise bad_request("invalid_value", f"input names more than {MAX_REFERENCES} items", "input")
    found = [bytes(raw) if id is None else find(id) for raw, id in zip(told, named, strict=True)]
    return b"[" + b",".join(found) + b"]"


def responses_of(item_id: str) -> list[str]:
    """The ids of the responses that an item of this id may be of."""
    rest = item_id.partition("_")[2]
    return [f"resp_{rest}", f"resp_{rest.rpartition('_')[0]}"]


def conversation(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat, behind the instructions."""
    if "input" not in fields:
        raise bad_request("missing_field", "input is missing", "input")
    instructions = value_of(fields, "instructions", str, "")
    said = [{"role": "system", "content": instructions}] if instructions else []
    items = value_of(fields, "input", str | list[dict[str, Any]])
    if isinstance(items, str):
        return [*said, {"role": "user", "content": items}]
    names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
    for i, item in enumerate(items):
        _add(said, item, f"input[{i}]", names)
    return [one for one in said if not _says_nothing(one)]


def _says_nothing(message: dict[str, Any]) -> bool:
    """Return whether a message has only reasoning: no content and no tool calls."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _add(
    said: list[dict[str, Any]], item: dict[str, Any], place: str, names: dict[str, str]
) -> None:
    """Add an item to the messages. Thoughts, text and calls that follow each other are one of
    them."""
    kind = str(item.get("type", "message"))
    if kind == "reasoning":
        if thoughts := _thoughts(item, place):
            turn = _turn(said, fresh=True)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
    elif kind in CALLS:
        if item.get("status") != "incomplete":
            id, name = string_in(item, "call_id", place), string_in(item, "name", place)
            name = _full_name(str(item.get("namespace") or ""), name)
            names[id] = name
            custom = kind == "custom_tool_call"
            arguments: Any = string_in(item, "input" if custom else "arguments", place)
            if custom:
                arguments = {INPUT: arguments}
            calls = _turn(said, fresh=False).setdefault("tool_calls", [])
            calls.append(tool_call(id, name, arguments))
    elif kind in OUTPUTS:
        id = string_in(item, "call_id", place)
        text = "\n".join(_texts(item.get("output"), f"{place}.output"))
        said.append(tool_result(id, text, names))
    elif kind == "agent_message":  # of one agent of a client to another
        texts = _texts(item.get("content"), f"{place}.content")
        said.append({"role": "user", "content": content_of(texts)})
    elif kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_request(
                "invalid_value", f"{place}.role is one of {', '.join(ROLES)}", "input"
            )
        text = content_of(_texts(item.get("content"), f"{place}.content"))
        if role == "assistant" and said and said[-1]["role"] == role and not said[-1]["content"]:
            said[-1]["content"] = text
        else:
            said.append({"role": ROLES[role], "content": text})
    elif kind not in PAST:
        message = f"{place}: items of type {kind[:40]!r} are not supported here"
        raise bad_request("unsupported_parameter", message, "input")


def _turn(said: list[dict[str, Any]], fresh: bool) -> dict[str, Any]:
    """The assistant's message that is being made. fresh: nothing but thoughts may stand in it
    yet."""
    last = said[-1] if said else {}
    begun = bool(last.get("content")) or "tool_calls" in last
    if last.get("role") != "assistant" or (fresh and begun):
        said.append({"role": "assistant", "content": ""})
    return said[-1]


def _thoughts(item: dict[str, Any], place: str) -> str:
    """The thoughts of an item, where it has any that can be read."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list | None) or not all(
            isinstance(part, dict) for part in parts or ()
        ):
            raise bad_request("invalid_type", f"{place}.{name} must be a list of parts", "input")
        if parts:
            return "\n".join(string_in(part, "text", f"{place}.{name}") for part in parts)
    return opened(item.get("encrypted_content"))


def sealed(thoughts: str) -> str:
    """Thoughts as an `encrypted_content`, which says no more than they do."""
    return SEALED + base64.b64encode(thoughts.encode("utf-8", "replace")).decode()


def opened(content: Any) -> str:
    """The thoughts in an `encrypted_content`; "" where it is another server's."""
    if not isinstance(content, str) or not content.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _texts(content: Any, where: str) -> list[str]:
    """The texts of some content: a string, or parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request("invalid_type", f"{where} must be a string or a list of parts", "input")
    texts = []
    for part in content:
        text = (
            part.get("text") if isinstance(part, dict) and str(part.get("type")) in TEXTS else None
        )
        if not isinstance(text, str):
            raise bad_request(
                "unsupported_parameter", f"{where}: only parts of text are supported yet", "input"
            )
        texts.append(text)
    return texts
