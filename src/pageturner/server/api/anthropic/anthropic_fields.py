"""Convert the tools, thinking and message history of an Anthropic request to chat fields.

Owns their blocks and tools. Must not know the other fields of a request, nor how answers are
written (messages.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pageturner.server.api.base.body import bad_request
from pageturner.server.api.base.translate import (
    Fields,
    content_of,
    string_in,
    tool_call,
    tool_result,
    value_of,
)

log = logging.getLogger("pageturner")
ROLES = ("user", "assistant", "system")
# beginnings of the types of tools that Anthropic itself runs and clients offer unasked: no model
# gets them
HOSTED = ("web_search", "web_fetch", "tool_search", "advisor")
UNREAD = frozenset({"redacted_thinking"})  # blocks whose text nobody has
NO_PROMPT = "x-anthropic-billing-header:"  # a block that begins so is for Anthropic, and new in each request
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# -- tools -----------------------------------------------------------------------------------------
def tool_fields(fields: Fields) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat."""
    given = value_of(fields, "tools", list[dict[str, Any]], [])
    ours: dict[str, Any] = {}
    if hosted := {str(tool["type"])[:40] for tool in given if _hosted(tool)}:
        told = ", ".join(sorted(hosted)[:9])
        log.info("tools that only Anthropic runs are not offered to the model: %r", told)
    if tools := [_tool(tool, i) for i, tool in enumerate(given) if not _hosted(tool)]:
        ours["tools"] = tools
    choice = value_of(fields, "tool_choice", dict[str, Any])
    if choice is None:
        return ours
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        ours["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in CHOICES:
        ours["tool_choice"] = CHOICES[kind]
    else:
        form = '{"type": "tool", "name": ...}'
        message = f"tool_choice is one of the types {', '.join(CHOICES)}, or {form}"
        raise bad_request("invalid_value", message, "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        ours["parallel_tool_calls"] = False
    return ours


def _hosted(tool: dict[str, Any]) -> bool:
    """Return whether this is a tool hosted by Anthropic, which this server cannot run."""
    return str(tool.get("type")).startswith(HOSTED)


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    kind = tool.get("type")
    if "input_schema" not in tool:
        what = (
            f"tools of type {str(kind)[:40]!r} are not known"
            if kind not in (None, "custom")
            else "it"
        )
        message = f"tools[{i}]: {what}: send a name, a description and an input_schema"
        raise bad_request("unsupported_parameter", message.replace("it: send", "send"), "tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


# -- thoughts --------------------------------------------------------------------------------------
def thinking_fields(fields: Fields) -> dict[str, Any]:
    """`reasoning_effort`, `thinking_token_budget` and the switch of a template. Who does not ask
    for thoughts gets none, from a model that can do without them."""
    thinking = value_of(fields, "thinking", dict[str, Any], {})
    kind = thinking.get("type", "disabled")
    given = value_of(fields, "chat_template_kwargs", dict[str, Any], {})
    if kind == "disabled":
        return {"reasoning_effort": "none", "chat_template_kwargs": given}
    if kind not in ("enabled", "adaptive"):
        raise bad_request(
            "invalid_value", "thinking.type is enabled, adaptive or disabled", "thinking"
        )
    effort = value_of(fields, "output_config", dict[str, Any], {}).get("effort")
    ours: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if kind == "enabled":
        given = {"enable_thinking": True, "thinking": True, **given}
        if thinking.get("budget_tokens") is not None:
            ours["thinking_token_budget"] = thinking["budget_tokens"]
    return ours | {"chat_template_kwargs": given}


# -- what went before ------------------------------------------------------------------------------
def conversation(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat, behind what the system says."""
    system = value_of(fields, "system", str | list[dict[str, Any]], "")
    if isinstance(system, list):
        system = [block for block in system if not str(block.get("text")).startswith(NO_PROMPT)]
    told = "\n".join(_texts(system, "system"))
    said = [{"role": "system", "content": told}] if told else []
    messages = value_of(fields, "messages", list[dict[str, Any]], [])
    names: dict[Any, Any] = {}  # of the tools that were called, by the ids of the calls
    for i, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}].content"
        if role not in ROLES:
            raise bad_request(
                "invalid_value", f"messages[{i}].role is user or assistant", "messages"
            )
        if not isinstance(content, list):
            said.append({"role": role, "content": content_of(_texts(content, where))})
        elif role == "assistant":
            said.append(_turn(content, where, names))
        else:
            said += _said(role, content, where, names)
    return said


def _turn(content: list[Any], where: str, names: dict[Any, Any]) -> dict[str, Any]:
    """Return an assistant turn as a chat message: its thinking, text and tool calls."""
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    for kind, block, place in _blocks(content, where):
        if kind == "thinking":
            thoughts.append(string_in(block, "thinking", place))
        elif kind == "tool_use":
            name, arguments = string_in(block, "name", place), block.get("input", {})
            if not isinstance(arguments, dict):
                raise bad_request("invalid_type", f"{place}.input must be an object", "messages")
            id = string_in(block, "id", place)
            names[id] = name
            calls.append(tool_call(id, name, arguments))
        else:
            texts += _text(kind, block, place)
    turn: dict[str, Any] = {"role": "assistant", "content": content_of(texts)}
    turn |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return turn | ({"tool_calls": calls} if calls else {})


def _said(
    role: str, content: list[Any], where: str, names: dict[Any, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of a user turn: one for each tool result, and its text."""
    texts: list[str] = []
    told = False
    for kind, block, place in _blocks(content, where):
        if kind != "tool_result":
            texts += _text(kind, block, place)
            continue
        if texts:
            yield {"role": role, "content": content_of(texts)}
            texts = []
        yield _result(block, place, names)
        told = True
    if texts or not told:
        yield {"role": role, "content": content_of(texts)}


def _result(block: dict[str, Any], place: str, names: dict[Any, Any]) -> dict[str, Any]:
    id = string_in(block, "tool_use_id", place)
    text = "\n".join(_texts(block.get("content") or "", f"{place}.content"))
    if block.get("is_error"):
        text = f"Error: {text}"  # templates know nothing of it
    return tool_result(id, text, names)


def _texts(content: Any, where: str) -> list[str]:
    """The texts of some content: a string, or blocks."""
    if isinstance(content, str):
        return [content]
    return [text for block in _blocks(content, where) for text in _text(*block)]


def _blocks(content: Any, where: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Kind, block and place."""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(
            "invalid_type", f"{where} must be a string or a list of blocks", where.partition("[")[0]
        )
    for i, block in enumerate(content):
        yield str(block.get("type")), block, f"{where}[{i}]"


def _text(kind: str, block: dict[str, Any], place: str) -> list[str]:
    """The text of a block; nothing where nobody has it."""
    if kind in UNREAD:
        return []
    if kind == "text":
        return [string_in(block, "text", place)]
    message = f"{place}: blocks of type {kind[:40]!r} are not supported here, only text"
    raise bad_request("unsupported_parameter", message, place.partition("[")[0])
