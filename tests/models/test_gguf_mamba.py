"""LFM2, Granite 4 H, Nemotron-H and Falcon-H1 as GGUF files: written of their Hugging Face folders as
llama.cpp's converter does, they compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.formats.ggml import dequantise
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import open_model
from pageturner.models.spec import ModelSpec
from support import gguf_writer as w
from support.decoding import logits
from support.hf_folder import GOLDENS
from support.refusals import engine_fault

FAMILIES = GOLDENS / "families"
OPS = ReferenceOps()
ARCHES = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granite_h": "granitehybrid",
    "granite_h_dense": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h_moe",
    "falcon_h1": "falcon-h1",
}
Tensors = dict[str, np.ndarray]
NAMES = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "final_layernorm": "output_norm",
    "embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
OF_LAYER = {
    **dict.fromkeys(("operator_norm", "input_layernorm", "norm"), "attn_norm"),
    **dict.fromkeys(("ffn_norm", "post_attention_layernorm", "pre_ff_layernorm"), "ffn_norm"),
    **{f"{root}.{x}_proj": f"attn_{x}" for root in ("self_attn", "mixer") for x in "qkv"},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"), "attn_output"),
    **{f"self_attn.{x}_layernorm": f"attn_{x}_norm" for x in "qk"},
    **{f"conv.{x}": f"shortconv.{x}" for x in ("in_proj", "conv", "out_proj")},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    **{f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{f"mixer.{x}_proj": f"ffn_{x}" for x in ("up", "down")},
    **{f"mixer.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("up", "down")},
    **dict.fromkeys(
        ("feed_forward.gate", "mixer.gate", "block_sparse_moe.router.layer"), "ffn_gate_inp"
    ),
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
OF_MAMBA = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
OF_LAYER |= {f"{root}.{k}": v for root in ("mamba", "mixer") for k, v in OF_MAMBA.items()}
WHOLE = {
    **{f"{root}.dt_bias": "ssm_dt.bias" for root in ("mamba", "mixer")},
    **{f"{root}.A_log": "ssm_a" for root in ("mamba", "mixer")},
    **{f"{root}.D": "ssm_d" for root in ("mamba", "mixer")},
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
}
EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "up_proj": "up", "down_proj": "down"}


def interleaved(spec: ModelSpec, x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of rotary pairs that lie side by side."""
    return x.reshape(heads, 2, -1, spec.dim).swapaxes(1, 2).reshape(x.shape)


def of_layer(spec: ModelSpec, name: str, x: np.ndarray) -> Tensors:
    """The tensors of a layer that one of a folder becomes."""
    stem, ending = name.rsplit(".", 1)
    if name in WHOLE:
        x = -np.exp(x) if name.endswith("A_log") else x
        field = WHOLE[name]
        return {field: x[:, None] if field in ("ssm_a", "ssm_d") else x}
    if "input_linear" in name:
        halves = np.split(x, 2, axis=-2)
        kind = "_exps" if x.ndim == 3 else "_shexp" if spec.experts is not None else ""
        return {
            f"ffn_{f}{kind}.weight": half for f, half in zip(("gate", "up"), halves, strict=True)
        }
    if "shared_mlp" in name:
        return {"ffn_down_shexp.weight" if spec.experts is not None else "ffn_down.weight": x}
    field = OF_LAYER[stem]
    if "conv" in field:
        x = x.squeeze(1) if x.ndim == 3 else x
    if field == "ssm_norm":
        assert spec.linear is not None
        x = x.reshape(spec.linear.key_heads, -1)
    if spec.arch == "granitemoehybrid" and field in ("attn_q", "attn_k"):
        x = interleaved(spec, x, spec.heads if field == "attn_q" else spec.kv_heads)
    return {f"{field}.{ending}": multiplied(spec, field, x)}


def multiplied(spec: ModelSpec, field: str, x: np.ndarray) -> np.ndarray:
    """The weights of Falcon-H1, which have its multipliers in GGUF files."""
    linear = spec.linear
    if spec.arch != "falcon_h1" or linear is None or "norm" in field or "conv" in field:
        return x
    gate, down = spec.mlp_factors
    own, beside = spec.mixer_factors
    keys = spec.attention_scale / spec.head_dim**-0.5
    sizes = (linear.values, linear.values, linear.keys, linear.keys, linear.value_heads)
    factors: dict[str, Any] = {
        "ffn_gate": gate,
        "ffn_down": down,
        "attn_k": keys,
        "attn_output": own,
        "ssm_out": beside,
        "ssm_in": np.repeat(np.array(linear.factors, np.float32), sizes)[:, None],
    }
    return np.asarray(x * np.asarray(factors.get(field, 1.0), np.float32))


