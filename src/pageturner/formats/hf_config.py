"""The JSON files of a Hugging Face model folder, as data; config.json above all.

Owns how they are read, strictly and within bounds: whatever the bytes are, the outcome is data that
can be shown and sent on, or an error. Must not know what a configuration means to a model.

Codes: config_missing, config_corrupt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault

CONFIG = "config.json"
MAX_BYTES = 16 << 20  # of one such file: parsed it may take twenty times as much memory
_MAX_DIGITS = 20  # of a whole number: what 64 bits hold, and a sign
_LARGE_DIGITS = (
    40  # of one that is read as a float: Transformers writes 10^30 for "no longest text"
)


def parse_json(raw: bytes, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict) -> Any:
    """JSON in UTF-8 without lone surrogates, which no other UTF-8 text could quote. Whole numbers
    beyond 64 bits are floats, and none has hundreds of digits. `pairs` makes the objects.
    ValueError or RecursionError for anything else."""
    value = json.loads(raw.decode("utf-8-sig"), parse_int=_int, object_pairs_hook=pairs)
    if b"\\ud" in raw or b"\\uD" in raw:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, which is a ValueError
    return value


def _int(digits: str) -> int | float:
    if len(digits) > _LARGE_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def read_bounded(path: Path, most: int) -> bytes:
    """All of a file. OSError if it cannot be read, ValueError if it is larger than `most` bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it is larger than {most >> 20} MiB")
        return file.read(size)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. EngineFault('config_corrupt') if it is none."""
    try:
        value = parse_json(read_bounded(path, MAX_BYTES))
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
