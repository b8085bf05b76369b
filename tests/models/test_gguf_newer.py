"""Families as GGUF files: made of the Hugging Face folders as llama.cpp's converter does, they
compute the same. What llama.cpp has no key for is taken as it takes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.formats.ggml import dequantise
from pageturner.formats.safetensors import open_safetensors
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model, open_model
from pageturner.models.names import Part
from pageturner.models.weights import read_part
from support import gguf_writer as w
from support.decoding import logits
from support.hf_folder import GOLDENS
from support.refusals import engine_fault

FAMILIES = GOLDENS / "families"
OPS = ReferenceOps()
Values = dict[str, w.Value]

# several fields of one name lie in it one behind the other
QKV = dict.fromkeys("qkv", "attn_qkv.weight")
QKV_BIAS = dict.fromkeys(("q_bias", "k_bias", "v_bias"), "attn_qkv.bias")
SHARED = {f: f"ffn_{f}_shexp.weight" for f in ("gate", "up", "down")}
OWN: dict[str, dict[str, str]] = {
    "phi3": QKV | {"gate": "ffn_up.weight"},
    "gpt2": QKV | QKV_BIAS,
    "bloom": QKV | QKV_BIAS,
    "glm4": {"gate": "ffn_up.weight"},
    "gpt-oss": {"mlp_norm": "post_attention_norm.weight"},
    "seed_oss": {"mlp_norm": "post_attention_norm.weight"},
    "glm4moe": {"mlp_norm": "post_attention_norm.weight"},
    "chatglm": QKV | QKV_BIAS | {"gate": "ffn_up.weight"},
}
ONE_EACH = ("router", "router_bias", "choice_bias", "shared_switch")
PERMUTED = (
    "llama",
    "smollm3",
    "granite",
    "arcee",
    "mistral3",
    "internlm2",
)  # rotary pairs become neighbours
YARN: Values = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64}
HALF_WINDOWED: Values = {
    "attention.sliding_window": 12,
    "attention.sliding_window_pattern": [True, False],
}
MIXTURE: Values = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 16}
SIGMOIDS: Values = {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}
GROUPS: Values = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 16,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
LOW_RANK: Values = {
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 16,
    "attention.head_count_kv": 1,
    "leading_dense_block_count": 1,
}
# Folder -> architecture, and what its file says beside sizes.
CASES: dict[str, tuple[str, Values]] = {
    "gemma2": (
        "gemma2",
        {
            "attention.sliding_window": 8,
            "attention.scale": 12**-0.5,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "attention.sliding_window": 8,
            "attention.scale": 8**-0.5,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": ("phi3", {"attention.sliding_window": 12, "rope.dimension_count": 6}),
    "qwen2": (
        "qwen2",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "gpt2": ("gpt2", {}),
    "bloom": ("bloom", {}),
    "smollm3": ("smollm3", {}),
    "granite": (
        "granite",
        {
            "embedding_scale": 6.0,
            "residual_scale": 0.4,
            "attention.scale": 0.3,
            "logit_scale": 2.5,
        },
    ),
    "granitemoehybrid": (
        "granite",
        {
            "embedding_scale": 12.0,
            "residual_scale": 0.6,
            "attention.scale": 0.25,
            "logit_scale": 2.0,
            "rope.scaling.finetuned": True,
            "expert_shared_feed_forward_length": 64,
            "expert_count": 0,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "attention.head_count_kv": [2, 2],
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo2",
        YARN
        | {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False],
            "rope.scaling.factor": 4.0,
        },
    ),
    "phi3_long": (
        "phi3",
        {
            "rope.scaling.original_context_length": 8,
            "rope.scaling.attn_factor": 3**0.5,  # 1 + ln 64 / ln 8
            "attention.sliding_window": 0,
        },
    ),
    "glm4": ("glm4", {"rope.dimension_count": 8}),
    "starcoder2": ("starcoder2", {}),
    "gpt_oss": (
        "gpt-oss",
        YARN
        | {
            "attention.sliding_window": 8,
            "rope.scaling.factor": 8.0,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
    ),
    "deepseek_v2": (
        "deepseek2",
        YARN
        | {
            "rope.scaling.factor": 4.0,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "attention.kv_lora_rank": 16,
            "attention.key_length": 24,
            "attention.value_length": 16,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 8,
            "attention.head_count_kv": 1,
            "rope.dimension_count": 8,
            "leading_dense_block_count": 1,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_shared_count": 2,
            "expert_feed_forward_length": 16,
            "expert_weights_scale": 1.5,
            "expert_gating_func": 1,
        },
    ),
    "gemma": ("gemma", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "internlm3": ("internlm2", {}),
    "glm": ("chatglm", {}),
    "arcee": ("arcee", {}),
    "hunyuan_v1_dense": (
        "hunyuan-dense",
        {"rope.scaling.type": "none", "rope.scaling.factor": 1.0},
    ),
    "stablelm": ("stablelm", {"use_parallel_residual": False}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm_norms": ("stablelm", {"use_parallel_residual": True}),
    "phi": ("phi2", {}),
    "exaone4": ("exaone4", HALF_WINDOWED),
    "cohere2": ("cohere2", HALF_WINDOWED | {"logit_scale": 0.5}),
    "ministral3": (
        "mistral3",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.5,
        },
    ),
    "olmoe": ("olmoe", {"expert_count": 6, "expert_used_count": 2}),
    "minimax_m2": ("minimax-m2", MIXTURE | {"expert_gating_func": 2}),
    "qwen2_moe": ("qwen2moe", MIXTURE | {"leading_dense_block_count": 1}),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        MIXTURE
        | {
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 16,
        },
    ),
    "glm4_moe": (
        "glm4moe",
        MIXTURE
        | SIGMOIDS
        | {"expert_weights_scale": 1.5, "block_count": 3, "nextn_predict_layers": 1},
    ),
    "glm4_moe_lite": (
        "deepseek2",
        MIXTURE | LOW_RANK | {"expert_weights_norm": True, "expert_weights_scale": 1.8},
    ),
    "deepseek_v2_groups": (
        "deepseek2",
        LOW_RANK
        | GROUPS
        | {"expert_shared_count": 2, "leading_dense_block_count": 0, "expert_weights_scale": 4.0},
    ),
    "deepseek_v3": (
        "deepseek2",
        LOW_RANK
        | GROUPS
        | SIGMOIDS
        | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "expert_weights_scale": 2.5,
        },
    ),
}


def values_of(file: Any, part: Part) -> np.ndarray:
    tensor = read_part(file, replace(part, times=1.0))
    return dequantise(tensor.kind, tensor.shape, tensor.data)


def neighbours(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows in the order of llama.cpp: pairs (i, i + d/2) of each head lie beside each other."""
    pairs = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def pieces_of(folder: Path, arch: str) -> dict[str, list[np.ndarray]]:
    """Tensor name -> what lies in it, one behind the other."""
    file, spec, layout = open_model(folder)
    names = w.NAMES | OWN.get(arch, {})
    if spec.latent and spec.latent.query:
        names |= {"q": "attn_q_b.weight"}
    pieces: dict[str, list[np.ndarray]] = {}
    for field, part in layout.top.items():
        if part.name:
            pieces[names[field]] = [values_of(file, part)]
    for i, parts in enumerate(layout.layers):
        of_layer = names | (SHARED if spec.sparse(i) else {})
        for field, part in parts.items():
            if field in ("q_rope", "k_rope") or not part.name or (arch, field) == ("arcee", "gate"):
                continue
            if spec.latent and field in "qk":  # whole, as in the folder
                part = Part(part.name, part.shape)
            values = values_of(file, part)
            if arch in PERMUTED and field in ("q", "k"):
                values = neighbours(values, spec.head_dim)
            name = "attn_kv_a_mqa.weight" if spec.latent and field == "k" else of_layer[field]
            pieces.setdefault(f"blk.{i}.{name}", []).append(values)
        for field, several in layout.several[i].items():
            each = [values_of(file, part) for part in several]
            stacked = each if field in ONE_EACH else [np.stack(each)]
            pieces[f"blk.{i}.{names[field]}"] = stacked
    return pieces


