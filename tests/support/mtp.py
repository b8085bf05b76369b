"""Heads of multi-token prediction beside the weights of goldens, and engines that draft with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from pageturner.executor.draft import Costs
from pageturner.executor.kv_memory import KVLayout, KVSizes
from pageturner.executor.mtp import MTPDrafter, MTPHead
from pageturner.kernels.base import Batch, Ops
from pageturner.models.decoder import Decoder
from support.engines import Model, Setup
from support.hf_folder import GOLDENS
from support.poison import poison_blocks

FREE = Costs(0.0, 1e9)
OUTPUTS = ("o_proj", "out_proj", "down_proj")  # what a layer adds
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
BEHIND = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # the same of DeepSeek and GLM


def _one_by_one(name: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of experts that lie in one, each alone."""
    stem, _, field = name.rpartition(".")
    for i, each in enumerate(x if "experts." in name and x.ndim == 3 else ()):
        if field == "gate_up_proj":
            gate, up = np.split(each, 2)
            yield f"{stem}.{i}.gate_proj.weight", gate
            yield f"{stem}.{i}.up_proj.weight", up
        else:
            yield f"{stem}.{i}.{field}.weight", each


def write_head(
    folder: Path, family: str, *, right: bool = False, behind: bool = False, alone: bool = False
) -> Path:
    """The golden of a family with a head of random weights.

    right   layers add nearly nothing and the head looks at tokens alone: what it predicts is mostly right
    behind  the layer is named as one behind the last, as DeepSeek and GLM have it
    alone   experts of the head have a tensor each
    """
    source = GOLDENS / "families" / family
    tensors: dict[str, np.ndarray] = dict(load_file(source / "model.safetensors"))
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    dice = np.random.default_rng(7)
    last = f"model.layers.{layers - 1}."
    new = f"model.layers.{layers}." if behind else "mtp.layers.0."
    if f"{last}self_attn.o_proj.weight" not in tensors:
        last = f"model.layers.{layers - 2}."
    own = [new + name for name in BEHIND] if behind else QWEN
    for name in [name for name in tensors if name.startswith(last)]:
        x = tensors[name]
        x = dice.permutation(x.reshape(-1)).reshape(x.shape)
        name = new + name.removeprefix(last)
        tensors |= dict(_one_by_one(name, x) if alone else ()) or {name: x}
    dim = tensors["model.norm.weight"].shape[0]
    both = dice.standard_normal((dim, 2 * dim), np.float32) / np.float32(dim**0.5)
    vectors = [tensors["model.norm.weight"] * np.float32(0.1 * i + 0.8) for i in range(3)]
    if right:
        both = np.eye(dim, 2 * dim, dtype=np.float32)
        plain = np.full(dim, 0 if family.startswith("qwen") else 1, np.float32)
        vectors = [plain, plain, tensors["model.norm.weight"]]
        for name, x in tensors.items():
            if any(part in name for part in OUTPUTS):
                tensors[name] = x * np.float32(1e-3)
    for name, x in zip(own, (both, *vectors), strict=True):
        tensors[f"{name}.weight"] = x
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafter(model: Model, setup: Setup, kind: type[MTPDrafter] = MTPDrafter) -> MTPDrafter:
    """The drafter of a model for engines of a setup; its KV is poisoned where nothing was written."""
    sizes = KVSizes(setup.kv_tokens // setup.block_size)
    found = kind(model.decoder, model.ops, KVLayout(sizes, setup.block_size, model.kv_dtype), FREE)
    poison_blocks(found.storage, list(range(sizes.blocks)))
    return found


def head_logits(decoder: Decoder, ops: Ops, tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Logits of the head for hidden rows of the target and the token behind each, in one step."""
    n, head = len(tokens), MTPHead(decoder, ops)
    rows, blocks = np.arange(n, dtype=np.int32), np.arange(-(-n // 16), dtype=np.int32)
    start, end = np.array([0, n], np.int32), np.array([n], np.int32)
    batch = Batch(tokens, rows, start, end, blocks[None], rows, rows)
    kv = ops.alloc_kv(decoder.spec.mtp.kv_spec(len(blocks), 16, "float32"))
    found = head.hidden(batch, hidden, head.target, kv)
    return np.array(ops.logits(found, head.own))
