"""From a path to a decoder that is ready to compute. Owns only the order of the steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from math import prod
from pathlib import Path

from pageturner import memory
from pageturner.errors import EngineFault, naming
from pageturner.formats.ggml import GROUP, ROUNDED
from pageturner.formats.gguf import open_gguf
from pageturner.formats.hf_config import CONFIG, read_config
from pageturner.formats.mapped import TensorInfo
from pageturner.formats.safetensors import open_safetensors
from pageturner.kernels.base import Ops
from pageturner.models.checkpoint import QuantisedFolder, open_checkpoint
from pageturner.models.decoder import Decoder
from pageturner.models.dummy import open_dummy
from pageturner.models.gguf_spec import read_gguf_spec
from pageturner.models.hf_names import HEADS, as_stored, hf_layout
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.names import Layout, gguf_layout
from pageturner.models.packed_cache import PackedCache
from pageturner.models.quantise import BYTES_PER_GROUP, QUANTIZATIONS, quantisable
from pageturner.models.rope import table_bytes
from pageturner.models.shard import Shard, shard_of
from pageturner.models.spec import ModelSpec
from pageturner.models.stages import Stage, stage_of
from pageturner.models.weights import TensorFile, check_counts, load_weights

_log = logging.getLogger("pageturner")


def load_model(
    path: str | os.PathLike[str],
    ops: Ops,
    *,
    dtype: str = "auto",
    max_positions: int = 0,
    quantization: str = "none",
    activation_bits: str = "auto",
    packed_cache: str = "",
    rank: int = 0,
    ranks: int = 1,
    stages: int = 1,
    load_format: str = "auto",
    load_seed: int = 0,
    available: Callable[[], int | None] | None = None,
) -> Decoder:
    """Read, check and pack the model in a GGUF file or a Hugging Face folder. EngineFault for anything that
    cannot be right; 'model_memory' before anything is read when the machine cannot hold the weights.

    dtype          "auto": weights as in the file; "float32": dequantised
    max_positions  longest sequence that will be computed, in tokens; 0: the model's context
    quantization   "none", "int8" or "int4": what matrices of floats become (see models/quantise.py)
    activation_bits  of products with quantised weights: "8", "15", or "auto": 15 where it matters most
    packed_cache   folder that keeps packed weights for the next load (see models/packed_cache.py); "": none
    rank, ranks    of tensor parallel: this one's slices (see models/shard.py)
    stages         of pipeline parallel, in place of `ranks`: this one's layers (see models/stages.py)
    load_format    "dummy": random weights of a config.json, from load_seed (see models/dummy.py)
    available      bytes that are free where the weights are to lie; None: in the memory of this machine
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        message = f"quantization {quantization!r} is not supported; use one of {known}"
        raise EngineFault("weight_dtype", message)
    file, spec, layout = open_model(path, load_format, load_seed)
    positions = min(max_positions or spec.context, spec.context)
    with naming(path):
        shard = _shard(file, spec, layout, dtype, quantization, (rank, ranks, stages))
        if rank == 0:  # it does so for all
            check_memory(file, layout, dtype, quantization, (available or memory.available)())
            for line in what_becomes(file):
                _log.warning("%s: %s", path, line)
        check_tables(spec, positions)
        settings = {"dtype": dtype, "quantization": quantization, "bits": activation_bits}
        settings |= {"shard": f"{rank} of {ranks} by {stages}"} if shard else {}
        cache = PackedCache(Path(packed_cache), Path(path), ops, settings) if packed_cache else None
        try:
            weights = load_weights(
                file,
                spec,
                layout,
                ops,
                dtype=dtype,
                positions=positions,
                quantization=quantization,
                activation_bits=activation_bits,
                packed_cache=cache,
                shard=shard,
            )
            if cache is not None:
                cache.keep()
        except MemoryError as error:  # a limit that `memory.available` knows nothing of
            message = "memory ran out while the weights were loaded: use a smaller or a more quantised model"
            raise EngineFault("model_memory", message) from error
        finally:
            if cache is not None:
                cache.close()
    return Decoder(spec, weights, ops)


