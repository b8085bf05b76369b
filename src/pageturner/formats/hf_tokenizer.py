"""The tokenizer of a folder as Hugging Face lays it out.

Owns where a folder keeps its tokenizer, its special tokens and its chat template:

    tokenizer.json                the `tokenizers` library's own format, preferred
    tokenizer.model               a SentencePiece model, or ranks as tiktoken writes them (Llama 3)
    *.tiktoken                    ranks
    tokenizer_config.json, added_tokens.json, special_tokens_map.json      which tokens are special
    generation_config.json, config.json                                    which end an answer
    chat_template.jinja, chat_template.json, tokenizer_config.json         the template, in this
                                                                           order
    additional_chat_templates/NAME.jinja                                   further ones by name

Must not know GGUF. Codes: tokenizer_missing, and those of the formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pageturner import logs
from pageturner.errors import EngineFault
from pageturner.formats.generation_config import folder_eos_ids
from pageturner.formats.hf_config import CONFIG, MAX_BYTES, read_bounded, read_config, read_json
from pageturner.formats.sentencepiece_model import Added, read_sentencepiece
from pageturner.formats.tiktoken import is_ranks, read_ranks
from pageturner.formats.tokenizer import MAX_TOKENS, Found, Marks, Tokenizer
from pageturner.formats.tokenizer_json import read_tokenizer_json


def load_folder(folder: Path, stand_in: bool = False) -> Tokenizer:
    """The tokenizer of a folder. EngineFault if it has none, or one that cannot be used.

    stand_in  a token for each byte where the folder has none: for measuring with random weights
    """
    config = _json(folder / "tokenizer_config.json")
    added = _added_tokens(folder, config)
    found = _find(folder, added)
    if found is None:
        if stand_in:
            return _stand_in(folder)
        message = f"{folder} holds no tokenizer: neither tokenizer.json, tokenizer.model nor a .tiktoken file;"
        message += " copy it from where the model came from"
        raise EngineFault("tokenizer_missing", message)
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
    templates = _chat_templates(folder, config)
    special = own.special_ids | {i for i, token in added.items() if token.special}
    marks = Marks(
        bos_id=own.bos_id if bos is None else bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None and i < size)),
        special_ids=frozenset(i for i in special if i < size),
        add_bos=_bool(config.get("add_bos_token"), own.add_bos),
        add_eos=_bool(config.get("add_eos_token"), own.add_eos),
        space_prefix=own.space_prefix,
        chat_template=templates.pop("default", None),
        named_templates=templates,
        architecture=str(_json(folder / CONFIG).get("model_type") or ""),
        name=_name(folder),
    )
    return Tokenizer(found.codec, marks)


def _find(folder: Path, added: dict[int, Added]) -> Found | None:
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer_json(folder / "tokenizer.json")
    for path in (folder / "tokenizer.model", *sorted(folder.glob("*.tiktoken"))):
        if path.is_file():
            raw = _bytes(path)
            return read_ranks(raw, added) if is_ranks(raw) else read_sentencepiece(raw, added)
    return None


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, Added]:
    """The tokens of tokenizer_config.json, laid over those of the older added_tokens.json."""
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


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by their names; the usual one is "default". A file of its own
    goes before a key of tokenizer_config.json."""
    found = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, str):
        found = {"default": found}
    if isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
    named = dict(found) if isinstance(found, dict) else {}
    for path in (folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")):
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            try:
                named[name] = _bytes(path).decode()
            except UnicodeDecodeError as error:
                raise EngineFault("tokenizer_corrupt", f"{path} is not UTF-8: {error}") from error
    return {n: t for n, t in named.items() if isinstance(n, str) and isinstance(t, str)}


def _name(folder: Path) -> str:
    """The name of the folder; in the layout of the hub's cache that of the folder above its
    snapshots."""
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


# So that chats can be measured too. Names of roles are bytes like all else: random weights heed no
# marks.
TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


class ByteTokens:
    """A `Codec`: ids 0 to 255 are bytes, every other one is a word that says its number."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b" t%d" % token

    def least_tokens(self, text: str) -> int:
        return len(text)


def _stand_in(folder: Path) -> Tokenizer:
    """A tokenizer with as many ids as the config.json of a folder says, and the tokens that it says
    end an answer. Logs a warning.

    EngineFault('tokenizer_missing') where it names no vocabulary that holds the bytes.
    """
    values = read_config(folder)
    inner = values.get("text_config")
    size = values.get("vocab_size") or (
        inner.get("vocab_size") if isinstance(inner, dict) else None
    )
    if not isinstance(size, int) or not 256 <= size <= MAX_TOKENS:
        message = f"{folder} has no tokenizer, and a vocabulary of {size} cannot stand in for one"
        raise EngineFault(
            "tokenizer_missing", f"{message}: put a tokenizer.json beside config.json"
        )
    logs.say(f"{folder} has no tokenizer: one with a token a byte stands in for it", "warning")
    ends = tuple(i for i in folder_eos_ids(folder) if i < size)
    return Tokenizer(
        ByteTokens(size), Marks(eos_ids=ends, chat_template=TEMPLATE, name=folder.name)
    )
