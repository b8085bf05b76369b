"""Writes a GGUF file of a known shape with random weights: to measure speed where no weights are at hand.

    python bench/random_model.py qwen3-4b Q4_K_M FILE.gguf [--seed 1]
    python bench/random_model.py qwen3_6_35b Q4_K_M FILE.gguf --layers 12

Shapes are those of the published configurations; types of tensors are those that llama-quantize chooses
for a type of file. Weights of a matrix with k inputs have mean 0 and standard deviation 1 / sqrt(k), so that
activations stay of the size that norms give them. The tokenizer is a real one: Qwen's of the 0.5B model,
Llama 3's of the vocabularies (`make models vocabs`). It takes little memory, whatever the size of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pageturner.formats import hub
from pageturner.formats.gguf import Array, open_gguf
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.names import gguf_layout
from pageturner.models.spec import ModelSpec
from support import gemma4, gguf_writer
from support.hf_folder import GOLDENS
from support.hybrid_gguf import keys_of

GEMMA = "models/gemma3-270m-q4_k_m.gguf"
QWEN35 = "vocabs/ggml-vocab-qwen35.gguf"
QWEN = "models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """One model. `source`: the file with its tokenizer, in the cache folder."""

    arch: str
    source: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    base: float
    eps: float
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False


_ROWS = json.loads((Path(__file__).parent / "data" / "model_shapes.json").read_text())
SHAPES = {name: Shape(**row) for name, row in _ROWS.items()}

# By their config.json: what llama.cpp calls the architecture, and whose tokenizer the file gets.
PUBLISHED = {f"gemma4_{size}": ("gemma4", GEMMA) for size in ("e2b", "e4b", "26b", "31b")} | {
    "qwen3_30b": ("qwen3moe", QWEN),
    "qwen3_5_4b": ("qwen35", QWEN35),
    "qwen3_6_35b": ("qwen35moe", QWEN35),
}
IN_FLOATS = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_dt")  # beside vectors
LOUDER = 30  # times: embeddings that stand out of what the first layers add, so that rows differ


def published(name: str, layers: int = 0) -> ModelSpec:
    """The spec of a published configuration, of its first layers alone where a number is given."""
    values = json.loads((GOLDENS / "published_configs.json").read_text())[name]
    if layers:
        values["num_hidden_layers"] = layers
    return read_hf_spec(values, "config.json", name, has_head=not name.startswith("gemma4"))


def published_tensors(
    spec: ModelSpec, arch: str, file_type: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor by llama.cpp's names; as `tensors`."""
    wanted = ("output_scale", "gate_up") if arch == "gemma4" else ("output.weight",)
    parts = gguf_layout(replace(spec, arch=arch), lambda name: any(part in name for part in wanted))
    found = {}
    if arch == "gemma4":
        found["rope_freqs.weight"] = ("F32", (spec.rope.dim // 2,))
    for name, size in {part.name: part.shape for part in parts.all()}.items():
        if name in found:
            continue
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        kind = "F32" if len(size) == 1 or any(part in name for part in IN_FLOATS) else ""
        if name.endswith("token_embd.weight") and file_type == "Q4_K_M" and spec.tied:
            kind = "Q6_K"
        found[name] = (kind or kind_of(name, file_type, layer, spec), size)
        columns = size[-1]
        if columns % BLOCKS[found[name][0]].values:  # as llama-quantize falls back
            found[name] = ("Q8_0", size)
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """A type of GGML: its number, its block, and where in it lie the scales, each with the standard deviation
    of the values that random integers make with a scale of 1. Without scales they are floats."""

    number: int
    values: int
    nbytes: int
    scales: tuple[tuple[int, float], ...] = ()


# Standard deviations: of 4 bits around 8 4.6; of int8 73.9. K-quants multiply by a second, random scale: Q4_K
# of 6 bits (root mean square 36.7), its min 7.5 times the same, so that the mean is 0; Q6_K of int8, with 6
# bits around 32.
BLOCKS = {
    "F32": Block(0, 1, 4),
    "F16": Block(1, 1, 2),
    "Q4_0": Block(2, 32, 18, ((0, 4.61),)),
    "Q8_0": Block(8, 32, 34, ((0, 73.9),)),
    "Q4_K": Block(12, 256, 144, ((0, 4.61 * 36.7), (2, 4.61 * 36.7 / 7.5))),
    "Q6_K": Block(14, 256, 210, ((208, 18.5 * 73.9),)),
}
CHUNK = 1 << 24  # bytes at once
UNUSED = 5  # a type of tokens, of llama.h
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}  # numbers of llama.h's llama_ftype


def more_bits(layer: int, layers: int) -> bool:
    """Whether Q4_K_M gives a layer's values and down projection six bits (llama-quant.cpp, use_more_bits)."""
    return (
        layer < layers // 8
        or layer >= 7 * layers // 8
        or (layer >= layers // 8 and (layer - layers // 8) % 3 == 2)
    )


def kind_of(name: str, file_type: str, layer: int, shape: Shape | ModelSpec) -> str:
    """The type of a matrix in a file of `file_type`."""
    if file_type in ("F16", "Q8_0"):
        return file_type
    if name == "output.weight" or (name == "token_embd.weight" and shape.tied):
        return "Q6_K"
    if file_type == "Q4_0":
        return "Q4_0"
    six = name.endswith(("attn_v.weight", "ffn_down.weight")) and more_bits(layer, shape.layers)
    return "Q6_K" if six else "Q4_K"


def tensors(shape: Shape, file_type: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor, in the order of the file."""
    d, q, kv = shape.dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    top: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape.vocab, d),
        "output_norm.weight": (d,),
    }
    if not shape.tied:
        top["output.weight"] = (shape.vocab, d)
    found = {
        name: ("F32" if len(s) == 1 else kind_of(name, file_type, 0, shape), s)
        for name, s in top.items()
    }
    for i in range(shape.layers):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,),
            "attn_q": (q, d),
            "attn_k": (kv, d),
            "attn_v": (kv, d),
            "attn_output": (d, q),
            "ffn_norm": (d,),
            "ffn_gate": (shape.ffn, d),
            "ffn_up": (shape.ffn, d),
            "ffn_down": (d, shape.ffn),
        }
        if shape.qk_norm:
            parts |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
        for part, size in parts.items():
            name = f"blk.{i}.{part}.weight"
            found[name] = ("F32" if len(size) == 1 else kind_of(name, file_type, i, shape), size)
        if shape.qkv_bias:
            widths = {"q": q, "k": kv, "v": kv}
            found |= {f"blk.{i}.attn_{part}.bias": ("F32", (n,)) for part, n in widths.items()}
    return found


def tokenizer(source: str, vocab: int) -> dict[str, gguf_writer.Value]:
    """The keys of the tokenizer of a file in the cache folder, with tokens that nothing becomes behind its own."""
    keys: dict[str, Any] = {
        key: value.tolist() if isinstance(value, Array) else value
        for key, value in open_gguf(hub.cache_folder().parent / source).metadata.items()
        if key.startswith("tokenizer.")
    }
    tokens: Any = keys["tokenizer.ggml.tokens"]
    types: Any = keys["tokenizer.ggml.token_type"]
    more = range(len(tokens), vocab)
    tokens += [f"[PAD{i}]" for i in more]
    types += [UNUSED for _ in more]
    return keys


def metadata(shape: Shape, name: str, file_type: str) -> dict[str, gguf_writer.Value]:
    """What the file says of itself, with the tokenizer of `shape.source`."""
    kept = tokenizer(shape.source, shape.vocab)
    a = shape.arch
    return {
        "general.architecture": a,
        "general.name": f"{name} (random weights)",
        "general.file_type": FILE_TYPES[file_type],
        f"{a}.block_count": shape.layers,
        f"{a}.context_length": 32_768,
        f"{a}.embedding_length": shape.dim,
        f"{a}.feed_forward_length": shape.ffn,
        f"{a}.attention.head_count": shape.heads,
        f"{a}.attention.head_count_kv": shape.kv_heads,
        f"{a}.attention.key_length": shape.head_dim,
        f"{a}.attention.value_length": shape.head_dim,
        f"{a}.rope.freq_base": shape.base,
        f"{a}.rope.dimension_count": shape.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": shape.eps,
        f"{a}.vocab_size": shape.vocab,
    } | kept


def random_rows(
    kind: str, rows: int, columns: int, generator: np.random.Generator, times: float = 1.0
) -> Bytes:
    """So many rows of a matrix, so many times as large as they would be."""
    block, size = BLOCKS[kind], times * columns**-0.5
    if not block.scales:
        floats = generator.standard_normal((rows, columns), np.float32) * np.float32(size)
        return floats.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8).reshape(-1)
    raw = np.frombuffer(generator.bytes(rows * columns // block.values * block.nbytes), np.uint8)
    blocks = raw.reshape(-1, block.nbytes).copy()
    if (
        kind == "Q4_0"
    ):  # -8 becomes 0: each layer would amplify a mean, and all rows choose the same experts
        blocks[:, 2:] |= ((blocks[:, 2:] & 15) == 0).astype(np.uint8) * 8
        blocks[:, 2:] |= ((blocks[:, 2:] >> 4) == 0).astype(np.uint8) * 128
    if (
        kind == "Q4_K"
    ):  # each min is its group's scale; of groups 4 to 7 the upper two bits lie in 0 to 7
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    for offset, deviation in block.scales:
        blocks[:, offset : offset + 2] = np.array([size / deviation], np.float16).view(np.uint8)
    return blocks.reshape(-1)


def write(
    path: Path,
    name: str,
    file_type: str,
    seed: int,
    layers: int = 0,
    say: Callable[[str], None] = print,
) -> int:
    """The file, by way of another name, so that half a file is never found. Its size in bytes."""
    generator = np.random.default_rng(seed)
    table, offset = b"", 0
    if name in PUBLISHED:
        arch, source = PUBLISHED[name]
        spec = published(name, layers)
        found = published_tensors(spec, arch, file_type)
        about = (
            gemma4.metadata(spec) if arch == "gemma4" else gguf_writer.of_arch(arch, keys_of(spec))
        )
        about |= tokenizer(source, found["token_embd.weight"][1][0])
    else:
        shape = replace(SHAPES[name], layers=layers or SHAPES[name].layers)
        found = tensors(shape, file_type)
        about = metadata(shape, name, file_type)
    for tensor, (kind, size) in found.items():
        table += gguf_writer.tensor_row(tensor, BLOCKS[kind].number, size, offset)
        offset += -(-nbytes(kind, size) // gguf_writer.ALIGNMENT) * gguf_writer.ALIGNMENT
    head = gguf_writer.header(3, len(found), len(about))
    head += b"".join(gguf_writer.pair(key, value) for key, value in about.items())
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as out:
        out.write(gguf_writer.padded(head + table))
        for tensor, (kind, size) in found.items():
            if tensor == "rope_freqs.weight":
                out.write(gguf_writer.padded(gemma4.divisors(published(name)).tobytes()))
                continue
            if len(size) == 1:
                vector = (
                    np.ones(size, np.float32) + generator.standard_normal(size, np.float32) / 10
                )
                sign = -1 if tensor.endswith("ssm_a") else 1  # states decay
                out.write(gguf_writer.padded((sign * vector).astype(np.float32).tobytes()))
                continue
            rows, columns = int(np.prod(size[:-1])), size[-1]
            times = LOUDER if tensor == "token_embd.weight" else 1
            written, step = 0, max(1, CHUNK // nbytes(kind, (1, columns)))
            for first in range(0, rows, step):
                written += out.write(
                    random_rows(kind, min(step, rows - first), columns, generator, times).data
                )
            out.write(bytes(-written % gguf_writer.ALIGNMENT))
    partial.rename(path)
    say(f"{path}: {path.stat().st_size / 1e9:.2f} GB, {len(found)} tensors")
    return path.stat().st_size


def nbytes(kind: str, size: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    block = BLOCKS[kind]
    return int(np.prod(size)) // block.values * block.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[*SHAPES, *PUBLISHED])
    parser.add_argument("type", choices=FILE_TYPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0, help="the first ones alone")
    arguments = parser.parse_args()
    write(arguments.file, arguments.shape, arguments.type, arguments.seed, arguments.layers)


if __name__ == "__main__":
    main()
