"""The keys that most configurations share, of models that this engine does not run: what their KV
takes.

Owns the names of these keys, and those that say that the usual sum would be wrong: such models are
refused by name. Must not know files, or what is done with the numbers.

Codes: config_invalid, gguf_metadata (a number is missing), model_invalid, model_unsupported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault
from pageturner.formats.gguf import Array, GGUFFile
from pageturner.models.hf_keys import DEFAULTS
from pageturner.models.hf_llama import window_layers
from pageturner.models.hf_values import HFConfig
from pageturner.models.spec import LARGEST, MAX_LAYERS, unsupported

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KVLayers:
    """`count` layers of one kind.

    heads      that have KV
    key_dim    values of one head's key; of latent attention (MLA) those of the vector that is all
               it keeps
    value_dim  the same of its value; 0 with latent attention
    window     tokens that a layer sees, itself included; 0: all
    """

    count: int
    heads: int
    key_dim: int
    value_dim: int
    window: int = 0

    def kind(self, queries: int) -> str:
        """The name of such attention with so many query heads."""
        if not self.value_dim:
            return "MLA"
        return "MHA" if self.heads == queries else "MQA" if self.heads == 1 else "GQA"


@dataclass(frozen=True, slots=True)
class Usual:
    """The answers of the usual keys. `context`: 0 if none of them does; `assumed`: what else they
    leave open."""

    heads: int
    kv: tuple[KVLayers, ...]
    context: int
    assumed: str = ""


def _latent(layers: int, rank: int, rotary: int) -> tuple[KVLayers, ...]:
    """A token keeps, in each layer, its latent vector and one rotary key (DeepSeek-V2, arXiv
    2405.04434)."""
    return (KVLayers(layers, 1, rank + rotary, 0),)


def _check(usual: Usual, where: str) -> Usual:
    for layers in usual.kv:
        if layers.value_dim and usual.heads % layers.heads:
            raise EngineFault(
                "model_invalid",
                f"{where}: {usual.heads} heads do not share {layers.heads} KV heads evenly",
            )
    return usual


# -- config.json -----------------------------------------------------------------------------------

_TABLES = json.loads(Path(__file__).with_name("model_outline_keys.json").read_bytes())
# what is to be known -> keys, of which the first that is there counts
_NAMES: dict[str, str] = _TABLES["names"]
# Reasons why the usual sum would be wrong, and the keys that tell, or how these begin in a GGUF
# file.
_REFUSED: dict[str, str] = _TABLES["refused"]
_GGUF_REFUSED: dict[str, str] = _TABLES["gguf_refused"]
_TEXT_PARTS = ("text_config", "language_config", "llm_config")
_ALL_WINDOWED = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")  # if they have a window
_OLD_FALCON = ("falcon", "RefinedWeb", "RefinedWebModel")


def text_part(values: Json) -> Json:
    """The part of a configuration about text: some keep it in an object within."""
    return next((values[key] for key in _TEXT_PARTS if isinstance(values.get(key), dict)), values)


def hf_usual(values: Json, where: str) -> Usual:
    """The KV of a config.json by its usual keys. EngineFault names the key that is missing or
    refused."""
    for part in (values, text_part(values)):
        for why, keys in _REFUSED.items():
            for key in filter(part.get, keys.split()):
                raise unsupported(f"{where} sets {key}, which means {why}: the plan would be wrong")
    values = text_part(values)
    arch = str(values.get("model_type"))
    if arch == "longcat_flash":
        raise unsupported(
            f"{where} is of type {arch}, which means two attentions in a layer: not planned"
        )
    config = HFConfig(DEFAULTS.get(arch, {}) | values, where)
    layers, heads = (_first(config, where, what) for what in ("layers", "heads"))
    context = _first(config, where, "context", 0)
    window, windowed = _hf_windows(config, where, arch, layers)
    if config.raw("kv_lora_rank") is not None:
        if windowed:
            raise unsupported(f"{where} has a sliding_window and kv_lora_rank: not planned")
        rank, rotary = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
        return Usual(heads, _latent(layers, rank, rotary), context)
    given = any(config.raw(key) for key in _NAMES["head_dim"].split())
    width = 0 if given else _first(config, where, "width")
    if width % heads:
        raise EngineFault("model_invalid", f"{where}: {heads} heads do not fill a width of {width}")
    head_dim = _first(config, where, "head_dim", width // heads)
    kv_heads = _kv_heads(config, arch, heads)
    assumed = "" if kv_heads else "no key says how many heads have KV, and all are taken to"
    one = (kv_heads or heads, head_dim, config.size("v_head_dim", head_dim))
    kinds = (KVLayers(layers - windowed, *one), KVLayers(windowed, *one, window))
    return _check(
        Usual(heads, tuple(kind for kind in kinds if kind.count), context, assumed), where
    )


def _first(config: HFConfig, where: str, what: str, default: int | None = None) -> int:
    """The first of the keys for something that is there."""
    for key in _NAMES[what].split():
        if config.raw(key) is not None:
            return config.size(key, most=MAX_LAYERS if what == "layers" else LARGEST - 1)
    if default is None:
        keys = _NAMES[what].replace(" ", ", ")
        raise EngineFault(
            "config_invalid", f"{where} does not say what a plan needs: none of {keys} is there"
        )
    return default


def _kv_heads(config: HFConfig, arch: str, heads: int) -> int:
    """The number of heads that have KV; 0 if nothing says it."""
    grouped = config.raw("num_kv_heads") is not None
    if arch in _OLD_FALCON:  # old files carry a number that only the new decoder looks at
        grouped = config.get("new_decoder_architecture", bool, False)
    if config.raw("multi_query") is True and not grouped:  # Falcon 7B, StarCoder
        return 1
    if config.raw("multi_query_attention") is False or (arch in _OLD_FALCON and not grouped):
        return heads
    inner = config.section("attn_config")  # MPT, DBRX
    if inner is not None:
        several = inner.raw("attn_type") != "multiquery_attention"
        return inner.size("kv_n_heads", heads if several else 1)
    return _first(config, where="", what="kv_heads", default=0)


def _hf_windows(config: HFConfig, where: str, arch: str, layers: int) -> tuple[int, int]:
    """The window, and how many layers have it."""
    said = (
        config.raw("layer_types") is not None
        or arch in _ALL_WINDOWED
        or arch.startswith(("gemma", "qwen"))
    )
    if config.raw("sliding_window") and config.raw("use_sliding_window") is not False and not said:
        raise unsupported(
            f"{where} does not say which layers have the sliding_window: the plan may be wrong"
        )
    window, windowed = window_layers(config, arch, layers)
    return window, len(windowed)


# -- GGUF ------------------------------------------------------------------------------------------


def gguf_usual(file: GGUFFile, arch: str) -> Usual:
    """The KV of a GGUF file by the keys that llama.cpp gives to all architectures."""
    for name in file.metadata:
        for why, starts in _GGUF_REFUSED.items():
            if name.startswith(tuple(f"{arch}.{start}" for start in starts.split())):
                raise unsupported(
                    f"{file.path} has {name}, which means {why}: the plan would be wrong"
                )
    if not file.get(f"{arch}.attention.causal", bool, True):
        raise unsupported(f"{file.path} holds an encoder, which keeps no KV")
    layers = _number(file, f"{arch}.block_count") - file.get(f"{arch}.nextn_predict_layers", int, 0)
    if not 0 < layers <= MAX_LAYERS:
        raise EngineFault("model_invalid", f"{file.path} makes no sense: {layers} layers")
    heads = _each(file, f"{arch}.attention.head_count", layers)
    context = file.get(f"{arch}.context_length", int, 0)
    rank = file.get(f"{arch}.attention.kv_lora_rank", int, 0)
    if rank:
        return Usual(
            heads[0], _latent(layers, rank, _number(file, f"{arch}.rope.dimension_count")), context
        )
    kv_heads = _each(file, f"{arch}.attention.head_count_kv", layers, heads)
    width = f"{arch}.embedding_length"
    key = _number(file, f"{arch}.attention.key_length", width, heads[0])
    value = _number(file, f"{arch}.attention.value_length", width, heads[0])
    window, windowed = _gguf_windows(file, arch, layers)
    kinds = Counter(
        KVLayers(0, n, key, value, window if hidden else 0)
        for n, hidden in zip(kv_heads, windowed, strict=True)
        if n
    )
    kv = tuple(KVLayers(count, k.heads, key, value, k.window) for k, count in kinds.items())
    if not kv:
        raise EngineFault("model_invalid", f"{file.path} has no layer with KV heads")
    return Usual(max(heads), kv, context)


def _number(file: GGUFFile, key: str, instead: str = "", share: int = 1) -> int:
    """A positive number, or where it is absent an equal share of another."""
    value = (
        file.get(instead, int) // share
        if instead and key not in file.metadata
        else file.get(key, int)
    )
    if not 0 < value < LARGEST:
        raise EngineFault("model_invalid", f"{file.path}: {key} is {value}")
    return value


def _each(file: GGUFFile, key: str, layers: int, default: Iterable[int] = ()) -> list[int]:
    """A number for each layer, which the file says once or layer by layer."""
    value = file.metadata.get(key)
    if value is None and default:
        return list(default)
    each = value.tolist()[:layers] if isinstance(value, Array) else [_number(file, key)] * layers
    if (
        len(each) != layers
        or not all(type(n) is int and 0 <= n < LARGEST for n in each)
        or not any(each)
    ):
        raise EngineFault(
            "model_invalid", f"{file.path}: {key} should be a number for each of {layers} layers"
        )
    return [int(n) for n in each]


def _gguf_windows(file: GGUFFile, arch: str, layers: int) -> tuple[int, list[bool]]:
    """The window, and for each layer whether it has it."""
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    if not window:
        return 0, [False] * layers
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = file.metadata.get(key)
    flags: list[bool] = []
    if isinstance(pattern, Array):
        flags = [bool(flag) for flag in pattern.tolist()[:layers]]
    elif type(pattern) is int and pattern > 0:  # every so manieth layer sees everything
        flags = [(i + 1) % pattern != 0 for i in range(layers)]
    if len(flags) == layers:
        return window, flags
    raise unsupported(
        f"{file.path} does not say in {key} which layers have its window: the plan may be wrong"
    )
