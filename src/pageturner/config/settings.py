"""One frozen dataclass tree from TOML and flags. An unknown key is an error. Source of the flag
reference.

Owns names, defaults and one-line explanations of every setting. Must not import any room.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from pageturner.config import setting_flags
from pageturner.config.kv_settings import KVSettings
from pageturner.config.setting_flags import SettingFlag
from pageturner.config.setting_values import checked
from pageturner.config.watch_settings import WatchSettings
from pageturner.errors import bad_setting
from pageturner.option import option
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.reserves import RESERVES
from pageturner.policies.scheduler_config import SchedulerConfig


def _formats(table: str) -> tuple[str, ...]:
    """The names of the formats in one of the tables that text/ reads."""
    rows = json.loads((Path(__file__).parents[1] / "text/markup" / table).read_text("utf-8"))
    return tuple(row["name"] for row in rows)


@dataclass(frozen=True, slots=True)
class EngineConfig(SchedulerConfig, KVSettings):
    """Everything that belongs to a model and its engine, the settings of its scheduler among them.
    Holds no secrets: it is passed on a command line."""

    model: str = option(
        "smollm2", "a GGUF file, a Hugging Face folder, its id on the hub, or an alias (smollm2)"
    )
    max_model_len: int = option(
        0, "longest sequence, prompt and output, in tokens; 0: the model's context", least=0
    )
    kv_cache_memory: int = option(
        0, "bytes for the KV cache (suffixes K, M, G, T); 0: chosen from free memory", least=0
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share, 0 to 1, of a GPU's memory that is free behind the weights, for the KV cache; no effect on a CPU",
        least=0.05,
        most=1.0,
    )
    kv_survival: bool = option(
        True,
        "after a crash of the engine, use its intact KV blocks again; needs prefix caching",
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache",
        ("auto", "float16", "bfloat16", "fp8_e4m3", "int8", "float32"),
    )
    dtype: str = option(
        "auto", "auto: weights as in the file; float32: dequantised", ("auto", "float32")
    )
    load_format: str = option(
        "auto",
        "auto: weights from the model's files; dummy: random ones of the shapes in a folder's config.json, to"
        " measure without weights",
        ("auto", "dummy"),
    )
    load_seed: int = option(0, "seed of the weights of --load-format dummy", least=0)
    generation_config: str = option(
        "auto",
        "sampling defaults; auto: the model's own; none: neutral; or a folder or generation_config.json",
    )
    quantization: str = option(
        "none",
        "quantise float weights at load, in groups of 32: error 0.5 % (int8) or 8 % (int4)",
        ("none", "int8", "int4"),
    )
    activation_bits: str = option(
        "auto",
        "rounding of activations for quantised weights; auto: 12 with AVX-512 VNNI, else 15 in few matrices"
        " (with AVX2 in all of 8 bits)",
        ("auto", "8", "12", "15"),
    )
    packed_cache: str = option(
        "",
        "folder in which weights are kept in the layout of the kernels, so that the next start is faster",
    )
    speculation: str = option(
        "auto",
        "speculative decoding, as far as it pays; suffix: draft tokens from repeated passages of prompt, answer"
        " and what the tenant was told lately; auto: suffix; ngram: of prompt and answer only; draft: from"
        " --draft-model; mtp: from the head of the checkpoint that predicts a second token",
        ("auto", "off", "suffix", "ngram", "draft", "mtp"),
    )
    draft_model: str = option(
        "", "draft model of --speculation draft: a smaller model with the same tokenizer"
    )
    max_loras: int = option(
        32,
        "most LoRA adapters in memory; other registered adapters are loaded when a request names them",
        least=1,
    )
    threads: int = option(0, "kernel threads; 0: one per core that this process may use", least=0)
    tensor_parallel_size: int = option(
        1,
        "processes that divide each layer among them: one for each GPU, or one for each NUMA node",
        least=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "processes that have some of the layers each, for a model larger than one NUMA node's memory",
        least=1,
    )
    pin_threads: bool = option(False, "bind each kernel thread but the first to a core of its own")
    step_log: str = option("", "append every step to this file, for replay, simulate and calibrate")
    step_log_tokens: bool = option(
        False,
        "write tokens, not keyed digests, into the step log, so that replay can compare answers",
    )
    backend: str = option(
        "auto",
        "kernels; auto: native if they were built and this CPU can run them",
        ("auto", "native", "reference", "fake", "null"),
    )
    async_scheduling: bool = option(
        True, "on a GPU, plan and launch each step while the one before it runs; no effect on a CPU"
    )
    device: str = option(
        "auto",
        "device of --backend auto; auto: an NVIDIA GPU of a kind whose answers are"
        " checked, or the CPU; see doctor",
        ("auto", "cuda", "cpu"),
    )


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Settings of what every program that listens takes from clients, and from whom."""

    max_body_size: int = option(4 * 1024 * 1024, "largest request body in bytes", least=1)
    max_body_memory: int = option(
        128 * 1024 * 1024,
        "bytes of request bodies being received at once; more than 32 KB of one beyond that are answered 503",
        least=0,
    )
    max_connections: int = option(
        4096, "most open connections; fewer where this process may open fewer files", least=1
    )
    header_timeout: float = option(
        10.0, "seconds that the head of a request may take from its first byte on", least=0.01
    )
    body_timeout: float = option(
        30.0,
        "seconds without a byte of a request body; after them, also below 1 KB a second",
        least=0.01,
    )
    send_timeout: float = option(
        60.0,
        "seconds for which a client may read nothing of an answer that waits for it; after them, also below"
        " 1 KB a second",
        least=0.01,
    )
    ssl_certfile: str = option(
        "",
        "PEM file of the certificate, and those between it and its root, to speak https; SIGHUP: again",
    )
    ssl_keyfile: str = option("", "PEM file of its key; default: it stands in --ssl-certfile")
    ssl_keyfile_password: str = option("", "of an encrypted key")
    allowed_hosts: str = option(
        "",
        "names by which clients without a key may address this server, with commas; * for all; localhost"
        " and, unless it only listens there, IP addresses and names without a dot always may be used",
    )
    allowed_origins: str = option(
        "",
        "origins, as https://chat.example.com, whose web pages may ask this server, with commas; * for all",
    )


