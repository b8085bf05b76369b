"""Fields of other servers that would change what an answer may be, under names that are not ours.

Owns those names, which are in foreign_fields.json: a request that sends one means it, so it is
refused rather than answered without it. Must not know the fields that are understood (body.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_TABLES: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("foreign_fields.json").read_bytes()
)
# of other servers: field -> values that change nothing and are taken, beside null
FOREIGN = {name: tuple(values) for name, values in _TABLES["neutral"].items()}
# field -> what is said of it, where there is more to say than that it is not supported
FOREIGN_NAMES = _TABLES["meant"]
# known, and not there yet: field -> the same
UNSUPPORTED = {name: tuple(values) for name, values in _TABLES["absent"].items()} | FOREIGN