def converted(folder: Path, arch: str, settings: Values, extra: dict[str, np.ndarray]) -> bytes:
    """The model of a folder as llama.cpp's converter would write it, in F32."""
    _, spec, _ = open_model(folder)
    eps = "layer_norm_epsilon" if spec.family.layer_norm else "layer_norm_rms_epsilon"
    sizes = w.sizes_of(spec) | {
        f"attention.{eps}": spec.eps,
        "rope.dimension_count": spec.rope.dim,
        "rope.freq_base": spec.rope.base,
        "vocab_size": spec.vocab,
    }
    joined = {name: np.concatenate(values) for name, values in pieces_of(folder, arch).items()}
    return w.in_floats(arch, sizes | settings, joined | extra)


def as_llama_cpp_knows_it(source: Path, target: Path) -> Path:
    """SmolLM3 with two layers: in a GGUF file every fourth has no rotary embedding, so none of these; and
    every sixth of Gemma 3 has no window. Files of Starcoder2 do not say that it has a window."""
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == "smollm3":
        config |= {"no_rope_layers": [1, 1]}
    if config["model_type"] == "gemma3_text":
        config |= {"layer_types": ["sliding_attention"] * 2}
    if config["model_type"] == "starcoder2":
        config |= {"sliding_window": None}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return target


