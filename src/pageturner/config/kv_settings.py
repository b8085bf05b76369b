"""KVSettings: where KV lies beside the memory that is computed with, and who is told of its blocks.

Owns these settings, which `EngineConfig` has by inheritance, beside those of its scheduler: of two
bases only one can have slots, which is theirs. Must not know what a setting does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.option import option


@dataclass(frozen=True, kw_only=True)
class KVSettings:
    """Tiers of KV, KV events, and prefill elsewhere."""

    kv_host_memory: int = option(
        0,
        "bytes of host memory for KV blocks that were pushed out of the KV cache (suffixes K, M, G)",
        least=0,
    )
    kv_file: str = option(
        "",
        "file for KV blocks, shared with later engines and others on this machine; created if absent",
    )
    kv_file_size: int = option(
        8 << 30, "bytes that a new --kv-file may take (suffixes K, M, G, T)", least=1
    )
    kv_events: str = option(
        "",
        "publish KV events, in vLLM's format, at this ZeroMQ address, such as tcp://*:5557",
    )
    kv_events_replay: str = option(
        "", "ZeroMQ address, such as tcp://*:5558, at which missed KV events can be asked for again"
    )
    kv_events_topic: str = option("", "topic of KV events")
    role: str = option(
        "both",
        "part of this server in a cluster; prefill: it computes prompts for others, and a router sends it no"
        " requests",
        choices=("both", "prefill", "decode"),
    )
    prefill_listen: str = option("", "HOST:PORT at which this engine computes prompts for others")
    prefill_from: str = option(
        "", "HOST:PORT, or several with commas, of engines that compute long prompts for this one"
    )
    prefill_key_file: str = option(
        "", "file of the key that these engines share; also from PAGETURNER_PREFILL_KEY"
    )
    prefill_tokens: int = option(
        512,
        "prompts with at least so many tokens that are not cached are computed elsewhere",
        least=1,
    )
    prefill_timeout: float = option(
        5.0,
        "seconds without KV from elsewhere after which the prompt is computed here",
        least=0.05,
        most=600,
    )
