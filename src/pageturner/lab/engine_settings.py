"""Settings of an engine that was recorded or calibrated, for whoever simulates, tunes or replays it.

Owns which of an engine's settings a simulated scheduler takes over. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pageturner.config import EngineConfig

_ENGINE = tuple(field.name for field in fields(EngineConfig))
_SCHEDULING = frozenset(
    {"max_num_seqs", "max_num_batched_tokens", "max_queue", "block_size", "enable_prefix_caching", "policy",
     "order", "ageing", "static_batch", "static_patience", "window_ms", "served_ratio", "served_steps",
     "tpot_ms", "knee_tokens", "knee_seqs", "output_weight", "admission"}
)  # fmt: skip
# Everything that the scheduler reads, and so what decides which plans an engine makes.
SCHEDULER_OPTIONS = tuple(name for name in _ENGINE if name in _SCHEDULING)


def recorded_config(recorded: Mapping[str, Any]) -> EngineConfig:
    """The settings of a log or a calibration, without its step log. Settings that this program does not have
    come from another version and are left out."""
    known = {name: recorded[name] for name in _ENGINE if name in recorded}
    return EngineConfig(**known | {"step_log": ""})
