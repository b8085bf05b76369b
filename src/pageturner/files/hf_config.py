"""The JSON files of a Hugging Face model folder, as data; config.json above all.

Owns how they are read. Must not know what a configuration means to a model.

Codes: config_missing, config_corrupt.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. EngineFault('config_corrupt') if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFault("config_corrupt", f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise EngineFault("config_corrupt", f"{path} should hold a JSON object")
    return value


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json. EngineFault 'config_missing' or 'config_corrupt'."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise EngineFault("config_missing", f"{folder} holds no {CONFIG}: it is not a model folder")
    return read_json(path)
