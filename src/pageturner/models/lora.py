"""LoRA adapters as PEFT writes them: adapter_config.json beside adapter_model.safetensors.

Owns what such a folder may say, which of its tensors belongs to which product of the model, and the
refusal of all else. Must not know backends, nor who is served what. Formats: PEFT's `LoraConfig`
and checkpoints (https://huggingface.co/docs/peft/developer_guides/checkpoint), LoRA (arXiv
2106.09685), rank-stabilised LoRA (arXiv 2312.03732).

Codes: adapter_missing, adapter_config, adapter_unsupported, adapter_rank, adapter_shape,
adapter_mismatch, adapter_values, adapter_memory, and those of formats/safetensors.py.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner import memory
from pageturner.errors import EngineFault, naming
from pageturner.formats.hf_config import MAX_BYTES, parse_json, read_bounded
from pageturner.formats.safetensors import Safetensors
from pageturner.kernels.adapters import FIELDS, KINDS, MAX_RANK, AdapterWeights, LowRank, widened
from pageturner.models.hf_names import hf_layout
from pageturner.models.names import Layout, Part
from pageturner.models.spec import ModelSpec
from pageturner.models.tables import table

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What may stand in front of a layer or of an embedding, depending on how the model was wrapped in
# training.
ROOTS = (
    "",
    "model.",
    "model.language_model.",
    "language_model.model.",
    "model.decoder.",
    "decoder.",
    "transformer.",
)
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
_LAYER = re.compile(r"^(?P<root>.*?)(?:layers|h)\.(?P<layer>\d{1,6})\.(?P<tail>.+)$")
_FACTOR = re.compile(r"^(?P<module>.+)\.(?P<factor>lora_[AB]\.weight|lora_embedding_[AB])$")
# Initialisations that leave the model's own weights as they are; the others train against changed
# ones.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Settings that make something else of the weights, and what they are where they do not.
REFUSED = table("lora_refused")
RETRAIN = "train or convert it to plain LoRA, or merge it into the model"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that was read, whole: what its files hold cannot change any more.

    digest  names the content: of both files
    base    the model that it says it was trained on
    """

    path: str
    config: dict[str, Any]
    tensors: Safetensors
    digest: str

    @property
    def base(self) -> str:
        return str(self.config.get("base_model_name_or_path") or "")


@dataclass(slots=True)
class _Module:
    """A module of the model, as the adapter names it, and the names of its two tensors."""

    name: str
    a: str = ""
    b: str = ""


@dataclass(slots=True)
class _Found:
    """The factors of the modules read so far."""

    layers: list[dict[str, LowRank]]
    embed: LowRank | None = None
    head: LowRank | None = None
    kinds: set[str] = field(default_factory=set)


def read_folder(path: Path) -> AdapterFolder:
    """Both files of a PEFT folder, checked as far as they go without a model. EngineFault."""
    if not path.is_dir():
        raise EngineFault(
            "adapter_missing", f"{path} is no folder: an adapter is a folder with {CONFIG}"
        )
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            others = sorted(one.name for one in path.glob("adapter_model.*"))
            hint = (
                f", only {others[0]}, which is not read: save it as safetensors" if others else ""
            )
            raise EngineFault("adapter_missing", f"{path} holds no {name}{hint}")
    try:
        text = read_bounded(path / CONFIG, MAX_BYTES)
        config = parse_json(text)
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFault("adapter_config", f"cannot read {path / CONFIG}: {error}") from error
    with naming(path):
        _check_config(config)
        data = _read_weights(path / WEIGHTS)
        digest = hashlib.blake2b(len(text).to_bytes(8, "little") + text, digest_size=16)
        digest.update(data)
        tensors = Safetensors(str(path), {WEIGHTS: data}, None)
        return AdapterFolder(str(path), config, tensors, digest.hexdigest())


def _read_weights(path: Path) -> bytes:
    """The whole file: what is mapped could be changed or cut while it is used."""
    free = memory.available()
    try:
        size = path.stat().st_size
        if free is not None and 3 * size > free:  # as read, in fp32 at worst, as packed
            raise EngineFault(
                "adapter_memory",
                f"{path} takes {size / 1e6:.0f} MB, three times while it is loaded"
                f", and {free / 1e6:.0f} MB are free",
            )
        return path.read_bytes()
    except OSError as error:
        raise EngineFault("adapter_missing", f"cannot read {path}: {error}") from error


