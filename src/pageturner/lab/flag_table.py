"""Flags of commands as tables, and the ranges of their numbers.

Owns how a row becomes a flag. Must not know any flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from pageturner.errors import bad_setting

RANGES = {
    "above 0": lambda value: value > 0,
    "more than 0": lambda value: 0 < value < float("inf"),
    "0 or more": lambda value: 0 <= value < float("inf"),
    "1 or more": lambda value: value >= 1,
    "6 or more": lambda value: value >= 6,
}


class FlagParser(Protocol):
    """A parser of flags, or a group of one."""

    def add_argument(self, *names: str, **more: Any) -> Any: ...


def add_flags(parser: FlagParser, rows: Iterable[tuple[Any, ...]]) -> None:
    """Add a flag for each row: its name and metavar, its default or its type, its help, its choices
    if any.

    A type alone means that there is no default; bool is a switch, list collects paths.
    """
    for names, kind, text, *choices in rows:
        name, _, metavar = names.partition(" ")
        more: dict[str, Any] = {"default": kind, "type": type(kind)}
        if kind is bool:
            more = {"action": "store_true"}
        elif kind is list:
            more = {"action": "append", "type": Path, "default": []}
        elif isinstance(kind, type):
            more = {"type": kind}
        elif isinstance(kind, Path):
            more["type"] = Path
        if metavar:
            more["metavar"] = metavar
        if choices:
            more["choices"] = choices[0]
        parser.add_argument(name, help=text, **more)


def check_range(arguments: argparse.Namespace, rule: str, *names: str) -> None:
    """EngineFault('bad_setting') for a number of these flags that breaks the rule, a key of
    RANGES."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not RANGES[rule](value):
            raise bad_setting(f"--{name.replace('_', '-')} is {rule}, not {value}")
