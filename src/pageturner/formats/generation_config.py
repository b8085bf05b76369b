"""The sampling defaults that a model's own files ask for, and what `--generation-config` makes of
them.

Owns generation_config.json (with the end-of-sequence ids in it) and the keys `general.sampling.*`
of GGUF files, which llama.cpp writes from it; for an alias whose file says nothing, what its
model's card advises. Must not know requests: whoever takes those decides what goes first.

Codes: generation_config, config_corrupt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault
from pageturner.formats.gguf import GGUFFile
from pageturner.formats.hf_config import CONFIG, read_config, read_json
from pageturner.formats.hub import advice
from pageturner.params import out_of_range

FILE = "generation_config.json"
NEUTRAL = ("none", "vllm")  # the second as vLLM calls it
# key of generation_config.json -> field of SamplingParams
_JSON = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
# key under general.sampling. -> field. Its other keys (mirostat, xtc, ...) are samplers that are
# not here.
_GGUF = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_WHOLE = ("top_k", "max_tokens")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults of a model.

    sampling  field of SamplingParams -> value, only those that are named
    eos_ids   what ends an answer, beyond what the tokenizer says by itself
    source    the file, for people; "" when nothing was found or wanted
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        named = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        return f"{named} ({self.source})" if named else "none"


def read_generation(model: GGUFFile | Path | None, setting: str = "auto") -> GenerationDefaults:
    """The sampling defaults of a model: an open GGUF file, a folder, or None (there is no model).

    setting  "auto": what the model's own files say; "none": nothing; else the path of a folder with
             a generation_config.json, or of such a file, which then speaks instead of the model
    EngineFault('generation_config') for a value that cannot be, or a path without a file.
    """
    if setting in NEUTRAL or (setting == "auto" and model is None):
        return GenerationDefaults()
    if setting != "auto":
        path = Path(setting).expanduser()
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            message = (
                f"--generation-config {setting}: there is no {path}; say auto, none or where one is"
            )
            raise EngineFault("generation_config", message)
        return _from_json(path)
    if isinstance(model, GGUFFile):
        return _from_gguf(model)
    assert model is not None
    return _from_json(model / FILE) if (model / FILE).is_file() else GenerationDefaults()


def folder_eos_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer according to generation_config.json, or else config.json."""
    for file in (FILE, CONFIG):
        if (folder / file).is_file():
            values = read_config(folder) if file == CONFIG else read_json(folder / file)
            if values.get("eos_token_id") is not None:
                return _eos_ids(values, folder / file)
    return ()


def _from_json(path: Path) -> GenerationDefaults:
    """do_sample false means greedy, as in Transformers; that it is absent means nothing (most files
    with a temperature do not say it)."""
    values = read_json(path)
    found = {name: values[key] for key, name in _JSON.items() if values.get(key) is not None}
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return GenerationDefaults(_checked(found, str(path)), _eos_ids(values, path), str(path))


def _from_gguf(file: GGUFFile) -> GenerationDefaults:
    found = {
        name: file.metadata[key]
        for end, name in _GGUF.items()
        if (key := f"general.sampling.{end}") in file.metadata
    }
    # fp32 in the file: 0.95 is not to become 0.949999988
    rounded = {name: float(f"{v:.7g}") if isinstance(v, float) else v for name, v in found.items()}
    if found:
        return GenerationDefaults(_checked(rounded, file.path), (), file.path)
    advised = advice(file.path)
    return (
        GenerationDefaults(dict(advised), (), "the model's card")
        if advised
        else GenerationDefaults()
    )


def _checked(found: dict[str, Any], source: str) -> dict[str, Any]:
    """The values as their fields have them."""
    checked: dict[str, Any] = {}
    for name, value in found.items():
        whole = name in _WHOLE
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            what = f"{name} should be a {'whole number' if whole else 'number'}, not {value!r}"
        else:
            what = out_of_range(name, value) or ""
        if what:
            hint = "mend it, or leave it aside with --generation-config none"
            raise EngineFault("generation_config", f"{source}: {what}; {hint}")
        checked[name] = value if whole else float(value)
    return checked


def _eos_ids(values: dict[str, Any], path: str | os.PathLike[str]) -> tuple[int, ...]:
    eos = values.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise EngineFault(
            "generation_config", f"{path}: eos_token_id should be token ids, not {eos!r}"
        )
    return tuple(ids)
