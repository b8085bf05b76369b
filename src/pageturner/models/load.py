"""Loads a model: from a path to a decoder that is ready to compute. Owns only the order of the
steps."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pageturner import memory
from pageturner.errors import EngineFault, naming
from pageturner.formats.ggml import GROUP, ROUNDED, WIDENED
from pageturner.formats.gguf import open_gguf
from pageturner.formats.hf_config import CONFIG, read_config
from pageturner.formats.mapped import TensorInfo
from pageturner.formats.safetensors import open_safetensors
from pageturner.kernels.base import Ops
from pageturner.models.checkpoint import QuantisedFolder, open_checkpoint, with_quantization
from pageturner.models.decoder import Decoder
from pageturner.models.dummy import open_dummy
from pageturner.models.gguf_spec import read_gguf_spec
from pageturner.models.hf_names import HEADS, as_stored, hf_layout
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.names import Layout, Part, gguf_layout
from pageturner.models.packed_cache import PackedCache
from pageturner.models.quantise import BYTES_PER_GROUP, QUANTIZATIONS, quantisable
from pageturner.models.rope import table_bytes
from pageturner.models.shard import Divisible, Shard, shard_of
from pageturner.models.spec import ModelSpec, unsupported
from pageturner.models.stages import Stage, stage_of
from pageturner.models.weights import (
    LAYER_TABLE,
    LoadOptions,
    OpenModel,
    TensorFile,
    check_counts,
    has_tensor,
    load_weights,
)

# Tables whose rows are read where they lie in the file, as they are.
LAYER_TABLES = ("embed_tokens_per_layer.weight", "per_layer_token_embd.weight")
_log = logging.getLogger("pageturner")


def load_model(path: str | os.PathLike[str], ops: Ops, **fields: Any) -> Decoder:
    """Read, check and pack the model in a GGUF file or a Hugging Face folder. EngineFault for
    anything that cannot be right; 'model_memory' before anything is read when the machine cannot
    hold the weights.

    fields  of LoadOptions
    """
    options = LoadOptions(**fields)
    if options.quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise EngineFault(
            "weight_dtype",
            f"quantization {options.quantization!r} is not supported; use one of {known}",
        )
    model = open_model(path, options.load_format, options.load_seed)
    with naming(path):
        if options.mtp:
            model = with_mtp(model)
        shard = _shard(model, options)
        if options.rank == 0:  # it does so for all
            free = (options.available or memory.available)()
            check_memory(model.file, model.layout, options.dtype, options.quantization, free)
            for line in what_becomes(model.file):
                _log.warning("%s: %s", path, line)
        check_tables(model.spec, options.positions(model.spec))
        cache = _packed_cache(Path(path), ops, options, shard) if options.packed_cache else None
        try:
            weights = load_weights(model, ops, options, cache, shard)
            if cache is not None:
                cache.keep()
        except MemoryError as error:  # a limit that `memory.available` knows nothing of
            raise EngineFault(
                "model_memory",
                "memory ran out while the weights were loaded: use a smaller or a more quantised model",
            ) from error
        finally:
            if cache is not None:
                cache.close()
    return Decoder(model.spec, weights, ops)


def _packed_cache(
    path: Path, ops: Ops, options: LoadOptions, shard: Shard | Stage | None
) -> PackedCache:
    settings = {
        "dtype": options.dtype,
        "quantization": options.quantization,
        "bits": options.activation_bits,
    }
    if shard:
        settings["shard"] = f"{options.rank} of {options.ranks} by {options.stages}"
    return PackedCache(Path(options.packed_cache), path, ops, settings)


def _shard(model: OpenModel, options: LoadOptions) -> Shard | Stage | None:
    """The part of the model that this rank has."""
    file, spec, layout = model
    dtype, quantization = options.dtype, options.quantization
    if spec.composed and (options.ranks > 1 or options.stages > 1):
        raise unsupported(f"this model has {spec.composed}, which is not divided among ranks yet")
    infos = file.tensors.items()
    if options.ranks > 1:
        kinds = {name: "F32" if dtype == "float32" else info.kind for name, info in infos}
        return shard_of(Divisible(spec, layout, kinds, quantization), options.rank, options.ranks)
    if options.stages > 1:
        nbytes = {name: loaded_bytes(info, dtype, quantization) for name, info in infos}
        return stage_of(spec, layout, nbytes, options.rank, options.stages)
    return None


def open_model(
    path: str | os.PathLike[str], load_format: str = "auto", load_seed: int = 0
) -> OpenModel:
    """The tensors of a model, what it is, and which tensor is what; no weights are read yet."""
    with naming(path):
        if load_format == "dummy":
            return OpenModel(*open_dummy(path, load_seed))
        return _open(Path(path))


def _open(path: Path) -> OpenModel:
    if not path.is_dir():
        gguf = open_gguf(path)
        spec = read_gguf_spec(gguf)
        check_counts(gguf, spec)
        return OpenModel(gguf, spec, gguf_layout(spec, partial(has_tensor, gguf)))
    where = str(path / CONFIG)
    config = with_quantization(read_config(path), path)
    file = open_checkpoint(config, open_safetensors(path), where)
    spec = read_hf_spec(config, where, path.name, any(head in file.tensors for head in HEADS))
    check_counts(file, spec)
    layout = hf_layout(spec, partial(has_tensor, file))
    if spec.tied and (head := _own_head(file, layout)):
        _log.warning("%s says that the head is tied, and has another one: %s is taken", path, head)
        spec = replace(spec, tied=False)
        layout = hf_layout(spec, partial(has_tensor, file))
    return OpenModel(file, spec, as_stored(layout, file.tensors))


_QWEN_MTP = ("layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Where a head of multi-token prediction has its layer and its other parts: Qwen's beside the layers
# of the model, DeepSeek's and GLM's behind them, as files of llama.cpp have all of them.
_MTP = (
    *([f"{root}mtp.{name}" for name in _QWEN_MTP] for root in ("", "model.")),
    ("{}", "{}eh_proj", "{}enorm", "{}hnorm", "{}shared_head.norm"),
    ("{}", "{}nextn.eh_proj", "{}nextn.enorm", "{}nextn.hnorm", "{}nextn.shared_head_norm"),
)


def with_mtp(model: OpenModel) -> OpenModel:
    """The model with its head that predicts a second token: one more layer, and parts beside those
    outside of the layers. EngineFault('draft_model') where there is none."""
    file, spec, layout = model
    one = spec.mtp
    first = next(part.name for part in layout.layers[0].values() if ".0." in part.name)
    old = first[: first.index(".0.") + 3]
    behind = old.replace(".0.", f".{spec.layers}.")
    styles = [[name.format(behind) for name in style] for style in _MTP]
    found = next((s for s in styles if f"{s[1]}.weight" in file.tensors), None)
    if found is None:
        raise EngineFault(
            "draft_model",
            f"{file.path} has no head that predicts a second token (MTP): leave --speculation mtp out,"
            " or use --speculation ngram",
        )
    new, fc, enorm, hnorm, norm = found

    def renamed(name: str) -> str:
        return new + name[len(old) :] if name.startswith(old) else name

    def moved(part: Part) -> Part:
        return replace(part, name=renamed(part.name), by=renamed(part.by))

    def present(name: str) -> bool:
        return has_tensor(file, renamed(name))

    in_gguf = old.startswith("blk.")
    head = gguf_layout(one, present) if in_gguf else hf_layout(one, present)
    several = {f: [*map(moved, parts)] for f, parts in head.several[0].items()}
    head = Layout(head.top, [{f: moved(p) for f, p in head.layers[0].items()}], [several])
    if not in_gguf:
        head = as_stored(head, file.tensors)
    last = replace(layout.top["norm"], times=1.0)
    own = {"mtp_enorm": enorm, "mtp_hnorm": hnorm, "mtp_norm": norm}
    top = {f: replace(last, name=f"{name}.weight") for f, name in own.items()}
    if top["mtp_norm"].name not in file.tensors:
        top["mtp_norm"] = last
    top["mtp_fc"] = Part(f"{fc}.weight", (spec.dim, 2 * spec.dim))
    whole = replace(
        layout,
        top=layout.top | top,
        layers=layout.layers + head.layers,
        several=layout.several + head.several,
    )
    return OpenModel(file, spec, whole)


def _own_head(file: TensorFile, layout: Layout) -> str:
    """The name of the output head where it has other values than the embedding, else ""."""
    head = next((name for name in HEADS if name in file.tensors), "")
    embed = file.tensors.get(layout.top["embed"].name)
    if not head or embed is None or file.tensors[head].shape != embed.shape:
        return ""
    if file.tensors[head].kind != embed.kind:
        return head
    raw = [np.frombuffer(file.tensor(name)[2], np.uint8) for name in (head, embed.name)]
    for start in range(0, len(raw[0]), 1 << 24):
        part = slice(start, start + (1 << 24))
        if not np.array_equal(raw[0][part], raw[1][part]):
            return head
    return ""


def what_becomes(file: TensorFile) -> list[str]:
    """A line for each kind of weights that no kernel has, which says what they lose when they are
    loaded."""
    if isinstance(file, QuantisedFolder):
        return file.becomes
    lines = []
    kinds = [info.kind for info in file.tensors.values()]
    for kind in dict.fromkeys(kinds):
        if kind in ROUNDED or WIDENED.get(kind) == "Q8_W":
            error = "root mean square error 0.2 %" if kind in ROUNDED else "exact, 10 bits a weight"
            becomes = f"int8 with a scale for each 16 values ({error})"
        elif kind in WIDENED:
            becomes = "nibbles of a table of integers (exact, 5.25 bits a weight)"
        else:
            continue
        lines.append(f"{kind} becomes {becomes}, in {kinds.count(kind)} matrices")
    return lines


def weight_bytes(file: TensorFile, layout: Layout, dtype: str, quantization: str) -> int:
    """The bytes that the weights take at least once they are loaded."""
    used = {part.name for part in layout.all()} & file.tensors.keys()
    if LAYER_TABLE in layout.top:  # it stays in its file
        used.discard(layout.top[LAYER_TABLE].name)
    return sum(loaded_bytes(file.tensors[name], dtype, quantization) for name in used)


def check_memory(
    file: TensorFile, layout: Layout, dtype: str, quantization: str, free: int | None
) -> None:
    """EngineFault('model_memory') unless at least the weights themselves fit into what is free;
    what a backend adds to them is its own to say."""
    needed = weight_bytes(file, layout, dtype, quantization)
    if free is not None and needed > free:
        raise EngineFault(
            "model_memory",
            f"the weights of {file.path} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            ": use a smaller or a more quantised model",
        )


def check_tables(spec: ModelSpec, positions: int) -> None:
    """EngineFault('model_memory') unless the rotary tables of so many positions fit."""
    ropes = {spec.rope_of(layer) for layer in range(spec.layers)}
    needed = sum(table_bytes(rope, positions) for rope in ropes)
    free = memory.available()
    if free is not None and needed > free:
        raise EngineFault(
            "model_memory",
            f"a context of {positions:,} tokens takes {needed / 1e9:.1f} GB of rotary tables, and"
            f" {free / 1e9:.1f} GB are free: use --max-model-len",
        )


def loaded_bytes(info: TensorInfo, dtype: str, quantization: str) -> int:
    """The bytes that a tensor takes at least once it is loaded."""
    if info.name.endswith(LAYER_TABLES):
        return info.nbytes
    if quantization != "none" and quantisable(
        "F32" if dtype == "float32" else info.kind, info.shape
    ):
        return prod(info.shape) // GROUP * BYTES_PER_GROUP[quantization]
    if dtype == "float32":
        return 4 * prod(info.shape)
    if info.kind in WIDENED:
        return prod(info.shape) // GROUP * {"T4_W": 21, "Q8_W": 40}[WIDENED[info.kind]]
    return info.nbytes
