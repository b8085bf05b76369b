"""Flags of commands, which are tables in command_flags.json, and the ranges of their numbers.

Owns how an entry becomes a flag. Must not know any flag.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Protocol

from pageturner.errors import bad_setting

TABLES = Path(__file__).with_name("command_flags.json")
KINDS = {"int": int, "float": float, "path": Path}
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


def add_flags(parser: FlagParser, *tables: str) -> None:
    """Add the flags of these tables. An entry has its flag's names, and argparse's words for it; its
    type is one of KINDS, or text; yes_or_no is an action that --no-FLAG undoes."""
    known = json.loads(TABLES.read_bytes())
    for table in tables:
        for entry in known[table]:
            names = entry.pop("flags").split()
            if entry.get("action") == "yes_or_no":
                entry["action"] = argparse.BooleanOptionalAction
            if "type" in entry:
                entry["type"] = kind = KINDS[entry["type"]]
                if isinstance(entry.get("default"), str):
                    entry["default"] = kind(entry["default"])
            parser.add_argument(*names, **entry)


def check_range(arguments: argparse.Namespace, rule: str, *names: str) -> None:
    """EngineFault('bad_setting') for a number of these flags that breaks the rule, a key of
    RANGES."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not RANGES[rule](value):
            raise bad_setting(f"--{name.replace('_', '-')} is {rule}, not {value}")
