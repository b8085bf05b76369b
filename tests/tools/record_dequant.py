"""Records random GGML blocks and the values that the `gguf` package gives them.

Run by hand in the `transformers` peer (see bench/peers/setup.sh), which has `gguf`:
    python tests/tools/record_dequant.py tests/goldens/dequant.npz
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

ROWS, COLUMNS = 3, 64
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# Kinds of 256 values in a block, which the package cannot quantise: random bytes around ordinary scales.
SUPER_KINDS = {  # where the fp16 scales lie in a block
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "NVFP4": (),
    "Q1_0": (0,),
    "Q2_0": (0,),
}
SIZES = {"Q1_0": (128, 18), "Q2_0": (64, 18)}  # which the package does not have yet
SUPER_COLUMNS = 512


def record(seed: int = 0) -> dict[str, np.ndarray]:
    """KIND_raw uint8 [bytes], KIND_values float32 [3, 64 or 512]; scales ordinary, tiny, large and zero."""
    draw = np.random.default_rng(seed)
    values = (draw.standard_normal((ROWS, COLUMNS)) * [[1.0], [1e-4], [300.0]]).astype(np.float32)
    values[1, :32] = 0
    out: dict[str, np.ndarray] = {}
    for name in KINDS:
        kind = gguf.GGMLQuantizationType[name]
        raw = gguf.quants.quantize(values, kind).view(np.uint8).reshape(-1).copy()
        out[f"{name}_raw"] = raw
        shaped = raw.reshape(ROWS, -1)
        out[f"{name}_values"] = (
            gguf.quants.dequantize(shaped, kind).astype(np.float32).reshape(ROWS, COLUMNS)
        )
    for name, offsets in SUPER_KINDS.items():
        kind = getattr(gguf.GGMLQuantizationType, name, None)
        values_of, size = SIZES.get(name) or gguf.GGML_QUANT_SIZES[kind]
        raw = draw.integers(0, 256, (ROWS, SUPER_COLUMNS // values_of, size), dtype=np.uint8)
        if name == "MXFP4":
            raw[..., 0] %= 250  # an exponent: larger ones overflow
        if name == "IQ1_M":
            raw[..., 55] &= 0xBF  # the highest bit of the exponent: no infinities
        if name == "NVFP4":
            raw[..., :4] %= 0x7F  # scales have no sign and are numbers
        for at in offsets:
            scale = (
                draw.standard_normal((*raw.shape[:2], 1))
                * np.array([1.0, 1e-5, 30.0])[:, None, None]
            )
            raw[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
        out[f"{name}_raw"] = raw.reshape(-1)
        if name in SIZES:
            out[f"{name}_values"] = plain(raw, 1 if name == "Q1_0" else 2)
        else:
            rows = gguf.quants.dequantize(raw.reshape(ROWS, -1), kind)
            out[f"{name}_values"] = rows.astype(np.float32)
    return out


def plain(raw: np.ndarray, width: int) -> np.ndarray:
    """Numbers of so many bits, one after the other, times an fp16 in front of all of a block."""
    scale = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float32)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    numbers = (raw[..., 2:, None] >> shifts & ((1 << width) - 1)).reshape(*raw.shape[:2], -1)
    numbers = numbers.astype(np.float32)
    signed = numbers * 2 - 1 if width == 1 else numbers - 1
    return (signed * scale).reshape(ROWS, -1).astype(np.float32)


if __name__ == "__main__":
    np.savez_compressed(sys.argv[1], **record())
