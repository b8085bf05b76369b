"""The parts of a call's pattern, for whoever writes calls or reads them.

Owns what the marks of a pattern mean (tool_formats.py has the patterns). Must not know tokens or grammars.
"""

from __future__ import annotations

import re
from functools import lru_cache

from pageturner.text.tool_formats import ToolFormat

SPACE, NAME, ARGUMENTS, ID = " ", "$NAME", "$ARGS", "$ID"
NAME_CHARACTERS = r"[A-Za-z0-9_.\-]"
_PARTS = re.compile(r"\$NAME|\$ARGS|\$ID| |[^ $]+")


@lru_cache(maxsize=256)
def parts_of(pattern: str, marks: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The pattern in parts: SPACE, NAME, ARGUMENTS, ID or text. Each mark is a part of its own."""
    split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
    parts: list[str] = []
    for part in _PARTS.findall(pattern):
        texts = split.split(part) if split and part not in (SPACE, NAME, ARGUMENTS, ID) else [part]
        parts += filter(None, texts)
    return tuple(parts)


def heads(format: ToolFormat) -> tuple[tuple[str, ...], ...]:
    """Of each pattern of a call: what begins an answer's first call, up to its arguments."""
    found = []
    for call in format.calls:
        parts = parts_of(format.opening + call, format.marks)
        found.append(parts[: parts.index(ARGUMENTS)])
    return tuple(found)


def trigger(format: ToolFormat) -> str:
    """The text that no answer has but in front of a call. "" where there is none."""
    if format.at_start or not format.calls:
        return ""
    first = parts_of(format.opening + format.calls[0], format.marks)[0]
    return "" if first in (SPACE, NAME, ARGUMENTS) else first
