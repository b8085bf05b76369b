"""Byte-level BPE, and the splits that go before it, as data.

Owns the pre-tokenizers that GGUF files name and the byte alphabet of GPT-2. Must not know which
file the tokens came from. The merging itself is the `tokenizers` library's.

The patterns are those of llama.cpp (`src/llama-vocab.cpp`, `llm_tokenizer_bpe`), which took them
from the models' own tokenizer.json. They are applied one after the other, each to the pieces the
one before it left; what a pattern does not match is a piece too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    ignore_merges: bool = False
    add_bos: bool = False


_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_QWEN35 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"  # in llama.cpp other letters count as both
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_HEAD}{_UPPER}+{_LOWER}*{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_BLANKS}"
)
_TEKKEN = rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS_SLASH}|{_BLANKS}"
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
    rf"|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_WIDE_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002"  # llama.cpp takes U+3000 for a space only
_CJK3 = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_END_BLANKS = r"(?<!\s)\s+\z"  # `\s+$`, in linear time

# What llama.cpp takes where a file names none.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
DEFAULT = "default"

_KINDS = {
    DEFAULT: Pre(_DEFAULT),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais "
    "trillion granite-docling exaone4": Pre((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Pre((r"\p{N}", _GPT2)),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Pre(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Pre((_LLAMA3,)),
    "glm4 glm5": Pre((_LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2": Pre(
        (_QWEN2,)
    ),
    "qwen35": Pre((_QWEN35,)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Pre((_GPT4O,)),
    "tekken": Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    "bloom gpt3-finnish poro-chat": Pre((_BLOOM,)),
    "viking": Pre((_BLOOM, r"\p{N}")),
    "bailingmoe bailingmoe2 llada-moe": Pre((_BAILING,)),
    "seed-coder": Pre((_SEED,)),
    "deepseek-llm": Pre(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_WIDE_SIGNS}]+",
            _END_BLANKS,
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Pre((r"\p{N}{1,3}", _CJK3, _DEEPSEEK3)),
}
PRE_TOKENIZERS = {name: pre for names, pre in _KINDS.items() for name in names.split()}


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