def extra_of(folder: Path) -> dict[str, np.ndarray]:
    rope = json.loads((folder / "config.json").read_text()).get("rope_parameters", {})
    if rope.get("rope_type") != "longrope":
        return {}
    kinds = ("short", "long")
    return {f"rope_factors_{kind}.weight": np.float32(rope[f"{kind}_factor"]) for kind in kinds}


def written(tmp_path: Path, name: str, **changes: w.Value) -> tuple[Path, Path]:
    arch, settings = CASES[name]
    tmp_path.mkdir(exist_ok=True)
    folder = as_llama_cpp_knows_it(FAMILIES / name, tmp_path / name)
    path = tmp_path / "model.gguf"
    path.write_bytes(converted(folder, arch, settings | changes, extra_of(folder)))
    return folder, path


@pytest.mark.parametrize("name", CASES)
def test_the_same_model_as_gguf(tmp_path: Path, name: str) -> None:
    folder, path = written(tmp_path, name)
    prompt = np.load(FAMILIES / name / "golden.npz")["prompt_1"].tolist()
    a, b = (logits(each, prompt) for each in (folder, path))
    # the file rounds epsilon to fp32
    bound = 4e-6 if name == "phi3_long" else 2e-6
    np.testing.assert_allclose(a, b, rtol=0, atol=bound * np.abs(a).max())


def test_short_and_long_factors(tmp_path: Path) -> None:
    """As from a folder, the longest sequence decides which are taken."""
    folder, path = written(tmp_path, "phi3_long")
    for positions in (8, 9):
        a, b = (logits(each, [5, 6, 7, 8], max_positions=positions) for each in (folder, path))
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(a).max())
    found = [logits(path, [5, 6, 7, 8], max_positions=positions) for positions in (8, 9)]
    assert not np.array_equal(*found)


def test_llama4_is_as_llama_cpp_has_it(tmp_path: Path) -> None:
    """It has no keys for chunks, temperature and the layers without rotary embedding."""
    arch, source = "llama4", FAMILIES / "llama4_text"
    settings: Values = {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "interleave_moe_layer_step": 2,
    }
    path = tmp_path / "model.gguf"
    path.write_bytes(converted(source, arch, settings, {}))
    _, spec, _ = open_model(path)
    assert (spec.window, spec.chunked, spec.windowed) == (8192, True, {0, 1})
    assert spec.experts is not None
    assert (spec.experts.layers, spec.experts.scoring, spec.family.qk_norm) == (
        {1},
        "sigmoid",
        "unit",
    )
    config = json.loads((source / "config.json").read_text()) | {
        "no_rope_layers": [1, 1],
        "layer_types": None,
        "attention_chunk_size": 8192,
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    prompt = np.load(source / "golden.npz")["prompt_1"].tolist()
    a, b = (logits(each, prompt) for each in (folder, path))
    np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(a).max())


@pytest.mark.parametrize(
    ("name", "changes", "code", "says"),
    [
        ("deepseek_v2", {"attention.q_lora_rank": 32}, "tensor_missing", "attn_q_a"),
        ("deepseek_v2", {"expert_gating_func": 3}, "model_unsupported", "expert_gating_func"),
        ("deepseek_v3", {"expert_group_count": 3}, "model_invalid", "2 of 3 groups of 8 experts"),
        ("seed_oss", {"expert_shared_count": 1}, "model_unsupported", "expert_shared_count"),
        ("deepseek_v2", {"attention.kv_lora_rank": 15}, "model_invalid", "latent KV of 15"),
        ("deepseek_v2", {"attention.head_count_kv": 4}, "model_invalid", "latent"),
        ("deepseek_v2", {"attention.key_length_mla": 8}, "model_invalid", "latent"),
        ("deepseek_v2", {"attention.value_length": 8}, "model_invalid", "latent"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "model_invalid", "1 entries for 2"),
        ("gpt_oss", {"rope.scaling.yarn_ext_factor": 0.5}, "model_unsupported", "ext_factor"),
        ("granite", {"logit_scale": 0.0}, "model_invalid", "multiplier of the logits"),
        ("granite", {"expert_count": 8}, "model_unsupported", "expert_count"),
        ("granite", {"attention.head_count_kv": [2, 0]}, "model_unsupported", "layer to layer"),
        ("granite", {"attention.head_count_kv": [3, 3]}, "model_invalid", "3 KV heads"),
        ("olmo2", {"attention.head_count_kv": [2, 2]}, "gguf_metadata", "head_count_kv"),
        ("starcoder2", {"attention.sliding_window": 5}, "model_unsupported", "sliding_window"),
        ("glm4", {"rope.dimension_sections": [1, 2]}, "model_unsupported", "dimension_sections"),
        ("phi3_long", {"rope.scaling.original_context_length": 0}, "", ""),
    ],
)
def test_keys_that_lie(tmp_path: Path, name: str, changes: Values, code: str, says: str) -> None:
    _, path = written(tmp_path, name, **changes)
    if not code:
        load_model(path, OPS)
        return
    with engine_fault() as caught:
        load_model(path, OPS)
    assert (caught.value.code, says in caught.value.message) == (code, True), caught.value.message


