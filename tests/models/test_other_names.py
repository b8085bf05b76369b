"""Families that Transformers has no class for, and text parts of models that see pictures: the weights of a golden
under their names compute what Transformers computes with the golden. What only CPUs compute is refused elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pageturner.engine.devices import _lacking
from pageturner.formats.safetensors import open_safetensors
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import load_model, open_model
from pageturner.models.spec import alibi_slopes
from support.decoding import Decoding, assert_logits, backend
from support.hf_folder import GOLDENS
from support.refusals import engine_fault
from support.safetensors_writer import write_safetensors

FAMILIES = GOLDENS / "families"
Arrays = dict[str, np.ndarray]
Json = dict[str, Any]
HEADS, KV_HEADS, HEAD = 4, 2, 16  # of the golden internlm3
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "head_dim": HEAD,
}


def arrays(name: str) -> Arrays:
    file = open_safetensors(FAMILIES / name)
    found = {}
    for tensor in file.tensors:
        kind, shape, raw = file.tensor(tensor)
        data = np.frombuffer(raw, np.uint8)
        wide = data.view("<u2").astype(np.uint32) << 16 if kind == "BF16" else data
        found[tensor] = wide.view(np.float32).reshape(shape)
    return found


def write(folder: Path, config: Json, tensors: Arrays) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    packed = {n: ("F32", x.shape, np.ascontiguousarray(x).tobytes()) for n, x in tensors.items()}
    write_safetensors(folder / "model.safetensors", packed)
    return folder


def fused(tensors: Arrays, prefix: str, kind: str) -> list[np.ndarray]:
    return [tensors.pop(f"{prefix}self_attn.{x}_proj.{kind}") for x in "qkv"]


def renamed(tensors: Arrays, names: dict[str, str]) -> Arrays:
    for old, new in names.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    return tensors


def internlm2() -> tuple[Json, Arrays]:
    tensors = arrays("internlm3")
    for i in range(2):
        prefix = f"model.layers.{i}."
        q, k, v = (x.reshape(KV_HEADS, -1, 32) for x in fused(tensors, prefix, "weight"))
        both = np.concatenate([q, k, v], axis=1)
        tensors[prefix + "attention.wqkv.weight"] = both.reshape(-1, 32)
    names = {
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    return SIZES | {"model_type": "internlm2", "bias": False}, renamed(tensors, names)


def baichuan() -> tuple[Json, Arrays]:
    tensors = arrays("internlm3")
    for i in range(2):
        prefix = f"model.layers.{i}."
        both = np.concatenate(fused(tensors, prefix, "weight"))
        tensors[prefix + "self_attn.W_pack.weight"] = both
    return SIZES | {"model_type": "baichuan", "z_loss_weight": 0, "model_max_length": 4096}, tensors


def chatglm() -> tuple[Json, Arrays]:
    tensors = arrays("glm")
    for i in range(2):
        for kind in ("weight", "bias"):
            both = np.concatenate(fused(tensors, f"model.layers.{i}.", kind))
            tensors[f"model.layers.{i}.self_attention.query_key_value.{kind}"] = both
    names = {
        "model.layers": "transformer.encoder.layers",
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    tensors = renamed(tensors, names)
    tensors["transformer.output_layer.weight"] = tensors[
        "transformer.embedding.word_embeddings.weight"
    ]
    tensors["transformer.rotary_pos_emb.inv_freq"] = np.ones(2, np.float32)
    config = {
        "model_type": "chatglm",
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "padded_vocab_size": 320,
        "seq_length": 512,
        "layernorm_epsilon": 1.5625e-07,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "rope_ratio": 1,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "fp32_residual_connection": False,
        "pre_seq_len": None,
        "quantization_bit": 0,
        "tie_word_embeddings": False,
    }
    return config, tensors


def mistral3() -> tuple[Json, Arrays]:
    tensors = renamed(arrays("ministral3"), {"model.": "language_model.model."})
    tensors = {f"language_model.{n}" if n.startswith("lm_") else n: x for n, x in tensors.items()}
    tensors["vision_tower.patch_conv.weight"] = np.ones((2, 2), np.float32)
    config = {
        "model_type": "mistral3",
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "vision_config": {"model_type": "pixtral"},
        "text_config": json.loads((FAMILIES / "ministral3" / "config.json").read_text()),
    }
    return config, tensors


@pytest.mark.parametrize(
    ("golden", "made"),
    [
        ("internlm3", internlm2),
        ("internlm3", baichuan),
        ("glm", chatglm),
        ("ministral3", mistral3),
    ],
)
def test_the_same_model_under_other_names(
    tmp_path: Path, golden: str, made: Callable[[], tuple[Json, Arrays]]
) -> None:
    folder = write(tmp_path / "model", *made())
    for name in ("reference", "native"):
        ops = backend(name)
        runs = Decoding(load_model(folder, ops, dtype="float32"), ops)
        assert_logits(runs, dict(np.load(FAMILIES / golden / "golden.npz")))


def test_baichuan_13b_has_alibi(tmp_path: Path) -> None:
    config, tensors = baichuan()
    config = {name: value for name, value in config.items() if name != "max_position_embeddings"}
    model = open_model(write(tmp_path / "model", config, tensors))
    assert model.spec.context == 4096
    assert model.spec.attention(0, 64).slopes == alibi_slopes(model.spec.heads)
    found = [
        Decoding(load_model(tmp_path / "model", ops, dtype="float32"), ops).step([("p", [1, 2, 3])])
        for ops in (backend("reference"), backend("native"))
    ]
    np.testing.assert_allclose(*found, atol=1e-4)
    with_rope = write(tmp_path / "7b", *baichuan())
    ops = backend("reference")
    other = Decoding(load_model(with_rope, ops, dtype="float32"), ops).step([("p", [1, 2, 3])])
    assert np.abs(other[0] - found[0][0]).max() > 1e-3


def test_the_head_of_baichuan_2_has_rows_of_length_1(tmp_path: Path) -> None:
    """It is known by its vocabulary."""
    config, tensors = baichuan()
    rows = np.random.default_rng(1).standard_normal((125_696, 32), np.float32)
    tensors |= {"model.embed_tokens.weight": rows / 9, "lm_head.weight": rows}
    found = []
    for vocab in (125_696, 125_695):
        kept = {n: x[:vocab] if len(x) > 1000 else x for n, x in tensors.items()}
        folder = write(tmp_path / str(vocab), config | {"vocab_size": vocab}, kept)
        ops = backend("reference")
        runs = Decoding(load_model(folder, ops, dtype="float32"), ops)
        found.append(runs.step([("p", [1, 2, 3])])[0][:, :1000])
    normed, plain = found
    lengths = np.linalg.norm(rows[:1000], axis=1)
    np.testing.assert_allclose(normed, plain / lengths, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SIZES | {"model_type": "arcee", "hidden_act": "silu"}, "hidden_act"),
        (SIZES | {"model_type": "llama", "hidden_act": "relu2"}, "relu2"),
        (SIZES | {"model_type": "stablelm", "layer_norm_eps": 1e-5, "clip_qkv": 6.0}, "clip_"),
        (SIZES | {"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        (SIZES | {"model_type": "ernie4_5", "use_bias": True}, "use_bias"),
        (SIZES | {"model_type": "hunyuan_v1_dense", "use_cla": True}, "use_cla"),
        (SIZES | {"model_type": "chatglm", "rmsnorm": False}, "rmsnorm"),
    ],
)
def test_relatives_that_compute_something_else_are_refused(config: Json, says: str) -> None:
    with engine_fault(says, code="model_unsupported"):
        read_hf_spec(config, "config.json", "x", has_head=True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cohere2", "side by side"),
        ("hunyuan_v1_dense", "behind the rotary"),
        ("deepseek_v3", "queries of low rank"),
        ("minimax_m2", "chosen by bias"),
        ("qwen2_moe", "shared expert with a weight"),
    ],
)
def test_what_only_one_cpu_computes_is_refused_elsewhere(name: str, says: str) -> None:
    for ranks in ({"ranks": 2}, {"stages": 2}):
        with engine_fault(says, code="model_unsupported"):
            load_model(FAMILIES / name, backend("reference"), **ranks)
    config = SimpleNamespace(kv_cache_dtype="auto", pipeline_parallel_size=1)
    assert says in str(_lacking(open_model(FAMILIES / name).spec, config))  # type: ignore[arg-type]
    decoder = load_model(FAMILIES / name, backend("native"))
    with engine_fault(says):
        decoder.pack_adapter(SimpleNamespace())  # type: ignore[arg-type]
