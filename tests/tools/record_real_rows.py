"""Records a corner of a real matrix in every GGUF type, and the values that the `gguf` package gives them.

Run by hand in the `transformers` peer, which has `gguf`; llama-quantize is that of the `llama` peer (see
bench/peers/setup.sh). The matrix is of SmolLM2 (Apache-2.0), whose rows of 1,536 values hold blocks of 256:
    python tests/tools/record_real_rows.py SMOLLM2.gguf tests/goldens/real_rows.npz
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from peers import launch

NAME, ROWS, COLUMNS = "blk.7.ffn_down.weight", 24, 512
TYPES = {
    name: name for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")
}
TYPES |= {
    "Q4_K": "Q4_K_S",
    "Q5_K": "Q5_K_S",
}  # llama-quantize names mixtures; --pure makes them pure
BY_PACKAGE = ("MXFP4", "TQ1_0", "TQ2_0")  # quantised by the package itself


def by_package(values: np.ndarray) -> dict[str, np.ndarray]:
    """The same of fp32 values [24, 512]."""
    out: dict[str, np.ndarray] = {}
    for kind in BY_PACKAGE:
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
        exact = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)
        out |= {
            f"{kind}_raw": raw.reshape(-1).copy(),
            f"{kind}_values": exact.reshape(values.shape),
        }
    return out


def record(source: Path) -> dict[str, np.ndarray]:
    """KIND_raw uint8 [bytes] and KIND_values float32 [24, 512]; columns are cut between blocks."""
    out: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, asked in TYPES.items():
            path = Path(folder, kind)
            program = str(launch.find_llama("llama-quantize"))
            command = [program, "--pure", "--allow-requantize", str(source), str(path), asked]
            subprocess.run(command, check=True, capture_output=True)
            tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == NAME)
            assert tensor.tensor_type.name == kind, (tensor.tensor_type.name, kind)
            values, nbytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            rows = np.asarray(tensor.data).reshape(int(tensor.shape[1]), -1).view(np.uint8)[:ROWS]
            raw = rows[:, : COLUMNS // values * nbytes].copy()
            out[f"{kind}_raw"] = raw.reshape(-1)
            exact = gguf.quants.dequantize(raw, tensor.tensor_type).astype(np.float32)
            out[f"{kind}_values"] = exact.reshape(ROWS, COLUMNS)
    return out | by_package(out["F32_values"])


if __name__ == "__main__":
    np.savez_compressed(sys.argv[2], **record(Path(sys.argv[1])))
