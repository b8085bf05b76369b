"""The tensor names of Hugging Face folders: where Transformers puts each weight of a model.

Owns how these names are read (they are a table, tensor_names.json), and how fused tensors are cut.
Must not know backends or what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pageturner.formats.ggml_types import BY_NAME
from pageturner.formats.mapped import TensorInfo
from pageturner.models.names import (
    OUTER,
    Layout,
    Part,
    Parts,
    by_key_head,
    layout_of,
    names_of,
    second_token_layers,
)
from pageturner.models.spec import ModelSpec


def _internlm2_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V are fused KV head by KV head: the queries that share it, its key, its value."""
    d = spec.head_dim
    queries = spec.heads // spec.kv_heads * d
    rows = queries + 2 * d
    cuts = {"q": (0, queries, rows), "k": (queries, d, rows), "v": (queries + d, d, rows)}
    shape = (spec.kv_heads * rows, spec.dim)
    name = f"{prefix}attention.wqkv.weight"
    return parts | {f: Part(name, shape, cut) for f, cut in cuts.items()}


def _bloom_fused(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """Q, K and V are fused head by head."""
    d = spec.head_dim
    for i, f in enumerate(("q", "k", "v")):
        for field, ending in ((f, "weight"), (f"{f}_bias", "bias")):
            name = f"{prefix}self_attention.query_key_value.{ending}"
            shape = (3 * spec.dim, *parts[field].shape[1:])
            parts[field] = Part(name, shape, (i * d, d, 3 * d))
    return parts


def _conv1d(parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """The convolution of a gated delta net as torch has it: each channel is a group."""
    if "conv" in parts:
        channels, kernel = parts["conv"].shape
        parts["conv"] = replace(parts["conv"], shape=(channels, 1, kernel))
    if spec.arch == "qwen3_next":
        parts = by_key_head(
            "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", parts, spec, prefix
        )
    return parts


_ADAPT = {"internlm2": _internlm2_fused, "bloom": _bloom_fused}  # all others: _conv1d
# What sees pictures in Gemma 3 and 4, Llama 4 and Mistral 3, or hears; names as of Transformers 4
# and 5.
_SEEING = """
    vision_tower vision_model multi_modal_projector vision_embedder audio_tower embed_vision
    embed_audio
"""
_PICTURES = tuple(f"{root}{part}." for root in ("", "model.") for part in _SEEING.split())
# Buffers that old files carry along: masks and frequencies, which follow from the configuration.
_BUFFERS = ("emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_BAICHUAN_2 = 125_696  # tokens, by which it is known; its head is normalised when it is loaded
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def hf_layout(spec: ModelSpec, present: Callable[[str], bool]) -> Layout:
    """The layout of a Hugging Face folder; `present` as in `layout_of`."""
    names = replace(names_of("hf", spec.arch), adapt=_ADAPT.get(spec.arch, _conv1d))
    if names.stacked == "joined" and spec.arch.startswith("qwen"):
        first = names.tensor("gates")  # files have experts together, or each alone
        if not any(present(f"{root}layers.0.{first}") for root in names.roots):
            plain = names_of("hf", "llama").modules
            alone = {field: plain[field] for field in ("gates", "ups", "downs")}
            names = replace(names, modules={**names.modules, **alone}, stacked="")
    layout = layout_of(spec, names, present)
    ignored = (*_BUFFERS, "lm_head.weight") if spec.tied else _BUFFERS
    foreign = _PICTURES if OUTER in names.roots else ()
    if (spec.arch, spec.vocab) == ("baichuan", _BAICHUAN_2):
        layout.top["head"] = replace(layout.top["head"], unit=True)
    if spec.experts is not None:
        foreign += second_token_layers("model.layers.", spec)
    if spec.linear is not None:  # what sees pictures, and what predicts a second token
        foreign += ("model.visual.", "visual.", "mtp.")
    return replace(layout, ignored=ignored, foreign=(*layout.foreign, *foreign, "model.mtp"))


def as_stored(layout: Layout, tensors: Mapping[str, TensorInfo]) -> Layout:
    """The layout with the outputs first in stacked experts that are quantised, since a block is a
    piece of a row (gpt-oss in MXFP4)."""

    def turned(part: Part) -> Part:
        info = tensors.get(part.name)
        if info is not None and info.shape == (1, *part.shape):  # Ernie's biases of experts
            return replace(part, shape=info.shape, index=0)
        kind = BY_NAME.get(info.kind) if info is not None else None
        if part.index is None or not part.transposed or kind is None or kind.values == 1:
            return part
        count, columns, rows = part.shape
        return replace(part, shape=(count, rows, columns), transposed=False)

    several = [
        {f: [turned(part) for part in each] for f, each in layer.items()}
        for layer in layout.several
    ]
    return replace(layout, several=several)
