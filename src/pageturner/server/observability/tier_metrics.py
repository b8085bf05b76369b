"""The figures of KV tiers in /server_info.

Owns the names of its fields. Must not know how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATES = ("off", "reads", "writes")


def told(engine: Mapping[str, float], counters: Mapping[str, int]) -> dict[str, Any]:
    """Return by tier: hits, blocks stored, errors, blocks and bytes that are there. {} without
    tiers."""
    if "kv_file_state" not in engine:
        return {}
    names = ("hits", "stored", "errors")
    tiers: dict[str, Any] = {}
    for tier in ("host", "file"):
        found = {name: counters.get(f"kv_{tier}_{name}", 0) for name in names}
        there = {name: int(engine.get(f"kv_{tier}_{name}", 0)) for name in ("blocks", "bytes")}
        tiers[tier] = found | there
    tiers["file"]["state"] = STATES[int(engine["kv_file_state"])]
    tiers["file"]["late"] = counters.get("kv_file_late", 0)
    tiers["file"]["skipped"] = counters.get("kv_file_skipped", 0)
    return tiers