def _shard(
    file: TensorFile,
    spec: ModelSpec,
    layout: Layout,
    dtype: str,
    quantization: str,
    places: tuple[int, int, int],
) -> Shard | Stage | None:
    """Which part of the model it is. places: rank, ranks, stages."""
    rank, ranks, stages = places
    if ranks > 1:
        kinds = {
            name: "F32" if dtype == "float32" else info.kind for name, info in file.tensors.items()
        }
        return shard_of(spec, layout, kinds, rank, ranks, quantization)
    if stages > 1:
        nbytes = {
            name: loaded_bytes(info, dtype, quantization) for name, info in file.tensors.items()
        }
        return stage_of(spec, layout, nbytes, rank, stages)
    return None


def open_model(
    path: str | os.PathLike[str], load_format: str = "auto", load_seed: int = 0
) -> tuple[TensorFile, ModelSpec, Layout]:
    """The tensors of a model, what it is, and which tensor is what; no weights are read yet."""
    with naming(path):
        return open_dummy(path, load_seed) if load_format == "dummy" else _open(path)


def _open(path: str | os.PathLike[str]) -> tuple[TensorFile, ModelSpec, Layout]:
    if not Path(path).is_dir():
        gguf = open_gguf(path)
        spec = read_gguf_spec(gguf)
        check_counts(gguf, spec)
        return gguf, spec, gguf_layout(spec, gguf.tensors.__contains__)
    folder = Path(path)
    config = read_config(folder)
    tensors = open_checkpoint(config, open_safetensors(folder), str(folder / CONFIG))
    spec = read_hf_spec(
        config, str(folder / CONFIG), folder.name, any(head in tensors.tensors for head in HEADS)
    )
    check_counts(tensors, spec)
    return tensors, spec, as_stored(hf_layout(spec, tensors.tensors.__contains__), tensors.tensors)


def what_becomes(file: TensorFile) -> list[str]:
    """What weights lose when they are loaded, because no kernel has their kind: a line for each such kind."""
    if isinstance(file, QuantisedFolder):
        return file.becomes
    kinds = [info.kind for info in file.tensors.values() if info.kind in ROUNDED]
    return [
        f"{kind} becomes int8 with a scale for each 16 values (root mean square error 0.2 %), in"
        f" {kinds.count(kind)} matrices"
        for kind in dict.fromkeys(kinds)
    ]


def weight_bytes(file: TensorFile, layout: Layout, dtype: str, quantization: str) -> int:
    """At least so many bytes do the weights take once they are loaded."""
    used = {part.name for part in layout.all()} & file.tensors.keys()
    return sum(loaded_bytes(file.tensors[name], dtype, quantization) for name in used)


def check_memory(
    file: TensorFile, layout: Layout, dtype: str, quantization: str, free: int | None
) -> None:
    """EngineFault('model_memory') unless at least the weights themselves fit into what is free; what a
    backend adds to them is its own to say."""
    needed = weight_bytes(file, layout, dtype, quantization)
    if free is not None and needed > free:
        message = f"the weights of {file.path} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise EngineFault("model_memory", f"{message}: use a smaller or a more quantised model")


def check_tables(spec: ModelSpec, positions: int) -> None:
    """EngineFault('model_memory') unless the rotary tables of so many positions fit."""
    ropes = {spec.rope_of(layer) for layer in range(spec.layers)}
    needed = sum(table_bytes(rope, positions) for rope in ropes)
    free = memory.available()
    if free is not None and needed > free:
        message = (
            f"a context of {positions:,} tokens takes {needed / 1e9:.1f} GB of rotary tables, and"
        )
        raise EngineFault(
            "model_memory", f"{message} {free / 1e9:.1f} GB are free: use --max-model-len"
        )


def loaded_bytes(info: TensorInfo, dtype: str, quantization: str) -> int:
    """At least so much does a tensor take once it is loaded."""
    if quantization != "none" and quantisable(
        "F32" if dtype == "float32" else info.kind, info.shape
    ):
        return prod(info.shape) // GROUP * BYTES_PER_GROUP[quantization]
    return 4 * prod(info.shape) if dtype == "float32" else info.nbytes
