"""From a path to a decoder that is ready to compute. Owns only the order of the steps."""

from __future__ import annotations

import os

from pageturner.files.gguf import open_gguf
from pageturner.kernels.base import Ops
from pageturner.models.decoder import Decoder
from pageturner.models.spec import read_spec
from pageturner.models.weights import load_weights


def load_model(
    path: str | os.PathLike[str], ops: Ops, *, dtype: str = "auto", max_positions: int = 0
) -> Decoder:
    """Read, check and pack the model in a GGUF file. EngineFault for anything that cannot be right.

    dtype          "auto": weights as in the file; "float32": dequantised
    max_positions  longest sequence that will be computed, in tokens; 0: the model's context
    """
    file = open_gguf(path)
    spec = read_spec(file)
    positions = min(max_positions or spec.context, spec.context)
    return Decoder(spec, load_weights(file, spec, ops, dtype=dtype, positions=positions), ops)
