"""From the tensors of a file to the packed weights of a decoder.

Owns the tensor names of GGUF and the shapes they must have. Must not know backends (weights enter through
`ops.pack_weight`) or what the layers compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pageturner.errors import EngineFault
from pageturner.files.ggml import dequantise
from pageturner.files.gguf import GGUFFile
from pageturner.kernels.base import F32, Layer, Ops, Tensor, Weight
from pageturner.models.spec import ModelSpec, rope_tables

ROPE_DIVISORS = "rope_freqs.weight"
Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class Weights:
    """Everything a decoder computes with. `head` is `embed` where they are tied."""

    embed: Weight
    layers: list[Layer]
    norm: Weight
    head: Weight


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of `Layer` -> (tensor name behind "blk.N.", shape with the outputs first)."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("attn_norm.weight", (spec.dim,)),
        "q": ("attn_q.weight", (q, spec.dim)),
        "k": ("attn_k.weight", (kv, spec.dim)),
        "v": ("attn_v.weight", (kv, spec.dim)),
        "o": ("attn_output.weight", (spec.dim, q)),
        "mlp_norm": ("ffn_norm.weight", (spec.dim,)),
        "gate": ("ffn_gate.weight", (spec.ffn, spec.dim)),
        "up": ("ffn_up.weight", (spec.ffn, spec.dim)),
        "down": ("ffn_down.weight", (spec.dim, spec.ffn)),
    }
    if spec.qk_norm:
        shapes["q_norm"] = ("attn_q_norm.weight", (spec.head_dim,))
        shapes["k_norm"] = ("attn_k_norm.weight", (spec.head_dim,))
    if spec.qkv_bias:
        shapes["q_bias"] = ("attn_q.bias", (q,))
        shapes["k_bias"] = ("attn_k.bias", (kv,))
        shapes["v_bias"] = ("attn_v.bias", (kv,))
    return shapes


def expected_shapes(spec: ModelSpec) -> Shapes:
    """Name -> shape of every tensor that a file of this spec must have."""
    shapes: Shapes = {"token_embd.weight": (spec.vocab, spec.dim), "output_norm.weight": (spec.dim,)}
    if not spec.tied:
        shapes["output.weight"] = (spec.vocab, spec.dim)
    for i in range(spec.layers):
        for name, shape in layer_shapes(spec).values():
            shapes[f"blk.{i}.{name}"] = shape
    return shapes


def check_tensors(file: GGUFFile, spec: ModelSpec) -> None:
    """EngineFault 'tensor_missing', 'tensor_unexpected' or 'tensor_shape', naming the first such tensor."""
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise EngineFault("tensor_missing", f"{file.path} lacks the tensor {name!r}")
        if info.shape != shape:
            raise EngineFault("tensor_shape", f"tensor {name!r} has shape {info.shape}; {shape} was expected")
    for name in file.tensors:
        if name not in expected and name != ROPE_DIVISORS:
            message = f"{file.path} has the tensor {name!r}, which a {spec.arch} model should not have"
            raise EngineFault("tensor_unexpected", message)


def load_weights(file: GGUFFile, spec: ModelSpec, ops: Ops, *, dtype: str, positions: int) -> Weights:
    """Pack every tensor for the backend.

    dtype      "auto": the kinds of the file; "float32": dequantised
    positions  length of the rotary tables, in tokens
    """
    if dtype not in ("auto", "float32"):
        raise EngineFault("weight_dtype", f"dtype {dtype!r} is not supported; use auto or float32")
    check_tensors(file, spec)

    def pack(name: str) -> Weight:
        tensor = _read(file, name)
        return ops.pack_weight(_as_float32(tensor) if dtype == "float32" else tensor)

    rope = rope_tables(spec.rope, positions, _rope_divisors(file, spec))
    layers = []
    for i in range(spec.layers):
        packed = {field: pack(f"blk.{i}.{name}") for field, (name, _) in layer_shapes(spec).items()}
        layer = Layer(**packed, shape=spec.attention, rope=rope, eps=spec.eps)
        ops.prepare_layer(layer)
        layers.append(layer)
    embed = pack("token_embd.weight")
    head = embed if spec.tied else pack("output.weight")
    return Weights(embed, layers, pack("output_norm.weight"), head)


def _read(file: GGUFFile, name: str) -> Tensor:
    kind, shape, data = file.tensor(name)
    return Tensor(name, kind, shape, np.frombuffer(data, np.uint8))


def _as_float32(tensor: Tensor) -> Tensor:
    values = np.ascontiguousarray(dequantise(tensor.kind, tensor.shape, tensor.data))
    return Tensor(tensor.name, "F32", tensor.shape, values.reshape(-1).view(np.uint8))


def _rope_divisors(file: GGUFFile, spec: ModelSpec) -> F32 | None:
    if ROPE_DIVISORS not in file.tensors:
        return None
    tensor = _read(file, ROPE_DIVISORS)
    if tensor.shape != (spec.rope.dim // 2,):
        message = f"tensor {ROPE_DIVISORS!r} has shape {tensor.shape}; ({spec.rope.dim // 2},) was expected"
        raise EngineFault("tensor_shape", message)
    divisors = dequantise(tensor.kind, tensor.shape, tensor.data)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise EngineFault("model_invalid", f"tensor {ROPE_DIVISORS!r} holds values that cannot divide")
    return divisors
