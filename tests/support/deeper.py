"""Models of more layers than those recorded: their layers again, in turns."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from pageturner.formats.safetensors import open_safetensors
from support.safetensors_writer import write_safetensors

GOLDENS = Path(__file__).parent.parent / "goldens"
TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")


def deeper(family: str, layers: int, folder: Path) -> Path:
    """A folder with this family's model, of so many layers, each one of those recorded."""
    source = GOLDENS / "families" / family
    config = json.loads((source / "config.json").read_text())
    recorded = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer % recorded] for layer in range(layers)]
    # a layer that is another than those behind it stays the first
    first = config.get("first_k_dense_replace", 0)
    file, tensors = open_safetensors(source), {}
    for name in file.tensors:
        kind, shape, raw = file.tensor(name)
        found = _LAYER.fullmatch(name)
        of = int(found[2]) if found else 0
        if found and of >= first:
            places = [i for i in range(first, layers) if (i - of) % (recorded - first) == 0]
        else:
            places = [of]
        for place in places:
            new = f"{found[1]}{place}{found[3]}" if found else name
            tensors[new] = (TYPES[kind], shape, bytes(raw))
    path = folder / family
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    shutil.copy(GOLDENS / "tiny_spm.model", path / "tokenizer.model")
    return path
