"""Families beyond Llama as GGUF files: made of the Hugging Face folders, they compute the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model, open_model
from pageturner.models.names import Part
from pageturner.models.weights import read_part
from support import gguf_writer as w
from support.decoding import Decoding

FAMILIES = Path(__file__).parents[1] / "goldens" / "families"
OPS = ReferenceOps()

# Several fields of one name lie in it one behind the other.
QKV = {"q": "attn_qkv.weight", "k": "attn_qkv.weight", "v": "attn_qkv.weight"}
QKV_BIAS = {"q_bias": "attn_qkv.bias", "k_bias": "attn_qkv.bias", "v_bias": "attn_qkv.bias"}
FUSED = {
    "phi3": QKV | {"gate": "ffn_up.weight"},
    "gpt2": QKV | QKV_BIAS,
    "bloom": QKV | QKV_BIAS,
}
GEMMA3 = {
    "attention.sliding_window": 8,
    "attention.scale": 8**-0.5,
    "rope.freq_base": 1e6,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}
# Settings of the file that are not sizes.
SETTINGS: dict[str, dict[str, w.Value]] = {
    "gemma2": {
        "attention.sliding_window": 8,
        "attention.scale": 12**-0.5,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": GEMMA3,
    "phi3": {"attention.sliding_window": 12, "rope.dimension_count": 6},
    "qwen2": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    "gpt2": {},
    "bloom": {},
}


def converted(
    folder: Path,
    arch: str,
    settings: dict[str, w.Value],
    reorder: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values,
) -> bytes:
    """The model of a folder as llama.cpp's converter would write it, in F32. reorder: what it does to the
    rows of a weight, by its name."""
    file, spec, layout = open_model(folder)
    names = w.NAMES | {f"{x}_bias": f"attn_{x}.bias" for x in "qkv"} | FUSED.get(arch, {})
    pieces: dict[str, list[np.ndarray]] = {}

    def put(name: str, part: Part) -> None:
        tensor = read_part(file, part)
        raw = (
            tensor.data.view("<u2").astype(np.uint32) << 16
            if tensor.kind == "BF16"
            else tensor.data
        )
        pieces.setdefault(name, []).append(
            reorder(name, raw.view(np.float32).reshape(tensor.shape))
        )

    for field, part in layout.top.items():
        put(names[field], part)
    for i, parts in enumerate(layout.layers):
        for field, part in parts.items():
            put(f"blk.{i}.{names[field]}", part)
    eps = "layer_norm_epsilon" if spec.family.layer_norm else "layer_norm_rms_epsilon"
    sizes = w.sizes_of(spec) | {f"attention.{eps}": spec.eps}
    joined = {name: np.concatenate(values) for name, values in pieces.items()}
    return w.in_floats(arch, sizes | settings, joined)


def windowed_everywhere(folder: Path) -> None:
    """Gemma 3 with two layers: in a GGUF file only every sixth is not windowed."""
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * 2
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("arch", SETTINGS)
def test_the_same_model_as_gguf(tmp_path: Path, arch: str) -> None:
    folder = Path(shutil.copytree(FAMILIES / arch, tmp_path / arch))
    if arch == "gemma3":
        windowed_everywhere(folder)
    path = tmp_path / "model.gguf"
    path.write_bytes(converted(folder, arch, SETTINGS[arch]))
    prompt = np.load(folder / "golden.npz")["prompt_1"].tolist()
    a, b = (Decoding(load_model(p, OPS), OPS).step([("p", prompt)])[0] for p in (folder, path))
    # the file rounds epsilon to fp32
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(a).max())
