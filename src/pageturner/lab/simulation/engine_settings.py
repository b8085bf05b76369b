"""Settings of an engine that was recorded or calibrated, for whoever simulates, tunes or replays it.

Owns which of an engine's settings a simulated scheduler takes over. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.policies.scheduler_config import SchedulerConfig

_ENGINE = tuple(field.name for field in fields(EngineConfig))
# Everything that the scheduler reads, and so what decides which plans an engine makes.
SCHEDULER_OPTIONS = tuple(field.name for field in fields(SchedulerConfig))


def recorded_config(recorded: Mapping[str, Any]) -> EngineConfig:
    """The settings of a log or a calibration, without its step log. Settings that this program does not have
    come from another version and are left out."""
    known = {name: recorded[name] for name in _ENGINE if name in recorded}
    return EngineConfig(**known | {"step_log": ""})