@dataclass(frozen=True, slots=True)
class ServerConfig(HttpConfig, WatchSettings):
    """Everything the API process needs beyond the engine's settings."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one", least=0, most=65535)
    served_model_name: str = option(
        "",
        "model name in requests, or several with commas, the first in answers (default: alias or file name)",
    )
    lora: str = option(
        "",
        "a LoRA adapter: its name, which requests give as their model, and its folder as PEFT writes it; give"
        " the flag again for each",
        repeats=True,
    )
    api_key: str = option(
        "",
        "key that clients must send, or several with commas: KEY or TENANT:KEY; also from PAGETURNER_API_KEY",
    )
    api_key_file: str = option(
        "",
        "file of API keys, one in each line, or of their hashes and limits (see `pageturner key new`)",
    )
    admin_key: str = option(
        "",
        "key for /v1/admin, which is off without this key or an API key with admin = true; also from"
        " PAGETURNER_ADMIN_KEY",
    )
    page_settings: bool = option(
        False,
        "let the page at / change policy, order and budget; only on this machine, and without keys",
    )
    receipt_key_file: str = option(
        "",
        "file of the key that signs receipts, 32 bytes or more; also from PAGETURNER_RECEIPT_KEY",
    )
    shutdown_timeout: float = option(
        30.0, "seconds that open requests have to finish after SIGTERM", least=0
    )
    engine_timeout: float = option(
        30.0,
        "restart the engine after this many seconds without a finished step while requests wait",
        least=0.1,
    )
    tool_call_parser: str = option(
        "auto",
        "format of tool calls; auto: as the chat template says",
        ("auto", *_formats("calls.json")),
    )
    reasoning_parser: str = option(
        "auto",
        "format of reasoning; auto: as the chat template says; none: reasoning is part of the content",
        ("auto", "none", *_formats("thoughts.json")),
    )
    chat_template: str = option(
        "",
        "chat template: a file, its text, or the name of a family (chatml, llama-3 ...); default: the model's"
        " own, or else its family's",
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring a chat template of their own (field chat_template)"
    )
    rerank_by: str = option(
        "auto",
        "how /v1/rerank and /v1/score judge documents; cosine: of the embeddings of query and document;"
        " yes_no: the probability that the model says yes; auto: yes_no for reranker models, else cosine",
        ("auto", "cosine", "yes_no"),
    )
    rerank_template: str = option(
        "",
        "prompt of --rerank-by yes_no, as a file or text with {query}, {document} and optionally"
        " {instruction} (default: the model's own, or one through the chat template)",
    )
    text_timeout: float = option(
        10.0,
        "seconds that one long request may take to be parsed, templated and tokenised",
        least=0.1,
    )
    text_memory: int = option(
        1024**3,
        "bytes that parsing, templating and tokenising one long request may take (suffixes K, M, G)",
        least=1 << 28,
    )
    max_prompts_per_request: int = option(1024, "most prompts in one request", least=1)
    max_logit_entries_per_request: int = option(
        131_072,
        "most entries of logit_bias, allowed_token_ids and similar fields over all answers of a request; one"
        " answer may always name every token",
        least=1,
    )
    max_logprobs_per_request: int = option(
        4_194_304,
        "most logprobs in one request; a single answer may always ask for its own",
        least=1,
    )
    max_json_values: int = option(
        65_536,
        "most JSON values in one field of a request, lists of prompts and tokens aside",
        least=1024,
    )
    max_tokenize_size: int = option(
        1_048_576,
        "most characters that /tokenize takes, and tokens that /detokenize takes",
        least=1,
    )
    max_pinned_share: float = option(
        0.5,
        "share of the KV memory, 0 to 1, for pinned prefixes, divided equally among tenants",
        least=0,
        most=1,
    )
    response_memory: int = option(
        64 * 1024 * 1024,
        "bytes of stored answers of /v1/responses; the oldest are dropped first",
        least=0,
    )
    batch_dir: str = option(
        "",
        "folder for /v1/files and /v1/batches, used by this server only; without it these routes are off",
    )
    max_file_size: int = option(1024**3, "bytes of a file of /v1/files (suffixes K, M, G)", least=1)
    max_batch_lines: int = option(50_000, "most lines of a file of /v1/files", least=1)
    max_files: int = option(1000, "most files that a tenant keeps in /v1/files", least=1)
    max_restarts: int = option(
        16,
        "engine restarts in a row, without progress, after which open requests are answered 503; restarts go"
        " on, up to 5 s apart",
        least=0,
    )
    preload: str = option(
        "",
        "file of prefixes (text, or JSON lines) to compute at the start and keep in the KV cache",
    )
    developer: bool = option(False, "accept request fields for developers, such as forced_end")


@dataclass(frozen=True, slots=True)
class RouterConfig(HttpConfig, WatchSettings):
    """Everything that `pageturner route` needs beyond the addresses of its replicas."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8080, "port to listen on; 0: any free one", least=0, most=65535)
    placement: str = option(
        "prefix_aware",
        "how a replica is chosen for a request",
        ("round_robin", "least_loaded", "prefix_aware"),
    )
    prefix_chunks: int = option(
        100_000,
        "chunks of 256 bytes of prompts that are remembered, to find their replica again; each takes 0.2 KB",
        least=1,
    )
    max_open: int = option(1024, "most requests under way; one more is answered 429", least=1)
    max_open_per_replica: int = option(512, "most requests under way at one replica", least=1)
    retries: int = option(2, "other replicas to try after the first one failed", least=0)
    retry_budget: float = option(
        0.2,
        "retries per request of the last 10 s, beside 10 a second that are always allowed",
        least=0,
    )
    health_interval: float = option(
        1.0, "seconds between two health checks of a replica", least=0.01
    )
    health_timeout: float = option(
        2.0, "seconds that a replica has to answer a health check", least=0.01
    )
    connect_timeout: float = option(
        2.0, "seconds that connecting to a replica may take", least=0.01
    )
    read_timeout: float = option(
        600.0,
        "seconds that a replica has to begin its answer, and for each piece after that",
        least=0.01,
    )
    loads: str = option(
        "requests",
        "what a replica's load is counted in: requests, or tokens that it has yet to compute, predicted",
        ("tokens", "requests"),
    )
    slow_start: float = option(
        10.0,
        "seconds in which a replica that comes later is given more and more",
        least=0,
    )
    outlier_latency: float = option(
        0.0,
        "a replica whose streams begin so many times later than others is put aside for a while; 0: none",
        least=0,
    )
    replicas_file: str = option(
        "",
        "file with one replica a line, [MODEL,...=]URL, read again when it changes; # begins a comment",
    )
    resolve_interval: float = option(
        5.0, "seconds between two looks at the addresses of a dns+http://NAME:PORT", least=0.05
    )
    register_key: str = option(
        "",
        "key with which replicas register at /v1/router/replicas, which is off without one; also from"
        " PAGETURNER_REGISTER_KEY",
    )
    register_ttl: float = option(
        15.0,
        "seconds after which a registered replica that does not say so again is taken out",
        least=0.1,
    )
    move_timeout: float = option(
        20.0,
        "seconds that a stream whose replica is gone waits for another to continue it",
        least=0,
    )
    ssl_ca: str = option(
        "", "PEM file of root certificates for https replicas (default: those of this machine)"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that open requests get to finish on SIGTERM", least=0
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree; TOML tables are named like the fields."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    router: RouterConfig = RouterConfig()


SECTIONS = {"engine": EngineConfig, "server": ServerConfig, "router": RouterConfig}


def settings_of(section: str) -> list[Field[Any]]:
    """The settings of a section, its own before those that it inherits."""
    every = fields(SECTIONS[section])
    bases = (SchedulerConfig, KVSettings, HttpConfig, WatchSettings)
    inherited = {one.name for base in bases for one in fields(base)}
    return sorted(every, key=lambda one: one.name in inherited)


REGISTRIES: dict[str, Iterable[str]] = {"policy": POLICIES, "order": ORDERS, "admission": RESERVES}


def choices_of(setting: Field[Any]) -> tuple[str, ...]:
    """Return what a setting may be: the names of a registry, or those that it lists; () if it is
    free."""
    listed: tuple[str, ...] = setting.metadata["choices"]
    return tuple(REGISTRIES.get(setting.name, listed))


def load(path: str | None = None, flags: dict[str, dict[str, Any]] | None = None) -> Config:
    """The defaults, then the TOML file, then the flags. EngineFault('bad_setting') says what is
    wrong."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if path is not None:
        for name, table in _read_toml(path).items():
            if name not in SECTIONS or not isinstance(table, dict):
                raise bad_setting(
                    f"{path}: unknown key {name!r}: the tables are {_names(SECTIONS)}"
                )
            tables[name].update(table)
    for name, values in (flags or {}).items():
        tables[name].update(values)
    return Config(**{name: _section(name, SECTIONS[name], tables[name]) for name in SECTIONS})


def _read_toml(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise bad_setting(f"cannot read the configuration file {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise bad_setting(f"{path} is not valid TOML: {error}") from error


def _section(name: str, kind: type[Any], values: dict[str, Any]) -> Any:
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise bad_setting(f"unknown key {key!r} in [{name}]: the keys are {_names(known)}")
    return kind(**{key: check(known[key], value) for key, value in values.items()})


def check(setting: Field[Any], value: Any) -> Any:
    """The value in the type of the setting's default. EngineFault('bad_setting') if it is not
    allowed."""
    return checked(setting, value, choices_of(setting))


def add_flags(
    parser: argparse.ArgumentParser, *sections: str, leave_out: tuple[str, ...] = ()
) -> None:
    """One flag for each setting of these sections, in groups. Only flags that were given show up in
    the result."""
    setting_flags.add_flags(
        parser,
        [
            SettingFlag(section, setting, choices_of(setting))
            for section in sections
            for setting in settings_of(section)
            if setting.name not in leave_out
        ],
    )


def from_flags(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what `add_flags` found, by section, for `load`. EngineFault for a number that is
    none."""
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for target, value in vars(arguments).items():
        section, dot, name = target.partition(".")
        if not dot:
            continue
        setting = next(f for f in fields(SECTIONS[section]) if f.name == name)
        if isinstance(setting.default, float):
            try:
                value = float(value)
            except ValueError:
                raise bad_setting(
                    f"--{name.replace('_', '-')} is a number, not {value!r}"
                ) from None
        values[section][name] = value
    return values


def flag_reference() -> str:
    """The flags in docs/api.md, with their defaults; --help says what they mean."""
    lines = []
    for section in SECTIONS:
        flags = []
        for setting in settings_of(section):
            default = f" {setting.default}" if setting.default != "" else ""
            flags.append(f"`--{setting.name.replace('_', '-')}`{default}")
        lines += [f"**[{section}]** {', '.join(flags)}.", ""]
    return "\n".join(lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
