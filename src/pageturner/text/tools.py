"""The tools of a request: what one is, which of them may be called, and whether one must be.

Owns the checks of `tools`, `tool_choice` and `parallel_tool_calls`; ClientError names the field
that is wrong. Must not know how a model writes calls (tool_formats.py) nor how one is held to it
(tool_grammar.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pageturner.errors import ClientError

MAX_TOOLS = 128
LONGEST_NAME = 128
NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{LONGEST_NAME}}}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """name, parameters  the function, and the JSON schema of its arguments
    strict  the schema holds to the letter; else what cannot be held of it is passed over
    shown   as the client has sent it: what a template shows
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    shown: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """tools     that may be called; none: no call is looked for
    required  the answer is a call
    named     the client has said of which tool
    several   the answer may have more than one call
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    named: bool = False
    several: bool = True
    shown: tuple[dict[str, Any], ...] = field(default=())


NOT_ASKED = ToolChoice()


def read(tools: list[Any] | None, choice: Any, parallel: bool | None) -> ToolChoice:
    """Read the three fields. With the choice "none" the model is not told of its tools either."""
    if not tools and choice is None:
        return NOT_ASKED
    known = _tools(tools or [])
    mode, names = _mode(choice)
    if mode == NONE:
        return NOT_ASKED
    named = mode == NAMED
    if not known:
        if mode == REQUIRED or named:
            raise _wrong("tool_choice", "tool_choice asks for a call, and there are no tools")
        return NOT_ASKED
    strange = set(names or ()) - {tool.name for tool in known}
    if strange:
        raise _wrong(
            "tool_choice", f"tool_choice names {min(strange)[:64]!r}, which is none of the tools"
        )
    return ToolChoice(
        tools=tuple(tool for tool in known if names is None or tool.name in names),
        required=mode in (REQUIRED, NAMED),
        named=named,
        several=parallel is not False and not named,
        shown=tuple(tool.shown for tool in known),
    )


def _mode(choice: Any) -> tuple[str, tuple[str, ...] | None]:
    """The mode, and the names of the tools that may be called; None: all of them."""
    if choice is None:
        return AUTO, None
    if choice in (AUTO, NONE, REQUIRED):
        return str(choice), None
    if choice == "any":  # Mistral's word
        return REQUIRED, None
    kind = choice.get("type", "function") if isinstance(choice, dict) else None
    if kind == "function" and (name := _function_name(choice)) is not None:
        return NAMED, (name,)
    allowed = choice.get("allowed_tools") if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list) and allowed["tools"]:
        names = tuple(map(_function_name, allowed["tools"]))
        if allowed.get("mode", AUTO) in (AUTO, REQUIRED) and None not in names:
            return allowed.get("mode", AUTO), tuple(map(str, names))
    form = '{"type": "function", "function": {"name": ...}}'
    raise _wrong(
        "tool_choice", f"tool_choice is none, auto, required, {form} or a list of allowed_tools"
    )


def _function_name(one: Any) -> str | None:
    """The name in an object of the form of a tool."""
    function = one.get("function") if isinstance(one, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tools(tools: list[Any]) -> list[Tool]:
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"{len(tools)} tools, at most {MAX_TOOLS} are taken")
    read = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool.name for tool in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _wrong("tools", f"two tools have the name {twice!r}")
    return read


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _wrong("tools", f'{place}.type must be "function"', "unsupported_parameter")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong("tools", f"{place}.function must be an object", "invalid_type")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        letters = f"1 to {LONGEST_NAME} letters, digits, underscores, dots or dashes"
        raise _wrong("tools", f"{place}.function.name must be {letters}")
    if not isinstance(function.get("description"), str | None):
        raise _wrong("tools", f"{place}.function.description must be a string", "invalid_type")
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong("tools", f"{place}.function.strict must be true or false", "invalid_type")
    if not isinstance(parameters, dict | None):
        raise _wrong("tools", f"{place}.function.parameters must be a JSON schema", "invalid_type")
    schema = parameters or NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise _wrong(
            "tools",
            f"{place}.function.parameters must be the schema of an object",
            "invalid_schema",
        )
    shown = {key: value for key, value in function.items() if value is not None and key != "strict"}
    shown["parameters"] = schema
    return Tool(
        name=name,
        parameters={"type": "object", **schema},
        strict=bool(function.get("strict")),
        shown={"type": "function", "function": shown},
    )


def _wrong(param: str, message: str, code: str = "invalid_value") -> ClientError:
    return ClientError(400, code, message, param)
