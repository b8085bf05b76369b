"""Facts that the files of a model say of it, as Ollama's clients read them.

Owns how a model is described where Ollama does so. Must not know pages or requests.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault
from pageturner.formats.gguf import open_gguf

# general.file_type of a GGUF file, where most weights alone do not tell the name of the mixture
FILE_TYPES = {
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of a weight


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """size: bytes; parameters: how many; info: what /api/show tells beside them."""

    format: str = ""
    family: str = ""
    quantization: str = ""
    parameters: int = 0
    size: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": _readable(self.parameters),
            "quantization_level": self.quantization,
        }

    def digest(self, name: str) -> str:
        """A name for the model under this name. It follows from what its files say: nobody has
        read all of them."""
        return hashlib.sha256(repr((name, self)).encode()).hexdigest()


def model_files(path: Path) -> ModelFiles:
    """Return what is known of the model at this place: nothing where none can be read."""
    try:
        return _folder(path) if path.is_dir() else _gguf(path)
    except (EngineFault, OSError, ValueError, AttributeError):
        return ModelFiles()


def _gguf(path: Path) -> ModelFiles:
    file = open_gguf(path)
    family = file.get("general.architecture", str, "")
    weights = Counter[str]()
    for one in file.tensors.values():
        weights[one.kind] += prod(one.shape)
    usual = weights.most_common(1)[0][0]
    names = ("embedding_length", "block_count", "attention.head_count")
    found = {f"{family}.{name}": file.metadata.get(f"{family}.{name}") for name in names}
    info = {name: value for name, value in found.items() if isinstance(value, int)}
    kind = FILE_TYPES.get(file.get("general.file_type", int, -1), usual)
    return ModelFiles("gguf", family, kind, weights.total(), path.stat().st_size, info)


def _folder(path: Path) -> ModelFiles:
    config = json.loads((path / "config.json").read_bytes())
    size = sum(one.stat().st_size for one in path.glob("*.safetensors"))
    kind = str(config.get("dtype") or config.get("torch_dtype") or "")
    quantized = config.get("quantization_config") or {}
    level = str(quantized.get("quant_method") or kind).upper()
    count = 0
    if kind in BYTES and not quantized:
        count = size // BYTES[kind]
    return ModelFiles("safetensors", str(config.get("model_type", "")), level, count, size)


def _readable(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.4g}{name}"
    return str(count or "")
