"""LoRA adapters as PEFT writes them, with random values, for a model that is at hand. For tests only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.kernels.adapters import FIELDS, AdapterWeights, LowRank
from pageturner.models.lora import CONFIG, PREFIX, WEIGHTS
from pageturner.models.spec import ModelSpec
from support.safetensors_writer import Tensor, write_safetensors

LLAMA = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ALL = FIELDS
TOP = ("embed", "head")


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each field that can be adapted."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "q": (q, spec.dim),
        "k": (kv, spec.dim),
        "v": (kv, spec.dim),
        "o": (spec.dim, q),
        "gate": (spec.ffn, spec.dim),
        "up": (spec.ffn, spec.dim),
        "down": (spec.dim, spec.ffn),
        "embed": (spec.dim, spec.vocab),
        "head": (spec.vocab, spec.dim),
    }


def draw(shape: tuple[int, ...], scale: float, seed: object) -> np.ndarray:
    generator = np.random.default_rng(list(str(seed).encode()))
    return generator.standard_normal(shape).astype(np.float32) * np.float32(scale)


def factors(
    spec: ModelSpec, name: str, rank: int, seed: object, size: float = 0.3
) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, inputs] and B [outputs, rank]: they add about `size` to each output of a row of ones."""
    outputs, inputs = shapes_of(spec)[name]
    a = draw((rank, inputs), inputs**-0.5, (seed, name, "a"))
    return a, draw((outputs, rank), size * rank**-0.5, (seed, name, "b"))


def as_kind(values: np.ndarray, kind: str) -> np.ndarray:
    """fp32 values in a kind of kernels.adapters.KINDS; bf16 is cut."""
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if kind == "F16" else np.float32)


def random_weights(
    spec: ModelSpec,
    fields: tuple[str, ...] = ALL,
    rank: int = 16,
    seed: int = 0,
    kind: str = "BF16",
) -> AdapterWeights:
    """An adapter without a folder."""

    def pair(name: str, at: object) -> LowRank:
        a, b = (as_kind(one, kind) for one in factors(spec, name, rank, (seed, at)))
        return LowRank(np.ascontiguousarray(a.T) if name == "embed" else a, b, 1.5)

    layers = tuple(
        {name: pair(name, i) for name in fields if name in LLAMA} for i in range(spec.layers)
    )
    embed, head = (pair(name, "top") if name in fields else None for name in TOP)
    return AdapterWeights(kind, layers, embed, head)


def write_adapter(
    folder: Path,
    spec: ModelSpec,
    fields: tuple[str, ...] = ("q", "v"),
    rank: int = 8,
    seed: int = 0,
    kind: str = "F32",
    size: float = 0.3,
    **config: Any,
) -> Path:
    """A folder for a model whose modules are called as Llama's. config: what differs in its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [
        (field, f"model.layers.{i}.{LLAMA[field]}")
        for i in range(spec.layers)
        for field in fields
        if field in LLAMA
    ]
    names += [
        (field, {"embed": "model.embed_tokens", "head": "lm_head"}[field])
        for field in fields
        if field in TOP
    ]
    tensors: dict[str, Tensor] = {}
    for field, name in names:
        a, b = factors(spec, field, rank, (seed, name), size)
        kinds = ("lora_embedding_", "") if field == "embed" else ("lora_", ".weight")
        endings = [f"{kinds[0]}{factor}{kinds[1]}" for factor in "AB"]
        for ending, values in zip(endings, (a, b), strict=True):
            tensors[f"{PREFIX}{name}.{ending}"] = (
                kind,
                values.shape,
                as_kind(values, kind).tobytes(),
            )
    write_safetensors(folder / WEIGHTS, tensors)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    (folder / CONFIG).write_text(json.dumps(settings))
    return folder
