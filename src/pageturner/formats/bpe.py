"""Byte-level BPE, and the splits that go before it, as data.

Owns the pre-tokenizers that GGUF files name and the byte alphabet of GPT-2. Must not know which
file the tokens came from. The merging itself is the `tokenizers` library's.

The patterns of pre_tokenizers.json are those of llama.cpp (`src/llama-vocab.cpp`,
`llm_tokenizer_bpe`), which took them from the models' own tokenizer.json. They are applied one
after the other, each to the pieces the one before it left; what a pattern does not match is a piece
too. As in llama.cpp, letters beyond ASCII count as upper and as lower case in those of gpt-4o and
tekken, and U+3000 is a space and no sign in those of deepseek-llm; `(?<!\\s)\\s+\\z` finds what its
`\\s+$` does, in linear time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pageturner.errors import EngineFault, refusing
from pageturner.formats.sentencepiece import NORMAL, SPACE, TokenTable
from pageturner.formats.tokenizer import least

# One text at a time needs no thread pool, and the library warns when a process that has one forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True)
class Pre:
    """A pre-tokenizer.

    patterns       regular expressions in Oniguruma's syntax
    ignore_merges  a piece that is a token is taken as it is, whatever the merges would make of it
    add_bos        whether bos is put in front where the file does not say
    """

    patterns: tuple[str, ...]
    ignore_merges: bool
    add_bos: bool


DEFAULT = "default"  # what llama.cpp takes where a file names none
# "kinds": each pre-tokenizer with all of its names. "text" and "names": the pre-tokenizer that a
# vocabulary needs, by the hash of the tokens that it has for this text.
TABLE = json.loads(Path(__file__).with_name("pre_tokenizers.json").read_text(encoding="utf-8"))
PRE_TOKENIZERS = {
    name: Pre(tuple(kind["patterns"]), kind["ignore_merges"], kind["add_bos"])
    for kind in TABLE["kinds"]
    for name in kind["names"]
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's `bytes_to_unicode`, turned round: printable Latin-1 is itself, the rest lies from
    U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in sorted(plain)} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = _byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """The bytes that a byte-level token stands for; a token outside the alphabet stands for
    itself."""
    try:
        return bytes([BYTES[character] for character in text])
    except KeyError:
        return text.encode()


class _Merging:
    """The library's merging, once with the special tokens of a vocabulary and once without them."""

    def __init__(
        self,
        pieces: TokenTable,
        model: BPE,
        split: pre_tokenizers.PreTokenizer,
        normalizer: normalizers.Normalizer | None = None,
    ) -> None:
        self._backends = []
        for special in (pieces.plain, [*pieces.hidden, *pieces.plain]):
            backend = Backend(model)
            backend.pre_tokenizer = split
            if normalizer is not None:
                backend.normalizer = normalizer
            added = [AddedToken(text, normalized=False) for text in special if text]
            backend.add_special_tokens(added)
            self._backends.append(backend)

    def encode(self, parts: list[str], parse_special: bool) -> list[list[int]]:
        """The "fast" call leaves out the offsets and lets other threads run meanwhile."""
        backend = self._backends[parse_special]
        return [part.ids for part in backend.encode_batch_fast(parts, add_special_tokens=False)]


class ByteLevel(TokenTable):
    """Byte-level BPE: a `Codec`. Merges best first, each "left right"."""

    def __init__(
        self, tokens: Sequence[str], kinds: Sequence[int], merges: Iterable[str], pre: Pre
    ) -> None:
        super().__init__(tokens, kinds)
        # these are text, not byte-level
        self._literal = frozenset([*self.hidden.values(), *self.plain.values()])
        vocab = {token: i for i, token in enumerate(tokens)}
        # A byte without a token is dropped, but its neighbours must not merge across it (as in
        # llama.cpp; the library would drop it first): it gets an id behind the vocabulary, which
        # `encode` takes out again.
        homeless = [character for character in BYTES if character not in vocab]
        self._homeless = bytes(BYTES[character] for character in homeless)
        vocab |= {character: self.vocab_size + i for i, character in enumerate(homeless)}
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model = _model(vocab, merges, ignore_merges=pre.ignore_merges)
        self._merging = _Merging(self, model, pre_tokenizers.Sequence([*splits, letters]))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        (ids,) = self._merging.encode([text], parse_special)
        if max(ids, default=0) >= self.vocab_size:
            ids = [i for i in ids if i < self.vocab_size]
        return ids

    def least_tokens(self, text: str) -> int:
        """Each byte with a token is in one, whose text has a character for each of its bytes."""
        size = len(text)
        if self._homeless:
            size = len(text.encode("utf-8", "replace").translate(None, self._homeless))
        return least(size, self.longest)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        literal = (len(self._tokens[i].encode()) for i in self._literal)
        return max(max(map(len, self._tokens), default=1), *literal, 1)

    def token_bytes(self, token: int) -> bytes:
        text = self._tokens[token]
        return text.encode() if token in self._literal else byte_level_bytes(text)


class RawBPE(TokenTable):
    """BPE on the characters of whole lines, spaces written as U+2581, bytes as a last resort: Gemma
    4."""

    def __init__(self, tokens: Sequence[str], kinds: Sequence[int], merges: Iterable[str]) -> None:
        super().__init__(tokens, kinds)
        self._every_byte = len(self.byte_ids()) == 256
        self._lines = {t: i for t, i in self.of_kind(NORMAL).items() if not t.strip("\n")}
        vocab = {token: i for i, token in enumerate(tokens)}
        split = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
        model = _model(vocab, merges, byte_fallback=True)
        self._merging = _Merging(self, model, split, normalizers.Replace(" ", SPACE))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """A run of line ends that is a token is taken as it is; the merges would not always find
        it."""
        parts = re.split(r"(\n+)", text)
        out: list[int] = []
        for part, ids in zip(parts, self._merging.encode(parts, parse_special), strict=True):
            token = self._lines.get(part)
            out += ids if token is None else [token]
        return out

    def least_tokens(self, text: str) -> int:
        return least(len(text), self.longest) if self._every_byte else 0


def _model(vocab: dict[str, int], merges: Iterable[str], **options: bool) -> BPE:
    pairs = []
    with refusing(lambda why: EngineFault("tokenizer_corrupt", f"the tokenizer is broken: {why}")):
        for line in merges:
            space = line.find(" ", 1)
            if space < 0:
                raise ValueError(f"it has the merge {line!r}")
            pairs.append((line[:space], line[space + 1 :]))
        return BPE(vocab, pairs, **options)
