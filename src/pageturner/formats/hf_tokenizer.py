"""The tokenizer of a folder as Hugging Face lays it out.

Owns where a folder keeps its tokenizer, its special tokens and its chat template:

    tokenizer.json                the `tokenizers` library's own format, preferred
    tokenizer.model               a SentencePiece model, or ranks as tiktoken writes them (Llama 3)
    *.tiktoken                    ranks
    tokenizer_config.json, added_tokens.json, special_tokens_map.json      which tokens are special
    generation_config.json, config.json                                    which end an answer
    chat_template.jinja, chat_template.json, tokenizer_config.json         the template, in this order

Must not know GGUF. Codes: tokenizer_missing, and those of the formats.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault
from pageturner.formats.generation_config import folder_eos_ids
from pageturner.formats.hf_config import CONFIG, MAX_BYTES, read_bounded, read_json
from pageturner.formats.sentencepiece_model import Added, read_sentencepiece
from pageturner.formats.tiktoken import is_ranks, read_ranks
from pageturner.formats.tokenizer import MAX_TOKENS, Found, Marks, Tokenizer
from pageturner.formats.tokenizer_json import read_tokenizer_json


def load_folder(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder. EngineFault if it has none, or one that cannot be used."""
    folder = Path(path)
    config = _json(folder / "tokenizer_config.json")
    added = _added_tokens(folder, config)
    found = _find(folder, added)
    own, size = found.marks, found.codec.vocab_size
    if not 0 < size <= MAX_TOKENS:
        message = (
            f"the tokenizer of {folder} has {size:,} token ids; there can be 1 to {MAX_TOKENS:,}"
        )
        raise EngineFault("tokenizer_corrupt", message)
    named = _json(folder / "special_tokens_map.json") | config
    bos = _named(found, named.get("bos_token"))
    eos = _named(found, named.get("eos_token"))
    ends = [eos, *own.eos_ids, *folder_eos_ids(folder)]
    special = own.special_ids | {i for i, token in added.items() if token.special}
    marks = Marks(
        bos_id=own.bos_id if bos is None else bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None and i < size)),
        special_ids=frozenset(i for i in special if i < size),
        add_bos=_bool(config.get("add_bos_token"), own.add_bos),
        add_eos=_bool(config.get("add_eos_token"), own.add_eos),
        space_prefix=own.space_prefix,
        chat_template=_chat_template(folder, config),
        architecture=str(_json(folder / CONFIG).get("model_type") or ""),
        name=_name(folder),
    )
    return Tokenizer(found.codec, marks)


def _find(folder: Path, added: dict[int, Added]) -> Found:
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer_json(folder / "tokenizer.json")
    for path in (folder / "tokenizer.model", *sorted(folder.glob("*.tiktoken"))):
        if path.is_file():
            raw = _bytes(path)
            return read_ranks(raw, added) if is_ranks(raw) else read_sentencepiece(raw, added)
    message = f"{folder} holds no tokenizer: neither tokenizer.json, tokenizer.model nor a .tiktoken file;"
    message += " copy it from where the model came from"
    raise EngineFault("tokenizer_missing", message)


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, Added]:
    """What tokenizer_config.json lists, over what the older added_tokens.json does."""
    listed: dict[str, Any] = config.get("added_tokens_decoder") or {}
    try:
        added = {
            int(i): Added(str(text), True, False)
            for text, i in _json(folder / "added_tokens.json").items()
        }
        for i, token in listed.items():
            special, rstrip = bool(token.get("special")), bool(token.get("rstrip"))
            added[int(i)] = Added(str(token["content"]), special, rstrip)
        if (wrong := next((i for i in added if not 0 <= i < MAX_TOKENS), None)) is not None:
            raise ValueError(f"{added[wrong].text!r} has the id {wrong}")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineFault(
            "tokenizer_corrupt", f"the added tokens of {folder} are broken: {error!r}"
        ) from error
    return added


def _named(found: Found, token: Any) -> int | None:
    """The id of a token that a configuration names by its text, plain or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    return found.token_id(text) if isinstance(text, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return _bytes(jinja).decode()
        except UnicodeDecodeError as error:
            raise EngineFault("tokenizer_corrupt", f"{jinja} is not UTF-8: {error}") from error
    template = _json(folder / "chat_template.json").get(
        "chat_template", config.get("chat_template")
    )
    if isinstance(template, list):  # several, by name
        named = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _name(folder: Path) -> str:
    """What the folder is called: in the layout of the hub's cache the folder above its snapshots."""
    whole = folder.resolve()
    return whole.parents[1].name if whole.parent.name == "snapshots" else whole.name


def _bytes(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise EngineFault("tokenizer_corrupt", f"cannot read {path}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    return read_json(path) if path.is_file() else {}


def _bool(value: Any, default: bool) -> bool:
    return value if isinstance(value, bool) else default
