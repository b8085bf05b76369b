"""The JSON files of a Hugging Face model folder, as data: config.json and generation_config.json.

Owns how they are read. Must not know what a configuration means to a model.

Codes: config_missing, config_corrupt, generation_config.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault

CONFIG = "config.json"
# Keys of generation_config.json that are sampling parameters here, by their names here.
_SAMPLING: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_new_tokens": ("max_tokens", int),
}


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


def generation_defaults(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What generation_config.json proposes: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
    `max_tokens` where it names them, and `eos_token_ids` (a list, also from config.json). Empty for a GGUF
    file, which has no such thing. EngineFault('generation_config') for a value of the wrong type."""
    folder = Path(path)
    if not folder.is_dir():
        return {}
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    found: dict[str, Any] = {}
    for key, (name, kind) in _SAMPLING.items():
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise EngineFault("generation_config", f"{file}: {key} should be a number, not {value!r}")
        found[name] = kind(value)
    eos = generation.get("eos_token_id")
    if eos is None and (folder / CONFIG).is_file():
        eos = read_config(folder).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise EngineFault("generation_config", f"{folder}: eos_token_id should be ids, not {eos!r}")
    return found | {"eos_token_ids": ids}
