"""One setting: a dataclass field that carries its explanation and its allowed values.

Owns how they are kept with the field. Must not know any setting. Standard library only.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    repeats: bool = False,
) -> Any:
    """A dataclass field that carries its explanation and its allowed values. repeats: its flag may
    be given several times."""
    about = {"help": help, "choices": choices, "least": least, "most": most, "repeats": repeats}
    return field(default=default, metadata=about)
