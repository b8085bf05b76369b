"""The tables of families, names and settings that lie as JSON beside the code. Owns how they are
read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(name: str) -> dict[str, Any]:
    """The table of this name."""
    read: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_bytes())
    return read
