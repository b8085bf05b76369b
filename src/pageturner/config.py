"""One frozen dataclass tree from TOML and flags. An unknown key is an error. Source of the flag reference.

Owns names, defaults and one-line explanations of every setting. Must not import any room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries its explanation and its allowed values."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs. Holds no secrets: it is passed on a command line."""

    model: str = option("smollm2", "path of a GGUF file, or an alias (smollm2)")
    max_model_len: int = option(0, "longest sequence, prompt and output, in tokens; 0: the model's context")
    max_num_seqs: int = option(64, "most sequences running at once")
    max_num_batched_tokens: int = option(512, "token budget of one step; 0: no limit")
    max_queue: int = option(1024, "most requests waiting; one more is answered 429")
    kv_cache_memory: int = option(0, "bytes for the KV cache (suffixes K, M, G); 0: chosen from free memory")
    kv_cache_dtype: str = option("auto", "type of the KV cache", ("auto", "float16", "float32"))
    block_size: int = option(16, "tokens in one KV block, 1 to 256")
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prefixes")
    dtype: str = option("auto", "auto: weights as in the file; float32: dequantised", ("auto", "float32"))
    policy: str = option("chunked", "batching policy", ("chunked", "prefill_first", "static"))
    order: str = option("fcfs", "queue order", ("fcfs",))
    static_batch: int = option(16, "requests in a batch of the static policy")
    admission: str = option("none", "KV reserved for a request at admission", ("none", "full"))
    threads: int = option(0, "kernel threads; 0: one per core that this process may use")
    backend: str = option("auto", "kernels; auto: native where it was built and the CPU has it",
                          ("auto", "native", "reference", "fake", "null"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything the API process needs beyond the engine's settings."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one")
    served_model_name: str = option("", "name clients use; default: the alias or the file name")
    api_key: str = option("", "key that clients must send; also from PAGETURNER_API_KEY")
    shutdown_timeout: float = option(30.0, "seconds that open requests get to finish on SIGTERM")
    engine_timeout: float = option(30.0, "seconds without a finished step, with work queued, until restart")
    max_body_size: int = option(4 * 1024 * 1024, "largest request body in bytes")
    max_restarts: int = option(16, "engine restarts without any progress until the server gives up")
    log_level: str = option("info", "verbosity", ("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree; TOML tables are named like the fields."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
