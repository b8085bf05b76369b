"""Whole models made hostile: small sound ones, changed in one to three places.

Owns which changes go with which model. All of it follows from (seed, number), so that every case can be made
again. Must not know what comes of loading them.
"""

from __future__ import annotations

import shutil
import sys
from os import link
from pathlib import Path

from hostile import binary, tokenizer_files
from hostile.binary import Dice, Mutate, bytes_of
from hostile.json_files import CONFIG, GENERATION, TEXTS, json_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import gguf_writer as gguf
from support.hf_folder import GOLDENS, make_folder

FAMILIES = (
    "llama3",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gpt2",
    "opt",
    "bloom",
)
GGUFS = ("tiny_llama.gguf", "tiny_llama_quant.gguf", "tiny_qwen3.gguf", "experts_qwen3moe.gguf")


def seeds(folder: Path) -> None:
    """The sound models that all cases are made from."""
    for family in FAMILIES:
        make_folder(folder / family, family)
    make_folder(folder / "sentencepiece")
    (folder / "sentencepiece" / "tokenizer.json").unlink()
    shutil.copy(GOLDENS / "tiny_spm.model", folder / "sentencepiece" / "tokenizer.model")
    for name in GGUFS:
        (folder / Path(name).stem).mkdir()
        shutil.copy(GOLDENS / name, folder / Path(name).stem / "model.gguf")
    metadata, tensors = gguf.taken_apart(GOLDENS / GGUFS[0])
    for kind in ("llama", "gemma4"):
        tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            *"abcdehlo",
            "ab",
            "▁a",
        ]
        types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
        words: dict[str, gguf.Value] = {
            "tokens": tokens,
            "token_type": types,
            "scores": [-float(i) for i in range(len(tokens))],
        }
        words |= {"model": kind, "merges": ["a b", "▁ a"]}
        (folder / f"gguf_{kind}").mkdir()
        said = metadata | {f"tokenizer.ggml.{key}": value for key, value in words.items()}
        (folder / f"gguf_{kind}" / "model.gguf").write_bytes(gguf.gguf_bytes(said, tensors))


def make_case(sound: Path, target: Path, seed: int, number: int) -> tuple[Path, str]:
    """One hostile model below `target`: what is to be loaded, and what was done to it. sound: where `seeds`
    wrote."""
    dice = Dice(f"{seed} {number}")
    name = dice.choice(sorted(path.name for path in sound.iterdir()))
    shutil.copytree(sound / name, target, copy_function=link)
    path = target / "model.gguf"
    choices = GGUF if path.is_file() else SPM if name == "sentencepiece" else FOLDER
    notes = [name]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        mutate = dice.choice(choices)
        try:
            notes.append(f"{mutate.__name__}: {mutate(target, dice)}")
        except Exception:  # what was done before left nothing to change
            notes.append(f"{mutate.__name__}: nothing left to change")
    return (path if path.exists() else target), "; ".join(note[:200] for note in notes)


GGUF: tuple[Mutate, ...] = (
    binary.gguf_metadata,
    binary.gguf_metadata,
    binary.gguf_metadata,
    binary.gguf_tensors,
    binary.gguf_tensors,
    bytes_of("model.gguf", 4000),
    bytes_of("model.gguf"),
)
_ANY_FOLDER: tuple[Mutate, ...] = (
    json_of("config.json", CONFIG),
    json_of("config.json", CONFIG),
    json_of("config.json", CONFIG),
    json_of("generation_config.json", GENERATION),
    json_of("tokenizer_config.json"),
    tokenizer_files.added_tokens,
    tokenizer_files.template,
    json_of(
        "special_tokens_map.json", {"bos_token": TEXTS, "eos_token": ({"content": "\ud800"}, [], 5)}
    ),
    binary.safetensors_table,
    binary.safetensors_table,
    binary.shard_index,
    json_of("model.safetensors.index.json"),
    bytes_of("*.safetensors", 2000),
    bytes_of("*.json"),
)
FOLDER: tuple[Mutate, ...] = (
    *_ANY_FOLDER,
    tokenizer_files.tokenizer_rules,
    tokenizer_files.tokenizer_rules,
    tokenizer_files.tokenizer_rules,
    json_of("tokenizer.json"),
    json_of("tokenizer.json"),
    bytes_of("tokenizer.json"),
    tokenizer_files.tokenizer_gone,
)
SPM: tuple[Mutate, ...] = (
    tokenizer_files.added_tokens,
    tokenizer_files.template,
    *[binary.sentencepiece_fields] * 3,
    bytes_of("tokenizer.model"),
    bytes_of("tokenizer.model", 200),
    json_of("config.json", CONFIG),
)
