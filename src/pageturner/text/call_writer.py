"""Calls of tools as a model writes them, from names and arguments: what call_parser.py reads.

For conversations whose template has no place for calls. Must not know messages or templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pageturner.text.call_arguments import GEMMA_QUOTE
from pageturner.text.tool_formats import GEMMA, JSON, PYTHON, ToolFormat


def written(format: ToolFormat, calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """These calls, each a name and its arguments, in the first pattern of this format; "" where it has none.
    White space stands behind commas and colons alone."""
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
