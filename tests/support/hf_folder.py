"""A whole Hugging Face folder of a tiny model: the weights of a golden, a tokenizer with a token a byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pageturner.formats.bpe import BYTES

GOLDENS = Path(__file__).parents[1] / "goldens"
VOCAB = 320
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"


def tokenizer_json(vocab: int = VOCAB) -> dict[str, Any]:
    """<unk>, <s>, </s>, the bytes, and names for the rest of the ids."""
    names = ["<unk>", "<s>", "</s>", *BYTES]
    names += [f"<extra{i}>" for i in range(vocab - len(names))]
    special = [
        {
            "id": i,
            "content": names[i],
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i in range(3)
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def make_folder(path: Path, family: str = "llama3", **generation: Any) -> Path:
    """A folder that can be served; `generation`: what stands in its generation_config.json."""
    shutil.copytree(GOLDENS / "families" / family, path, ignore=shutil.ignore_patterns("*.npz"))
    write_json(path / "tokenizer.json", tokenizer_json())
    write_json(path / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": TEMPLATE})
    write_json(path / "generation_config.json", {"eos_token_id": 2, **generation})
    return path
