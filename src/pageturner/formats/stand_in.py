"""A tokenizer where a model has none: a token a byte, for measuring a configuration with random weights.

Owns its vocabulary. Must not know formats of real ones.
"""

from __future__ import annotations

import os
from pathlib import Path

from pageturner import logs
from pageturner.errors import EngineFault
from pageturner.formats.generation_config import folder_eos_ids
from pageturner.formats.hf_config import read_config
from pageturner.formats.tokenizer import MAX_TOKENS, Marks, Tokenizer

# So that chats can be measured too. Names of roles are bytes like all else: random weights heed no marks.
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


def stand_in(folder: str | os.PathLike[str]) -> Tokenizer:
    """As many ids as the config.json of a folder says; what it says that ends an answer does. Warns.

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
    ends = tuple(i for i in folder_eos_ids(Path(folder)) if i < size)
    return Tokenizer(
        ByteTokens(size), Marks(eos_ids=ends, chat_template=TEMPLATE, name=Path(folder).name)
    )