def test_files_from_before_the_latent_kv(tmp_path: Path) -> None:
    """They speak of heads, and keep what makes their keys and values in one tensor, as the folder does."""
    folder, path = written(tmp_path, "deepseek_v2")
    metadata, tensors = w.taken_apart(path)
    old: Values = {"head_count_kv": 4, "key_length": 24, "value_length": 8}
    metadata |= {f"deepseek2.attention.{key}": value for key, value in old.items()}
    for key in ("key", "value"):
        del metadata[f"deepseek2.attention.{key}_length_mla"]
    file = open_safetensors(folder)
    for i in range(2):
        del tensors[f"blk.{i}.attn_k_b.weight"], tensors[f"blk.{i}.attn_v_b.weight"]
        name = f"model.layers.{i}.self_attn.kv_b_proj.weight"
        stored, shape, raw = file.tensor(name)
        values = dequantise(stored, shape, np.frombuffer(raw, np.uint8))
        tensors[f"blk.{i}.attn_kv_b.weight"] = (0, shape, values.tobytes())
    path.write_bytes(w.gguf_bytes(metadata, tensors))
    prompt = np.load(FAMILIES / "deepseek_v2" / "golden.npz")["prompt_1"].tolist()
    a, b = (logits(each, prompt) for each in (folder, path))
    np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(a).max())


@pytest.mark.parametrize("change", ["missing", "short", "zero"])
def test_factors_that_lie(tmp_path: Path, change: str) -> None:
    _, path = written(tmp_path, "phi3_long")
    metadata, tensors = w.taken_apart(path)
    name = "rope_factors_long.weight"
    if change == "missing":
        del tensors[name]
    else:
        values = np.ones(3 if change == "short" else 4, np.float32) * (change == "short")
        tensors[name] = (0, values.shape, values.tobytes())
    path.write_bytes(w.gguf_bytes(metadata, tensors))
    with engine_fault(
        "rope_factors_long",
        code={"missing": "tensor_missing", "short": "tensor_shape"}.get(change, "model_invalid"),
    ):
        load_model(path, OPS)


def test_windowed_layers_with_a_base_of_their_own(tmp_path: Path) -> None:
    _, path = written(tmp_path, "gpt_oss", **{"rope.freq_base_swa": 20_000.0})
    _, spec, _ = open_model(path)
    assert spec.rope_of(0) == replace(spec.rope, base=20_000.0)
    assert spec.rope_of(1) == spec.rope
    _, path = written(tmp_path / "other", "olmo3", **{"rope.freq_base_swa": 20_000.0})
    _, spec, _ = open_model(path)
    assert (spec.rope_of(0).base, spec.rope_of(0).kind, spec.rope_of(1).kind) == (
        20_000.0,
        "linear",
        "yarn",
    )


def test_granite_without_rotary_embedding(tmp_path: Path) -> None:
    _, path = written(tmp_path, "granite", **{"rope.scaling.finetuned": False})
    _, spec, _ = open_model(path)
    assert spec.no_rope == {0, 1}


def test_phi2_with_one_tensor_for_q_k_and_v(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of its first months have it, later ones have three."""
    _, apart = written(tmp_path / "apart", "phi")
    monkeypatch.setitem(OWN, "phi2", OWN["chatglm"])
    _, together = written(tmp_path / "together", "phi")
    assert "blk.0.attn_qkv.bias" in open_model(together).file.tensors
    np.testing.assert_array_equal(logits(apart, [5, 6, 7]), logits(together, [5, 6, 7]))
