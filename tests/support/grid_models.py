"""Tiny GGUF models of which every matrix is of one type with grids, beside a model of the same values in floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pageturner.formats.ggml import dequantise
from pageturner.formats.ggml_types import KINDS
from support import gguf_writer as w
from support.hf_folder import GOLDENS

DIM, VOCAB = 256, 320
NUMBERS = {kind.name: number for number, kind in KINDS.items()}
SHAPES = {f"attn_{part}": (DIM, DIM) for part in ("q", "k", "v", "output")}
SHAPES |= {f"ffn_{part}": (DIM, DIM) for part in ("gate", "up", "down")}


def make_models(folder: Path, kind: str, seed: int = 1) -> tuple[Path, Path]:
    """(the model in this type, the same in floats). Blocks are those of tests/goldens/dequant.npz, mixed."""
    draw = np.random.default_rng(seed)
    recorded = np.load(GOLDENS / "dequant.npz")[f"{kind}_raw"]
    size = next(k for k in KINDS.values() if k.name == kind)
    blocks = recorded.reshape(3, -1)[0].reshape(-1, size.nbytes)
    metadata: dict[str, w.Value] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": DIM,
        "llama.feed_forward_length": DIM,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    table = draw.standard_normal((VOCAB, DIM)).astype(np.float32)
    ones = (0, (DIM,), np.ones(DIM, np.float32).tobytes())
    quantised: dict[str, w.Tensor] = {
        "token_embd.weight": (0, table.shape, table.tobytes()),
        "output_norm.weight": ones,
        "blk.0.attn_norm.weight": ones,
        "blk.0.ffn_norm.weight": ones,
    }
    floats = dict(quantised)
    for name, shape in SHAPES.items():
        count = shape[0] * shape[1] // size.values
        raw = blocks[draw.integers(0, len(blocks), count)].reshape(-1)
        values = dequantise(kind, shape, raw)
        if kind == "NVFP4":  # the scale of a whole matrix stands beside it
            scale = np.float32(0.37)
            values = values * scale
            for ending in ("scale", "input_scale"):
                quantised[f"blk.0.{name}.{ending}"] = (0, (1,), scale.tobytes())
        quantised[f"blk.0.{name}.weight"] = (NUMBERS[kind], shape, raw.tobytes())
        floats[f"blk.0.{name}.weight"] = (0, shape, values.tobytes())
    paths = folder / f"{kind}.gguf", folder / f"{kind}_floats.gguf"
    for path, tensors in zip(paths, (quantised, floats), strict=True):
        path.write_bytes(w.gguf_bytes(metadata, tensors))
    return paths
