"""Gemma 4 as GGUF files, of the names and keys that llama.cpp's converter writes. For tests and acceptance."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pageturner.formats.ggml import dequantise
from pageturner.kernels.base import Tensor
from pageturner.models.quantise import quantise
from pageturner.models.spec import ModelSpec
from pageturner.models.weights import TensorFile
from support import gguf_writer as w

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
}
Kind = Callable[[str], str]  # the type of a matrix by its name in the GGUF file
NUMBERS = w.NUMBERS | {"Q4_K": 12}


def floats(name: str) -> str:
    """All matrices in F32."""
    return "F32"


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor of a Hugging Face folder."""
    found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.*?)(?:\.weight)?", name)
    assert found is not None, name
    layer, part = found.groups()
    ours = _NAMES[part]
    ours = ours if ours.endswith(".scale") else ours + ".weight"
    return ours if layer is None else f"blk.{layer}.{ours}"


def blocks(values: np.ndarray, kind: str, seed: int = 0) -> bytes:
    """A matrix as blocks. Q4_K has random ones: nobody here looks for its best."""
    if kind == "F32":
        return np.ascontiguousarray(values, np.float32).tobytes()
    rows = values.reshape(-1, values.shape[-1])
    if kind == "Q4_K":
        count = rows.size // 256
        draw = np.random.default_rng(seed)
        raw = draw.integers(0, 256, (count, 144), np.uint8)
        raw[:, :4] = np.array([2e-4, 1.4e-3], np.float16).view(np.uint8)  # d, dmin
        return raw.tobytes()
    data = np.ascontiguousarray(rows, np.float32).reshape(-1).view(np.uint8)
    asked = {"Q8_0": "int8", "Q4_1": "int4"}[kind]
    return quantise(Tensor("x", "F32", rows.shape, data), asked).data.tobytes()


def gguf_of(file: TensorFile, spec: ModelSpec, kind: Kind = floats, joined: bool = True) -> bytes:
    """The model of a folder as a GGUF file; joined: gates and ups of experts in one tensor."""
    tensors: dict[str, w.Tensor] = {}
    for at, name in enumerate(file.tensors):
        stored, shape, raw = file.tensor(name)
        values = dequantise(stored, shape, np.frombuffer(raw, np.uint8)).reshape(shape)
        ours = gguf_name(name)
        parts = {ours: values}
        if ours.endswith("ffn_gate_up_exps.weight") and not joined:
            gates, ups = np.split(values, 2, axis=1)
            prefix = ours.removesuffix("gate_up_exps.weight")
            parts = {f"{prefix}gate_exps.weight": gates, f"{prefix}up_exps.weight": ups}
        for one, part in parts.items():
            form = "F32" if part.ndim == 1 or "ffn_gate_inp" in one else kind(one)
            tensors[one] = (NUMBERS[form], part.shape, blocks(part, form, at))
    still = divisors(spec)
    tensors["rope_freqs.weight"] = (0, still.shape, still.tobytes())
    return w.gguf_bytes(metadata(spec), tensors)


def divisors(spec: ModelSpec) -> np.ndarray:
    """What the frequencies are divided by: those of pairs that stand still by 1e30."""
    turned = spec.rope.turned // 2
    return np.array([1.0] * turned + [1e30] * (spec.rope.dim // 2 - turned), np.float32)


def metadata(spec: ModelSpec) -> dict[str, w.Value]:
    """The keys of a file of this model, without a tokenizer."""
    assert spec.local_heads is not None
    assert spec.local_rope is not None
    every = range(spec.layers)
    keys = w.sizes_of(spec) | {
        "attention.layer_norm_rms_epsilon": spec.eps,
        "attention.key_length_swa": spec.local_heads[1],
        "attention.value_length_swa": spec.local_heads[1],
        "attention.sliding_window": spec.window,
        "attention.sliding_window_pattern": [layer in spec.windowed for layer in every],
        "attention.shared_kv_layers": spec.sharing,
        "embedding_length_per_layer_input": spec.per_layer,
        "rope.freq_base": spec.rope.base,
        "rope.freq_base_swa": spec.local_rope.base,
        "rope.dimension_count": spec.head_dim,
        "rope.dimension_count_swa": spec.local_heads[1],
        "final_logit_softcapping": spec.logit_soft_cap,
    }
    if spec.local_heads[0] != spec.kv_heads:
        each = [spec.attention(layer, spec.context).kv_heads for layer in every]
        keys["attention.head_count_kv"] = each
    if spec.sharing_ffn:
        keys["feed_forward_length"] = [spec.inner(layer) for layer in every]
    if spec.experts is not None:
        keys["expert_count"] = spec.experts.count
        keys["expert_used_count"] = spec.experts.top_k
        keys["expert_feed_forward_length"] = spec.experts.ffn
    return w.of_arch("gemma4", keys)


def write_gguf(
    path: Path, file: TensorFile, spec: ModelSpec, kind: Kind = floats, joined: bool = True
) -> Path:
    path.write_bytes(gguf_of(file, spec, kind, joined))
    return path
