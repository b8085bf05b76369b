"""The metrics of KV tiers, KV events and prefill elsewhere, and what /server_info tells of them.

Owns their names. Must not know how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# counters of the engine -> name and help, as metrics.ENGINE_COUNTERS
COUNTERS = {
    "kv_host_hits": ("pageturner:kv_host_hits", "KV blocks found in host memory"),
    "kv_host_stored": ("pageturner:kv_host_stored", "KV blocks that went down to host memory"),
    "kv_host_errors": (
        "pageturner:kv_host_errors",
        "KV blocks of host memory with a wrong checksum",
    ),
    "kv_file_hits": ("pageturner:kv_file_hits", "KV blocks found in the file"),
    "kv_file_stored": ("pageturner:kv_file_stored", "KV blocks written into the file"),
    "kv_file_errors": (
        "pageturner:kv_file_errors",
        "KV blocks of the file with a wrong checksum, and writes that failed",
    ),
    "kv_file_late": (
        "pageturner:kv_file_late",
        "KV blocks of the file that a step would have had to wait for",
    ),
    "kv_file_skipped": (
        "pageturner:kv_file_skipped",
        "Times that a KV block was not handed to the file because its writer was behind",
    ),
    "kv_tier_misses": ("pageturner:kv_tier_misses", "KV blocks looked for that no tier had"),
    "kv_sent_blocks": ("pageturner:kv_sent_blocks", "KV blocks sent to other engines"),
    "kv_sent_bytes": ("pageturner:kv_sent_bytes", "Bytes of KV sent to other engines"),
    "kv_received_blocks": (
        "pageturner:kv_received_blocks",
        "KV blocks taken in from other engines",
    ),
    "kv_received_bytes": (
        "pageturner:kv_received_bytes",
        "Bytes of KV taken in from other engines",
    ),
    "prefill_asked": (
        "pageturner:prefill_asked",
        "Prompts that another engine was asked to compute",
    ),
    "prefill_guests": ("pageturner:prefill_guests", "Prompts computed for other engines"),
    "prefill_links_failed": (
        "pageturner:prefill_links_failed",
        "Links of other engines that ended early",
    ),
    "prefill_peers_refused": (
        "pageturner:prefill_peers_refused",
        "Links of peers with another key, model or version, or that make no sense",
    ),
    "kv_event_batches": ("pageturner:kv_event_batches", "Batches of KV events published"),
    "kv_event_batches_dropped": (
        "pageturner:kv_event_batches_dropped",
        "Batches of KV events dropped",
    ),
} | {
    f"prefill_fallback_{cause}": (
        f"pageturner:prefill_fallback_{cause}",
        f"Prompts computed here after all: {why}",
    )
    for cause, why in {
        "unreachable": "no other engine could be reached",
        "refused": "the other engine refused",
        "late": "the other engine or the link was late",
        "broken": "the link broke off",
        "wrong": "what came was not what was asked for",
        "no_room": "there was no room for the KV",
        "busy": "too many were being computed elsewhere",
    }.items()
}
GAUGES = {
    "kv_host_bytes": "Bytes of KV blocks in host memory",
    "kv_file_bytes": "Bytes of KV blocks in the file",
    "kv_file_state": "0: no file; 1: it is read; 2: it is written too",
}
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
