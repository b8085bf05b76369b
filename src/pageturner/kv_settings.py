"""KVSettings: where KV lies beside the memory that is computed with, and who is told of its blocks.

Owns these settings, which `EngineConfig` has by inheritance, beside those of its scheduler: of two bases only
one can have slots, which is theirs. Must not know what a setting does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.option import option


@dataclass(frozen=True, kw_only=True)
class KVSettings:
    """Tiers of KV, KV events, and prefill elsewhere."""

    kv_host_memory: int = option(
        0, "bytes of host memory for KV blocks that the KV cache has no room for (suffixes K, M, G)", least=0
    )
    kv_file: str = option(
        "", "file for KV blocks, which later engines and others of this machine find there; made if absent"
    )
    kv_file_size: int = option(8 << 30, "bytes that a new --kv-file may take (suffixes K, M, G, T)", least=1)
    kv_events: str = option(
        "",
        "ZeroMQ address, as tcp://*:5557, at which KV events are published in vLLM's format, for routers",
    )
    kv_events_replay: str = option(
        "", "address, as tcp://*:5558, at which those who missed KV events may ask for the last ones"
    )
    kv_events_topic: str = option("", "topic of KV events, by which subscribers may choose")
    role: str = option(
        "both",
        "what a router gives this server: answers, or none because it computes prompts for others (prefill)",
        choices=("both", "prefill", "decode"),
    )
    prefill_listen: str = option("", "HOST:PORT at which other engines may have prompts computed here")
    prefill_from: str = option(
        "", "HOST:PORT of engines, with commas between, that are asked to compute long prompts"
    )
    prefill_key_file: str = option(
        "", "file with the key that these engines share (else the environment: PAGETURNER_PREFILL_KEY)"
    )
    prefill_tokens: int = option(
        512, "tokens of a prompt that are not cached, from which on another engine is asked", least=1
    )
    prefill_timeout: float = option(
        5.0, "seconds without KV after which a prompt is computed here after all", least=0.05, most=600
    )