def _check_config(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise EngineFault(
            "adapter_unsupported",
            f"an adapter of type {kind!r:.80}: only LORA is computed; {RETRAIN}",
        )
    for name, (what, plain) in REFUSED.items():
        if config.get(name) not in plain:
            raise EngineFault("adapter_unsupported", f"{what} is not computed: {RETRAIN}")
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise EngineFault(
            "adapter_unsupported",
            f"init_lora_weights {start!r} trains against changed weights of the model"
            ": convert it to plain LoRA when saving it",
        )
    _number("lora_alpha", config.get("lora_alpha", 8))
    _rank(config.get("r", 8))
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise EngineFault("adapter_config", f"{name} should be an object")
        for key, value in pattern.items():
            try:
                re.compile(_pattern(key))
            except (re.error, RecursionError, OverflowError) as error:
                raise EngineFault(
                    "adapter_config", f"{name}: {key!r} is no pattern: {error}"
                ) from error
            _rank(value) if name == "rank_pattern" else _number(name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineFault("adapter_config", f"{name} should be a number, not {value!r:.80}")
    return float(value)


def _rank(value: object) -> int:
    if type(value) is not int or value < 1:
        raise EngineFault(
            "adapter_config", f"a rank should be a whole number above 0, not {value!r:.80}"
        )
    if value > MAX_RANK:
        raise EngineFault(
            "adapter_rank", f"rank {value} is too large: up to {MAX_RANK} are computed"
        )
    return value


def _pattern(key: str) -> str:
    """PEFT matches a pattern at the end of a module's name."""
    return rf"(.*\.)?({key})$"


def _of_pattern(config: dict[str, Any], name: str, module: str, default: Any) -> Any:
    for key, value in (config.get(name) or {}).items():
        if re.match(_pattern(key), module):
            return value
    return default


def load_adapter(folder: AdapterFolder, spec: ModelSpec) -> AdapterWeights:
    """The adapter's weights for a model. EngineFault where they are not for it, or cannot be
    right."""
    with naming(folder.path):
        if spec.latent is not None:
            raise EngineFault(
                "adapter_unsupported",
                f"adapters of models with a latent KV ({spec.arch}) are not computed"
                ": merge it into the model",
            )
        found = _Found([{} for _ in range(spec.layers)])
        layout = hf_layout(spec, lambda name: True)
        for module in _modules(folder.tensors):
            _place(found, module, folder, spec, layout)
        if not found.kinds:
            raise EngineFault("adapter_shape", "it holds no weights")
        return _of_one_kind(found)


def _modules(tensors: Safetensors) -> list[_Module]:
    modules: dict[str, _Module] = {}
    for name in tensors.tensors:
        match = _FACTOR.match(name.removeprefix(PREFIX))
        if match is None:
            raise EngineFault(
                "adapter_unsupported",
                f"tensor {name!r} is no factor of a product: only lora_A and lora_B are computed"
                f"; {RETRAIN}",
            )
        module = modules.setdefault(match["module"], _Module(match["module"]))
        if match["factor"] in ("lora_A.weight", "lora_embedding_A"):
            module.a = name
        else:
            module.b = name
    for module in modules.values():
        if not (module.a and module.b):
            raise EngineFault("adapter_shape", f"{module.name!r} has only one of its two factors")
    return list(modules.values())


def _place(
    found: _Found, module: _Module, folder: AdapterFolder, spec: ModelSpec, layout: Layout
) -> None:
    """Put the factors of a module where they belong."""
    layer = _LAYER.match(module.name)
    root, _, last = module.name.rpartition(".")
    if layer is not None and layer["root"] in ROOTS:
        parts = _parts_of(layout, int(layer["layer"]), layer["tail"])
        if not parts:
            raise _unknown(module.name, folder, spec)
        if spec.sparse(int(layer["layer"])) and parts.keys() & {"gate", "up", "down"}:
            raise EngineFault(
                "adapter_unsupported",
                f"{module.name!r}: adapters of what is beside experts are not computed; {RETRAIN}",
            )
        first = next(iter(parts.values()))
        outputs, inputs = first.shape[::-1] if first.transposed else first.shape
        pair = _pair(found, module, folder, (outputs, inputs))
        for name, part in parts.items():
            mine = LowRank(pair.a, part.cut_rows(pair.b), pair.scale)
            if name in ("q", "k") and spec.rope.interleaved and spec.arch == "llama":
                heads = spec.heads if name == "q" else spec.kv_heads
                mine = LowRank(pair.a, _interleaved(mine.b, heads), pair.scale)
            found.layers[int(layer["layer"])][name] = mine
    elif (
        last in EMBEDDINGS
        and (f"{root}." if root else "") in ROOTS
        and module.a.endswith("embedding_A")
    ):
        pair = _pair(found, module, folder, (spec.dim, spec.vocab))
        found.embed = LowRank(pair.a.T, pair.b, pair.scale)
    elif module.name == "lm_head" and module.a.endswith("lora_A.weight"):
        found.head = _pair(found, module, folder, (spec.vocab, spec.dim))
    else:
        raise _unknown(module.name, folder, spec)


def _parts_of(layout: Layout, layer: int, tail: str) -> dict[str, Part]:
    """The products of a layer whose weights lie in that module: several of one that is fused."""
    if layer >= len(layout.layers):
        return {}
    found = {}
    for name, part in layout.layers[layer].items():
        match = _LAYER.match(part.name)
        if name in FIELDS and match is not None and match["tail"] == f"{tail}.weight":
            found[name] = part
    return found


def _unknown(module: str, folder: AdapterFolder, spec: ModelSpec) -> EngineFault:
    if "expert" in module or module.endswith((".gate", ".router")):
        return EngineFault(
            "adapter_unsupported", f"{module!r}: adapters of experts are not computed"
        )
    return _mismatch(
        f"{module!r} is no product of this model of {spec.layers} layers ({spec.arch})", folder
    )


def _mismatch(what: str, folder: AdapterFolder) -> EngineFault:
    trained = f": it was trained on {folder.base!r}" if folder.base else ""
    return EngineFault("adapter_mismatch", f"the adapter is for another model{trained}; {what}")


def _pair(found: _Found, module: _Module, folder: AdapterFolder, shape: tuple[int, int]) -> LowRank:
    """The factors of a module whose weight has this shape [outputs, inputs], checked."""
    (a_kind, a), (b_kind, b) = _values(folder, module.a), _values(folder, module.b)
    outputs, inputs = shape
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise EngineFault(
            "adapter_shape",
            f"{module.name!r}: factors of shapes {a.shape} and {b.shape} make no product",
        )
    rank = _rank(a.shape[0])
    if (b.shape[0], a.shape[1]) != shape:
        message = f"{module.name!r} is {b.shape[0]} x {a.shape[1]} in it and {outputs} x {inputs} in the model"
        raise _mismatch(message, folder)
    told = _of_pattern(folder.config, "rank_pattern", module.name, folder.config.get("r", 8))
    if rank != told:
        raise EngineFault(
            "adapter_shape", f"{module.name!r} has rank {rank}, and {CONFIG} says {told}"
        )
    alpha = _of_pattern(
        folder.config, "alpha_pattern", module.name, folder.config.get("lora_alpha", 8)
    )
    found.kinds |= {a_kind, b_kind}
    scale = alpha / math.sqrt(rank) if folder.config.get("use_rslora") else alpha / rank
    return LowRank(a, b, scale)


def _values(folder: AdapterFolder, name: str) -> tuple[str, NDArray[Any]]:
    kind, shape, raw = folder.tensors.tensor(name)
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise EngineFault(
            "weight_kind", f"tensor {name!r} is of type {kind}: save the adapter as {known}"
        )
    values = np.frombuffer(raw, KINDS[kind]).reshape(shape)
    exponents = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[kind]
    bits: NDArray[Any] = values.view(np.uint32 if kind == "F32" else np.uint16)
    if ((bits & exponents) == exponents).any():
        raise EngineFault("adapter_values", f"tensor {name!r} holds NaN or infinite values")
    return kind, values


def _interleaved(b: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of q or k as llama.cpp's converter orders them for GGUF's `llama`, where the two
    elements that are rotated together are neighbours."""
    half = len(b) // heads // 2
    return b.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(b.shape)


def _of_one_kind(found: _Found) -> AdapterWeights:
    """All values of one type: fp32 where the file has several."""
    if len(found.kinds) == 1:
        (kind,) = found.kinds
        return AdapterWeights(kind, tuple(found.layers), found.embed, found.head)

    def wide(pair: LowRank | None) -> LowRank | None:
        if pair is None:
            return None
        a, b = (
            widened("BF16" if one.dtype == np.uint16 else "F32", one) for one in (pair.a, pair.b)
        )
        return LowRank(a, b, pair.scale)

    layers = tuple({name: wide(pair) for name, pair in layer.items()} for layer in found.layers)
    return AdapterWeights("F32", layers, wide(found.embed), wide(found.head))  # type: ignore[arg-type]
