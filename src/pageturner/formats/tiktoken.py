"""Ranks as tiktoken keeps them, a line each, base64 and rank: Llama 3's tokenizer.model, Qwen's
*.tiktoken.

Owns that format and which split goes with which vocabulary: the files do not say. Must not know
what else lies in the folder.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import cached_property

from tokenizers import Regex, pre_tokenizers

from pageturner.errors import EngineFault
from pageturner.formats.bpe import PRE_TOKENIZERS
from pageturner.formats.sentencepiece import Merger, Specials
from pageturner.formats.sentencepiece_model import Added
from pageturner.formats.tokenizer import Found, Marks, least

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_SPLITS = {
    100_256: "llama-bpe",
    128_000: "llama-bpe",
    151_643: "qwen2",
}  # cl100k_base, Llama 3, Qwen
_LLAMA3 = 128_000


def is_ranks(raw: bytes) -> bool:
    """Return whether a file looks like ranks."""
    return _LINE.match(raw) is not None


def read_ranks(raw: bytes, added: Mapping[int, Added]) -> Found:
    """EngineFault: 'tokenizer_corrupt' for a broken file, 'tokenizer_unsupported' for one not known
    here."""
    tokens: list[bytes] = []
    try:
        for line in raw.splitlines():
            text, rank = line.split()
            if int(rank) != len(tokens):
                raise ValueError(f"rank {int(rank)} where {len(tokens)} was due")
            tokens.append(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise EngineFault("tokenizer_corrupt", f"the ranks are broken: {error}") from error
    if len(tokens) not in _SPLITS:
        known = ", ".join(f"{size:,}" for size in _SPLITS)
        message = f"no split is known for a vocabulary of {len(tokens):,} ranks; known: {known}"
        raise EngineFault("tokenizer_unsupported", message)
    if not added and len(tokens) == _LLAMA3:
        added = _llama3_specials()
    codec = Ranks(tokens, added, PRE_TOKENIZERS[_SPLITS[len(tokens)]].patterns)
    ids = {token.text: i for i, token in added.items()}
    special = frozenset(i for i, token in added.items() if token.special)
    bos = ids.get("<|begin_of_text|>")
    ends = [
        ids[text]
        for text in ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>")
        if text in ids
    ]
    marks = Marks(bos_id=bos, eos_ids=tuple(ends), special_ids=special, add_bos=bos is not None)
    return Found(codec, marks, ids.get)


class Ranks:
    """Byte pairs merged lowest rank first: a `Codec`. Bytes are handled as the characters
    U+0000..U+00FF."""

    def __init__(
        self, tokens: list[bytes], added: Mapping[int, Added], patterns: tuple[str, ...]
    ) -> None:
        self._bytes = dict(enumerate(tokens)) | {
            i: token.text.encode() for i, token in added.items()
        }
        self.vocab_size = max(self._bytes, default=-1) + 1
        self._ids = {token.decode("latin-1"): i for i, token in enumerate(tokens)}
        missing = [byte for byte in range(256) if chr(byte) not in self._ids]
        if missing:
            raise EngineFault(
                "tokenizer_corrupt", f"the ranks have no token for the byte {missing[0]}"
            )
        self._merger = Merger(self._ids, range(0, -len(tokens), -1), lambda symbol: [])
        plain = {token.text: i for i, token in added.items() if not token.special}
        self._specials = Specials(plain), Specials({token.text: i for i, token in added.items()})
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        self._split = pre_tokenizers.Sequence(splits)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        out: list[int] = []
        for part in self._specials[parse_special].split(text):
            if isinstance(part, int):
                out.append(part)
                continue
            for word, _ in self._split.pre_tokenize_str(part):
                raw = word.encode().decode("latin-1")
                token = self._ids.get(raw)  # a word that is a token is taken as it is
                out += self._merger.encode(raw) if token is None else [token]
        return out

    def least_tokens(self, text: str) -> int:
        return least(len(text), self._longest)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._bytes.values()), default=1)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")


def _llama3_specials() -> dict[int, Added]:
    """The special tokens of Meta's `llama/tokenizer.py` of Llama 3, for a folder that does not list
    them."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(251)]
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *reserved[:4],
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]
    names += [reserved[4], "<|eot_id|>", *reserved[5:]]
    return {_LLAMA3 + i: Added(name, True, False) for i, name in enumerate(names[:256])}
