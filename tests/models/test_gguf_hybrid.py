"""Hybrid models as GGUF files: written of their Hugging Face folders as llama.cpp's converter does, with the
value heads of Qwen3.5 tiled, they compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.formats.ggml import dequantise
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model, open_model
from pageturner.models.spec import ModelSpec
from support import gguf_writer as w
from support.decoding import logits
from support.hf_folder import GOLDENS
from support.hybrid_gguf import keys_of
from support.mtp import head_logits, write_head
from support.refusals import engine_fault

FAMILIES = GOLDENS / "families"
OPS = ReferenceOps()
ARCHES = {"qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "qwen3_next": "qwen3next"}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"},
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{
        f"mlp.shared_expert.{x}_proj.weight": f"ffn_{x}_shexp.weight"
        for x in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"nextn.{x}.weight": f"nextn.{x}.weight" for x in ("eh_proj", "enorm", "hnorm")},
    "nextn.shared_head_norm.weight": "nextn.shared_head_norm.weight",
}
HEAD = {
    "mtp.layers.0.": "",
    "mtp.fc.": "nextn.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "nextn.enorm.",
    "mtp.pre_fc_norm_hidden.": "nextn.hnorm.",
    "mtp.norm.": "nextn.shared_head_norm.",
}


def tiled(spec: ModelSpec, name: str, x: np.ndarray) -> np.ndarray:
    """Value heads in the order in which head h goes with key head h % key_heads."""
    linear = spec.linear
    assert linear is not None
    several = linear.value_heads // linear.key_heads

    def turned(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(linear.key_heads, several, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if name.startswith(("attn_qkv", "ssm_conv1d")):
        return np.concatenate([x[: 2 * linear.keys], turned(x[2 * linear.keys :])])
    if name.startswith("ssm_out"):
        return turned(x.T).T
    if name.startswith(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")):
        return turned(x)
    return x


def split(spec: ModelSpec, fused: np.ndarray) -> dict[str, np.ndarray]:
    """The fused tensor of Qwen3-Next as newer converters write it."""
    linear = spec.linear
    assert linear is not None
    d, values = linear.key_dim, linear.values // linear.key_heads
    parts = np.split(
        fused.reshape(linear.key_heads, -1, spec.dim), [d, 2 * d, 2 * d + values], axis=1
    )
    q, k, v, z = (part.reshape(-1, spec.dim) for part in parts)
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}


def behind(name: str, layers: int) -> str:
    """The name of a tensor of a head that predicts a second token, as if it were one more layer."""
    for old, new in HEAD.items():
        name = name.replace(old, f"model.layers.{layers}.{new}", 1)
    return name


def tensors_of(folder: Path, older: bool) -> dict[str, np.ndarray]:
    file, spec, _ = open_model(folder)
    assert spec.linear is not None
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in file.tensors:
        kind, shape, raw = file.tensor(name)
        x = dequantise(kind, shape, np.frombuffer(raw, np.uint8)).reshape(shape)
        name = behind(name, spec.layers)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + np.float32(1)
        if name in NAMES:
            found[NAMES[name]] = x
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest.endswith("gate_up_proj"):
            for field, half in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
                found[f"blk.{layer}.ffn_{field}_exps.weight"] = half
        elif rest.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = x
        elif ".experts." in f".{rest}":
            _, _, expert, field, _ = rest.split(".")
            key = f"blk.{layer}.ffn_{field.removesuffix('_proj')}_exps.weight"
            experts.setdefault(key, {})[int(expert)] = x
        elif rest.endswith("qkvz.weight") and not older:
            found |= {f"blk.{layer}.{field}": part for field, part in split(spec, x).items()}
        else:
            field = OF_LAYER[rest]
            x = -np.exp(x) if field == "ssm_a" else x.squeeze() if "conv1d" in field else x
            x = x if spec.arch == "qwen3_next" else tiled(spec, field, x)
            found[f"blk.{layer}.{field}"] = x
    for key, each in experts.items():
        found[key] = np.stack([each[i] for i in sorted(each)])
    return found


def written(
    path: Path, name: str, older: bool = False, folder: Path | None = None, **changes: Any
) -> Path:
    folder, arch = folder or FAMILIES / name, ARCHES[name]
    _, spec, _ = open_model(folder)
    sizes = keys_of(spec)
    if name == "qwen3_next":
        assert spec.linear is not None
        sizes["attention.recurrent_layers"] = [i in spec.linear.layers for i in range(spec.layers)]
    path.write_bytes(w.in_floats(arch, sizes | changes, tensors_of(folder, older)))
    return path


@pytest.mark.parametrize(
    ("name", "older"),
    [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_next", False), ("qwen3_next", True)],
)
def test_the_same_model_as_gguf(tmp_path: Path, name: str, older: bool) -> None:
    path = written(tmp_path / "model.gguf", name, older)
    prompt = np.load(FAMILIES / name / "golden.npz")["prompt_1"].tolist()
    a, b = (logits(each, prompt) for each in (FAMILIES / name, path))
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())


@pytest.mark.parametrize("name", ARCHES)
def test_a_head_that_predicts_a_second_token(tmp_path: Path, name: str) -> None:
    folder = write_head(tmp_path / "folder", name)
    layers = open_model(folder).spec.layers
    changes = {"block_count": layers + 1, "nextn_predict_layers": 1}
    path = written(tmp_path / "model.gguf", name, folder=folder, **changes)
    tokens = np.arange(5, 45, dtype=np.int32)
    rows = np.random.default_rng(0).standard_normal((40, 32)).astype(np.float32)
    each = [head_logits(load_model(it, OPS, mtp=True), OPS, tokens, rows) for it in (folder, path)]
    np.testing.assert_allclose(*each, rtol=0, atol=2e-5 * np.abs(each[0]).max())
    prompt = [7, 8, 9]
    np.testing.assert_allclose(logits(folder, prompt), logits(path, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"ssm.inner_size": 32}, "model_invalid", "ssm.inner_size"),
        ({"ssm.group_count": 3}, "model_invalid", "4 value heads for 3 key heads"),
        ({"ssm.conv_kernel": 64}, "model_unsupported", "64 positions"),
        ({"full_attention_interval": 8}, "model_invalid", "4 of 4 layers"),
        ({"attention.recurrent_layers": [1, 1]}, "model_invalid", "2 entries for 4 layers"),
    ],
)
def test_keys_that_lie(tmp_path: Path, changes: dict[str, Any], code: str, says: str) -> None:
    path = written(tmp_path / "model.gguf", "qwen3_5", **changes)
    with engine_fault(says, code=code):
        open_model(path)