def tensors_of(folder: Path) -> Tensors:
    file, spec, _ = open_model(folder)
    found: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in file.tensors:
        kind, shape, raw = file.tensor(name)
        x = dequantise(kind, shape, np.frombuffer(raw, np.uint8)).reshape(shape)
        bare = name.split(".", 1)[1] if name.startswith(("model.", "backbone.")) else name
        if not bare.startswith("layers."):
            stem = bare.removesuffix(".weight")
            if spec.arch == "falcon_h1":
                x = x * np.float32({"embed_tokens": spec.embed_scale}.get(stem, 1.0))
                x = x * np.float32({"lm_head": spec.logit_scale}.get(stem, 1.0))
            found[f"{NAMES[stem]}.weight"] = x
            continue
        _, layer, rest = bare.split(".", 2)
        if ".experts." in rest:
            _, _, expert, field, _ = rest.split(".")
            experts.setdefault(f"blk.{layer}.ffn_{EXPERTS[field]}_exps.weight", {})[int(expert)] = x
            continue
        found |= {f"blk.{layer}.{key}": part for key, part in of_layer(spec, rest, x).items()}
    for key, each in experts.items():
        found[key] = np.stack([each[i] for i in sorted(each)])
    if spec.arch == "falcon_h1":  # as llama.cpp's converter calls it
        bare = ".ffn_norm.weight"
        found = {key.replace(bare, ".ffn_norm"): x for key, x in found.items()}
    return found


def keys_of(name: str, spec: ModelSpec) -> dict[str, w.Value]:
    linear, experts = spec.linear, spec.experts
    assert linear is not None
    kv_heads = [
        spec.kv_heads * (spec.attends(i) and i not in (spec.feeds or ()))
        for i in range(spec.layers)
    ]
    keys: dict[str, w.Value] = {
        "block_count": spec.layers,
        "context_length": spec.context,
        "vocab_size": spec.vocab,
        "embedding_length": spec.dim,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads if linear.beside else kv_heads,
        "attention.layer_norm_rms_epsilon": spec.eps,
        "rope.freq_base": spec.rope.base,
    }
    if spec.head_dim * spec.heads != spec.dim:
        keys |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    if linear.kind == "conv":
        keys["shortconv.l_cache"] = linear.kernel
    else:
        keys |= {
            "ssm.conv_kernel": linear.kernel,
            "ssm.state_size": linear.key_dim,
            "ssm.group_count": linear.key_heads,
            "ssm.time_step_rank": linear.value_heads,
            "ssm.inner_size": linear.values,
        }
    if experts is not None:
        keys |= {"expert_count": experts.count, "expert_used_count": experts.top_k}
    if name.startswith("granite"):
        keys |= {
            "attention.scale": spec.attention_scale,
            "embedding_scale": spec.embed_scale,
            "residual_scale": spec.residual,
            "logit_scale": 1 / spec.logit_scale,
            "rope.scaling.finetuned": not spec.no_rope,
        }
        if experts is not None:
            keys |= {
                "feed_forward_length": experts.ffn,
                "expert_shared_feed_forward_length": experts.shared,
            }
    if spec.feeds is not None:
        inner = spec.ffn if experts is None else experts.ffn
        keys["feed_forward_length"] = [inner * (i in spec.feeds) for i in range(spec.layers)]
    if name == "nemotron_h_moe":
        assert experts is not None
        keys |= {
            "expert_feed_forward_length": experts.ffn,
            "expert_shared_feed_forward_length": experts.shared,
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": experts.scale,
        }
    if name == "lfm2_moe":
        assert experts is not None
        keys |= {
            "expert_feed_forward_length": experts.ffn,
            "leading_dense_block_count": min(experts.layers),
            "expert_gating_func": 2,
        }
    return keys


def written(path: Path, name: str, **changes: Any) -> Path:
    folder, arch = FAMILIES / name, ARCHES[name]
    keys = keys_of(name, open_model(folder)[1]) | changes
    path.write_bytes(w.in_floats(arch, keys, tensors_of(folder)))
    return path


@pytest.mark.parametrize("name", ARCHES)
def test_the_same_model_as_gguf(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "model.gguf", name)
    prompt = np.load(FAMILIES / name / "golden.npz")["prompt_1"].tolist()
    a, b = (logits(each, prompt) for each in (FAMILIES / name, path))
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())


@pytest.mark.parametrize(
    ("name", "changes", "code", "says"),
    [
        ("granite_h", {"ssm.inner_size": 63}, "model_invalid", "ssm.inner_size"),
        ("granite_h", {"ssm.group_count": 3}, "model_invalid", "4 value heads for 3 key heads"),
        ("lfm2", {"shortconv.l_cache": 64}, "model_unsupported", "64 positions"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "model_invalid", "2 entries for 4 layers"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1, 0]}, "model_unsupported", "of 2 sizes"),
        ("lfm2", {"attention.sliding_window": 64}, "model_unsupported", "sliding_window"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, "model_unsupported", "moe_latent_size"),
        ("nemotron_h_moe", {"expert_group_count": 4}, "model_invalid", "4 groups of 6 experts"),
    ],
)
def test_keys_that_lie(
    tmp_path: Path, name: str, changes: dict[str, Any], code: str, says: str
) -> None:
    path = written(tmp_path / "model.gguf", name, **changes)
    with engine_fault(says, code=code):
        open_model(path)
