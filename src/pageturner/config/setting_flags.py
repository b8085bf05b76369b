"""One command-line flag for each setting, in the groups in which `--help` shows them.

Owns the groups and how a flag looks. Must not know any section of the settings, nor what a setting
may be: it is given both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import Field, dataclass
from typing import Any

OTHERS = "HTTP and TLS"  # the group of a setting that no group names
MEBI = 1 << 20
LONGEST_CHOICES = (
    80  # characters of choices that are shown beside their flag; longer ones stand in the text
)

# title -> settings, in the order in which --help shows them
GROUPS: dict[str, tuple[str, ...]] = {
    "model and weights": (
        "model",
        "max_model_len",
        "dtype",
        "quantization",
        "load_format",
        "load_seed",
        "generation_config",
        "chat_template",
    ),
    "KV memory": (
        "kv_cache_memory",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "block_size",
        "enable_prefix_caching",
        "snapshot_interval",
        "preload",
        "max_pinned_share",
        "max_sessions",
        "max_session_share",
        "session_keep",
        "session_wait",
        "kv_host_memory",
        "kv_file",
        "kv_file_size",
        "kv_survival",
    ),
    "scheduling": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_prefill_beside_decode",
        "max_queue",
        "policy",
        "order",
        "ageing",
        "admission",
        "output_weight",
        "context_price",
    ),
    "scheduling: settings of single policies": (
        "tpot_ms",
        "knee_tokens",
        "knee_seqs",
        "served_ratio",
        "served_steps",
        "static_batch",
        "static_patience",
        "window_ms",
    ),
    "decoding: drafts, tools, reasoning, reranking": (
        "speculation",
        "draft_model",
        "tool_call_parser",
        "reasoning_parser",
        "trust_request_chat_template",
        "rerank_by",
        "rerank_template",
    ),
    "LoRA adapters": ("lora", "max_loras"),
    "speed": (
        "device",
        "async_scheduling",
        "backend",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "threads",
        "pin_threads",
        "activation_bits",
        "packed_cache",
    ),
    "replicas": (
        "placement",
        "prefix_chunks",
        "max_open",
        "max_open_per_replica",
        "retries",
        "retry_budget",
        "health_interval",
        "health_timeout",
        "connect_timeout",
        "read_timeout",
        "move_timeout",
        "ssl_ca",
        "loads",
        "slow_start",
        "outlier_latency",
    ),
    "replicas that come and go": (
        "replicas_file",
        "resolve_interval",
        "register_key",
        "register_ttl",
    ),
    "address, names and keys": (
        "host",
        "port",
        "served_model_name",
        "api_key",
        "api_key_file",
        "admin_key",
        "receipt_key_file",
        "allowed_hosts",
        "allowed_origins",
    ),
    OTHERS: (
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_keyfile_password",
        "max_body_size",
        "max_body_memory",
        "max_connections",
        "header_timeout",
        "body_timeout",
        "send_timeout",
    ),
    "limits of one request": (
        "max_prompts_per_request",
        "max_logprobs_per_request",
        "max_logit_entries_per_request",
        "max_json_values",
        "max_tokenize_size",
        "text_timeout",
        "text_memory",
    ),
    "files, batches and stored responses": (
        "batch_dir",
        "max_file_size",
        "max_batch_lines",
        "max_files",
        "response_memory",
    ),
    "restart and shutdown": ("shutdown_timeout", "engine_timeout", "max_restarts"),
    "watching and debugging": (
        "log_level",
        "log_format",
        "otlp_traces_endpoint",
        "step_log",
        "step_log_tokens",
        "developer",
    ),
    "cluster: prefill elsewhere, KV events": (
        "role",
        "prefill_listen",
        "prefill_from",
        "prefill_key_file",
        "prefill_tokens",
        "prefill_timeout",
        "kv_events",
        "kv_events_replay",
        "kv_events_topic",
    ),
}


@dataclass(frozen=True, slots=True)
class SettingFlag:
    """A setting of a section, and what it may be: () if it is free."""

    section: str
    setting: Field[Any]
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        return "--" + self.setting.name.replace("_", "-")

    @property
    def group(self) -> str:
        """The title under which --help shows it."""
        return next(
            (title for title, names in GROUPS.items() if self.setting.name in names), OTHERS
        )

    def explained(self) -> str:
        """Return the text of --help for a setting."""
        default = self.setting.default
        text = str(self.setting.metadata["help"])
        if self.choices and not self._choices_fit():
            text += f" (one of {', '.join(self.choices)})"
        return text if default == "" else f"{text} (default: {self._default()})"

    def _default(self) -> str:
        default: Any = self.setting.default
        if isinstance(default, bool):
            return "on" if default else "off"
        if "bytes" in self.setting.metadata["help"] and default and default % MEBI == 0:
            return (
                f"{default // MEBI}M" if default % (MEBI << 10) else f"{default // (MEBI << 10)}G"
            )
        return str(default)

    def _choices_fit(self) -> bool:
        return len(",".join(self.choices)) <= LONGEST_CHOICES

    def arguments(self) -> dict[str, Any]:
        """Return what `add_argument` takes beside the name. Only a flag that was given shows up in
        the result."""
        kind: dict[str, Any] = {"metavar": self._metavar()}
        if isinstance(self.setting.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif self.setting.metadata["repeats"]:
            kind = {"action": JoinedAction, "metavar": "NAME=PATH"}
        help = self.explained().replace("%", "%%")
        target = f"{self.section}.{self.setting.name}"
        return {"dest": target, "default": argparse.SUPPRESS, "help": help, **kind}

    def _metavar(self) -> str:
        if self.choices and self._choices_fit():
            return "{" + ",".join(self.choices) + "}"
        if isinstance(self.setting.default, int):
            return "SIZE" if "bytes" in self.setting.metadata["help"] else "N"
        return self.setting.name.rsplit("_", 1)[-1].upper()


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[SettingFlag]) -> None:
    """Add them to the parser, group by group."""
    every = list(flags)
    for title in GROUPS:
        if members := [flag for flag in every if flag.group == title]:
            group = parser.add_argument_group(title)
            order = {name: place for place, name in enumerate(GROUPS[title])}
            for flag in sorted(members, key=lambda flag: order.get(flag.setting.name, len(order))):
                group.add_argument(flag.name, **flag.arguments())


class JoinedAction(argparse.Action):
    """A list that a flag is given piece by piece, with commas between."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{values}" if before else values)
