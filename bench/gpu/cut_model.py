"""Cut a GGUF model to its first layers, so that it can be carried along: weights and tokenizer as they are.

python bench/gpu/cut_model.py FILE.gguf [--layers 3] [--out build/gpu/smollm2-cut.gguf]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from pageturner.formats.ggml_types import KINDS  # noqa: E402
from pageturner.formats.gguf import Array, open_gguf  # noqa: E402
from support import gguf_writer  # noqa: E402


def cut(source: Path, layers: int, out: Path) -> int:
    """Write the file; its size in bytes."""
    file = open_gguf(source)
    architecture = str(file.metadata["general.architecture"])
    numbers = {kind.name: number for number, kind in KINDS.items()}
    about = {
        key: value.tolist() if isinstance(value, Array) else value
        for key, value in file.metadata.items()
    }
    about[f"{architecture}.block_count"] = layers
    tensors = {}
    for name in file.tensors:
        if not name.startswith("blk.") or int(name.split(".")[1]) < layers:
            kind, shape, data = file.tensor(name)
            tensors[name] = (numbers[kind], shape, bytes(data))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(gguf_writer.gguf_bytes(about, tensors))  # type: ignore[arg-type]
    return out.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description="cut a GGUF model to its first layers")
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "smollm2-cut.gguf")
    options = parser.parse_args()
    print(f"{options.out}: {cut(options.file, options.layers, options.out) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
