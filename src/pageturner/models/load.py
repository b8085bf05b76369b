"""From a path to a decoder that is ready to compute. Owns only the order of the steps."""

from __future__ import annotations

import os
from pathlib import Path

from pageturner.files.gguf import open_gguf
from pageturner.files.hf_config import CONFIG, read_config
from pageturner.files.safetensors import open_safetensors
from pageturner.kernels.base import Ops
from pageturner.models.decoder import Decoder
from pageturner.models.gguf_spec import read_gguf_spec
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.names import Layout, gguf_layout, hf_layout
from pageturner.models.spec import ModelSpec
from pageturner.models.weights import TensorFile, load_weights


def load_model(
    path: str | os.PathLike[str], ops: Ops, *, dtype: str = "auto", max_positions: int = 0
) -> Decoder:
    """Read, check and pack the model in a GGUF file or a Hugging Face folder. EngineFault for anything that
    cannot be right.

    dtype          "auto": weights as in the file; "float32": dequantised
    max_positions  longest sequence that will be computed, in tokens; 0: the model's context
    """
    file, spec, layout = open_model(path)
    positions = min(max_positions or spec.context, spec.context)
    weights = load_weights(file, spec, layout, ops, dtype=dtype, positions=positions)
    return Decoder(spec, weights, ops)


def open_model(path: str | os.PathLike[str]) -> tuple[TensorFile, ModelSpec, Layout]:
    """The tensors of a model, what it is, and which tensor is what; no weights are read yet."""
    if not Path(path).is_dir():
        gguf = open_gguf(path)
        spec = read_gguf_spec(gguf)
        return gguf, spec, gguf_layout(spec)
    folder = Path(path)
    config = read_config(folder)
    tensors = open_safetensors(folder)
    spec = read_hf_spec(config, str(folder / CONFIG), folder.name, "lm_head.weight" in tensors.tensors)
    return tensors, spec, hf_layout(spec, tensors.tensors.__contains__)
