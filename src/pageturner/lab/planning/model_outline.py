"""The numbers that decide how much memory a model takes, from a config.json or the header of a GGUF
file alone.

Owns what is known of weights and KV before anything is loaded. Models that this engine runs are
read by the readers of their specs; of others the keys that most configurations share are taken at
their word (outline_keys.py). Must not know how memory is divided among sequences.

Codes: those of the readers, and vocabulary_only, bad_setting.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault, bad_setting, naming, one_line
from pageturner.formats.ggml_types import BY_NAME
from pageturner.formats.gguf import GGUFFile, model_name, open_header
from pageturner.formats.hf_config import (
    CONFIG,
    MAX_BYTES,
    parse_json,
    read_bounded,
    read_config,
    read_json,
)
from pageturner.formats.mapped import TensorInfo
from pageturner.kernels.base import GPU_HEAD_MULTIPLE, KVSpec
from pageturner.kernels.recurrent import RecurrentSpec
from pageturner.lab.planning.model_outline_keys import (
    KVLayers,
    Usual,
    gguf_usual,
    hf_usual,
    text_part,
)
from pageturner.models.checkpoint import why_not_read, with_quantization
from pageturner.models.gguf_spec import read_gguf_spec
from pageturner.models.hf_names import hf_layout
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import loaded_bytes
from pageturner.models.spec import ModelSpec

# Whose head is the embedding table where the file is silent (the configuration classes of
# Transformers).
_TIED = ("gpt2", "opt", "bloom", "gemma2", "gemma3", "gemma3_text")
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# The reader of a spec refused the model for what may have nothing to do with memory.
_NOT_RUN = ("model_unsupported", "config_invalid", "gguf_metadata", "tensor_missing")


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as far as memory is concerned.

    arch          the family, as the file calls it
    heads         query heads of a layer
    kv            its layers, those of one kind together
    context       longest sequence in tokens; 0: the file does not say
    weights       bytes once loaded; None: not known
    weights_from  where that number comes from, or why there is none
    why_not       why this engine does not run the model; "": it does
    assumed       what the file should have said and did not, in words
    spec          all of it, for families that are known; None: memory is all that is known
    gpu_kv        whether KV is as GPUs store it: fp8_e4m3 with scales, heads padded
    mtp           whether its head drafts that predicts a second token: the last of its `kv`
    """

    name: str
    arch: str
    heads: int
    kv: tuple[KVLayers, ...]
    context: int
    weights: int | None
    weights_from: str
    why_not: str = ""
    assumed: str = ""
    spec: ModelSpec | None = None
    gpu_kv: bool = False
    mtp: bool = False

    @property
    def layers(self) -> int:
        """The number of layers that have KV."""
        return sum(layers.count for layers in self.kv)

    @property
    def attention(self) -> str:
        """The name of its kind: MHA, GQA, MQA or MLA."""
        kinds = {layers.kind(self.heads): None for layers in self.kv}
        return ", ".join(kinds)

    def bytes_per_token(self, dtype: str) -> int:
        """One token in all layers, while no window has left it behind; dtype: a key of
        `KV_TYPES`."""
        return sum(self.layer_bytes(layers, dtype) for layers in self.kv)

    def recurrent(self, dtype: str) -> RecurrentSpec | None:
        """The storage of the states of recurrent layers; None: there are none, as far as known."""
        return None if self.spec is None else self.spec.recurrent_spec(dtype)

    def layer_bytes(self, layers: KVLayers, dtype: str) -> int:
        """One token in all layers of one kind, as the engine's own KV storage has it."""
        dims = [dim for dim in (layers.key_dim, layers.value_dim) if dim]
        scaled = self.gpu_kv and dtype == "fp8_e4m3"
        multiple = GPU_HEAD_MULTIPLE if self.gpu_kv else 1
        specs = (
            KVSpec(
                layers.count, 1, 1, layers.heads, dim, dtype, scaled=scaled, head_multiple=multiple
            )
            for dim in dims
        )
        return sum(spec.nbytes // 2 for spec in specs)


def rank_kv_bytes(model: Outline, dtype: str, ranks: int) -> int:
    """KV of one token at each rank that has most of it: whole heads; of fewer heads than ranks, and
    of MLA's latents, several ranks hold the same."""
    return sum(
        model.layer_bytes(layers, dtype) * -(-layers.heads // ranks) // layers.heads
        for layers in model.kv
    )


def kv_share(model: Outline, dtype: str, ranks: int) -> float:
    """The part of the memory that ranks have for KV that holds something no other rank holds too, 0
    to 1."""
    return model.bytes_per_token(dtype) / (ranks * rank_kv_bytes(model, dtype, ranks))


def read_outline(
    path: str | os.PathLike[str],
    dtype: str = "auto",
    quantization: str = "none",
    mtp: bool = False,
) -> Outline:
    """The outline of a GGUF file, which may end behind its header, a config.json, or a folder with
    one.

    dtype, quantization  what weights become when they are loaded, as in `load_model`
    mtp  the head of the checkpoint that predicts a second token is loaded too
    EngineFault says what is missing, makes no sense, or would make the answer wrong.
    """
    path = Path(path)
    with naming(path):
        if path.is_dir() or path.suffix == ".json":
            found = _hugging_face(path, dtype, quantization, mtp)
        else:
            found = _gguf(open_header(path), model_name(path), dtype, quantization)
        if not mtp or found.spec is None:
            return found
        return replace(found, kv=(*found.kv, *_layers_of(found.spec.mtp)), mtp=True)


def _layers_of(spec: ModelSpec) -> tuple[KVLayers, ...]:
    windowed = len([i for i in spec.windowed if not spec.shares(i)]) if spec.window else 0
    whole, recent = (
        KVLayers(kind.layers, kind.kv_heads, kind.head_dim, 0 if spec.latent else kind.head_dim)
        for kind in spec.kv_spec(1, 1, "float16").split(windowed)
    )
    return tuple(kind for kind in (whole, replace(recent, window=spec.window)) if kind.count)


# -- Hugging Face ----------------------------------------------------------------------------------


def _hugging_face(path: Path, dtype: str, quantization: str, mtp: bool) -> Outline:
    values = with_quantization(read_config(path), path) if path.is_dir() else read_json(path)
    where = path / CONFIG if path.is_dir() else path
    name = where.resolve().parent.name if where.name == CONFIG else where.stem
    files = _file_bytes(where.parent) if where.name == CONFIG else None
    arch = one_line(str(values.get("model_type")))
    quantised = values.get("quantization_config")
    bare = {key: value for key, value in values.items() if key != "quantization_config"}
    try:
        spec = read_hf_spec(bare, str(where), name, arch not in _TIED)
    except EngineFault as fault:
        if fault.code not in _NOT_RUN:
            raise
        usual = hf_usual(values, str(where))
        weights = _as_in_files(
            files, dtype, quantization, "the shapes of its weights are not known here"
        )
        return _unusual(name, arch, usual, weights, fault.message)
    if quantised:
        reason = "they are quantised by a method of their own"
        weights, why_not = _as_in_files(files, dtype, quantization, reason), why_not_read(quantised)
    else:
        weights, why_not = _from_shapes(spec, values, dtype, quantization, mtp), ""
    return Outline(
        name, arch, spec.heads, _layers_of(spec), spec.context, *weights, why_not, spec=spec
    )


def _unusual(
    name: str, arch: str, usual: Usual, weights: tuple[int | None, str], why_not: str
) -> Outline:
    return Outline(
        name, arch, usual.heads, usual.kv, usual.context, *weights, why_not, usual.assumed
    )


def _from_shapes(
    spec: ModelSpec, values: dict[str, Any], dtype: str, quantization: str, mtp: bool
) -> tuple[int, str]:
    """Bytes of the weights that such a model has, in the float type that its configuration
    names."""
    said = str(
        values.get("dtype")
        or values.get("torch_dtype")
        or text_part(values).get("torch_dtype")
        or ""
    )
    known = said.removeprefix("torch.")
    kind = BY_NAME[_FLOATS.get(known, "BF16")]
    shapes = {part.name: part.shape for part in hf_layout(spec, lambda name: False).all()}
    if mtp:
        head = replace(hf_layout(spec.mtp, lambda name: False), top={})
        shapes |= {f"mtp.{part.name}": part.shape for part in head.all()}
        shapes["mtp.fc"] = (spec.dim, 2 * spec.dim)
    tensors = [
        TensorInfo(name, kind.name, shape, 0, prod(shape) * kind.nbytes)
        for name, shape in shapes.items()
    ]
    form = f"in {known}" if known in _FLOATS else "of 16 bits, as the file names no float type"
    return _weights(tensors, dtype, quantization, form)


def _weights(
    tensors: list[TensorInfo], dtype: str, quantization: str, form: str
) -> tuple[int, str]:
    parameters = sum(prod(info.shape) for info in tensors)
    if dtype == "float32":
        form = "in float32"
    if quantization != "none":
        form = f"{form}, matrices in {quantization}"
    nbytes = sum(loaded_bytes(info, dtype, quantization) for info in tensors)
    return nbytes, f"{parameters:,} parameters {form}"


def _as_in_files(
    files: int | None, dtype: str, quantization: str, reason: str
) -> tuple[int | None, str]:
    """Bytes of weights of which only the files are known, if they are."""
    if (dtype, quantization) != ("auto", "none"):
        raise bad_setting(
            f"--dtype and --quantization cannot be planned for: {reason}; use --weights-bytes"
        )
    return (files, "as in its files") if files else (None, f"not known: {reason}")


def _file_bytes(folder: Path) -> int | None:
    """Bytes of the weights of a folder, by the index of their shards or by the single file."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            try:
                return int(
                    parse_json(read_bounded(folder / index, MAX_BYTES))["metadata"]["total_size"]
                )
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                return None  # it need not say
    single = folder / "model.safetensors"
    return single.stat().st_size if single.is_file() else None


# -- GGUF ------------------------------------------------------------------------------------------


def _gguf(file: GGUFFile, name: str, dtype: str, quantization: str) -> Outline:
    if not file.tensors and not file.missing:
        raise EngineFault(
            "vocabulary_only",
            f"{file.path} holds a vocabulary and no weights: give the file of the model itself",
        )
    arch = file.get("general.architecture", str)
    weights = _gguf_weights(file, dtype, quantization)
    try:
        spec = read_gguf_spec(file)
    except EngineFault as fault:
        if fault.code not in _NOT_RUN:
            raise
        return _unusual(name, one_line(arch), gguf_usual(file, arch), weights, fault.message)
    return Outline(name, arch, spec.heads, _layers_of(spec), spec.context, *weights, spec=spec)


def _gguf_weights(file: GGUFFile, dtype: str, quantization: str) -> tuple[int | None, str]:
    if file.missing:
        return None, f"not known: of its files {len(file.missing)} are missing"
    tensors = list(file.tensors.values())
    sizes: dict[str, int] = {}
    for info in tensors:
        sizes[info.kind] = sizes.get(info.kind, 0) + info.nbytes
    main = max(sizes, key=lambda kind: sizes[kind])
    return _weights(
        tensors, dtype, quantization, f"mostly in {main}" if len(sizes) > 1 else f"in {main}"
    )
